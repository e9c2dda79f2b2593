"""Windows and states in the storage of several ranks: of each component, as much as every rank has."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.support.thorough import examples
from tidekv.states import commands, events
from tidekv.states.component_specs import Component
from tidekv.states.types import FULL

PROMPT = bytes(range(10))
CACHED = 4
"""Pages of the prompt on the device and host of all ranks, with the component pages of their end."""
WINDOW = Component(name="window", kind="window", window_tokens=3, device_pages=60, host_pages=60)
STATE = Component(name="state", kind="state", device_pages=20, host_pages=20)


def ranks_of(make_ranks, count: int, *components: Component, cached: int = CACHED):
    changed = {"components": components or (WINDOW, STATE), "device_pages": 60, "host_pages": 60}
    ranks = make_ranks(count, settings=msgspec.structs.replace(make_ranks.settings, **changed))
    if cached:
        past = PROMPT[:cached]
        ranks.make_ready("a", past)
        component_pages = ranks.take(commands.ReportReady).component_pages
        left = tuple(
            events.ComponentLeft(table.component, table.first, tuple(table.pages)) for table in component_pages
        )
        ranks.receive(events.FinishRequested, request_id="a", keys=past, tokens=cached, component_pages=left)
        ranks.turn()
        for is_full in (True, False):
            given = [command for command in ranks.given[0] if isinstance(command, commands.CopyPages)]
            copies = [command for command in given if (command.component == FULL) == is_full]
            assert copies
            for copy in copies:
                ranks.receive(events.CopyEnded, op=copy.op)
            ranks.turn()
        for given_to in ranks.given:
            given_to.clear()
    ranks.receive(events.StorageChanged, available=True, component_pages=True)
    ranks.turn()
    return ranks


def query_of(ranks, tokens: bytes = PROMPT) -> commands.QueryStorage:
    ranks.arrive("b", tokens)
    ranks.turn()
    return ranks.take(commands.QueryStorage)


def answer(ranks, rank: int, query: commands.QueryStorage, found: int, **positions: set[int]) -> None:
    component_pages = tuple(
        events.StoredComponent(name, tuple((at, at + 1) for at in sorted(here))) for name, here in positions.items()
    )
    ranks.receive(events.StorageAnswered, ranks=[rank], op=query.op, found=found, component_pages=component_pages)


def answer_after_votes(ranks) -> events.StorageAnswered:
    """Vote once: the core has the answer."""
    assert any(agreement.has_news for agreement in ranks.agreements)
    ranks.turn()
    (event,) = ranks.taken
    assert isinstance(event, events.StorageAnswered)
    assert not any(agreement.has_news for agreement in ranks.agreements)
    return event


Answer = tuple[int, set[int], set[int]]
"""Of one rank: full pages found behind those in the caches, and where records of both components are."""
positions = st.sets(st.integers(0, len(PROMPT) - 1)) | st.sets(st.integers(0, len(PROMPT) - 1), min_size=8)
answers = st.lists(
    st.tuples(st.integers(0, len(PROMPT) - CACHED), positions, positions),
    min_size=1,
    max_size=4,
)


def end_of(first: int, here: set[int]) -> int:
    """The naive model: the end of an unbroken run of positions."""
    while first in here:
        first += 1
    return first


@examples(
    100,
    # The fixture is a class, and keeps nothing.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(of_ranks=answers, is_late=st.booleans())
def test_of_each_component_as_much_is_used_as_every_rank_has(make_ranks, of_ranks: list[Answer], is_late: bool) -> None:
    ranks = ranks_of(make_ranks, len(of_ranks))
    query = query_of(ranks)
    assert (query.first, query.count) == (CACHED, len(PROMPT) - CACHED)
    assert query.components_first == {"window": 7, "state": 9}
    for rank, (found, window, state) in enumerate(of_ranks):
        if is_late and rank:
            assert ranks.turn().events == []
        answer(ranks, rank, query, found, window=window, state=state)
    event = answer_after_votes(ranks)
    assert event.found == min(found for found, *_ in of_ranks)
    ends = {
        "window": min(end_of(7, window) for _, window, _ in of_ranks),
        "state": min(end_of(9, state) for _, _, state in of_ranks),
    }
    firsts = query.components_first
    assert event.component_pages == tuple(
        events.StoredComponent(name, ((firsts[name], end),)) for name, end in ends.items() if end > firsts[name]
    )
    promise = ranks.take(commands.SendPromise)
    assert promise.promised_tokens == CACHED + event.found
    assert {tail.component: tail.first for tail in promise.component_pages} == ends
    for given_to in ranks.given:
        fetched = {
            fetch.component: list(fetch.positions)
            for fetch in given_to
            if isinstance(fetch, commands.FetchPages) and fetch.component != FULL
        }
        wanted = {name: list(range(firsts[name], end)) for name, end in ends.items()}
        assert fetched == {name: ats for name, ats in wanted.items() if ats}


def test_a_rank_without_a_record_stops_all_from_using_stored_component_pages(make_ranks) -> None:
    ranks = ranks_of(make_ranks, 3)
    query = query_of(ranks)
    everywhere = set(range(len(PROMPT)))
    for rank in range(2):
        answer(ranks, rank, query, 6, window=everywhere, state=everywhere)
    answer(ranks, 2, query, 6)
    before = ranks.agreements[0].turn
    assert answer_after_votes(ranks) == events.StorageAnswered(at_s=0.0, op=query.op, found=6)
    assert ranks.agreements[0].turn == before + 1
    assert ranks.take(commands.SendPromise).promised_tokens == len(PROMPT)


@pytest.mark.parametrize("at_rank", [0, 1, 2])
@pytest.mark.parametrize("raised", [False, True])
def test_a_query_that_fails_on_one_rank_has_failed_on_all(make_ranks, at_rank: int, raised: bool) -> None:
    ranks = ranks_of(make_ranks, 3)
    query = query_of(ranks)
    everywhere = set(range(len(PROMPT)))
    for rank in range(3):
        if rank == at_rank and raised:
            ranks.receive(events.CommandRaised, ranks=[rank], op=query.op, detail="out of file descriptors")
        elif rank == at_rank:
            ranks.receive(events.StorageAnswered, ranks=[rank], op=query.op, found=6, error="unreachable")
        else:
            answer(ranks, rank, query, 6, window=everywhere, state=everywhere)
    assert answer_after_votes(ranks) == events.StorageAnswered(
        at_s=0.0, op=query.op, found=0, error=f"failed on rank {at_rank}"
    )
    assert ranks.take(commands.SendPromise).promised_tokens == CACHED


def test_a_repeated_or_late_answer_counts_once(make_ranks) -> None:
    ranks = ranks_of(make_ranks, 2)
    query = query_of(ranks)
    everywhere = set(range(len(PROMPT)))
    for has in (everywhere, set[int]()):
        for rank in range(2):
            answer(ranks, rank, query, 6, window=has, state=has)
    assert answer_after_votes(ranks).component_pages[1].ranges == ((9, 10),)
    answer(ranks, 1, query, 6)
    assert ranks.agreements[1].outcomes_unknown == 1
    assert not ranks.agreements[1].has_news


def test_the_query_of_a_request_that_is_gone_still_ends(make_ranks) -> None:
    ranks = ranks_of(make_ranks, 2)
    query = query_of(ranks)
    ranks.receive(events.AbortRequested, ranks=[1], request_id="b", cause="cancelled by the caller")
    ranks.turn()
    for rank in range(2):
        answer(ranks, rank, query, 6, window={7, 8, 9}, state={9 - rank})
    answer_after_votes(ranks)
    assert ranks.turn().is_idle and ranks.agreements[0].slots_taken == 0


@pytest.mark.parametrize("is_late", [False, True])
def test_the_only_remaining_rank_decides_by_its_own_answer(make_ranks, is_late: bool) -> None:
    ranks = ranks_of(make_ranks, 2)
    query = query_of(ranks)
    if not is_late:
        answer(ranks, 0, query, 6, window={7, 8}, state={9})
        assert ranks.turn().events == []
    alone, core = ranks.agreements[0], ranks.cores[0]
    alone.go_solo()
    if is_late:
        answer(ranks, 0, query, 6, window={7, 8}, state={9})
    taken = []
    while alone.has_news:
        alone.open_turn(0.0)
        for event in alone.decide(list(alone.cast())).events:
            alone.stepped(event, core.step(event))
            taken.append(event)
    (told_alone,) = (event for event in taken if isinstance(event, events.StorageAnswered))
    assert told_alone.found == 6
    assert [entry.ranges for entry in told_alone.component_pages] == [((7, 9),), ((9, 10),)]
    core.check()
    assert alone.is_idle and core.is_idle


def test_storage_holds_component_pages_if_that_of_all_ranks_does(make_ranks) -> None:
    ranks = make_ranks(2, settings=msgspec.structs.replace(make_ranks.settings, components=(STATE,)))
    ranks.receive(events.StorageChanged, ranks=[0], available=True, component_pages=True)
    assert ranks.turn().events == []
    for component_pages in (False, True):
        ranks.receive(events.StorageChanged, ranks=[1], available=True, component_pages=component_pages)
        ranks.turn()
        assert ranks.taken == [events.StorageChanged(at_s=0.0, available=True, component_pages=component_pages)]
        assert ranks.cores[0].storage.keeps_components is component_pages
    ranks.receive(events.StorageChanged, ranks=[0], available=False)
    ranks.turn()
    assert ranks.taken == [events.StorageChanged(at_s=0.0, available=False)]
