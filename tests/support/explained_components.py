"""Rows of the table of `test_explain`: what may happen to windows and states, and the expected explanation."""

from __future__ import annotations

from tests.support.explained import Play, says
from tidekv.engine.trace import causes
from tidekv.states import commands, events
from tidekv.states.component_specs import Component
from tidekv.states.records.causes import LOST_CAUSES
from tidekv.states.types import FULL

COMPONENTS = (Component(name="window", kind="window", window_tokens=4, device_pages=12, host_pages=8),)
AGAIN = "of pages [2, 4) of window (extend 1, since "
"""Prefill was asked for the window by an extend."""


def leave(play: Play, request_id: str, tokens: bytes) -> None:
    """A request is restored and finished, and leaves its window on the device and on the host."""
    play.arrive(request_id, tokens)
    play.bring_everything(request_id)
    component_pages = tuple(
        events.ComponentLeft(table.component, table.first, tuple(table.pages))
        for table in play.last(commands.ReportReady).component_pages
    )
    kept = {"request_id": request_id, "keys": tokens, "tokens": len(tokens), "component_pages": component_pages}
    play.take(events.FinishRequested, **kept)
    play.take(events.CopyEnded, op=play.last(commands.CopyPages, target="host", component="full").op)
    play.take(events.CopyEnded, op=play.last(commands.CopyPages, component="window").op)


def window_on_the_host(play: Play) -> commands.CopyPages:
    """The window of r1 is being copied from the host."""
    play.begin_with(COMPONENTS)
    leave(play, "before", b"aabbccdd")
    play.take(events.FlushRequested, call=1, tiers=("l1",))
    play.arrive("r1")
    copy: commands.CopyPages = play.last(commands.CopyPages, component="window")
    return copy


def window_in_storage(play: Play, *ranges: tuple[int, int]) -> commands.FetchPages:
    """The window of r1 is being fetched."""
    play.begin_with(COMPONENTS)
    play.take(events.StorageChanged, available=True, component_pages=True)
    play.arrive("r1")
    stored = (events.StoredComponent("window", ranges or ((2, 4),)),)
    play.take(events.StorageAnswered, op=play.last(commands.QueryStorage).op, found=4, component_pages=stored)
    fetch: commands.FetchPages = play.last(commands.FetchPages, component="window")
    return fetch


@says("the copy of a component failed: CopyFailed: bus error", causes.CONSEQUENCES["component copy"], AGAIN, "READY")
def component_copy_fails(play: Play) -> None:
    play.take(events.CopyEnded, op=window_on_the_host(play).op, error="CopyFailed: bus error")
    play.bring_everything("r1")


@says(
    "starting the copy of a component raised: RuntimeError: no thread",
    causes.CONSEQUENCES["component copy"],
    AGAIN,
    "READY",
)
def component_copy_raises(play: Play) -> None:
    play.take(events.CommandRaised, op=window_on_the_host(play).op, detail="RuntimeError: no thread")
    play.bring_everything("r1")


@says(causes.LATE["component copy"], AGAIN, "READY", counts="copies_late extends")
def component_copy_is_late(play: Play) -> None:
    copy = window_on_the_host(play)
    play.take(events.CopyEnded, op=play.last(commands.CopyPages, target="device", component="full").op)
    play.wait_for_clock()
    play.bring_everything("r1")
    play.take(events.CopyEnded, op=copy.op)


@says("Fetched 2 pages of window from storage: 2 came", "Copied pages [2, 4) of window from host to device", "READY")
def window_comes_from_storage(play: Play) -> None:
    play.take(events.PagesFetched, op=window_in_storage(play).op, valid=2)
    play.take(events.PagesFetched, op=play.last(commands.FetchPages, component=FULL).op, valid=4)
    play.take(events.CopyEnded, op=play.last(commands.CopyPages, component="window").op)
    play.bring_everything("r1")


@says(
    "the fetch of a component from storage failed: disk on fire",
    causes.CONSEQUENCES["component fetch"],
    AGAIN,
    "READY",
    counts="l3_pages_short extends",
)
def component_fetch_fails(play: Play) -> None:
    play.take(events.PagesFetched, op=window_in_storage(play).op, valid=0, error="disk on fire")
    play.take(events.PagesFetched, op=play.last(commands.FetchPages, component=FULL).op, valid=4)
    play.bring_everything("r1")


@says("starting the fetch of a component from storage raised: OSError: no file left", AGAIN, "READY")
def component_fetch_raises(play: Play) -> None:
    play.take(events.CommandRaised, op=window_in_storage(play).op, detail="OSError: no file left")
    play.take(events.PagesFetched, op=play.last(commands.FetchPages, component=FULL).op, valid=4)
    play.bring_everything("r1")


@says("storage brought 1 of 2 pages", "lost or corrupt", "of pages [3, 4) of window (extend 1, since ", "READY")
def component_fetch_is_short(play: Play) -> None:
    play.take(events.PagesFetched, op=window_in_storage(play).op, valid=1)
    play.take(events.CopyEnded, op=play.last(commands.CopyPages, component="window").op)
    play.take(events.PagesFetched, op=play.last(commands.FetchPages, component=FULL).op, valid=4)
    play.bring_everything("r1")


@says(causes.LATE["component fetch"], causes.CONSEQUENCES["component fetch"], AGAIN, "READY", counts="l3_fetches_late")
def component_fetch_is_late(play: Play) -> None:
    fetch = window_in_storage(play)
    play.take(events.PagesFetched, op=play.last(commands.FetchPages, component=FULL).op, valid=4)
    play.take(events.CopyEnded, op=play.last(commands.CopyPages, target="device", component="full").op)
    play.wait_for_clock()
    play.bring_everything("r1")
    play.take(events.PagesFetched, op=fetch.op, valid=2)


@says("asked prefill for 0 pages, 2 pages of window", "READY")
def window_in_storage_has_a_hole(play: Play) -> None:
    play.begin_with(COMPONENTS)
    play.take(events.StorageChanged, available=True, component_pages=True)
    play.arrive("r1")
    stored = (events.StoredComponent("window", ((3, 4),)),)
    play.take(events.StorageAnswered, op=play.last(commands.QueryStorage).op, found=4, component_pages=stored)
    play.take(events.PagesFetched, op=play.last(commands.FetchPages, component=FULL).op, valid=4)
    play.bring_everything("r1")


# --- The same prompt at the same time ---


def same_end(play: Play) -> None:
    """Prefill sends the window of r0, which has the same prompt as r1."""
    play.begin_with(COMPONENTS, share_transfers=True)
    for name in ("r0", "r1"):
        play.arrive(name)
        play.send_promise(name)


def land(play: Play, request_id: str, *, token: bool = True) -> None:
    """Prefill has sent everything that the request asked for, with or without the first token."""
    span = play.core.request(request_id).room.spans[0]
    of_span = {"span": 0, "first": span.first, "count": span.count, "last": True}
    play.to_room(events.ChunkReceived, request_id=request_id, rank=0, **of_span)
    if token:
        play.to_room(events.AuxReceived, request_id=request_id, rank=0)


def copy_of_the_window(play: Play) -> commands.CopyPages:
    same_end(play)
    land(play, "r0")
    copy: commands.CopyPages = play.last(commands.CopyPages, component="window")
    return copy


FROM_R0 = "component pages that are on their way for r0 are copied from there"


@says(FROM_R0, "Copied pages [2, 4) of window from those of r0", "READY")
def window_is_copied_from_the_same_prompt(play: Play) -> None:
    play.take(events.CopyEnded, op=copy_of_the_window(play).op)
    play.bring_everything("r1")


@says(FROM_R0, LOST_CAUSES["end_sender_left"], AGAIN, "READY", counts="shared_ends_passed_on")
def end_sender_leaves(play: Play) -> None:
    same_end(play)
    play.take(events.AbortRequested, request_id="r0")
    play.bring_everything("r1")


@says(FROM_R0, LOST_CAUSES["end_sender_slow"], AGAIN, "READY", counts="shared_ends_passed_on")
def end_sender_is_slow(play: Play) -> None:
    same_end(play)
    land(play, "r0", token=False)
    land(play, "r1")
    play.wait_for_clock()
    play.bring_everything("r1")


@says("the copy of another request's component pages failed: CopyFailed: bus error", AGAIN, "READY")
def copy_of_the_same_end_fails(play: Play) -> None:
    play.take(events.CopyEnded, op=copy_of_the_window(play).op, error="CopyFailed: bus error")
    play.bring_everything("r1")


@says("starting the copy of another request's component pages raised: RuntimeError: no thread", AGAIN, "READY")
def copy_of_the_same_end_raises(play: Play) -> None:
    play.take(events.CommandRaised, op=copy_of_the_window(play).op, detail="RuntimeError: no thread")
    play.bring_everything("r1")


@says(
    causes.LATE["shared component copy"],
    causes.CONSEQUENCES["shared component copy"],
    LOST_CAUSES["end_copy_late"],
    AGAIN,
    "READY",
)
def copy_of_the_same_end_is_late(play: Play) -> None:
    copy = copy_of_the_window(play)
    play.wait_for_clock()
    play.bring_everything("r1")
    play.take(events.CopyEnded, op=copy.op)
