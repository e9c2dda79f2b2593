"""Replay: identical for every run, or the first event that the core answers differently."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from simulation.simulate import draw_settings, lending, with_components
from tidekv import ReplayDiverged, Replayer
from tidekv.engine.journal.digest import COVERED_TURNS, final_state
from tidekv.states.core import Core
from tidekv.states.handover.rooms import Rooms
from tidekv.states.loads.loads import Loads
from tidekv.states.pages.page_pool import PagePool
from tidekv.states.prefix.index import PrefixIndex
from tidekv.states.records.request_parts import StorageAnswer
from tidekv.states.request.admission_queue import Queue
from tidekv.states.request.restore import Restore
from tidekv.states.settings import CoreSettings

TURN_EVENTS = 5


@pytest.mark.parametrize("seed", range(10))
def test_replay_of_a_simulated_run_with_faults_is_identical(simulate, seed: int) -> None:
    tape = simulate(seed, 60)
    replayer = Replayer(tape.path)
    replayed = replayer.run()
    assert (replayed.events, replayed.complete, replayed.torn) == (len(tape.steps), True, None)
    assert final_state(replayer.core) == final_state(tape.core)


@pytest.mark.parametrize("seed", range(5))
def test_replay_of_a_simulated_run_in_lent_pages_is_identical(simulate, seed: int) -> None:
    tape = simulate(seed, 60, settings=lending(draw_settings(Random(seed))))
    replayer = Replayer(tape.path)
    replayed = replayer.run()
    assert replayed.complete and replayer.header.core.lends_device
    assert final_state(replayer.core) == final_state(tape.core)


@pytest.mark.parametrize("seed", (3, 6, 7, 10))
def test_replay_of_a_simulated_run_with_windows_and_states_is_identical(simulate, seed: int) -> None:
    settings = with_components(draw_settings(Random(seed)), seed)
    tape = simulate(seed, 40, settings=settings)
    assert "adapter" not in tape.path.read_text()  # A namespace in clear, as in the locals of a raise.
    replayer = Replayer(tape.path)
    replayed = replayer.run()
    assert replayed.complete and replayer.header.core.components == settings.components
    assert final_state(replayer.core) == final_state(tape.core)
    sums = {name for name in final_state(replayer.core) if name.startswith("crc_")}
    assert {f"crc_{component.name}_{tier}" for component in settings.components for tier in ("device", "host")} <= sums


def test_steps_show_the_commands_that_the_run_gave(simulate) -> None:
    tape = simulate(3)
    for step, (event, given) in zip(Replayer(tape.path).steps(), tape.steps, strict=True):
        assert type(step.event) is type(event)
        assert repr(step.commands) == given


@pytest.mark.parametrize("seq", [0, 17, 60])
def test_until_stops_with_the_state_behind_that_event(simulate, seq: int) -> None:
    tape = simulate(2)
    replayer = Replayer(tape.path)
    replayed = replayer.run(until=seq)
    assert (replayed.events, replayed.complete) == (seq + 1, False)
    fresh = Core(tape.core.settings)
    for event, _ in tape.steps[: seq + 1]:
        fresh.step(event)
    assert final_state(replayer.core) == final_state(fresh)


def _distrust_storage(patch: pytest.MonkeyPatch) -> None:
    take = StorageAnswer.take

    def distrust(self: StorageAnswer, *, found: int, **given: Any) -> None:
        take(self, found=found - 1, **given)

    patch.setattr(StorageAnswer, "take", distrust)


def _change_allocator(patch: pytest.MonkeyPatch) -> None:
    give_back = PagePool.give_back
    patch.setattr(PagePool, "give_back", lambda self, pages: give_back(self, pages[::-1]))


def _leak_a_lock(patch: pytest.MonkeyPatch) -> None:
    unlock = PrefixIndex.unlock

    def forgetful(self: PrefixIndex, receipt) -> None:  # type: ignore[no-untyped-def]
        if receipt.node.depth_pages != 3:
            unlock(self, receipt)

    patch.setattr(PrefixIndex, "unlock", forgetful)


def _evict_more(patch: pytest.MonkeyPatch) -> None:
    evict = PrefixIndex.evict_device
    patch.setattr(PrefixIndex, "evict_device", lambda self, count: evict(self, count + 1))


def _trust_a_short_fetch(patch: pytest.MonkeyPatch) -> None:
    fetched = Loads.fetched
    patch.setattr(Loads, "fetched", lambda self, load, good: fetched(self, load, load.page_count))


def _free_without_drained(patch: pytest.MonkeyPatch) -> None:
    leave = Rooms.leave
    patch.setattr(Rooms, "leave", lambda self, room, *, settled: leave(self, room, settled=True))


def _newest_first(patch: pytest.MonkeyPatch) -> None:
    candidates = Queue.candidates
    patch.setattr(Queue, "candidates", lambda self, now_s: reversed(list(candidates(self, now_s))))


def _promise_less(patch: pytest.MonkeyPatch) -> None:
    load = Restore._load_from_host

    def without_host(self: Restore, request, match):  # type: ignore[no-untyped-def]
        return load(self, request, match) if match.host_pages != 1 else (match.device_node, match.device_pages)

    patch.setattr(Restore, "_load_from_host", without_host)


PLANTED = [
    _distrust_storage,
    _change_allocator,
    _leak_a_lock,
    _evict_more,
    _trust_a_short_fetch,
    _free_without_drained,
    _newest_first,
    _promise_less,
]
SETTINGS = CoreSettings(
    page_size=2,
    key_bytes=2,
    device_pages=24,
    host_pages=40,
    prefetch_threshold_tokens=0,
    prefetch="timeout",
    fetch_run_pages=2,
    query_deadline_s=0.05,
    prefetch_base_s=0.1,
    copy_deadline_s=0.2,
)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__.strip("_"))
def test_a_changed_rule_is_named_within_the_turns_of_which_one_is_covered(
    simulate, plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(5, 15):
        tape = simulate(seed, 60, settings=SETTINGS)
        with monkeypatch.context() as patch:
            plant(patch)
            try:
                Replayer(tape.path).run()
            except ReplayDiverged as diverged:
                # Pools and locks differ no later than commands do.
                assert diverged.seq < _first_difference(tape) + TURN_EVENTS * (COVERED_TURNS + 1)
                assert diverged.recorded != diverged.replayed
                assert Replayer(tape.path).run(until=diverged.seq - 1).events == diverged.seq
                return
    pytest.fail("no seed has shown the changed rule")


def _first_difference(tape) -> int:  # type: ignore[no-untyped-def]
    """The first event behind which the changed core gives other commands, found without the journal."""
    core = Core(tape.core.settings)
    for seq, (event, given) in enumerate(tape.steps):
        try:
            commands = core.step(event)
        except Exception:
            return seq
        if repr(commands) != given:
            return seq
    return len(tape.steps)
