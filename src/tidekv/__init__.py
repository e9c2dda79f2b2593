"""tidekv: a tiered decode-side KV cache for prefill/decode disaggregated LLM serving."""

import importlib
import logging
from typing import TYPE_CHECKING

from tidekv.states.errors import (
    CapacityError,
    EngineClosed,
    InvalidConfig,
    InvalidRequest,
    JournalDamaged,
    JournalRefused,
    OutOfPages,
    PrefillCause,
    RankBroken,
    RankLost,
    RanksDiverged,
    ReplayDiverged,
    RequestFailed,
    TidekvError,
)

if TYPE_CHECKING:
    from tidekv.backends.component_pools import ComponentPools
    from tidekv.backends.device import DevicePool
    from tidekv.backends.host import HostPool
    from tidekv.backends.layout import KVLayout
    from tidekv.backends.page_layout import PageLayout
    from tidekv.backends.storage.uri import open_storage
    from tidekv.engine.config import EngineConfig
    from tidekv.engine.decode_engine import DecodeEngine
    from tidekv.engine.engine_thread import EngineThread, Failed, Finished, Restored, Retracted
    from tidekv.engine.journal import Replayer
    from tidekv.engine.prefill_peer import PrefillPeer
    from tidekv.engine.rank_group import RankGroup
    from tidekv.engine.tails import ReadyTail, WindowPages
    from tidekv.engine.tracing import trace_requests
    from tidekv.engine.values import DecodeRequest, ReadyRequest, RetractedRequest
    from tidekv.transports.loopback import LoopbackTransport
    from tidekv.transports.nixl import NixlTransport

__all__ = [
    "CapacityError",
    "ComponentPools",
    "DecodeEngine",
    "DecodeRequest",
    "DevicePool",
    "EngineClosed",
    "EngineConfig",
    "EngineThread",
    "Failed",
    "Finished",
    "HostPool",
    "InvalidConfig",
    "InvalidRequest",
    "JournalDamaged",
    "JournalRefused",
    "KVLayout",
    "LoopbackTransport",
    "NixlTransport",
    "OutOfPages",
    "PageLayout",
    "PrefillCause",
    "PrefillPeer",
    "RankBroken",
    "RankGroup",
    "RankLost",
    "RanksDiverged",
    "ReadyRequest",
    "ReadyTail",
    "ReplayDiverged",
    "Replayer",
    "RequestFailed",
    "Restored",
    "Retracted",
    "RetractedRequest",
    "TidekvError",
    "WindowPages",
    "open_storage",
    "trace_requests",
]

# Imported when they are first asked for: torch takes seconds, which whoever only reads a help text need not wait for.
_LATER = {
    "ComponentPools": "tidekv.backends.component_pools",
    "DecodeEngine": "tidekv.engine.decode_engine",
    "DecodeRequest": "tidekv.engine.values",
    "DevicePool": "tidekv.backends.device",
    "EngineConfig": "tidekv.engine.config",
    "EngineThread": "tidekv.engine.engine_thread",
    "Failed": "tidekv.engine.engine_thread",
    "Finished": "tidekv.engine.engine_thread",
    "HostPool": "tidekv.backends.host",
    "KVLayout": "tidekv.backends.layout",
    "LoopbackTransport": "tidekv.transports.loopback",
    "NixlTransport": "tidekv.transports.nixl",
    "PageLayout": "tidekv.backends.page_layout",
    "PrefillPeer": "tidekv.engine.prefill_peer",
    "RankGroup": "tidekv.engine.rank_group",
    "ReadyRequest": "tidekv.engine.values",
    "ReadyTail": "tidekv.engine.tails",
    "Replayer": "tidekv.engine.journal",
    "Restored": "tidekv.engine.engine_thread",
    "Retracted": "tidekv.engine.engine_thread",
    "RetractedRequest": "tidekv.engine.values",
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
