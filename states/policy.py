"""How storage is used: what is fetched and how long for, what is put there, and when it is left alone.

Plain values, the same in `EngineConfig` and `CoreSettings`, where a run begins with them. They can be changed while
requests run, by the event `PolicyChanged`: what is under way goes on as it began, what comes next follows the new ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from tidekv.states.errors import InvalidConfig

PrefetchPolicy = Literal["timeout", "best_effort", "wait_complete", "soonest"]
WritePolicy = Literal["through", "selective", "back"]

FETCH_TIMEOUT_MAX_S = 3600.0
"""No storage call is told to start reads for longer than this."""


class StoragePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Policies of the storage tier. Pages and tokens are counts, durations are seconds."""

    prefetch: PrefetchPolicy = "timeout"
    """How long a request waits for its fetches. "timeout": `prefetch_base_s` and so on. "best_effort": until its
    transfer is done; what has landed by then is used. "wait_complete": until they end. What has not landed is asked of
    prefill. These two are bounded by the request's own deadline: half of what is left of it at the plan. "soonest":
    like "timeout", but what the transfer would bring sooner is not fetched, and whenever the transfer is done while
    fetches are not, it is divided anew who brings the rest.
    """
    prefetch_threshold_tokens: int = 256
    """A storage hit shorter than this is not worth a fetch: the transfer brings it."""
    prefetch_base_s: float = 1.0
    prefetch_per_ki_token_s: float = 0.25
    """A fetch may take `prefetch_base_s` and this much more per 1,024 tokens of the request's storage run."""
    fetch_pages_in_flight_max: int = 0
    """Pages under way from storage at once, over all requests; what goes beyond is promised to nobody and comes from
    prefill. 0: no limit.
    """
    fetch_pages_per_s: float = 0.0
    """Pages that plans may fetch in a second, of which one second's worth can be saved up. 0: no limit."""
    fetch_deadline_share: float = 1.0
    """A plan fetches no more than what, at the pace that storage has shown lately, lands within this share of the time
    that it may take. 0: as much as storage has, however slow it is.
    """
    lookahead_pages_max: int = 0
    """Host pages that requests which wait for device memory may fill from storage ahead of their admission, over all
    of them. 0: none.
    """
    write: WritePolicy = "through"
    """When pages go to host memory and storage. "through": all of a request when it is finished. "selective": its pages
    that were part of at least `write_hits_min` prompts are put in storage, all go to the host. "back": nothing when it
    is finished; what is about to be evicted from the device is copied to the host, and what is about to be evicted from
    there is put in storage.
    """
    write_hits_min: int = 2
    write_tokens_min: int = 0
    """Shorter prefixes are not put in storage."""
    write_back_ahead: float = 0.1
    """With "back": of each pool, so large a share is free, or can be freed without losing anything."""
    put_wait_s: float = 1.0
    """Puts give way to fetches: one waits until no fetch is under way, but no longer than this. 0: it never waits."""
    put_fetch_s_max: float = 0.0
    """While fetches take longer than this on average, puts wait as if one were under way. 0: however long they take."""
    put_host_share: float = 0.5
    """Share of the host pool that may be in use when a put begins beside others: the rest is kept for reads. A put
    beyond it is left out; the next one of the same prefix includes its pages. 1: no bound.
    """
    breaker_failures: int = 8
    """After so many failures or lates of storage in a row it is asked nothing until a probe has succeeded. 0: never."""
    breaker_backoff_s: float = 1.0
    breaker_backoff_max_s: float = 30.0
    """The first probe comes after `breaker_backoff_s`, each further one after twice the time, up to this."""

    def __post_init__(self) -> None:
        self._one_of("prefetch", ("timeout", "best_effort", "wait_complete", "soonest"))
        self._one_of("write", ("through", "selective", "back"))
        for name in (
            "prefetch_threshold_tokens",
            "fetch_pages_in_flight_max",
            "fetch_pages_per_s",
            "fetch_deadline_share",
            "lookahead_pages_max",
            "write_hits_min",
            "write_tokens_min",
            "put_wait_s",
            "put_fetch_s_max",
            "write_back_ahead",
            "put_host_share",
            "breaker_failures",
        ):
            if not getattr(self, name) >= 0:
                raise InvalidConfig(f"{name} must be at least 0, not {getattr(self, name)!r}")
        if not self.write_back_ahead <= 1:
            raise InvalidConfig(f"write_back_ahead must be at most 1, the whole pool, not {self.write_back_ahead!r}")
        if not self.put_host_share <= 1:
            raise InvalidConfig(f"put_host_share must be at most 1, the whole pool, not {self.put_host_share!r}")
        for name in ("prefetch_base_s", "prefetch_per_ki_token_s", "breaker_backoff_s", "breaker_backoff_max_s"):
            if not getattr(self, name) > 0:
                raise InvalidConfig(f"{name} must be more than 0 seconds, not {getattr(self, name)!r}")

    def _one_of(self, name: str, allowed: tuple[str, ...]) -> None:
        if getattr(self, name) not in allowed:
            raise InvalidConfig(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")


POLICY_FIELDS = StoragePolicy.__struct_fields__


def changed_policy(policy: StoragePolicy, changes: Mapping[str, object]) -> StoragePolicy:
    """The same policies with some others. Raises InvalidConfig, which names what is wrong and what is allowed."""
    unknown = sorted(set(changes) - set(POLICY_FIELDS))
    if unknown:
        raise InvalidConfig(f"there is no policy {unknown[0]!r}; there are {', '.join(POLICY_FIELDS)}")
    try:
        return msgspec.convert({**msgspec.to_builtins(policy), **changes}, StoragePolicy)
    except msgspec.ValidationError as error:
        raise InvalidConfig(f"policies {', '.join(sorted(changes))} cannot be used: {error}") from error


def policy_of(settings: StoragePolicy) -> StoragePolicy:
    """The policies among the settings of a core or an engine."""
    return StoragePolicy(**{name: getattr(settings, name) for name in POLICY_FIELDS})
