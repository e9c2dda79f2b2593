"""Look-ahead of component pages, on a core stepped by hand: what a prompt's end needs is there before its turn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.rig import Rig, ids
from tests.support.component_stories import (
    ALL,
    PROMPT,
    asked,
    cached,
    finish,
    only_in_storage,
    pages,
    ready_with,
    rig_with,
    settle,
    state,
    window,
)
from tests.support.rigs import extended, tails_of
from tests.support.thorough import examples
from tidekv.states import commands, events
from tidekv.states.component_specs import Component
from tidekv.states.components.look_ahead import ComponentLookAhead
from tidekv.states.types import FULL, PageIds

BIG = bytes(range(128, 136))


def waiting(*components: Component, **fields: object) -> tuple[Rig, list[commands.FetchPages]]:
    """Request "a" waits for the device pages of "big"; storage has all of its prompt, and its full pages have arrived.

    Returns the reads of component pages.
    """
    rig = rig_with(*components, **{"device_pages": 9, "lookahead_pages_max": 100, **fields})
    only_in_storage(rig)
    ready_with(rig, "big", BIG)
    rig.answer(asked(rig), 8, component_pages=ALL)
    for fetch in rig.take_all(commands.FetchPages):
        rig.fetched(fetch)
    assert rig.state("a") == "PREALLOC"
    return rig, rig.take_all(commands.FetchPages, of_components=True)


def make_room(rig: Rig) -> None:
    rig.abort("big")
    rig.take(commands.ReportDropped)


def end_copies(rig: Rig) -> None:
    for of_components in (False, True):
        for copy in rig.take_all(commands.CopyPages, of_components=of_components):
            rig.copied(copy)


def test_a_plan_copies_what_has_arrived_before_it_and_asks_storage_for_nothing() -> None:
    rig, (of_window, of_state) = waiting()
    assert (of_window.component, ids(of_window.positions)) == ("window", [5, 6, 7])
    assert (of_state.component, ids(of_state.positions)) == ("state", [7])
    rig.fetched(of_window)
    rig.fetched(of_state)
    assert pages(rig, "window") == (3, 0) and pages(rig, "state") == (1, 0)
    # Four component pages and eight full ones are within the bound.
    statistics = rig.core.statistics()
    assert (statistics["lookahead_pages"], statistics["component_pages_fetched_ahead"]) == (12, 4)
    make_room(rig)
    assert not rig.take_all(commands.FetchPages, of_components=True) and not rig.take_all(commands.FetchPages)
    copies = {copy.component: copy for copy in rig.pending if isinstance(copy, commands.CopyPages)}
    assert ids(copies["window"].source_pages) == ids(of_window.host_pages)
    assert ids(copies["state"].source_pages) == ids(of_state.host_pages)
    promise = rig.take(commands.SendPromise)
    assert tails_of(promise) == {"window": (8, 0), "state": (8, 0)}
    rig.serve(promise)
    end_copies(rig)
    ready = rig.take(commands.ReportReady)
    assert pages(rig, "window") == pages(rig, "state") == (0, 0) and rig.core.lookahead.pages == 0
    assert rig.core.component_pages is not None
    assert rig.core.component_pages.snapshots.statistics()["state"]["hits_storage"] == 1
    finish(rig, ready, PROMPT)
    settle(rig)


def test_a_plan_goes_on_with_reads_that_are_under_way() -> None:
    rig, (of_window, of_state) = waiting()
    rig.fetched(of_window)
    make_room(rig)
    assert not rig.take_all(commands.FetchPages, of_components=True)
    assert rig.core.storage.ahead_in_flight == 0 and rig.core.storage.pages_in_flight == 1
    rig.serve(rig.take(commands.SendPromise))
    end_copies(rig)
    assert rig.state("a") == "PREFETCH"
    rig.fetched(of_state)
    end_copies(rig)
    finish(rig, rig.take(commands.ReportReady), PROMPT)
    settle(rig)


def test_the_pages_of_an_adopted_read_that_is_late_are_asked_of_prefill() -> None:
    rig, reads = waiting(prefetch_base_s=1.0)
    make_room(rig)
    promise = rig.take(commands.SendPromise)
    rig.promised(promise)
    rig.wait_until(rig.now_s + 5.0)
    assert rig.core.statistics()["l3_fetches_late"] == 2
    assert extended(rig) == {"window": (5, 3), "state": (7, 1)}
    for read in reads:
        rig.fetched(read)
    assert rig.core.statistics()["sent_back"] == 0


@pytest.mark.parametrize("valid", [0, 2])
def test_what_a_read_ahead_does_not_deliver_comes_from_prefill_without_a_second_plan(valid: int) -> None:
    rig, (of_window, of_state) = waiting()
    rig.fetched(of_window, valid)
    rig.fetched(of_state)
    assert pages(rig, "window") == (0, 0) and rig.core.statistics()["l3_pages_short"] == 3 - valid
    make_room(rig)
    assert not rig.take_all(commands.FetchPages, of_components=True)
    promise = rig.take(commands.SendPromise)
    assert tails_of(promise) == {"window": (5, 3), "state": (8, 0)} and promise.generation == 0
    rig.serve(promise)
    end_copies(rig)
    finish(rig, rig.take(commands.ReportReady), PROMPT)
    settle(rig)


def test_a_read_ahead_that_is_late_keeps_its_pages_until_it_ends_and_its_component_comes_from_prefill() -> None:
    rig, (of_window, of_state) = waiting(prefetch_base_s=1.0)
    rig.fetched(of_state)
    rig.wait_until(rig.now_s + 5.0)
    assert rig.core.statistics()["l3_fetches_late"] == 1 and pages(rig, "window") == (3, 0)
    make_room(rig)
    promise = rig.take(commands.SendPromise)
    assert tails_of(promise) == {"window": (5, 3), "state": (8, 0)}
    rig.serve(promise)
    end_copies(rig)
    finish(rig, rig.take(commands.ReportReady), PROMPT)
    rig.settle()
    assert pages(rig, "window")[0] == 3
    rig.fetched(of_window)
    settle(rig)


@pytest.mark.parametrize("ended", [0, 1, 2])
def test_an_abort_frees_what_has_arrived_at_once_and_the_rest_when_it_ends(ended: int) -> None:
    rig, reads = waiting()
    for read in reads[:ended]:
        rig.fetched(read)
    rig.abort("a")
    owned = pages(rig, "window")[0] + pages(rig, "state")[0]
    assert owned == sum(len(read.host_pages) for read in reads[ended:]) and rig.core.lookahead.pages == 0
    for read in reads[ended:]:
        rig.fetched(read)
    make_room(rig)
    settle(rig)


def test_what_another_request_has_left_meanwhile_is_used_from_there() -> None:
    rig, (of_window, of_state) = waiting()
    rig.fetched(of_window)
    rig.fetched(of_state)
    taken = join_host(rig, 5, 3)
    make_room(rig)
    copies = {copy.component: copy for copy in rig.take_all(commands.CopyPages, of_components=True)}
    assert ids(copies["window"].source_pages) == ids(taken)
    assert pages(rig, "window") == (0, 3)
    rig.pending += copies.values()
    settle_all(rig)


def join_host(rig: Rig, first: int, count: int) -> PageIds:
    """Another request has left pages of the window of the same prompt on the host."""
    index = rig.core.state.components
    assert index is not None
    (node,) = (node for node in rig.core.state.index.nodes() if node.depth_pages == 8 and node.host is not None)
    taken = index.take("host", "window", count)
    assert taken is not None
    index.insert("host", "window", node, first, taken)
    return taken


def settle_all(rig: Rig) -> None:
    rig.settle()
    rig.abort("a")
    settle(rig)


def test_a_plan_that_needs_other_positions_fetches_those() -> None:
    rig, reads = waiting()
    for read in reads:
        rig.fetched(read)
    join_host(rig, 6, 1)
    make_room(rig)
    fetch = rig.take(commands.FetchPages, of_components=True)
    assert (fetch.component, ids(fetch.positions)) == ("window", [5, 7])
    assert pages(rig, "window") == (2, 1)
    rig.fetched(fetch)
    settle_all(rig)


def test_reads_ahead_are_not_adopted_while_storage_is_left_alone() -> None:
    rig, (of_window, of_state) = waiting(breaker_failures=1)
    rig.fetched(of_window)
    rig.fetched(of_state, 0, error="broken")
    assert rig.core.storage.is_open
    make_room(rig)
    assert tails_of(rig.take(commands.SendPromise)) == {"window": (5, 3), "state": (7, 1)}
    assert pages(rig, "window") == (0, 0)


def test_two_requests_for_one_prompt_read_its_end_once() -> None:
    rig, reads = waiting()
    rig.answer(asked(rig, request_id="b"), 8, component_pages=ALL)
    assert not rig.take_all(commands.FetchPages, of_components=True)
    # The one that reads leaves, and the other one reads instead.
    for read in reads:
        rig.fetched(read)
    rig.abort("a")
    assert [read.component for read in rig.take_all(commands.FetchPages, of_components=True)] == ["window", "state"]
    rig.abort("b")
    # Other tokens before the same position: another page.
    rig, _ = waiting()
    other = b"zbcdefgh"
    rig.answer(asked(rig, other, request_id="b"), 0, component_pages=ALL)
    assert [read.component for read in rig.take_all(commands.FetchPages, of_components=True)] == ["window", "state"]


@pytest.mark.parametrize(
    ("fields", "components"),
    [
        ({"lookahead_pages_max": 0}, []),
        ({"lookahead_pages_max": 2}, ["state"]),
        ({"lookahead_pages_max": 3}, ["window"]),
        ({"fetch_pages_in_flight_max": 3}, ["window"]),
        ({"fetch_pages_per_s": 1.0}, ["state"]),
    ],
)
def test_component_pages_count_in_the_budget_and_in_the_limits_of_storage(
    fields: dict[str, object], components: list[str]
) -> None:
    _, reads = waiting(**fields)
    assert [read.component for read in reads] == components


def test_component_pages_are_read_ahead_for_a_prompt_whose_full_pages_are_cached() -> None:
    rig = rig_with(device_pages=12, lookahead_pages_max=100)
    cached(rig, PROMPT)
    rig.flush("l1")
    index = rig.core.state.components
    assert index is not None
    for node in list(rig.core.state.index.nodes()):
        index.drop("host", "window", node)
        index.drop("host", "state", node)
    ready_with(rig, "big", BIG)
    rig.answer(asked(rig), 0, component_pages=ALL)
    reads = rig.take_all(commands.FetchPages, of_components=True)
    assert [read.component for read in reads] == ["window", "state"] and not rig.take_all(commands.FetchPages)
    for read in reads:
        rig.fetched(read)
    make_room(rig)
    assert not rig.take_all(commands.FetchPages, of_components=True)
    assert rig.take(commands.SendPromise).promised_tokens == 8
    assert len(rig.take_all(commands.CopyPages, of_components=True)) == 2


def time_to_ready(rig: Rig, wait_s: float) -> float:
    """Seconds from the grant of "a" to READY: storage takes 10 ms a call, a copy 1 ms, prefill 2 ms. "big" leaves after
    `wait_s`.
    """
    rig.arrive("a", PROMPT)
    due: list[tuple[float, commands.Command]] = []
    granted_s = leaves_s = rig.now_s + wait_s
    while True:
        for wish in rig.pending:
            storage = isinstance(wish, commands.FetchPages | commands.QueryStorage)
            due.append(
                (rig.now_s + (0.010 if storage else 0.002 if isinstance(wish, commands.SendPromise) else 0.001), wish)
            )
        rig.pending = []
        due.sort(key=lambda entry: entry[0])
        if leaves_s < due[0][0] if due else True:
            rig.wait_until(leaves_s)
            leaves_s = float("inf")
            rig.abort("big")
            continue
        at_s, wish = due.pop(0)
        rig.wait_until(at_s)
        match wish:
            case commands.QueryStorage():
                rig.answer(wish, 8, component_pages=ALL)
            case commands.FetchPages():
                rig.fetched(wish)
            case commands.CopyPages():
                rig.copied(wish)
            case commands.SendPromise():
                rig.serve(wish)
            case commands.ReportReady():
                return round(rig.now_s - granted_s, 6)


@pytest.mark.parametrize(("read_ahead", "seconds"), [("nothing", 0.012), ("full pages", 0.012), ("everything", 0.003)])
def test_a_request_is_ready_without_a_call_to_storage_after_its_wait(
    read_ahead: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if read_ahead == "full pages":
        monkeypatch.setattr(ComponentLookAhead, "start", lambda *_: 0)
    rig = rig_with(device_pages=9, lookahead_pages_max=0 if read_ahead == "nothing" else 100)
    only_in_storage(rig)
    ready_with(rig, "big", BIG)
    # Full pages alone bring nothing: the read of the component pages takes as long as theirs.
    assert time_to_ready(rig, 0.1) == seconds


POSITIONS = st.sets(st.integers(0, 7))


@given(
    on_host=st.integers(0, 8),
    in_storage=st.integers(0, 8),
    lost=st.fixed_dictionaries({"window": POSITIONS, "state": POSITIONS}),
    cached_before=st.fixed_dictionaries({"window": POSITIONS, "state": POSITIONS}),
    cached_meanwhile=st.fixed_dictionaries({"window": POSITIONS, "state": POSITIONS}),
    width=st.integers(1, 9),
    prompt_tokens=st.integers(1, 17),
    budget=st.sampled_from((1, 3, 100)),
    ended=st.sampled_from(("none", "some", "all")),
)
@examples(200)
def test_look_ahead_changes_when_bytes_are_read_and_never_which_ones(
    on_host: int,
    in_storage: int,
    lost: dict[str, set[int]],
    cached_before: dict[str, set[int]],
    cached_meanwhile: dict[str, set[int]],
    width: int,
    prompt_tokens: int,
    budget: int,
    ended: str,
) -> None:
    past, prompt = bytes(range(16)), bytes(range(prompt_tokens))
    outcomes = []
    for lookahead in (0, budget):
        rig = Rig(
            components=(window(width, 40, 40), state(20, 20)),  # type: ignore[arg-type]  # Not a number.
            page_size=2, key_bytes=2, device_pages=30, host_pages=60, prefetch_threshold_tokens=0,
            lookahead_pages_max=lookahead,
        )  # fmt: skip
        holder = Contents(rig, prompt)
        fill(rig, past[: 2 * on_host])
        place(rig, past, cached_before)
        holder.note_cached()
        rig.attach_storage(component_pages=True)
        big = bytes(range(100, 160))
        rig.arrive("big", big[: 2 * rig.core.state.device.free + 2 * rig.core.state.index.device_evictable])
        rig.settle()
        rig.arrive("a", prompt)
        answered = tuple(
            events.StoredComponent(name, tuple((at, at + 1) for at in range(8) if at not in gone))
            for name, gone in lost.items()
        )
        for query in rig.take_all(commands.QueryStorage):
            found = max(0, min(in_storage - query.first, query.count))
            rig.answer(query, found, component_pages=answered if query.components_first else ())
        assert rig.state("a") == "PREALLOC"
        holder.work(until={"none": 0, "some": 1, "all": 99}[ended])
        place(rig, past[: 2 * on_host], cached_meanwhile)
        holder.note_cached()
        rig.abort("big")
        ready = holder.work()
        outcomes.append(({kind: ready.sources[kind] for kind in ("l1", "transfer")}, holder.sent))
        holder.expect(ready)
    assert outcomes[0] == outcomes[1]


def fill(rig: Rig, tokens: bytes) -> None:
    """Bring full pages to the host."""
    if tokens:
        rig.make_cached("past", tokens)
        rig.flush("l1")


def place(rig: Rig, past: bytes, positions: dict[str, set[int]]) -> None:
    """Bring component pages to the host, as far as it has the full pages."""
    index = rig.core.state.components
    assert index is not None
    node = rig.core.state.index.match("", past).host_node
    for name, wanted in positions.items():
        for at in sorted(position for position in wanted if position < node.depth_pages):
            pages = index.take("host", name, 1)
            assert pages is not None
            _, unused = index.insert("host", name, node, at, pages)
            index.give_back({name: unused}, "host")


class Contents:
    """Which position of the prompt each component page holds, by what wrote it last."""

    def __init__(self, rig: Rig, prompt: bytes) -> None:
        self.rig, self.prompt = rig, prompt
        self.held: dict[tuple[str, str, int], int] = {}
        self.sent: dict[str, tuple[int, int]] = {}
        self.ready: commands.ReportReady | None = None

    def note_cached(self) -> None:
        index = self.rig.core.state.components
        assert index is not None
        for node in index.index.nodes():
            for name, tier in index.host.items():
                self.held |= {("host", name, page): at for at, page in tier.pages_of(node).items()}

    def work(self, until: int = 10_000) -> commands.ReportReady:
        """End what is in flight, `until` so many reads of components have ended; what is left stays pending."""
        rig = self.rig
        while rig.pending and until:
            for wish in list(rig.pending):
                if isinstance(wish, commands.FetchPages) and wish.component != FULL:
                    if not until:
                        continue
                    until -= until < 10_000
                rig.pending.remove(wish)
                self.end(wish)
        return self.ready  # type: ignore[return-value]  # Given once the request is ready.

    def end(self, wish: commands.Command) -> None:
        rig = self.rig
        match wish:
            case commands.FetchPages() if wish.component != FULL:
                for page, at in zip(wish.host_pages, wish.positions, strict=True):
                    self.held["host", wish.component, page] = at
                rig.fetched(wish)
            case commands.CopyPages() if wish.component != FULL:
                for source, target in zip(wish.source_pages, wish.target_pages, strict=True):
                    self.held[wish.target, wish.component, target] = self.held[wish.source, wish.component, source]
                rig.copied(wish)
            case commands.SendPromise(request_id="a"):
                assert wish.component_pages is not None
                for asked_for in wish.component_pages:
                    self.sent[asked_for.component] = (asked_for.first, len(asked_for.pages))
                    for at, page in enumerate(asked_for.pages, asked_for.first):
                        self.held["device", asked_for.component, page] = at
                rig.serve(wish)
            case commands.ReportReady(request_id="a"):
                self.ready = wish
            case commands.FetchPages():
                rig.fetched(wish)
            case commands.CopyPages():
                rig.copied(wish)
            case commands.SendPromise():
                rig.serve(wish)
            case commands.SendAbort():
                rig.drained(wish)

    def expect(self, ready: commands.ReportReady) -> None:
        """Every component page that the request got holds its position."""
        assert ready.component_pages is not None
        for table in ready.component_pages:
            for at, page in enumerate(table.pages, table.first):
                assert self.held["device", table.component, page] == at
