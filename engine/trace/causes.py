"""Texts for every deviation from a plan: its cause and its consequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states import events
from tidekv.states.commands import FALLBACKS
from tidekv.states.records.causes import DECLINED, LOAD_CAUSES, LOST_CAUSES, PEER_DECLINED
from tidekv.states.storage_policy import POLICY_FIELDS
from tidekv.states.validation import printable

if TYPE_CHECKING:
    from tidekv.engine.trace.request_trace import Work
    from tidekv.states.core import Core
    from tidekv.states.records.request import Request, RoomRecord
    from tidekv.states.storage_policy import StoragePolicy

CONSEQUENCES = {
    "query": "the plan was made without storage",
    "fetch": "the pages were asked of prefill by an extend",
    "peer fetch": "the pages were asked of prefill by an extend",
    "ahead": "the plan goes by what has arrived ahead of it",
    "copy": "the pages were asked of prefill by an extend",
    "component copy": "the pages were asked of prefill by an extend",
    "component fetch": "the pages were asked of prefill by an extend",
    "shared component copy": "the pages were asked of its own prefill by an extend",
    "backup": "the pages are not kept in host memory",
    "late backup": "the device pages stay locked until it has ended",
    "store": "the pages are not kept in storage",
    "late store": "the host pages stay pinned until it has ended",
    "recompute": "nothing was left to fall back to",
    "short recompute": "prefill is asked for them",
}
"""Consequence of a failure, by kind of work."""
LATE = {
    "query": "storage was late: it did not answer within its deadline",
    "fetch": "storage was late: the fetch did not end within its deadline",
    "peer fetch": "the peer was late: it did not send the pages in its share of the time",
    "copy": "a copy to the device was late: it did not end within its deadline",
    "component copy": "a copy of a component was late: it did not end within its deadline",
    "component fetch": "storage was late: the fetch of a component did not end within its deadline",
    "shared component copy": "a copy of another request's component pages was late: it did not end within its deadline",
    "backup": "the copy to the host was late: it did not end within its deadline",
    "store": "storage was late: the put did not end within its deadline",
}
NAMES = {
    "query": "asking storage",
    "fetch": "the fetch from storage",
    "peer fetch": "the read from a peer",
    "copy": "the copy from host to device",
    "component copy": "the copy of a component",
    "component fetch": "the fetch of a component from storage",
    "shared component copy": "the copy of another request's component pages",
    "backup": "the copy to the host",
    "store": "the put to storage",
    "recompute": "the recompute",
}
UNANSWERED = "storage had not answered, and waiting longer would have cost more than it could gain"
EXTENDED = {
    **LOAD_CAUSES,
    **LOST_CAUSES,
    "fetch_failed": "the fetch from storage failed",
    "peer_failed": "the read from a peer failed",
    "start_raised": "starting the fetch or the copy raised",
    "other": "it could not be restored here",
}
"""Causes for withdrawing a part of the promise: name, as in metrics, and meaning."""
OF_STORAGE = ("query", "fetch", "component fetch", "store")
AFTER_RAISES = {
    **FALLBACKS,
    "storage": "the plan was cut to L1, L2 and transfer",
    "host": "the plan was cut to L1 and transfer",
}
"""Consequence of a rule that raised, by what the request gives up."""


def error_of(event: events.Event, work: Work) -> str:
    """Return the cause of failure of a work that ended with this event; "" for success."""
    name = NAMES[work.kind]
    if isinstance(event, events.CommandRaised):
        return f"starting {name} raised: {last_line(event.detail)}"
    error = getattr(event, "error", "")
    if error:
        return f"{name} failed: {last_line(error)}"
    if isinstance(event, events.PagesFetched) and event.valid < work.count:
        valid = max(event.valid, 0)
        if work.kind == "peer fetch":
            return f"the peer {work.cause} had {valid} of {work.count} pages in host memory"
        return f"the fetch was short: storage brought {valid} of {work.count} pages, the rest was lost or corrupt"
    if isinstance(event, events.PagesStored) and event.intact is not None:
        return f"the put was cut: page {event.intact} of {work.count} has changed in host memory"
    if isinstance(event, events.PagesStored) and event.stored < work.count:
        return f"the put was partial: storage took {max(event.stored, 0)} of {work.count} pages"
    return ""


def delivered_by(event: events.Event, work: Work) -> int:
    """Return how many of the work's pages arrived."""
    for name in ("found", "valid", "stored"):
        if hasattr(event, name):
            return max(0, min(int(getattr(event, name)), work.count))
    return 0 if work.error else work.count


def declined_words(request: Request, core: Core) -> str:
    """Return why pages in storage or host memory are not loaded, with the setting responsible."""
    cause, count = request.sources.declined
    policy = core.state.settings
    detail = ""
    if cause == "storage_left_alone":
        detail = breaker_words(core) if core.storage.is_open else "it was detached"
    elif cause == "below_threshold":
        detail = f"prefetch_threshold_tokens is {policy.prefetch_threshold_tokens}"
    elif cause == "limit":
        limits = ("fetch_pages_in_flight_max", "fetch_pages_per_s")
        detail = ", ".join(f"{name} is {getattr(policy, name):g}" for name in limits if getattr(policy, name))
        detail = (
            detail or f"at its pace no more arrives in time: fetch_deadline_share is {policy.fetch_deadline_share:g}"
        )
    elif cause in ("slower", "unmeasured", "copies_slower"):
        detail = "prefetch is soonest"
    tier = "host memory" if cause == "copies_slower" else "storage"
    return f"{count} pages that {tier} has were declined: {DECLINED[cause]}{f' ({detail})' if detail else ''}"


def peer_declined_words(request: Request) -> str:
    """Return why pages are not asked of the peers of a request."""
    cause, count, peers = request.sources.peer_declined
    return f"{count} pages were not asked of peer {printable(peers)}: {PEER_DECLINED[cause]}"


def breaker_words(core: Core) -> str:
    """Return why the breaker stops requests to storage."""
    limit = core.state.settings.breaker_failures
    return (
        f"the breaker is open: storage failed or was late {limit} times in a row, and is asked nothing until a probe "
        "succeeds"
    )


def unasked_words(request: Request, core: Core) -> str:
    """Return why storage is not queried for a request waiting for admission; "" if that is as planned."""
    state = core.state
    if not state.storage_available or request.restore_limit or request.answer.op:
        return ""
    missing = request.full_pages - sum(state.index.probe_prefix(request.namespace, request.keys))
    if missing * state.settings.page_size < max(state.settings.prefetch_threshold_tokens, 1):
        return ""
    return f"storage was not asked: {breaker_words(core)}" if core.storage.is_open else ""


def unstored_words(core: Core, kept_tokens: int) -> str:
    """Return why a finished request's pages are not stored; "" if they are stored already or there is no storage."""
    settings = core.state.settings
    if not core.state.storage_available:
        return ""
    if core.storage.is_open:
        return breaker_words(core)
    if kept_tokens < settings.write_tokens_min:
        return f"its {kept_tokens} tokens are fewer than write_tokens_min, {settings.write_tokens_min}"
    if settings.write == "back":
        return "write is back: what is about to be evicted is put, and nothing before"
    if settings.write == "selective":
        return f"write is selective: pages that were part of fewer than {settings.write_hits_min} prompts are not put"
    return ""


def policy_words(before: StoragePolicy, after: StoragePolicy) -> str:
    """Return a description of a policy change."""
    changed = [
        f"{name} from {getattr(before, name)} to {getattr(after, name)}"
        for name in POLICY_FIELDS
        if getattr(before, name) != getattr(after, name)
    ]
    return f"the storage policy was changed: {', '.join(changed) or 'to what it was'}"


def extend_cause(room: RoomRecord | None, number: int, event: events.Event) -> str:
    """Return why the step of `event` asks prefill for span `number` of a room: the name, which is a metric's label.

    One of `LOAD_CAUSES` or `LOST_CAUSES`, or a more exact cause from the event: "fetch_failed", "start_raised".
    """
    cause = ""
    if room is not None:
        load = room.fills.get(number)
        cause = room.spans[number].cause or ("" if load is None else load.cause)
    if isinstance(event, events.CommandRaised) and cause.endswith(("fetch_short", "peer_short", "copy_failed")):
        return "start_raised"
    if isinstance(event, events.PagesFetched) and event.error and cause == "fetch_short":
        return "fetch_failed"
    if isinstance(event, events.PagesFetched) and event.error and cause == "peer_short":
        return "peer_failed"
    return cause or "other"


def in_one_line(error: str) -> str:
    """Shorten a cause, which may be a whole traceback, to its prefix and the last line of its message."""
    head, _, said = error.partition(": ")
    return f"{head}: {last_line(said)}" if said else head


def last_line(text: str) -> str:
    """Return the last line of a traceback, which names the error."""
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "no message"
