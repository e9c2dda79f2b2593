"""What a vote compares: every part that differs is named."""

from __future__ import annotations

import msgspec

from tidekv.states import events
from tidekv.states.core import Core
from tidekv.states.ranks.state_digest import PARTS, StateDigest


def test_an_order_of_free_pages_that_differs_is_named(make_ranks) -> None:
    ranks = make_ranks(2)
    free = ranks.cores[1].state.device.free_pages
    free[0], free[1] = free[1], free[0]
    assert ranks.diverged() == {"device pool"}


def test_host_pages_that_differ_are_named(make_ranks) -> None:
    ranks = make_ranks(2)
    free = ranks.cores[0].state.host.free_pages
    free[-1], free[-2] = free[-2], free[-1]
    assert ranks.diverged() == {"host pool"}


def test_a_tree_that_differs_is_named_when_ranks_are_idle(make_ranks) -> None:
    ranks = make_ranks(2)
    ranks.make_ready()
    ranks.receive(events.AbortRequested, request_id="a")
    ranks.turn()
    assert ranks.agreements[0].is_idle
    assert ranks.turn().is_idle
    assert all(agreement.is_whole for agreement in ranks.agreements)
    node = next(iter(ranks.cores[1].state.index.nodes()))
    node.device[0], node.device[1] = node.device[1], node.device[0]
    assert ranks.diverged(whole=True) == {"index"}


def test_an_event_more_on_one_rank_is_named(make_ranks) -> None:
    ranks = make_ranks(2)
    event = events.RequestArrived(at_s=0.0, request_id="x", request_number=1, keys=b"ab", prompt_tokens=2)
    ranks.agreements[1].stepped(event, ranks.cores[1].step(event))
    parts = ranks.diverged()
    assert {"events", "requests", "rooms", "slots"} <= parts


def test_a_rank_of_another_epoch_or_turn_is_named(make_ranks) -> None:
    ranks = make_ranks(2)
    ranks.agreements[1].epoch = 7
    ranks.agreements[1].turn = 4
    assert ranks.diverged() == {"epoch", "turn"}


def test_each_compared_number_has_two_slots(make_ranks) -> None:
    agreement = make_ranks(1).agreements[0]
    assert 4 + 2 * len(agreement.compared) == agreement.header_slots
    assert set(PARTS) < set(agreement.compared)


def test_pools_that_are_larger_than_the_window_are_compared_by_and_by(make_ranks) -> None:
    settings = msgspec.structs.replace(make_ranks.settings, device_pages=10_000)
    cores = [Core(settings), Core(settings)]
    prints = [StateDigest(core) for core in cores]
    free = cores[1].state.device.free_pages
    free[0], free[1] = free[1], free[0]
    seen = [prints[0].numbers(turn, whole=False) != prints[1].numbers(turn, whole=False) for turn in range(12)]
    assert any(seen)
    assert prints[0].numbers(1, whole=True) != prints[1].numbers(1, whole=True)


def test_evictions_are_part_of_the_fingerprint(make_ranks) -> None:
    ranks = make_ranks(2)
    ranks.make_ready()
    ranks.receive(events.AbortRequested, request_id="a")
    ranks.turn()
    before = ranks.agreements[0]._state_digest.numbers(1, whole=False)
    ranks.receive(events.FlushRequested, ranks=[0], call=1, tiers=("l1", "l2"))
    ranks.turn()
    assert ranks.agreements[0]._state_digest.numbers(1, whole=False)[1] != before[1]


# --- Questions, one by one ---
