"""Settings of a prefill worker's end of the hand-over."""

from __future__ import annotations

from tidekv.states.errors import InvalidConfig
from tidekv.states.handover.rank_place import SOLE, RankPlace
from tidekv.states.validation import Count, Options, PositiveCount, Seconds, Text, check_fields, host_and_port
from tidekv.transports.prefill.room_writer import RoomSettings


class PromptStoreSettings(Options, frozen=True, kw_only=True):
    """Bounds of what a prefill worker writes to storage. Raises InvalidConfig."""

    batch_pages: PositiveCount = 32
    """Maximum pages of one put of pages that host memory cannot keep."""
    rooms_max: PositiveCount = 64
    """Maximum prompts being stored at once; further ones are not stored."""
    hold_s: Seconds = 1.0
    """Maximum time for which a room lends pages that wait for room in host memory, or for storage; those whose copy has
    not begun by then are not stored.
    """
    put_timeout_s: Seconds = 30.0
    """Maximum time of one put."""
    breaker_failures: Count = 8
    """Consecutive failures of storage after which nothing is stored until a probe succeeds. 0 disables the breaker."""
    breaker_backoff_s: Seconds = 1.0
    """Time until the first probe, if a call has succeeded since the last probe."""
    breaker_backoff_max_s: Seconds = 30.0
    """Maximum time between probes: each waits twice as long as the one before, up to this, until a call succeeds."""
    close_wait_s: Seconds = 2.0
    """Maximum time that closing waits for prompts being stored, before it ends the engine that stores them."""


class PrefillConfig(Options, frozen=True, kw_only=True):
    """Settings of a `PrefillPeer`. Raises InvalidConfig."""

    listen: Text = "127.0.0.1:0"
    """host:port at which decode workers dial this peer; with port 0 the system chooses, see `PrefillPeer.address`."""
    model: Text = ""
    """Name of the model, which must be that of the decode workers' `EngineConfig`."""
    lease_s: Seconds = 10.0
    """Maximum time for which a room is kept without a sign of life of its decode worker."""
    rooms_max: PositiveCount = 4096
    """Maximum open rooms. Further ones wait until others end, at most three times as many; beyond that they are
    refused. The room of a prompt that is asked for (`PrefillPeer.room`) opens at once.
    """
    rooms: RoomSettings = RoomSettings()
    """Limits of the writes of each room."""
    store: PromptStoreSettings = PromptStoreSettings()
    """Bounds of what is written to storage, if the peer has one."""
    close_deadline_s: Seconds = 5.0
    """Time that leaving the block waits for writes in flight before it closes the transport under them."""
    bigram_keys: bool = False
    """Must equal the same option of the decode workers' `EngineConfig`."""
    metrics_listen: Text | None = None
    """host:port at which Prometheus scrapes this peer; with port 0 the system chooses, see
    `PrefillPeer.metrics_address`. None disables metrics.
    """
    place: RankPlace = SOLE
    """Place of this peer among the ranks of a prefill instance, each of which has a peer of its own. Decode workers
    list them in order (`DecodeRequest(prefill="host:7000,host:7001")`). A decode instance may have another number of
    ranks: each pair of ranks exchanges the heads that both hold. A room opens on every prefill rank once all ranks of
    the decode instance have sent the same promise. Several contexts exclude storage.
    """
    vocabulary: Count = 0
    """Number of token ids of the model, to check first tokens where they are given; 0: not checked."""
    loop_stall_report_s: Seconds = 0.25
    """A callback that keeps the loop for longer while rooms are open is logged with its place, since decode takes a
    peer whose loop does not turn for a silent one; `tidekv_prefill_loop_lag_seconds` has the distribution.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self.place, InvalidConfig)
        if self.metrics_listen is not None:
            host_and_port(self.metrics_listen, "metrics_listen", InvalidConfig, any_port=True)
