"""Folds the steps of a replay into stories."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tidekv.engine.seeing.story import Plan, Story, Work
from tidekv.states import commands, events
from tidekv.states.backups import Backup
from tidekv.states.load import LateFetch, Load, Stage
from tidekv.states.request import State

if TYPE_CHECKING:
    from tidekv.engine.journal.replayer import Replayer, Step
    from tidekv.states.core import Core

ROOM_EVENTS = (events.RoomRefused, events.RoomFailed, events.WriterLost)


class Stories:
    """All requests of a journal. `take` every step, with the core as it is after it."""

    def __init__(self, page_size: int) -> None:
        self.all: list[Story] = []
        """In order of arrival."""
        self.last_at_s = 0.0
        self._page_size = page_size
        self._live: dict[str, Story] = {}
        self._by_serial: dict[int, Story] = {}
        self._open: dict[int, tuple[Work, list[Story]]] = {}
        """By operation: work in flight, and whose it is."""
        self._spans: dict[tuple[str, int, int], Work] = {}
        self._writers: dict[str, str] = {}
        """Who was asked to write last, by request."""
        self._begun: set[int] = set()
        """Operations that the step has begun."""
        self._raised = 0
        # Each kind of command has a teller that takes just that kind.
        self._tellers: dict[type[commands.Command], Callable[[Any, float, Core], None]] = {
            commands.QueryStorage: self._query,
            commands.FetchPages: self._fetch,
            commands.CopyToDevice: self._copy,
            commands.CopyToHost: self._backup,
            commands.StorePages: self._store,
            commands.Recompute: self._recompute,
            commands.SendPromise: self._promise,
            commands.SendExtend: self._extend,
            commands.TellReady: self._ready,
            commands.TellFailed: self._failed,
            commands.TellFinished: self._finished,
            commands.TellRetracted: self._retracted,
            commands.TellDropped: self._dropped,
        }

    def named(self, request_id: str) -> list[Story]:
        """Every request of that name: ids may be used again."""
        return [story for story in self.all if story.request_id == request_id]

    def take(self, step: Step, core: Core) -> None:
        """Take one step."""
        event = step.event
        at_s = self.last_at_s = max(self.last_at_s, event.at_s)
        if isinstance(event, events.RequestArrived) and not step.error:
            self._arrived(event, core)
        self._note_event(event, at_s)
        trouble = self._end_work(event, at_s, core)
        if core.books.counters.get("transitions_raised", 0) != self._raised:
            self._raised = core.books.counters["transitions_raised"]
            self._note_raises(at_s, core)
        for request_id, state in step.moves:
            self._move(request_id, state, event, at_s, core, trouble)
        self._begun = set()
        for command in step.commands:
            teller = self._tellers.get(type(command))
            if teller is not None:
                teller(command, at_s, core)

    # --- Events ---

    def _arrived(self, event: events.RequestArrived, core: Core) -> None:
        story = Story(
            event.request_id,
            event.serial,
            event.at_s,
            event.prompt_tokens,
            core.settings.pages_of(event.prompt_tokens),
            event.namespace,
            event.prefill_count,
            event.deadline_at_s,
        )
        self.all.append(story)
        self._live[event.request_id] = self._by_serial[event.serial] = story

    def _note_event(self, event: events.Event, at_s: float) -> None:
        if isinstance(event, events.ChunkLanded):
            work = self._spans.get((event.request_id, event.generation, event.span))
            if work is not None:
                work.chunks.append((at_s, event.count))
                work.good = min(work.count, max(work.good, event.first + event.count - work.first))
                if event.last:
                    work.ended_at_s = at_s
        elif isinstance(event, events.PromiseSent):
            self._writers[event.request_id] = event.writer
        elif isinstance(event, events.GrowthTaken):
            story = self._live.get(event.request_id)
            if story is not None:
                story.grown_pages += event.page_count

    def _end_work(self, event: events.Event, at_s: float, core: Core) -> str:
        """End what the event says has ended, and what the clock has given up. Returns the trouble, if there was any."""
        if isinstance(event, events.ClockAdvanced):
            return self._give_up_late(at_s, core)
        op = getattr(event, "op", None)
        work, stories = self._open.pop(op, (None, [])) if op is not None else (None, [])
        if work is None:
            return ""
        late = work.trouble
        work.ended_at_s = at_s
        work.trouble = late or _trouble_of(event, work)
        work.good = _good_of(event, work)
        if late:
            work.wasted = work.good
        elif work.trouble:
            consequence = _CONSEQUENCES.get(work.kind, "")
            for story in stories:
                story.fall_back(at_s, work.trouble, consequence)
        return work.trouble

    def _give_up_late(self, at_s: float, core: Core) -> str:
        trouble = ""
        for op, (work, stories) in list(self._open.items()):
            owner = core.books.operations.get(op)
            if work.trouble:
                continue
            if isinstance(owner, LateFetch):
                work.trouble = "storage was late: the fetch did not end within its deadline"
            elif isinstance(owner, Load) and owner.stage is Stage.VOID:
                work.trouble = "a copy to the device was late: it did not end within its deadline"
            elif owner is None and work.kind == "query":
                work.trouble = "storage was late: it did not answer within its deadline"
                work.ended_at_s = at_s
                del self._open[op]
            else:
                continue
            trouble = work.trouble
            for story in stories:
                story.fall_back(at_s, trouble, _CONSEQUENCES["late copy" if work.kind == "copy" else work.kind])
        return trouble

    def _note_raises(self, at_s: float, core: Core) -> None:
        for request in core.books.requests.values():
            story = self._live.get(request.request_id)
            if story is not None and request.raised > story.raised:
                story.raised = request.raised
                left = ("all tiers", "L1, L2 and transfer", "L1 and transfer")[request.restore_limit]
                story.fall_back(at_s, "a rule of the core raised", f"the plan was cut to {left}")

    def _move(self, request_id: str, state: State, event: events.Event, at_s: float, core: Core, trouble: str) -> None:
        story = self._live.get(request_id)
        if story is None:
            return
        if state is State.PREALLOC and story.states:
            self._sent_back(story, event, at_s, trouble, core)
        story.states.append((at_s, state.value))
        request = core.request(request_id)
        if state is State.PREALLOC and request is not None:
            story.needed_pages = request.short_need

    def _sent_back(self, story: Story, event: events.Event, at_s: float, trouble: str, core: Core) -> None:
        for key, work in list(self._spans.items()):
            if key[0] == story.request_id and work.ended_at_s is None:
                work.ended_at_s = at_s
                work.wasted, work.trouble = work.good, "the room was left"
        request = core.request(story.request_id)
        if isinstance(event, ROOM_EVENTS) and self._is_of(event, story):
            words = {events.RoomRefused: "prefill refused", events.RoomFailed: "prefill failed"}
            cause = f"{words.get(type(event), 'the prefill worker was lost')}: {_last_line(event.cause)}"
            recomputes = request is not None and request.recomputes
            whither = "for its caller to compute the rest" if recomputes else "for the next prefill of its list"
            story.fall_back(at_s, cause, f"the request went back to the queue, {whither}")
        else:
            cause = trouble or "the transfer of another request, which was to fill pages that they share, was lost"
            story.fall_back(at_s, cause, "the request went back to the queue, for other pages")

    def _is_of(self, event: events.RoomRefused | events.RoomFailed | events.WriterLost, story: Story) -> bool:
        """Whether the room that is over is the story's own, and not one that fills pages for it."""
        if isinstance(event, events.WriterLost):
            return self._writers.get(story.request_id) == event.writer
        return event.request_id == story.request_id

    # --- Commands ---

    def _begin(self, op: int, work: Work, stories: list[Story]) -> None:
        self._open[op] = (work, stories)
        self._begun.add(op)
        for story in stories:
            story.works.append(work)

    def _query(self, command: commands.QueryStorage, at_s: float, core: Core) -> None:
        story = self._live[command.request_id]
        self._begin(command.op, Work("query", command.first, command.count, at_s), [story])

    def _fetch(self, command: commands.FetchPages, at_s: float, core: Core) -> None:
        work = Work("fetch", command.first, len(command.host_pages), at_s)
        self._begin(command.op, work, self._sharers(command.op, core) or [self._live[command.request_id]])

    def _copy(self, command: commands.CopyToDevice, at_s: float, core: Core) -> None:
        owner = core.books.operations.get(command.op)
        first = owner.first if isinstance(owner, Load) else 0
        work = Work("copy", first, len(command.host_pages), at_s)
        self._begin(command.op, work, self._sharers(command.op, core))

    def _sharers(self, op: int, core: Core) -> list[Story]:
        owner = core.books.operations.get(op)
        if not isinstance(owner, Load):
            return []
        return [self._live[request.request_id] for request in owner.sharers if request.request_id in self._live]

    def _backup(self, command: commands.CopyToHost, at_s: float, core: Core) -> None:
        owner = core.books.operations.get(command.op)
        if isinstance(owner, Backup) and owner.serial in self._by_serial:
            work = Work("backup", owner.first, len(command.host_pages), at_s)
            self._begin(command.op, work, [self._by_serial[owner.serial]])

    def _store(self, command: commands.StorePages, at_s: float, core: Core) -> None:
        if command.serial in self._by_serial:
            work = Work("store", command.first, len(command.host_pages), at_s)
            self._begin(command.op, work, [self._by_serial[command.serial]])

    def _recompute(self, command: commands.Recompute, at_s: float, core: Core) -> None:
        work = Work("recompute", command.first, len(command.pages) - command.first, at_s)
        self._begin(command.op, work, [self._live[command.request_id]])

    def _promise(self, command: commands.SendPromise, at_s: float, core: Core) -> None:
        story = self._live[command.request_id]
        request = core.request(command.request_id)
        loads = {"l2": 0, "l3": 0}
        shared = declined = 0
        promised = -(-command.promised_tokens // self._page_size)
        if request is not None:
            for load in request.loads:
                pages = load.sharers.get(request, 0)
                if load.op in self._begun:
                    loads[load.tier] += pages
                else:
                    shared += pages
            declined = max(0, request.stored_first + request.stored_found - promised) if request.stored_found else 0
        local = promised - loads["l2"] - loads["l3"] - shared
        plan = Plan(
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
        )
        story.plans.append(plan)
        if declined:
            story.fall_back(
                at_s,
                f"host memory was short, or the run not worth a fetch: {declined} pages that storage has were declined",
                "the transfer brings them",
            )
        self._span(story, command.generation, 0, promised, len(command.pages), at_s)

    def _extend(self, command: commands.SendExtend, at_s: float, core: Core) -> None:
        story = self._live[command.request_id]
        self._span(story, command.generation, command.span, command.first, len(command.pages), at_s)

    def _span(self, story: Story, generation: int, span: int, first: int, count: int, at_s: float) -> None:
        work = Work("span", first, count, at_s, generation=generation, span=span)
        story.works.append(work)
        self._spans[(story.request_id, generation, span)] = work

    def _ready(self, command: commands.TellReady, at_s: float, core: Core) -> None:
        story = self._live[command.request_id]
        story.ended = "READY"
        story.sources = dict(command.sources)
        self._forget_spans(story)

    def _failed(self, command: commands.TellFailed, at_s: float, core: Core) -> None:
        story = self._live.pop(command.request_id)
        story.ended, story.cause, story.detail = "FAILED", command.cause, command.detail
        for work in story.works:
            if work.kind == "span":
                work.wasted = work.good
                work.ended_at_s = at_s if work.ended_at_s is None else work.ended_at_s
        self._forget_spans(story)

    def _forget_spans(self, story: Story) -> None:
        for key in [key for key in self._spans if key[0] == story.request_id]:
            del self._spans[key]

    def _finished(self, command: commands.TellFinished, at_s: float, core: Core) -> None:
        self._give_back(command.request_id, "finished", at_s)

    def _retracted(self, command: commands.TellRetracted, at_s: float, core: Core) -> None:
        self._give_back(command.request_id, "retracted", at_s)

    def _dropped(self, command: commands.TellDropped, at_s: float, core: Core) -> None:
        self._give_back(command.request_id, "dropped", at_s)

    def _give_back(self, request_id: str, words: str, at_s: float) -> None:
        story = self._live.pop(request_id, None)
        if story is not None:
            story.given_back, story.given_back_at_s = words, at_s


_CONSEQUENCES = {
    "query": "the plan was made without storage",
    "fetch": "the pages were asked of prefill by an extend",
    "copy": "the pages were asked of prefill by an extend",
    "late copy": "the pages were given up, since the copy may still write to them",
    "backup": "the pages are not kept in host memory",
    "store": "the pages are not kept in storage",
}


def _trouble_of(event: events.Event, work: Work) -> str:
    names = {"query": "asking storage", "fetch": "the fetch from storage", "copy": "the copy from host to device"}
    names |= {"backup": "the copy to the host", "store": "the put to storage", "recompute": "the recompute"}
    name = names[work.kind]
    if isinstance(event, events.CommandRaised):
        return f"starting {name} raised: {_last_line(event.detail)}"
    error = getattr(event, "error", "")
    if error:
        return f"{name} failed: {_last_line(error)}"
    if isinstance(event, events.PagesFetched) and event.good < work.count:
        good = max(event.good, 0)
        return f"the fetch was short: storage brought {good} of {work.count} pages, the rest was lost or corrupt"
    if isinstance(event, events.PagesStored) and event.stored < work.count:
        return f"the put was partial: storage took {event.stored} of {work.count} pages"
    return ""


def _good_of(event: events.Event, work: Work) -> int:
    for name in ("found", "good", "stored"):
        if hasattr(event, name):
            return max(0, min(int(getattr(event, name)), work.count))
    return 0 if work.trouble else work.count


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "no words"


def read_stories(replayer: Replayer) -> Stories:
    """Replay a journal to its end, and tell all stories."""
    stories = Stories(replayer.header.core.page_size)
    for step in replayer.steps():
        stories.take(step, replayer.core)
    return stories
