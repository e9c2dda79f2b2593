"""Modeled prefill worker: computes what it lacks, one request after the other, and then sends the requested pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from benchmarks.published.setups import PAGE_TOKENS
from benchmarks.published.stations import Line
from tidekv.states import commands, events

if TYPE_CHECKING:
    from benchmarks.published.prompts import Prompt
    from benchmarks.published.setups import Speeds
    from simulation.schedule import Schedule


class Surroundings(Protocol):
    """The modeled world as prefill sees it."""

    schedule: Schedule
    speeds: Speeds
    link: Line
    prefill_reads: Line

    def step(self, event: events.Event) -> None:
        """Let the core take an event."""
        ...


class PrefillWorker:
    """One worker.

    Its own cache is unlimited in every arm of every table, because decode's cache is under comparison.
    """

    def __init__(self, world: Surroundings) -> None:
        self._world = world
        self._compute = Line(world.schedule, world.speeds.prefill_tokens_per_s)
        self._known: dict[int, int] = {}
        """Known tokens of each text."""
        self._open: dict[tuple[str, int], list[commands.SendExtend]] = {}
        """Rooms that are not computed yet, with the extends that wait for them."""

    def promised(self, command: commands.SendPromise, prompt: Prompt) -> None:
        """Serve a promise: read what only storage has of the prompt if that is sooner than to compute it, and send."""
        text = prompt.shared.text
        known = min(self._known.get(text, 0), prompt.known)
        self._known[text] = max(self._known.get(text, 0), prompt.shared.tokens)
        self._open[command.request_id, command.generation] = []
        read = max(0, prompt.stored - known) if self._reads_sooner else 0
        new_tokens = prompt.tokens - known - read

        def compute() -> None:
            self._compute.serve(new_tokens, lambda: self._computed(command))

        if read:
            self._world.prefill_reads.serve(read * self._world.speeds.token_bytes, compute)
        else:
            compute()

    @property
    def _reads_sooner(self) -> bool:
        speeds = self._world.speeds
        return speeds.storage_bytes_per_s > speeds.prefill_tokens_per_s * speeds.token_bytes

    def extended(self, command: commands.SendExtend) -> None:
        """Send pages that decode requests after all, once the prompt is computed."""
        waiting = self._open.get((command.request_id, command.generation))
        if waiting is not None:
            waiting.append(command)
        else:
            self._send(command, command.span, command.first)

    def received(self, command: commands.SendReceived) -> None:
        """Check that decode's confirmation follows a computed prompt."""
        assert (command.request_id, command.generation) not in self._open, "nothing was sent yet"

    def _computed(self, command: commands.SendPromise) -> None:
        self._send(command, 0, -(-command.prompt_tokens // PAGE_TOKENS) - len(command.pages))
        for extend in self._open.pop((command.request_id, command.generation)):
            self._send(extend, extend.span, extend.first)

    def _send(self, command: commands.SendPromise | commands.SendExtend, span: int, first: int) -> None:
        world = self._world

        def written() -> None:
            if not span:
                world.step(
                    events.AuxReceived(
                        at_s=world.schedule.now_s,
                        request_id=command.request_id,
                        generation=command.generation,
                        rank=0,
                    )
                )
            world.step(
                events.ChunkReceived(
                    at_s=world.schedule.now_s,
                    request_id=command.request_id,
                    generation=command.generation,
                    rank=0,
                    span=span,
                    first=first,
                    count=len(command.pages),
                    last=True,
                )
            )

        world.link.serve(
            len(command.pages) * world.speeds.page_bytes,
            lambda: world.schedule.after(world.speeds.message_s, written),
        )
