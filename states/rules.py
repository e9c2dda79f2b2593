"""What the rows of the table do, and what they ask. Each is a line of a request's life; `restore` does the work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states import events, steps
from tidekv.states.commands import TellDropped, TellFailed
from tidekv.states.errors import PrefillCause
from tidekv.states.load import Stage
from tidekv.states.planner import fetches_to_keep

if TYPE_CHECKING:
    from tidekv.states.core import Core
    from tidekv.states.events import Event
    from tidekv.states.request import Request

# --- Questions ---


def waits_for_storage(core: Core, request: Request, event: Event) -> bool:
    """It is planned, and a fetch of its plan has not landed."""
    if not request.is_planned:
        return False
    for load in request.loads:
        if load.stage is Stage.FETCHING:
            return True
    return request.fetches_tails


def waits_for_copies(core: Core, request: Request, event: Event) -> bool:
    """It is planned, and a copy to the device is under way, or a failed load has nobody yet who extends into it."""
    if not request.is_planned:
        return False
    for load in request.loads:
        if load.stage is Stage.COPYING or load.stage is Stage.FAILED:
            return True
    return request.waits_for_tails


def is_planned(core: Core, request: Request, event: Event) -> bool:
    """The promise has been given, or the caller was asked to compute."""
    return request.is_planned


def needs_no_storage(core: Core, request: Request, event: Event) -> bool:
    """Every fetch has landed, or was cut."""
    return not waits_for_storage(core, request, event)


def needs_no_local_tier(core: Core, request: Request, event: Event) -> bool:
    """Only prefill's writes are waited for."""
    return not waits_for_storage(core, request, event) and not waits_for_copies(core, request, event)


def has_everything(core: Core, request: Request, event: Event) -> bool:
    """Every load has ended, every span is written, and the first token is here."""
    is_written = request.recomputed or (request.room is not None and request.room.is_complete)
    return is_written and not request.loads and not request.waits_for_tails


def has_another_prefill(core: Core, request: Request, event: Event) -> bool:
    """Not every prefill was tried as often as the settings allow."""
    return request.attempts + 1 < request.prefill_count * core.settings.attempts_per_prefill


def can_recompute(core: Core, request: Request, event: Event) -> bool:
    """The caller can compute the rest itself, and was not asked yet."""
    return request.can_recompute and not request.recomputes


def has_failed(core: Core, request: Request, event: Event) -> bool:
    """The caller could not compute the rest."""
    assert isinstance(event, events.Recomputed)
    return bool(event.error)


def can_fall_back(core: Core, request: Request, event: Event) -> bool:
    """Its first or second raise: there are tiers left to give up."""
    return request.raised <= 2


# --- The way through ---


def note_answer(core: Core, request: Request, event: Event) -> None:
    """Keep what storage said."""
    assert isinstance(event, events.StorageAnswered)
    if event.error:
        core.books.count("l3_queries_failed")
    request.stored_tails = event.tails
    core.restore.note_answer(request, event.found)


def plan(core: Core, request: Request, event: Event) -> None:
    """Fix the plan and send the promise."""
    core.restore.fix_plan(request)


def commit(core: Core, request: Request, event: Event) -> None:
    """Hand the pages to the caller."""
    # Before the caller is told: a raise after that would tell it of a second end.
    core.backups.release_retracted(request.request_id)
    core.restore.commit(request)


def note_writer(core: Core, request: Request, event: Event) -> None:
    """Who writes, and how many of them."""
    assert isinstance(event, events.PromiseSent)
    core.rooms.sent(event.request_id, event.generation, writer=event.writer, ranks=event.ranks)


def land_chunk(core: Core, request: Request, event: Event) -> None:
    """Pages have come; maybe they complete a load that others wait for as well."""
    assert isinstance(event, events.ChunkLanded)
    assert request.room is not None
    load = core.rooms.load_filled_by(request.room, event)
    if load is not None:
        core.loads.filled(load)
    core.rooms.land(request.room, event)
    core.shared_transfers.note_landed(request)
    _stop_waiting(core, request)


def land_aux(core: Core, request: Request, event: Event) -> None:
    """The first token has come from one rank."""
    assert isinstance(event, events.AuxLanded)
    assert request.room is not None
    core.rooms.land_aux(request.room, event.rank)
    core.shared_transfers.note_landed(request)
    _stop_waiting(core, request)


def _stop_waiting(core: Core, request: Request) -> None:
    policy = core.books.settings.prefetch
    if policy in ("best_effort", "soonest") and request.room is not None and request.room.is_complete:
        core.loads.transfer_is_done(request, keep=_fetches_to_keep(core, request) if policy == "soonest" else 0)


def _fetches_to_keep(core: Core, request: Request) -> int:
    """How many of its fetches bring their pages sooner than prefill would now."""
    now_s, page_s = core.books.now_s, core.books.storage.way.page_s
    fetches = request.fetches
    if fetches and page_s and now_s - fetches[0].begun_at_s > fetches[0].queued_pages * page_s:
        # The first was to have landed by now: storage is no faster than that, for us and for the plans that follow.
        core.books.storage.note_pace(begun_at_s=fetches[0].begun_at_s, pages=fetches[0].queued_pages)
        page_s = (now_s - fetches[0].begun_at_s) / fetches[0].queued_pages
    lands_s = [max(load.begun_at_s + load.queued_pages * page_s - now_s, load.page_count * page_s) for load in fetches]
    pages = [load.page_count for load in fetches]
    return fetches_to_keep(
        list(zip(lands_s if page_s else [0.0] * len(fetches), pages, strict=True)), link=core.rooms.way
    )


# --- Fallback ---


def fall_back(core: Core, request: Request, event: Event) -> None:
    """Trust one tier less."""
    assert isinstance(event, steps.TransitionRaised)
    core.books.count("fallbacks_by_raise")
    request.trouble = event.detail
    core.restore.fall_back(request)


def start_over(core: Core, request: Request, event: Event) -> None:
    """Give everything back and wait for other pages, in a new generation."""
    assert isinstance(event, steps.PagesLost)
    core.books.count("sent_back")
    request.trouble = event.cause
    core.restore.leave(request, settled=False)
    request.generation += 1
    core.enqueue(request)


def try_next_prefill(core: Core, request: Request, event: Event) -> None:
    """Start over with the next prefill of the list."""
    core.books.count("prefill_retries")
    request.trouble = ": ".join(_prefill_words(event))
    core.restore.leave(request, settled=_is_settled(event))
    request.attempts += 1
    request.generation += 1
    core.enqueue(request)


def ask_caller(core: Core, request: Request, event: Event) -> None:
    """Start over without prefill: the caller computes what the device does not have."""
    core.books.count("recomputes")
    request.trouble = ": ".join(_prefill_words(event))
    core.restore.leave(request, settled=_is_settled(event))
    request.recomputes = True
    request.generation += 1
    core.enqueue(request)


def note_recomputed(core: Core, request: Request, event: Event) -> None:
    """The rest of the prompt is in place."""
    request.recompute_op = 0
    request.recomputed = True


def _is_settled(event: Event) -> bool:
    return isinstance(event, events.RoomFailed) and event.settled


# --- The ends ---


def fail_by_raise(core: Core, request: Request, event: Event) -> None:
    """A bug of ours, or of a component: nothing is left to fall back to."""
    assert isinstance(event, steps.TransitionRaised)
    _fail(core, request, "internal error", event.detail)


def fail_by_prefill(core: Core, request: Request, event: Event) -> None:
    """No prefill can or will send the rest."""
    cause, detail = _prefill_words(event)
    _fail(core, request, cause, detail, settled=_is_settled(event))


def _prefill_words(event: Event) -> tuple[str, str]:
    assert isinstance(event, events.RoomRefused | events.RoomFailed | events.WriterLost)
    if (told := PrefillCause.parse(event.cause)) is not None:
        return told[0].value, told[1]
    words = {events.RoomRefused: "refused by prefill", events.RoomFailed: "prefill failed"}
    return words.get(type(event), "prefill lost"), event.cause


def fail_by_recompute(core: Core, request: Request, event: Event) -> None:
    """The last resort did not help either."""
    assert isinstance(event, events.Recomputed)
    request.recompute_op = 0
    _fail(core, request, "recompute failed", event.error)


def fail_by_deadline(core: Core, request: Request, event: Event) -> None:
    """The caller's time is up."""
    _fail(core, request, "deadline", f"in {request.state.value}")


def fail_by_abort(core: Core, request: Request, event: Event) -> None:
    """The caller does not want it any more."""
    assert isinstance(event, events.AbortRequested)
    _fail(core, request, event.cause, f"in {request.state.value}")


def _fail(core: Core, request: Request, cause: str, detail: str, *, settled: bool = False) -> None:
    core.restore.leave(request, settled=settled)
    core.backups.release_retracted(request.request_id)
    core.books.say(TellFailed(request_id=request.request_id, cause=cause, detail=detail))
    core.forget(request)


# --- After the restore ---


def grow(core: Core, request: Request, event: Event) -> None:
    """Refill the reserve."""
    assert isinstance(event, events.GrowthTaken)
    core.serving.grow(request, event)


def finish(core: Core, request: Request, event: Event) -> None:
    """Keep the KV, give everything back."""
    assert isinstance(event, events.FinishRequested)
    core.serving.finish(request, event)
    core.forget(request)


def retract(core: Core, request: Request, event: Event) -> None:
    """Move the KV to host memory, give everything back."""
    assert isinstance(event, events.RetractRequested)
    core.serving.retract(request, event)
    core.forget(request)


def drop(core: Core, request: Request, event: Event) -> None:
    """Give everything back; what the prompt brought to the cache stays there."""
    core.restore.leave(request, settled=True)
    core.books.say(TellDropped(request_id=request.request_id))
    core.forget(request)
