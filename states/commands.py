"""Commands: the outputs of the core, in the imperative, as plain values. The driver starts each of them.

Commands with an `op` end in exactly one event, shown after the arrow. Page lists are `tidekv.states.types.PageIds`; the
pages of a command belong to its operation until that event.
"""

from __future__ import annotations

import msgspec

from tidekv.states.component_specs import ComponentPages, ComponentTable
from tidekv.states.prefix.node import TierName
from tidekv.states.types import FULL, PageIds


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """A command. Encoded as its name and the values of its fields, in order."""


class OperationCommand(Command, frozen=True, kw_only=True):
    """A command with an outcome: an event with the same `op`."""

    op: int


class QueryStorage(OperationCommand, frozen=True, kw_only=True):
    """Ask storage for pages [first, first + count) of the request's prompt, and for those of components
    → StorageAnswered.

    For each component of `components_first` the answer has the positions with a page, from the given one up to first +
    count. With components `count` may be 0.
    """

    request_id: str
    first: int
    count: int
    components_first: dict[str, int] = {}


class FetchPages(OperationCommand, frozen=True, kw_only=True):
    """Read the pages at `positions` of the request's prompt from storage to host pages of the same group
    → PagesFetched.

    The driver need not start reads after `timeout_s`. Without a `request_id` it gets the keys from `Core.keys_stored`.
    With `peer`, the address of a decode worker, they are read from its host memory: as many of the first ones as it
    has.
    """

    request_id: str
    positions: PageIds
    host_pages: PageIds
    timeout_s: float
    component: str = FULL
    peer: str = ""


class CopyPages(OperationCommand, frozen=True, kw_only=True):
    """Copy pages of one group from one pool to another, or within the device pool → CopyEnded.

    With `by_layer`, from host to device, layer 0 of all pages comes first, and LayersCopied reports each layer but the
    last one.
    """

    source: TierName
    source_pages: PageIds
    target: TierName
    target_pages: PageIds
    component: str = FULL
    by_layer: bool = False


class SharePages(OperationCommand, frozen=True, kw_only=True):
    """Copy host pages to the peer whose read has the number `call` → CopyEnded.

    They are the first pages of the prefix that it asked for. They stay where they are until that event.
    """

    call: int
    host_pages: PageIds


class StorePages(OperationCommand, frozen=True, kw_only=True):
    """Make sure that storage has one group's pages of a request's tokens, starting at position `first` → PagesStored.

    Storage is asked for them, and learns that they are in use. It is sent those that it lacks from `host_pages`, the
    first of them; `asked` further ones are only asked for.

    Request number 0 means pages of no particular request: the driver gets their keys from `Core.keys_stored` when it
    starts the write.
    """

    request_number: int
    host_pages: PageIds
    asked: int = 0
    component: str = FULL
    first: int = 0


class HandPrompt(OperationCommand, frozen=True, kw_only=True):
    """Offer the prompt whose keys `Core.keys_stored` gives to the decode worker at `peer`, which reads from host memory
    here what it lacks of the first `page_count` pages → PromptHanded.

    `heat` as in HintReceived. The worker has `timeout_s` for it.
    """

    peer: str
    page_count: int
    heat: tuple[int, int, int, int]
    timeout_s: float


class ProbeStorage(OperationCommand, frozen=True, kw_only=True):
    """Test whether storage can be used again after failures → StorageProbed."""


class Recompute(OperationCommand, frozen=True, kw_only=True):
    """Make the caller compute the prompt's KV from page `first` on. `pages` is the whole page table → Recomputed."""

    request_id: str
    generation: int
    first: int
    pages: PageIds
    component_pages: tuple[ComponentTable, ...] | None = None
    resume_from: tuple[ComponentPages, ...] | None = None
    """The component pages at the end of page `first` - 1, from which the computation continues: only read."""
    snapshots: dict[str, dict[int, int]] | None = None
    """By state, pages for snapshots that the caller takes on the way: by the number of full pages after which it does.
    """
    is_short: bool = False
    """Whether prefill was not asked, since the rest is short: it may release what it holds for the request."""


class SendPromise(Command, frozen=True, kw_only=True):
    """Send the promise of a room to prefill number `prefill` of the request's list → PromiseSent or RoomFailed.

    Prefill need not send the first `promised_tokens` tokens; it writes the rest to `pages`.
    """

    request_id: str
    generation: int
    prefill: int
    prompt_tokens: int
    promised_tokens: int
    pages: PageIds
    renewed: bool = False
    """Whether the request had an earlier room. A prompt that a router sent to prefill ahead may be used up then."""
    component_pages: tuple[ComponentPages, ...] | None = None
    """Component pages at the prompt's end that prefill must send before its last chunk of span 0; empty for a component
    if decode has all of its pages. None means that this worker has no components.
    """


class SendExtend(Command, frozen=True, kw_only=True):
    """Ask prefill for pages of a component as a further span: positions [first, first + len(pages)) of the prompt."""

    request_id: str
    generation: int
    span: int
    first: int
    pages: PageIds
    component: str = FULL


class SendAbort(Command, frozen=True, kw_only=True):
    """Make every writer of the room stop and confirm it → RoomDrained from each, or WriterDead."""

    request_id: str
    generation: int


class SendReceived(Command, frozen=True, kw_only=True):
    """Confirm to prefill that the whole room has arrived, so that it frees its pages."""

    request_id: str
    generation: int


class Fallback(msgspec.Struct, frozen=True, array_like=True):
    """Fallback of a request after a rule raised."""

    rule: str
    """The rule that raised, as `Class.method`."""
    gave_up: str
    """One of `FALLBACKS`."""
    error: str
    """The exception in one line. The engine's log has the traceback."""


FALLBACKS = {
    "storage": "storage is not used for this request",
    "host": "neither storage nor host memory is used for this request",
    "cache": "pages of the prompt are not entered in the cache",
    "growth": "no pages are added for growth this time",
    "backup": "what the request leaves is not backed up",
    "nothing": "the step ran once more",
}
"""Fallbacks of a request if a rule raises: name and meaning."""


class ReportReady(Command, frozen=True, kw_only=True):
    """Hand the restored request to the caller: page table, tokens by source, and reserve for growth."""

    request_id: str
    generation: int
    pages: PageIds
    sources: dict[str, int]
    reserve: PageIds
    component_pages: tuple[ComponentTable, ...] | None = None
    """Component pages at the prompt's end. A window needs no further pages later: it reuses those of its own pages that
    it has moved past. None means that this worker has no components.
    """
    fallbacks: tuple[Fallback, ...] = ()
    """Fallbacks after raises, in order."""


class ReportEarly(OperationCommand, frozen=True, kw_only=True):
    """Hand the page table to a caller that begins with the first layers → EarlyUseEnded, unless ReportReady follows.

    The first `layers` layers of all pages are in place, and all component pages. The caller may write to the prompt's
    last page behind the prompt, to `reserve`, and to its own component pages.
    """

    request_id: str
    generation: int
    layers: int
    pages: PageIds
    reserve: PageIds
    component_pages: tuple[ComponentTable, ...] | None = None
    """As of ReportReady, whose tables have the same `pages`."""


class ReportLayers(Command, frozen=True, kw_only=True):
    """Report to the caller of an early READY that the first `layers` layers of all pages are in place."""

    request_id: str
    generation: int
    layers: int


class ReportLayersLost(Command, frozen=True, kw_only=True):
    """Report to the caller of an early READY that a source of its pages has failed: it must begin again.

    Another ReportEarly or ReportReady follows, or ReportFailed.
    """

    request_id: str
    generation: int
    cause: str


class ReportRestored(Command, frozen=True, kw_only=True):
    """Return lent pages to the caller: the first `restored_tokens` tokens of the prompt are in place, by `sources`.

    `cause` and `detail` give the reason if that is not the whole prompt. Nothing writes to the pages any more.
    """

    request_id: str
    generation: int
    restored_tokens: int
    sources: dict[str, int]
    cause: str = ""
    detail: str = ""
    fallbacks: tuple[Fallback, ...] = ()
    """Fallbacks after raises, in order."""


class ReportFailed(Command, frozen=True, kw_only=True):
    """Report to the caller that the request failed, with cause and detail. Nothing writes to lent pages any more."""

    request_id: str
    cause: str
    detail: str


class GiveReserve(Command, frozen=True, kw_only=True):
    """Add pages to the request's reserve for growth; possibly none, if the device is short."""

    request_id: str
    pages: PageIds


class ReportFinished(Command, frozen=True, kw_only=True):
    """Report that a request has finished. `inserted` of its pages were new to the cache."""

    request_id: str
    inserted: int
    fallbacks: tuple[Fallback, ...] = ()
    """Fallbacks after raises since the request arrived, in order."""


class ReportDropped(Command, frozen=True, kw_only=True):
    """Report that a READY request was aborted. Its pages do not belong to the caller any more."""

    request_id: str


class ReportRetracted(Command, frozen=True, kw_only=True):
    """Report that a retracted request's KV is in host memory: the first `held_pages` pages of its tokens."""

    request_id: str
    held_pages: int
    fallbacks: tuple[Fallback, ...] = ()
    """Fallbacks after raises since the request arrived, in order."""


class ReportOffered(Command, frozen=True, kw_only=True):
    """Give offered pages back: nothing reads them any more.

    In host memory now: `written` of the full pages by this offer, `present` without it. `passed` are on their way
    through it to storage, or were found there. `declined` are neither. Of the components in `components_declined` host
    memory has not all pages that were offered, and they do not pass.
    """

    offer: int
    written: int
    present: int
    declined: int
    passed: int = 0
    components_declined: tuple[str, ...] = ()


class ReportFlushed(Command, frozen=True, kw_only=True):
    """Report a flush: by tier, the numbers of pages dropped, and of pages spared because they are locked."""

    call: int
    dropped: dict[str, int]
    spared: dict[str, int]


class ReportStored(Command, frozen=True, kw_only=True):
    """Report a run that has stored everything, or has ended before. Numbers of full pages, but for the second.

    Storage has got `stored`, and `components_stored` pages of components; it had `present`. It lacks `left` of what
    device and host have; the last write of `failed` of them has failed. Of a run to another decode worker, the same
    about its host memory; `cause` is its last word about pages that it does not take.
    """

    call: int
    stored: int
    components_stored: int
    present: int
    left: int
    failed: int
    seconds: float
    """Duration of the run."""
    cause: str = ""


class ReportHinted(Command, frozen=True, kw_only=True):
    """Report the outcome of a hint, or of a read by a peer: "accepted", "clipped" (for fewer pages), "deferred" (in
    use), "missing" or "rejected", and the number of pages it concerns.

    Of a prompt that is taken, `page_count` is what host memory has of it now, `brought` what it got, and `cause` is
    why it has not all.
    """

    call: int
    outcome: str
    page_count: int
    brought: int = 0
    cause: str = ""


class ForgetTokens(Command, frozen=True, kw_only=True):
    """Drop the tokens of request `request_number`: no operation needs them any more."""

    request_number: int
