"""Counters of a core's steps, the same code for a running engine and a journal, so that they cannot disagree.

Runs after every step. Nothing here reads a clock: times are those of the events. Nothing here may raise.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tidekv.engine.trace.causes import extend_cause
from tidekv.states import commands, events
from tidekv.states.records.stages import State
from tidekv.states.types import FULL

if TYPE_CHECKING:
    from tidekv.states.core import Core
    from tidekv.states.prefix.node import Node, TierName

BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the buckets of every histogram; one more, without a bound, follows them."""


class Histogram:
    """Durations: counts by bucket, not cumulative, and their sum."""

    __slots__ = ("buckets", "sum_s")

    def __init__(self) -> None:
        self.buckets = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one observation."""
        self.buckets[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds


_CALLS: dict[type[commands.Command], str] = {
    commands.QueryStorage: "query",
    commands.FetchPages: "fetch",
    commands.SharePages: "share",
    commands.HandPrompt: "hand",
    commands.StorePages: "store",
    commands.ProbeStorage: "probe",
    commands.CopyPages: "copy",
    commands.Recompute: "recompute",
}
"""Commands that are timed until their outcome."""
# Reading a member off its class is a slow property in Python 3.11.
_READY, _FAILED, _PREALLOC = State.READY, State.FAILED, State.PREALLOC


class MetricsFold:
    """All counters of one core, from its first step on. Pass every step to `stepped`."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.arrived = 0
        self.ended: Counter[str] = Counter()
        """Restores by outcome: "ready", or the cause of the failure."""
        self.tokens: Counter[str] = Counter()
        """Prompt tokens of READY requests by source."""
        self.pages: Counter[str] = Counter()
        """promised, asked, extended, delivered, wasted, fetched, from_peers, to_peers, stored."""
        self.component_pages: Counter[tuple[str, str]] = Counter()
        """By component: asked of prefill, loaded from the host, cloned on the device, backed up, fetched from storage,
        stored there, left by callers.
        """
        self.cuts: Counter[str] = Counter()
        """Spans asked of prefill by extend, by the cause of the failure."""
        self.declined: Counter[str] = Counter()
        """Pages that storage had and that were not fetched, by the cause: `tidekv.states.records.causes.DECLINED`."""
        self.peer_declined: Counter[str] = Counter()
        """Pages that no tier had and no peer of the request was asked for, by the cause:
        `tidekv.states.records.causes.PEER_DECLINED`.
        """
        self.peers_refused = 0
        """Peers that hints of requests named, and that may not be asked."""
        self.raises: Counter[str] = Counter()
        """Raises that the core survived, by the rule: a function of `tidekv.states`."""
        self.evicted: Counter[str] = Counter()
        """Pages by tier."""
        self.events: Counter[str] = Counter()
        self.state_s: dict[str, Histogram] = {}
        self.ready_s = Histogram()
        self.calls_s: dict[str, Histogram] = {}
        """From command to outcome, by kind."""
        self.calls_failed: Counter[str] = Counter()
        self._since: dict[str, tuple[State, float, float]] = {}
        """By request: its state, since when, and when it arrived."""
        self._calls: dict[int, tuple[str, float]] = {}
        self._component_copies: dict[int, tuple[str, str, int]] = {}
        """By operation: component, what becomes of the pages, and how many."""
        self._received: Counter[str] = Counter()
        self._event: events.Event | None = None
        self._handlers: dict[type[commands.Command], Callable[[Any], None]] = {
            commands.SendPromise: self._promise,
            commands.SendExtend: self._extend,
            commands.CopyPages: self._copy,
            commands.FetchPages: self._fetch,
            commands.SharePages: self._share,
            commands.StorePages: self._store,
            commands.ReportReady: self._ready,
            commands.ReportRestored: self._restored,
            commands.ReportFailed: self._failed,
        }
        core.state.index.on_evict.append(self._evict)

    def follow(self, core: Core) -> None:
        """Continue with another core, which has taken no event."""
        self.core = core
        core.state.index.on_evict.append(self._evict)

    def stepped(self, event: events.Event, given: list[commands.Command], error: str = "") -> None:
        """Count the core's last step."""
        kind = type(event)
        self.events[kind.__name__] += 1
        for raised in self.core.state.raises:
            self.raises[raised.rule] += 1
        self._event = event
        if kind is events.ChunkReceived:
            self._chunk(event)  # type: ignore[arg-type]  # Just that.
        elif kind is events.RequestArrived:
            self.arrived += not error
            self.peers_refused += len(event.peers_refused)  # type: ignore[attr-defined]  # Just that.
        elif kind is events.FinishRequested or kind is events.RetractRequested:
            for part in () if error else event.component_pages:  # type: ignore[attr-defined]  # Both have them.
                self.component_pages[part.component, "left"] += len(part.pages)
        elif (op := getattr(event, "op", None)) is not None and (call := self._calls.pop(op, None)) is not None:
            name, begun_at_s = call
            copied = self._component_copies.pop(op, None)
            self._histogram(self.calls_s, name).observe(event.at_s - begun_at_s)
            if getattr(event, "error", "") or kind is events.CommandRaised:
                self.calls_failed[name] += 1
            elif copied is not None:
                # A copy transfers all pages or none; a storage outcome counts what it transferred.
                count = getattr(event, "valid", getattr(event, "written", copied[2]))
                self.component_pages[copied[:2]] += max(count, 0)
            elif kind is events.PagesFetched:
                what = "from_peers" if name == "peer_fetch" else "fetched"
                self.pages[what] += max(event.valid, 0)  # type: ignore[attr-defined]  # Just that.
            elif kind is events.PagesStored:
                self.pages["stored"] += max(event.written, 0)  # type: ignore[attr-defined]  # Just that.
        for request_id, state in self.core.moves:
            self._move(request_id, state, event.at_s)
        for command in given:
            name_of = _CALLS.get(type(command))
            if name_of is not None:
                self._calls[command.op] = (name_of, event.at_s)  # type: ignore[attr-defined]  # An Operation.
            if (handler := self._handlers.get(type(command))) is not None:
                handler(command)

    def _histogram(self, family: dict[str, Histogram], name: str) -> Histogram:
        found = family.get(name)
        if found is None:
            found = family[name] = Histogram()
        return found

    def _move(self, request_id: str, state: State, at_s: float) -> None:
        before = self._since.pop(request_id, None)
        arrived_at_s = at_s
        if before is not None:
            was, since_s, arrived_at_s = before
            self._histogram(self.state_s, was._value_).observe(at_s - since_s)
        if state is _READY:
            self.ready_s.observe(at_s - arrived_at_s)
        elif state is not _FAILED:
            self._since[request_id] = (state, at_s, arrived_at_s)
        if (state is _PREALLOC or state is _FAILED) and (received := self._received.pop(request_id, 0)):
            # Pages that its room delivered stay with the room.
            self.pages["wasted"] += received

    def _chunk(self, event: events.ChunkReceived) -> None:
        self.pages["delivered"] += event.count
        request = self.core.request(event.request_id) if event.request_id in self._since else None
        if request is not None and request.generation == event.generation:
            self._received[event.request_id] += event.count
        else:
            # From a room that was left, or for a request that has ended.
            self.pages["wasted"] += event.count

    def _promise(self, command: commands.SendPromise) -> None:
        request = self.core.request(command.request_id)
        if request is not None and request.sources.declined[1]:
            cause, count = request.sources.declined
            self.declined[cause] += count
        if request is not None and request.sources.peer_declined[1]:
            cause, count, _ = request.sources.peer_declined
            self.peer_declined[cause] += count
        self.pages["promised"] += -(-command.promised_tokens // self.core.settings.page_size)
        self.pages["asked"] += len(command.pages)
        for part in command.component_pages or ():
            self.component_pages[part.component, "asked"] += len(part.pages)

    def _copy(self, command: commands.CopyPages) -> None:
        self._calls[command.op] = (f"copy_to_{command.target}", self._calls[command.op][1])
        if command.component == FULL:
            return
        what = "backed_up" if command.target == "host" else "loaded" if command.source == "host" else "cloned"
        self._component_copies[command.op] = (command.component, what, len(command.target_pages))

    def _fetch(self, command: commands.FetchPages) -> None:
        if command.peer:
            self._calls[command.op] = ("peer_fetch", self._calls[command.op][1])
        if command.component != FULL:
            self._component_copies[command.op] = (command.component, "fetched", len(command.host_pages))

    def _share(self, command: commands.SharePages) -> None:
        self.pages["to_peers"] += len(command.host_pages)

    def _store(self, command: commands.StorePages) -> None:
        if command.component != FULL:
            self._component_copies[command.op] = (command.component, "stored", len(command.host_pages))

    def _extend(self, command: commands.SendExtend) -> None:
        self.pages["extended"] += len(command.pages)
        request = self.core.request(command.request_id)
        room = None if request is None else request.room
        assert self._event is not None
        if room is not None and room.generation != command.generation:
            room = None
        self.cuts[extend_cause(room, command.span, self._event)] += 1

    def _ready(self, command: commands.ReportReady) -> None:
        self._received.pop(command.request_id, None)
        self.ended["ready"] += 1
        self.tokens.update(command.sources)

    def _restored(self, command: commands.ReportRestored) -> None:
        self._received.pop(command.request_id, None)
        self.ended[command.cause or "ready"] += 1
        self.tokens.update(command.sources)

    def _failed(self, command: commands.ReportFailed) -> None:
        self.ended[command.cause] += 1

    def _evict(self, node: Node, tier: TierName) -> None:
        self.evicted[tier] += node.page_count
