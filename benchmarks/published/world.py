"""Modeled world around one unmodified core: executes commands, each in the time that the setup gives it.

Nothing fails here and nothing is late (see `simulation` for that): the world measures how long requests
take. All decisions are the core's: admission, matching, locking, eviction, fetches and promises.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from benchmarks.published.ledger import Ledger, Unbalanced
from benchmarks.published.prefill import PrefillWorker
from benchmarks.published.prompts import KEY_BYTES, Prompt, page_names
from benchmarks.published.setups import PAGE_TOKENS, Speeds
from benchmarks.published.stations import DecodeBatch, Line
from simulation.schedule import Schedule
from tidekv.states import commands, events
from tidekv.states.core import Core
from tidekv.states.settings import CoreSettings

if TYPE_CHECKING:
    from collections.abc import Callable

NEVER_S = 1e7
"""A deadline that is never reached: slow operations do not count as late here."""
QUERY_S = 0.001


class Served:
    """One request, with its times of arrival, readiness and end on the modeled clock, in seconds."""

    __slots__ = ("arrived_at_s", "done", "done_at_s", "names", "number", "output_tokens", "prompt", "ready_at_s")

    def __init__(self, number: int, prompt: Prompt, output_tokens: int, done: Callable[[], None]) -> None:
        self.number = number
        self.prompt = prompt
        self.output_tokens = output_tokens
        self.done = done
        self.names = page_names(prompt, prompt.tokens + output_tokens - 1)
        """Numbers of all full pages that have KV at the end."""
        self.arrived_at_s = self.ready_at_s = self.done_at_s = 0.0

    @property
    def first_token_s(self) -> float:
        """Time from arrival to first token."""
        return self.ready_at_s - self.arrived_at_s

    @property
    def token_s(self) -> float:
        """Time per further token."""
        return (self.done_at_s - self.ready_at_s) / max(1, self.output_tokens - 1)


class World:
    """One decode worker and everything that it exchanges messages with.

    `settings` are those of the core; what is not given, policies included, is its default. With `cache` False no
    request leaves pages.
    """

    def __init__(self, speeds: Speeds, settings: dict[str, Any], *, cache: bool) -> None:
        # Any: sizes and policies by name, which the settings check.
        self.schedule = Schedule()
        self.core = Core(
            CoreSettings(
                page_size=PAGE_TOKENS,
                key_bytes=KEY_BYTES,
                query_deadline_s=NEVER_S,
                copy_deadline_s=NEVER_S,
                **{"share_transfers": True, **settings},
            )
        )
        self.speeds = speeds
        self.ledger = Ledger()
        self.served: list[Served] = []
        self._stored: set[int] = set()
        self._cache = cache
        self._live: dict[str, Served] = {}
        self._left: dict[int, Served] = {}
        self._clock_at_s = float("inf")
        self._inbox: deque[events.Event] = deque()
        self._is_stepping = False
        self.link = Line(self.schedule, speeds.link_bytes_per_s)
        self.reads = Line(self.schedule, speeds.storage_bytes_per_s or 1.0)
        self.prefill_reads = Line(self.schedule, speeds.storage_bytes_per_s or 1.0)
        self._writes = Line(self.schedule, speeds.storage_bytes_per_s or 1.0)
        self._copies_in = Line(self.schedule, speeds.copy_bytes_per_s)
        self._copies_out = Line(self.schedule, speeds.copy_bytes_per_s)
        self._batch = DecodeBatch(self.schedule, base_s=speeds.step_base_s, request_s=speeds.step_request_s)
        self._prefills = [PrefillWorker(self) for _ in range(speeds.prefill_workers)]
        self._do: dict[type[commands.Command], Callable[[Any], None]] = {  # Any: each handler has its own command type.
            commands.SendPromise: self._promise,
            commands.SendExtend: self._extend,
            commands.SendReceived: self._received,
            commands.QueryStorage: self._query,
            commands.FetchPages: self._fetch,
            commands.StorePages: self._store,
            commands.ProbeStorage: self._probe,
            commands.CopyPages: self._copy,
            commands.ReportReady: self._ready,
            commands.GiveReserve: _nothing,
            commands.ReportFinished: _nothing,
            commands.ReportFlushed: _nothing,
            commands.ReportStored: _nothing,
            commands.ReportHinted: _nothing,
            commands.ForgetTokens: self._forget,
        }
        if speeds.storage_bytes_per_s:
            self.step(events.StorageChanged(at_s=0.0, available=True))

    # --- Used by a load ---

    def store(self, prompt: Prompt, tokens: int) -> None:
        """Put the full pages of a prompt's first `tokens` tokens into storage."""
        self._stored.update(page_names(prompt, prompt.tokens)[: tokens // PAGE_TOKENS])

    def ask(self, prompt: Prompt, output_tokens: int, done: Callable[[], None]) -> None:
        """Submit a request now. `done` is called when it has generated its last token."""
        request = Served(len(self.served) + 1, prompt, output_tokens, done)
        request.arrived_at_s = self.schedule.now_s
        self.served.append(request)
        name = f"r{request.number}"
        self._live[name] = self._left[request.number] = request
        self.step(
            events.RequestArrived(
                at_s=self.schedule.now_s,
                request_id=name,
                request_number=request.number,
                keys=request.names[: prompt.tokens // PAGE_TOKENS].tobytes(),
                prompt_tokens=prompt.tokens,
                cache=self._cache,
            )
        )

    def run(self) -> None:
        """Run until nothing is under way. Raises Unbalanced if something is left, or does not add up."""
        while (self._live or not self.core.is_idle) and self.schedule.run_next():
            pass
        if self._live or not self.core.is_idle:
            raise Unbalanced(f"no event is scheduled, but {len(self._live)} requests have not ended")
        self.core.check()
        self.ledger.check(link_bytes=self.link.served, read_bytes=self.reads.served, page_bytes=self.speeds.page_bytes)

    def step(self, event: events.Event) -> None:
        """Pass an event to the core and execute its commands. Events that arise meanwhile follow after it."""
        self._inbox.append(event)
        if self._is_stepping:
            return
        self._is_stepping = True
        while self._inbox:
            for wish in self.core.step(self._inbox.popleft()):
                if type(wish) not in self._do:
                    raise Unbalanced(f"nothing fails in this world, but the core emitted {wish}")
                self._do[type(wish)](wish)
        self._is_stepping = False
        self._arm_clock()

    def _arm_clock(self) -> None:
        due_s = self.core.next_deadline_s()
        if due_s is not None and due_s < min(self._clock_at_s, NEVER_S / 2):
            self._clock_at_s = due_s
            self.schedule.at(due_s, self._tick)

    def _tick(self) -> None:
        self._clock_at_s = float("inf")
        self.step(events.ClockAdvanced(at_s=self.schedule.now_s))

    # --- Prefill ---

    def _promise(self, command: commands.SendPromise) -> None:
        self.ledger.asked(command)
        request = self._live[command.request_id]
        writer = request.number % len(self._prefills)
        self.step(
            events.PromiseSent(
                at_s=self.schedule.now_s,
                request_id=command.request_id,
                generation=command.generation,
                writer=f"prefill-{writer}",
                ranks=1,
            )
        )
        self.schedule.after(self.speeds.message_s, self._prefills[writer].promised, command, request.prompt)

    def _extend(self, command: commands.SendExtend) -> None:
        self.ledger.asked(command)
        request = self._live[command.request_id]
        worker = self._prefills[request.number % len(self._prefills)]
        self.schedule.after(self.speeds.message_s, worker.extended, command)

    def _received(self, command: commands.SendReceived) -> None:
        request = self._live[command.request_id]
        self._prefills[request.number % len(self._prefills)].received(command)

    # --- Storage and copies ---

    def _found(self, request: Served, first: int, count: int) -> int:
        """Return how many of these pages, from the first on, storage has."""
        names = request.names[first : first + count]
        return next((at for at, name in enumerate(names) if name not in self._stored), count)

    def _query(self, command: commands.QueryStorage) -> None:
        found = self._found(self._live[command.request_id], command.first, command.count)
        self._after(QUERY_S, lambda at_s: events.StorageAnswered(at_s=at_s, op=command.op, found=found))

    def _after(self, delay_s: float, make: Callable[[float], events.Event]) -> None:
        self.schedule.after(delay_s, lambda: self.step(make(self.schedule.now_s)))

    def _fetch(self, command: commands.FetchPages) -> None:
        count = len(command.host_pages)
        self.ledger.fetched_pages += count
        if command.request_id:
            valid = self._found(self._live[command.request_id], command.positions[0], count)
        else:
            # Pages that were just put are read to measure storage.
            valid = count
        self.reads.serve(
            count * self.speeds.page_bytes,
            lambda: self.step(events.PagesFetched(at_s=self.schedule.now_s, op=command.op, valid=valid)),
        )

    def _store(self, command: commands.StorePages) -> None:
        names = self._left[command.request_number].names[: len(command.host_pages)]
        missing = [name for name in names if name not in self._stored]

        def end() -> None:
            self._stored.update(missing)
            at_s = self.schedule.now_s
            self.step(events.PagesStored(at_s=at_s, op=command.op, stored=len(names), written=len(missing)))

        self._writes.serve(len(missing) * self.speeds.page_bytes, end)

    def _probe(self, command: commands.ProbeStorage) -> None:
        self._after(QUERY_S, lambda at_s: events.StorageProbed(at_s=at_s, op=command.op))

    def _copy(self, command: commands.CopyPages) -> None:
        size = len(command.target_pages) * self.speeds.page_bytes

        def end() -> None:
            self._batch.stall(size / self.speeds.memory_bytes_per_s)
            self.step(events.CopyEnded(at_s=self.schedule.now_s, op=command.op))

        (self._copies_in if command.target == "device" else self._copies_out).serve(size, end)

    # --- The caller ---

    def _ready(self, command: commands.ReportReady) -> None:
        request = self._live[command.request_id]
        request.ready_at_s = self.schedule.now_s
        self.ledger.ready(command, request.prompt.tokens)
        self._batch.join(request.output_tokens - 1, lambda: self._finish(command, request))

    def _finish(self, command: commands.ReportReady, request: Served) -> None:
        now_s = request.done_at_s = self.schedule.now_s
        tokens = request.prompt.tokens + request.output_tokens - 1
        grown = -(-tokens // PAGE_TOKENS) - len(command.pages)
        if grown:
            self.step(events.GrowthTaken(at_s=now_s, request_id=command.request_id, page_count=grown))
        keys = request.names.tobytes()
        self.step(events.FinishRequested(at_s=now_s, request_id=command.request_id, keys=keys, tokens=tokens))
        del self._live[command.request_id]
        request.done()

    def _forget(self, command: commands.ForgetTokens) -> None:
        del self._left[command.request_number]


def _nothing(command: commands.Command) -> None:
    """Ignore a command without effect in this world."""
