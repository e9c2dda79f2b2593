"""Edge cases: the errors of wrong calls, and calls that other tests seldom make."""

from __future__ import annotations

import contextlib
import io
import runpy
import warnings

import pytest

from simulation.rig import Rig
from tidekv.states import commands, events
from tidekv.states.errors import (
    BrokenInvariant,
    InvalidConfig,
    JournalDamaged,
    PeerMismatch,
    PrefillCause,
    RankBroken,
    RankLost,
    RanksDiverged,
    RemoteProtocolError,
    ReplayDiverged,
    RequestFailed,
)
from tidekv.states.handover.sender import SenderRoom
from tidekv.states.prefix.node import PageTree
from tidekv.states.request.table import diagram
from tidekv.states.settings import CoreSettings
from tidekv.states.storage_policy import StoragePolicy
from tidekv.states.types import PoolMemory, Segment, page_ids


def test_errors_carry_their_fields_and_words_built_from_them() -> None:
    failed = RequestFailed("r1", "prefill failed", "Traceback\n  line\nOSError: gone\n")
    assert (failed.cause, str(failed)) == ("prefill failed", "request 'r1' failed: prefill failed (OSError: gone)")
    assert str(RequestFailed("r1", "aborted")) == "request 'r1' failed: aborted"
    differs = PeerMismatch(field="dtype", ours="a", theirs="b")
    assert (differs.field, str(differs)) == ("dtype", "peer differs in dtype: ours is 'a', theirs is 'b'")
    damaged = JournalDamaged(path="j", line=3, cause="torn")
    assert (damaged.line, str(damaged)) == (3, "journal damaged at j:3: torn")
    broken, lost = RankBroken(rank=1), RankLost(rank=2, cause="no answer within 2 s")
    assert (broken.rank, lost.rank, lost.cause) == (1, 2, "no answer within 2 s")
    assert "the engine of rank 1 broke" in str(broken)
    assert str(lost) == "rank 2 is lost: no answer within 2 s"
    apart = RanksDiverged(turn=9, parts=("index", "free pages"))
    assert (apart.turn, str(apart)) == (9, "ranks differ at turn 9 in: index, free pages")
    diverged = ReplayDiverged(seq=7, event="E", turn=2, parts=("effects",), recorded="x", replayed="y", hint="look")
    assert (diverged.seq, str(diverged).splitlines()[1:]) == (7, ["  recorded: x", "  replayed: y", "  look"])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"device_pages": 0}, "device_pages must be a whole number, 1 or more"),
        ({"host_pages": -1}, "host_pages must be a whole number, 0 or more"),
    ]
    + [
        ({name: 0.0}, f"{name} must be a number above 0")
        for name in ("query_deadline_s", "copy_deadline_s", "ageing_s")
    ],
)
def test_a_setting_out_of_range_is_named(wrong: dict[str, float], words: str) -> None:
    good = {"page_size": 1, "key_bytes": 1, "device_pages": 1}
    with pytest.raises(InvalidConfig, match=words):
        CoreSettings(**(good | wrong))


def test_a_page_has_the_bytes_of_all_its_pieces() -> None:
    segments = tuple(Segment(address=4096, piece_bytes=size, stride_bytes=64, page_count=2) for size in (24, 8))
    assert PoolMemory(segments=segments, page_count=2).page_bytes == 32


def test_a_tree_needs_keys_and_keeps_who_has_children() -> None:
    with pytest.raises(BrokenInvariant, match="0 bytes wide"):
        PageTree(0)
    rig = Rig()
    rig.make_cached("a", b"abcd")
    index = rig.core.state.index
    with pytest.raises(BrokenInvariant, match="cannot leave the tree"):
        index.tree.remove(index.tree.roots[""])
    with pytest.raises(BrokenInvariant, match="cannot lose its device pages"):
        index.withdraw_device(index.lock(next(iter(index.nodes()))).node)


def test_an_audit_says_what_does_not_add_up() -> None:
    rig = Rig()
    rig.arrive("a", b"abcd")
    rig.core.queue.add(rig.request("a"))
    with pytest.raises(BrokenInvariant, match="the queue does not hold"):
        rig.core.check()


def test_pages_of_a_forgotten_computation_stay_owned_until_it_ends() -> None:
    rig = Rig()
    rig.arrive("a", b"abcd", can_recompute=True)
    promise = rig.take(commands.SendPromise)
    rig.step(events.RoomFailed, request_id="a", generation=promise.generation, cause="no", settled=True)
    asked = rig.take(commands.Recompute)
    assert (asked.first, len(asked.pages)) == (0, 4)
    rig.abort("a")
    assert rig.core.statistics()["device_owned"] == 4
    rig.step(events.Recomputed, op=asked.op)
    rig.expect_nothing_held()


def test_the_table_draws_itself() -> None:
    said = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(said):
        warnings.simplefilter("ignore", RuntimeWarning)  # It is imported already, and run once more.
        runpy.run_module("tidekv.states.request.table", run_name="__main__")
    assert said.getvalue() == diagram()


def planted(damage: str, rig: Rig) -> None:
    """Damage the index of a rig that has "abcd" on device and host."""
    index, state = rig.core.state.index, rig.core.state
    node = next(iter(index.nodes()))
    queue = index.device_tier.queue
    match damage:
        case "stale nodes are miscounted":
            queue._stale_count += 1
        case "a priority fell":
            node.tick = -1
        case "a receipt is out and nowhere":
            index.device_tier.receipts += 1
        case "a host page of nobody":
            assert node.host is not None
            node.host = state.host.take(len(node.host))
        case "a page in RECLAIMING that is not draining":
            index.set_reclaiming(node)
            assert node.device is not None
            state.device.settle(node.device)


@pytest.mark.parametrize(
    "damage",
    [
        "stale nodes are miscounted",
        "a priority fell",
        "a receipt is out and nowhere",
        "a host page of nobody",
        "a page in RECLAIMING that is not draining",
    ],
)
def test_the_index_sees_that(damage: str) -> None:
    rig = Rig()
    rig.make_cached("a", b"abcd")
    rig.core.check()
    planted(damage, rig)
    with pytest.raises(BrokenInvariant):
        rig.core.state.index.check()


def test_what_was_computed_is_told_as_a_list_of_its_own() -> None:
    room = SenderRoom(prompt_tokens=4, decode_prefix_len=0, page_size=2, pages=page_ids([5, 6]))
    room.remember(page_ids([1]), start_token=0)
    computed = room.computed
    computed.append(9)
    assert (list(room.computed), room.computed_pages) == ([1], 1)
    with pytest.raises(RemoteProtocolError, match="names a page twice in span 1"):
        room.extend(1, 0, page_ids([7, 7]))


def test_rooms_are_counted_and_listed() -> None:
    rig = Rig()
    rig.arrive("a", b"abcd")
    assert len(rig.core.rooms) == 1
    assert [room.key for room in rig.core.rooms] == [("a", 0)]


@pytest.mark.parametrize("ahead", [1.01, float("inf"), float("nan")])
def test_no_more_than_the_whole_pool_is_written_back_ahead(ahead: float) -> None:
    with pytest.raises(InvalidConfig, match="write_back_ahead must be a number from 0 to 1"):
        StoragePolicy(write_back_ahead=ahead)
    assert StoragePolicy(write_back_ahead=1.0).write_back_ahead == 1.0


@pytest.mark.parametrize("cause", PrefillCause)
def test_a_cause_of_prefill_is_found_again_in_the_text_of_an_event(cause: PrefillCause) -> None:
    assert PrefillCause.parse(cause.words("ab: c: d")) == (cause, "ab: c: d")
    assert PrefillCause.parse(cause.value) is None
    assert PrefillCause.parse(f"really, {cause.words('x')}") is None


def test_what_a_person_has_to_change_is_not_retryable() -> None:
    assert {cause.value for cause in PrefillCause if not cause.retryable} == {
        "protocol error",
        "prefill does not match",
        "wrong secret",
        "unknown host",
        "misconfigured",
        "other prompt",
        "prefill raised",
        "prefill unfinished",
    }
