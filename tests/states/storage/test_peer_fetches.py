"""Fetches from the host memory of other decode workers: what a plan asks for, and what follows from the answer."""

from __future__ import annotations

import pytest

from simulation.rig import Rig, ids
from tidekv.states import commands, events

PROMPT = b"abcdefgh"
PEERS = ("one:1", "two:2")


def asked(rig: Rig, **fields: object) -> commands.FetchPages:
    """A request for the prompt has asked a peer; returns the fetch."""
    rig.arrive("a", PROMPT, **{"peers": PEERS, "deadline_at_s": 100.0, **fields})
    return rig.take(commands.FetchPages)


def end(rig: Rig) -> commands.ReportReady:
    for copy in rig.take_all(commands.CopyPages, target="device"):
        rig.copied(copy)
    rig.take_all(commands.SendReceived)
    ready = rig.take(commands.ReportReady)
    rig.nothing_else()
    return ready


def test_a_plan_asks_the_first_peer_for_all_that_no_tier_has() -> None:
    rig = Rig()
    rig.make_cached("past", b"ab")
    fetch = asked(rig)
    assert (fetch.peer, ids(fetch.positions), fetch.timeout_s) == ("one:1", [2, 3, 4, 5, 6, 7], 0.8)
    promise = rig.take(commands.SendPromise)
    assert (promise.promised_tokens, len(promise.pages)) == (8, 0)
    rig.promised(promise)
    rig.aux(promise)
    rig.chunk(promise)
    rig.fetched(fetch)
    ready = end(rig)
    assert ready.sources == {"l1": 2, "l2": 0, "l3": 0, "transfer": 0, "peer": 6}


def test_what_a_peer_sent_is_in_host_memory_and_not_believed_to_be_stored() -> None:
    rig = Rig()
    fetch = asked(rig)
    promise = rig.take(commands.SendPromise)
    rig.fetched(fetch)
    rig.serve(promise)
    end(rig)
    leaf = rig.core.state.index.match("", PROMPT).host_node
    assert leaf.host is not None and not rig.core.state.index.tree.is_stored(leaf)


@pytest.mark.parametrize("valid", [0, 3])
@pytest.mark.parametrize("error", ["", "gone"])
def test_what_a_peer_does_not_send_is_asked_of_prefill(valid: int, error: str) -> None:
    rig = Rig()
    fetch = asked(rig)
    promise = rig.take(commands.SendPromise)
    rig.serve(promise)
    rig.fetched(fetch, valid, error)
    extend = rig.take(commands.SendExtend)
    assert (extend.first, len(extend.pages)) == (valid, 8 - valid)
    rig.chunk(extend)
    ready = end(rig)
    assert ready.sources == {
        "l1": 0, "l2": 0, "l3": 0, "transfer": 8 - valid, **({"peer": valid} if valid else {})
    }  # fmt: skip
    assert rig.core.state.counters["peer_pages_short"] == 8 - valid
    # A peer that had fewer pages is asked again, one that failed is not.
    rig.arrive("b", b"xyz", peers=PEERS, deadline_at_s=100.0)
    assert rig.take(commands.FetchPages).peer == (PEERS[1] if error else PEERS[0])


def test_a_silent_peer_costs_its_share_of_the_time_and_is_not_asked_for_a_while() -> None:
    rig = Rig(peer_wait_s=1.0, peer_wait_share=0.25, peer_pause_s=5.0)
    fetch = asked(rig, deadline_at_s=2.0)
    assert fetch.timeout_s == pytest.approx(0.4)
    promise = rig.take(commands.SendPromise)
    rig.serve(promise)
    rig.wait_until(0.49)
    rig.nothing_else()
    rig.wait_until(0.5)
    extend = rig.take(commands.SendExtend)
    assert (extend.first, len(extend.pages)) == (0, 8)
    rig.chunk(extend)
    end(rig)
    # Its host pages may still be written to.
    assert rig.core.statistics()["host_owned"] == 8 and rig.core.peers.pages_in_flight == 8
    rig.arrive("b", b"xyz", peers=PEERS[:1], deadline_at_s=100.0)
    assert rig.take_all(commands.FetchPages) == []
    rig.make_all = None  # type: ignore[attr-defined]


@pytest.mark.parametrize("prefetch", ["soonest", "best_effort", "timeout"])
def test_without_a_prefill_every_page_is_asked_of_a_peer_and_waited_for(prefetch: str) -> None:
    rig = Rig(lends_device=True, prefetch=prefetch, peer_host_share=1.0)
    for number, tokens in enumerate((b"abcdefgh", b"stuvwxyz")):
        rig.arrive(f"r{number}", tokens, prefills=events.NOBODY, peers=PEERS, deadline_at_s=100.0)
    fetches, promises = rig.take_all(commands.FetchPages), rig.take_all(commands.SendPromise)
    # Nothing would bring what the second one leaves out because the first is under way, and nothing is known of peers.
    assert [len(fetch.host_pages) for fetch in fetches] == [8, 8]
    for promise in promises:
        rig.serve(promise)
    # The rooms are complete: the pages are asked for all the same.
    rig.nothing_else()
    rig.wait_until(0.5)
    rig.nothing_else()
    for fetch in fetches:
        rig.fetched(fetch)
    for copy in rig.take_all(commands.CopyPages, target="device"):
        rig.copied(copy)
    rig.take_all(commands.SendReceived)
    assert [each.restored_tokens for each in rig.take_all(commands.ReportRestored)] == [8, 8]
    rig.nothing_else()
