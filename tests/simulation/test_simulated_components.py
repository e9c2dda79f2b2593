"""Windows and states in the simulation: nothing breaks, everything is reached, and such runs replay and explain."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path
from random import Random

import msgspec
import pytest

from simulation import FAULTS, Report, simulate
from simulation.components import draw_components
from simulation.simulate import draw_settings
from simulation.world import World
from tests.support.thorough import thorough_beyond
from tidekv import Replayer
from tidekv.engine.journal.digest import final_state
from tidekv.engine.journal.format import write_lines
from tidekv.engine.journal.recorder import Recorder
from tidekv.engine.trace.explain import explain
from tidekv.engine.trace.request_traces import read_request_traces
from tidekv.states.commands import Command
from tidekv.states.component_specs import Component
from tidekv.states.events import Event
from tidekv.states.settings import CoreSettings

OF_STORAGE = [name for name in FAULTS if name.startswith(("query_", "fetch_", "store_", "storage_", "page_"))]
WITH_COMPONENTS = [seed for seed in range(1, 60) if draw_components(Random(f"components {seed}"), 1)]
MIXTURES = {
    "window": (Component(name="window", kind="window", window_tokens=7, device_pages=30, host_pages=40),),
    "state": (Component(name="state", kind="state", device_pages=12, host_pages=40),),
    "both": (
        Component(name="window", kind="window", window_tokens=3, device_pages=12, host_pages=40),
        Component(name="state", kind="state", device_pages=9, host_pages=40),
    ),
    "just enough for one": (
        Component(name="window", kind="window", window_tokens=4, device_pages=3, host_pages=2),
        Component(name="state", kind="state", device_pages=1, host_pages=1),
    ),
    "no host": (
        Component(name="window", kind="window", window_tokens=4, device_pages=20),
        Component(name="state", kind="state", device_pages=8),
    ),
}


def settings_with(components: tuple[Component, ...], **fields: int) -> CoreSettings:
    sizes = {"page_size": 2, "key_bytes": 2, "device_pages": 30, "host_pages": 80, **fields}
    return CoreSettings(copy_deadline_s=0.2, components=components, **sizes)  # type: ignore[arg-type]  # All numbers.


@pytest.mark.parametrize("seed", thorough_beyond(WITH_COMPONENTS[2:6], WITH_COMPONENTS[:16]))
def test_a_run_with_all_faults_breaks_nothing(seed: int) -> None:
    simulate(seed, 80)


def test_every_other_run_has_components() -> None:
    drawn = [draw_components(Random(f"components {seed}"), 2) for seed in range(400)]
    assert 150 < sum(not components for components in drawn) < 250
    assert {len(components) for components in drawn} == {0, 1, 2, 3}
    kinds = Counter(component.kind for components in drawn for component in components)
    assert min(kinds["window"], kinds["state"]) > 80
    assert any(component.host_pages == 0 for components in drawn for component in components)


@pytest.mark.parametrize("mixture", MIXTURES)
def test_without_faults_every_request_is_ready(mixture: str) -> None:
    report = simulate(11, 60, "none", settings=settings_with(MIXTURES[mixture]))
    assert report.ends == {"READY": 60}


@pytest.mark.parametrize("fault", sorted(name for name in FAULTS if name.startswith("component_")))
def test_no_fault_of_a_component_fails_a_request(fault: str) -> None:
    report = simulate(0, 100, {fault: 0.2, "flush": 0.2}, settings=settings_with(MIXTURES["both"]))
    assert report.ends == {"READY": 100}
    assert report.faults[fault]


def test_everything_that_can_be_done_with_a_tail_is_done() -> None:
    done, counters = Counter[str](), Counter[str]()
    for seed in range(2):
        report: Report = simulate(seed, 120, ["flush", "retract"], settings=settings_with(MIXTURES["both"]))
        done.update(report.component_pages)
        counters.update(report.counters)
    for name in (
        "tails_sent",
        "tails_cached",
        "components_shared",
        "component_pages_left",
        "copies_device_to_device",
        "copies_host_to_device",
    ):
        assert done[name] > 5, done
    assert done["copies_device_to_host"] > 50, done


def test_tails_go_to_storage_and_come_from_there_whatever_happens() -> None:
    done, counters = Counter[str](), Counter[str]()
    # Its tail reaches back beyond what a turn adds to a prompt, and the caches are small.
    wide = (Component(name="window", kind="window", window_tokens=12, device_pages=30, host_pages=30),)
    settings = settings_with(wide, device_pages=24, host_pages=20)
    settings = msgspec.structs.replace(settings, prefetch_threshold_tokens=0, prefetch_base_s=0.1, store_host_share=1.0)
    # With slow answers, few requests would wait for what storage has of components.
    slow = ("query_is_slow", "query_is_late", "query_is_stuck")
    faults = [*(name for name in OF_STORAGE if name not in slow), "flush"]
    for seed in (1, 2, 6):
        report: Report = simulate(seed, 120, faults, settings=settings)
        assert set(report.ends) == {"READY"}
        done.update(report.component_pages)
        counters.update(report.counters)
    assert done["components_stored"] > 80 and done["components_fetched"] > 4, done
    for name in ("l3_fetches_late", "l3_pages_short", "l3_queries_failed"):
        assert counters[name], counters
    # What storage does not deliver is asked of prefill.
    assert not counters["sent_back"], counters


def test_component_pages_are_read_ahead_whatever_happens() -> None:
    done, counters = Counter[str](), Counter[str]()
    wide = (
        Component(name="window", kind="window", window_tokens=12, device_pages=30, host_pages=60),
        Component(name="state", kind="state", device_pages=30, host_pages=60),
    )
    # Requests wait for device memory, and storage has what their ends need.
    settings = msgspec.structs.replace(
        settings_with(wide, device_pages=18, host_pages=20),
        prefetch_threshold_tokens=0,
        prefetch_base_s=0.1,
        store_host_share=1.0,
        lookahead_pages_max=1000,
    )
    slow = ("query_is_slow", "query_is_late", "query_is_stuck")
    for seed in (2, 4, 6):
        report: Report = simulate(
            seed, 80, [*(name for name in OF_STORAGE if name not in slow), "flush"], settings=settings
        )
        assert set(report.ends) == {"READY"}
        done.update(report.component_pages)
        counters.update(report.counters)
    assert done["components_read_ahead"] > 30 and counters["component_pages_fetched_ahead"] > 30, (done, counters)


class Tape:
    """Records the steps of one core, all in one turn."""

    def __init__(self, world: World, *, with_tokens: bool) -> None:
        self.core = world.core
        self._recorder = Recorder(world.core, with_tokens=with_tokens)
        self._step, world.core.step = world.core.step, self.step  # type: ignore[method-assign]  # What it tapes.

    def step(self, event: Event) -> list[Command]:
        given = self._step(event)
        self._recorder.stepped(event, given)
        return given

    def write(self, path: Path) -> Path:
        recorder, turn = self._recorder, self._recorder.end_turn()
        assert turn is not None
        write_lines(path, [recorder.run_line(), recorder.render(turn), recorder.end_line()])
        return path


@pytest.mark.parametrize(
    ("seed", "with_tokens"),
    thorough_beyond(
        [(WITH_COMPONENTS[0], True), (WITH_COMPONENTS[1], False)], product(WITH_COMPONENTS[:4], [True, False])
    ),
)
def test_the_journal_of_a_run_replays_and_explains_every_request(seed: int, with_tokens: bool, tmp_path: Path) -> None:
    tapes: list[Tape] = []
    report = simulate(seed, 60, watch=lambda world: tapes.append(Tape(world, with_tokens=with_tokens)))
    path = tapes[0].write(tmp_path / "run.journal")
    replayer = Replayer(path)
    assert replayer.header.core.components == tapes[0].core.settings.components
    replayed = replayer.run()
    assert (replayed.events, replayed.complete) == (report.events, True)
    assert final_state(replayer.core) == final_state(tapes[0].core)
    stories = read_request_traces(Replayer(path))
    words = [explain(request_trace, now_s=stories.last_at_s) for request_trace in stories.named("r1")]
    assert words and all("None" not in text for text in words)


def test_the_settings_of_a_seed_are_the_same_but_for_its_components() -> None:
    seed = WITH_COMPONENTS[0]
    worlds: list[World] = []
    simulate(seed, 5, watch=worlds.append)
    drawn = draw_settings(Random(f"settings {seed}"))
    assert worlds[0].settings.components
    assert worlds[0].settings.with_policy(drawn).page_size == drawn.page_size
    assert worlds[0].settings.device_pages == drawn.device_pages
