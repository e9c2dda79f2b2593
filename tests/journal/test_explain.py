"""`explain` names the cause of each kind of fallback, in the words of whoever injected it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidekv import Replayer
from tidekv.engine.seeing.explain import explain
from tidekv.engine.seeing.stories import read_stories
from tidekv.states import commands, events
from tidekv.states.restore import Restore

Play = Any  # A core played by hand: the fixture `play`, whose class tests cannot import.


def words_for(path: Path, request_id: str = "r1") -> str:
    stories = read_stories(Replayer(path))
    return "\n".join(explain(story, now_s=stories.last_at_s) for story in stories.named(request_id))


def storage_fails(play: Play) -> None:
    fetch = play.plan_with_storage("r1")
    play.take(events.PagesFetched, op=fetch.op, good=0, error="disk on fire")
    play.bring_everything("r1")


def storage_is_short(play: Play) -> None:
    fetch = play.plan_with_storage("r1")
    play.take(events.PagesFetched, op=fetch.op, good=1)
    play.bring_everything("r1")


def storage_is_late(play: Play) -> None:
    fetch = play.plan_with_storage("r1")
    play.wait_for_clock()
    play.bring_everything("r1")
    play.take(events.PagesFetched, op=fetch.op, good=4)


def fetch_cannot_be_started(play: Play) -> None:
    fetch = play.plan_with_storage("r1")
    play.take(events.CommandRaised, op=fetch.op, detail="Traceback\n  …\nOSError: no file left")
    play.bring_everything("r1")


def query_fails(play: Play) -> None:
    play.take(events.StorageChanged, available=True)
    play.arrive("r1")
    play.take(events.StorageAnswered, op=play.last(commands.QueryStorage).op, found=0, error="connection refused")
    play.bring_everything("r1")


def query_is_late(play: Play) -> None:
    play.take(events.StorageChanged, available=True)
    play.arrive("r1")
    play.wait_for_clock()
    play.bring_everything("r1")


def host_is_short(play: Play) -> None:
    play.plan_with_storage("r0", tokens=b"zzzzzzzz")
    fetch = play.plan_with_storage("r1", tokens=b"aabbccdd", found=4)
    play.take(events.PagesFetched, op=fetch.op, good=2)
    play.bring_everything("r1")


def copy_fails(play: Play) -> None:
    copy = play.plan_with_host("r1")
    play.take(events.CopyEnded, op=copy.op, error="CopyFailed: bus error")
    play.bring_everything("r1")


def copy_is_late(play: Play) -> None:
    copy = play.plan_with_host("r1")
    play.wait_for_clock()
    play.take(events.CopyEnded, op=copy.op)
    play.bring_everything("r1")


def prefill_refuses(play: Play) -> None:
    play.arrive("r1", prefill_count=2)
    play.take(events.PromiseSent, request_id="r1", generation=0, writer="p0", ranks=1)
    play.take(events.RoomRefused, request_id="r1", generation=0, span=0, cause="it forgot the prompt")
    play.bring_everything("r1")


def prefill_fails(play: Play) -> None:
    play.arrive("r1", prefill_count=2)
    play.take(events.PromiseSent, request_id="r1", generation=0, writer="p0", ranks=1)
    play.take(events.RoomFailed, request_id="r1", generation=0, cause="out of memory there", settled=True)
    play.bring_everything("r1")


def writer_is_lost(play: Play) -> None:
    play.arrive("r1", prefill_count=2)
    play.take(events.PromiseSent, request_id="r1", generation=0, writer="p0", ranks=1)
    play.take(events.ChunkLanded, request_id="r1", generation=0, rank=0, span=0, first=0, count=2, last=False)
    play.take(events.WriterLost, writer="p0", cause="no heartbeat for 2 s")
    play.bring_everything("r1")


def last_prefill_fails(play: Play) -> None:
    play.arrive("r1")
    play.take(events.PromiseSent, request_id="r1", generation=0, writer="p0", ranks=1)
    play.take(events.RoomFailed, request_id="r1", generation=0, cause="killed by the operator", settled=True)


def deadline_passes(play: Play) -> None:
    play.arrive("r1", deadline_at_s=play.at_s + 0.5)
    play.take(events.PromiseSent, request_id="r1", generation=0, writer="p0", ranks=1)
    play.wait_for_clock()


def caller_aborts(play: Play) -> None:
    play.arrive("r1")
    play.take(events.AbortRequested, request_id="r1", cause="cancelled by the caller")


def device_is_short(play: Play) -> None:
    play.arrive("r0", tokens=b"0123456789abcdef0123456789abcdef")
    play.bring_everything("r0")
    play.arrive("r1", tokens=b"aabbccddeeffgghh")
    play.at_s += 3.0
    play.take(events.AbortRequested, request_id="r0")
    play.bring_everything("r1")


def filler_is_lost(play: Play) -> None:
    """r1 shares pages that r0's room was to fill after a failed fetch; r0's prefill is lost."""
    fetch = play.plan_with_storage("r0")
    play.take(events.PromiseSent, request_id="r0", generation=0, writer="p0", ranks=1)
    play.arrive("r1")
    play.answer_queries(found=0)
    play.take(events.PagesFetched, op=fetch.op, good=0, error="disk on fire")
    play.take(events.WriterLost, writer="p0", cause="no heartbeat for 2 s")
    play.bring_everything("r1")


CASES: dict[Callable[[Play], None], list[str]] = {
    storage_fails: ["the fetch from storage failed: disk on fire", "extend", "READY"],
    storage_is_short: ["the fetch was short: storage brought 1 of 4 pages", "lost or corrupt", "extend", "READY"],
    storage_is_late: ["storage was late: the fetch did not end within its deadline", "extend", "fetched too late"],
    fetch_cannot_be_started: ["starting the fetch from storage raised: OSError: no file left", "extend", "READY"],
    query_fails: ["asking storage failed: connection refused", "without storage", "READY"],
    query_is_late: ["storage was late: it did not answer within its deadline", "without storage", "READY"],
    host_is_short: ["host memory was short", "declined", "READY"],
    copy_fails: ["the copy from host to device failed: CopyFailed: bus error", "extend", "READY"],
    copy_is_late: ["a copy to the device was late", "given up", "for other pages", "READY"],
    prefill_refuses: ["prefill refused: it forgot the prompt", "next prefill", "READY"],
    prefill_fails: ["prefill failed: out of memory there", "next prefill", "READY"],
    writer_is_lost: ["the prefill worker was lost: no heartbeat for 2 s", "next prefill", "for a room that was left"],
    last_prefill_fails: ["It failed: prefill failed (killed by the operator)"],
    deadline_passes: ["It failed: deadline (in TRANSFER)", "FAILED after 499.0 ms"],
    caller_aborts: ["It failed: cancelled by the caller"],
    device_is_short: ["waited longest in PREALLOC, for free device pages (it needed 9 at once)", "more device pages"],
    filler_is_lost: ["the transfer of another request", "for other pages", "READY"],
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_words_name_the_injected_cause(play: Play, case: Callable[[Play], None]) -> None:
    case(play)
    words = words_for(play.tape.end())
    for expected in CASES[case]:
        assert expected in words, words


def test_words_name_a_rule_that_raised(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    # A bug of ours: it raises in the replay, too.
    fix_plan = Restore.fix_plan

    def raising(self: Restore, request) -> None:  # type: ignore[no-untyped-def]
        if not request.raised:
            raise ZeroDivisionError("a bug")
        fix_plan(self, request)

    monkeypatch.setattr(Restore, "fix_plan", raising)
    play.arrive("r1")
    play.bring_everything("r1")
    words = words_for(play.tape.end())
    assert "a rule of the core raised; the plan was cut to L1, L2 and transfer" in words


def test_plan_and_sources_are_told_with_their_numbers(play: Play) -> None:
    copy = play.plan_with_host("r1", tokens=b"aabbccddeef")
    play.take(events.CopyEnded, op=copy.op)
    play.bring_everything("r1")
    words = words_for(play.tape.end())
    assert "matched 0 pages in L1, 4 in L2, 0 in L3; promised 8 tokens, asked prefill for 2 pages" in words
    assert "Tokens by source: 8 from host memory (L2), 3 from prefill." in words
