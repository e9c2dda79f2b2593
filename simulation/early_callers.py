"""Simulated callers that begin with the first layers of their prompts (`ReportEarly`).

A caller reads each layer that was reported, and may write to the prompt's last page, to the reserve and to its own
component pages until its use has ended; it updates the record of a state in place. It notices a loss after a while, and
only then stops. No page that it may write to may get another writer before that, and a layer that was reported must
stay in place until the loss is reported.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Protocol

from simulation.memory import LAYERS, Violation
from simulation.surroundings import Surroundings
from tidekv.states import events

if TYPE_CHECKING:
    from simulation.components import Tags
    from tidekv.states import commands
    from tidekv.states.component_specs import ComponentTable
    from tidekv.states.types import PageIds

EARLY_SHARE = 0.3
"""Share of the runs with own device pages in which callers begin early."""
EARLY_REQUESTS = 0.7
"""Share of the requests of such a run that begin early."""


def draws_early(seed: int) -> bool:
    """Whether callers of this seed begin early, if its settings are drawn as well."""
    return Random(f"early {seed}").random() < EARLY_SHARE


class EarlyCaller(Protocol):
    """A live request, for what it may use: its prompt, and the tags of its pages and of their partial last one."""

    request_id: str
    tokens: bytes
    tags: list[int]
    tail: list[int]
    component_tags: Tags


class EarlySurroundings(Surroundings, Protocol):
    """Interface of a rank for callers that begin early."""

    def early_caller(self, request_id: str) -> EarlyCaller:
        """Return the caller of a live request."""
        ...

    def abort_early(self, caller: EarlyCaller) -> None:
        """Abort the request, unless it has ended."""
        ...


class EarlyUse:
    """One use of a request's pages by its caller."""

    def __init__(self, caller: EarlyCaller, command: commands.ReportEarly, writable: PageIds) -> None:
        self.caller = caller
        self.command = command
        self.writable = writable
        self.layers = command.layers
        self.is_lost = False
        self.has_ended = False
        self.is_aborted = False
        """The caller has aborted. With ranks the core hears that later, and may report layers until then."""

    @property
    def component_pages(self) -> tuple[ComponentTable, ...]:
        """Its component pages; empty without components."""
        return self.command.component_pages or ()

    @property
    def who(self) -> str:
        """Name of the use, for violations."""
        return f"early use {self.command.op} of {self.caller.request_id}"


class EarlyCallers:
    """All uses of one run."""

    def __init__(self, world: EarlySurroundings, seed: object, counts: Counter[str]) -> None:
        """`counts` gets what became of the uses."""
        self._world = world
        self._random = Random(f"early callers {seed}")
        self._uses: dict[str, EarlyUse] = {}
        """Uses whose requests are live, by request id."""
        self.counts = counts

    # --- Commands of the core ---

    def begin(self, command: commands.ReportEarly) -> None:
        """Begin with the layers that are in place."""
        caller = self._world.early_caller(command.request_id)
        before = self._uses.get(command.request_id)
        if before is not None and not before.has_ended:
            raise Violation(f"{command} comes while its caller uses the pages of {before.command}")
        is_partial = len(caller.tokens) % self._world.settings.page_size
        writable = (command.pages[-1:] if is_partial else command.pages[:0]) + command.reserve
        use = self._uses[command.request_id] = EarlyUse(caller, command, writable)
        self._world.device.begin_use(writable, use.who)
        self._check_components(use)
        self._world.component_pages.begin_use(use.component_pages, use.who)
        self.counts["begun"] += 1
        self.counts["begun with components"] += bool(use.component_pages)
        self._check(use)
        if before is not None and before.is_aborted and before.caller is caller:
            use.is_aborted = True
            self._end(use)
            return
        self._compute(use)
        self._abort_soon(caller, share=0.1, delays=6)

    def advance(self, command: commands.ReportLayers) -> None:
        """Note further layers."""
        use = self._uses.get(command.request_id)
        if use is not None and use.is_aborted:
            return
        if use is None or use.is_lost or use.has_ended or not use.layers < command.layers < LAYERS:
            raise Violation(f"{command} does not follow an early READY")
        use.layers = command.layers
        self.counts["layers"] += 1
        self._check(use)

    def lose(self, command: commands.ReportLayersLost) -> None:
        """Notice a loss after a while."""
        use = self._uses.get(command.request_id)
        if use is not None and use.is_aborted:
            return
        if use is None or use.is_lost or use.has_ended:
            raise Violation(f"{command} does not follow an early READY")
        use.is_lost = True
        self.counts["lost"] += 1
        slow = 0.6 if self._random.random() < 0.1 else 0.0
        self._world.schedule.after(self._world.delay() * 3 * self._random.random() + slow, self._end, use)
        self._abort_soon(use.caller, share=0.3, delays=3)

    def ready(self, command: commands.ReportReady) -> None:
        """End the use with READY: the pages are the caller's. After a loss it still has to stop using the old ones."""
        use = self._uses.get(command.request_id)
        if use is None or use.has_ended:
            return
        if use.is_lost:
            self.counts["ready before the caller has stopped"] += 1
            if use.command.generation != command.generation:
                return
        elif (
            command.pages != use.command.pages
            or command.reserve != use.command.reserve
            or list(map(_pages_of, command.component_pages or ())) != list(map(_pages_of, use.component_pages))
        ):
            raise Violation(f"{command} has other pages than {use.command}")
        use.has_ended = True
        self._world.device.end_use(use.writable, use.who)
        # After a loss the caller begins again, and what it had written stays.
        tags = None if use.is_lost else use.caller.component_tags
        self._world.component_pages.end_use(use.component_pages, use.who, tags)

    def aborted(self, caller: EarlyCaller) -> None:
        """End the use of a caller that has just aborted its request."""
        use = self._uses.get(caller.request_id)
        if use is not None and use.caller is caller:
            if not use.has_ended:
                self.counts["aborted"] += 1
            use.is_aborted = True
            self._end(use)

    def has_aborted(self, caller: EarlyCaller) -> bool:
        """Whether a caller has aborted while it used its pages. What it wrote by then has stayed there."""
        use = self._uses.get(caller.request_id)
        return use is not None and use.caller is caller and use.is_aborted

    # --- The caller ---

    def _abort_soon(self, caller: EarlyCaller, *, share: float, delays: int) -> None:
        """Abort within some time in this share of all cases, if aborts may strike."""
        if self._world.faults.is_on("abort") and self._random.random() < share:
            wait_s = self._world.delay() * delays * self._random.random()
            self._world.schedule.after(wait_s, self._world.abort_early, caller)

    def _end(self, use: EarlyUse) -> None:
        if not use.has_ended:
            use.has_ended = True
            self._world.device.end_use(use.writable, use.who)
            self._world.component_pages.end_use(use.component_pages, use.who)
            self._world.tell_now(events.EarlyUseEnded(at_s=0.0, op=use.command.op))

    def _compute(self, use: EarlyUse) -> None:
        """Read what is in place, from time to time, until the use has ended or the layers were lost."""
        if not use.has_ended and not use.is_lost:
            self._check(use)
            self._world.schedule.after(self._world.delay() * 2, self._compute, use)

    def _check(self, use: EarlyUse) -> None:
        tags = use.caller.tags + use.caller.tail
        self._world.device.expect_layers(use.command.pages, tags, use.layers, use.who)

    def _check_components(self, use: EarlyUse) -> None:
        caller, world = use.caller, self._world
        world.component_pages.check_ready(
            use.component_pages, len(caller.tokens), caller.component_tags, use.who, is_early=True
        )


def _pages_of(table: ComponentTable) -> tuple[str, int, PageIds]:
    return table.component, table.first, table.pages
