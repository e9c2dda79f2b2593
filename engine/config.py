"""What a decode engine is configured by."""

from __future__ import annotations

from typing import Literal

from tidekv.backends.page_keys import PageKeys
from tidekv.engine.values import NAMESPACE_MARK
from tidekv.states.components import Component
from tidekv.states.errors import InvalidConfig
from tidekv.states.policy import StoragePolicy
from tidekv.states.settings import CoreSettings


class EngineConfig(StoragePolicy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a decode engine can be told, apart from its pools, storage and transport.

    The policies of storage are those of `StoragePolicy`; `DecodeEngine.change_policy` changes them later.
    """

    model: str = ""
    """The model's fingerprint: both ends of a hand-over, and whoever shares storage, must name the same."""
    vocabulary: int = 0
    """Token ids must be below this; 0: whatever fits in 32 bits."""
    namespace: str = ""
    """What is cached under another namespace (adapter, tenant) is never matched."""
    bigram_keys: bool = False
    """Name pages by pairs of tokens: for draft KV of the EAGLE family, which depends on the token after the page. Both
    ends of a hand-over must say the same, and so must whoever shares storage.
    """
    default_deadline_s: float = 60.0
    """For requests that bring no deadline of their own."""
    growth_reserve_pages: int = 1
    queue_max: int = 16384
    admission_scan_max: int = 16
    passes_max: int = 64
    ageing_s: float = 5.0
    fetch_run_pages: int = 32
    copy_run_pages: int = 256
    query_deadline_s: float = 1.0
    copy_deadline_s: float = 30.0
    store_timeout_s: float = 30.0
    """After this long no further page of one put is started."""
    attempts_per_prefill: int = 1
    keep_output: bool = True
    share_transfers: bool = True
    share_wait_s: float = 0.25
    lease_s: float = 10.0
    heartbeat_s: float = 0.5
    peer_silence_s: float = 2.0
    """A peer that was silent for so long is out of reach: its rooms fail, its pages stay in the quarantine."""
    journal: str | None = None
    """A file that every event is written to, or a directory that gets a file for each run; None: no journal. What an
    earlier run left in the file is moved aside, to `NAME.previous`.
    """
    journal_tokens: bool = False
    """Write pages as their tokens and not as keyed digests. A journal with tokens tells what users wrote."""
    journal_segment_bytes: int = 0
    """The journal goes on in a new file whenever one has this size; 0: one file."""
    journal_segments_max: int = 0
    """So many of the newest files are kept; 0: all. A journal whose first file was deleted cannot be replayed."""
    metrics_listen: str | None = None
    """host:port at which Prometheus may scrape (port 0: any, told by `DecodeEngine.metrics_address`); None: nothing is
    counted.
    """
    kv_events: str | None = None
    """ZMQ endpoint, such as tcp://*:5557, at which routers hear what is cached here; None: nothing is told. Needs the
    extra `events`.
    """
    kv_events_replay: str | None = None
    """ZMQ endpoint at which routers ask for batches that they missed; None: there is none."""
    kv_events_topic: str = ""
    """What batches are published under: the first frame of each."""
    kv_events_kept_batches: int = 10_000
    """So many of the newest batches can be asked for again."""
    kv_events_encoding: Literal["map", "array"] = "map"
    """How events are written. "map": as vLLM and SGLang do now; "array": fields in order, for older consumers."""
    close_deadline_s: float = 10.0
    hold_up_limit_s: float = 0.05
    """A callback that holds the event loop up for longer than this, while there is work, is reported with its stack."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (
            "default_deadline_s",
            "lease_s",
            "heartbeat_s",
            "peer_silence_s",
            "close_deadline_s",
            "hold_up_limit_s",
        ):
            if not getattr(self, name) > 0:
                raise InvalidConfig(f"{name} must be more than 0 seconds, not {getattr(self, name)!r}")
        for name in ("journal_segment_bytes", "journal_segments_max"):
            if getattr(self, name) < 0:
                raise InvalidConfig(f"{name} must be 0 (no limit) or more, not {getattr(self, name)!r}")
        if self.kv_events_kept_batches < 1:
            raise InvalidConfig(f"kv_events_kept_batches must be at least 1, not {self.kv_events_kept_batches!r}")
        if self.kv_events_encoding not in ("map", "array"):
            raise InvalidConfig(f"kv_events_encoding must be map or array, not {self.kv_events_encoding!r}")
        if NAMESPACE_MARK in self.namespace:
            raise InvalidConfig(f"namespace must not hold {NAMESPACE_MARK!r}: {self.namespace!r}")
        if self.vocabulary < 0:
            raise InvalidConfig(f"vocabulary must be 0 (no limit) or a count of token ids, not {self.vocabulary!r}")

    def page_keys(self, page_size: int) -> PageKeys:
        """How the core and storage know pages of this size."""
        return PageKeys(page_size, bigrams=self.bigram_keys)

    def core_settings(
        self, *, page_size: int, device_pages: int, host_pages: int, components: tuple[Component, ...] = ()
    ) -> CoreSettings:
        """The part of it that decides."""
        shared = {name: getattr(self, name) for name in CoreSettings.__struct_fields__ if hasattr(self, name)}
        return CoreSettings(
            page_size=page_size,
            key_bytes=self.page_keys(page_size).key_bytes,
            device_pages=device_pages,
            host_pages=host_pages,
            components=components,
            **shared,
        )
