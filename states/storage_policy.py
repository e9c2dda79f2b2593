"""Policies of the storage tier: which pages are fetched and for how long, which are stored, and when calls pause.

Plain values, the same in `EngineConfig.storage` and `CoreSettings`, with which a run begins. The event `PolicyChanged`
replaces them while requests run: calls in flight continue as they began, later ones follow the new values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypedDict

import msgspec

from tidekv.states.errors import InvalidConfig
from tidekv.states.validation import (
    Amount,
    Count,
    Options,
    Seconds,
    SecondsOrZero,
    Share,
    unknown,
)

PrefetchPolicy = Literal["timeout", "best_effort", "wait_complete", "soonest"]
WritePolicy = Literal["through", "selective", "back"]

FETCH_TIMEOUT_MAX_S = 3600.0
"""Maximum seconds within which a storage call may start reads, whatever its deadline."""


class StoragePolicy(Options, frozen=True, kw_only=True):
    """Policies of the storage tier. Pages and tokens are counts, durations are seconds."""

    prefetch: PrefetchPolicy = "soonest"
    """How long a request waits for its fetches; prefill sends what has not come. "timeout": `prefetch_base_s` and
    `prefetch_per_ki_token_s`. "best_effort": until its transfer is done. "wait_complete": until they end. These two at
    most for half of the time that the request has left. "soonest": like "timeout", without what the transfer would
    bring sooner.
    """
    prefetch_threshold_tokens: Count = 256
    """Storage hits shorter than this are not fetched: the transfer brings them."""
    prefetch_base_s: Seconds = 1.0
    """Fixed part of the time that a fetch may take with "timeout" and "soonest"."""
    prefetch_per_ki_token_s: Seconds = 0.25
    """Additional time for each 1,024 tokens of the request's storage run."""
    fetch_pages_in_flight_max: Count = 0
    """Maximum pages read from storage at once, over all requests; prefill sends the rest. 0: no limit."""
    fetch_pages_per_s: Amount = 0.0
    """Maximum rate at which plans fetch pages; one second's worth can be saved up. 0: no limit."""
    fetch_deadline_share: Amount = 1.0
    """A plan fetches the pages that come, at the measured speed, in this share of its time. 0: no limit."""
    lookahead_pages_max: Count = 0
    """Maximum host pages filled from storage for requests that still wait for device memory. 0: none."""
    write: WritePolicy = "through"
    """What is written to host memory and storage. "through": all pages of a finished request. "selective": all to the
    host, to storage those of at least `write_hits_min` prompts. "back": pages about to be evicted, from the device to
    the host, from the host to storage.
    """
    write_hits_min: Count = 2
    """Minimum number of prompts that a page was part of before "selective" stores it."""
    write_tokens_min: Count = 0
    """Prefixes shorter than this are not stored."""
    write_back_ahead: Share = 0.1
    """Share of each pool that "back" keeps free, or evictable without losing data."""
    store_wait_s: SecondsOrZero = 1.0
    """Maximum time for which a write waits until no fetch is in flight."""
    store_fetch_s_max: SecondsOrZero = 0.0
    """Writes wait while fetches take longer than this on average. 0: they do not."""
    renew_s: Seconds = 30.0
    """Minimum time between two notes to storage that a page is in use, so that storage does not evict it; sooner after
    many writes. A page that storage has lost is stored again.
    """
    store_host_share: Share = 0.5
    """Share of the host pool in use up to which writes begin beside others; the rest is for reads."""
    breaker_failures: Count = 8
    """Consecutive failures of queries, fetches or writes after which storage is not called until a probe succeeds.
    0: never.
    """
    breaker_backoff_s: Seconds = 1.0
    """Time until the first probe."""
    breaker_backoff_max_s: Seconds = 30.0
    """Maximum time between probes, which doubles with each."""


class PolicyChanges(TypedDict, total=False):
    """Fields of `StoragePolicy` as keyword arguments, for type checkers."""

    prefetch: PrefetchPolicy
    prefetch_threshold_tokens: Count
    prefetch_base_s: Seconds
    prefetch_per_ki_token_s: Seconds
    fetch_pages_in_flight_max: Count
    fetch_pages_per_s: Amount
    fetch_deadline_share: Amount
    lookahead_pages_max: Count
    write: WritePolicy
    write_hits_min: Count
    write_tokens_min: Count
    write_back_ahead: Share
    store_wait_s: SecondsOrZero
    store_fetch_s_max: SecondsOrZero
    renew_s: Seconds
    store_host_share: Share
    breaker_failures: Count
    breaker_backoff_s: Seconds
    breaker_backoff_max_s: Seconds


POLICY_FIELDS = StoragePolicy.__struct_fields__


def changed_policy(policy: StoragePolicy, changes: Mapping[str, object]) -> StoragePolicy:
    """A copy of the policies with changes. Raises InvalidConfig, which names what is wrong and what is allowed."""
    for name in changes:
        if name not in POLICY_FIELDS:
            raise unknown(name, POLICY_FIELDS, "policy", InvalidConfig)
    return msgspec.structs.replace(policy, **changes)


def policy_of(settings: StoragePolicy) -> StoragePolicy:
    """The policies among the settings of a core or an engine."""
    return StoragePolicy(**{name: getattr(settings, name) for name in POLICY_FIELDS})
