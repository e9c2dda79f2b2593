"""Trace of a request: its waits, the work of each tier and of prefill, and every fallback with its cause.

Folded from the steps of a replay: events are outcomes, commands are requested work, the core has the sharing. All
times are those of the events, in seconds; pages are counted from the first of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

SOURCES = ("l1", "l2", "l3", "peer", "transfer", "recompute")


@dataclass(slots=True)
class Work:
    """One piece of work for a request: a storage query, a fetch, a copy, a put, a span of a room."""

    kind: str
    """"query", "fetch", "peer fetch", "copy", "component fetch", "component copy", "shared component copy", "backup",
    "store", "span" or "recompute".
    """
    first: int
    count: int
    begun_at_s: float
    ended_at_s: float | None = None
    delivered: int = 0
    """Pages delivered."""
    error: str = ""
    """Description of the failure."""
    wasted: int = 0
    """Pages delivered and not used."""
    generation: int = 0
    span: int = 0
    chunks: list[tuple[float, int]] = field(default_factory=list)
    """Time and page count of each received chunk of a span."""
    ahead: bool = False
    """Whether it was fetched ahead of the request's admission."""
    cause: str = ""
    """For a span: why a part of the promise was withdrawn. For a copy of a component: its source. For a fetch from a
    peer: its address.
    """
    component: str = ""
    """The component of the pages."""


@dataclass(slots=True)
class PlanTrace:
    """The plan at the end of MATCH, one for each room."""

    at_s: float
    generation: int
    prefill: int
    l1_pages: int
    l2_pages: int
    l3_pages: int
    shared_pages: int
    """Of them, pages that another request was already loading."""
    promised_tokens: int
    delta_pages: int
    declined_pages: int
    """Pages in storage that were not fetched: host memory was short, or the pages were too few to be worth it."""
    trailing_pages: dict[str, int] = field(default_factory=dict)
    """Pages that prefill was asked for, by component."""
    sent_pages: dict[str, int] = field(default_factory=dict)
    """Pages that prefill was already sending for other requests, by request."""
    sender: str = ""
    """The request with the same prompt whose component pages it is to copy."""
    peer_pages: int = 0
    """Pages that a peer was asked for."""


@dataclass(slots=True)
class FallbackTrace:
    """A deviation from the plan."""

    at_s: float
    cause: str
    consequence: str


@dataclass(frozen=True, slots=True)
class Stall:
    """A stall of decode's event loop: nothing that arrived meanwhile was seen before its end."""

    began_at_s: float
    ended_at_s: float
    where: str
    """`file:line function` that blocked the loop; "" if none was seen."""

    def within(self, from_s: float, until_s: float) -> float:
        """Return its seconds within a period."""
        return max(0.0, min(self.ended_at_s, until_s) - max(self.began_at_s, from_s))


@dataclass(slots=True)
class RequestTrace:
    """One request, from its arrival until it was given back."""

    request_id: str
    request_number: int
    arrived_at_s: float
    prompt_tokens: int
    page_count: int
    namespace: str
    prefills: tuple[str, ...]
    deadline_at_s: float
    states: list[tuple[float, str]] = field(default_factory=list)
    """Time of each change of state."""
    plans: list[PlanTrace] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    fallbacks: list[FallbackTrace] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)
    """Prompt tokens by source, once it is READY."""
    needed_pages: int = 0
    """What the request waited for in PREALLOC, if it did not fit at once."""
    over_quota_of: str = ""
    """The prefill whose quota has delayed it in PREALLOC."""
    gave_way: bool = False
    """Whether that prefill gave way to another one of the request's list."""
    waited_to_run: bool = False
    """Whether it waited in PREALLOC while as many requests ran as may."""
    ended: str = ""
    """"READY", "FAILED", or "" while it is under way."""
    cause: str = ""
    """Cause of a failure, or of a partial outcome (READY with lent pages)."""
    detail: str = ""
    returned_at_s: float | None = None
    """When its lent pages were handed back."""
    given_back_at_s: float | None = None
    given_back: str = ""
    """"finished", "retracted", "dropped"."""
    grown_pages: int = 0
    held_pages: int = 0
    """Pages of a retracted request that are held in host memory."""
    notes: list[tuple[float, str]] = field(default_factory=list)
    """Changes for all requests while this one restored."""
    resumes: RequestTrace | None = None
    """The retracted request that this one resumes."""
    was_ready: bool = False
    """Whether the request failed after it had been READY."""
    stalls: list[Stall] = field(default_factory=list)
    """Stalls of decode's event loop before it became READY or FAILED."""
    attempts: int = 0
    raised: int = 0

    @property
    def ended_at_s(self) -> float | None:
        """Time at which the request became READY or FAILED."""
        return next((at_s for at_s, state in self.states if state in ("READY", "FAILED")), None)

    @property
    def is_partial(self) -> bool:
        """Whether it ended with a part of its prompt in place, in lent pages."""
        return self.ended == "READY" and bool(self.cause)

    def time_in(self, until_s: float) -> dict[str, float]:
        """Return seconds in each state before READY or FAILED, up to `until_s` for a live request."""
        spent: dict[str, float] = {}
        for (at_s, state), (next_s, _) in zip(self.states, [*self.states[1:], (until_s, "")], strict=True):
            if state in ("READY", "FAILED"):
                break
            spent[state] = spent.get(state, 0.0) + next_s - at_s
        return spent

    def note_stalls(self, stalls: Iterable[Stall]) -> None:
        """Keep the stalls that have delayed the request."""
        until_s = float("inf") if self.ended_at_s is None else self.ended_at_s
        self.stalls = [stall for stall in stalls if stall.within(self.arrived_at_s, until_s) > 0.0]

    def stalled_in(self, from_s: float, until_s: float) -> float:
        """Return the seconds of a period in which decode's event loop stood still."""
        return sum(stall.within(from_s, until_s) for stall in self.stalls)

    def stalled_by_state(self, until_s: float) -> dict[str, float]:
        """Return those seconds for each state of `time_in`."""
        spent: dict[str, float] = {}
        for (at_s, state), (next_s, _) in zip(self.states, [*self.states[1:], (until_s, "")], strict=True):
            if state in ("READY", "FAILED"):
                break
            spent[state] = spent.get(state, 0.0) + self.stalled_in(at_s, next_s)
        return spent

    def fall_back(self, at_s: float, cause: str, consequence: str) -> None:
        """Record a fallback."""
        self.fallbacks.append(FallbackTrace(at_s, cause, consequence))
