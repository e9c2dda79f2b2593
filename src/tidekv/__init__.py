"""tidekv: a tiered decode-side KV cache for prefill/decode disaggregated LLM serving."""

import importlib
import importlib.metadata
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
    LayersLost,
    LinkClosed,
    LocalProtocolError,
    OutOfMemory,
    OutOfPages,
    PagesDamaged,
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
    __version__: str

    from tidekv.backends.component_pools import ComponentPools
    from tidekv.backends.device.pool import DevicePool
    from tidekv.backends.host.pool import HostPool
    from tidekv.backends.keys.chain import Tokens
    from tidekv.backends.layout import KVLayout, LayerGroup
    from tidekv.backends.page_layout import PageLayout
    from tidekv.backends.storage.base import Storage
    from tidekv.backends.storage.uri import open_storage
    from tidekv.engine.config.engine_config import (
        AdmissionOptions,
        CachePeerOptions,
        EngineConfig,
        HintOptions,
        JournalOptions,
        KVEventsOptions,
        MetricsOptions,
        PeerOptions,
        SharingOptions,
        SnapshotOptions,
        StatusOptions,
        StorageOptions,
    )
    from tidekv.engine.decode.component_pages import LeftComponents, ReadyComponent, StateRecords, WindowPages
    from tidekv.engine.decode.decode_engine import DecodeEngine
    from tidekv.engine.decode.hints import HintOutcome
    from tidekv.engine.decode.values import (
        DecodeRequest,
        DrainOutcome,
        EngineStatistics,
        OfferedPages,
        PoolBalance,
        PromptLookUp,
        ReadyRequest,
        Recompute,
        RecomputeJob,
        RestoredPages,
        RetractedRequest,
    )
    from tidekv.engine.journal import Replayer
    from tidekv.engine.opentelemetry import trace_requests
    from tidekv.engine.prefill.prefill_config import PrefillConfig, PromptStoreSettings
    from tidekv.engine.prefill.prefill_peer import PrefillPeer, PrefillPool
    from tidekv.engine.prompts import PromptDigest, prompt_digest
    from tidekv.engine.ranks.group import RankGroup
    from tidekv.engine.thread.engine_thread import (
        EngineThread,
        Failed,
        Finished,
        LookedUp,
        Offered,
        Restored,
        RestoredInto,
        Retracted,
    )
    from tidekv.engine.thread.prefill_thread import HandedOver, PrefillThread, PrefixRead
    from tidekv.states.commands import Fallback
    from tidekv.states.component_specs import ComponentKind
    from tidekv.states.handover.rank_place import RankPlace
    from tidekv.states.storage_policy import StoragePolicy
    from tidekv.transports.base import Transport
    from tidekv.transports.control.peer_backoff import BackoffLimits
    from tidekv.transports.loopback import LoopbackNetwork, LoopbackTransport
    from tidekv.transports.nixl.transport import ListenOptions, NixlOptions, NixlTransport
    from tidekv.transports.prefill.prefill_room import Room, RoomOutcome
    from tidekv.transports.prefill.room_writer import RoomSettings

__all__ = [
    "AdmissionOptions",
    "BackoffLimits",
    "BrokenInvariant",
    "CachePeerOptions",
    "CapacityError",
    "ComponentKind",
    "ComponentPools",
    "CopyFailed",
    "DecodeEngine",
    "DecodeRequest",
    "DevicePool",
    "DrainOutcome",
    "EngineClosed",
    "EngineConfig",
    "EngineStatistics",
    "EngineThread",
    "Failed",
    "Fallback",
    "Finished",
    "HandedOver",
    "HintOptions",
    "HintOutcome",
    "HostPool",
    "IllegalEvent",
    "InvalidConfig",
    "InvalidRequest",
    "JournalDamaged",
    "JournalOptions",
    "JournalRefused",
    "KVEventsOptions",
    "KVLayout",
    "LayerGroup",
    "LayersLost",
    "LeftComponents",
    "LinkClosed",
    "ListenOptions",
    "LocalProtocolError",
    "LookedUp",
    "LoopbackNetwork",
    "LoopbackTransport",
    "MetricsOptions",
    "NixlOptions",
    "NixlTransport",
    "Offered",
    "OfferedPages",
    "OutOfMemory",
    "OutOfPages",
    "PageLayout",
    "PagesDamaged",
    "PeerMismatch",
    "PeerOptions",
    "PoolBalance",
    "PrefillCause",
    "PrefillConfig",
    "PrefillPeer",
    "PrefillPool",
    "PrefillThread",
    "PrefixRead",
    "PromptDigest",
    "PromptLookUp",
    "PromptStoreSettings",
    "ProtocolError",
    "RankBroken",
    "RankGroup",
    "RankLost",
    "RankPlace",
    "RanksDiverged",
    "ReadyComponent",
    "ReadyRequest",
    "Recompute",
    "RecomputeJob",
    "RemoteProtocolError",
    "ReplayDiverged",
    "Replayer",
    "RequestFailed",
    "Restored",
    "RestoredInto",
    "RestoredPages",
    "Retracted",
    "RetractedRequest",
    "Room",
    "RoomOutcome",
    "RoomSettings",
    "SharingOptions",
    "SnapshotOptions",
    "StateRecords",
    "StatusOptions",
    "Storage",
    "StorageFailed",
    "StorageOptions",
    "StoragePolicy",
    "TidekvError",
    "Tokens",
    "TransferFailed",
    "Transport",
    "WindowPages",
    "__version__",
    "open_storage",
    "prompt_digest",
    "trace_requests",
]

# Imported on first use: torch takes seconds, which `tidekv --help` does not need.
_LATER = {
    "AdmissionOptions": "tidekv.engine.config.engine_config",
    "BackoffLimits": "tidekv.transports.control.peer_backoff",
    "CachePeerOptions": "tidekv.engine.config.engine_config",
    "ComponentKind": "tidekv.states.component_specs",
    "ComponentPools": "tidekv.backends.component_pools",
    "DecodeEngine": "tidekv.engine.decode.decode_engine",
    "DecodeRequest": "tidekv.engine.decode.values",
    "DevicePool": "tidekv.backends.device.pool",
    "DrainOutcome": "tidekv.engine.decode.values",
    "EngineStatistics": "tidekv.engine.decode.values",
    "EngineConfig": "tidekv.engine.config.engine_config",
    "EngineThread": "tidekv.engine.thread.engine_thread",
    "Failed": "tidekv.engine.thread.engine_thread",
    "Fallback": "tidekv.states.commands",
    "Finished": "tidekv.engine.thread.engine_thread",
    "HandedOver": "tidekv.engine.thread.prefill_thread",
    "HintOptions": "tidekv.engine.config.engine_config",
    "HintOutcome": "tidekv.engine.decode.hints",
    "HostPool": "tidekv.backends.host.pool",
    "JournalOptions": "tidekv.engine.config.engine_config",
    "KVEventsOptions": "tidekv.engine.config.engine_config",
    "KVLayout": "tidekv.backends.layout",
    "LayerGroup": "tidekv.backends.layout",
    "LeftComponents": "tidekv.engine.decode.component_pages",
    "LookedUp": "tidekv.engine.thread.engine_thread",
    "LoopbackNetwork": "tidekv.transports.loopback",
    "LoopbackTransport": "tidekv.transports.loopback",
    "MetricsOptions": "tidekv.engine.config.engine_config",
    "ListenOptions": "tidekv.transports.nixl.transport",
    "NixlOptions": "tidekv.transports.nixl.transport",
    "NixlTransport": "tidekv.transports.nixl.transport",
    "Offered": "tidekv.engine.thread.engine_thread",
    "OfferedPages": "tidekv.engine.decode.values",
    "PageLayout": "tidekv.backends.page_layout",
    "PeerOptions": "tidekv.engine.config.engine_config",
    "PoolBalance": "tidekv.engine.decode.values",
    "PrefillConfig": "tidekv.engine.prefill.prefill_config",
    "PrefillPeer": "tidekv.engine.prefill.prefill_peer",
    "PrefillPool": "tidekv.engine.prefill.prefill_peer",
    "PromptDigest": "tidekv.engine.prompts",
    "PromptLookUp": "tidekv.engine.decode.values",
    "PromptStoreSettings": "tidekv.engine.prefill.prefill_config",
    "PrefillThread": "tidekv.engine.thread.prefill_thread",
    "PrefixRead": "tidekv.engine.thread.prefill_thread",
    "RankGroup": "tidekv.engine.ranks.group",
    "RankPlace": "tidekv.states.handover.rank_place",
    "ReadyComponent": "tidekv.engine.decode.component_pages",
    "ReadyRequest": "tidekv.engine.decode.values",
    "Recompute": "tidekv.engine.decode.values",
    "RecomputeJob": "tidekv.engine.decode.values",
    "Replayer": "tidekv.engine.journal",
    "Restored": "tidekv.engine.thread.engine_thread",
    "RestoredInto": "tidekv.engine.thread.engine_thread",
    "RestoredPages": "tidekv.engine.decode.values",
    "Retracted": "tidekv.engine.thread.engine_thread",
    "RetractedRequest": "tidekv.engine.decode.values",
    "Room": "tidekv.transports.prefill.prefill_room",
    "RoomOutcome": "tidekv.transports.prefill.prefill_room",
    "RoomSettings": "tidekv.transports.prefill.room_writer",
    "SharingOptions": "tidekv.engine.config.engine_config",
    "SnapshotOptions": "tidekv.engine.config.engine_config",
    "StateRecords": "tidekv.engine.decode.component_pages",
    "StatusOptions": "tidekv.engine.config.engine_config",
    "Storage": "tidekv.backends.storage.base",
    "StorageOptions": "tidekv.engine.config.engine_config",
    "StoragePolicy": "tidekv.states.storage_policy",
    "Tokens": "tidekv.backends.keys.chain",
    "Transport": "tidekv.transports.base",
    "WindowPages": "tidekv.engine.decode.component_pages",
    "open_storage": "tidekv.backends.storage.uri",
    "prompt_digest": "tidekv.engine.prompts",
    "trace_requests": "tidekv.engine.opentelemetry",
}

# Where logs go is the application's business; without this Python would print warnings by itself.


if not TYPE_CHECKING:  # A type checker that sees `__getattr__` accepts every name, misspelt ones too.

    def __getattr__(name: str) -> object:
        if name == "__version__":
            value: object = importlib.metadata.version("tidekv")
        elif name in _LATER:
            value = getattr(importlib.import_module(_LATER[name]), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
