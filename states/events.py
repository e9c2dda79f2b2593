"""Events: the facts that the core decides by. Past tense, plain values, no tensors, no exceptions.

Every event carries the time at which it was taken (`at_s`, monotonic seconds): the core has no clock. Whatever is not
in an event cannot matter to a decision, which is what makes a run replayable. `op` names the command whose outcome an
event is; an outcome of an operation that the core no longer knows is late, and only counted.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from tidekv.states.storage.policy import StoragePolicy

NO_DEADLINE = float("inf")
"""As `deadline_at_s`. JSON has no word for it: an encoder leaves out this very object, since it is the default."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A fact. Encoded without the fields that have their default."""

    at_s: float


class ComponentLeft(msgspec.Struct, frozen=True, array_like=True):
    """Device pages of one component at positions [first, first + len(pages)) of a request's tokens, to be kept."""

    component: str
    first: int
    pages: tuple[int, ...]


class StoredComponent(msgspec.Struct, frozen=True, array_like=True):
    """Where in a prompt storage has pages of one component: ranges [first, end) of positions, ascending. What two such
    answers have in common is what both can serve.
    """

    component: str
    ranges: tuple[tuple[int, int], ...]


# --- From the embedder ---


class RequestArrived(Event, frozen=True, kw_only=True):
    """A prompt wants its KV on this device. `keys` holds one fixed-width key a full page, the rest of `prompt_tokens`
    is the tail. `serial` is unique in the run and names the request's tokens in commands that outlive it. Its rooms
    are numbered from `generation` on: above every generation that a request of the same id has had before.
    """

    request_id: str
    serial: int
    keys: bytes
    prompt_tokens: int
    namespace: str = ""
    prefill_count: int = 1
    deadline_at_s: float = NO_DEADLINE
    priority: int = 0
    cache: bool = True
    generation: int = 0
    can_recompute: bool = False


class AbortRequested(Event, frozen=True, kw_only=True):
    """The caller no longer wants the request."""

    request_id: str
    cause: str = "aborted"


class GrowthTaken(Event, frozen=True, kw_only=True):
    """The caller took `page_count` pages of a request's reserve for new tokens, and wants `wanted` more at once."""

    request_id: str
    page_count: int
    wanted: int = 0


class FinishRequested(Event, frozen=True, kw_only=True):
    """Generation ended: keep the KV of `tokens` tokens (`keys`: their full pages) and give everything back."""

    request_id: str
    keys: bytes
    tokens: int
    component_pages: tuple[ComponentLeft, ...] = ()
    """What is to be kept of components: a window's trailing pages, a record of the state at the end of a page. They are
    the request's own pages, or those it shares, at their positions.
    """


class RetractRequested(Event, frozen=True, kw_only=True):
    """Memory is needed: move the KV of `tokens` tokens to the host, hold it there, and give the device pages back."""

    request_id: str
    keys: bytes
    tokens: int
    component_pages: tuple[ComponentLeft, ...] = ()
    """See FinishRequested."""


class RetractedDropped(Event, frozen=True, kw_only=True):
    """A retracted request will not be resumed: let go of what it holds in host memory."""

    request_id: str


class FlushRequested(Event, frozen=True, kw_only=True):
    """Forget every unlocked page of these tiers ("l1", "l2"). `call` is echoed in the answer."""

    call: int
    tiers: tuple[str, ...]


class StorageChanged(Event, frozen=True, kw_only=True):
    """A storage engine was attached or is gone. `component_pages`: it holds pages of every component, too; a worker
    with components uses no other.
    """

    available: bool
    component_pages: bool = False


class PolicyChanged(Event, frozen=True, kw_only=True):
    """Storage is to be used in another way from now on; every policy is in it, changed or not."""

    policy: StoragePolicy


class ClockAdvanced(Event, frozen=True, kw_only=True):
    """The time that the core asked to be woken at (`Core.next_deadline_s`) has come."""


# --- Outcomes on this machine ---


class StorageAnswered(Event, frozen=True, kw_only=True):
    """Storage has the first `found` of the requested pages: a hint. An error counts as none. `component_pages` is
    the same for components, if they were requested. For several ranks it is what all of them have: the pages of one
    boundary,
    as far as they are not in the caches.
    """

    op: int
    found: int
    error: str = ""
    component_pages: tuple[StoredComponent, ...] = ()


class PagesFetched(Event, frozen=True, kw_only=True):
    """The first `good` pages of a fetch (FetchPages, FetchTail) are in host memory and verified; nothing writes to any
    of its pages now.
    """

    op: int
    good: int
    error: str = ""


class CopyEnded(Event, frozen=True, kw_only=True):
    """A copy between device and host is over; with an error, its destination holds garbage. Nothing writes there any
    more.
    """

    op: int
    error: str = ""


class PagesStored(Event, frozen=True, kw_only=True):
    """The first `stored` pages of a put are in storage; its source pages are no longer read."""

    op: int
    stored: int
    error: str = ""


class StorageProbed(Event, frozen=True, kw_only=True):
    """Storage can be used again, or, with an error, cannot."""

    op: int
    error: str = ""


class Recomputed(Event, frozen=True, kw_only=True):
    """The caller has computed the rest of the prompt itself, first token included; with an error, it could not."""

    op: int
    error: str = ""


class CommandRaised(Event, frozen=True, kw_only=True):
    """Starting a command raised; nothing was started. `detail` is the traceback."""

    op: int
    detail: str


# --- The hand-over ---


class PromiseSent(Event, frozen=True, kw_only=True):
    """The promise of a room is on its way to `writer` (a peer's instance and epoch), whose `ranks` ranks will write."""

    request_id: str
    generation: int
    writer: str
    ranks: int


class ChunkLanded(Event, frozen=True, kw_only=True):
    """Pages [first, first + count) of the prompt are in place, written by one prefill rank for one span of the room;
    `last` ends the span.
    """

    request_id: str
    generation: int
    rank: int
    span: int
    first: int
    count: int
    last: bool


class AuxLanded(Event, frozen=True, kw_only=True):
    """The first token and what belongs to it came from one prefill rank. The driver keeps the payload."""

    request_id: str
    generation: int
    rank: int


class RoomRefused(Event, frozen=True, kw_only=True):
    """Prefill cannot serve this span of the room any more. Nothing of the span was or will be written."""

    request_id: str
    generation: int
    span: int
    cause: str


class RoomFailed(Event, frozen=True, kw_only=True):
    """The room will not be completed. `settled` says that nobody can write to its pages any more."""

    request_id: str
    generation: int
    cause: str
    settled: bool


class RoomDrained(Event, frozen=True, kw_only=True):
    """One prefill rank has no write of this room in flight and will not start another."""

    request_id: str
    generation: int
    rank: int


class WriterLost(Event, frozen=True, kw_only=True):
    """A peer is out of reach: its rooms fail, but it may still write."""

    writer: str
    cause: str


class WriterDead(Event, frozen=True, kw_only=True):
    """A peer is proven dead and its last bytes have landed: nothing of it can write any more."""

    writer: str


# --- Internal events of the request machine. They follow from those above and are never journalled. ---


class StorageDue(Event, frozen=True, kw_only=True):
    """Storage can be asked what it has of the prompt."""


class Granted(Event, frozen=True, kw_only=True):
    """There is room for the request: match, lock and reserve were done, all or nothing."""


class PlanDue(Event, frozen=True, kw_only=True):
    """All that the plan depends on may be known."""


class Progressed(Event, frozen=True, kw_only=True):
    """Something that the request waited for has come."""


class PagesLost(Event, frozen=True, kw_only=True):
    """Pages that the request was to share belong to another writer now; it starts over on others."""

    cause: str


class PrefillLost(Event, frozen=True, kw_only=True):
    """The request's room will not be completed: prefill refused it, failed, or is out of reach. `settled`: nothing can
    write to its pages any more.
    """

    cause: str
    detail: str
    settled: bool = False


class DeadlinePassed(Event, frozen=True, kw_only=True):
    """The caller's deadline has come."""


class TransitionRaised(Event, frozen=True, kw_only=True):
    """A rule of this request raised; what it has changed can be taken up again, or be given back. `taking` names the
    event that the rule was taking, or the rule if it took none; `rule` the one that raised. `error` is the exception in
    one line, `detail` the traceback.
    """

    taking: str
    rule: str
    error: str
    detail: str


Outcome: TypeAlias = (
    StorageAnswered | PagesFetched | CopyEnded | PagesStored | StorageProbed | Recomputed | CommandRaised
)
"""Events that end an operation of the core."""

AnyEvent = (
    RequestArrived
    | AbortRequested
    | GrowthTaken
    | FinishRequested
    | RetractRequested
    | RetractedDropped
    | FlushRequested
    | StorageChanged
    | PolicyChanged
    | ClockAdvanced
    | StorageAnswered
    | PagesFetched
    | CopyEnded
    | PagesStored
    | StorageProbed
    | Recomputed
    | CommandRaised
    | PromiseSent
    | ChunkLanded
    | AuxLanded
    | RoomRefused
    | RoomFailed
    | RoomDrained
    | WriterLost
    | WriterDead
)
