"""Driver of the core: one inbox with one consumer, which steps the core, starts its commands and keeps its timer.

The core is stepped here only, on the loop's thread, between two awaits. Outcomes of commands come back through the same
inbox; nothing steps the core from within a step.

A step that makes requests READY first resolves their calls, which run in the next turn of the loop. Watchers and the
other commands of the step follow in the turn after that, and always before the core is stepped again.

Completions are taken before calls and before the clock: a caller waits for them already, their pages are in use, and
the step of an arriving request is the longest of all. Nothing completes of a request that the core has not taken, so
causes still precede effects; calls stay in order among themselves, and so do completions. Calls cannot starve, since
without them nothing is in flight that could complete. Nothing overtakes an abort: a completion after it finds its
request gone.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from tidekv.engine.log import engine_log, own_context
from tidekv.engine.watching import Watcher
from tidekv.states.commands import Command, ReportEarly, ReportLayers, ReportReady, ReportRestored
from tidekv.states.core import Core
from tidekv.states.errors import IllegalEvent
from tidekv.states.events import (
    AbortRequested,
    ClockAdvanced,
    Event,
    FinishRequested,
    FlushRequested,
    GrowthTaken,
    HintReceived,
    PagesOffered,
    PolicyChanged,
    RequestArrived,
    RequestChanged,
    RetractedDropped,
    RetractRequested,
    ShareRequested,
    StorageChanged,
    StoreRequested,
)

LOG = engine_log("tidekv.engine")

TURN_S_MAX = 0.001
"""Maximum seconds of events in one callback; then other callbacks of the loop run."""
TIMER_MIN_S = 0.001
"""uvloop runs shorter timers at once, which would spin."""

CALLS = frozenset(
    (
        RequestArrived,
        AbortRequested,
        RequestChanged,
        GrowthTaken,
        FinishRequested,
        RetractRequested,
        RetractedDropped,
        PagesOffered,
        FlushRequested,
        HintReceived,
        ShareRequested,
        StoreRequested,
        StorageChanged,
        PolicyChanged,
        ClockAdvanced,
    )
)
"""Calls and the clock: taken if no completion waits."""
RESTORED = frozenset((ReportReady, ReportEarly, ReportLayers, ReportRestored))
"""Commands that resolve the calls of restored requests: performed before everything else of their step."""


class Driver:
    """Drives one core on the running loop."""

    def __init__(
        self,
        core: Core,
        perform: Callable[[Command], None],
        *,
        watchers: Sequence[Watcher] = (),
        on_broken: Callable[[BaseException], None],
        after_drain: Callable[[], None],
        is_agreed: bool = False,
    ) -> None:
        """With `is_agreed` the ranks of an instance have agreed on all that is posted and on its order, and have one
        clock: nothing goes before anything else, and the rank driver posts ClockAdvanced.
        """
        self._core = core
        self._is_agreed = self._is_in_order = is_agreed
        self._perform = perform
        self._watchers = tuple(watchers)
        self._on_broken = on_broken
        self._after_drain = after_drain
        self._completed: deque[Event] = deque()
        self._calls: deque[Event] = deque()
        """Taken after `_completed`. While an abort is in it, every event is put here."""
        self._owed: tuple[Event, list[Command]] | None = None
        """The last step, while its watchers and commands other than those of RESTORED have not run."""
        self._armed = False
        self._stepping = False
        self._in_turn = False
        """Whether events were taken since `after_drain` was last called."""
        self._broken = False
        self._seq = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = float("inf")
        self._loop = asyncio.get_running_loop()
        self._context = own_context()
        self._thread = threading.get_ident()
        self.illegal_events = 0
        self.last_illegal = ""

    clock: Callable[[], float] = staticmethod(time.monotonic)
    """Monotonic seconds, as events carry them. (`loop.time()` of uvloop steps by a millisecond.)"""

    def check(self) -> None:
        """Raise if no request can be taken now. Without ranks it always can."""

    def watch(self, watcher: Watcher) -> None:
        """Add a watcher behind the others; it receives every step from now on."""
        self._watchers = (*self._watchers, watcher)

    @property
    def events_taken(self) -> int:
        """Events that the core has taken so far."""
        return self._seq

    @property
    def is_caught_up(self) -> bool:
        """Whether the core has taken every posted event, and all commands and watchers of its steps have run."""
        return not (self._completed or self._calls) and self._owed is None

    def post(self, event: Event) -> None:
        """Queue an event; after `stop` it is dropped. Call it on the loop's thread. If it raises, nothing is queued."""
        assert threading.get_ident() == self._thread, "events are posted on the loop's thread"
        if self._broken:
            return
        if not self._armed:
            self._arm()  # Before the event is queued: if this raises, the event was not posted.
        if type(event) is AbortRequested:
            self._is_in_order = True
        elif not self._calls:
            self._is_in_order = self._is_agreed
        if self._is_in_order or type(event) in CALLS:
            self._calls.append(event)
        else:
            self._completed.append(event)

    def _arm(self) -> None:
        # Not in the context of the caller: this callback also serves the requests of others.
        self._loop.call_soon(self._drain, context=self._context)
        self._armed = True

    def take_now(self, event: Event) -> None:
        """Take everything that is queued, and then this event, before returning. Events that are taken so until the
        loop's next turn are of one turn.
        """
        assert not self._stepping, "the core is not stepped from within a step"
        self._calls.append(event)
        # A copy: a context cannot be entered twice, and this may be called from it.
        self._context.copy().run(self._take_all)

    def _take_all(self) -> None:
        while not (self.is_caught_up or self._broken):
            self._take_batch()
        self._arm_timer()
        if self._in_turn and not self._armed:
            self._arm()

    def stop(self) -> None:
        """Take no more events. Commands that were not started never are."""
        self._broken = True
        self._in_turn = self._stepping  # A step that breaks still ends its turn. After any other stop none ends.
        self._completed.clear()
        self._calls.clear()
        if self._owed is not None:
            (event, commands), self._owed = self._owed, None
            self._run_watchers(event, commands)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _drain(self) -> None:
        # Still armed: events posted meanwhile are taken in this turn, or in the next, after calls woken in this one.
        try:
            if not self.is_caught_up:
                self._take_batch()
                self._arm_timer()
            if self._in_turn and self._owed is None:
                self._in_turn = False
                self._after_drain()
        finally:
            self._armed = False
            if not (self.is_caught_up or self._broken):
                self._arm()

    def _take_batch(self) -> None:
        ends_at_s = self.clock() + TURN_S_MAX
        self._stepping = self._in_turn = True
        try:
            self._settle_step()
            while (queue := self._completed or self._calls) and not self._broken:
                event = queue.popleft()
                self._seq += 1
                if self._step(event):
                    return
                self._settle_step()
                if self.clock() > ends_at_s:
                    break
        except BaseException as error:
            # The core can no longer be trusted: stop loudly, and end every wait.
            self.stop()
            self._on_broken(error)
        finally:
            self._stepping = False

    def _step(self, event: Event) -> bool:
        """Step the core with an event, and resolve the calls that became READY; return whether there are any."""
        try:
            commands = self._core.step(event)
        except IllegalEvent as error:
            self.illegal_events += 1
            self.last_illegal = str(error)
            LOG.error(
                "the core refused an event, and changed nothing", event_type=type(event).__name__, cause=str(error)
            )
            self._run_watchers(event, [], type(error).__name__)
            return False
        except BaseException as error:
            self._run_watchers(event, [], type(error).__name__)
            raise
        self._owed = (event, commands)
        is_ready = False
        for command in commands:
            if type(command) in RESTORED:
                self._perform(command)
                is_ready = True
        return is_ready

    def _settle_step(self) -> None:
        """Run the watchers and remaining commands of the last step."""
        if self._owed is None:
            return
        (event, commands), self._owed = self._owed, None
        self._run_watchers(event, commands)
        for command in commands:
            if type(command) not in RESTORED:
                self._perform(command)

    def _run_watchers(self, event: Event, commands: list[Command], error: str = "") -> None:
        for watcher in self._watchers:
            watcher.stepped(event, commands, error)

    def _arm_timer(self) -> None:
        due = self._core.next_deadline_s() if not self._is_agreed else None
        if due is None or self._broken:
            return
        if self._timer is not None:
            if due >= self._timer_at_s:
                return
            self._timer.cancel()
        self._timer_at_s = due
        self._timer = self._loop.call_later(max(due - self.clock(), TIMER_MIN_S), self._time_is_up)

    def _time_is_up(self) -> None:
        self._timer = None
        self._timer_at_s = float("inf")
        now_s = self.clock()
        due = self._core.next_deadline_s()
        if due is not None and due <= now_s:
            # Posted after completions that wait: finished work never becomes a timeout.
            self.post(ClockAdvanced(at_s=now_s))
        else:
            self._arm_timer()
