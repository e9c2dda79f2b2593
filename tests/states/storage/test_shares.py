"""Reads of host memory by other decode workers: what the core holds for them, for how long, and within which bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.rig import Rig, ids
from tidekv.states import commands, events

PROMPT = b"abcdefgh"


def host_pages(rig: Rig) -> dict[bytes, int]:
    """By prefix, the page in host memory that ends it: too simple to be wrong."""
    found: dict[bytes, int] = {}
    for node in rig.core.state.index.nodes():
        prefix = b"".join(each.edge for each in rig.core.state.index.path(node))
        for at, page in enumerate(node.host or ()):
            found[prefix[: node.depth_pages - node.page_count + at + 1]] = page
    return found


def ask(rig: Rig, keys: bytes, pages_max: int = 32, call: int = -1) -> tuple[commands.SharePages | None, str]:
    """A peer asks for a prefix; returns what it gets, and the word of the answer."""
    rig.step(events.ShareRequested, call=call, read=f"read {call}", namespace="", keys=keys, pages_max=pages_max)
    answer = rig.take(commands.ReportHinted)
    shares = rig.take_all(commands.SharePages)
    assert answer.call == call and len(shares) == (answer.outcome in ("accepted", "clipped"))
    assert answer.page_count == sum(len(share.host_pages) for share in shares)
    return (shares[0] if shares else None), answer.outcome


def end(rig: Rig, share: commands.SharePages, **fields: object) -> None:
    rig.step(events.CopyEnded, op=share.op, **fields)


def test_a_peer_gets_the_pages_of_the_longest_prefix_and_they_stay_until_its_end() -> None:
    rig = Rig(host_pages=12)
    rig.make_cached("past", PROMPT)
    known = host_pages(rig)
    share, word = ask(rig, b"abcdefxy")
    assert share is not None and word == "clipped"
    assert ids(share.host_pages) == [known[PROMPT[: at + 1]] for at in range(6)]
    assert rig.core.statistics()["host_protected"] == 6
    # Others need the memory: what is shared stays.
    for number in range(4):
        rig.make_cached(f"r{number}", bytes(range(100 + 10 * number, 108 + 10 * number)))
    assert [host_pages(rig)[PROMPT[: at + 1]] for at in range(6)] == ids(share.host_pages)
    end(rig, share)
    assert rig.core.statistics()["host_protected"] == 0 and rig.core.is_idle
    end(rig, share)
    assert rig.core.state.counters["outcomes_late"] == 1


def test_nothing_is_shared_that_is_not_there_and_no_more_than_may_be() -> None:
    rig = Rig(peer_reads_max=2)
    assert ask(rig, b"") == (None, "rejected")
    assert ask(rig, b"xyz") == (None, "missing")
    rig.make_cached("past", PROMPT)
    assert ask(rig, PROMPT, pages_max=0) == (None, "rejected")
    first, word = ask(rig, PROMPT, pages_max=3)
    assert first is not None and (word, len(first.host_pages)) == ("clipped", 3)
    second, word = ask(rig, PROMPT, pages_max=5)
    assert second is not None and (word, len(second.host_pages)) == ("clipped", 2)
    assert ask(rig, PROMPT) == (None, "rejected")
    for share in (first, second):
        end(rig, share)
    assert ask(rig, PROMPT)[1] == "accepted"


def test_a_page_that_is_damaged_leaves_host_memory_with_those_behind_it() -> None:
    rig = Rig()
    rig.make_cached("past", PROMPT)
    share, _ = ask(rig, PROMPT)
    assert share is not None
    end(rig, share, error="a page is damaged", intact=5)
    assert PROMPT[:6] not in host_pages(rig) and rig.core.state.counters["l2_damaged"] == 1
    assert rig.core.is_idle


def test_what_only_the_device_has_is_not_shared() -> None:
    rig = Rig()
    rig.make_cached("past", PROMPT)
    rig.flush("l2")
    assert ask(rig, PROMPT) == (None, "missing")


@pytest.mark.parametrize("event", [events.CommandRaised, events.CopyEnded])
def test_a_share_ends_however_it_ends(event: type[events.Event]) -> None:
    rig = Rig()
    rig.make_cached("past", PROMPT)
    share, _ = ask(rig, PROMPT)
    assert share is not None
    fields = {"detail": "no"} if event is events.CommandRaised else {"error": "no"}
    rig.step(event, op=share.op, **fields)
    rig.expect_nothing_held()


PROMPTS = [bytes(prompt) for prompt in (b"aaaa", b"aaab", b"aabbbb", b"abab", b"bbbbbb", b"ba")]
OPERATIONS = st.one_of(
    st.tuples(st.just("cache"), st.sampled_from(PROMPTS)),
    st.tuples(st.just("share"), st.sampled_from([*PROMPTS, b"aaaabb", b"c"]), st.integers(0, 8)),
    st.tuples(st.just("end"), st.integers(0, 5), st.sampled_from([None, 0, 1, 3])),
    st.tuples(st.just("flush"), st.sampled_from(["l1", "l2"])),
)


@given(operations=st.lists(OPERATIONS, max_size=30), host=st.integers(4, 14))
def test_shares_are_those_of_a_naive_model(operations: list[tuple[object, ...]], host: int) -> None:
    rig = Rig(host_pages=host, device_pages=16, peer_reads_max=3)
    live: dict[int, tuple[commands.SharePages, bytes]] = {}
    for number, (kind, *rest) in enumerate(operations):
        before = host_pages(rig)
        match kind, rest:
            case "cache", [prompt]:
                assert isinstance(prompt, bytes)
                rig.arrive(f"r{number}", prompt)
                rig.settle()
                rig.finish(f"r{number}", prompt)
                rig.settle()
            case "share", [keys, pages_max]:
                assert isinstance(keys, bytes) and isinstance(pages_max, int)
                held = sum(len(share.host_pages) for share, _ in live.values())
                allowed = min(len(keys), pages_max - held) if len(live) < 3 else 0
                there = next((at for at in range(len(keys)) if keys[: at + 1] not in before), len(keys))
                share, word = ask(rig, keys, pages_max, call=-number - 1)
                expected = max(0, min(allowed, there))
                assert (0 if share is None else len(share.host_pages)) == expected
                assert (word in ("accepted", "clipped")) == bool(expected)
                if share is not None:
                    assert ids(share.host_pages) == [before[keys[: at + 1]] for at in range(expected)]
                    live[share.op] = (share, keys)
                # It took nothing from anybody.
                assert host_pages(rig) == before
            case "end", [which, intact]:
                if live:
                    op = list(live)[int(str(which)) % len(live)]
                    share, _ = live.pop(op)
                    is_damaged = isinstance(intact, int) and intact < len(share.host_pages)
                    end(rig, share, **({"error": "damaged", "intact": intact} if is_damaged else {}))
            case "flush", [tier]:
                rig.flush(str(tier))
        for share, keys in live.values():
            now = host_pages(rig)
            assert [now[keys[: at + 1]] for at in range(len(share.host_pages))] == ids(share.host_pages)
    for share, _ in live.values():
        end(rig, share)
    rig.expect_nothing_held()
