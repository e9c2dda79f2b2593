"""The tree changes during use: splits, inserts and evictions between the beginning and the end of an operation."""

from __future__ import annotations

from simulation.rig import Rig, ids
from tidekv.states import commands


def back_up(rig: Rig) -> None:
    """All copies to the host end."""
    for copy in rig.take_all(commands.CopyPages, target="host"):
        rig.copied(copy)


def test_a_node_that_is_split_while_its_copy_runs_gets_its_host_pages_where_they_belong() -> None:
    rig = Rig()
    first = rig.make_ready("a", b"abcdef")
    rig.finish("a", b"abcdef")
    copy = rig.take(commands.CopyPages, target="host")
    assert ids(copy.source_pages) == ids(first.pages)
    # A prompt that parts from it in the middle.
    rig.make_ready("b", b"abcXYZ")
    rig.copied(copy)
    rig.finish("b", b"abcXYZ")
    back_up(rig)
    rig.flush("l1")
    for tokens, host in ((b"abcdef", ids(copy.target_pages)), (b"abcXYZ", ids(copy.target_pages)[:3])):
        rig.arrive("again", tokens)
        up = rig.take(commands.CopyPages, target="device")
        assert ids(up.source_pages)[: len(host)] == host
        assert len(up.source_pages) == 6
        rig.copied(up)
        rig.serve(rig.take(commands.SendPromise))
        rig.abort("again")
        rig.flush("l1")
    rig.expect_nothing_held()


def test_two_that_bring_the_same_prompt_share_one_copy_of_it_and_account_for_both() -> None:
    rig = Rig(device_pages=16)
    rig.arrive("a", b"abcdefgh")
    rig.arrive("b", b"abcdefgh")
    of_a, of_b = rig.take_all(commands.SendPromise)
    rig.serve(of_a)
    rig.serve(of_b)
    ready_a, ready_b = rig.take_all(commands.ReportReady)
    assert ids(ready_a.pages) == ids(ready_b.pages)
    statistics = rig.core.statistics()
    assert (statistics["device_free"], statistics["device_cached"], statistics["device_owned"]) == (8, 8, 0)
    rig.finish("a", b"abcdefgh")
    assert rig.core.state.index.device_protected == 8
    rig.abort("b")
    back_up(rig)
    rig.expect_nothing_held()


def test_what_was_evicted_is_asked_of_prefill_and_what_is_locked_is_not_evicted() -> None:
    rig = Rig(device_pages=12, host_pages=0)
    rig.make_cached("old", b"abcd")
    locked = rig.make_ready("busy", b"ABCD")
    rig.arrive("big", b"01234567")
    promise = rig.take(commands.SendPromise)
    assert not set(ids(promise.pages)) & set(ids(locked.pages))
    rig.serve(promise)
    rig.abort("big")
    rig.pending.clear()
    assert rig.make_ready("old again", b"abcd").sources == {"l1": 0, "l2": 0, "l3": 0, "transfer": 4}
    rig.abort("old again")
    rig.abort("busy")
    rig.expect_nothing_held()


def test_a_tree_of_shared_beginnings_frees_everything_when_traffic_stops() -> None:
    rig = Rig(device_pages=40, host_pages=40)
    live = []
    for number in range(60):
        tokens = bytes([number % 2, number % 3, number % 5, number % 7, number % 11])
        name = f"r{number}"
        rig.arrive(name, tokens)
        for copy in rig.take_all(commands.CopyPages, target="device"):
            rig.copied(copy)
        rig.serve(rig.take(commands.SendPromise))
        live.append((name, tokens))
        if number % 3 or len(live) > 5:
            name, tokens = live.pop(number % len(live))
            if number % 2:
                rig.finish(name, tokens)
            else:
                rig.abort(name)
            back_up(rig)
    for name, tokens in live:
        rig.finish(name, tokens)
        back_up(rig)
    rig.expect_nothing_held()
    index, state = rig.core.state.index, rig.core.state
    assert index.device_evictable == state.device.cached > 0
    assert index.host_evictable == state.host.cached > 0
