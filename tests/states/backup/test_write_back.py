"""Write-back, on a core stepped by hand: nothing when a request is finished, and copies ahead of eviction."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from simulation.rig import Rig, ids
from tests.support.rigs import change
from tests.support.thorough import examples
from tidekv.states import commands, events


def back_rig(**settings: object) -> Rig:
    rig = Rig(
        **{
            "device_pages": 16,
            "host_pages": 16,
            "prefetch_threshold_tokens": 0,
            "write": "back",
            "write_back_ahead": 0.5,
            **settings,
        }
    )
    rig.attach_storage()
    return rig


def turn(rig: Rig, name: str, tokens: bytes) -> None:
    """A whole request; the commands that it leads to are still to be taken."""
    rig.make_ready(name, tokens)
    rig.finish(name, tokens)
    rig.take(commands.ReportFinished)
    rig.take(commands.ForgetTokens)


def cached(rig: Rig, tokens: bytes) -> tuple[int, int]:
    """Pages of a prompt on the device, and further on the host."""
    return rig.core.state.index.probe_prefix("", tokens)


def test_nothing_is_copied_or_put_while_there_is_room() -> None:
    rig = back_rig()
    turn(rig, "a", b"abcdefgh")
    rig.nothing_else()
    assert rig.core.is_idle
    assert cached(rig, b"abcdefgh") == (8, 0)


def test_what_is_evicted_next_is_copied_before_it_is() -> None:
    rig = back_rig()
    turn(rig, "a", b"abcdef")
    turn(rig, "b", b"ghijkl")
    # Four pages are free, eight are to be free or clean: the oldest leaf is copied, and only that.
    copy = rig.take(commands.CopyPages, target="host")
    assert len(copy.source_pages) == 6
    rig.nothing_else()
    # While they are copied its pages cannot be taken.
    rig.arrive("c", bytes(range(12)))
    rig.answer(rig.take(commands.QueryStorage), 0)
    assert rig.take_all(commands.SendPromise) == []
    rig.copied(copy)
    assert cached(rig, b"abcdef")[1] >= 4
    rig.core.check()


def test_an_eviction_from_the_device_has_the_next_leaf_copied() -> None:
    rig = back_rig()
    turn(rig, "a", b"abcdefgh")
    turn(rig, "b", b"ijklmnop")
    # The copy of "a" uses up what may be copied before pages are taken again.
    rig.copied(rig.take(commands.CopyPages, target="host"))
    rig.nothing_else()
    # The request takes the clean pages of "a": without another look "b" would be dropped by the next one.
    rig.arrive("c", bytes(range(8)))
    rig.answer(rig.take(commands.QueryStorage), 0)
    assert rig.core.state.device.free == 0
    copy = rig.take(commands.CopyPages, target="host")
    assert len(copy.source_pages) == 8
    rig.copied(copy)
    assert cached(rig, b"ijklmnop") == (8, 0)
    assert rig.core.state.host.cached == 16


def test_an_eviction_from_the_host_has_the_next_leaf_put() -> None:
    rig = back_rig(device_pages=64, host_pages=8, write_back_ahead=0.5, store_wait_s=0.0)
    change(rig, write="through")
    rig.make_cached("a", b"abcd")
    change(rig, write="back")
    # What is retracted is copied to the host and put nowhere.
    rig.make_ready("b", b"ghij")
    rig.step(events.RetractRequested, request_id="b", keys=b"ghij", tokens=4)
    rig.copied(rig.take(commands.CopyPages, target="host"))
    rig.take(commands.ReportRetracted)
    rig.take(commands.ForgetTokens)
    rig.step(events.RetractedDropped, request_id="b")
    rig.nothing_else()
    assert rig.core.state.host.free == 0
    # A fetch takes the host pages of "a", which storage has: those of "b" go next, and are nowhere else.
    rig.arrive("c", b"mnop")
    rig.answer(rig.take(commands.QueryStorage), 4)
    assert len(rig.take(commands.FetchPages).host_pages) == 4
    put = rig.take(commands.StorePages)
    assert rig.core.keys_stored(put.op) == ("", b"ghij")


def test_eviction_loses_nothing_that_was_copied_ahead() -> None:
    rig = back_rig(device_pages=12, write_back_ahead=1.0)
    for number in range(5):
        tokens = bytes(range(10 * number, 10 * number + 5))
        turn(rig, f"r{number}", tokens)
        while copies := rig.take_all(commands.CopyPages, target="host"):
            for copy in copies:
                rig.copied(copy)
        while puts := rig.take_all(commands.StorePages):
            for put in puts:
                rig.stored(put)
    assert not rig.core.state.counters["l1_pages_dropped"]
    assert not rig.core.state.counters["l2_pages_dropped"]
    # What left the host as well is in storage.
    assert rig.core.state.counters["pages_stored"] >= 25 - 16
    assert rig.core.is_idle
    rig.core.check()


def test_eviction_that_comes_first_drops_and_counts() -> None:
    rig = back_rig(device_pages=8, write_back_ahead=0.1)
    turn(rig, "a", b"abcdefgh")
    turn(rig, "b", b"ijklmnop")
    assert rig.core.state.counters["l1_pages_dropped"] == 8
    assert cached(rig, b"abcdefgh") == (0, 0)


def test_pages_of_a_path_are_copied_from_the_root_once() -> None:
    rig = back_rig(device_pages=12, write_back_ahead=1.0)
    turn(rig, "a", b"abcdxx")
    turn(rig, "b", b"abcdyy")
    # Both leaves need a copy of the pages they share: one backup makes it, the other waits for it.
    first = rig.take(commands.CopyPages, target="host")
    assert len(first.source_pages) == 6
    rig.copied(first)
    second = rig.take(commands.CopyPages, target="host")
    assert len(second.source_pages) == 2
    rig.copied(second)
    assert rig.take_all(commands.CopyPages, target="host") == []
    assert rig.core.state.host.cached == 8


def put_rig(**settings: object) -> tuple[Rig, commands.StorePages]:
    """The host is full of what is nowhere else, and the first put of it has begun."""
    rig = back_rig(host_pages=8, write_back_ahead=1.0, **settings)
    turn(rig, "a", b"abcdefgh")
    rig.copied(rig.take(commands.CopyPages, target="host"))
    return rig, rig.take(commands.StorePages)


def test_what_leaves_the_host_next_is_put_by_the_keys_of_its_path() -> None:
    rig, put = put_rig()
    assert (put.request_number, len(put.host_pages), put.asked) == (0, 8, 0)
    assert rig.core.keys_stored(put.op) == ("", b"abcdefgh")
    # Its host pages are held until the put has ended.
    assert rig.flush("l2").spared == {"l2": 8}
    rig.stored(put)
    assert rig.core.is_idle
    assert rig.flush("l2").dropped == {"l2": 8}
    rig.nothing_else()


def test_a_put_that_stored_nothing_is_not_repeated_at_once() -> None:
    rig, put = put_rig()
    rig.stored(put, 0)
    rig.nothing_else()
    assert rig.core.is_idle
    # It is tried again the next time that pages are taken or left.
    turn(rig, "b", b"xyz")
    assert len(rig.take(commands.StorePages).host_pages) == 5, "three of the eight have made room"


def test_a_copy_that_failed_is_not_repeated_at_once() -> None:
    rig = back_rig(write_back_ahead=1.0)
    turn(rig, "a", b"abcd")
    rig.copied(rig.take(commands.CopyPages, target="host"), error="no")
    rig.nothing_else()
    assert rig.core.is_idle
    assert rig.core.state.host.free == 16


def test_puts_wait_for_fetches_and_end_with_storage() -> None:
    rig = back_rig(host_pages=8, write_back_ahead=1.0, store_wait_s=1.0, store_fetch_s_max=0.5)
    rig.core.storage.note_throughput(begun_at_s=-1.0, pages=1)
    turn(rig, "a", b"abcdefgh")
    rig.copied(rig.take(commands.CopyPages, target="host"))
    rig.nothing_else()
    assert not rig.core.is_idle
    rig.wait_until(0.9)
    rig.nothing_else()
    rig.wait_until(1.1)
    rig.take(commands.StorePages)


def test_a_short_host_is_not_copied_to_without_end() -> None:
    rig = back_rig(host_pages=3, write_back_ahead=1.0)
    for number in range(3):
        turn(rig, f"r{number}", bytes(range(10 * number, 10 * number + 5)))
    copies = 0
    while found := rig.take_all(commands.CopyPages, target="host"):
        for copy in found:
            rig.copied(copy)
            copies += len(copy.source_pages)
        for put in rig.take_all(commands.StorePages):
            rig.stored(put, 0)
    assert 0 < copies <= 16 + 5
    rig.core.check()


def test_storage_that_answers_probes_and_fails_puts_is_tried_ever_less_and_causes_no_copies() -> None:
    rig = back_rig(
        host_pages=10, write_back_ahead=1.0, store_wait_s=0.0, breaker_failures=1, breaker_backoff_s=1.0,
        breaker_backoff_max_s=16.0,
    )  # fmt: skip
    for number in range(3):
        rig.make_ready(f"r{number}", bytes(range(16 * number, 16 * number + 5)))
        rig.finish(f"r{number}", bytes(range(16 * number, 16 * number + 5)))
    opened_at_s, copied, begun_s = list[float](), 0, rig.now_s
    while rig.now_s < begun_s + 100.0:
        while rig.pending:
            opened = rig.core.statistics()["l3_breaker_opened"]
            for copy in rig.take_all(commands.CopyPages, target="host"):
                copied += len(copy.source_pages) * bool(opened_at_s)
                rig.copied(copy)
            for put in rig.take_all(commands.StorePages):
                rig.step(events.PagesStored, op=put.op, stored=0, error="no room")
            for probe in rig.take_all(commands.ProbeStorage):
                rig.step(events.StorageProbed, op=probe.op)
            if rig.core.statistics()["l3_breaker_opened"] > opened:
                opened_at_s.append(rig.now_s - begun_s)
            rig.take_all(commands.ReportFinished)
            rig.take_all(commands.ForgetTokens)
        rig.wait_until(rig.now_s + 0.5)
    # A copy to the host does not depend on storage, so storage that can be called again is no reason for one.
    assert copied == 0
    assert opened_at_s == [0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 47.0, 63.0, 79.0, 95.0]
    rig.core.check()


def test_without_a_host_pool_nothing_is_looked_at() -> None:
    rig = back_rig(host_pages=0, write_back_ahead=1.0)
    turn(rig, "a", b"abcd")
    rig.nothing_else()
    assert rig.core.is_idle


def test_retracting_copies_to_the_host_and_puts_nothing() -> None:
    rig = back_rig(write_back_ahead=0.0)
    rig.make_ready("a", b"abcd")
    rig.step(events.RetractRequested, request_id="a", keys=b"abcd", tokens=4)
    rig.copied(rig.take(commands.CopyPages, target="host"))
    assert rig.take(commands.ReportRetracted).held_pages == 4
    rig.take(commands.ForgetTokens)
    rig.nothing_else()


def test_what_is_in_storage_is_not_copied_again() -> None:
    rig = back_rig(host_pages=32, write_back_ahead=1.0)
    change(rig, write="through")
    rig.make_cached("a", b"abcdefgh")
    rig.flush("l2")
    change(rig, write="back")
    rig.nothing_else()
    assert cached(rig, b"abcdefgh") == (8, 0)


def test_short_prefixes_are_not_put_either() -> None:
    rig = back_rig(host_pages=8, write_back_ahead=1.0, write_tokens_min=9)
    turn(rig, "a", b"abcdefgh")
    rig.copied(rig.take(commands.CopyPages, target="host"))
    rig.nothing_else()
    assert rig.core.is_idle


def test_nothing_is_copied_below_pages_that_are_not_there_yet() -> None:
    """A later run may have come, from prefill, and be evictable, while the run in front of it is still fetched."""
    rig = back_rig(write_back_ahead=0.0, fetch_run_pages=2)
    rig.arrive("a", b"abcdef")
    rig.answer(rig.take(commands.QueryStorage), 4)
    rig.promised(rig.take(commands.SendPromise))
    first, second = rig.take_all(commands.FetchPages)
    rig.fetched(second, 0)
    rig.chunk(rig.take(commands.SendExtend))
    rig.abort("a")
    assert [node.depth_pages for node in rig.core.state.index.first_to_go("device", 1)] == [4]
    change(rig, write_back_ahead=1.0)
    assert rig.take_all(commands.CopyPages, target="host") == []
    rig.fetched(first)
    rig.core.check()


def test_no_more_than_some_copies_and_puts_are_under_way() -> None:
    rig = back_rig(device_pages=64, host_pages=64, write_back_ahead=1.0)
    for number in range(8):
        turn(rig, f"r{number}", bytes(range(10 * number, 10 * number + 5)))
    copies = rig.take_all(commands.CopyPages, target="host")
    assert len(copies) == 4
    puts = 0
    while copies:
        for copy in copies:
            rig.copied(copy)
        copies = rig.take_all(commands.CopyPages, target="host")
        found = rig.take_all(commands.StorePages)
        puts = max(puts, len(found))
        for put in found:
            rig.stored(put)
    assert 0 < puts <= 4


class WrittenBack(RuleBasedStateMachine):
    """With requests, evictions, copies, puts and drops in any order, everything adds up, and work ends by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = back_rig(device_pages=12, host_pages=8, write_back_ahead=0.6, copy_deadline_s=0.5)
        self.number = 0

    @rule(tokens=st.binary(min_size=1, max_size=7).map(lambda drawn: bytes(byte % 2 for byte in drawn)))
    def serve(self, tokens: bytes) -> None:
        self.number += 1
        self.rig.arrive(f"r{self.number}", tokens)

    @rule(found=st.integers(0, 7))
    def answer(self, found: int) -> None:
        for query in self.rig.take_all(commands.QueryStorage):
            self.rig.answer(query, min(found, query.count))

    @rule()
    def transfer(self) -> None:
        for promise in self.rig.take_all(commands.SendPromise):
            if self.rig.core.rooms.live(promise.request_id, promise.generation) is not None:
                self.rig.serve(promise)
        for extend in self.rig.take_all(commands.SendExtend):
            self.rig.chunk(extend)

    @rule(valid=st.integers(0, 7))
    def fetch(self, valid: int) -> None:
        for fetch in self.rig.take_all(commands.FetchPages):
            self.rig.fetched(fetch, min(valid, len(fetch.host_pages)))

    @rule(error=st.sampled_from(("", "", "no")))
    def copy(self, error: str) -> None:
        for target in ("device", "host"):
            for copy in self.rig.take_all(commands.CopyPages, target=target):
                self.rig.copied(copy, error)

    @rule(part=st.sampled_from((0, 1, None)))
    def put(self, part: int | None) -> None:
        for put in self.rig.take_all(commands.StorePages):
            namespace, keys = self.rig.core.keys_stored(put.op)
            assert namespace == ""
            assert len(put.host_pages) + put.asked == len(keys)
            self.rig.stored(put, part)

    @rule(write=st.sampled_from(("back", "through", "selective")), ahead=st.sampled_from((0.0, 0.6, 1.0)))
    def use_another_policy(self, write: str, ahead: float) -> None:
        change(self.rig, write=write, write_back_ahead=ahead)

    @rule()
    def finish_the_ready(self) -> None:
        for ready in self.rig.take_all(commands.ReportReady):
            if (request := self.rig.core.request(ready.request_id)) is not None:
                self.rig.finish(ready.request_id, request.keys)

    @rule(tier=st.sampled_from(("l1", "l2")))
    def flush(self, tier: str) -> None:
        self.rig.flush(tier)

    @rule()
    def replace_storage(self) -> None:
        self.rig.step(events.StorageChanged, available=False)
        self.rig.step(events.StorageChanged, available=True)

    @invariant()
    def host_pages_have_one_owner(self) -> None:
        copies = [copy for copy in self.rig.pending if isinstance(copy, commands.CopyPages) and copy.target == "host"]
        pages = [page for copy in copies for page in copy.target_pages]
        assert len(set(pages)) == len(pages)

    def teardown(self) -> None:
        for _ in range(200):
            before = len(self.rig.pending)
            self.answer(0)
            self.transfer()
            self.fetch(7)
            self.copy("")
            for put in self.rig.take_all(commands.StorePages):
                self.rig.stored(put)
            self.finish_the_ready()
            if not before and not self.rig.pending:
                break
        assert self.rig.core.is_idle, self.rig.core.statistics()


WrittenBack.TestCase.settings = examples(60, stateful_step_count=30)
TestWrittenBack = WrittenBack.TestCase


def test_the_first_to_go_stay_in_the_queue() -> None:
    rig = back_rig(write_back_ahead=0.0)
    turn(rig, "a", b"abc")
    turn(rig, "b", b"xyz")
    index = rig.core.state.index
    assert [node.edge for node in index.first_to_go("device", 4)] == [b"abc", b"xyz"]
    assert [node.edge for node in index.first_to_go("device", 1)] == [b"abc"]
    assert index.first_to_go("host", 4) == []
    assert ids(index.first_to_go("device", 9)[0].device) == [0, 1, 2]  # type: ignore[arg-type]  # It has some.
    index.check()
