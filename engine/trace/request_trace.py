"""The story of a request: what it waited for, what each tier and prefill did for it, every fallback with its cause.

Folded from the steps of a replay: events say what happened, commands what was wished, the core who shared what. All
times are those of the events, in seconds; pages are counted from the first of the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SOURCES = ("l1", "l2", "l3", "transfer", "recompute")


@dataclass(slots=True)
class Work:
    """One thing that ran for a request: a question to storage, a fetch, a copy, a put, a span of a room."""

    kind: str
    """"query", "fetch", "copy", "tail fetch", "tail", "backup", "store", "span", "recompute"."""
    first: int
    count: int
    begun_at_s: float
    ended_at_s: float | None = None
    good: int = 0
    """Pages that it brought."""
    trouble: str = ""
    """What went wrong, in words."""
    wasted: int = 0
    """Pages that it brought for nothing."""
    generation: int = 0
    span: int = 0
    chunks: list[tuple[float, int]] = field(default_factory=list)
    """When how many pages of a span landed."""
    ahead: bool = False
    """Whether it was fetched ahead of the request's admission."""
    cause: str = ""
    """Why a part of the promise was taken back, where this is the span for it; whence a tail was copied."""
    component: str = ""
    """Whose pages a tail is of."""


@dataclass(slots=True)
class Plan:
    """What was decided at the end of MATCH, once for each room."""

    at_s: float
    generation: int
    prefill: int
    l1_pages: int
    l2_pages: int
    l3_pages: int
    shared_pages: int
    """Of them, pages that another request was loading already."""
    promised_tokens: int
    delta_pages: int
    declined_pages: int
    """Pages that storage had and that were not fetched: there was no host memory, or too few to be worth it."""
    trailing_pages: dict[str, int] = field(default_factory=dict)
    """Pages that prefill was asked for, by component."""
    sent_pages: dict[str, int] = field(default_factory=dict)
    """Pages that prefill was sending for other requests already, by the request."""


@dataclass(slots=True)
class Fallback:
    """Something went another way than planned."""

    at_s: float
    cause: str
    consequence: str


@dataclass(slots=True)
class RequestTrace:
    """One request, from its arrival until it was given back."""

    request_id: str
    serial: int
    arrived_at_s: float
    prompt_tokens: int
    page_count: int
    namespace: str
    prefill_count: int
    deadline_at_s: float
    states: list[tuple[float, str]] = field(default_factory=list)
    """When it came to which state."""
    plans: list[Plan] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)
    """Prompt tokens by source, once it is READY."""
    needed_pages: int = 0
    """What it waited for in PREALLOC, where it did not fit at once."""
    ended: str = ""
    """"READY", "FAILED", or "" while it is under way."""
    cause: str = ""
    """Of a failure."""
    detail: str = ""
    given_back_at_s: float | None = None
    given_back: str = ""
    """"finished", "retracted", "dropped"."""
    grown_pages: int = 0
    held_pages: int = 0
    """Pages of a retracted request that are held in host memory."""
    notes: list[tuple[float, str]] = field(default_factory=list)
    """What was changed for all requests while this one restored."""
    resumes: RequestTrace | None = None
    """The retracted request that this one goes on from."""
    was_ready: bool = False
    """Whether it failed only after it had been READY."""
    attempts: int = 0
    raised: int = 0

    @property
    def ended_at_s(self) -> float | None:
        """When it was READY or FAILED."""
        return next((at_s for at_s, state in self.states if state in ("READY", "FAILED")), None)

    def time_in(self, until_s: float) -> dict[str, float]:
        """Seconds in each state before READY or FAILED, until `until_s` where it is under way."""
        spent: dict[str, float] = {}
        for (at_s, state), (next_s, _) in zip(self.states, [*self.states[1:], (until_s, "")], strict=True):
            if state in ("READY", "FAILED"):
                break
            spent[state] = spent.get(state, 0.0) + next_s - at_s
        return spent

    def fall_back(self, at_s: float, cause: str, consequence: str) -> None:
        """Note a fallback."""
        self.fallbacks.append(Fallback(at_s, cause, consequence))
