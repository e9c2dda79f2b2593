"""Components in storage, by example: what is put there, how far it lets a plan reach, and what goes wrong."""

from __future__ import annotations

import pytest

from tidekv.engine.simulation.rig import Rig, ids
from tidekv.states import commands, events
from tidekv.states.components import Component
from tidekv.states.errors import BrokenInvariant
from tidekv.states.policy import StoragePolicy, policy_of

PROMPT = b"abcdefgh"


def window(tokens: int = 3, device: int = 16, host: int = 16) -> Component:
    return Component(name="window", kind="window", window_tokens=tokens, device_pages=device, host_pages=host)


def state(device: int = 8, host: int = 8) -> Component:
    return Component(name="state", kind="state", device_pages=device, host_pages=host)


def rig_with(*components: Component, **fields: object) -> Rig:
    rig = Rig(components=components or (window(), state()), **fields)  # type: ignore[arg-type]  # Not a number.
    rig.attach_storage(tails=True)
    return rig


def finish(rig: Rig, ready: commands.TellReady, tokens: bytes) -> None:
    """The caller has generated nothing, and leaves all tails at the end of its prompt."""
    assert ready.tails is not None
    left = tuple(events.TailLeft(table.component, table.first, tuple(table.pages)) for table in ready.tails)
    rig.step(events.FinishRequested, request_id=ready.request_id, keys=tokens, tokens=len(tokens), tails=left)


def ready_with(rig: Rig, request_id: str, tokens: bytes) -> commands.TellReady:
    """A prompt that prefill brings, since storage has nothing."""
    rig.arrive(request_id, tokens)
    for query in rig.take_all(commands.QueryTails):
        rig.answer(query, 0)
    rig.serve(rig.take(commands.SendPromise))
    rig.take(commands.SendReceived)
    return rig.take(commands.TellReady)


def cached(rig: Rig, tokens: bytes, name: str = "past") -> None:
    """Bring tokens and their tails into every tier there is."""
    finish(rig, ready_with(rig, name, tokens), tokens)
    for kind in (commands.CopyToHost, commands.CopyTail):
        for copy in rig.take_all(kind):
            rig.copied(copy)
    puts = rig.take_all(commands.StorePages)
    while puts:
        for put in puts:
            rig.stored(put)
        puts = [*rig.take_all(commands.StorePages), *rig.take_all(commands.StoreTail)]
    rig.take(commands.TellFinished)
    rig.take(commands.ForgetTokens)
    rig.nothing_else()


def only_in_storage(rig: Rig, tokens: bytes = PROMPT) -> None:
    cached(rig, tokens)
    rig.flush("l1")
    rig.flush("l2")


def tail(name: str, *ranges: tuple[int, int]) -> events.StoredTail:
    return events.StoredTail(name, ranges)


ALL = (tail("window", (5, 8)), tail("state", (7, 8)))


def asked(rig: Rig, tokens: bytes = PROMPT, request_id: str = "a", **fields: object) -> commands.QueryTails:
    rig.arrive(request_id, tokens, **fields)
    return rig.take(commands.QueryTails)


def fetching(rig: Rig, tokens: bytes = PROMPT, **fields: object) -> list[commands.FetchTail]:
    """A request whose plan takes everything from storage."""
    rig.answer(asked(rig, tokens, **fields), 8, tails=ALL)
    return rig.take_all(commands.FetchTail)


def pages(rig: Rig, name: str) -> tuple[int, int]:
    """What is owned and cached of one component's host pages."""
    counts = rig.core.statistics()
    return counts[f"{name}_host_owned"], counts[f"{name}_host_cached"]


def settle(rig: Rig) -> None:
    rig.settle()
    rig.expect_nothing_held()


# --- Puts ---


def test_a_tail_is_put_when_it_is_on_the_host_and_the_full_pages_are_in_storage() -> None:
    rig = rig_with()
    finish(rig, ready_with(rig, "a", PROMPT), PROMPT)
    rig.copied(rig.take(commands.CopyToHost))
    of_window, of_state = rig.take_all(commands.CopyTail)
    rig.copied(of_window)
    assert not rig.take_all(commands.StoreTail)
    rig.stored(rig.take(commands.StorePages))
    put = rig.take(commands.StoreTail)
    assert (put.component, put.first, put.host_pages) == ("window", 5, of_window.target_pages)
    # The other tail comes later: the request's own tokens are forgotten by then.
    rig.take(commands.ForgetTokens)
    rig.copied(of_state)
    late = rig.take(commands.StoreTail)
    assert (late.component, late.first, late.host_pages) == ("state", 7, of_state.target_pages)
    assert rig.core.keys_put(put.op) == rig.core.keys_put(late.op) == ("", PROMPT)
    # While they are read nobody can evict them.
    assert rig.core.statistics()["window_host_protected"] == 3
    rig.stored(put)
    rig.stored(late, 0)
    assert rig.core.statistics()["tail_pages_stored"] == 3 and rig.core.statistics()["window_host_protected"] == 0
    rig.take(commands.TellFinished)
    rig.nothing_else()
    rig.expect_nothing_held()


def test_what_the_write_policy_keeps_out_of_storage_has_no_tails_there() -> None:
    rig = rig_with(write_tokens_min=9)
    finish(rig, ready_with(rig, "a", PROMPT), PROMPT)
    rig.settle()
    rig.flush("l1")
    assert rig.core.statistics()["window_host_cached"] == 3 and "tail_pages_stored" not in rig.core.statistics()
    rig.expect_nothing_held()


def test_full_pages_that_storage_did_not_take_have_no_tails_there() -> None:
    rig = rig_with()
    finish(rig, ready_with(rig, "a", PROMPT), PROMPT)
    rig.copied(rig.take(commands.CopyToHost))
    for copy in rig.take_all(commands.CopyTail):
        rig.copied(copy)
    rig.stored(rig.take(commands.StorePages), 7)
    assert not rig.take_all(commands.StoreTail)


def test_half_a_tail_is_not_put() -> None:
    rig = rig_with(window(3))
    cached(rig, PROMPT)
    index = rig.core.books.components
    assert index is not None and rig.core.tail_backups is not None
    (leaf,) = (node for node in rig.core.books.index.nodes() if node.depth_pages == 8)
    upper = rig.core.books.index.split(leaf, 6)
    index.drop("host", "window", upper)
    rig.core.tail_backups.puts.begin(leaf)
    assert not rig.core.books.out and "transitions_raised" not in rig.core.statistics()


def test_with_write_back_a_tail_is_put_before_its_full_pages_are_evicted() -> None:
    rig = rig_with(device_pages=16, host_pages=10, write="back", write_back_ahead=1.0)
    finish(rig, ready_with(rig, "a", PROMPT), PROMPT)
    rig.copied(rig.take(commands.CopyToHost))
    for copy in rig.take_all(commands.CopyTail):
        rig.copied(copy)
    put = rig.take(commands.StorePages)
    assert put.serial == 0
    rig.stored(put)
    assert [put.component for put in rig.take_all(commands.StoreTail)] == ["window", "state"]


def test_puts_of_tails_give_way_to_fetches() -> None:
    rig = rig_with(put_wait_s=5.0)
    only_in_storage(rig)
    finish(rig, ready_with(rig, "b", b"xyz"), b"xyz")
    rig.copied(rig.take(commands.CopyToHost))
    of_window, of_state = rig.take_all(commands.CopyTail)
    rig.stored(rig.take(commands.StorePages))
    rig.take(commands.TellFinished)
    rig.take(commands.ForgetTokens)
    fetches = fetching(rig)
    rig.copied(of_window)
    rig.copied(of_state)
    assert not rig.take_all(commands.StoreTail)
    # One has waited long enough, the other goes when the last fetch is over.
    rig.now_s += 1.0
    assert rig.core.tail_backups is not None and len(rig.core.tail_backups.puts.waiting) == 2
    for fetch in fetches:
        rig.fetched(fetch)
    assert not rig.take_all(commands.StoreTail)
    rig.fetched(rig.take(commands.FetchPages))
    assert [put.component for put in rig.take_all(commands.StoreTail)] == ["window", "state"]


def test_a_put_waits_for_fetches_only_so_long_and_not_for_storage_that_is_gone() -> None:
    for is_gone in (False, True):
        rig = rig_with(put_wait_s=5.0)
        only_in_storage(rig)
        finish(rig, ready_with(rig, "b", b"xyz"), b"xyz")
        rig.copied(rig.take(commands.CopyToHost))
        copies = rig.take_all(commands.CopyTail)
        rig.stored(rig.take(commands.StorePages))
        fetching(rig)
        for copy in copies:
            rig.copied(copy)
        if is_gone:
            rig.step(events.StorageChanged, available=False)
        rig.core.books.settings = rig.core.books.settings.with_policy(
            StoragePolicy(**{**policy_dict(rig), "prefetch_base_s": 100.0})
        )
        rig.wait_until(rig.now_s + 6.0)
        puts = rig.take_all(commands.StoreTail)
        assert len(puts) == (0 if is_gone else 2)
        rig.pending += puts
        for fetch in rig.take_all(commands.FetchTail):
            rig.fetched(fetch)
        rig.abort("a")
        rig.settle()


def policy_dict(rig: Rig) -> dict[str, object]:
    policy = policy_of(rig.settings)
    return {name: getattr(policy, name) for name in StoragePolicy.__struct_fields__}


def test_a_late_put_is_counted_and_keeps_its_pin_until_it_ends() -> None:
    rig = rig_with()
    finish(rig, ready_with(rig, "a", PROMPT), PROMPT)
    rig.copied(rig.take(commands.CopyToHost))
    for copy in rig.take_all(commands.CopyTail):
        rig.copied(copy)
    rig.stored(rig.take(commands.StorePages))
    puts = rig.take_all(commands.StoreTail)
    rig.wait_until(rig.now_s + 70.0)
    counts = rig.core.statistics()
    assert counts["backups_late"] == 2 and counts["window_host_protected"] == 3
    for put in puts:
        rig.step(events.CommandRaised, op=put.op, detail="no such shelf")
    assert rig.core.statistics()["window_host_protected"] == 0 and rig.core.statistics()["tail_pages_stored"] == 0


# --- The question ---


def test_storage_is_asked_for_full_pages_and_tails_at_once() -> None:
    rig = rig_with()
    only_in_storage(rig)
    query = asked(rig)
    assert (query.first, query.count, query.tails_first) == (0, 8, 0)


def test_only_positions_that_can_matter_are_asked_for() -> None:
    rig = rig_with()
    cached(rig, PROMPT[:6])
    query = asked(rig)
    assert (query.first, query.count, query.tails_first) == (6, 2, 4)


def test_who_has_all_but_the_tails_asks_for_those_alone() -> None:
    rig = rig_with()
    cached(rig, PROMPT)
    assert rig.core.books.components is not None
    for tier in ("device", "host"):
        rig.core.books.components.evict(tier, "window", 16)
    query = asked(rig)
    assert (query.first, query.count, query.tails_first) == (8, 0, 0)
    rig.answer(query, 0, tails=(tail("window", (5, 8)),))
    fetch, clone = rig.take(commands.FetchTail), rig.take(commands.CopyTail)
    assert (fetch.component, ids(fetch.positions), clone.component) == ("window", [5, 6, 7], "state")
    assert not rig.take_all(commands.FetchPages)
    assert rig.take(commands.SendPromise).promised_tokens == 8 and rig.state("a") == "PREFETCH"


def test_little_is_not_asked_for_and_not_fetched() -> None:
    rig = rig_with(prefetch_threshold_tokens=4)
    cached(rig, PROMPT[:6])
    rig.arrive("a", PROMPT)
    assert not rig.take_all(commands.QueryTails)
    rig = rig_with(prefetch_threshold_tokens=4)
    rig.answer(asked(rig, PROMPT), 8, tails=(tail("window", (0, 3)), tail("state", (2, 3))))
    assert rig.take(commands.SendPromise).promised_tokens == 0


def test_storage_that_keeps_no_tails_is_not_asked() -> None:
    rig = Rig(components=(window(),))  # type: ignore[arg-type]  # Not a number.
    rig.attach_storage()
    rig.arrive("a", PROMPT)
    rig.take(commands.SendPromise)
    rig.nothing_else()


def test_a_request_is_not_admitted_before_the_answer_and_lets_others_pass() -> None:
    rig = rig_with(prefetch_threshold_tokens=4)
    query = asked(rig)
    rig.arrive("b", b"xyz")
    assert (rig.state("a"), rig.state("b")) == ("PREALLOC", "TRANSFER")
    rig.wait_until(rig.now_s + 2.0)
    assert rig.state("a") == "TRANSFER" and rig.core.statistics()["l3_queries_late"] == 1
    rig.answer(query, 8, tails=ALL)
    assert rig.core.statistics()["outcomes_late"] == 1


def test_who_waits_asks_again_where_what_was_in_front_of_the_answer_has_left_the_caches() -> None:
    rig = rig_with(device_pages=9)
    cached(rig, PROMPT[:4])
    big = ready_with(rig, "big", b"12345")
    query = asked(rig)
    assert query.first == 4
    rig.answer(query, 4, tails=ALL)
    assert rig.state("a") == "PREALLOC"
    rig.flush("l1")
    rig.flush("l2")
    finish(rig, big, b"12345")
    for kind in (commands.CopyToHost, commands.CopyTail):
        for copy in rig.take_all(kind):
            rig.copied(copy)
    again = rig.take(commands.QueryTails)
    assert (again.first, again.count) == (0, 8)
    rig.answer(again, 8, tails=ALL)
    assert rig.state("a") == "PREFETCH" and rig.take(commands.SendPromise).promised_tokens == 8


def test_what_was_in_front_of_tails_and_has_left_is_not_thought_to_be_in_storage() -> None:
    rig = rig_with(device_pages=9)
    cached(rig, PROMPT)
    assert rig.core.books.components is not None
    for tier in ("device", "host"):
        rig.core.books.components.evict(tier, "window", 16)
    ready_with(rig, "big", b"12345")
    # The full pages are all here, and storage was not asked for them.
    rig.answer(asked(rig), 0, tails=ALL)
    assert rig.state("a") == "PREALLOC"
    rig.flush("l1")
    rig.flush("l2")
    rig.abort("big")
    assert rig.take(commands.SendPromise).promised_tokens == 0 and not rig.take_all(commands.FetchPages)


# --- The plan ---


def test_a_prompt_comes_back_from_storage_with_its_tails() -> None:
    rig = rig_with()
    only_in_storage(rig)
    of_window, of_state = fetching(rig)
    assert (of_window.component, ids(of_window.positions)) == ("window", [5, 6, 7])
    assert (of_state.component, ids(of_state.positions)) == ("state", [7])
    promise = rig.take(commands.SendPromise)
    assert promise.promised_tokens == 8 and promise.tails is not None
    assert [len(asked_for.pages) for asked_for in promise.tails] == [0, 0]
    rig.serve(promise)
    rig.fetched(rig.take(commands.FetchPages))
    rig.copied(rig.take(commands.CopyToDevice))
    rig.fetched(of_state)
    assert rig.state("a") == "PREFETCH"
    rig.fetched(of_window)
    assert rig.state("a") == "LOCAL_RESTORE"
    for copy in rig.take_all(commands.CopyTail):
        assert copy.source == "host" and copy.target == "device"
        rig.copied(copy)
    ready = rig.take(commands.TellReady)
    assert ready.tails is not None and [len(table.pages) for table in ready.tails] == [3, 1]
    assert ready.sources["l3"] == 8 and pages(rig, "window") == pages(rig, "state") == (0, 0)
    assert rig.core.statistics()["window_device_cached"] == 3
    finish(rig, ready, PROMPT)
    settle(rig)


def test_the_plan_ends_at_the_longest_boundary_that_all_tiers_serve_together() -> None:
    rig = rig_with(state())
    cached(rig, PROMPT[:4])
    cached(rig, PROMPT, "again")
    rig.flush("l1")
    rig.flush("l2")
    # Storage has lost the last record.
    rig.answer(asked(rig, PROMPT + b"ij"), 8, tails=(tail("state", (3, 4)),))
    assert rig.take(commands.SendPromise).promised_tokens == 4
    assert len(rig.take(commands.FetchPages).host_pages) == 4
    # Nothing of the record is needed here: prefill sends the one at the prompt's end.
    assert not rig.take_all(commands.FetchTail)
    assert rig.request("a").declined == ("no_tail", 4)


def test_a_tail_is_put_together_from_device_host_and_storage() -> None:
    rig = rig_with(window(4))
    cached(rig, PROMPT)
    index = rig.core.books.components
    assert index is not None
    (leaf,) = (node for node in rig.core.books.index.nodes() if node.depth_pages == 8)
    for at in (5, 1, 1):
        rig.core.books.index.split(leaf, at)
    at_end = {node.depth_pages: node for node in rig.core.books.index.nodes()}
    # Of positions 4 to 7, the device has lost 5 and 6, and the host 6 as well.
    for tier, end in (("device", 6), ("device", 7), ("host", 7)):
        index.drop(tier, "window", at_end[end])
    fields = rig.core.books
    assert sum(index.peek("", PROMPT)) == 0 and fields.storage.is_usable
    rig.answer(asked(rig), 0, tails=(tail("window", (6, 7)),))
    fetch, copy = rig.take(commands.FetchTail), rig.take(commands.CopyTail)
    assert ids(fetch.positions) == [6] and (copy.source, len(copy.source_pages)) == ("host", 1)
    rig.serve(rig.take(commands.SendPromise))
    rig.copied(copy)
    rig.fetched(fetch)
    rig.copied(rig.take(commands.CopyTail))
    ready = rig.take(commands.TellReady)
    assert ready.tails is not None and len(ready.tails[0].pages) == 4
    finish(rig, ready, PROMPT)
    settle(rig)


def test_positions_that_are_not_of_the_prompt_are_not_believed() -> None:
    rig = rig_with()
    rig.answer(asked(rig), 99, tails=(tail("window", (-5, 99)), tail("state", (-9, -1), (3, 4), (70, 80))))
    assert rig.take(commands.SendPromise).promised_tokens == 4


def test_limits_on_fetches_shorten_the_plan_to_a_boundary_within_them() -> None:
    tails = (tail("state", (1, 2), (3, 4), (7, 8)),)
    rig = rig_with(state(), fetch_pages_in_flight_max=5)
    rig.answer(asked(rig), 8, tails=tails)
    assert rig.take(commands.SendPromise).promised_tokens == 4
    assert rig.request("a").declined == ("limit", 4) and rig.core.statistics()["l3_declined_pages"] == 4
    # While those are fetched, nobody else fetches anything.
    query = asked(rig, b"x" * 8, "b")
    rig.answer(query, 8, tails=tails)
    assert rig.take(commands.SendPromise).promised_tokens == 0
    assert rig.request("b").declined == ("limit", 8)


def test_full_pages_that_do_not_fit_the_host_shorten_the_plan() -> None:
    rig = rig_with(state(), host_pages=5)
    rig.answer(asked(rig), 8, tails=(tail("state", (3, 4), (7, 8)),))
    assert rig.take(commands.SendPromise).promised_tokens == 4
    assert rig.request("a").declined == ("no_host_page", 4)


def test_many_boundaries_that_limits_forbid_are_not_all_tried() -> None:
    rig = rig_with(window(20, device=64, host=64), fetch_pages_in_flight_max=1)
    cached(rig, bytes(30))
    index = rig.core.books.components
    assert index is not None
    for tier in ("device", "host"):
        index.evict(tier, "window", 64)
    rig.answer(asked(rig, bytes(30)), 0, tails=(tail("window", (0, 30)),))
    assert rig.take(commands.SendPromise).promised_tokens == 0


def test_host_pages_of_a_component_are_not_waited_for() -> None:
    rig = rig_with(window(3, host=2), state())
    rig.answer(asked(rig), 8, tails=ALL)
    assert rig.take(commands.SendPromise).promised_tokens == 0 and not rig.take_all(commands.FetchTail)
    rig.abort("a")
    settle(rig)


def test_a_pool_in_which_a_tail_from_storage_never_has_room_does_without() -> None:
    rig = rig_with(window(3, device=4), state())
    rig.answer(asked(rig), 8, tails=ALL)
    assert rig.take(commands.SendPromise).promised_tokens == 0
    rig.abort("a")
    settle(rig)


def test_a_pool_that_others_hold_is_waited_for() -> None:
    rig = rig_with(window(3, device=8), state())
    ready = ready_with(rig, "b", b"xyz")
    rig.answer(asked(rig), 8, tails=ALL)
    assert rig.state("a") == "PREALLOC"
    finish(rig, ready, b"xyz")
    rig.settle()
    assert rig.core.request("a") is None or rig.state("a") == "READY"


def test_remains_of_another_load_in_the_way_leave_a_request_without_storage() -> None:
    rig = rig_with()
    only_in_storage(rig)
    rig.answer(asked(rig), 8, tails=ALL)
    rig.take_all(commands.FetchTail)
    rig.fetched(rig.take(commands.FetchPages))
    rig.take(commands.SendPromise)
    # The copy to the device is late: its pages are void until it ends.
    rig.wait_until(rig.now_s + 40.0)
    assert rig.core.statistics()["copies_late"] == 1
    rig.abort("a")
    rig.pending = [wish for wish in rig.pending if not isinstance(wish, commands.SendPromise)]
    query = asked(rig, PROMPT, "b")
    rig.answer(query, 8, tails=ALL)
    assert rig.request("b").tail_limit == 1
    assert rig.take(commands.SendPromise).promised_tokens == 0 and not rig.take_all(commands.FetchTail)


# --- What goes wrong ---


@pytest.mark.parametrize("good", [0, 2, -1])
def test_a_tail_that_comes_short_sends_the_request_back_without_storage(good: int) -> None:
    rig = rig_with()
    only_in_storage(rig)
    of_window, of_state = fetching(rig)
    rig.take(commands.SendPromise)
    rig.fetched(of_window, good, error="no such record" if good < 1 else "")
    assert rig.core.statistics()["l3_pages_short"] == 3 - max(good, 0)
    promise = rig.take(commands.SendPromise)
    assert promise.generation == 1 and promise.promised_tokens == 0
    # What is still being read keeps its host pages, and no device pages.
    assert pages(rig, "window") == (0, 0) and pages(rig, "state") == (1, 0)
    assert rig.core.statistics()["state_device_owned"] == 1
    rig.fetched(of_state)
    assert pages(rig, "state") == (0, 0)
    settle_all(rig)


def test_a_late_tail_keeps_its_host_pages_until_it_ends() -> None:
    rig = rig_with(prefetch_base_s=2.0)
    only_in_storage(rig)
    of_window, of_state = fetching(rig)
    rig.fetched(rig.take(commands.FetchPages))
    rig.copied(rig.take(commands.CopyToDevice))
    rig.fetched(of_state)
    rig.copied(rig.take(commands.CopyTail))
    rig.take(commands.SendPromise)
    rig.wait_until(rig.now_s + 3.0)
    assert rig.core.statistics()["l3_fetches_late"] == 1 and pages(rig, "window") == (3, 0)
    promise = rig.take(commands.SendPromise)
    assert promise.generation == 1 and promise.promised_tokens == 0
    rig.serve(promise)
    rig.take(commands.TellReady)
    rig.fetched(of_window)
    assert pages(rig, "window") == (0, 0)


def test_a_copy_from_the_host_pages_that_fails_or_is_late_costs_the_host_as_well() -> None:
    for is_late in (False, True):
        rig = rig_with(prefetch_base_s=100.0)
        only_in_storage(rig)
        of_window, of_state = fetching(rig)
        rig.fetched(of_window)
        copy = rig.take(commands.CopyTail)
        rig.take(commands.SendPromise)
        if is_late:
            rig.wait_until(rig.now_s + 40.0)
            # Until the copy has ended nobody gets its pages, neither those on the device nor those on the host.
            assert pages(rig, "window") == (3, 0)
        rig.copied(copy, error="bus error")
        assert rig.request("a").tail_limit == 2 and pages(rig, "window") == (0, 0)
        rig.fetched(of_state)
        settle_all(rig)


def settle_all(rig: Rig) -> None:
    rig.abort("a")
    settle(rig)


@pytest.mark.parametrize("stage", ["answered", "fetched", "copied"])
def test_who_leaves_leaves_pages_to_those_who_still_write_to_them(stage: str) -> None:
    rig = rig_with()
    only_in_storage(rig)
    of_window, of_state = fetching(rig)
    if stage != "answered":
        rig.fetched(of_window)
        copy = rig.take(commands.CopyTail)
        if stage == "copied":
            rig.copied(copy)
    rig.abort("a")
    counts = rig.core.statistics()
    assert counts["window_device_owned"] == (7 if stage == "fetched" else 0)
    assert pages(rig, "window")[0] == (0 if stage == "copied" else 3)
    if stage == "answered":
        rig.fetched(of_window)
    elif stage == "fetched":
        rig.copied(copy)
    rig.fetched(of_state)
    settle(rig)


def test_failures_of_tails_open_the_breaker_too() -> None:
    rig = rig_with(breaker_failures=2)
    only_in_storage(rig)
    of_window, of_state = fetching(rig)
    rig.fetched(of_state, 0, error="down")
    assert not rig.core.statistics()["l3_breaker_open"]
    # Nobody waits for the other one any more, so it says nothing of storage.
    rig.fetched(of_window, 0, error="down")
    assert not rig.core.statistics()["l3_breaker_open"]
    rig.fetched(rig.take(commands.FetchPages), 0, error="down")
    assert pages(rig, "window") == (0, 0)


@pytest.mark.parametrize("policy", ["best_effort", "wait_complete"])
def test_a_tail_is_waited_for_when_the_transfer_is_done(policy: str) -> None:
    rig = rig_with(prefetch=policy)
    only_in_storage(rig)
    fetches = fetching(rig, deadline_at_s=100.0)
    assert {fetch.timeout_s for fetch in fetches} == {50.0}
    rig.serve(rig.take(commands.SendPromise))
    if policy == "best_effort":
        extend = rig.take(commands.SendExtend)
        rig.chunk(extend)
        rig.fetched(rig.take(commands.FetchPages))
    else:
        rig.fetched(rig.take(commands.FetchPages))
        rig.copied(rig.take(commands.CopyToDevice))
    assert rig.state("a") == "PREFETCH"
    for fetch in fetches:
        rig.fetched(fetch)
    for copy in rig.take_all(commands.CopyTail):
        rig.copied(copy)
    rig.take(commands.TellReady)


@pytest.mark.parametrize("times", [1, 2])
def test_a_raise_while_a_plan_from_storage_is_made_undoes_what_was_begun(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rig_with()
    only_in_storage(rig)
    query = asked(rig)
    raises = iter([True] * times)
    say = rig.core.books.say

    def failing(command: commands.Command) -> None:
        if isinstance(command, commands.SendPromise) and next(raises, False):
            raise RuntimeError("planted")
        say(command)

    monkeypatch.setattr(rig.core.books, "say", failing)
    rig.answer(query, 8, tails=ALL)
    # Storage is not trusted any more: what was granted for it is given back, and asked for again.
    promise = rig.take(commands.SendPromise)
    assert promise.promised_tokens == 0
    rig.nothing_else()
    settle_all(rig)


def test_reads_ahead_are_not_begun_with_components() -> None:
    rig = rig_with(device_pages=9, lookahead_pages_max=8)
    only_in_storage(rig)
    ready_with(rig, "big", b"12345")
    rig.answer(asked(rig), 8, tails=ALL)
    assert rig.state("a") == "PREALLOC"
    rig.nothing_else()


def test_a_recomputing_caller_begins_with_the_first_page_whatever_storage_has() -> None:
    rig = rig_with()
    only_in_storage(rig)
    fetches = fetching(rig, can_recompute=True)
    promise = rig.take(commands.SendPromise)
    rig.step(events.RoomFailed, request_id="a", generation=promise.generation, cause="gone", settled=True)
    assert rig.take(commands.Recompute).first == 0 and not rig.take_all(commands.QueryTails)
    for fetch in fetches:
        rig.fetched(fetch)
    assert pages(rig, "window") == (0, 0)


def test_books_that_contradict_themselves_are_not_taken_for_a_failed_put(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_with()
    finish(rig, ready_with(rig, "a", PROMPT), PROMPT)
    rig.copied(rig.take(commands.CopyToHost))
    for copy in rig.take_all(commands.CopyTail):
        rig.copied(copy)

    def contradict(*_: object) -> None:
        raise BrokenInvariant("planted")

    monkeypatch.setattr(rig.core.books.components, "tail", contradict)
    with pytest.raises(BrokenInvariant, match="planted"):
        rig.stored(rig.take(commands.StorePages))
