"""tidekv: a tiered decode-side KV cache for prefill/decode disaggregated LLM serving."""

import importlib
import logging
from typing import TYPE_CHECKING

from tidekv.states.errors import (
    BrokenInvariant,
    CapacityError,
    CopyFailed,
    EngineClosed,
    IllegalEvent,
    InvalidConfig,
    InvalidRequest,
    JournalDamaged,
    JournalRefused,
    LinkClosed,
    LocalProtocolError,
    OutOfMemory,
    OutOfPages,
    PeerMismatch,
    PrefillCause,
    ProtocolError,
    RankBroken,
    RankLost,
    RanksDiverged,
    RemoteProtocolError,
    ReplayDiverged,
    RequestFailed,
    StorageFailed,
    TidekvError,
    TransferFailed,
)

if TYPE_CHECKING:
    from tidekv.backends.component_pools import ComponentPools
    from tidekv.backends.device.pool import DevicePool
    from tidekv.backends.host.pool import HostPool
    from tidekv.backends.layout import KVLayout
    from tidekv.backends.page_layout import PageLayout
    from tidekv.backends.storage.uri import open_storage
    from tidekv.engine.config.engine_config import (
        AdmissionOptions,
        EngineConfig,
        JournalOptions,
        KVEventsOptions,
        MetricsOptions,
        PeerOptions,
        SharingOptions,
        StorageOptions,
    )
    from tidekv.engine.decode.component_pages import ReadyComponent, WindowPages
    from tidekv.engine.decode.decode_engine import DecodeEngine
    from tidekv.engine.decode.values import DecodeRequest, ReadyRequest, RetractedRequest
    from tidekv.engine.journal import Replayer
    from tidekv.engine.prefill.prefill_peer import PrefillPeer
    from tidekv.engine.ranks.group import RankGroup
    from tidekv.engine.thread.engine_thread import EngineThread, Failed, Finished, Restored, Retracted
    from tidekv.engine.trace.spans import trace_requests
    from tidekv.states.storage.policy import StoragePolicy
    from tidekv.transports.loopback import LoopbackTransport
    from tidekv.transports.nixl.transport import NixlTransport

__all__ = [
    "AdmissionOptions",
    "BrokenInvariant",
    "CapacityError",
    "ComponentPools",
    "CopyFailed",
    "DecodeEngine",
    "DecodeRequest",
    "DevicePool",
    "EngineClosed",
    "EngineConfig",
    "EngineThread",
    "Failed",
    "Finished",
    "HostPool",
    "IllegalEvent",
    "InvalidConfig",
    "InvalidRequest",
    "JournalDamaged",
    "JournalOptions",
    "JournalRefused",
    "KVEventsOptions",
    "KVLayout",
    "LinkClosed",
    "LocalProtocolError",
    "LoopbackTransport",
    "MetricsOptions",
    "NixlTransport",
    "OutOfMemory",
    "OutOfPages",
    "PageLayout",
    "PeerMismatch",
    "PeerOptions",
    "PrefillCause",
    "PrefillPeer",
    "ProtocolError",
    "RankBroken",
    "RankGroup",
    "RankLost",
    "RanksDiverged",
    "ReadyComponent",
    "ReadyRequest",
    "RemoteProtocolError",
    "ReplayDiverged",
    "Replayer",
    "RequestFailed",
    "Restored",
    "Retracted",
    "RetractedRequest",
    "SharingOptions",
    "StorageFailed",
    "StorageOptions",
    "StoragePolicy",
    "TidekvError",
    "TransferFailed",
    "WindowPages",
    "open_storage",
    "trace_requests",
]

# Imported on first use: torch takes seconds, which `tidekv --help` does not need.
_LATER = {
    "AdmissionOptions": "tidekv.engine.config.engine_config",
    "ComponentPools": "tidekv.backends.component_pools",
    "DecodeEngine": "tidekv.engine.decode.decode_engine",
    "DecodeRequest": "tidekv.engine.decode.values",
    "DevicePool": "tidekv.backends.device.pool",
    "EngineConfig": "tidekv.engine.config.engine_config",
    "EngineThread": "tidekv.engine.thread.engine_thread",
    "Failed": "tidekv.engine.thread.engine_thread",
    "Finished": "tidekv.engine.thread.engine_thread",
    "HostPool": "tidekv.backends.host.pool",
    "JournalOptions": "tidekv.engine.config.engine_config",
    "KVEventsOptions": "tidekv.engine.config.engine_config",
    "KVLayout": "tidekv.backends.layout",
    "LoopbackTransport": "tidekv.transports.loopback",
    "MetricsOptions": "tidekv.engine.config.engine_config",
    "NixlTransport": "tidekv.transports.nixl.transport",
    "PageLayout": "tidekv.backends.page_layout",
    "PeerOptions": "tidekv.engine.config.engine_config",
    "PrefillPeer": "tidekv.engine.prefill.prefill_peer",
    "RankGroup": "tidekv.engine.ranks.group",
    "ReadyRequest": "tidekv.engine.decode.values",
    "ReadyComponent": "tidekv.engine.decode.component_pages",
    "Replayer": "tidekv.engine.journal",
    "Restored": "tidekv.engine.thread.engine_thread",
    "Retracted": "tidekv.engine.thread.engine_thread",
    "RetractedRequest": "tidekv.engine.decode.values",
    "SharingOptions": "tidekv.engine.config.engine_config",
    "StorageOptions": "tidekv.engine.config.engine_config",
    "StoragePolicy": "tidekv.states.storage.policy",
    "WindowPages": "tidekv.engine.decode.component_pages",
    "open_storage": "tidekv.backends.storage.uri",
    "trace_requests": "tidekv.engine.trace.spans",
}

# Where logs go is the application's business; without this Python would print warnings by itself.
logging.getLogger("tidekv").addHandler(logging.NullHandler())


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_LATER[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
