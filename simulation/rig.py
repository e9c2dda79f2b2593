"""Test rig for a core: tests step it by hand, one event at a time, and state exactly which commands must follow.

The whole core is audited after every step. Commands wait in `pending` until a test takes them. `nothing_else` fails
while one is left, so that a test cannot overlook a command.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from tidekv.states import commands, events
from tidekv.states.backup.backups import Backup
from tidekv.states.core import Core
from tidekv.states.pages.page_pool import PageState
from tidekv.states.records.request import Request
from tidekv.states.records.stages import State
from tidekv.states.settings import CoreSettings
from tidekv.states.types import FULL, PageIds

OF_GROUPS = (commands.FetchPages, commands.StorePages, commands.CopyPages)

Wish = TypeVar("Wish", bound=commands.Command)

DEFAULTS: dict[str, int | float | str] = {
    "page_size": 1,
    "key_bytes": 1,
    "device_pages": 32,
    "host_pages": 32,
    # Plans do not depend on how long a test lets a fetch or a transfer take.
    "prefetch": "timeout",
    "prefetch_threshold_tokens": 1,
}


class Rig:
    """One core, its pending commands, and shortcuts for the events that answer them.

    With pages of one token, every byte of a prompt is a page. Settings are those of `DEFAULTS` unless given.
    """

    def __init__(self, **settings: int | float | bool | str) -> None:
        chosen: dict[str, int | float | bool | str] = {"growth_reserve_pages": 0, **DEFAULTS, **settings}
        self.settings = CoreSettings(**chosen)  # type: ignore[arg-type]  # Numbers; the settings check their ranges.
        self.core = Core(self.settings)
        self.now_s = 0.0
        self.pending: list[commands.Command] = []
        self._number = 0
        self._generations: dict[str, int] = {}

    # --- Stepping ---

    def step(self, event_type: type[events.Event], **fields: object) -> list[commands.Command]:
        """Take an event now, audit the core, and queue its commands; returns them."""
        wishes = self.core.step(event_type(at_s=self.now_s, **fields))
        self.pending += wishes
        self.core.check()
        return wishes

    def take_all(self, kind: type[Wish], *, of_components: bool = False, **fields: object) -> list[Wish]:
        """Take the pending commands of this kind with these fields, of the full KV or of components."""
        found, left = list[Wish](), list[commands.Command]()
        for wish in self.pending:
            if isinstance(wish, kind) and _fits(wish, of_components=of_components, **fields):
                found.append(wish)
            else:
                left.append(wish)
        self.pending = left
        return found

    def take(self, kind: type[Wish], *, of_components: bool = False, **fields: object) -> Wish:
        """Take the only pending command of this kind, see `take_all`."""
        found = self.take_all(kind, of_components=of_components, **fields)
        if len(found) != 1:
            raise AssertionError(f"expected one pending {kind.__name__}, found {found} (others: {self.pending})")
        return found[0]

    def nothing_else(self) -> None:
        """Fail if a command is pending that the test did not take."""
        if self.pending:
            raise AssertionError(f"unexpected commands: {self.pending}")

    def wait_until(self, at_s: float) -> list[commands.Command]:
        """Move the clock, with an event at each deadline that the core requests."""
        wishes: list[commands.Command] = []
        while (due_s := self.core.next_deadline_s()) is not None and due_s <= at_s:
            self.now_s = max(self.now_s, due_s)
            wishes += self.step(events.ClockAdvanced)
        self.now_s = at_s
        return wishes

    # --- Callers ---

    def arrive(self, request_id: str, tokens: bytes, **fields: object) -> list[commands.Command]:
        """Submit a prompt. `prefill_count` names so many prefills, "prefill-0" and so on; the default is one.

        If device pages are lent, the first free ones are, unless `fields` has others.
        """
        prefill_count = fields.pop("prefill_count", 1)
        assert isinstance(prefill_count, int)
        self._number += 1
        if self.settings.lends_device:
            pages = self.pages_of(len(tokens))
            lent = {
                each.name: self.free_pages(pages - each.needed_from(len(tokens), self.settings.page_size), each.name)
                for each in self.settings.components
            }
            fields = {"lent_pages": self.free_pages(pages), "lent_components": lent, **fields}
        full = len(tokens) // self.settings.page_size * self.settings.page_size
        if self.settings.components:
            fields = {"rest": tokens[full:], **fields}
        generation = self._generations.get(request_id, 0)
        self._generations[request_id] = generation + 100
        return self.step(
            events.RequestArrived,
            **{
                "request_id": request_id,
                "request_number": self._number,
                "keys": tokens[:full],
                "prompt_tokens": len(tokens),
                "generation": generation,
                "prefills": tuple(f"prefill-{number}" for number in range(prefill_count)),
                **fields,
            },
        )

    def finish(self, request_id: str, tokens: bytes) -> list[commands.Command]:
        """Finish a request whose KV covers these tokens."""
        full = len(tokens) // self.settings.page_size * self.settings.page_size
        return self.step(events.FinishRequested, request_id=request_id, keys=tokens[:full], tokens=len(tokens))

    def offer(self, tokens: bytes, pages: Iterable[int], *, offer: int = 1, **fields: object) -> list[commands.Command]:
        """Offer pages that hold the last pages of these tokens, which are full pages."""
        return self.step(events.PagesOffered, offer=offer, keys=tokens, pages=tuple(pages), **fields)

    def abort(self, request_id: str) -> list[commands.Command]:
        """Abort a request."""
        return self.step(events.AbortRequested, request_id=request_id)

    def flush(self, *tiers: str) -> commands.ReportFlushed:
        """Flush tiers; returns the result."""
        self.step(events.FlushRequested, call=1, tiers=tiers)
        return self.take(commands.ReportFlushed)

    def attach_storage(self, *, component_pages: bool = False) -> None:
        """Attach a storage engine. With `component_pages` it also keeps components."""
        self.step(events.StorageChanged, available=True, component_pages=component_pages)

    # --- Outcomes ---

    def answer(
        self,
        query: commands.QueryStorage,
        found: int,
        error: str = "",
        component_pages: tuple[events.StoredComponent, ...] = (),
    ) -> list[commands.Command]:
        """Deliver an answer of storage."""
        return self.step(events.StorageAnswered, op=query.op, found=found, error=error, component_pages=component_pages)

    def fetched(self, fetch: commands.FetchPages, valid: int | None = None, error: str = "") -> list[commands.Command]:
        """End a read with all its pages or the first `valid`."""
        return self.step(
            events.PagesFetched, op=fetch.op, valid=len(fetch.host_pages) if valid is None else valid, error=error
        )

    def copied(self, copy: commands.CopyPages, error: str = "") -> list[commands.Command]:
        """End a copy."""
        return self.step(events.CopyEnded, op=copy.op, error=error)

    def stored(self, put: commands.StorePages, stored: int | None = None) -> list[commands.Command]:
        """End a put: storage has all pages of it now or the first `stored`, and had those that the core believes."""
        named = len(put.host_pages) + put.asked
        stored = named if stored is None else stored
        operation = self.core.state.operations.get(put.op)
        written = min(stored, operation.unmarked) if isinstance(operation, Backup) else stored
        return self.step(events.PagesStored, op=put.op, stored=stored, written=written)

    # --- Prefill ---

    def handed(self, offer: commands.HandPrompt, there: int | None = None, **fields: object) -> list[commands.Command]:
        """Answer for the worker that a prompt was offered to; by default it has read all of it."""
        there = offer.page_count if there is None else there
        return self.step(events.PromptHanded, op=offer.op, **{"there": there, "brought": there, **fields})

    def promised(
        self, promise: commands.SendPromise, writer: str = "prefill.1", ranks: int = 1
    ) -> list[commands.Command]:
        """Report that a promise was sent."""
        return self.step(
            events.PromiseSent,
            request_id=promise.request_id,
            generation=promise.generation,
            writer=writer,
            ranks=ranks,
        )

    def chunk(
        self,
        asked: commands.SendPromise | commands.SendExtend,
        *,
        first: int | None = None,
        count: int | None = None,
        last: bool = True,
        rank: int = 0,
    ) -> list[commands.Command]:
        """Receive pages; by default all pages of the span, as its last chunk."""
        if isinstance(asked, commands.SendPromise):
            span, begin = 0, self.pages_of(asked.prompt_tokens) - len(asked.pages)
        else:
            span, begin = asked.span, asked.first
        return self.step(
            events.ChunkReceived,
            request_id=asked.request_id,
            generation=asked.generation,
            rank=rank,
            span=span,
            first=begin if first is None else first,
            count=len(asked.pages) if count is None else count,
            last=last,
        )

    def aux(self, promise: commands.SendPromise, rank: int = 0) -> list[commands.Command]:
        """Deliver the first token."""
        return self.step(events.AuxReceived, request_id=promise.request_id, generation=promise.generation, rank=rank)

    def drained(self, abort: commands.SendAbort, rank: int = 0) -> list[commands.Command]:
        """Report that a writer has no write of the room in flight any more."""
        return self.step(events.RoomDrained, request_id=abort.request_id, generation=abort.generation, rank=rank)

    def serve(self, promise: commands.SendPromise, writer: str = "prefill.1") -> list[commands.Command]:
        """Have prefill do everything that the promise requests."""
        self.promised(promise, writer)
        self.aux(promise)
        return self.chunk(promise)

    # --- Whole scenarios ---

    def settle(self) -> list[commands.Command]:
        """End everything in flight successfully, with empty storage; returns the commands for callers."""
        emitted: list[commands.Command] = []
        while self.pending:
            pending, self.pending = self.pending, []
            for wish in pending:
                match wish:
                    case commands.QueryStorage():
                        self.answer(wish, 0)
                    case commands.FetchPages():
                        self.fetched(wish)
                    case commands.CopyPages():
                        self.copied(wish)
                    case commands.StorePages():
                        self.stored(wish)
                    case commands.HandPrompt():
                        self.handed(wish)
                    case commands.SendPromise():
                        self.serve(wish)
                    case commands.SendExtend():
                        self.chunk(wish)
                    case commands.SendAbort():
                        self.drained(wish)
                    case _:
                        emitted.append(wish)
        return emitted

    def make_ready(self, request_id: str, tokens: bytes, **fields: object) -> commands.ReportReady:
        """Restore a prompt by prefill only; storage, if it is queried, has nothing."""
        self.arrive(request_id, tokens, **fields)
        for query in self.take_all(commands.QueryStorage):
            self.answer(query, 0)
        for copy in self.take_all(commands.CopyPages, target="device"):
            self.copied(copy)
        self.serve(self.take(commands.SendPromise))
        self.take(commands.SendReceived)
        return self.take(commands.ReportReady)

    def make_cached(self, request_id: str, tokens: bytes, **fields: object) -> None:
        """Bring tokens into every tier: a request is restored, finished and backed up, or lent pages are offered."""
        if self.settings.lends_device:
            self.offer(tokens, self.free_pages(len(tokens) // self.settings.page_size))
            self.copied(self.take(commands.CopyPages, target="host"))
            self.take(commands.ReportOffered)
            for put in self.take_all(commands.StorePages):
                self.stored(put)
            self.nothing_else()
            return
        self.make_ready(request_id, tokens, **fields)
        self.finish(request_id, tokens)
        for copy in self.take_all(commands.CopyPages, target="host"):
            self.copied(copy)
        for put in self.take_all(commands.StorePages):
            self.stored(put)
        self.take(commands.ReportFinished)
        self.take(commands.ForgetTokens)
        self.nothing_else()

    def bring(self, state: State, request_id: str = "a", **fields: object) -> None:
        """Bring a new request for b"abcdefgh" into a state in which it waits. Needs a rig without live requests."""
        tokens = b"abcdefgh"
        self.attach_storage()
        if state is State.PREALLOC and self.settings.lends_device:
            self._bring_back(request_id, tokens, **fields)
            return
        if state is State.PREALLOC:
            self.make_ready("big", bytes(range(128, 128 + self.settings.device_pages - 4)))
            self.arrive(request_id, tokens, **fields)
            self.answer(self.take(commands.QueryStorage), 0)
            return
        if state in (State.PREFETCH, State.LOCAL_RESTORE):
            self.make_cached("past", tokens[:6])
            self.flush("l1")
        if state is State.PREFETCH:
            self.flush("l2")
        if state is State.MATCH:
            self.stop_in_match(request_id, tokens, **fields)
            return
        self.arrive(request_id, tokens, **fields)
        self.answer(self.take(commands.QueryStorage), 6 if state is State.PREFETCH else 0)
        if state is State.READY:
            self.serve(self.take(commands.SendPromise))
            self.take(commands.SendReceived)
            self.take(commands.ReportRestored if self.settings.lends_device else commands.ReportReady)
        elif state is State.FAILED:
            promise = self.take(commands.SendPromise)
            self.step(
                events.RoomFailed,
                request_id=request_id,
                generation=promise.generation,
                cause="no",
                settled=True,
            )
            self.take(commands.ReportFailed)

    def ask_storage(self, request_id: str = "a", **fields: object) -> commands.QueryStorage:
        """Submit b"abcdefgh" with storage attached; returns the query, whose answer the request awaits."""
        self.attach_storage()
        self.arrive(request_id, b"abcdefgh", **fields)
        return self.take(commands.QueryStorage)

    def stop_in_match(self, request_id: str, tokens: bytes, **fields: object) -> None:
        """Grant pages to a new request without making its plan, which follows in the same step otherwise."""
        core = self.core
        self.arrive(request_id, tokens, **fields)
        request = self.request(request_id)
        request.answer.is_awaited = False
        granted = core.restore.grant(request)
        assert granted, "the rig has room for one request"
        core.queue.remove(request)
        core.fire(request, events.Granted(at_s=self.now_s))
        del core.state.dirty[request]
        core.check()

    def leave_match(self, request_id: str) -> list[commands.Command]:
        """Make the plan of a request that `stop_in_match` has stopped."""
        self.core.state.dirty[self.request(request_id)] = None
        return self.step(events.ClockAdvanced)

    def _bring_back(self, request_id: str, tokens: bytes, **fields: object) -> None:
        """Return a request to the queue, where it waits until nothing writes to its lent pages."""
        self.arrive(request_id, tokens, **{"prefill_count": 2, **fields})
        self.answer(self.take(commands.QueryStorage), 0)
        promise = self.take(commands.SendPromise)
        self.promised(promise, "prefill.0")
        self.step(events.WriterLost, writer="prefill.0", cause="silence")
        self.answer(self.take(commands.QueryStorage), 0)

    # --- State ---

    def request(self, request_id: str) -> Request:
        """Return the live request with that id."""
        found = self.core.request(request_id)
        if found is None:
            raise AssertionError(f"{request_id} is over")
        return found

    def state(self, request_id: str) -> str:
        """Return the state in which a request waits."""
        return self.request(request_id).state.value

    def free_pages(self, count: int, component: str = "") -> tuple[int, ...]:
        """Return the first pages that are not lent, of the full KV or of a component."""
        pool, components = self.core.state.device, self.core.state.components
        if component and components is not None:
            pool = components.device[component].pool
        return tuple(page for page in range(pool.total) if pool.condition(page) is PageState.FREE)[:count]

    def pages_of(self, tokens: int) -> int:
        """Return the number of pages of that many tokens."""
        return self.settings.pages_of(tokens)

    def expect_nothing_held(self) -> None:
        """Fail unless everything has ended: pages are free or cached, and no receipt is left."""
        statistics = self.core.statistics()
        held = {
            name: count
            for name, count in statistics.items()
            if count
            and (
                name.startswith("requests_")
                or name.endswith(("_owned", "_draining", "_protected"))
                or name in ("queue", "loads", "backups", "offers", "operations", "rooms", "rooms_draining")
            )
        }
        if held or not self.core.is_idle:
            raise AssertionError(f"still held: {held}")


def _fits(wish: commands.Command, *, of_components: bool, **fields: object) -> bool:
    if isinstance(wish, OF_GROUPS) and (wish.component != FULL) != of_components:
        return False
    return all(getattr(wish, name) == value for name, value in fields.items())


def ids(pages: PageIds) -> list[int]:
    """Return page ids as a list, for comparisons in tests."""
    return list(pages)
