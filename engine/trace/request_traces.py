"""Folding of a core's steps into request traces, in a replay or a running engine.

`plan_of` derives the plan behind a promise: the source of each page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from tidekv.engine.trace.causes import (
    AFTER_RAISES,
    CONSEQUENCES,
    EXTENDED,
    LATE,
    OF_STORAGE,
    UNANSWERED,
    declined_words,
    delivered_by,
    error_of,
    extend_cause,
    in_one_line,
    peer_declined_words,
    policy_words,
    unasked_words,
    unstored_words,
)
from tidekv.engine.trace.pool_use import PoolHistory
from tidekv.engine.trace.request_trace import PlanTrace, RequestTrace, Stall, Work
from tidekv.states import commands, events
from tidekv.states.backup.backups import STORE_DEADLINE_S, Backup
from tidekv.states.components.look_ahead import ComponentAheadRead
from tidekv.states.components.missing import LateComponentCopy
from tidekv.states.components.request_components import ComponentCopy
from tidekv.states.components.shared_ends import SharedEndCopy
from tidekv.states.loads.loads import LateCopy, LoadCopy, LoadFetch
from tidekv.states.loads.look_ahead import AheadRead
from tidekv.states.records.stages import State
from tidekv.states.storage.fetch_source import LateFetch
from tidekv.states.storage_policy import StoragePolicy, policy_of
from tidekv.states.types import FULL
from tidekv.states.validation import printable

if TYPE_CHECKING:
    from collections.abc import Container

    from tidekv.engine.journal.replayer import Replayer
    from tidekv.states.commands import SendPromise
    from tidekv.states.core import Core
    from tidekv.states.records.request import Request


def plan_of(
    command: SendPromise, request: Request | None, begun: Container[int], *, page_size: int, at_s: float
) -> tuple[PlanTrace, list[int]]:
    """Return the plan behind a promise, and the live operations that it shares with others. `begun`: operations
    that the same step has begun.
    """
    loads = {"l2": 0, "l3": 0, "peer": 0}
    shared = declined = 0
    joined = []
    sent: dict[str, int] = {}
    promised = -(-command.promised_tokens // page_size)
    if request is not None:
        declined = request.sources.declined[1]
        for load in request.loads:
            pages = load.waiters.get(request, 0)
            if load.sender is request:
                continue  # Its own room brings these.
            if load.sender is not None:
                name = load.sender.request_id
                sent[name] = sent.get(name, 0) + pages
            elif load.op in begun:
                loads[load.tier] += pages
            else:
                shared += pages
                joined.append(load.op)
    local = promised - sum(loads.values()) - shared - sum(sent.values())
    plan = PlanTrace(
        at_s,
        command.generation,
        command.prefill,
        max(0, local),
        loads["l2"],
        loads["l3"],
        shared,
        command.promised_tokens,
        len(command.pages),
        declined,
        {part.component: len(part.pages) for part in command.component_pages or ()},
        sent,
        _sender_of(request),
        loads["peer"],
    )
    return plan, joined


def _sender_of(request: Request | None) -> str:
    held = None if request is None else request.component_pages
    sender = None if held is None or held.sender is None else held.sender.request
    return "" if sender is None else sender.request_id


UNTOLD_CAUSES = (
    "rule_raised",
    "transfer_done",
    "sender_left",
    "sender_slow",
    "end_sender_left",
    "end_sender_slow",
)
"""Causes of an extend that no outcome reported before."""
SHORT_REST = "since the device lacked few"
"""Cause of a computation by the caller though there is a prefill."""


HINTS_MAX = 64
"""Hints that are remembered for requests that arrive later: the last ones."""


class _Hint(NamedTuple):
    at_s: float
    namespace: str
    keys: bytes
    words: str

    def is_about(self, namespace: str, keys: bytes) -> bool:
        """Whether it named a prefix of the prompt, or one that goes on behind it."""
        is_same = keys.startswith(self.keys) or (self.keys.startswith(keys) and bool(keys))
        return is_same and self.namespace == namespace


class RequestTraces:
    """Traces of all requests of a core: a `Watcher` of its steps, from the first one on."""

    def __init__(self, core: Core, *, keep: bool = True) -> None:
        """`keep`: whether `all` keeps requests that ended; if False, the caller reads them from `ended`."""
        self.all: list[RequestTrace] = []
        """In order of arrival."""
        self.ended: list[RequestTrace] = []
        """Requests that became READY or FAILED in the last step."""
        self.last_at_s = 0.0
        self.pools = PoolHistory(core) if keep else None
        """Use of the page pools, if requests are kept."""
        self._keep = keep
        self._core = core
        self._page_size = core.settings.page_size
        self._live: dict[str, RequestTrace] = {}
        self._by_number: dict[int, RequestTrace] = {}
        self._open: dict[int, tuple[Work, list[RequestTrace]]] = {}
        """By operation: work in flight and its request."""
        self._spans: dict[tuple[str, int, int], Work] = {}
        self._begun: set[int] = set()
        """Operations that the step has begun."""
        self._raised = 0
        self._policy: StoragePolicy | None = None
        self._event: events.Event
        self._breaker_is_open = False
        self._kept: dict[int, int] = {}
        """Tokens of a finished request, by its number, until they are backed up."""
        self._hints: deque[_Hint] = deque(maxlen=HINTS_MAX)
        self._taken: dict[int, events.HintReceived] = {}
        """By call, prompts that another worker hands over and that are not reported yet; the core bounds them."""
        self._given_away: dict[str, RequestTrace] = {}
        """Retracted requests that may be resumed."""
        # Each kind of command has a handler of that kind only.
        self._handlers: dict[type[commands.Command], Callable[[Any, float, Core], None]] = {
            commands.QueryStorage: self._query,
            commands.FetchPages: self._fetch,
            commands.CopyPages: self._copy,
            commands.StorePages: self._store,
            commands.Recompute: self._recompute,
            commands.SendPromise: self._promise,
            commands.SendExtend: self._extend,
            commands.ReportReady: self._ready,
            commands.ReportRestored: self._restored,
            commands.ReportFailed: self._failed,
            commands.ReportFinished: self._finished,
            commands.ReportRetracted: self._retracted,
            commands.ReportDropped: self._dropped,
            commands.ReportHinted: self._hinted,
            commands.ForgetTokens: self._forget_tokens,
        }

    def named(self, request_id: str) -> list[RequestTrace]:
        """Return every request with that id: ids may be used again."""
        return [request_trace for request_trace in self.all if request_trace.request_id == request_id]

    def stepped(self, event: events.Event, given: list[commands.Command], error: str = "") -> None:
        """See `tidekv.engine.watching.Watcher`."""
        core = self._core
        self._event = event
        self.ended = []
        at_s = self.last_at_s = max(self.last_at_s, event.at_s)
        if isinstance(event, events.RequestArrived) and not error:
            self._arrived(event, core)
        self._note_event(event, at_s, core)
        self._end_work(event, at_s, core)
        if core.state.counters.get("transitions_raised", 0) != self._raised:
            self._raised = core.state.counters["transitions_raised"]
            self._note_raises(at_s, core)
        for request_id, state in core.moves:
            self._move(request_id, state, at_s, core)
        self._begun = set()
        for command in given:
            handler = self._handlers.get(type(command))
            if handler is not None:
                handler(command, at_s, core)
        self._breaker_is_open = core.storage.is_open
        if self.pools is not None:
            self.pools.note(core, at_s)

    # --- Events ---

    def _arrived(self, event: events.RequestArrived, core: Core) -> None:
        request_trace = RequestTrace(
            event.request_id,
            event.request_number,
            event.at_s,
            event.prompt_tokens,
            core.settings.pages_of(event.prompt_tokens),
            event.namespace,
            event.prefills,
            event.deadline_at_s,
        )
        request_trace.resumes = self._given_away.pop(event.request_id, None)
        request_trace.notes += [
            (hint.at_s, hint.words) for hint in self._hints if hint.is_about(event.namespace, event.keys)
        ]
        request_trace.notes += [
            (event.at_s, f"a hint named a peer that is not asked: {printable(why)}") for why in event.peers_refused
        ]
        if self._keep:
            self.all.append(request_trace)
        self._live[event.request_id] = self._by_number[event.request_number] = request_trace

    def _note_event(self, event: events.Event, at_s: float, core: Core) -> None:
        if isinstance(event, events.ChunkReceived):
            work = self._spans.get((event.request_id, event.generation, event.span))
            if work is not None:
                work.chunks.append((at_s, event.count))
                work.delivered = min(work.count, max(work.delivered, event.first + event.count - work.first))
                if event.last:
                    work.ended_at_s = at_s
        elif isinstance(event, events.GrowthTaken):
            request_trace = self._live.get(event.request_id)
            if request_trace is not None:
                request_trace.grown_pages += event.page_count
        elif isinstance(event, events.FinishRequested) and event.request_id in self._live:
            self._kept[self._live[event.request_id].request_number] = event.tokens
        elif isinstance(event, events.RetractedDropped):
            self._given_away.pop(event.request_id, None)
        elif isinstance(event, events.HintReceived) and event.action == "take":
            # Its report comes with the end of its last read, in another step.
            self._taken[event.call] = event
        elif isinstance(event, events.PolicyChanged):
            self._note_all(at_s, policy_words(self._policy or policy_of(core.settings), event.policy))
            self._policy = event.policy
        elif isinstance(event, events.StorageChanged):
            self._note_all(at_s, "storage was attached" if event.available else "storage was detached")

    def _hinted(self, command: commands.ReportHinted, at_s: float, core: Core) -> None:
        """Note the outcome of a hint, of a read by a peer, or of a prompt that another worker has handed over, at the
        requests whose prompt it is about, also at those that come later.
        """
        event = self._taken.pop(command.call, self._event)
        if not isinstance(event, events.HintReceived | events.ShareRequested) or not event.keys:
            return
        count = len(event.keys) // core.settings.key_bytes
        done = f"{command.outcome}, for {command.page_count} pages"
        what = "a read by a peer of" if isinstance(event, events.ShareRequested) else f"a hint to {event.action}"
        words = f"{what} the first {count} pages was {done}"
        if isinstance(event, events.HintReceived) and event.action == "take":
            done += f", {command.brought} of them read" + (f": {command.cause}" if command.cause else "")
            words = f"{printable(event.peer)} handed over the first {count} pages before it went away: {done}"
        hint = _Hint(at_s, event.namespace, event.keys, words)
        self._hints.append(hint)
        for request in core.state.requests.values():
            request_trace = self._live.get(request.request_id)
            if request_trace and not request_trace.ended and hint.is_about(request.namespace, request.keys):
                request_trace.notes.append((at_s, hint.words))

    def _note_all(self, at_s: float, words: str) -> None:
        """Add a note to every request that is being restored."""
        for request_trace in self._live.values():
            if not request_trace.ended:
                request_trace.notes.append((at_s, words))

    def _end_work(self, event: events.Event, at_s: float, core: Core) -> None:
        """End the work that the event completes, and the work that the clock or another event cancelled."""
        if isinstance(event, events.ClockAdvanced):
            self._give_up_late(at_s, core)
        elif isinstance(event, events.ChunkReceived | events.AuxReceived):
            self._give_up_cut(core)
        op = getattr(event, "op", None)
        work, request_traces = self._open.pop(op, (None, [])) if op is not None else (None, [])
        if work is None:
            return
        late = work.error
        work.ended_at_s = at_s
        for request_trace in request_traces if work.kind == "query" else ():
            # Only now it is known whether the request fits: it was not tried while it waited for the answer.
            if (request := core.request(request_trace.request_id)) is not None and request.waits_for_admission:
                request_trace.needed_pages = request.admission.short_need
        work.error = late or error_of(event, work)
        work.delivered = delivered_by(event, work)
        if late:
            work.wasted = work.delivered if work.kind in ("fetch", "peer fetch", "copy") else 0
        elif work.error:
            kind = "ahead" if work.ahead else "short recompute" if work.cause == SHORT_REST else work.kind
            self._tell_error(work, request_traces, CONSEQUENCES[kind], at_s, core)

    def _give_up_late(self, at_s: float, core: Core) -> None:
        for op, (work, request_traces) in list(self._open.items()):
            owner = core.state.operations.get(op)
            if work.error:
                continue
            if isinstance(owner, Backup | ComponentCopy | LoadCopy | SharedEndCopy):
                wait_s = STORE_DEADLINE_S if work.kind == "store" else core.settings.copy_deadline_s
                if work.begun_at_s + wait_s > at_s:
                    continue
            elif owner is None and work.kind == "query":
                work.ended_at_s = at_s
                del self._open[op]
            elif not isinstance(owner, LateFetch | LateComponentCopy | LateCopy):
                continue
            is_cut = _is_cut(owner)
            work.error = EXTENDED["transfer_done"] if is_cut else LATE[work.kind]
            if is_cut:
                # The extend names the cause.
                continue
            consequence = CONSEQUENCES.get(f"late {work.kind}") or CONSEQUENCES["ahead" if work.ahead else work.kind]
            self._tell_error(work, request_traces, consequence, at_s, core)

    def _give_up_cut(self, core: Core) -> None:
        for op, (work, _) in self._open.items():
            owner = core.state.operations.get(op)
            if not work.error and _is_cut(owner):
                work.error = EXTENDED["transfer_done"]

    def _tell_error(
        self, work: Work, request_traces: list[RequestTrace], consequence: str, at_s: float, core: Core
    ) -> None:
        if core.storage.is_open and not self._breaker_is_open and work.kind in OF_STORAGE:
            consequence += ", and that opened the breaker: storage is asked nothing until a probe succeeds"
        for request_trace in request_traces:
            request_trace.fall_back(at_s, work.error, consequence)

    def _note_raises(self, at_s: float, core: Core) -> None:
        for request in core.state.requests.values():
            request_trace = self._live.get(request.request_id)
            if request_trace is not None:
                self._note_fallbacks(request_trace, request.fallbacks.made, at_s)

    @staticmethod
    def _note_fallbacks(request_trace: RequestTrace, fallbacks: tuple[commands.Fallback, ...], at_s: float) -> None:
        """Record fallbacks of rules that raised, except those recorded already."""
        for fallback in fallbacks[request_trace.raised :]:
            cause = f"a rule of the core raised: {fallback.error} (in {fallback.rule})"
            request_trace.fall_back(at_s, cause, AFTER_RAISES[fallback.gave_up])
        request_trace.raised = len(fallbacks)

    def _move(self, request_id: str, state: State, at_s: float, core: Core) -> None:
        request_trace = self._live.get(request_id)
        if request_trace is None:
            return
        if state is State.PREALLOC and request_trace.states:
            self._sent_back(request_trace, at_s, core)
        request_trace.states.append((at_s, state.value))
        request = core.request(request_id)
        if request is not None and request.admission.waited_for_quota and not request_trace.over_quota_of:
            request_trace.over_quota_of = request.prefills[0] if request.attempts.first else request.prefill
            request_trace.gave_way = request.attempts.first > 0
        if request is not None and request.admission.waited_to_run:
            request_trace.waited_to_run = True
        if state in (State.PREALLOC, State.MATCH) and request is not None:
            request_trace.needed_pages = request.admission.short_need
        if state is State.PREALLOC and request is not None:
            unasked = unasked_words(request, core)
            if unasked:
                request_trace.fall_back(at_s, unasked, CONSEQUENCES["query"])

    def _sent_back(self, request_trace: RequestTrace, at_s: float, core: Core) -> None:
        for key, work in list(self._spans.items()):
            if key[0] == request_trace.request_id and work.ended_at_s is None:
                work.ended_at_s = at_s
                work.wasted, work.error = work.delivered, "the room was left"
        request = core.request(request_trace.request_id)
        if request is None:
            return  # The request ended in the same step, which is recorded.
        whither = "for other pages"
        if request.recompute.is_chosen:
            whither = "for its caller to compute the rest"
        elif request.admission.retry_at_s > at_s:
            whither = f"to be tried again after a pause of {request.admission.retry_at_s - at_s:.1f} s"
        elif request.attempts.count > request_trace.attempts:
            whither = "for the next prefill of its list"
        elif request.recompute.has_failed_short:
            whither = "for prefill to send the rest"
        request_trace.attempts = request.attempts.count
        request_trace.fall_back(
            at_s, in_one_line(request.fallbacks.last_error), f"the request went back to the queue, {whither}"
        )

    # --- Commands ---

    def _begin(self, op: int, work: Work, request_traces: list[RequestTrace]) -> None:
        self._open[op] = (work, request_traces)
        self._begun.add(op)
        for request_trace in request_traces:
            request_trace.works.append(work)

    def _query(self, command: commands.QueryStorage, at_s: float, core: Core) -> None:
        request_trace = self._live[command.request_id]
        self._begin(command.op, Work("query", command.first, command.count, at_s), [request_trace])

    def _fetch(self, command: commands.FetchPages, at_s: float, core: Core) -> None:
        if not command.request_id:
            return
        first, count = command.positions[0], len(command.positions)
        ahead = isinstance(core.state.operations.get(command.op), AheadRead | ComponentAheadRead)
        if command.component != FULL:
            work = Work("component fetch", first, count, at_s, component=command.component, ahead=ahead)
        elif command.peer:
            work = Work("peer fetch", first, count, at_s, cause=command.peer)
        else:
            work = Work("fetch", first, count, at_s, ahead=ahead)
        self._begin(command.op, work, self._waiters(command.op, core) or [self._live[command.request_id]])

    def _copy(self, command: commands.CopyPages, at_s: float, core: Core) -> None:
        owner, count = core.state.operations.get(command.op), len(command.target_pages)
        if isinstance(owner, LoadCopy):
            self._begin(command.op, Work("copy", owner.load.first, count, at_s), self._waiters(command.op, core))
        elif isinstance(owner, Backup) and owner.request_number in self._by_number:
            self._begin(command.op, Work("backup", owner.first, count, at_s), [self._by_number[owner.request_number]])
        elif isinstance(owner, SharedEndCopy):
            self._copy_shared_end(command, owner, at_s)
        elif isinstance(owner, ComponentCopy) and owner.component_pages.request is not None:
            first = owner.component_pages.plan.firsts[command.component]
            work = Work("component copy", first, count, at_s, component=command.component)
            work.cause = "from host to device" if command.source == "host" else "of the cache to a page of its own"
            self._begin(command.op, work, [self._live[owner.component_pages.request.request_id]])

    def _waiters(self, op: int, core: Core) -> list[RequestTrace]:
        owner = core.state.operations.get(op)
        if not isinstance(owner, LoadFetch | LoadCopy):
            return []
        return [self._live[request.request_id] for request in owner.load.waiters if request.request_id in self._live]

    def _copy_shared_end(self, command: commands.CopyPages, copy: SharedEndCopy, at_s: float) -> None:
        """Record a copy from the sender's component pages to those of a waiter."""
        sender, waiter = copy.sender.request, copy.waiter.request
        if sender is not None and waiter is not None:
            first = copy.waiter.plan.received[command.component]
            work = Work("shared component copy", first, len(command.target_pages), at_s, component=command.component)
            work.cause = f"those of {sender.request_id}"
            self._begin(command.op, work, [self._live[waiter.request_id]])

    def _store(self, command: commands.StorePages, at_s: float, core: Core) -> None:
        if command.request_number in self._by_number:
            work = Work("store", 0, len(command.host_pages) + command.asked, at_s)
            self._begin(command.op, work, [self._by_number[command.request_number]])

    def _recompute(self, command: commands.Recompute, at_s: float, core: Core) -> None:
        work = Work("recompute", command.first, len(command.pages) - command.first, at_s)
        work.cause = SHORT_REST if command.is_short else ""
        self._begin(command.op, work, [self._live[command.request_id]])

    def _promise(self, command: commands.SendPromise, at_s: float, core: Core) -> None:
        request_trace = self._live[command.request_id]
        request = core.request(command.request_id)
        plan, joined = plan_of(command, request, self._begun, page_size=self._page_size, at_s=at_s)
        for op in joined:
            if op in self._open:
                work, request_traces = self._open[op]
                request_traces.append(request_trace)
                request_trace.works.append(work)
        request_trace.plans.append(plan)
        if request is not None and request.answer.op:
            request_trace.fall_back(at_s, UNANSWERED, CONSEQUENCES["query"])
        if request is not None and plan.declined_pages:
            request_trace.fall_back(at_s, declined_words(request, core), "the transfer brings them")
        if request is not None and request.sources.peer_declined[1]:
            request_trace.fall_back(at_s, peer_declined_words(request), "the transfer brings them")
        first = -(-command.promised_tokens // self._page_size)
        self._span(request_trace, command.generation, 0, first, len(command.pages), at_s)

    def _extend(self, command: commands.SendExtend, at_s: float, core: Core) -> None:
        request_trace = self._live[command.request_id]
        self._span(request_trace, command.generation, command.span, command.first, len(command.pages), at_s)
        request = core.request(command.request_id)
        room = None if request is None else request.room
        if room is None:
            return
        span, load = room.spans[command.span], room.fills.get(command.span)
        request_trace.works[-1].component = "" if command.component == FULL else command.component
        request_trace.works[-1].cause = EXTENDED[extend_cause(room, command.span, self._event)]
        if span.cause in UNTOLD_CAUSES:
            request_trace.fall_back(at_s, EXTENDED[span.cause], CONSEQUENCES["component copy"])
        elif load is not None and load.cause in UNTOLD_CAUSES:
            for waiter in load.waiters:
                if waiter.request_id in self._live:
                    self._live[waiter.request_id].fall_back(at_s, EXTENDED[load.cause], CONSEQUENCES["fetch"])

    def _span(
        self, request_trace: RequestTrace, generation: int, span: int, first: int, count: int, at_s: float
    ) -> None:
        work = Work("span", first, count, at_s, generation=generation, span=span)
        request_trace.works.append(work)
        self._spans[(request_trace.request_id, generation, span)] = work

    def _ready(self, command: commands.ReportReady, at_s: float, core: Core) -> None:
        request_trace = self._live[command.request_id]
        self._note_fallbacks(request_trace, command.fallbacks, at_s)
        request_trace.ended = "READY"
        request_trace.sources = dict(command.sources)
        self.ended.append(request_trace)
        self._forget_spans(request_trace)

    def _restored(self, command: commands.ReportRestored, at_s: float, core: Core) -> None:
        """Record the end of a request in lent pages."""
        request_trace = self._live.pop(command.request_id)
        self._note_fallbacks(request_trace, command.fallbacks, at_s)
        request_trace.ended, request_trace.cause, request_trace.detail = "READY", command.cause, command.detail
        request_trace.sources = dict(command.sources)
        request_trace.returned_at_s = at_s
        self._by_number.pop(request_trace.request_number, None)
        self.ended.append(request_trace)
        for work in request_trace.works:
            if work.kind == "span" and work.ended_at_s is None:
                work.ended_at_s, work.error = at_s, "the room was left"
        self._forget_spans(request_trace)

    def _failed(self, command: commands.ReportFailed, at_s: float, core: Core) -> None:
        request_trace = self._live.pop(command.request_id)
        request_trace.was_ready = request_trace.ended == "READY"
        request_trace.ended, request_trace.cause, request_trace.detail = "FAILED", command.cause, command.detail
        if core.settings.lends_device:
            request_trace.returned_at_s = at_s
        self._by_number.pop(request_trace.request_number, None)
        self.ended.append(request_trace)
        for work in request_trace.works:
            if work.kind == "span" and not request_trace.was_ready:
                work.wasted = work.delivered
                work.ended_at_s = at_s if work.ended_at_s is None else work.ended_at_s
        self._forget_spans(request_trace)

    def _forget_spans(self, request_trace: RequestTrace) -> None:
        for key in [key for key in self._spans if key[0] == request_trace.request_id]:
            del self._spans[key]

    def _finished(self, command: commands.ReportFinished, at_s: float, core: Core) -> None:
        self._note_fallbacks(self._live[command.request_id], command.fallbacks, at_s)
        self._give_back(command.request_id, "finished", at_s)

    def _retracted(self, command: commands.ReportRetracted, at_s: float, core: Core) -> None:
        request_trace = self._live.get(command.request_id)
        if request_trace is not None:
            self._note_fallbacks(request_trace, command.fallbacks, at_s)
            request_trace.held_pages = command.held_pages
            self._given_away[command.request_id] = request_trace
        self._give_back(command.request_id, "retracted", at_s)

    def _dropped(self, command: commands.ReportDropped, at_s: float, core: Core) -> None:
        self._by_number.pop(self._live[command.request_id].request_number, None)
        self._give_back(command.request_id, "dropped", at_s)

    def _forget_tokens(self, command: commands.ForgetTokens, at_s: float, core: Core) -> None:
        """Record the end of the backup of a finished request."""
        request_trace = self._by_number.pop(command.request_number, None)
        tokens = self._kept.pop(command.request_number, None)
        if request_trace is None or tokens is None or any(work.kind == "store" for work in request_trace.works):
            return
        words = unstored_words(core, tokens)
        if words:
            request_trace.fall_back(at_s, f"nothing was put in storage: {words}", CONSEQUENCES["store"])

    def _give_back(self, request_id: str, words: str, at_s: float) -> None:
        request_trace = self._live.pop(request_id, None)
        if request_trace is not None:
            request_trace.given_back, request_trace.given_back_at_s = words, at_s


def read_request_traces(replayer: Replayer) -> RequestTraces:
    """Replay a journal to its end, and return all request traces.

    If it is damaged, those before the damage are returned, and `replayer.torn` has the place.
    """
    request_traces = RequestTraces(replayer.core)
    with replayer.up_to_damage():
        replayer.run(request_traces)
    stalls = [Stall(stall.at_s - stall.seconds, stall.at_s, stall.where) for stall in replayer.stalls]
    for request_trace in request_traces.all if stalls else ():
        request_trace.note_stalls(stalls)
    return request_traces


def _is_cut(owner: object) -> bool:
    """Whether this is a fetch that was given up because its pages come from prefill sooner."""
    return isinstance(owner, LateFetch) and owner.cause == "transfer_done"
