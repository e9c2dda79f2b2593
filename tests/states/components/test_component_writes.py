"""Component pages in storage, by example: which ones are put, and which ones a query covers."""

from __future__ import annotations

from simulation.rig import Rig, ids
from tests.support.component_stories import (
    ALL,
    PROMPT,
    asked,
    cached,
    fetching,
    finish,
    only_in_storage,
    ready_with,
    rig_with,
    tail,
    window,
)
from tidekv.states import commands, events
from tidekv.states.storage_policy import StoragePolicy, policy_of


def test_component_pages_are_put_when_the_host_has_them_and_storage_has_the_full_pages() -> None:
    rig = rig_with()
    finish(rig, ready_with(rig, "a", PROMPT), PROMPT)
    rig.copied(rig.take(commands.CopyPages, target="host"))
    of_window, of_state = rig.take_all(commands.CopyPages, of_components=True)
    rig.copied(of_window)
    assert not rig.take_all(commands.StorePages, of_components=True)
    rig.stored(rig.take(commands.StorePages))
    put = rig.take(commands.StorePages, of_components=True)
    assert (put.component, put.first, put.host_pages) == ("window", 5, of_window.target_pages)
    # The other component follows later: the request's own tokens are forgotten by then.
    rig.take(commands.ForgetTokens)
    rig.copied(of_state)
    late = rig.take(commands.StorePages, of_components=True)
    assert (late.component, late.first, late.host_pages) == ("state", 7, of_state.target_pages)
    assert rig.core.keys_stored(put.op) == rig.core.keys_stored(late.op) == ("", PROMPT)
    # While they are read they cannot be evicted.
    assert rig.core.statistics()["window_host_protected"] == 3
    rig.stored(put)
    rig.stored(late, 0)
    assert rig.core.statistics()["component_pages_stored"] == 3 and rig.core.statistics()["window_host_protected"] == 0
    rig.take(commands.ReportFinished)
    rig.nothing_else()
    rig.expect_nothing_held()


def test_storage_has_no_component_pages_of_full_pages_that_the_write_policy_keeps_out() -> None:
    rig = rig_with(write_tokens_min=9)
    finish(rig, ready_with(rig, "a", PROMPT), PROMPT)
    rig.settle()
    rig.flush("l1")
    assert rig.core.statistics()["window_host_cached"] == 3 and not rig.core.statistics()["component_pages_stored"]
    rig.expect_nothing_held()


def test_storage_has_no_component_pages_of_full_pages_that_it_did_not_take() -> None:
    rig = rig_with()
    finish(rig, ready_with(rig, "a", PROMPT), PROMPT)
    rig.copied(rig.take(commands.CopyPages, target="host"))
    for copy in rig.take_all(commands.CopyPages, of_components=True):
        rig.copied(copy)
    rig.stored(rig.take(commands.StorePages), 7)
    assert not rig.take_all(commands.StorePages, of_components=True)


def test_incomplete_component_pages_are_not_put() -> None:
    rig = rig_with(window(3))
    cached(rig, PROMPT)
    index = rig.core.state.components
    assert index is not None and rig.core.component_backups is not None
    (leaf,) = (node for node in rig.core.state.index.nodes() if node.depth_pages == 8)
    upper = rig.core.state.index.split(leaf, 6)
    index.drop("host", "window", upper)
    rig.core.component_backups.writes.begin(leaf)
    assert not rig.core.state.out and not rig.core.statistics()["transitions_raised"]


def test_with_write_back_component_pages_are_put_before_their_full_pages_are_evicted() -> None:
    rig = rig_with(device_pages=16, host_pages=10, write="back", write_back_ahead=1.0)
    finish(rig, ready_with(rig, "a", PROMPT), PROMPT)
    rig.copied(rig.take(commands.CopyPages, target="host"))
    for copy in rig.take_all(commands.CopyPages, of_components=True):
        rig.copied(copy)
    put = rig.take(commands.StorePages)
    assert put.request_number == 0
    rig.stored(put)
    assert [put.component for put in rig.take_all(commands.StorePages, of_components=True)] == ["window", "state"]


def test_puts_of_component_pages_give_way_to_fetches() -> None:
    rig = rig_with(store_wait_s=5.0)
    only_in_storage(rig)
    finish(rig, ready_with(rig, "b", b"xyz"), b"xyz")
    rig.copied(rig.take(commands.CopyPages, target="host"))
    of_window, of_state = rig.take_all(commands.CopyPages, of_components=True)
    rig.stored(rig.take(commands.StorePages))
    rig.take(commands.ReportFinished)
    rig.take(commands.ForgetTokens)
    fetches = fetching(rig)
    rig.copied(of_window)
    rig.copied(of_state)
    assert not rig.take_all(commands.StorePages, of_components=True)
    # One has waited long enough, the other goes when the last fetch is over.
    rig.now_s += 1.0
    assert rig.core.component_backups is not None and len(rig.core.component_backups.writes.waiting) == 2
    for fetch in fetches:
        rig.fetched(fetch)
    assert not rig.take_all(commands.StorePages, of_components=True)
    rig.fetched(rig.take(commands.FetchPages))
    assert [put.component for put in rig.take_all(commands.StorePages, of_components=True)] == ["window", "state"]


def test_a_put_waits_for_fetches_only_so_long_and_not_for_storage_that_is_gone() -> None:
    for is_gone in (False, True):
        rig = rig_with(store_wait_s=5.0)
        only_in_storage(rig)
        finish(rig, ready_with(rig, "b", b"xyz"), b"xyz")
        rig.copied(rig.take(commands.CopyPages, target="host"))
        copies = rig.take_all(commands.CopyPages, of_components=True)
        rig.stored(rig.take(commands.StorePages))
        fetching(rig)
        for copy in copies:
            rig.copied(copy)
        if is_gone:
            rig.step(events.StorageChanged, available=False)
        rig.core.state.settings = rig.core.state.settings.with_policy(
            StoragePolicy(**{**policy_dict(rig), "prefetch_base_s": 100.0})
        )
        rig.wait_until(rig.now_s + 6.0)
        puts = rig.take_all(commands.StorePages, of_components=True)
        assert len(puts) == (0 if is_gone else 2)
        rig.pending += puts
        for fetch in rig.take_all(commands.FetchPages, of_components=True):
            rig.fetched(fetch)
        rig.abort("a")
        rig.settle()


def policy_dict(rig: Rig) -> dict[str, object]:
    policy = policy_of(rig.settings)
    return {name: getattr(policy, name) for name in StoragePolicy.__struct_fields__}


def test_a_late_put_is_counted_and_keeps_its_pin_until_it_ends() -> None:
    rig = rig_with()
    finish(rig, ready_with(rig, "a", PROMPT), PROMPT)
    rig.copied(rig.take(commands.CopyPages, target="host"))
    for copy in rig.take_all(commands.CopyPages, of_components=True):
        rig.copied(copy)
    rig.stored(rig.take(commands.StorePages))
    puts = rig.take_all(commands.StorePages, of_components=True)
    rig.wait_until(rig.now_s + 70.0)
    counts = rig.core.statistics()
    assert counts["backups_late"] == 2 and counts["window_host_protected"] == 3
    for put in puts:
        rig.step(events.CommandRaised, op=put.op, detail="no such shelf")
    assert rig.core.statistics()["window_host_protected"] == 0 and rig.core.statistics()["component_pages_stored"] == 0


def test_one_query_covers_full_pages_and_component_pages() -> None:
    rig = rig_with()
    only_in_storage(rig)
    query = asked(rig)
    assert (query.first, query.count, query.components_first) == (0, 8, {"window": 5, "state": 7})


def test_a_query_covers_only_positions_that_can_matter() -> None:
    rig = rig_with()
    cached(rig, PROMPT[:6])
    query = asked(rig)
    assert (query.first, query.count, query.components_first) == (6, 2, {"window": 6, "state": 7})


def test_a_request_that_lacks_only_component_pages_queries_only_those() -> None:
    rig = rig_with()
    cached(rig, PROMPT)
    assert rig.core.state.components is not None
    for tier in ("device", "host"):
        rig.core.state.components.evict(tier, "window", 16)
    query = asked(rig)
    assert (query.first, query.count, query.components_first) == (8, 0, {"window": 5})
    rig.answer(query, 0, component_pages=(tail("window", (5, 8)),))
    fetch, clone = rig.take(commands.FetchPages, of_components=True), rig.take(commands.CopyPages, of_components=True)
    assert (fetch.component, ids(fetch.positions), clone.component) == ("window", [5, 6, 7], "state")
    assert not rig.take_all(commands.FetchPages)
    assert rig.take(commands.SendPromise).promised_tokens == 8 and rig.state("a") == "PREFETCH"


def test_a_window_below_the_threshold_is_not_queried_and_a_record_always_is() -> None:
    rig = rig_with(prefetch_threshold_tokens=4)
    cached(rig, PROMPT[:6])
    query = asked(rig)
    assert (query.first, query.count, query.components_first) == (6, 2, {"state": 7})
    rig.answer(query, 2)
    assert rig.take(commands.SendPromise).promised_tokens == 6
    # No record is stored for the middle of a page.
    rig = rig_with(prefetch_threshold_tokens=4, page_size=2, key_bytes=2)
    rig.arrive("a", PROMPT[:5])
    rig.take(commands.QueryStorage)


def test_storage_without_component_pages_is_not_queried_for_those() -> None:
    rig = Rig(components=(window(),))  # type: ignore[arg-type]  # Not a number.
    rig.attach_storage()
    rig.arrive("a", PROMPT)
    rig.take(commands.QueryStorage)
    rig.nothing_else()


def test_a_request_plans_without_an_answer_that_is_late() -> None:
    rig = rig_with(prefetch_threshold_tokens=4)
    query = asked(rig)
    rig.arrive("b", b"xyz")
    rig.answer(rig.take(commands.QueryStorage), 0)
    assert (rig.state("a"), rig.state("b")) == ("PREALLOC", "TRANSFER")
    rig.wait_until(rig.now_s + 2.0)
    assert rig.state("a") == "TRANSFER" and rig.core.statistics()["l3_queries_late"] == 1
    rig.answer(query, 8, component_pages=ALL)
    assert rig.core.statistics()["outcomes_late"] == 1


def test_a_waiting_request_queries_again_if_pages_in_front_of_the_answer_have_left_the_caches() -> None:
    rig = rig_with(device_pages=9)
    cached(rig, PROMPT[:4])
    big = ready_with(rig, "big", b"12345")
    query = asked(rig)
    assert query.first == 4
    rig.answer(query, 4, component_pages=ALL)
    assert rig.state("a") == "PREALLOC"
    rig.flush("l1")
    rig.flush("l2")
    finish(rig, big, b"12345")
    for of_components in (False, True):
        for copy in rig.take_all(commands.CopyPages, of_components=of_components):
            rig.copied(copy)
    again = rig.take(commands.QueryStorage)
    assert (again.first, again.count) == (0, 8)
    rig.answer(again, 8, component_pages=ALL)
    assert rig.state("a") == "PREFETCH" and rig.take(commands.SendPromise).promised_tokens == 8


def test_storage_is_queried_again_for_pages_in_front_of_component_pages_that_have_left() -> None:
    rig = rig_with(device_pages=9)
    cached(rig, PROMPT)
    assert rig.core.state.components is not None
    for tier in ("device", "host"):
        rig.core.state.components.evict(tier, "window", 16)
    ready_with(rig, "big", b"12345")
    # The full pages are all here, and the query did not cover them.
    rig.answer(asked(rig), 0, component_pages=ALL)
    assert rig.state("a") == "PREALLOC"
    rig.flush("l1")
    rig.flush("l2")
    rig.abort("big")
    query = rig.take(commands.QueryStorage)
    assert (query.first, query.count, query.components_first) == (0, 8, {"window": 5, "state": 7})
    rig.answer(query, 8, component_pages=ALL)
    assert rig.take(commands.SendPromise).promised_tokens == 8
