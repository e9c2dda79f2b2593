"""Admission of storage calls: whether storage is called, for how many pages, and what the calls teach.

The circuit breaker (`tidekv.states.storage.circuit_breaker`) counts consecutive failures and late calls, by kind. While
it is open, storage is not called and requests continue without it. Its back-off and its probes are operations of the
core:

    closed ──consecutive failures──▶ open, waiting ──back-off is over──▶ open, probing ──StorageProbed──▶ closed
                                          ▲                                 │ with an error
                                          └─────────────────────────────────┘
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from tidekv.states.commands import FetchPages, ProbeStorage
from tidekv.states.events import PagesFetched, PagesStored, StorageAnswered
from tidekv.states.rollback import Rollback
from tidekv.states.storage.answer_time import WAIT_MAX_S, AnswerTime
from tidekv.states.storage.circuit_breaker import FETCH, QUERY, STORE, CircuitBreaker
from tidekv.states.storage.fetch_source import FetchSource, LateFetch
from tidekv.states.storage.source_split import gain_s
from tidekv.states.storage_policy import FETCH_TIMEOUT_MAX_S
from tidekv.states.types import page_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidekv.states.commands import Command
    from tidekv.states.core_state import CoreState
    from tidekv.states.events import Outcome, PolicyChanged, StorageChanged, StoredComponent
    from tidekv.states.prefix.node import Node
    from tidekv.states.records.request import Request
    from tidekv.states.storage.circuit_breaker import CallKind
    from tidekv.states.storage.source_split import SourceLoad
    from tidekv.states.types import PageIds


KINDS: Final[dict[type, CallKind]] = {StorageAnswered: QUERY, PagesFetched: FETCH, PagesStored: STORE}
"""The kind of call of which an event is the outcome."""
LATE = "late"
"""Error of an answer that did not come within the deadline of its query."""


MEASURED_PAGES_MAX = 128
"""Maximum pages that are read to measure storage."""
RENEWALS = 16
"""A page in use is renewed at least so often while this worker fills a storage of the size of the attached one."""


class StorageQuery:
    """Operation: a query of the pages that storage has of a request's prompt.

    It has two deadlines: from the first on, the request does not wait for the answer any more; at the second one the
    query counts as failed. Neither the query nor the wait holds pages. The answer is written to the record of the
    request (`StorageAnswer`). One that comes after the plan leaves the plan as it is, since prefill may be writing the
    pages in question; it is kept for the next generation.
    """

    __slots__ = ("_begun_at_s", "_count", "_is_awaited", "_state", "_storage", "op", "request")

    def __init__(self, state: CoreState, storage: StorageAdmission, request: Request, count: int) -> None:
        self._state = state
        self._storage = storage
        self._begun_at_s = state.now_s
        self._count = count
        self._is_awaited = False
        """Whether the first deadline is ahead."""
        self.op = 0
        self.request: Request | None = request
        """None if the request has left before the answer."""

    def start(self, wait_s: float) -> None:
        """Register the operation, whose answer the request awaits for `wait_s`."""
        deadline_s = self._state.settings.query_deadline_s
        self._is_awaited = 0 < wait_s < deadline_s
        self.op = self._state.start_operation(self, deadline_s=wait_s if self._is_awaited else deadline_s)

    def ended(self, event: Outcome, error: str) -> None:
        """Pass the answer to the request. A failed query counts as an answer without pages."""
        self._storage.queries_left.discard(self)
        self._storage.call_ended(event)
        found, component_pages = (event.found, event.component_pages) if isinstance(event, StorageAnswered) else (0, ())
        if not error:
            records = (range(*each) for entry in component_pages for each in entry.ranges)
            self._note_answer(found + sum(map(len, records)))
        self._deliver(error, found, component_pages)

    def late(self) -> None:
        """Let the request plan without storage; at the second deadline, count the query as failed."""
        state = self._state
        if self._is_awaited:
            state.set_deadline(self, self._begun_at_s + state.settings.query_deadline_s, op=self.op)
            self._is_awaited = False
            if self.request is not None and self.request.answer.is_awaited:
                state.count("l3_queries_outwaited")
                self.request.answer.stop_waiting()
                state.request_changed(self.request)
            return
        state.count("l3_queries_late")
        self._storage.queries_left.discard(self)
        state.run_guarded(partial(self._storage.note, QUERY, failed=True))
        self._note_answer(0)
        state.end_operation(self.op)
        self._deliver(LATE)

    def _deliver(self, error: str, found: int = 0, components: tuple[StoredComponent, ...] = ()) -> None:
        """Keep the answer for the next plan of the request, and let it be admitted if it waits."""
        request, state = self.request, self._state
        if request is None:
            return
        if error and error != LATE:
            state.count("l3_queries_failed")
        request.answer.take(
            at_s=state.now_s, error=error, found=found, full_pages=request.full_pages, components=components
        )
        if request.waits_for_admission:
            state.may_look_ahead()
            state.request_changed(request)

    def _note_answer(self, found: int) -> None:
        useful = min(max(found / self._count, 0.0), 1.0)
        self._storage.answer_time.note(taken_s=self._state.now_s - self._begun_at_s, useful=useful)

    def abandon(self) -> None:
        """Let the request go on without an answer. The query itself holds nothing."""
        if self.request is not None:
            self.request.answer.close()
            self._state.request_changed(self.request)


class Measurement(LateFetch):
    """Operation: a read of pages that were just stored, for no request, to learn how fast storage is.

    It owns its host pages. `keys` name the pages: their path may leave the tree at once.
    """

    __slots__ = ("_is_late", "_storage", "keys", "namespace", "op")

    def __init__(
        self, state: CoreState, storage: StorageAdmission, *, namespace: str, keys: bytes, host_pages: PageIds
    ) -> None:
        self._state = state
        self._storage = self._source = storage
        self._begun_at_s, self._queued_pages = state.now_s, storage.pages_in_flight + len(host_pages)
        self.cause = self.component = ""
        self.host_pages = host_pages
        self.namespace = namespace
        self.keys = keys
        self.op = 0
        self._is_late = False

    def ended(self, event: Outcome, error: str) -> None:
        """Count the outcome of the read; note how long it took; free the host pages."""
        self._storage.call_ended(event)
        if isinstance(event, PagesFetched) and event.valid == len(self.host_pages):
            # Lateness was noted as a lower bound, which is no first measurement.
            self._storage.note_throughput(
                begun_at_s=self._begun_at_s, pages=self._queued_pages, is_trial=not self._is_late
            )
        self.abandon()

    def late(self) -> None:
        """Note that storage takes at least this long: plans wait for a measurement."""
        self._is_late = True
        self._storage.fetch_is_late()
        self._storage.note_throughput(begun_at_s=self._begun_at_s, pages=self._queued_pages)


class BreakerWait:
    """Operation: the back-off of the breaker, which ends with its deadline."""

    __slots__ = ("_storage",)

    def __init__(self, storage: StorageAdmission) -> None:
        self._storage = storage

    def ended(self, event: Outcome, error: str) -> None:
        """Do nothing: without a command there is no outcome."""

    def late(self) -> None:
        """Probe storage, because the back-off is over."""
        self._storage.probe()

    def abandon(self) -> None:
        """Do nothing: a back-off holds nothing."""


class Probe:
    """Operation: a probe that checks whether storage works again."""

    __slots__ = ("_error", "_storage")

    def __init__(self, storage: StorageAdmission) -> None:
        self._storage = storage
        self._error = ""

    def ended(self, event: Outcome, error: str) -> None:
        """Close the breaker, or wait again after an error."""
        self._error = error
        self._storage.probed(error)

    def late(self) -> None:
        """Do nothing: a probe has no deadline, because the engine ends every probe."""

    def abandon(self) -> None:
        """Handle the outcome again."""
        self._storage.probed(self._error)


class StorageAdmission(FetchSource):
    """Decides whether storage is called, and accounts for its calls."""

    def __init__(self, state: CoreState, link_load: Callable[[], SourceLoad]) -> None:
        """`link_load` gives the load of the link to prefill: what storage competes with."""
        super().__init__(state)
        self._link_load = link_load
        self._breaker = CircuitBreaker()
        self.answer_time = AnswerTime()
        self._has_components = False
        self._renewal = 1
        self._renewal_begun_s = float("-inf")
        self._renewal_pages = float("inf")
        """Pages stored after which a period ends."""
        self.capacity_pages = 0
        """Full pages that the attached storage can hold; 0: unknown."""
        self._stored_since = 0
        self._level_pages = 0.0
        self._level_at_s = float("-inf")
        self.op = 0
        """The operation of the back-off or the probe; 0 while the breaker is closed."""
        self.ahead_in_flight = 0
        """Fetches of look-ahead that have not ended."""
        self.queries_left: set[StorageQuery] = set()
        """Queries in flight whose request has left; only their answer times are of use."""

    @property
    def is_open(self) -> bool:
        """Whether the breaker is open, so that storage is not called."""
        return self.op > 0

    @property
    def is_usable(self) -> bool:
        """Whether storage may be called."""
        return self._state.storage_available and not self.op

    def renewal(self) -> int:
        """Number of the present period, in each of which storage learns once that a page is in use.

        See `StoragePolicy.renew_s`.
        """
        state = self._state
        is_over = state.now_s - self._renewal_begun_s >= state.settings.renew_s
        if is_over or self._stored_since >= self._renewal_pages:
            self._renewal += 1
            self._renewal_begun_s, self._stored_since = state.now_s, 0
        return self._renewal

    def is_renewed(self, node: Node) -> bool:
        """Whether storage has confirmed in the present period that it has the node's pages."""
        return self._state.index.tree.is_stored(node) and node.renewed == self.renewal()

    @property
    def keeps_components(self) -> bool:
        """Whether storage may be called for component pages."""
        return self._has_components and self.is_usable

    def policy_changed(self, event: PolicyChanged) -> None:
        """Replace the policies. Calls in flight continue as they began."""
        self._state.policy_changed(event.policy)
        self._state.may_look_ahead()
        self._state.renew_write_credit()

    # --- Queries ---

    def query(self, request: Request, count: int, command: Callable[[int], Command], *, first: int, pages: int) -> None:
        """Start a query of `count` pages of a request, components included. Of full pages it starts at `first`.

        `command` makes its command from the number of the operation. `pages` is the number of full pages that the
        transfer would bring otherwise: what a component costs is unknown. Afterwards `request.answer.is_awaited`, until
        the answer, or until waiting costs more than it can gain.
        """
        state = self._state
        # A policy that waits for every fetch waits for every answer, too.
        waits_long = state.settings.prefetch == "wait_complete"
        wait_s = (
            state.settings.query_deadline_s
            if waits_long
            else self.answer_time.wait_s(gain_s(pages, storage=self.source_load, link=self._link_load()))
        )
        query = StorageQuery(state, self, request, count)
        with Rollback() as undo:
            query.start(wait_s)
            undo.callback(state.operations.pop, query.op)
            state.emit(command(query.op))
            undo.keep()
        request.answer.ask(query.op, first=first, is_awaited=wait_s > 0)

    def awaits_measurement(self, request: Request) -> bool:
        """Whether a request is not planned yet: nothing is known, and the first fetch of all will soon have arrived.

        A plan made now would ask prefill for everything. With a slow prefill that would delay all plans after it.
        """
        state, answer = self._state, request.answer
        if not self.pages_in_flight or self._throughput.page_s or self._link_load().page_s:
            return False
        due_s = answer.answered_at_s + WAIT_MAX_S
        is_soonest = self.is_usable and state.settings.prefetch == "soonest"
        if not (is_soonest and answer.found and state.now_s < due_s < float("inf")):
            return False
        state.set_deadline(request, due_s)
        return True

    def leave_query(self, request: Request) -> None:
        """Let a query in flight continue without its request: its answer is still measured."""
        query = self._state.operations.get(request.answer.op)
        if isinstance(query, StorageQuery):
            query.request = None
            self.queries_left.add(query)
        request.answer.close()

    # --- Limits ---

    def allowance(self, wanted: int, deadline_s: float) -> int:
        """Return how many of `wanted` pages a plan may fetch now, if the fetch may take `deadline_s`."""
        # Three independent limits: pages in flight, the deadline at the measured throughput, and the rate.
        settings = self._state.settings
        if settings.fetch_pages_in_flight_max:
            wanted = min(wanted, max(0, settings.fetch_pages_in_flight_max - self.pages_in_flight))
        # A bound by an old estimate would hold for ever: what is not fetched is not measured.
        page_s = self._throughput.page_s if self.is_measured else 0.0
        fitting = settings.fetch_deadline_share * deadline_s / page_s if page_s else float("inf")
        if settings.fetch_deadline_share and fitting < wanted + self.pages_in_flight:
            wanted = max(0, int(fitting) - self.pages_in_flight)
        if settings.fetch_pages_per_s:
            wanted = min(wanted, int(self._level()))
        return wanted

    def take(self, count: int) -> None:
        """Charge a plan's fetch to the rate limit; a negative count takes the charge back."""
        if self._state.settings.fetch_pages_per_s:
            self._level_pages = self._level() - count

    def _level(self) -> float:
        """Pages that the rate limit allows at once. Grows with time, up to one second's worth and at least one page."""
        rate, now_s = self._state.settings.fetch_pages_per_s, self._state.now_s
        grown = self._level_pages + (now_s - self._level_at_s) * rate
        self._level_pages, self._level_at_s = min(grown, max(rate, 1.0)), now_s
        return self._level_pages

    # --- Fetches in flight ---

    @property
    def holds_writes(self) -> bool:
        """Whether writes must wait: a fetch is in flight, or fetches take longer than the policy allows."""
        if self.fetching or self.ahead_in_flight:
            return True
        bound_s = self._state.settings.store_fetch_s_max
        return self.is_measured and 0 < bound_s < self._throughput.fetch_s

    def may_store_beside(self, others: bool) -> bool:
        """Whether a write, whose host pages are pinned already, may begin. Without others it always may."""
        state = self._state
        room = state.settings.store_host_share * state.settings.host_pages
        if not others or state.index.host_protected <= room:
            return True
        state.count("l3_puts_declined")
        return False

    def measure(self, leaf: Node, stored: int) -> None:
        """Read some of the first `stored` pages of a path, which storage has now, until its speed is confirmed.

        Without this, the first hits would have to be fetched in part, or not at all, before the rest could be. A first
        read may include a stall, or the opening of files. If it makes storage look several times slower, yet faster
        than prefill, the plans of the first hits leave a part of their pages to prefill. While everything is stored
        nothing is measured: this worker goes away, and needs its host pages for what storage lacks.
        """
        state, settings = self._state, self._state.settings
        count = min(stored, MEASURED_PAGES_MAX, settings.host_pages // 2)
        is_due = settings.prefetch == "soonest" and not (self.pages_in_flight or self._throughput.is_confirmed)
        is_worth_it = count * settings.page_size >= max(settings.prefetch_threshold_tokens, 1)
        if is_due and is_worth_it and self.is_usable and not state.is_storing:
            state.run_guarded(partial(self._measure, leaf, count), recover=lambda: None)

    def _measure(self, leaf: Node, count: int) -> None:
        state = self._state
        if state.make_host_room(count) < count:
            return
        deadline_s = state.settings.prefetch_deadline_s(count)
        with Rollback() as undo:
            pages = state.host.take(count)
            undo.callback(state.host.give_back, pages)
            keys = b"".join(node.edge for node in state.index.path(leaf))[: count * state.settings.key_bytes]
            trial = Measurement(state, self, namespace=leaf.namespace, keys=keys, host_pages=pages)
            trial.op = state.start_operation(trial, deadline_s=deadline_s)
            undo.callback(state.operations.pop, trial.op)
            state.emit(
                FetchPages(
                    op=trial.op,
                    request_id="",
                    positions=page_ids(range(count)),
                    host_pages=pages,
                    timeout_s=min(deadline_s, FETCH_TIMEOUT_MAX_S),
                )
            )
            undo.keep()
        self.pages_in_flight += count

    # --- The breaker ---

    def changed(self, event: StorageChanged) -> None:
        """Forget everything about the previous storage, because another one is attached, or none."""
        self._state.storage_was_attached(is_usable=event.available)
        self._has_components = event.component_pages
        self._state.operations.pop(self.op, None)
        self.op = 0
        self._breaker.forget()
        self._throughput.forget()
        self.answer_time.forget()
        self._state.index.forget_stored()
        self.capacity_pages = event.capacity_pages
        self._renewal_pages = max(event.capacity_pages / RENEWALS, 1.0) if event.capacity_pages else float("inf")
        self._state.renew_write_credit()
        self._state.may_store()

    def call_ended(self, event: Outcome) -> None:
        """Count the outcome of a call in the breaker. A call that could not be started is no evidence about storage."""
        if isinstance(event, StorageAnswered | PagesFetched | PagesStored):
            kind = KINDS[type(event)]
            self._state.run_guarded(partial(self.note, kind, failed=bool(event.error)))

    def fetch_is_late(self) -> None:
        """Count a late fetch as a failure."""
        self._state.run_guarded(partial(self.note, FETCH, failed=True))

    def fetch_ended(self, event: Outcome) -> int:
        """Count the outcome of a fetch; returns how many of its pages are valid, from the first on."""
        self.call_ended(event)
        return event.valid if isinstance(event, PagesFetched) else 0

    def store_ended(self, event: Outcome) -> int:
        """Count the outcome of a write; returns how many of its pages are stored, from the first on."""
        self.call_ended(event)
        if not isinstance(event, PagesStored):
            return 0
        self._stored_since += max(event.written, 0)
        return event.stored

    def note(self, kind: CallKind, *, failed: bool) -> None:
        """Count a call that has ended or is late, and start the back-off if the breaker opens."""
        settings = self._state.settings
        limit = settings.breaker_failures if self._state.storage_available else 0
        self._breaker.note(
            kind,
            failed=failed,
            failures_max=limit,
            backoff_s=settings.breaker_backoff_s,
            backoff_max_s=settings.breaker_backoff_max_s,
        )
        if self._breaker.is_open and not self.op:
            self._wait()
            self._state.count("l3_breaker_opened")

    def probe(self) -> None:
        """Start a probe, because the back-off is over."""
        state = self._state
        op = state.start_operation(Probe(self), deadline_s=float("inf"))
        with Rollback() as undo:
            undo.callback(state.operations.pop, op)
            state.emit(ProbeStorage(op=op))
            undo.keep()
        state.end_operation(self.op)
        self.op = op

    def probed(self, error: str) -> None:
        """Close the breaker, or start the next back-off if the probe failed."""
        self._breaker.probed(failed=bool(error), backoff_max_s=self._state.settings.breaker_backoff_max_s)
        if self._breaker.is_open:
            self._state.count("l3_probes_failed")
            self._wait()
        else:
            self._state.count("l3_breaker_closed")
            self.op = 0
            # Writes are due again. Copies to the host are not: they did not wait for storage, and a new credit at each
            # closing would let a storage that fails every write cause copies without end.
            self._state.may_write_back()
            self._state.may_store()

    def _wait(self) -> None:
        self.op = self._state.start_operation(BreakerWait(self), deadline_s=self._breaker.backoff_s)
