"""Prompts that another worker hands over: what is read of them, in which memory, and at what heat they stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.rig import Rig
from tests.support.each_call import raised_at_each_call
from tests.support.raise_stories import take_prompt, take_prompt_landed, take_prompt_late, take_prompt_short
from tidekv.states import commands, events
from tidekv.states.storage.taken_prompts import BUSY, FULL_MEMORY

OLD = "old:7100"


def offer(rig: Rig, keys: bytes, *, call: int = -1, used: int = 0, within_s: float = 60.0, **fields: object) -> None:
    rig.step(
        events.HintReceived,
        **{
            "call": call,
            "action": "take",
            "namespace": "",
            "keys": keys,
            "ttl_s": within_s,
            "peer": OLD,
            "heat": (used, used, 1, 0),
            **fields,
        },
    )


def outcome(rig: Rig) -> tuple[str, int, int, str]:
    """The answer to an offer: word, pages that are there, pages that came, cause."""
    answer = rig.take(commands.ReportHinted)
    return answer.outcome, answer.page_count, answer.brought, answer.cause


def take(rig: Rig, keys: bytes, **fields: object) -> tuple[str, int, int, str]:
    """Take a prompt from a worker that has all of it."""
    offer(rig, keys, **fields)  # type: ignore[arg-type]  # Keywords of `offer`.
    while fetches := rig.take_all(commands.FetchPages):
        for fetch in fetches:
            assert fetch.peer == OLD and not fetch.request_id
            assert rig.core.keys_stored(fetch.op) == ("", keys)
            rig.fetched(fetch)
    return outcome(rig)


def in_host(rig: Rig, keys: bytes) -> int:
    return rig.core.state.index.host_end("", keys).depth_pages


def test_a_prompt_is_read_into_host_memory_and_serves_the_next_request() -> None:
    rig = Rig()
    assert take(rig, b"abcd") == ("accepted", 4, 4, "")
    assert rig.core.statistics()["pages_taken"] == 4
    rig.nothing_else()
    rig.expect_nothing_held()
    rig.arrive("a", b"abcdef")
    copy = rig.take(commands.CopyPages, target="device")
    assert len(copy.source_pages) == 4


def test_only_what_host_memory_lacks_is_read() -> None:
    rig = Rig()
    rig.make_cached("past", b"abc")
    rig.flush("l1")
    offer(rig, b"abcdef")
    fetch = rig.take(commands.FetchPages)
    assert list(fetch.positions) == [3, 4, 5]
    rig.fetched(fetch)
    assert outcome(rig) == ("accepted", 6, 3, "")
    assert take(rig, b"abcdef") == ("accepted", 6, 0, "")
    rig.expect_nothing_held()


def test_what_only_the_device_has_is_read_too_since_host_pages_have_no_gap() -> None:
    rig = Rig(write="back")
    rig.make_ready("past", b"abc")
    rig.finish("past", b"abc")
    rig.take(commands.ReportFinished)
    rig.take(commands.ForgetTokens)
    assert take(rig, b"abcdef") == ("accepted", 6, 6, "")
    assert rig.core.state.index.probe_prefix("", b"abcdef") == (3, 3)
    rig.expect_nothing_held()


def test_a_worker_that_has_less_leaves_what_it_sent() -> None:
    rig = Rig()
    offer(rig, b"abcdef")
    rig.fetched(rig.take(commands.FetchPages), 2)
    word, there, brought, cause = outcome(rig)
    assert (word, there, brought) == ("clipped", 2, 2) and "fewer pages" in cause
    offer(rig, b"xyz")
    rig.fetched(rig.take(commands.FetchPages), 0, error="the link was lost")
    assert outcome(rig) == ("rejected", 0, 0, "the link was lost")
    # Requests leave it alone for a while; what it hands over itself is read.
    assert rig.core.peers.choose((OLD,)) == ""
    assert take(rig, b"xyz") == ("accepted", 3, 3, "")
    assert rig.core.peers.choose((OLD,)) == OLD
    rig.expect_nothing_held()


def test_a_slow_worker_is_read_as_long_as_pages_come() -> None:
    rig = Rig()
    offer(rig, b"abcdef")
    for _ in range(3):
        rig.fetched(rig.take(commands.FetchPages), 2, error="late")
    assert outcome(rig) == ("accepted", 6, 6, "")
    rig.expect_nothing_held()


def test_a_long_prompt_comes_in_parts_within_the_limit_of_peers() -> None:
    rig = Rig(host_pages=32, device_pages=32, copy_run_pages=6, peer_host_share=0.25)
    offer(rig, bytes(range(20)))
    sizes = []
    while fetches := rig.take_all(commands.FetchPages):
        (fetch,) = fetches
        sizes.append(len(fetch.host_pages))
        rig.fetched(fetch)
    assert sizes == [6, 6, 6, 2] and outcome(rig) == ("accepted", 20, 20, "")
    offer(rig, b"abcdefgh", call=-1)
    offer(rig, b"ABCDEFGH", call=-2)
    offer(rig, b"tuvwxyz0", call=-3)
    assert [len(fetch.host_pages) for fetch in rig.pending if isinstance(fetch, commands.FetchPages)] == [6, 2]
    assert outcome(rig) == ("rejected", 0, 0, BUSY)
    rig.settle()
    rig.expect_nothing_held()


def test_no_more_than_so_many_are_taken_at_once() -> None:
    rig = Rig(host_pages=64, device_pages=32, peer_host_share=1.0)
    for number in range(17):
        offer(rig, bytes([number, number]), call=-1 - number)
    assert outcome(rig) == ("rejected", 0, 0, BUSY)
    assert len(rig.take_all(commands.FetchPages)) == 16


def test_what_this_worker_uses_more_stays_and_what_it_uses_less_goes() -> None:
    rig = Rig(host_pages=8, device_pages=32, peer_host_share=1.0)
    rig.make_cached("cold", b"abcd")
    rig.make_cached("hot", b"efgh")
    rig.flush("l1")
    uses = rig.core.state.index.tree.tick
    ages = [uses - rig.core.state.index.host_end("", keys).tick for keys in (b"abcd", b"efgh")]
    assert ages[0] > ages[1]
    # Older than both.
    assert take(rig, b"ABCD", used=ages[0] + 1) == ("rejected", 0, 0, FULL_MEMORY)
    # Between them: only the cold one gives way, and a part of the prompt has no room.
    word, there, brought, cause = take(rig, b"ABCDEF", used=ages[1] + 1)
    assert (word, there, brought, cause) == ("clipped", 4, 4, FULL_MEMORY)
    assert (in_host(rig, b"abcd"), in_host(rig, b"efgh")) == (0, 4)
    rig.expect_nothing_held()


def test_a_prompt_that_is_handed_over_is_as_hot_as_it_was_there() -> None:
    rig = Rig(host_pages=12, device_pages=32, peer_host_share=1.0)
    # Hottest first, as they come, into a cache that has seen nothing: older than its first use.
    for number, used in enumerate((5, 70, 900)):
        assert take(rig, bytes([number]) * 4, used=used)[0] == "accepted"
    rig.core.check()
    first = [victim.edge[0] for victim in rig.core.state.index.first_to_go("host", 12)]
    assert first == [2, 1, 0]
    # Its own requests are hotter than all of them.
    rig.make_cached("own", b"abcd")
    assert [in_host(rig, bytes([number]) * 4) for number in range(3)] == [4, 4, 0]


def test_a_prefix_is_as_hot_as_what_is_read_behind_it() -> None:
    rig = Rig(host_pages=8, device_pages=32, peer_host_share=1.0)
    take(rig, b"ab", used=900)
    take(rig, b"wxyz", used=50)
    # Two pages are free; the prefix itself would be the coldest.
    assert take(rig, b"abcdef", used=10)[:3] == ("accepted", 6, 4)
    assert in_host(rig, b"wxyz") < 4
    rig.core.check()


def test_a_late_read_is_answered_and_its_pages_come_back_when_it_ends() -> None:
    rig = Rig(peer_wait_s=1.0, peer_wait_share=1.0)
    offer(rig, b"abcd")
    fetch = rig.take(commands.FetchPages)
    assert 0 < fetch.timeout_s < 1.0
    rig.wait_until(1.0)
    word, there, brought, cause = outcome(rig)
    assert (word, there, brought) == ("rejected", 0, 0) and "late" in cause
    assert rig.core.peers.choose((OLD,)) == "" and rig.core.statistics()["peer_fetches_late"] == 1
    assert rig.core.statistics()["host_owned"] == 4
    # What has come until it was stopped is kept.
    rig.fetched(fetch, 3, error="late")
    rig.nothing_else()
    assert in_host(rig, b"abcd") == 3
    rig.expect_nothing_held()


def test_without_time_or_host_memory_nothing_is_read() -> None:
    rig = Rig()
    offer(rig, b"abcd", within_s=0.0)
    assert outcome(rig)[:3] == ("rejected", 0, 0)
    rig = Rig(host_pages=0)
    offer(rig, b"abcd")
    assert outcome(rig)[:3] == ("rejected", 0, 0)
    rig.nothing_else()


def test_a_prefix_that_goes_while_its_end_is_read_costs_these_pages_only() -> None:
    rig = Rig(host_pages=16, device_pages=32, peer_host_share=1.0)
    take(rig, b"ab", used=3)
    offer(rig, b"abcd")
    fetch = rig.take(commands.FetchPages)
    rig.flush("l2")
    rig.fetched(fetch)
    # It begins again.
    again = rig.take(commands.FetchPages)
    assert list(again.positions) == [0, 1, 2, 3]
    rig.fetched(again)
    assert outcome(rig)[:2] == ("accepted", 4)
    assert in_host(rig, b"cd") == 0, "pages behind another prefix are another prompt's"
    rig.expect_nothing_held()


@pytest.mark.parametrize("eviction", ["lru", "lfu", "slru", "fifo", "priority"])
def test_every_order_of_eviction_takes_the_heat_of_another_worker(eviction: str) -> None:
    rig = Rig(host_pages=8, device_pages=32, peer_host_share=1.0, eviction=eviction)
    take(rig, b"abcd", heat=(2, 3, 5, 1))
    take(rig, b"efgh", heat=(1, 2, 6, 2))
    rig.core.check()
    assert [victim.edge for victim in rig.core.state.index.first_to_go("host", 8)] == [b"abcd", b"efgh"]
    assert take(rig, b"ABCD", heat=(9, 9, 0, 0))[3] == FULL_MEMORY
    assert take(rig, b"WXYZ", heat=(0, 0, 9, 9))[0] == "accepted"


@pytest.mark.parametrize(
    "story", [take_prompt, take_prompt_landed, take_prompt_short, take_prompt_late], ids=lambda story: story.__name__
)
def test_a_raise_at_any_call_ends_in_one_answer(story: Callable[[Rig], Callable[[Rig], object]]) -> None:
    def prepare() -> tuple[Rig, Callable[[], object]]:
        rig = Rig()
        step = story(rig)
        return rig, lambda: step(rig)

    for call, rig in raised_at_each_call(prepare):
        answers = rig.settle()
        rig.wait_until(rig.now_s + 60.0)
        answers += rig.settle()
        assert sum(isinstance(wish, commands.ReportHinted) for wish in answers) == 1, (call, answers)
        rig.expect_nothing_held()


class Memory:
    """Host memory as a list of pages, hottest last: too simple to be wrong. Prompts share nothing here."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.held: dict[bytes, tuple[int, int]] = {}
        """By prompt, when it was used and how many of its pages are there."""

    def take(self, keys: bytes, at: int) -> int:
        """Take a prompt that was used at this time; returns how many of its pages are there then."""
        used, count = self.held.get(keys, (at, 0))
        used = max(used, at)
        missing = len(keys) - count
        free = self.pages - sum(pages for _, pages in self.held.values())
        for other, (when, pages) in sorted(self.held.items(), key=lambda item: item[1][0]):
            if other == keys:
                continue
            if free >= missing or when >= used:
                break
            gives = min(pages, missing - free)
            self.held[other] = (when, pages - gives)
            free += gives
        if count or min(missing, free):
            self.held[keys] = (used, count + min(missing, free))
        self.held = {keys: held for keys, held in self.held.items() if held[1]}
        return count + min(missing, free)


@given(
    st.lists(
        st.tuples(st.sampled_from([b"aa", b"bcde", b"fghijk", b"l", b"mnopqrst"]), st.integers(0, 40)),
        max_size=12,
        unique_by=lambda offer: offer[1],
    ),
    st.integers(4, 24),
)
def test_host_memory_has_the_hottest_of_what_was_taken(offers: list[tuple[bytes, int]], pages: int) -> None:
    rig = Rig(host_pages=pages, device_pages=32, peer_host_share=1.0, copy_run_pages=3)
    memory = Memory(pages)
    for keys, used in offers:
        # No use of the cache comes between them, so that ages are times.
        assert take(rig, keys, used=used)[1] == memory.take(keys, -used)
    assert {keys: in_host(rig, keys) for keys in memory.held} == {k: count for k, (_, count) in memory.held.items()}
    rig.expect_nothing_held()
