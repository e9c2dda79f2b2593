"""Cores that are ready for one step, for the test of raises at every call of it."""

from __future__ import annotations

from collections.abc import Callable

from simulation.rig import Rig
from tidekv.states import commands, events
from tidekv.states.records.stages import State

EIGHT = b"abcdefgh"
Step = Callable[[Rig], object]


def three_tiers(rig: Rig) -> commands.QueryStorage:
    """Request "a" finds two pages on the device, two on the host, two in storage, and waits for storage's answer."""
    rig.attach_storage()
    rig.make_cached("past", EIGHT[:4])
    rig.flush("l1")
    rig.make_cached("near", EIGHT[:2])
    rig.arrive("a", EIGHT)
    return rig.take(commands.QueryStorage)


class RequestTrace:
    """A core that is ready for one step, and that step."""

    def __init__(self, name: str, prepare: Callable[[Rig], Step], *, ends: tuple[str, ...], never: str = "") -> None:
        self.name = name
        self.prepare = prepare
        self.ends = ends
        """How the request may end if the step raises once."""
        self.never = never
        """How it must not end."""


def arrival(rig: Rig) -> Step:
    rig.attach_storage()
    return lambda rig: rig.arrive("a", EIGHT)


def admission(rig: Rig) -> Step:
    rig.bring(State.PREALLOC)
    return lambda rig: rig.abort("big")


def plan(rig: Rig) -> Step:
    query = three_tiers(rig)
    return lambda rig: rig.answer(query, 2)


def receiving(rig: Rig) -> Step:
    query = three_tiers(rig)
    rig.answer(query, 2)
    fetch = rig.take(commands.FetchPages)
    return lambda rig: rig.fetched(fetch, valid=1)


def copy_end(rig: Rig) -> Step:
    rig.bring(State.LOCAL_RESTORE)
    copy = rig.take(commands.CopyPages, target="device")
    return lambda rig: rig.copied(copy)


def copy_failure(rig: Rig) -> Step:
    rig.bring(State.LOCAL_RESTORE)
    copy = rig.take(commands.CopyPages, target="device")
    return lambda rig: rig.copied(copy, error="failed")


def late_copy(rig: Rig) -> Step:
    rig.bring(State.LOCAL_RESTORE)
    return lambda rig: rig.wait_until(31.0)


def extended_chunk(rig: Rig) -> Step:
    rig.bring(State.LOCAL_RESTORE)
    rig.serve(rig.take(commands.SendPromise))
    rig.copied(rig.take(commands.CopyPages, target="device"), error="failed")
    extend = rig.take(commands.SendExtend)
    return lambda rig: rig.chunk(extend)


def last_chunk(rig: Rig) -> Step:
    rig.bring(State.TRANSFER)
    promise = rig.take(commands.SendPromise)
    rig.promised(promise)
    rig.aux(promise)
    return lambda rig: rig.chunk(promise)


def lost_room(rig: Rig) -> Step:
    rig.bring(State.LOCAL_RESTORE, prefill_count=2)
    rig.promised(rig.take(commands.SendPromise))
    return lambda rig: rig.step(events.WriterLost, writer="prefill.1", cause="no heartbeat")


def abort(rig: Rig) -> Step:
    rig.bring(State.PREFETCH)
    rig.promised(rig.take(commands.SendPromise))
    return lambda rig: rig.abort("a")


def abort_of_a_sender(rig: Rig) -> Step:
    rig.bring(State.LOCAL_RESTORE)
    rig.promised(rig.take(commands.SendPromise))
    rig.copied(rig.take(commands.CopyPages, target="device"), error="failed")
    return lambda rig: rig.abort("a")


def drained(rig: Rig) -> Step:
    rig.bring(State.TRANSFER)
    rig.promised(rig.take(commands.SendPromise))
    rig.abort("a")
    told = rig.take(commands.SendAbort)
    return lambda rig: rig.drained(told)


def growth(rig: Rig) -> Step:
    rig.bring(State.READY)
    return lambda rig: rig.step(events.GrowthTaken, request_id="a", page_count=0, wanted=2)


def finish(rig: Rig) -> Step:
    rig.bring(State.READY)
    return lambda rig: rig.finish("a", EIGHT)


def retract(rig: Rig) -> Step:
    rig.bring(State.READY)
    return lambda rig: rig.step(events.RetractRequested, request_id="a", keys=EIGHT, tokens=8)


def backup_copied(rig: Rig) -> Step:
    rig.bring(State.READY)
    rig.step(events.RetractRequested, request_id="a", keys=EIGHT, tokens=8)
    copy = rig.take(commands.CopyPages, target="host")
    return lambda rig: rig.copied(copy)


def backup_stored(rig: Rig) -> Step:
    rig.bring(State.READY)
    rig.finish("a", EIGHT)
    rig.copied(rig.take(commands.CopyPages, target="host"))
    put = rig.take(commands.StorePages)
    return lambda rig: rig.stored(put)


def resumed(rig: Rig) -> Step:
    rig.bring(State.READY)
    rig.step(events.RetractRequested, request_id="a", keys=EIGHT, tokens=8)
    rig.copied(rig.take(commands.CopyPages, target="host"))
    rig.take(commands.ReportRetracted)
    rig.settle()
    rig.arrive("a", EIGHT + b"i")
    query = rig.take_all(commands.QueryStorage)
    if query:
        rig.answer(query[0], 0)
    promise = rig.take(commands.SendPromise)
    return lambda rig: rig.serve(promise)


def flush(rig: Rig) -> Step:
    rig.attach_storage()
    rig.make_cached("past", EIGHT)
    return lambda rig: rig.step(events.FlushRequested, call=1, tiers=("l1", "l2"))


def lacking_everything(rig: Rig) -> None:
    """Two prompts on the device only, and one on the host only, none of them in storage."""
    rig.make_ready("past", EIGHT[:4])
    rig.step(events.RetractRequested, request_id="past", keys=EIGHT[:4], tokens=4)
    rig.copied(rig.take(commands.CopyPages, target="host"))
    rig.settle()
    rig.step(events.RetractedDropped, request_id="past")
    rig.flush("l1")
    for name in ("b", "c"):
        rig.make_ready(name, name.encode() * 4)
        rig.finish(name, name.encode() * 4)
        rig.copied(rig.take(commands.CopyPages, target="host"), error="failed")
    rig.settle()
    rig.attach_storage()


def store_all(rig: Rig) -> Step:
    lacking_everything(rig)
    return lambda rig: rig.step(events.StoreRequested, call=1, within_s=10.0)


def store_all_copied(rig: Rig) -> Step:
    lacking_everything(rig)
    rig.step(events.StoreRequested, call=1, within_s=10.0)
    copy, *others = rig.take_all(commands.CopyPages, target="host")
    rig.pending += others
    return lambda rig: rig.copied(copy)


def store_all_stored(rig: Rig) -> Step:
    lacking_everything(rig)
    rig.step(events.StoreRequested, call=1, within_s=10.0)
    put = rig.take(commands.StorePages)
    return lambda rig: rig.stored(put)


def store_all_late(rig: Rig) -> Step:
    lacking_everything(rig)
    rig.step(events.StoreRequested, call=1, within_s=10.0)
    return lambda rig: rig.wait_until(10.0)


def hand_all(rig: Rig) -> Step:
    lacking_everything(rig)
    return lambda rig: rig.step(events.StoreRequested, call=1, within_s=10.0, to="new:1")


def hand_all_copied(rig: Rig) -> Step:
    hand_all(rig)(rig)
    copy, *others = rig.take_all(commands.CopyPages, target="host")
    rig.pending += others
    return lambda rig: rig.copied(copy)


def hand_all_answered(rig: Rig) -> Step:
    hand_all(rig)(rig)
    offer, *others = rig.take_all(commands.HandPrompt)
    rig.pending += others
    # Within a node.
    return lambda rig: rig.handed(offer, 3)


def hand_all_refused(rig: Rig) -> Step:
    hand_all(rig)(rig)
    offer, *others = rig.take_all(commands.HandPrompt)
    rig.pending += others
    return lambda rig: rig.handed(offer, 0, error="no room", refuses=True)


def hand_all_late(rig: Rig) -> Step:
    hand_all(rig)(rig)
    return lambda rig: rig.wait_until(10.0)


def take_prompt(rig: Rig) -> Step:
    rig.make_cached("past", EIGHT[:2])
    return lambda rig: rig.step(
        events.HintReceived, call=-1, action="take", namespace="", keys=EIGHT, ttl_s=10.0, peer="old:1"
    )


def take_prompt_landed(rig: Rig) -> Step:
    take_prompt(rig)(rig)
    fetch = rig.take(commands.FetchPages)
    return lambda rig: rig.fetched(fetch)


def take_prompt_short(rig: Rig) -> Step:
    take_prompt(rig)(rig)
    fetch = rig.take(commands.FetchPages)
    return lambda rig: rig.fetched(fetch, 1)


def take_prompt_late(rig: Rig) -> Step:
    take_prompt(rig)(rig)
    return lambda rig: rig.wait_until(10.0)


READY, FAILED = "ReportReady", "ReportFailed"
STORIES = [
    RequestTrace("arrival", arrival, ends=(READY,)),
    RequestTrace("admission", admission, ends=(READY,)),
    RequestTrace("plan", plan, ends=(READY,)),
    RequestTrace("receiving", receiving, ends=(READY,)),
    RequestTrace("copy end", copy_end, ends=(READY,)),
    RequestTrace("copy failure", copy_failure, ends=(READY,)),
    RequestTrace("late copy", late_copy, ends=(READY,)),
    RequestTrace("extended chunk", extended_chunk, ends=(READY,)),
    RequestTrace("last chunk", last_chunk, ends=(READY,)),
    RequestTrace("lost room", lost_room, ends=(READY,)),
    RequestTrace("abort", abort, ends=(FAILED,)),
    RequestTrace("abort of a sender", abort_of_a_sender, ends=(FAILED,)),
    RequestTrace("drained", drained, ends=(FAILED,)),
    RequestTrace("growth", growth, ends=("",), never=FAILED),
    RequestTrace("finish", finish, ends=("ReportFinished",)),
    RequestTrace("retract", retract, ends=("ReportRetracted",)),
    RequestTrace("backup copied", backup_copied, ends=("ReportRetracted",)),
    RequestTrace("backup stored", backup_stored, ends=("ReportFinished",)),
    RequestTrace("resumed", resumed, ends=(READY,)),
    RequestTrace("flush", flush, ends=("",)),
    RequestTrace("store all", store_all, ends=("",)),
    RequestTrace("store all copied", store_all_copied, ends=("",)),
    RequestTrace("store all stored", store_all_stored, ends=("",)),
    RequestTrace("store all late", store_all_late, ends=("",)),
    RequestTrace("hand all", hand_all, ends=("",)),
    RequestTrace("hand all copied", hand_all_copied, ends=("",)),
    RequestTrace("hand all answered", hand_all_answered, ends=("",)),
    RequestTrace("take prompt", take_prompt, ends=("",)),
    RequestTrace("take prompt landed", take_prompt_landed, ends=("",)),
]
