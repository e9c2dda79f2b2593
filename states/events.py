"""Events: the inputs of the core. Facts in the past tense, as plain values without tensors or exceptions.

Every event carries the time at which it was taken (`at_s`, monotonic seconds), since the core has no clock. Decisions
depend on events only, so a run can be replayed from them. `op` is the number of the command whose outcome an event
reports; the core counts an outcome of an unknown operation as late and ignores it otherwise.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from tidekv.states.storage_policy import StoragePolicy

NO_DEADLINE = float("inf")
"""No deadline, for `deadline_at_s`."""
NOBODY: Final = ("",)
"""`prefills` of a request that names none: nothing sends what its tiers and peers do not bring."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """A fact. Encoded as its name and the values of its fields, in order."""

    at_s: float


class ComponentLeft(msgspec.Struct, frozen=True, array_like=True):
    """Device pages of one component to keep, at positions [first, first + len(pages)) of a request's tokens."""

    component: str
    first: int
    pages: tuple[int, ...]


class StoredComponent(msgspec.Struct, frozen=True, array_like=True):
    """The positions of a prompt at which storage has pages of one component: ascending ranges [first, end).

    For several ranks, the usable positions are the intersection of their answers.
    """

    component: str
    ranges: tuple[tuple[int, int], ...]


class FoundRun(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive pages of a prompt that an earlier process left in host pages, one key each.

    `after` is the host page with the page before them, the last one of an earlier run; -1 at the beginning of a prompt,
    whose namespace `namespace` is.
    """

    after: int
    keys: bytes
    pages: tuple[int, ...]
    namespace: str = ""


class FoundComponent(msgspec.Struct, frozen=True, array_like=True):
    """A host page of a component that an earlier process left, at the position of the full host page `beside`."""

    component: str
    beside: int
    page: int


# --- From the embedder ---


class HostPagesFound(Event, frozen=True, kw_only=True):
    """Host memory has pages of an earlier process. Least recently written first; the core has taken no other event."""

    runs: tuple[FoundRun, ...]
    component_pages: tuple[FoundComponent, ...] = ()


class RequestArrived(Event, frozen=True, kw_only=True):
    """A request for the KV of a prompt on this device.

    `keys` holds one fixed-width key per full page; the remaining tokens of `prompt_tokens` are the partial last page.
    With components `rest` has these tokens, packed, unless their KV depends on further ones: then it is empty.
    `request_number` is unique in the run and names the request's tokens in commands that outlive it. `prefills` names
    the prefill instances that may serve it, in the order in which they are tried; two requests with the same name share
    the quota of that instance. Generations of its rooms start at `generation`, which is above those of earlier requests
    with the same id. If device pages are lent, `lent_pages` are the embedder's, one for each page of the
    prompt, and `lent_components` has those of each component, for the last positions of the prompt: one for each that
    its end needs. Pages at the first `held_pages` positions hold the prompt already, in every group; they are not lent,
    and are not touched.
    """

    request_id: str
    request_number: int
    keys: bytes
    prompt_tokens: int
    namespace: str = ""
    prefills: tuple[str, ...] = ("prefill",)
    deadline_at_s: float = NO_DEADLINE
    priority: int = 0
    cache: bool = True
    generation: int = 0
    can_recompute: bool = False
    lent_pages: tuple[int, ...] = ()
    held_pages: int = 0
    early: bool = False
    """Whether the caller begins with the first layer, and waits for each further one (`ReportEarly`)."""
    rest: bytes = b""
    tokens_max: int = 0
    """Tokens of the prompt and of its output that will have KV at most. 0: unknown."""
    lent_components: dict[str, tuple[int, ...]] = {}
    peers: tuple[str, ...] = ()
    """Decode workers that may have the prompt in their host memory, in the order in which they are asked."""
    peers_refused: tuple[str, ...] = ()
    """Why peers that hints of the request named are not among them. No decision depends on it."""


class AbortRequested(Event, frozen=True, kw_only=True):
    """The caller no longer wants the request."""

    request_id: str
    cause: str = "aborted"


class RequestChanged(Event, frozen=True, kw_only=True):
    """The caller gave a request that is not READY another priority, or another deadline. None leaves a value as it is.

    The place in the queue follows at once. Steps under way continue with the time that they were given.
    """

    request_id: str
    priority: int | None = None
    deadline_at_s: float | None = None


class GrowthTaken(Event, frozen=True, kw_only=True):
    """The caller took `page_count` pages of a request's reserve for new tokens and needs `wanted` more at once."""

    request_id: str
    page_count: int
    wanted: int = 0


class FinishRequested(Event, frozen=True, kw_only=True):
    """Generation ended. The KV of `tokens` tokens is kept under `keys`, the keys of their full pages."""

    request_id: str
    keys: bytes
    tokens: int
    component_pages: tuple[ComponentLeft, ...] = ()
    """Component pages to keep: the last pages of a window, a record of the state at the end of a page. They are pages
    that the request owns or shares, at these positions.
    """


class RetractRequested(Event, frozen=True, kw_only=True):
    """The caller needs memory. The KV of `tokens` tokens is held in host memory, and the device pages are freed."""

    request_id: str
    keys: bytes
    tokens: int
    component_pages: tuple[ComponentLeft, ...] = ()
    """See FinishRequested."""


class RetractedDropped(Event, frozen=True, kw_only=True):
    """A retracted request will not be resumed. Its pages in host memory are released."""

    request_id: str


class PagesOffered(Event, frozen=True, kw_only=True):
    """The embedder offers device pages of its own: they hold the last pages of `keys`, and do not change meanwhile.

    `keys` are those of full pages from the first one on. `offered_components` has, by component, all pages that a
    computation which continues behind them needs, or the last of them. Pages that cannot stay in host memory wait at
    most `hold_s` for the copy by which they pass through it. ReportOffered returns `offer`. With ranks, `content` names
    the offer on all of them.
    """

    offer: int
    keys: bytes
    pages: tuple[int, ...]
    namespace: str = ""
    content: str = ""
    offered_components: dict[str, tuple[int, ...]] = {}
    hold_s: float = 1.0


class FlushRequested(Event, frozen=True, kw_only=True):
    """The caller flushed these tiers ("l1", "l2"): unlocked pages are dropped. ReportFlushed returns `call`.

    With `namespace`, only the pages of that one; with "l3" among the tiers, they count as not stored from now on.
    """

    call: int
    tiers: tuple[str, ...]
    namespace: str | None = None


class StoreRequested(Event, frozen=True, kw_only=True):
    """This worker is about to go away: what storage lacks of all cached pages is stored, at most for `within_s`; or,
    with `to`, the address of another decode worker, what that one lacks is handed over.

    It ends the run of an earlier one; with 0 it does nothing else. `goes_on`: the run of an earlier one to the same
    worker goes on, which has what that one found there. ReportStored returns `call`.
    """

    call: int
    within_s: float
    to: str = ""
    goes_on: bool = False


class HintReceived(Event, frozen=True, kw_only=True):
    """An orchestrator advises something about a prefix: "prefetch", "demote", "pin", "unpin" or "retain"; or the decode
    worker at `peer`, which goes away, hands it over: "take".

    `keys` name its full pages. `tier` is the lowest tier that a demotion goes to: "host" or "storage". A pin, and the
    reads of a prefetch or of a prompt that is taken, end `ttl_s` later. All pins together hold `pages_max` host pages
    at most. `heat` is that of the prompt at `peer`: uses of its cache since the prompt was used, and since it was
    inserted, hits, priority. ReportHinted returns `call`.
    """

    call: int
    action: str
    namespace: str
    keys: bytes
    tier: str = "host"
    ttl_s: float = 0.0
    pages_max: int = 0
    peer: str = ""
    heat: tuple[int, int, int, int] = (0, 0, 0, 0)


class ShareRequested(Event, frozen=True, kw_only=True):
    """Another decode worker asks for the host pages of a prefix, of which `keys` name the full pages.

    `read` names the read: with ranks it is the same on all of them, while each has a `call` of its own. All shares
    together hold `pages_max` host pages at most. ReportHinted returns `call`, after SharePages if pages are shared.
    """

    call: int
    read: str
    namespace: str
    keys: bytes
    pages_max: int


class StorageChanged(Event, frozen=True, kw_only=True):
    """A storage engine was attached or detached.

    `component_pages` means that it stores pages of components as well. `capacity_pages` is the number of full pages
    that it can hold; 0 means unknown.
    """

    available: bool
    component_pages: bool = False
    capacity_pages: int = 0


class PolicyChanged(Event, frozen=True, kw_only=True):
    """The storage policies have changed. `policy` has all of them, changed or not."""

    policy: StoragePolicy


class ClockAdvanced(Event, frozen=True, kw_only=True):
    """The deadline returned by `Core.next_deadline_s` has passed."""


# --- Outcomes on this machine ---


class StorageAnswered(Event, frozen=True, kw_only=True):
    """Storage has the first `found` of the requested pages. This is a hint; an error counts as no pages.

    `component_pages` is the answer for components, if they were requested. With several ranks it is what all ranks
    have, the pages in their caches included.
    """

    op: int
    found: int
    error: str = ""
    component_pages: tuple[StoredComponent, ...] = ()


class PagesFetched(Event, frozen=True, kw_only=True):
    """The first `valid` pages of a fetch are in host memory and verified.

    Nothing writes to any of its pages any more.
    """

    op: int
    valid: int
    error: str = ""


class CopyEnded(Event, frozen=True, kw_only=True):
    """A copy between device and host, or from the host to a peer, has ended. Nothing reads its source, and nothing
    writes to its destination any more, whose contents are undefined after an error.

    `intact` is the number of leading source pages whose checksums match, if one does not; the event has an error then.
    """

    op: int
    error: str = ""
    intact: int | None = None


class LayersCopied(Event, frozen=True, kw_only=True):
    """The first `layers` layers of all pages of a copy by layer are in place. The copy continues."""

    op: int
    layers: int


class PagesStored(Event, frozen=True, kw_only=True):
    """Storage has the first `stored` pages of a write, of which it lacked `written`. The sources are not read any more.

    `intact` is the number of leading source pages whose checksums match, if one does not: the others were not stored.
    """

    op: int
    stored: int
    error: str = ""
    intact: int | None = None
    written: int = 0


class PromptHanded(Event, frozen=True, kw_only=True):
    """A prompt was offered to the worker that takes this one's place. Its host memory has the first `there` of the
    pages now; `brought` of them it got by that.

    `error` is why it has not all. `refuses`: it takes no further prompt either.
    """

    op: int
    there: int
    brought: int
    error: str = ""
    refuses: bool = False


class StorageProbed(Event, frozen=True, kw_only=True):
    """A probe of storage has succeeded, or failed with an error."""

    op: int
    error: str = ""


class Recomputed(Event, frozen=True, kw_only=True):
    """The caller has computed the rest of the prompt, first token included, or failed with an error."""

    op: int
    error: str = ""


class EarlyUseEnded(Event, frozen=True, kw_only=True):
    """The caller neither reads nor writes the pages of an early READY any more; it was lost, or is aborted."""

    op: int
    error: str = ""


class CommandRaised(Event, frozen=True, kw_only=True):
    """The start of a command raised, so nothing is under way. `detail` is the traceback."""

    op: int
    detail: str


# --- The hand-over ---


class PromiseSent(Event, frozen=True, kw_only=True):
    """The promise of a room was sent to `writer` (instance and epoch of a peer), of which `ranks` ranks will write."""

    request_id: str
    generation: int
    writer: str
    ranks: int


class ChunkReceived(Event, frozen=True, kw_only=True):
    """One prefill rank has written pages [first, first + count) of the prompt, for one span of the room.

    `last` ends the span for that rank.
    """

    request_id: str
    generation: int
    rank: int
    span: int
    first: int
    count: int
    last: bool


class AuxReceived(Event, frozen=True, kw_only=True):
    """The aux record with the first token has arrived from one prefill rank. The driver keeps the payload."""

    request_id: str
    generation: int
    rank: int


class RoomRefused(Event, frozen=True, kw_only=True):
    """Prefill cannot serve this span of the room. No page of the span was or will be written."""

    request_id: str
    generation: int
    span: int
    cause: str


class RoomFailed(Event, frozen=True, kw_only=True):
    """The room will not be completed. `settled` means that its pages have no writer any more."""

    request_id: str
    generation: int
    cause: str
    settled: bool


class RoomDrained(Event, frozen=True, kw_only=True):
    """One prefill rank has no write of this room in flight and will not start another one."""

    request_id: str
    generation: int
    rank: int


class WriterLost(Event, frozen=True, kw_only=True):
    """A peer is unreachable. Its rooms fail, but it may still write to their pages."""

    writer: str
    cause: str


class WriterDead(Event, frozen=True, kw_only=True):
    """A peer is proven dead and its last bytes have arrived: it cannot write any more."""

    writer: str


# --- Internal events of the request machine. The core derives them from the events above; they are not journalled. ---


class StorageDue(Event, frozen=True, kw_only=True):
    """Storage can be asked for the prompt's pages."""


class Granted(Event, frozen=True, kw_only=True):
    """The request was admitted: `Restore.grant` has matched, locked and reserved its pages."""


class PlanDue(Event, frozen=True, kw_only=True):
    """The facts that the plan depends on may be complete."""


class Progressed(Event, frozen=True, kw_only=True):
    """Something that the request waits for may have happened."""


class PagesLost(Event, frozen=True, kw_only=True):
    """Pages that the request was to share belong to another writer, and no other page is free: it starts over."""

    cause: str


class PrefillLost(Event, frozen=True, kw_only=True):
    """The request's room will not be completed: prefill refused it, failed, or is unreachable.

    `settled` means that its pages have no writer any more.
    """

    cause: str
    detail: str
    settled: bool = False


class DeadlinePassed(Event, frozen=True, kw_only=True):
    """The deadline of the request has passed."""


class TransitionRaised(Event, frozen=True, kw_only=True):
    """A rule of this request raised. Its changes can be continued or given back.

    `taking` names the event that the rule was handling, or the rule itself if it was handling none; `rule` is the rule
    that raised. `error` is the exception in one line, `detail` the traceback.
    """

    taking: str
    rule: str
    error: str
    detail: str


Outcome: TypeAlias = (
    StorageAnswered
    | PagesFetched
    | CopyEnded
    | PagesStored
    | PromptHanded
    | StorageProbed
    | Recomputed
    | EarlyUseEnded
    | CommandRaised
)
"""Events that end an operation of the core."""

AnyEvent = (
    HostPagesFound
    | RequestArrived
    | AbortRequested
    | RequestChanged
    | GrowthTaken
    | FinishRequested
    | RetractRequested
    | RetractedDropped
    | PagesOffered
    | FlushRequested
    | StoreRequested
    | HintReceived
    | ShareRequested
    | StorageChanged
    | PolicyChanged
    | ClockAdvanced
    | StorageAnswered
    | PagesFetched
    | CopyEnded
    | LayersCopied
    | PagesStored
    | PromptHanded
    | StorageProbed
    | Recomputed
    | EarlyUseEnded
    | CommandRaised
    | PromiseSent
    | ChunkReceived
    | AuxReceived
    | RoomRefused
    | RoomFailed
    | RoomDrained
    | WriterLost
    | WriterDead
)
