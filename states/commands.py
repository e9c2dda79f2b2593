"""What the core wishes: imperative, plain values. The driver starts each; those with an `op` end in exactly one event.

Pages are ids of `tidekv.states.types.PageIds`; those of a command belong to its operation until its outcome is told.
"""

from __future__ import annotations

import msgspec

from tidekv.states.components.specs import ComponentPages, ComponentTable
from tidekv.states.prefix.node import TierName
from tidekv.states.types import PageIds


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """A wish. Encoded as its name and the values of its fields, in order."""


class Operation(Command, frozen=True, kw_only=True):
    """A wish with an outcome: an event that carries the same `op`."""

    op: int


class QueryStorage(Operation, frozen=True, kw_only=True):
    """Ask storage for pages [first, first + count) of the request's prompt → StorageAnswered."""

    request_id: str
    first: int
    count: int


class FetchPages(Operation, frozen=True, kw_only=True):
    """Read pages [first, first + len(host_pages)) of the request's prompt from storage to host pages → PagesFetched.

    Reads that have not begun after `timeout_s` are not worth beginning.
    """

    request_id: str
    first: int
    host_pages: PageIds
    timeout_s: float


class QueryComponents(Operation, frozen=True, kw_only=True):
    """Ask storage for pages [first, first + count) of the request's prompt, as QueryStorage does, and for the positions
    from `components_first` (at most `first`) on at which it has a page of each component; those behind the last full
    page found do not matter → StorageAnswered.
    """

    request_id: str
    first: int
    count: int
    components_first: int


class FetchComponent(Operation, frozen=True, kw_only=True):
    """Read a component's pages at these positions of the request's prompt from storage to host pages of the component
    → PagesFetched. Reads that have not begun after `timeout_s` are not worth beginning.
    """

    request_id: str
    component: str
    positions: PageIds
    host_pages: PageIds
    timeout_s: float


class CopyToDevice(Operation, frozen=True, kw_only=True):
    """Copy host pages to device pages → CopyEnded."""

    host_pages: PageIds
    device_pages: PageIds


class CopyToHost(Operation, frozen=True, kw_only=True):
    """Copy device pages to host pages → CopyEnded."""

    device_pages: PageIds
    host_pages: PageIds


class CopyComponent(Operation, frozen=True, kw_only=True):
    """Copy pages of a component from its pool of one tier to that of another, or within the device → CopyEnded."""

    component: str
    source: TierName
    source_pages: PageIds
    target: TierName
    target_pages: PageIds


class StorePages(Operation, frozen=True, kw_only=True):
    """Put host pages, which are pages [first, …) of the tokens that request `serial` left, in storage → PagesStored.

    With serial 0 no request is behind it: what the pages hold is asked of `Core.keys_put` when it is started.
    """

    serial: int
    first: int
    host_pages: PageIds


class StoreComponent(Operation, frozen=True, kw_only=True):
    """Put host pages of a component, which are at positions [first, first + len(host_pages)), in storage → PagesStored.
    What the positions hold is asked of `Core.keys_put` when it is started.
    """

    component: str
    first: int
    host_pages: PageIds


class ProbeStorage(Operation, frozen=True, kw_only=True):
    """Find out whether storage, which has failed, can be used again → StorageProbed."""


class Recompute(Operation, frozen=True, kw_only=True):
    """Have the caller compute the prompt's KV from page `first` on. `pages` is the whole page table → Recomputed."""

    request_id: str
    generation: int
    first: int
    pages: PageIds
    component_pages: tuple[ComponentTable, ...] | None = None


class SendPromise(Command, frozen=True, kw_only=True):
    """Tell prefill number `prefill` of the request's list what not to send, and where the rest goes → PromiseSent or
    RoomFailed.
    """

    request_id: str
    generation: int
    prefill: int
    prompt_tokens: int
    promised_tokens: int
    pages: PageIds
    renewed: bool = False
    """Whether an earlier room of the request was left: what a router once brought to prefill may be used up."""
    component_pages: tuple[ComponentPages, ...] | None = None
    """Of each component what prefill is to send of the tail at the prompt's end, before its last chunk of span 0; no
    pages where decode has all of it. None: this worker has no components.
    """


class SendExtend(Command, frozen=True, kw_only=True):
    """Ask prefill for pages [first, first + len(pages)) of the prompt as well."""

    request_id: str
    generation: int
    span: int
    first: int
    pages: PageIds


class SendAbort(Command, frozen=True, kw_only=True):
    """Tell every writer of the room to stop, and to say when it has → RoomDrained from each, or WriterDead."""

    request_id: str
    generation: int


class SendReceived(Command, frozen=True, kw_only=True):
    """Tell prefill that all of the room is here: it may free its pages."""

    request_id: str
    generation: int


class Fallback(msgspec.Struct, frozen=True, array_like=True):
    """What a request gave up because a rule raised."""

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
"""What a request gives up if a rule raises: name and meaning."""


class ReportReady(Command, frozen=True, kw_only=True):
    """Hand the request to the caller: its page table, tokens by source, and pages held back for its growth."""

    request_id: str
    generation: int
    pages: PageIds
    sources: dict[str, int]
    reserve: PageIds
    component_pages: tuple[ComponentTable, ...] | None = None
    """The tails at the prompt's end. A window never needs more pages than it is given here: those of its own that it
    has left behind are written again. None: this worker has no components.
    """
    fallbacks: tuple[Fallback, ...] = ()
    """What was given up because rules raised, in order."""


class ReportFailed(Command, frozen=True, kw_only=True):
    """Tell the caller that the request failed, and why."""

    request_id: str
    cause: str
    detail: str


class GiveReserve(Command, frozen=True, kw_only=True):
    """Add pages to the request's reserve for growth; none where `wanted` could not be had."""

    request_id: str
    pages: PageIds


class ReportFinished(Command, frozen=True, kw_only=True):
    """The request is over for the caller: `inserted` of its pages were new to the cache."""

    request_id: str
    inserted: int
    fallbacks: tuple[Fallback, ...] = ()
    """What was given up because rules raised since the request arrived."""


class ReportDropped(Command, frozen=True, kw_only=True):
    """A READY request was aborted: its pages are no longer the caller's."""

    request_id: str


class ReportRetracted(Command, frozen=True, kw_only=True):
    """The request's KV is held in host memory: `held_pages` pages of its tokens, from the first on."""

    request_id: str
    held_pages: int
    fallbacks: tuple[Fallback, ...] = ()
    """What was given up because rules raised since the request arrived."""


class ReportFlushed(Command, frozen=True, kw_only=True):
    """What a flush dropped, and what it spared because it is locked: pages by tier."""

    call: int
    dropped: dict[str, int]
    spared: dict[str, int]


class ForgetTokens(Command, frozen=True, kw_only=True):
    """No operation needs the tokens of request `serial` any more: the driver may drop them."""

    serial: int
