"""Journals of simulated runs, and what a test does to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import msgspec
import pytest

from simulation.faults import Chosen
from simulation.simulate import draw_settings
from simulation.world import World
from tidekv.engine.journal import Recorder
from tidekv.engine.journal.format import write_lines
from tidekv.engine.metrics import MetricsFold
from tidekv.states import commands, events
from tidekv.states.commands import Command
from tidekv.states.component_specs import Component
from tidekv.states.core import Core
from tidekv.states.records.stages import State
from tidekv.states.settings import CoreSettings
from tidekv.states.storage_policy import changed_policy, policy_of

TURN_EVENTS = 5


class Tape:
    """Records the steps of one core to a file, without a thread."""

    def __init__(self, core: Core, path: Path) -> None:
        self.path = path
        self.core = core
        self._recorder = Recorder(core)
        self._lines = [self._recorder.run_line()]
        self._turn_events = 0
        self.has_ended = False
        self.fold = MetricsFold(core)
        """What a running engine would serve to Prometheus."""
        self.steps: list[tuple[events.Event, str]] = []
        """Each event with the commands that followed, as they were: pages may change hands later."""
        self._step, core.step = core.step, self.step  # type: ignore[method-assign]  # What it tapes.

    def step(self, event: events.Event) -> list[Command]:
        try:
            given = self._step(event)
        except Exception as error:
            self._take(event, [], type(error).__name__)
            raise
        self._take(event, given)
        self.steps.append((event, repr(given)))
        return given

    def _take(self, event: events.Event, given: list[Command], error: str = "") -> None:
        self._recorder.stepped(event, given, error)
        self.fold.stepped(event, given, error)
        self._turn_events += 1
        if self._turn_events == TURN_EVENTS:
            self._end_turn()

    def _end_turn(self) -> None:
        turn = self._recorder.end_turn()
        self._turn_events = 0
        if turn is not None:
            self._lines.append(self._recorder.render(turn))

    def end(self) -> Path:
        self._end_turn()
        self.has_ended = True
        write_lines(self.path, [*self._lines, self._recorder.end_line()])
        return self.path


Simulate = Callable[..., Tape]


@pytest.fixture
def simulate(tmp_path: Path) -> Simulate:
    """Run one seed of the simulation, and tape it; the tape is ended."""

    def run(seed: int = 1, requests: int = 40, faults: Chosen = "all", settings: CoreSettings | None = None) -> Tape:
        drawn = settings or draw_settings(Random(f"settings {seed}"))
        world = World(seed=seed, requests=requests, faults=faults, settings=drawn)
        tape = Tape(world.core, tmp_path / f"{seed}.journal")
        try:
            world.run(6)
        finally:
            tape.end()
        return tape

    return run


Given = TypeVar("Given", bound=Command)
PLAY_SETTINGS = CoreSettings(
    page_size=2,
    key_bytes=2,
    device_pages=18,
    host_pages=6,
    prefetch="timeout",
    prefetch_threshold_tokens=0,
    fetch_run_pages=32,
    query_deadline_s=0.05,
    prefetch_base_s=0.1,
    copy_deadline_s=0.2,
)


class Play:
    """Plays a core by hand, event by event, a millisecond apart, onto a tape. Tokens are bytes, two a page."""

    def __init__(
        self, path: Path, patch: Callable[..., None], watch: Callable[[Core], None] = lambda core: None
    ) -> None:
        """`watch` receives each core before its first step."""
        self.patch = patch
        self.watch = watch
        self.raised: list[object] = []
        """Where a planted bug has raised so far."""
        self.core = Core(PLAY_SETTINGS)
        watch(self.core)
        self.tape = Tape(self.core, path)
        self.at_s = 1.0
        self.given: list[Command] = []
        self.open_ops: dict[int, Command] = {}
        self._number = 0

    def begin_with(self, components: tuple[Component, ...] = (), **changes: Any) -> None:
        """Start again with components beside the KV, or with other settings."""
        self.core = Core(msgspec.structs.replace(PLAY_SETTINGS, components=components, **changes))
        self.watch(self.core)
        self.tape = Tape(self.core, self.tape.path)

    def take(self, kind: type[events.Event], **fields: Any) -> list[Command]:
        self.at_s += 0.001
        given = self.core.step(kind(at_s=self.at_s, **fields))
        self.given += given
        self.open_ops.pop(fields.get("op", 0), None)
        self.open_ops.update(
            {command.op: command for command in given if isinstance(command, commands.OperationCommand)}
        )
        return given

    def last(self, kind: type[Given], **fields: object) -> Given:
        """The last command of this kind with these fields."""
        has = [command for command in self.given if isinstance(command, kind)]
        found = [each for each in has if all(getattr(each, name) == value for name, value in fields.items())]
        return found[-1]

    def arrive(self, request_id: str, tokens: bytes = b"aabbccdd", **fields: Any) -> list[Command]:
        self._number += 1
        keys = tokens[: len(tokens) // 2 * 2]
        prefill_count = fields.pop("prefill_count", 1)
        return self.take(
            events.RequestArrived,
            request_id=request_id,
            request_number=self._number,
            keys=keys,
            prompt_tokens=len(tokens),
            prefills=tuple(f"prefill-{number}" for number in range(prefill_count)),
            **fields,
        )

    def plan_with_storage(
        self, request_id: str, tokens: bytes = b"aabbccdd", found: int = 4, **fields: Any
    ) -> commands.FetchPages:
        """The request is planned, and storage is asked for its pages."""
        self.take(events.StorageChanged, available=True)
        self.arrive(request_id, tokens, **fields)
        self.answer_queries(found)
        return self.last(commands.FetchPages)

    def plan_with_peer(
        self, request_id: str = "r1", policy: dict[str, str] | None = None, **fields: Any
    ) -> commands.FetchPages:
        """The request is planned, and a peer is asked for its pages."""
        self.begin_with(peer_host_share=1.0, **(policy or {}))
        self.arrive(request_id, peers=("decode-1:9000",), **fields)
        return self.last(commands.FetchPages)

    def ask_storage(self, request_id: str = "r1", **fields: Any) -> int:
        """A request waits for the answer to its query; returns the number of the operation."""
        self.take(events.StorageChanged, available=True)
        self.arrive(request_id, **fields)
        return self.last(commands.QueryStorage).op

    def answer_queries(self, found: int) -> None:
        for op, command in list(self.open_ops.items()):
            if isinstance(command, commands.QueryStorage):
                self.take(events.StorageAnswered, op=op, found=found)

    def plan_with_host(self, request_id: str, tokens: bytes = b"aabbccdd", **fields: Any) -> commands.CopyPages:
        """Four pages of the request are in host memory, and their copy to the device has begun."""
        self.arrive("before", b"aabbccdd")
        self.bring_everything("before")
        self.take(events.FinishRequested, request_id="before", keys=b"aabbccdd", tokens=8)
        self.take(events.CopyEnded, op=self.last(commands.CopyPages, target="host", component="full").op)
        self.take(events.FlushRequested, call=1, tiers=("l1",))
        self.arrive(request_id, tokens, **fields)
        return self.last(commands.CopyPages, target="device", component="full")

    def change_policy(self, **changes: object) -> None:
        self.take(events.PolicyChanged, policy=changed_policy(policy_of(self.core.state.settings), changes))

    def bring_to(self, state: str, request_id: str = "r1", **fields: Any) -> None:
        """Bring a request into this state; from the plan on it has a room with a promise sent to p0."""
        if state == "PREALLOC":
            self.arrive("big", tokens=b"0123456789abcdef0123456789abcdef")
            self.bring_everything("big")
            self.arrive(request_id, **fields)
        elif state == "PREFETCH":
            self.plan_with_storage(request_id, **fields)
        elif state == "LOCAL_RESTORE":
            self.plan_with_host(request_id, **fields)
        else:
            self.arrive(request_id, **fields)
        request = self.core.request(request_id)
        assert request is not None
        if request.room is not None:
            self.send_promise(request_id)
        if state == "READY":
            self.bring_everything(request_id)
        assert request.state.value == state

    def send_promise(self, request_id: str, writer: str = "p0") -> None:
        room = self.core.request(request_id).room  # type: ignore[union-attr]  # It has one.
        self.take(events.PromiseSent, request_id=request_id, generation=room.generation, writer=writer, ranks=1)

    def to_room(self, kind: type[events.Event], request_id: str = "r1", **fields: Any) -> None:
        """Apply an event that prefill sends for the request's room."""
        request = self.core.request(request_id)
        assert request is not None
        self.take(kind, request_id=request_id, generation=request.generation, **fields)

    def finish(self, request_id: str = "r1", kind: type[events.Event] = events.FinishRequested) -> None:
        self.take(kind, request_id=request_id, keys=b"aabbccdd", tokens=8)

    def back_up(self, request_id: str = "r1") -> None:
        """The request is finished, and its pages are in host memory."""
        self.bring_everything(request_id)
        self.finish(request_id)
        self.take(events.CopyEnded, op=self.last(commands.CopyPages, target="host", component="full").op)

    def wait_for_clock(self) -> None:
        due_s = self.core.next_deadline_s()
        assert due_s is not None
        self.at_s = due_s - 0.001
        self.take(events.ClockAdvanced)

    def bring_everything(self, request_id: str) -> None:
        """Storage has nothing, copies succeed, and prefill sends all that is asked, until the request is READY."""
        sent: set[tuple[int, int]] = set()
        for _ in range(50):
            request = self.core.request(request_id)
            if request is None or request.state.value == "READY":
                return
            self.answer_queries(found=0)
            for op, command in list(self.open_ops.items()):
                if isinstance(command, commands.CopyPages) and command.target == "device" and op > 0:
                    self.take(events.CopyEnded, op=op)
            room = request.room
            if room is None:
                continue
            if not room.ranks:
                self.send_promise(request_id, writer=f"p{room.prefill}")
            if not room.aux_from:
                self.take(events.AuxReceived, request_id=request_id, generation=room.generation, rank=0)
            for number, span in enumerate(list(room.spans)):
                if (room.generation, number) not in sent:
                    sent.add((room.generation, number))
                    self.take(
                        events.ChunkReceived,
                        request_id=request_id,
                        generation=room.generation,
                        rank=0,
                        span=number,
                        first=span.cursors.get(0, span.first),
                        count=span.first + span.count - span.cursors.get(0, span.first),
                        last=True,
                    )
        raise AssertionError(f"{request} is not READY: {self.core.statistics()}")


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    return Play(tmp_path / "play.journal", monkeypatch.setattr)


@pytest.fixture
def play_of_rows(tmp_path: Path) -> Callable[[dict[str, Any]], set[tuple[str, State, State]]]:
    """Play rows of the table of causes; returns the transitions of requests r1 that were made: event, from, to."""

    taken = set()

    def watch(core: Core) -> None:
        def noted(kind: type[events.Event], take: Callable[..., None]) -> Callable[..., None]:
            def take_and_note(request: Any, event: events.Event) -> None:
                before = request.state
                take(request, event)
                if request.request_id == "r1":
                    taken.add((kind.__name__, before, request.state))

            return take_and_note

        for kind, by_state in core.rows.items():
            for rows in by_state.values():
                rows[:] = [(only_if, take and noted(kind, take)) for only_if, take in rows]

    def run(rows: dict[str, Any]) -> set[tuple[str, State, State]]:
        for name, (inject, _, _) in rows.items():
            with pytest.MonkeyPatch.context() as patch:
                played = Play(tmp_path / "play.journal", patch.setattr, watch)
                inject(played)
                assert played.given, name
        return taken

    return run
