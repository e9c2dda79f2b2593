"""Rows of the table of `test_explain`: what storage and copies may do to a request, and the expected explanation."""

from __future__ import annotations

from tests.support.explained import Play, says
from tidekv.engine.trace import causes
from tidekv.states import commands, events
from tidekv.states.records.causes import DECLINED, LOAD_CAUSES, PEER_DECLINED

# --- Storage ---


@says("the fetch from storage failed: disk on fire", "extend 1, since the fetch from storage failed", counts="extends")
def fetch_fails(play: Play) -> None:
    fetch = play.plan_with_storage("r1")
    play.take(events.PagesFetched, op=fetch.op, valid=0, error="disk on fire")
    play.bring_everything("r1")


@says("storage brought 1 of 4 pages", "lost or corrupt", LOAD_CAUSES["fetch_short"], "READY", counts="l3_pages_short")
def fetch_is_short(play: Play) -> None:
    fetch = play.plan_with_storage("r1")
    play.take(events.PagesFetched, op=fetch.op, valid=1)
    play.bring_everything("r1")


@says(causes.LATE["fetch"], LOAD_CAUSES["fetch_late"], "fetched too late", counts="l3_fetches_late")
def fetch_is_late(play: Play) -> None:
    fetch = play.plan_with_storage("r1")
    play.wait_for_clock()
    play.bring_everything("r1")
    play.take(events.PagesFetched, op=fetch.op, valid=4)


@says("starting the fetch from storage raised: OSError: no file left", "starting the fetch or the copy raised", "READY")
def fetch_raises(play: Play) -> None:
    fetch = play.plan_with_storage("r1")
    play.take(events.CommandRaised, op=fetch.op, detail="Traceback\n  …\nOSError: no file left")
    play.bring_everything("r1")


@says(LOAD_CAUSES["transfer_done"], "extend 1", "2 pages fetched too late", "READY", counts="l3_fetches_cut")
def fetch_is_cut_since_the_transfer_is_done(play: Play) -> None:
    play.change_policy(prefetch="best_effort")
    fetch = play.plan_with_storage("r1", found=2)
    play.bring_everything("r1")
    play.take(events.PagesFetched, op=fetch.op, valid=2)


@says("the read from a peer failed: peer decode-1:9000: prefill silent", "extend 1, since the read from a peer failed")
def peer_fails(play: Play) -> None:
    read = play.plan_with_peer()
    play.take(events.PagesFetched, op=read.op, valid=0, error="peer decode-1:9000: prefill silent")
    play.bring_everything("r1")


@says(
    "0 in L3, 4 perhaps at a peer",
    "Read pages [0, 4) from peer decode-1:9000: 3 came",
    "the peer decode-1:9000 had 3 of 4 pages in host memory",
    LOAD_CAUSES["peer_short"],
    "6 from another decode worker, 2 from prefill",
    counts="peer_pages_short peer_fetches",
)
def peer_has_fewer_pages(play: Play) -> None:
    read = play.plan_with_peer()
    play.take(events.PagesFetched, op=read.op, valid=3)
    play.bring_everything("r1")


@says(LOAD_CAUSES["transfer_done"], "extend 1", "4 pages sent too late by a peer", counts="peer_fetches_cut")
def peer_is_cut_since_the_transfer_is_done(play: Play) -> None:
    read = play.plan_with_peer(policy={"prefetch": "best_effort"})
    play.bring_everything("r1")
    play.take(events.PagesFetched, op=read.op, valid=4)


@says("starting the read from a peer raised: OSError: no file left", "starting the fetch or the copy raised", "READY")
def peer_raises(play: Play) -> None:
    read = play.plan_with_peer()
    play.take(events.CommandRaised, op=read.op, detail="Traceback\n  …\nOSError: no file left")
    play.bring_everything("r1")


@says(causes.LATE["peer fetch"], LOAD_CAUSES["peer_late"], "sent too late by a peer", counts="peer_fetches_late")
def peer_is_late(play: Play) -> None:
    read = play.plan_with_peer()
    play.wait_for_clock()
    play.bring_everything("r1")
    play.take(events.PagesFetched, op=read.op, valid=4)


PEER = ("decode-1:9000",)
NOT_ASKED = "pages were not asked of peer decode-1:9000: "


@says(f"4 {NOT_ASKED}{PEER_DECLINED['paused']}", counts="peer_pages_declined")
def peer_has_failed_a_moment_ago(play: Play) -> None:
    read = play.plan_with_peer("r0")
    play.take(events.PagesFetched, op=read.op, valid=0, error="peer decode-1:9000: it drains")
    play.bring_everything("r0")
    play.arrive("r1", tokens=b"xxyyzzww", peers=PEER)


@says(f"4 {NOT_ASKED}{PEER_DECLINED['below_threshold']}")
def too_few_pages_for_a_peer(play: Play) -> None:
    play.begin_with(prefetch_threshold_tokens=9)
    play.arrive("r1", peers=PEER)


@says(f"2 {NOT_ASKED}{PEER_DECLINED['limit']}", "Read pages [0, 2) from peer")
def more_than_peers_may_write(play: Play) -> None:
    play.begin_with(peer_host_share=0.34)
    play.arrive("r1", peers=PEER)


@says(f"2 {NOT_ASKED}{PEER_DECLINED['no_host_page']}")
def host_is_short_for_a_peer(play: Play) -> None:
    play.begin_with(peer_host_share=1.0)
    play.plan_with_storage("r0", tokens=b"zzzzzzzz")
    play.arrive("r1", peers=PEER)
    play.answer_queries(found=0)


@says(f"4 {NOT_ASKED}{PEER_DECLINED['unmeasured']}")
def peers_are_measured_with_another_request(play: Play) -> None:
    play.plan_with_peer("r0", policy={"prefetch": "soonest"}, tokens=b"zz")
    play.arrive("r1", peers=PEER)


@says(f"4 {NOT_ASKED}{PEER_DECLINED['slower']}")
def prefill_is_sooner_than_a_peer(play: Play) -> None:
    play.begin_with(prefetch="soonest", peer_host_share=1.0)
    play.arrive("big", tokens=b"0123456789abcdef0123456789")
    play.bring_everything("big")
    play.arrive("r9", tokens=b"yy")
    play.at_s += 0.018
    play.bring_everything("r9")
    play.arrive("r0", tokens=b"zz", peers=PEER)
    play.at_s += 0.09
    play.take(events.PagesFetched, op=play.last(commands.FetchPages).op, valid=1)
    play.bring_everything("r0")
    play.take(events.AbortRequested, request_id="big")
    play.arrive("r1", peers=PEER)


@says(f"4 {NOT_ASKED}{PEER_DECLINED['in_the_way']}")
def remains_are_in_the_way_of_a_peer(play: Play) -> None:
    read = play.plan_with_peer("r0")
    play.send_promise("r0")
    play.take(events.PagesFetched, op=read.op, valid=0)
    play.take(events.WriterLost, writer="p0", cause="no heartbeat for 2 s")
    play.arrive("r1", peers=PEER)
    play.bring_everything("r1")


@says("a hint named a peer that is not asked: 'one:1' is not in cache_peers.allow")
def a_hint_names_a_peer_that_is_not_allowed(play: Play) -> None:
    play.arrive("r1", peers_refused=("'one:1' is not in cache_peers.allow",))


@says("the fetch from storage failed: disk on fire", "2 under load by another", "READY")
def shared_fetch_fails(play: Play) -> None:
    fetch = play.plan_with_storage("r0", found=2)
    play.send_promise("r0")
    play.arrive("r1")
    play.answer_queries(found=0)
    play.take(events.PagesFetched, op=fetch.op, valid=0, error="disk on fire")
    play.bring_everything("r0")
    play.bring_everything("r1")


@says("asking storage failed: connection refused", "without storage", "READY", counts="l3_queries_failed")
def query_fails(play: Play) -> None:
    play.ask_storage()
    play.take(events.StorageAnswered, op=play.last(commands.QueryStorage).op, found=0, error="connection refused")
    play.bring_everything("r1")


@says("starting asking storage raised: OSError: no socket", "without storage", "READY")
def query_raises(play: Play) -> None:
    play.ask_storage()
    play.take(events.CommandRaised, op=play.last(commands.QueryStorage).op, detail="Traceback\nOSError: no socket")
    play.bring_everything("r1")


@says(causes.UNANSWERED, "without storage", "READY", "it has 4", counts="l3_queries_outwaited")
def query_takes_longer_than_it_is_worth(play: Play) -> None:
    play.ask_storage("r0", tokens=b"zzzzzzzz")
    play.answer_queries(found=0)
    play.bring_everything("r0")
    play.arrive("r1")
    op = play.last(commands.QueryStorage).op
    play.wait_for_clock()
    play.take(events.StorageAnswered, op=op, found=4)
    play.bring_everything("r1")


@says(causes.LATE["query"], "without storage", "READY", counts="l3_queries_late outcomes_late")
def query_is_late(play: Play) -> None:
    play.change_policy(prefetch="wait_complete")
    op = play.ask_storage()
    play.wait_for_clock()
    play.bring_everything("r1")
    play.take(events.StorageAnswered, op=op, found=4)


@says("asking storage failed: gone", "that opened the breaker: storage is asked nothing", counts="l3_breaker_opened")
def breaker_opens(play: Play) -> None:
    play.change_policy(breaker_failures=1)
    play.ask_storage()
    play.take(events.StorageAnswered, op=play.last(commands.QueryStorage).op, found=0, error="gone")
    play.bring_everything("r1")


@says("storage was not asked: the breaker is open: storage failed or was late 1 times", counts="l3_probes_failed")
def breaker_is_open(play: Play) -> None:
    play.change_policy(breaker_failures=1)
    play.ask_storage("r0")
    play.take(events.StorageAnswered, op=play.last(commands.QueryStorage).op, found=0, error="gone")
    play.wait_for_clock()
    play.take(events.StorageProbed, op=play.last(commands.ProbeStorage).op, error="still gone")
    play.arrive("r1", tokens=b"zzzzzzzz")
    play.bring_everything("r1")


def answered_and_waiting(play: Play) -> None:
    """Storage has answered that it has all of r1, which waits for device pages."""
    play.take(events.StorageChanged, available=True)
    play.bring_to("PREALLOC")
    play.answer_queries(found=4)


@says("4 pages that storage has were declined", DECLINED["storage_left_alone"], "(the breaker is open")
def breaker_opens_before_the_plan(play: Play) -> None:
    play.change_policy(breaker_failures=1)
    answered_and_waiting(play)
    play.arrive("r2", tokens=b"zzzzzzzz")
    play.take(events.StorageAnswered, op=play.last(commands.QueryStorage).op, found=0, error="gone")
    play.take(events.AbortRequested, request_id="big")
    play.bring_everything("r1")


@says("storage was detached.", DECLINED["storage_left_alone"], "(it was detached)", counts="l3_declined_pages")
def storage_is_detached(play: Play) -> None:
    answered_and_waiting(play)
    play.take(events.StorageChanged, available=False)
    play.take(events.AbortRequested, request_id="big")
    play.bring_everything("r1")


@says("the storage policy was changed: prefetch_threshold_tokens from 0 to 100", "prefetch_threshold_tokens is 100")
def policy_changes(play: Play) -> None:
    answered_and_waiting(play)
    play.change_policy(prefetch_threshold_tokens=100)
    play.take(events.AbortRequested, request_id="big")
    play.bring_everything("r1")


@says("3 pages that storage has were declined", DECLINED["below_threshold"], "(prefetch_threshold_tokens is 7)")
def hit_is_below_threshold(play: Play) -> None:
    play.change_policy(prefetch_threshold_tokens=7)
    play.ask_storage()
    play.answer_queries(found=3)
    play.bring_everything("r1")


@says("2 pages that storage has were declined", DECLINED["limit"], "(fetch_pages_in_flight_max is 2)")
def too_many_fetches_are_in_flight(play: Play) -> None:
    play.change_policy(fetch_pages_in_flight_max=2)
    play.plan_with_storage("r1")


@says("3 pages that storage has were declined", DECLINED["limit"], "(fetch_pages_per_s is 1)")
def too_much_is_fetched_in_a_second(play: Play) -> None:
    play.change_policy(fetch_pages_per_s=1.0)
    play.plan_with_storage("r1")


@says(
    "3 pages that storage has were declined",
    DECLINED["limit"],
    "(at its pace no more arrives in time: fetch_deadline_sh",
)
def storage_is_too_slow_for_more(play: Play) -> None:
    play.change_policy(prefetch_threshold_tokens=2)
    fetch = play.plan_with_storage("r0", tokens=b"zz", found=1)
    play.at_s += 0.08
    play.take(events.PagesFetched, op=fetch.op, valid=1)
    play.bring_everything("r0")
    play.arrive("r1")
    play.answer_queries(found=4)


@says("Fetched pages [0, 4) from storage ahead: 0 came", causes.LATE["fetch"], causes.CONSEQUENCES["ahead"], "READY")
def fetch_ahead_is_late(play: Play) -> None:
    play.change_policy(lookahead_pages_max=4)
    answered_and_waiting(play)
    play.wait_for_clock()
    play.take(events.PagesFetched, op=play.last(commands.FetchPages).op, valid=0)
    play.take(events.AbortRequested, request_id="big")
    play.take(events.PagesFetched, op=play.last(commands.FetchPages).op, valid=4)
    play.bring_everything("r1")


@says("the fetch from storage failed: disk on fire; the plan goes by what has arrived ahead of it", "READY")
def fetch_ahead_fails(play: Play) -> None:
    play.change_policy(lookahead_pages_max=4)
    answered_and_waiting(play)
    play.take(events.PagesFetched, op=play.last(commands.FetchPages).op, valid=0, error="disk on fire")
    play.take(events.AbortRequested, request_id="big")
    play.take(events.PagesFetched, op=play.last(commands.FetchPages).op, valid=4)
    play.bring_everything("r1")


@says("2 pages that storage has were declined", DECLINED["no_host_page"], "READY", counts="l3_declined_pages")
def host_is_short(play: Play) -> None:
    play.plan_with_storage("r0", tokens=b"zzzzzzzz")
    fetch = play.plan_with_storage("r1", tokens=b"aabbccdd", found=4)
    play.take(events.PagesFetched, op=fetch.op, valid=2)
    play.bring_everything("r1")


@says("4 pages that storage has were declined", DECLINED["unmeasured"], "(prefetch is soonest)")
def storage_is_measured_with_another_request(play: Play) -> None:
    play.change_policy(prefetch="soonest")
    play.plan_with_storage("r0", tokens=b"zz", found=1)
    play.arrive("r1")
    play.answer_queries(found=4)
    # It waits for the measurement, but not for so long.
    play.at_s += 0.06
    play.take(events.ClockAdvanced)


@says("4 pages that storage has were declined", DECLINED["slower"], "(prefetch is soonest)")
def the_transfer_brings_them_sooner(play: Play) -> None:
    play.change_policy(prefetch="soonest")
    play.arrive("big", tokens=b"0123456789abcdef0123456789")
    play.bring_everything("big")
    play.take(events.StorageChanged, available=True)
    play.arrive("r9", tokens=b"yy")
    play.answer_queries(found=0)
    play.at_s += 0.018
    play.bring_everything("r9")
    fetch = play.plan_with_storage("r0", tokens=b"zz", found=1)
    play.at_s += 0.09
    play.take(events.PagesFetched, op=fetch.op, valid=1)
    play.bring_everything("r0")
    # The answer comes while r1 waits for memory; on its own it would not be waited for.
    play.arrive("r1")
    play.answer_queries(found=4)
    play.take(events.AbortRequested, request_id="big")


@says("4 pages that host memory has were declined", DECLINED["copies_slower"], counts="l2_declined_pages")
def the_transfer_brings_what_host_memory_has_sooner(play: Play) -> None:
    play.change_policy(prefetch="soonest")
    play.plan_with_host("r8")
    for name, taken_s in (("r8", 0.1), ("r9", 0.11)):
        if name != "r8":
            play.arrive(name, b"aabbccdd")
        copy = play.last(commands.CopyPages, target="device", component="full")
        play.at_s += taken_s
        play.take(events.CopyEnded, op=copy.op)
        play.bring_everything(name)
        play.take(events.FinishRequested, request_id=name, keys=b"aabbccdd", tokens=8)
        play.take(events.FlushRequested, call=2, tiers=("l1",))
    play.arrive("r1", b"aabbccdd")
    play.bring_everything("r1")


@says("2 pages that storage has were declined", DECLINED["out_of_reach"])
def caches_forget_what_is_in_front_of_the_hit(play: Play) -> None:
    play.change_policy(breaker_failures=1)
    play.arrive("r0", tokens=b"aabb")
    play.bring_everything("r0")
    play.take(events.FinishRequested, request_id="r0", keys=b"aabb", tokens=4)
    play.take(events.CopyEnded, op=play.last(commands.CopyPages, target="host", component="full").op)
    play.arrive("big", tokens=b"0123456789abcdef0123456789ab")
    play.bring_everything("big")
    play.take(events.StorageChanged, available=True)
    play.arrive("r1")
    play.answer_queries(found=2)
    play.take(events.FlushRequested, call=2, tiers=("l1", "l2"))
    play.arrive("r2", tokens=b"zzzzzzzz")
    play.take(events.StorageAnswered, op=play.last(commands.QueryStorage).op, found=0, error="gone")
    play.take(events.AbortRequested, request_id="big")
    play.bring_everything("r1")


@says("4 pages that storage has were declined", DECLINED["in_the_way"], "READY")
def remains_of_another_load_are_in_the_way(play: Play) -> None:
    fetch = play.plan_with_storage("r0")
    play.send_promise("r0")
    play.take(events.PagesFetched, op=fetch.op, valid=0, error="disk on fire")
    play.take(events.WriterLost, writer="p0", cause="no heartbeat for 2 s")
    play.arrive("r1")
    play.answer_queries(found=4)
    play.bring_everything("r1")


# --- Copies ---


@says(
    "the copy from host to device failed: CopyFailed: bus error",
    LOAD_CAUSES["copy_failed"],
    "READY",
    counts="copies_failed",
)
def copy_fails(play: Play) -> None:
    copy = play.plan_with_host("r1")
    play.take(events.CopyEnded, op=copy.op, error="CopyFailed: bus error")
    play.bring_everything("r1")


@says(
    "the copy from host to device failed: PagesDamaged: host page 3 has changed",
    LOAD_CAUSES["copy_failed"],
    "READY",
    counts="l2_damaged",
)
def host_page_is_damaged(play: Play) -> None:
    copy = play.plan_with_host("r1")
    play.take(events.CopyEnded, op=copy.op, error="PagesDamaged: host page 3 has changed", intact=1)
    play.bring_everything("r1")
    assert not any(node.host for node in play.core.state.index.nodes()), "damaged pages stay in host memory"


@says("starting the copy from host to device raised: RuntimeError: no thread", "extend", "READY")
def copy_raises(play: Play) -> None:
    copy = play.plan_with_host("r1")
    play.take(events.CommandRaised, op=copy.op, detail="RuntimeError: no thread")
    play.bring_everything("r1")


@says(causes.LATE["copy"], causes.CONSEQUENCES["copy"], LOAD_CAUSES["copy_late"], "READY", counts="copies_late extends")
def copy_is_late(play: Play) -> None:
    copy = play.plan_with_host("r1")
    play.wait_for_clock()
    play.take(events.CopyEnded, op=copy.op)
    play.bring_everything("r1")
