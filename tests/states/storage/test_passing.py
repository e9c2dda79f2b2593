"""Offered pages that host memory cannot keep: they pass through it to storage, a batch after the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.memory import Contents, SimulatedPool
from simulation.rig import Rig, ids
from tests.support.component_stories import state, window
from tests.support.each_call import raised_at_each_call
from tidekv.states import commands, events
from tidekv.states.types import FULL

TOKENS = b"abcdefgh"
LONG = bytes(range(20))
OTHER = {"window": (1, 3, 4), "state": (2,)}


def lent_rig(**settings: object) -> Rig:
    """Batches are of two pages: a quarter of eight."""
    chosen = {"lends_device": True, "host_pages": 8, "store_wait_s": 0.0, **settings}
    rig = Rig(**chosen)  # type: ignore[arg-type]  # Components are no number.
    rig.attach_storage(component_pages=True)
    return rig


def offer_end(rig: Rig, **fields: object) -> None:
    """Offer the last four of eight pages, of which host memory has nothing."""
    rig.offer(TOKENS, range(20, 24), **fields)


def asked(rig: Rig, found: int = 0) -> None:
    rig.stored(rig.take(commands.StorePages), found)


def test_pages_without_their_prefix_pass_to_storage_batch_by_batch() -> None:
    rig = lent_rig()
    offer_end(rig)
    question = rig.take(commands.StorePages)
    assert (question.first, ids(question.host_pages), question.asked) == (4, [], 4)
    assert rig.core.keys_stored(question.op) == ("", TOKENS)
    rig.stored(question, 1)
    first, second = rig.take_all(commands.CopyPages)
    assert (ids(first.source_pages), ids(second.source_pages)) == ([21, 22], [23])
    rig.copied(second)
    put = rig.take(commands.StorePages)
    assert (put.first, ids(put.host_pages), put.asked) == (7, ids(second.target_pages), 0)
    rig.stored(put)
    rig.nothing_else()
    rig.copied(first)
    # Nothing reads the pages any more, though the put is under way.
    report = rig.take(commands.ReportOffered)
    assert (report.written, report.present, report.passed, report.declined) == (0, 0, 4, 0)
    rig.stored(rig.take(commands.StorePages))
    touch = rig.take(commands.StorePages)
    assert (touch.first, ids(touch.host_pages), touch.asked) == (0, [], 8)
    rig.stored(touch)
    rig.nothing_else()
    rig.expect_nothing_held()
    counts = rig.core.statistics()
    assert (counts["pages_passed"], counts["pages_stored"], counts["host_free"]) == (3, 3, 8)


def test_a_short_end_passes_without_a_question_and_without_a_touch() -> None:
    rig = lent_rig()
    rig.offer(TOKENS, [20])
    rig.copied(rig.take(commands.CopyPages))
    assert rig.take(commands.ReportOffered).passed == 1
    put = rig.take(commands.StorePages)
    assert (put.first, len(put.host_pages)) == (7, 1)
    rig.stored(put)
    rig.nothing_else()
    rig.expect_nothing_held()


def test_an_offer_that_is_larger_than_host_memory_is_stored_whole() -> None:
    rig = lent_rig()
    rig.offer(LONG, range(20))
    # All pages but the four that stay were found to be missing.
    asked(rig, 0)
    (report,) = [wish for wish in rig.settle() if isinstance(wish, commands.ReportOffered)]
    assert (report.written, report.passed, report.declined) == (4, 16, 0)
    assert rig.core.statistics()["pages_stored"] == 20
    rig.expect_nothing_held()


def test_an_offer_that_continues_one_in_host_memory_joins_it() -> None:
    rig = lent_rig()
    rig.offer(TOKENS[:4], range(4))
    rig.settle()
    offer_end(rig)
    (report,) = [wish for wish in rig.settle() if isinstance(wish, commands.ReportOffered)]
    assert (report.written, report.passed) == (4, 0)


def test_pages_whose_room_is_taken_wait_for_it() -> None:
    rig = lent_rig()
    rig.offer(b"zyxwvuts", range(8), offer=1)
    other = rig.take(commands.CopyPages)
    rig.offer(TOKENS, [20], offer=2)
    rig.nothing_else()
    rig.copied(other)
    assert rig.take(commands.ReportOffered).written == 8
    put = rig.take(commands.StorePages)
    rig.nothing_else()
    rig.stored(put)
    rig.copied(rig.take(commands.CopyPages))
    assert rig.take(commands.ReportOffered).passed == 1
    rig.settle()
    rig.expect_nothing_held()


def test_pages_that_find_no_room_in_time_are_declined() -> None:
    rig = lent_rig()
    rig.offer(b"zyxwvuts", range(8), offer=1)
    rig.offer(TOKENS, [20], offer=2, hold_s=2.0)
    rig.wait_until(1.9)
    assert not rig.take_all(commands.ReportOffered)
    rig.wait_until(2.0)
    report = rig.take(commands.ReportOffered)
    assert (report.offer, report.passed, report.declined) == (2, 0, 1)
    rig.settle()
    rig.expect_nothing_held()


def test_storage_that_does_not_answer_holds_pages_for_a_while_only() -> None:
    rig = lent_rig()
    offer_end(rig)
    question = rig.take(commands.StorePages)
    rig.wait_until(1.0)
    report = rig.take(commands.ReportOffered)
    assert (report.passed, report.declined) == (0, 4)
    rig.stored(question, 2)
    rig.nothing_else()
    rig.expect_nothing_held()


@pytest.mark.parametrize("settings", [{"write": "selective"}, {"write_tokens_min": 9}, {"host_pages": 0}])
def test_pages_that_may_not_be_stored_are_declined_at_once(settings: dict[str, object]) -> None:
    rig = lent_rig(**settings)
    offer_end(rig)
    assert rig.take(commands.ReportOffered).declined == 4
    rig.nothing_else()
    rig.expect_nothing_held()


def test_without_storage_pages_are_declined_at_once() -> None:
    rig = lent_rig()
    rig.step(events.StorageChanged, available=False)
    offer_end(rig)
    assert rig.take(commands.ReportOffered).declined == 4
    rig.expect_nothing_held()


def test_a_failed_put_costs_the_rest_and_opens_the_breaker_for_the_next_one() -> None:
    rig = lent_rig(breaker_failures=1)
    offer_end(rig)
    asked(rig)
    first, second = rig.take_all(commands.CopyPages)
    rig.copied(first)
    rig.step(events.PagesStored, op=rig.take(commands.StorePages).op, stored=0, error="full")
    rig.copied(second)
    # Its copy has ended, but storage may not be called any more.
    report = rig.take(commands.ReportOffered)
    assert (report.passed, report.declined) == (2, 2)
    offer_end(rig)
    assert rig.take(commands.ReportOffered).declined == 4
    assert rig.core.statistics()["pages_passed_lost"] == 2
    rig.nothing_else()
    rig.core.state.end_operation(rig.core.storage.op)
    assert not rig.core.state.host.owned


def test_a_failed_copy_costs_the_rest() -> None:
    rig = lent_rig()
    offer_end(rig)
    asked(rig)
    first, second = rig.take_all(commands.CopyPages)
    rig.copied(first, "a device event is in error")
    rig.copied(second)
    report = rig.take(commands.ReportOffered)
    assert (report.passed, report.declined) == (2, 2)
    rig.settle()
    rig.expect_nothing_held()


def test_what_was_copied_behind_an_offer_that_failed_is_put() -> None:
    rig = lent_rig()
    rig.offer(TOKENS[:4], range(4), offer=1)
    beginning = rig.take(commands.CopyPages)
    rig.offer(TOKENS, range(20, 24), offer=2)
    rig.copied(rig.take(commands.CopyPages))
    rig.nothing_else()
    rig.copied(beginning, "failed")
    reports = {report.offer: report for report in rig.take_all(commands.ReportOffered)}
    assert (reports[1].declined, reports[2].passed) == (4, 4)
    put = rig.take(commands.StorePages)
    assert (put.first, len(put.host_pages)) == (4, 4)
    rig.stored(put)
    rig.expect_nothing_held()


def test_pages_of_every_group_pass() -> None:
    rig = lent_rig(components=(window(), state()))
    offer_end(rig, offered_components=OTHER)
    asked(rig)
    copies = {copy.component: copy for copy in rig.take_all(commands.CopyPages, of_components=True)}
    assert {name: ids(copy.source_pages) for name, copy in copies.items()} == {"window": [1, 3, 4], "state": [2]}
    for copy in copies.values():
        rig.copied(copy)
    puts = rig.take_all(commands.StorePages, of_components=True)
    assert [(put.component, put.first, len(put.host_pages)) for put in puts] == [("window", 5, 3), ("state", 7, 1)]
    (report,) = [wish for wish in rig.settle() if isinstance(wish, commands.ReportOffered)] or rig.take_all(
        commands.ReportOffered
    )
    assert (report.passed, report.components_declined) == (4, ())
    rig.pending += puts
    rig.settle()
    rig.expect_nothing_held()


def beginning() -> tuple[Rig, Callable[[], object]]:
    rig = lent_rig(components=(window(), state()))
    return rig, lambda: offer_end(rig, offered_components=OTHER)


def answered() -> tuple[Rig, Callable[[], object]]:
    rig = lent_rig()
    offer_end(rig)
    question = rig.take(commands.StorePages)
    return rig, lambda: rig.stored(question, 1)


def copied_last() -> tuple[Rig, Callable[[], object]]:
    rig = lent_rig()
    rig.offer(LONG, range(8, 20))
    asked(rig)
    first, second = rig.take_all(commands.CopyPages)
    rig.pending.append(second)
    return rig, lambda: rig.copied(first)


def stored_last() -> tuple[Rig, Callable[[], object]]:
    rig = lent_rig()
    rig.offer(LONG, range(8, 20))
    asked(rig)
    for copy in rig.take_all(commands.CopyPages):
        rig.copied(copy)
    first, second = rig.take_all(commands.StorePages)
    rig.pending.append(second)
    return rig, lambda: rig.stored(first)


def taken_over() -> tuple[Rig, Callable[[], object]]:
    rig = lent_rig()
    rig.offer(TOKENS[:4], range(4), offer=1)
    first = rig.take(commands.CopyPages)
    rig.offer(TOKENS, range(20, 24), offer=2)
    rig.copied(rig.take(commands.CopyPages))
    return rig, lambda: rig.copied(first, "failed")


def late() -> tuple[Rig, Callable[[], object]]:
    rig = lent_rig()
    offer_end(rig)
    return rig, lambda: rig.wait_until(1.0)


@pytest.mark.parametrize("prepare", [beginning, answered, copied_last, stored_last, taken_over, late])
def test_a_raise_at_any_call_ends_every_offer_once_and_frees_every_page(
    prepare: Callable[[], tuple[Rig, Callable[[], object]]],
) -> None:
    offers = 2 if prepare is taken_over else 1
    for call, rig in raised_at_each_call(prepare):
        rig.core.check()
        told = rig.settle()
        ends = [wish for wish in told if isinstance(wish, commands.ReportOffered)]
        assert len(ends) == offers, (call, told)
        rig.expect_nothing_held()
        rig.core.check()


PROMPTS = (LONG, LONG[:13] + b"xyzxyz", b"other" * 3)
STEPS = st.lists(st.tuples(st.sampled_from(("offer", "end", "fail", "part", "wait", "flush")), st.integers(0, 999)))


class Stored:
    """Storage and copies of one core, which check what is copied and put."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.contents, self.tags = rig, Contents(), set[int]()
        self.host = {FULL: SimulatedPool(rig.core.state.host)}
        self.device = {FULL: SimulatedPool(rig.core.state.device)}
        self.reading: dict[int, list[int]] = {}
        for name, tier in rig.core.state.components.host.items() if rig.core.state.components else ():
            self.host[name] = SimulatedPool(tier.pool)
        for name, tier in rig.core.state.components.device.items() if rig.core.state.components else ():
            self.device[name] = SimulatedPool(tier.pool)

    def tags_of(self, group: str, keys: bytes) -> list[int]:
        return self.contents.tags("" if group == FULL else group, keys, 1)

    def begin(self) -> None:
        """Start the copies and puts among the pending commands that were not started."""
        for wish in self.rig.pending:
            if isinstance(wish, commands.CopyPages) and wish.op not in self.reading:
                self.reading[wish.op] = self.device[wish.component].begin_read(wish.source_pages, wish.op)
                self.host[wish.component].begin_write(wish.target_pages, wish.op)
            elif isinstance(wish, commands.StorePages) and wish.op not in self.reading:
                _, keys = self.rig.core.keys_stored(wish.op)
                wanted = self.tags_of(wish.component, keys)[wish.first :][: len(wish.host_pages) + wish.asked]
                assert len(wanted) == len(wish.host_pages) + wish.asked
                self.host[wish.component].expect(wish.host_pages, wanted[: len(wish.host_pages)], "a put")
                self.host[wish.component].begin_read(wish.host_pages, wish.op)
                self.reading[wish.op] = wanted

    def end(self, how: str, pick: int) -> None:
        ours = [each for each in self.rig.pending if isinstance(each, commands.CopyPages | commands.StorePages)]
        if not ours:
            return
        wish = ours[pick % len(ours)]
        self.rig.pending.remove(wish)
        known = self.reading.pop(wish.op)
        if isinstance(wish, commands.CopyPages):
            self.device[wish.component].end_read(wish.source_pages, wish.op, known)
            self.host[wish.component].end_write(wish.target_pages, wish.op, None if how == "fail" else known)
            self.rig.copied(wish, "failed" if how == "fail" else "")
        else:
            count = len(wish.host_pages)
            self.host[wish.component].end_read(wish.host_pages, wish.op, known[:count])
            put = {"fail": 0, "part": pick % (count + 1)}.get(how, count)
            self.tags |= set(known[:put])
            stored = next((at for at, tag in enumerate(known) if tag not in self.tags), len(known))
            self.rig.step(
                events.PagesStored,
                op=wish.op,
                stored=0 if how == "fail" else stored,
                written=put,
                error="failed" if how == "fail" else "",
            )
        self.begin()


@given(
    steps=STEPS,
    host_pages=st.sampled_from((1, 3, 8, 40)),
    run=st.sampled_from((1, 3, 32)),
    breaker=st.sampled_from((0, 2)),
    grouped=st.booleans(),
)
def test_no_wrong_page_is_stored_and_every_page_returns(
    steps: list[tuple[str, int]], host_pages: int, run: int, breaker: int, grouped: bool
) -> None:
    groups = (window(2, 20, 3), state(20, 2)) if grouped else ()
    rig = lent_rig(
        host_pages=host_pages, device_pages=200, fetch_run_pages=run, breaker_failures=breaker, components=groups
    )
    stored = Stored(rig)
    offers, blocks = 0, 0
    for what, pick in steps:
        if what == "offer" and blocks + 20 <= 200:
            keys = PROMPTS[pick % 3][: 1 + pick % 17]
            first = pick // 17 % len(keys)
            pages, blocks = range(blocks, blocks + len(keys) - first), blocks + len(keys) - first
            offered = {each.name: (offers % 20,) for each in groups if each.trailing_pages(1) == 1}
            stored.device[FULL].tags[pages.start : pages.stop] = stored.tags_of(FULL, keys)[first:]
            for name in offered:
                if offers < 20:
                    stored.device[name].tags[offers] = stored.tags_of(name, keys)[-1]
            offers += 1
            offered = offered if offers <= 20 else {}
            rig.offer(keys, pages, offer=offers, offered_components=offered)
            stored.begin()
        elif what == "wait":
            rig.wait_until(rig.now_s + pick % 3)
            stored.begin()
        elif what == "flush":
            rig.flush("l2")
        else:
            stored.end(what, pick)
    rig.wait_until(rig.now_s + 5.0)
    stored.begin()
    while any(isinstance(each, commands.CopyPages | commands.StorePages) for each in rig.pending):
        stored.end("end", 0)
    ends = rig.take_all(commands.ReportOffered)
    assert sorted(report.offer for report in ends) == list(range(1, offers + 1))
    assert all(min(report.written, report.present, report.passed, report.declined) >= 0 for report in ends)
    assert not rig.core.state.host.owned and not len(rig.core.offers) and not list(rig.core.passages)
    for pool in (tier.pool for tier in (rig.core.state.components.host.values() if groups else ())):
        assert not pool.owned
    rig.core.check()
