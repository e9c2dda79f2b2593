"""tidekv: a tiered decode-side KV cache for prefill/decode disaggregated LLM serving."""

from tidekv.backends.device import DevicePool
from tidekv.backends.host import HostPool
from tidekv.backends.layout import KVLayout
from tidekv.backends.storage.uri import open_storage
from tidekv.engine.config import EngineConfig
from tidekv.engine.decode_engine import DecodeEngine
from tidekv.engine.journal import Replayer
from tidekv.engine.prefill_peer import PrefillPeer
from tidekv.engine.values import DecodeRequest, ReadyRequest, RetractedRequest
from tidekv.states.errors import (
    CapacityError,
    EngineClosed,
    InvalidConfig,
    InvalidRequest,
    JournalDamaged,
    JournalRefused,
    OutOfPages,
    ReplayDiverged,
    RequestFailed,
    TidekvError,
)
from tidekv.transports.loopback import LoopbackTransport
from tidekv.transports.nixl import NixlTransport

__all__ = [
    "CapacityError",
    "DecodeEngine",
    "DecodeRequest",
    "DevicePool",
    "EngineClosed",
    "EngineConfig",
    "HostPool",
    "InvalidConfig",
    "InvalidRequest",
    "JournalDamaged",
    "JournalRefused",
    "KVLayout",
    "LoopbackTransport",
    "NixlTransport",
    "OutOfPages",
    "PrefillPeer",
    "ReadyRequest",
    "ReplayDiverged",
    "Replayer",
    "RequestFailed",
    "RetractedRequest",
    "TidekvError",
    "open_storage",
]
