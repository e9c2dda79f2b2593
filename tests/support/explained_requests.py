"""More rows of the table of `test_explain`: what prefill, callers, backups, and bugs of ours may do to a request."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.explained import Play, says
from tidekv.engine.trace import causes
from tidekv.states import commands, events
from tidekv.states.handover.rooms import Rooms
from tidekv.states.loads.loads import Loads
from tidekv.states.records.causes import LOAD_CAUSES
from tidekv.states.request.ready import Serving
from tidekv.states.request.restore import Restore

STATES = ("PREALLOC", "PREFETCH", "LOCAL_RESTORE", "TRANSFER")
WITH_ROOM = STATES[1:]


# --- Prefill ---


def refuses(play: Play) -> None:
    play.to_room(events.RoomRefused, span=0, cause="it forgot the prompt")


def fails(play: Play) -> None:
    play.to_room(events.RoomFailed, cause="out of memory there", settled=True)


def is_lost(play: Play) -> None:
    play.take(events.WriterLost, writer="p0", cause="no heartbeat for 2 s")


def is_dead(play: Play) -> None:
    play.take(events.WriterDead, writer="p0")


PREFILL_ENDS = {
    refuses: ("refused by prefill", "it forgot the prompt"),
    fails: ("prefill failed", "out of memory there"),
    is_lost: ("prefill lost", "no heartbeat for 2 s"),
    is_dead: ("prefill lost", "its process is gone"),
}


def prefill_ends(end: Callable[[Play], None], state: str) -> None:
    cause, detail = PREFILL_ENDS[end]

    @says(f"{cause}: {detail}", "for the next prefill of its list", "the room was left", "READY",
          counts="prefill_retries", name=f"prefill {end.__name__} in {state}, and there is another")  # fmt: skip
    def another(play: Play) -> None:
        play.bring_to(state, prefill_count=2)
        end(play)
        if state == "PREFETCH":
            play.take(events.PagesFetched, op=play.last(commands.FetchPages).op, valid=4)
        play.bring_everything("r1")

    @says(f"{cause}: {detail}", "for its caller to compute the rest", "The caller computed", "which computed", "READY",
          counts="recomputes", name=f"prefill {end.__name__} in {state}, and the caller computes")  # fmt: skip
    def recompute(play: Play) -> None:
        play.bring_to(state, can_recompute=True)
        end(play)
        if state == "LOCAL_RESTORE":
            play.take(events.CopyEnded, op=play.last(commands.CopyPages, target="device", component="full").op)
        play.take(events.Recomputed, op=play.last(commands.Recompute).op)

    @says(f"It failed: {cause} ({detail})", name=f"prefill {end.__name__} in {state}")
    def nobody(play: Play) -> None:
        play.bring_to(state)
        end(play)


for prefill_end in PREFILL_ENDS:
    for waiting_state in WITH_ROOM:
        prefill_ends(prefill_end, waiting_state)


@says("refused by prefill: it is evicted there", "next prefill", "READY", counts="frames_late")
def extend_is_refused(play: Play) -> None:
    play.bring_to("PREFETCH", prefill_count=2)
    play.take(events.PagesFetched, op=play.last(commands.FetchPages).op, valid=1, error="disk on fire")
    play.to_room(events.RoomRefused, span=1, cause="it is evicted there")
    play.take(events.AuxReceived, request_id="r1", generation=0, rank=0)
    play.bring_everything("r1")


@says("2 pages sent by prefill for a room that was left", "of pages [0, 4) (the delta)")
def prefill_is_lost_when_half_is_sent(play: Play) -> None:
    play.bring_to("TRANSFER", prefill_count=2)
    play.to_room(events.ChunkReceived, rank=0, span=0, first=0, count=2, last=False)
    is_lost(play)
    play.bring_everything("r1")


# --- Lent device pages ---


@says("It ended early: prefill lost (no heartbeat for 2 s); 4 of 8 tokens were in place", "computes the rest",
      "Tokens by source: 2 from device memory (L1), 2 from prefill", "Its pages were handed back 3.0 ms later",
      "the room was left")  # fmt: skip
def prefill_is_lost_while_it_fills_lent_pages(play: Play) -> None:
    play.begin_with(lends_device=True)
    play.arrive("r1", lent_pages=(3, 1, 2, 0), held_pages=1)
    play.send_promise("r1")
    play.to_room(events.ChunkReceived, rank=0, span=0, first=1, count=1, last=False)
    is_lost(play)
    play.at_s += 0.002
    play.take(events.RoomDrained, request_id="r1", generation=0, rank=0)


@says("It failed: aborted", "Its pages were handed back 1.0 ms later")
def aborted_while_prefill_fills_lent_pages(play: Play) -> None:
    play.begin_with(lends_device=True)
    play.arrive("r1", lent_pages=(3, 1, 2, 0))
    play.send_promise("r1")
    play.take(events.AbortRequested, request_id="r1")
    play.take(events.RoomDrained, request_id="r1", generation=0, rank=0)


# --- Another request's transfer ---


def share(play: Play) -> None:
    play.begin_with(share_transfers=True)
    for name, tokens in (("r0", b"aabbccddee"), ("r1", b"aabbccddff")):
        play.arrive(name, tokens=tokens)
        play.send_promise(name)


SENT = "4 on their way from prefill for r0"


@says(SENT, LOAD_CAUSES["sender_left"], "asked of prefill by an extend", "READY", counts="shared_transfers_passed_on")
def sender_leaves(play: Play) -> None:
    share(play)
    play.take(events.AbortRequested, request_id="r0")
    play.bring_everything("r1")


@says(SENT, LOAD_CAUSES["sender_slow"], "asked of prefill by an extend", "READY", counts="shared_transfers_passed_on")
def sender_is_slow(play: Play) -> None:
    share(play)
    play.to_room(events.ChunkReceived, rank=0, span=0, first=4, count=1, last=True)
    play.to_room(events.AuxReceived, rank=0)
    play.wait_for_clock()
    play.bring_everything("r1")


@says("it waited for the quota of prefill prefill-0", "admission.prefill_share", "READY", counts="quota_waits")
def prefill_is_at_its_quota(play: Play) -> None:
    play.begin_with(prefill_share=0.3)
    play.arrive("r0", tokens=b"aabbccdd")
    play.arrive("r1", tokens=b"bbccddee")
    play.bring_everything("r0")
    play.bring_everything("r1")


@says("prefill silent: x", "tried again", "READY", counts="late_retries")
def late_prefill_is_tried_again(play: Play) -> None:
    play.begin_with(retries_late=True)
    play.arrive("r1", deadline_at_s=100.0)
    play.send_promise("r1")
    play.to_room(events.RoomFailed, cause="prefill silent: x", settled=True)
    play.wait_for_clock()
    play.bring_everything("r1")


@says("prefill-0 gave way to another one", "admission.prefill_share", "READY", counts="quota_ways_given")
def prefill_at_its_quota_gives_way(play: Play) -> None:
    play.begin_with(prefill_share=0.3)
    play.arrive("r0", tokens=b"aabbccdd")
    play.arrive("r1", tokens=b"bbccddee", prefill_count=2)
    play.bring_everything("r1")
    play.bring_everything("r0")


@says("it waited until another request ended", "admission.running_max", "READY", counts="running_waits")
def as_many_run_as_may(play: Play) -> None:
    play.begin_with(running_max=1)
    play.arrive("r0", tokens=b"aabb")
    play.arrive("r1", tokens=b"ccdd")
    play.bring_everything("r0")
    play.take(events.FinishRequested, request_id="r0", keys=b"aabb", tokens=4)
    play.bring_everything("r1")


@says("pages damaged: page 3 of the prompt differs", "next prefill", "READY")
def sent_page_is_damaged(play: Play) -> None:
    # Once more than the attempts: there is one prefill, which is tried once.
    play.arrive("r1")
    play.send_promise("r1")
    play.to_room(events.RoomFailed, cause="pages damaged: page 3 of the prompt differs", settled=False)
    play.bring_everything("r1")


@says("prefill failed: ConnectionRefusedError: nobody there", "next prefill")
def promise_cannot_be_sent(play: Play) -> None:
    play.arrive("r1", prefill_count=2)
    play.to_room(events.RoomFailed, cause="Traceback\n …\nConnectionRefusedError: nobody there", settled=True)
    play.bring_everything("r1")


@says("It failed: recompute failed (out of patience)", "the recompute failed: out of patience; nothing was left")
def recompute_fails(play: Play) -> None:
    play.bring_to("TRANSFER", can_recompute=True)
    fails(play)
    play.take(events.Recomputed, op=play.last(commands.Recompute).op, error="out of patience")


@says("the recompute failed: out of patience", "prefill is asked for them", "for prefill to send the rest",
      "since the device lacked few", "READY", counts="short_rests sent_back")  # fmt: skip
def short_recompute_fails(play: Play) -> None:
    play.begin_with(recompute_threshold=8)
    play.arrive("r1", can_recompute=True)
    play.take(events.Recomputed, op=play.last(commands.Recompute).op, error="out of patience")
    play.bring_everything("r1")


@says("It failed: recompute failed (KeyError: 'r1')", "starting the recompute raised: KeyError: 'r1'")
def recompute_raises(play: Play) -> None:
    play.bring_to("TRANSFER", can_recompute=True)
    fails(play)
    play.take(events.CommandRaised, op=play.last(commands.Recompute).op, detail="KeyError: 'r1'")


def sender_is_lost(state: str) -> None:
    """r1 shares pages that r0's room was to fill after a failed fetch; r0's prefill is lost."""

    @says("the transfer that was to fill its pages was lost", "for other pages", "READY",
          counts="loads_reclaimed sent_back",
          name=f"the room that fills shared pages is lost in {state}")  # fmt: skip
    def play(play: Play) -> None:
        longer = state != "TRANSFER"
        # With fresh pages r1 would be the next to ask for them.
        play.begin_with(device_pages=9 if longer else 8)
        fetch = play.plan_with_storage("r0", found=2)
        play.send_promise("r0")
        play.take(events.PagesFetched, op=fetch.op, valid=0, error="disk on fire")
        play.arrive("r1", tokens=b"aabbccddee" if longer else b"aabbccdd")
        play.answer_queries(found=3 if longer else 0)
        if state == "LOCAL_RESTORE":
            fetch = play.last(commands.FetchPages)
            play.take(events.PagesFetched, op=fetch.op, valid=len(fetch.positions))
        assert play.core.request("r1").state.value == state
        is_lost(play)
        if state == "PREFETCH":
            play.take(events.PagesFetched, op=play.last(commands.FetchPages).op, valid=0, error="disk on fire")
        is_dead(play)
        play.bring_everything("r1")


for waiting_state in ("PREFETCH", "LOCAL_RESTORE", "TRANSFER"):
    sender_is_lost(waiting_state)

# --- Callers ---


def caller_ends(state: str) -> None:
    @says(f"It failed: deadline (in {state})", f"It waited longest in {state}", name=f"the deadline passes in {state}")
    def deadline(play: Play) -> None:
        # Before every deadline of storage and copies.
        play.bring_to(state, deadline_at_s=play.at_s + 0.04)
        play.wait_for_clock()

    @says(f"It failed: cancelled by the caller (in {state})", name=f"the caller aborts in {state}")
    def abort(play: Play) -> None:
        play.bring_to(state)
        play.take(events.AbortRequested, request_id="r1", cause="cancelled by the caller")


for waiting_state in STATES:
    caller_ends(waiting_state)


@says("It was dropped 2.0 ms after READY, 1 pages longer")
def caller_aborts_when_ready(play: Play) -> None:
    play.bring_to("READY")
    play.take(events.GrowthTaken, request_id="r1", page_count=1)
    play.take(events.AbortRequested, request_id="r1")


@says("waited longest in PREALLOC, for free device pages (it needed 9 at once)", "more device pages")
def device_is_short(play: Play) -> None:
    play.arrive("r0", tokens=b"0123456789abcdef0123456789abcdef")
    play.bring_everything("r0")
    play.arrive("r1", tokens=b"aabbccddeeffgghh")
    play.at_s += 3.0
    play.take(events.AbortRequested, request_id="r0")
    play.bring_everything("r1")


@says("It was retracted 2.0 ms after READY, 0 pages longer; 4 pages of it were held in host memory",
      "It resumes what was retracted 1.0 ms before, of which 4 pages were held", "4 in L2")  # fmt: skip
def request_is_retracted_and_resumed(play: Play) -> None:
    play.bring_to("READY")
    play.finish(kind=events.RetractRequested)
    play.take(events.CopyEnded, op=play.last(commands.CopyPages, target="host", component="full").op)
    play.take(events.FlushRequested, call=1, tiers=("l1",))
    play.at_s -= 0.001
    play.arrive("r1", tokens=b"aabbccddeeff")
    play.bring_everything("r1")


@says("It was retracted", "the copy to the host failed: bus error", "0 pages of it were held in host memory")
def retracted_request_cannot_be_held(play: Play) -> None:
    play.bring_to("READY")
    play.finish(kind=events.RetractRequested)
    play.take(events.CopyEnded, op=play.last(commands.CopyPages, target="host", component="full").op, error="bus error")


# --- Backups ---


@says("the copy to the host failed: bus error; the pages are not kept in host memory", counts="backups_failed")
def backup_fails(play: Play) -> None:
    play.bring_to("READY")
    play.finish()
    play.take(events.CopyEnded, op=play.last(commands.CopyPages, target="host", component="full").op, error="bus error")


@says("starting the copy to the host raised: RuntimeError: no thread")
def backup_raises(play: Play) -> None:
    play.bring_to("READY")
    play.finish()
    play.take(
        events.CommandRaised,
        op=play.last(commands.CopyPages, target="host", component="full").op,
        detail="RuntimeError: no thread",
    )


@says(causes.LATE["backup"], causes.CONSEQUENCES["late backup"], counts="backups_late")
def backup_is_late(play: Play) -> None:
    play.bring_to("READY")
    play.finish()
    play.wait_for_clock()
    play.take(events.CopyEnded, op=play.last(commands.CopyPages, target="host", component="full").op)


def put_ends(name: str, *words: str, end: Callable[[Play, int], None], counts: str = "") -> None:
    @says(*words, counts=counts, name=name)
    def play(play: Play) -> None:
        play.take(events.StorageChanged, available=True)
        play.arrive("r1")
        play.back_up()
        end(play, play.last(commands.StorePages).op)


put_ends(
    "put_fails",
    "the put to storage failed: disk full; the pages are not kept in storage",
    end=lambda play, op: play.take(events.PagesStored, op=op, stored=0, error="disk full"),
)
put_ends(
    "put_raises",
    "starting the put to storage raised: KeyError: 1",
    end=lambda play, op: play.take(events.CommandRaised, op=op, detail="KeyError: 1"),
)
put_ends(
    "put_is_partial",
    "the put was partial: storage took 1 of 4 pages",
    end=lambda play, op: play.take(events.PagesStored, op=op, stored=1, written=1),
    counts="pages_stored pages_backed_up",
)
put_ends(
    "host_page_of_a_put_is_damaged",
    "the put was cut: page 1 of 4 has changed in host memory; the pages are not kept in storage",
    end=lambda play, op: play.take(events.PagesStored, op=op, stored=1, intact=1),
    counts="l2_damaged",
)
put_ends(
    "put_is_late",
    causes.LATE["store"],
    causes.CONSEQUENCES["late store"],
    end=lambda play, op: play.wait_for_clock(),
    counts="backups_late",
)


def nothing_is_put(name: str, word: str, **policy: object) -> None:
    @says(f"nothing was put in storage: {word}", causes.CONSEQUENCES["store"], name=name)
    def play(play: Play) -> None:
        play.change_policy(**policy)
        play.take(events.StorageChanged, available=True)
        play.arrive("r1")
        if "breaker_failures" in policy:
            play.take(events.StorageAnswered, op=play.last(commands.QueryStorage).op, found=0, error="gone")
        if policy.get("write") == "back":
            play.bring_everything("r1")
            play.finish()
        else:
            play.back_up()


nothing_is_put("nothing_is_put_while_the_breaker_is_open", "the breaker is open", breaker_failures=1)
nothing_is_put("nothing_is_put_by_selective_writes", "write is selective", write="selective")
nothing_is_put("nothing_is_put_before_it_is_evicted", "write is back", write="back")
nothing_is_put("nothing_is_put_of_short_prompts", "its 8 tokens are fewer than write_tokens_min, 9", write_tokens_min=9)

# --- Rules that raise: a replay raises there again, by the journal alone ---


def raising(times: int, owner: type, method: str) -> Callable[[Play], None]:
    """Make a rule raise for r1 so many times in the run, and not in its replay."""

    def plant(play: Play) -> None:
        original = getattr(owner, method)

        def rule(self: object, *given: object, **named: object) -> object:
            raised = play.raised
            request = getattr(given[0], "request", given[0])
            if not play.tape.has_ended and len(raised) < times and getattr(request, "request_id", "r1") == "r1":
                raised.append(self)
                raise ZeroDivisionError("a bug")
            return original(self, *given, **named)

        play.patch(owner, method, rule)

    return plant


def rule_raises(name: str, state: str, plant: Callable[[Play], None], *words: str, counts: str = "") -> None:
    @says(*words, counts=f"transitions_raised {counts}", name=name)
    def play(play: Play) -> None:
        if state in ("MATCH", "PREALLOC"):
            plant(play)
            play.arrive("r1")
        else:
            play.bring_to(state)
            plant(play)
            if state == "READY":
                play.take(events.GrowthTaken, request_id="r1", page_count=1)
            else:
                play.to_room(events.AuxReceived, rank=0)
        play.bring_everything("r1")


RAISED = "a rule of the core raised: ZeroDivisionError: a bug (in "
FAILED = "internal error (ZeroDivisionError: a bug)"
rule_raises("a rule raises once", "MATCH", raising(1, Restore, "fix_plan"), RAISED, "cut to L1, L2 and transfer",
            "READY", counts="fallbacks_by_raise")  # fmt: skip
rule_raises("a rule raises twice", "MATCH", raising(2, Restore, "fix_plan"), RAISED, "cut to L1 and transfer", "READY")
rule_raises("a rule raises three times", "MATCH", raising(3, Restore, "fix_plan"), f"It failed: {FAILED}")
rule_raises("a rule raises in PREALLOC", "PREALLOC", raising(1, Restore, "grant"), RAISED, "cut to L1, L2", "READY")
rule_raises("a rule raises twice in PREALLOC", "PREALLOC", raising(2, Restore, "grant"), f"It failed: {FAILED}")
rule_raises("a rule raises in TRANSFER", "TRANSFER", raising(1, Rooms, "receive_aux"), RAISED, "ran once more", "READY")
rule_raises("a rule raises twice in TRANSFER", "TRANSFER", raising(2, Rooms, "receive_aux"), f"It failed: {FAILED}")
rule_raises("the commit raises", "TRANSFER", raising(1, Restore, "keep"), RAISED, "not entered in the cache", "READY")
for waiting_state in ("PREFETCH", "LOCAL_RESTORE"):
    rule_raises(
        f"a rule raises in {waiting_state}",
        waiting_state,
        raising(1, Rooms, "receive_aux"),
        RAISED,
        "cut to L1, L2 and",
    )
    rule_raises(f"a rule raises three times in {waiting_state}", waiting_state, raising(3, Rooms, "receive_aux"),
                f"It failed: {FAILED}")  # fmt: skip
rule_raises("a rule raises when READY", "READY", raising(1, Serving, "grow"), RAISED, "no pages are added for growth")
rule_raises("a rule raises twice when READY", "READY", raising(2, Serving, "grow"), f"It failed after READY: {FAILED}")


@says("a rule of the core raised", "the pages were asked of prefill by an extend", "extend 1", "READY")
def taking_an_outcome_raises(play: Play) -> None:
    fetch = play.plan_with_storage("r1")
    raising(1, Loads, "start_copy")(play)
    play.take(events.PagesFetched, op=fetch.op, valid=4)
    play.bring_everything("r1")
