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
    from tidekv.backends.device import DevicePool
    from tidekv.backends.host import HostPool
    from tidekv.backends.layout import KVLayout
    from tidekv.backends.page_layout import PageLayout
    from tidekv.backends.storage.uri import open_storage
    from tidekv.engine.config import (
        AdmissionOptions,
        EngineConfig,
        JournalOptions,
        KVEventsOptions,
        MetricsOptions,
        PeerOptions,
        SharingOptions,
        StorageOptions,
    )
    from tidekv.engine.decode_engine import DecodeEngine
    from tidekv.engine.engine_thread import EngineThread, Failed, Finished, Restored, Retracted
    from tidekv.engine.journal import Replayer
    from tidekv.engine.prefill_peer import PrefillPeer
    from tidekv.engine.rank_group import RankGroup
    from tidekv.engine.tails import ReadyTail, WindowPages
    from tidekv.engine.tracing import trace_requests
    from tidekv.engine.values import DecodeRequest, ReadyRequest, RetractedRequest
    from tidekv.states.policy import StoragePolicy
    from tidekv.transports.loopback import LoopbackTransport
    from tidekv.transports.nixl import NixlTransport

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
    "ReadyRequest",
    "ReadyTail",
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
    "AdmissionOptions": "tidekv.engine.config",
    "ComponentPools": "tidekv.backends.component_pools",
    "DecodeEngine": "tidekv.engine.decode_engine",
    "DecodeRequest": "tidekv.engine.values",
    "DevicePool": "tidekv.backends.device",
    "EngineConfig": "tidekv.engine.config",
    "EngineThread": "tidekv.engine.engine_thread",
    "Failed": "tidekv.engine.engine_thread",
    "Finished": "tidekv.engine.engine_thread",
    "HostPool": "tidekv.backends.host",
    "JournalOptions": "tidekv.engine.config",
    "KVEventsOptions": "tidekv.engine.config",
    "KVLayout": "tidekv.backends.layout",
    "LoopbackTransport": "tidekv.transports.loopback",
    "MetricsOptions": "tidekv.engine.config",
    "NixlTransport": "tidekv.transports.nixl",
    "PageLayout": "tidekv.backends.page_layout",
    "PeerOptions": "tidekv.engine.config",
    "PrefillPeer": "tidekv.engine.prefill_peer",
    "RankGroup": "tidekv.engine.rank_group",
    "ReadyRequest": "tidekv.engine.values",
    "ReadyTail": "tidekv.engine.tails",
    "Replayer": "tidekv.engine.journal",
    "Restored": "tidekv.engine.engine_thread",
    "Retracted": "tidekv.engine.engine_thread",
    "RetractedRequest": "tidekv.engine.values",
    "SharingOptions": "tidekv.engine.config",
    "StorageOptions": "tidekv.engine.config",
    "StoragePolicy": "tidekv.states.policy",
    "WindowPages": "tidekv.engine.tails",
    "open_storage": "tidekv.backends.storage.uri",
    "trace_requests": "tidekv.engine.tracing",
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
