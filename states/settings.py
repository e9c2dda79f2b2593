"""Settings of the core: sizes and bounds, fixed for its life, and policies. Plain values."""

from __future__ import annotations

from typing import Literal

import msgspec

from tidekv.states.component_specs import Component, SnapshotPolicy
from tidekv.states.errors import InvalidConfig
from tidekv.states.storage_policy import POLICY_FIELDS, StoragePolicy
from tidekv.states.validation import Count, PositiveCount, PositiveShare, Seconds

EvictionName = Literal["lru", "lfu", "slru", "fifo", "priority"]


def computes_rest(tokens: int, *, threshold: int) -> bool:
    """Whether decode computes the tokens of a prompt that its device lacks, rather than asking prefill for them.

    A step that computes so few ends before a transfer of them, and prefill keeps no pages for it.
    """
    return tokens <= threshold


class CoreSettings(StoragePolicy, frozen=True, kw_only=True):
    """Sizes, bounds and policies of one core. Pages and tokens are counts, durations are seconds."""

    page_size: PositiveCount
    """Tokens per page."""
    key_bytes: PositiveCount
    """Bytes of one page's key: packed tokens in a live run, a digest in a replay."""
    device_pages: PositiveCount
    """Size of the device pool."""
    lends_device: bool = False
    """Whether the device pages belong to the embedder, which lends them to each request: the prefix index has none."""
    host_pages: Count = 0
    """Size of the host pool. 0 means no host tier."""
    growth_reserve_pages: Count = 1
    """Device pages that an admitted request holds in reserve for the tokens it will generate. Fewer where it cannot
    use so many: see `reserve_pages`.
    """
    running_max: Count = 0
    """Maximum requests that have left the queue and not ended. Others wait in PREALLOC. 0 means no limit."""
    queue_max: PositiveCount = 16384
    """Maximum number of requests that wait for admission; further ones are refused."""
    admission_scan_max: PositiveCount = 16
    """Maximum number of waiting requests tried for admission if the first of them does not fit."""
    passes_max: Count = 64
    """Maximum number of smaller requests that may pass one that does not fit; after that, all behind it wait."""
    ageing_s: Seconds = 5.0
    """Seconds of waiting that weigh as much as one step of priority."""
    prefill_share: PositiveShare = 1.0
    """Maximum share of the device pool that requests of one prefill may withhold before READY, see
    `tidekv.states.pages.prefill_quota`. 1 means no limit.
    """
    fetch_run_pages: PositiveCount = 32
    """Maximum pages of one storage read, and of one put of pages that pass through host memory. Each run read starts
    its copy to the device when it has arrived.
    """
    copy_run_pages: PositiveCount = 256
    """Maximum pages of one copy between host and device; a single tree node may be longer."""
    query_deadline_s: Seconds = 1.0
    """Seconds until a query to storage counts as failed."""
    copy_deadline_s: Seconds = 30.0
    """Seconds until a copy between host and device counts as failed."""
    peer_wait_s: Seconds = 1.0
    """Maximum seconds in which a peer may send pages of a prompt that a request has named it for."""
    peer_wait_share: PositiveShare = 0.25
    """The same as a share of the time that the request has left."""
    peer_pause_s: Seconds = 5.0
    """Seconds for which a peer is not asked after it was late, or failed."""
    peer_host_share: PositiveShare = 0.25
    """Maximum share of the host pool that peers may write to at once."""
    peer_reads_max: PositiveCount = 16
    """Maximum reads by peers at once."""
    attempts_per_prefill: PositiveCount = 1
    """Attempts per prefill of a request's list before the request fails."""
    retries_late: bool = False
    """Whether a prefill that is only late (`PrefillCause.is_lateness`) is tried beyond these attempts, with growing
    pauses, until the deadline of the request.
    """
    recompute_threshold: Count = 0
    """Tokens of a prompt that a caller that can compute does at once, see `computes_rest`. 0: prefill sends every rest.
    """
    share_transfers: bool = False
    """Whether requests with a common prefix share its transfer before the first of them is READY. With components,
    requests with the same prompt share those of its end as well.
    """
    share_wait_s: Seconds = 0.25
    """Seconds a request waits on another request's stalled transfer before it asks prefill itself."""
    components: tuple[Component, ...] = ()
    """Sliding windows and state snapshots that are transferred and cached beside the full KV."""
    snapshots: SnapshotPolicy = SnapshotPolicy()
    """Where snapshots of recurrent states are kept."""
    eviction: EvictionName = "lru"
    """Order in which cached pages of both tiers are evicted, see `tidekv.states.prefix.policies`."""
    namespace_share: PositiveShare = 1.0
    """Share of the device pool, and of the host pool, above which a namespace loses cached pages first, see
    `tidekv.states.prefix.namespace_shares`. 1 means no limit.
    """
    keep_output: bool = True
    """Whether generated tokens are cached. False caches prompts only, as a baseline for measurements."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lends_device and (self.share_transfers or self.prefill_share < 1):
            raise InvalidConfig(
                "with lent device pages share_transfers must be False, since the embedder's cache shares pages, and"
                " prefill_share 1, since no page is withheld from others"
            )
        if self.recompute_threshold and (self.lends_device or self.components):
            raise InvalidConfig("recompute_threshold must be 0 with lent device pages, and with components")
        for component in self.components:
            if component.device_pages < component.live_pages(self.page_size):
                raise InvalidConfig(
                    f"component {component.name!r} has {component.device_pages} device pages, one request needs"
                    f" {component.live_pages(self.page_size)}"
                )

    def with_policy(self, policy: StoragePolicy) -> CoreSettings:
        """Return a copy with the same sizes and bounds and other policies."""
        return msgspec.structs.replace(self, **{name: getattr(policy, name) for name in POLICY_FIELDS})

    @property
    def prefill_quota_pages(self) -> int | None:
        """Device pages that one prefill may withhold. None means no limit."""
        return int(self.prefill_share * self.device_pages) if self.prefill_share < 1 else None

    def pages_of(self, tokens: int) -> int:
        """Return the number of pages for `tokens` tokens; the last page may be partial."""
        return -(-tokens // self.page_size)

    def reserve_pages(self, *, tokens_max: int, held: int) -> int:
        """Return the pages that a request holds in reserve for growth beside `held` others: `growth_reserve_pages`, but
        no more than it can use.

        `tokens_max`: the tokens that have KV at most, 0 if unknown. A prompt that fills the pool needs no reserve, and
        would wait for one for ever.
        """
        pages_max = min(self.device_pages, self.pages_of(tokens_max)) if tokens_max else self.device_pages
        return max(0, min(self.growth_reserve_pages, pages_max - held))

    def prefetch_deadline_s(self, pages: int, request_s: float = float("inf")) -> float:
        """Return the seconds that a fetch of `pages` pages may take for a request with `request_s` seconds left."""
        if self.prefetch not in ("timeout", "soonest"):
            return max(request_s / 2, 0.0)
        return self.prefetch_base_s + self.prefetch_per_ki_token_s * pages * self.page_size / 1024
