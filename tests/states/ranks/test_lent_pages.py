"""Lent device pages: each rank lends its own, and the cores decide as one."""

from __future__ import annotations

import msgspec
import pytest

from tests.states.ranks.conftest import SETTINGS, Ranks
from tidekv.states import commands, events
from tidekv.states.commands import Command
from tidekv.states.ranks.call_votes import without_own_fields

LENDING = msgspec.structs.replace(SETTINGS, lends_device=True, growth_reserve_pages=0)
PAGES = ((3, 1, 4, 15), (9, 2, 6, 5))


@pytest.fixture
def lent() -> Ranks:
    return Ranks(2, LENDING)


def arrive(ranks: Ranks, held: tuple[int, int] = (0, 0), request_id: str = "a") -> None:
    for rank in range(2):
        ranks.receive(
            events.RequestArrived,
            ranks=[rank],
            request_id=request_id,
            request_number=7 + rank,
            keys=b"abcd",
            prompt_tokens=4,
            lent_pages=PAGES[rank],
            held_pages=held[rank],
        )


def offer(ranks: Ranks, *of: int) -> None:
    for rank in of:
        ranks.receive(events.PagesOffered, ranks=[rank], offer=20 + rank, keys=b"abcd", pages=PAGES[rank])


def each(ranks: Ranks, kind: type[Command]) -> list[Command]:
    """The only command of this kind on each rank."""
    found = [[given for given in of_rank if isinstance(given, kind)] for of_rank in ranks.given]
    assert [len(wishes) for wishes in found] == [1, 1], found
    ranks.given = [[wish for wish in given if not isinstance(wish, kind)] for given in ranks.given]
    return [wishes[0] for wishes in found]


def test_each_rank_asks_for_its_own_pages_and_all_get_the_same_part_back(lent: Ranks) -> None:
    arrive(lent, held=(1, 1))
    lent.turn()
    promises = each(lent, commands.SendPromise)
    assert [tuple(promise.pages) for promise in promises] == [pages[1:] for pages in PAGES]
    for agreement in lent.agreements:
        agreement.receive(events.PromiseSent(at_s=0.0, request_id="a", generation=0, writer="p", ranks=1))
    # One rank has everything, the other two pages of three.
    lent.chunk(0, 1, 3, last=True)
    lent.chunk(1, 1, 2, last=False)
    lent.turn()
    lent.room(events.RoomFailed, ranks=[1], cause="failed", settled=True)
    lent.turn()
    lent.room(events.RoomDrained, ranks=[0], rank=0)
    lent.turn()
    reports = each(lent, commands.ReportRestored)
    assert [report.restored_tokens for report in reports] == [3, 3]
    assert [report.sources for report in reports] == [{"l1": 1, "l2": 0, "l3": 0, "transfer": 2}] * 2
    assert lent.agreements[0].slots_taken == lent.agreements[1].slots_taken == 0


def test_an_offer_is_taken_when_all_ranks_have_made_it_each_of_its_own_pages(lent: Ranks) -> None:
    offer(lent, 1)
    lent.turn()
    assert lent.taken == []
    offer(lent, 0)
    lent.turn()
    copies = each(lent, commands.CopyPages)
    assert [tuple(copy.source_pages) for copy in copies] == list(PAGES)
    lent.receive(events.CopyEnded, op=copies[0].op)
    lent.turn()
    assert [report.offer for report in each(lent, commands.ReportOffered)] == [20, 21]
    assert lent.agreements[0].is_idle and not lent.agreements[0].slots_taken


def test_an_offer_that_a_rank_does_not_make_is_refused_on_all(lent: Ranks) -> None:
    offer(lent, 0)
    lent.turn()
    lent.now_s = 3.0
    assert [refusal.call.offer for refusal in lent.turn().refusals] == [20]
    offer(lent, 1)
    lent.now_s = 6.0
    assert [refusal.call.offer for refusal in lent.agreements[1].take_refusals(lent.now_s)] == [21]
    assert lent.given == [[], []]


def test_a_second_equal_offer_is_refused_while_the_ranks_agree_on_the_first(lent: Ranks) -> None:
    offer(lent, 0, 0, 1)
    (refused,) = lent.agreements[0].take_refusals(0.0)
    assert "the same offer" in refused.detail
    lent.turn()
    assert len(each(lent, commands.CopyPages)) == 2


def test_ranks_that_hold_different_numbers_of_pages_are_refused(lent: Ranks) -> None:
    arrive(lent, held=(1, 2))
    (refused,) = lent.turn().refusals
    assert refused.cause == "ranks differ" and lent.given == [[], []]


def test_the_leaders_frame_carries_no_pages_of_the_leader() -> None:
    arrival = events.RequestArrived(
        at_s=0.0, request_id="a", request_number=1, keys=b"abcd", prompt_tokens=4, lent_pages=(1, 2, 3, 4), rest=b"e"
    )
    carried = without_own_fields(arrival)
    assert (carried.keys, carried.rest, carried.lent_pages, carried.request_id) == (b"", b"", (), "a")
