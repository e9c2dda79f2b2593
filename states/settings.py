"""What the core is configured by: sizes and bounds, which are fixed for its life, and policies. Plain values."""

from __future__ import annotations

import msgspec

from tidekv.states.components.specs import Component
from tidekv.states.errors import InvalidConfig
from tidekv.states.storage.policy import POLICY_FIELDS, StoragePolicy
from tidekv.states.validation import Count, PositiveCount, Seconds


class CoreSettings(StoragePolicy, frozen=True, kw_only=True):
    """Sizes, bounds and policies of one core. Pages and tokens are counts, durations are seconds."""

    page_size: PositiveCount
    """Tokens a page holds."""
    key_bytes: PositiveCount
    """Bytes of one page's key: its packed tokens in a live run, a digest in a replay."""
    device_pages: PositiveCount
    host_pages: Count = 0
    growth_reserve_pages: Count = 1
    """Device pages that an admitted request holds back for the tokens it will generate."""
    queue_max: PositiveCount = 16384
    """Requests that may wait for admission; the next one is refused."""
    admission_scan_max: PositiveCount = 16
    """Waiting requests looked at when the first of them does not fit."""
    passes_max: Count = 64
    """How often smaller requests may pass one that does not fit before everybody waits for it."""
    ageing_s: Seconds = 5.0
    """Waiting so long weighs as much as one step of priority."""
    fetch_run_pages: PositiveCount = 32
    """Pages of one storage read; each run that has landed starts its copy to the device."""
    copy_run_pages: PositiveCount = 256
    """Pages of one copy between host and device, at most (a single tree node may be longer)."""
    query_deadline_s: Seconds = 1.0
    copy_deadline_s: Seconds = 30.0
    attempts_per_prefill: PositiveCount = 1
    """How often each prefill of a request's list is tried before the request fails."""
    share_transfers: bool = False
    """Requests that have a prefix in common share the transfer of it, before the first of them is READY. Not with
    components.
    """
    share_wait_s: Seconds = 0.25
    """So long a request that waits for another one's transfer alone does so while nothing of it lands."""
    components: tuple[Component, ...] = ()
    """Windows and states that travel beside the KV."""
    keep_output: bool = True
    """False: what decode generated is not kept, only prompts are (a baseline to measure against)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for component in self.components:
            if component.device_pages < component.live_pages(self.page_size):
                raise InvalidConfig(
                    f"component {component.name!r} has {component.device_pages} device pages, one request needs"
                    f" {component.live_pages(self.page_size)}"
                )

    def with_policy(self, policy: StoragePolicy) -> CoreSettings:
        """The same sizes and bounds with other policies."""
        return msgspec.structs.replace(self, **{name: getattr(policy, name) for name in POLICY_FIELDS})

    def pages_of(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens, the last one maybe in part."""
        return -(-tokens // self.page_size)

    def prefetch_deadline_s(self, pages: int, request_s: float = float("inf")) -> float:
        """How long a storage run of `pages` pages of a request, which has `request_s` left, may take."""
        if self.prefetch not in ("timeout", "soonest"):
            return max(request_s / 2, 0.0)
        return self.prefetch_base_s + self.prefetch_per_ki_token_s * pages * self.page_size / 1024
