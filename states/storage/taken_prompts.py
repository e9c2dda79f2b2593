"""Prompts that another decode worker hands over before it goes away: reads of their pages into host memory.

    HintReceived "take" ──▶ what host memory lacks of the prompt ──FetchPages──▶ part received ──▶ next part ──▶ ...
                                                                                       └──▶ ReportHinted

Each part is read from that worker as a request reads from a peer: the same deadlines, the same limit of pages that
peers write to, the same pause for requests after a failure. It is asked for by the worker itself, so a pause does not
hold it back. A prompt keeps the heat that it had there. It takes free host pages, and those of colder prompts; what
this worker uses more than that stays.

Ownership. A part owns its host pages until the read has ended, whatever became of the prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidekv.states.commands import FetchPages, ReportHinted
from tidekv.states.events import CommandRaised, PagesFetched
from tidekv.states.prefix.policies import POLICIES
from tidekv.states.rollback import Rollback
from tidekv.states.storage.fetch_source import LateFetch
from tidekv.states.storage.peer_fetches import STOP_SHARE
from tidekv.states.storage_policy import FETCH_TIMEOUT_MAX_S
from tidekv.states.types import page_ids

if TYPE_CHECKING:
    from tidekv.states.core_state import CoreState
    from tidekv.states.events import HintReceived, Outcome
    from tidekv.states.prefix.node import Heat
    from tidekv.states.storage.peer_fetches import PeerFetches
    from tidekv.states.types import PageIds

TAKEN_MAX: Final = 16
"""Maximum prompts that are taken at once."""
BUSY: Final = "it takes as many prompts as it may at once"
FULL_MEMORY: Final = "its host memory has no room, but for what it uses more"
RAISED: Final = "a rule of it raised"
SHORT: Final = "it was sent fewer pages"


class TakenPrompt:
    """One prompt that is being taken."""

    __slots__ = ("brought", "hint", "until_s")

    def __init__(self, hint: HintReceived, *, until_s: float) -> None:
        self.hint = hint
        self.brought = 0
        """Pages that host memory has got of it."""
        self.until_s = until_s


class TakenPart(LateFetch):
    """Operation: a read of pages [first, first + len(host_pages)) of a prompt that is taken."""

    __slots__ = ("_taken_prompts", "first", "is_answered", "op", "prompt")

    def __init__(
        self, taken_prompts: TakenPrompts, state: CoreState, prompt: TakenPrompt, *, first: int, host_pages: PageIds
    ) -> None:
        self._taken_prompts = taken_prompts
        self._state = state
        self._source = taken_prompts.peers
        self._begun_at_s, self._queued_pages = state.now_s, self._source.pages_in_flight + len(host_pages)
        self.cause = self.component = ""
        self.host_pages = host_pages
        self.prompt = prompt
        self.first = first
        self.op = 0
        self.is_answered = False
        """Whether the worker has its answer, since this read was late."""

    @property
    def namespace(self) -> str:
        """The namespace of the prompt."""
        return self.prompt.hint.namespace

    @property
    def keys(self) -> bytes:
        """The keys of the prompt."""
        return self.prompt.hint.keys

    def ended(self, event: Outcome, error: str) -> None:
        """Enter the valid pages in the tree, free the others, and read on."""
        taken, count = self._taken_prompts, len(self.host_pages)
        valid = max(0, min(event.valid, count)) if isinstance(event, PagesFetched) else 0
        if not isinstance(event, CommandRaised) and not self.is_answered:
            taken.peers.note(self.prompt.hint.peer, failed=bool(error))
        if valid == count:
            taken.peers.note_throughput(begun_at_s=self._begun_at_s, pages=self._queued_pages)
        if valid:
            taken.received(self, valid)
        self._free()
        if not self.is_answered:
            # After the free: the next part may need these pages. As long as pages come, a late read is followed by
            # another one: the bound of a part is that of a request, which would wait for it.
            goes_on = valid == count or (valid and error)
            taken.part_ended(self, "" if goes_on else error or SHORT)
            self.is_answered = True

    def late(self) -> None:
        """Answer with what there is. The read goes on until nothing writes any more."""
        if not self.is_answered:
            self._state.count("peer_fetches_late")
            self._taken_prompts.peers.note(self.prompt.hint.peer, failed=True)
            self._taken_prompts.report(self.prompt, "its reads from this worker are late")
            self.is_answered = True

    def abandon(self) -> None:
        """Free the host pages, and answer with what there is. Safe to call again after a raise."""
        self._free()
        if not self.is_answered:
            self._taken_prompts.report(self.prompt, RAISED)
            self.is_answered = True

    def _free(self) -> None:
        super().abandon()
        self.host_pages = page_ids()

    def entered(self, left: PageIds) -> None:
        """Keep only the pages that the tree has not taken: `left`."""
        self._source.pages_in_flight -= len(self.host_pages) - len(left)
        self.host_pages = left


class TakenPrompts:
    """Takes prompts of workers that go away."""

    def __init__(self, state: CoreState, peers: PeerFetches) -> None:
        self._state = state
        self.peers = peers
        self._policy = POLICIES[state.settings.eviction]

    def take(self, event: HintReceived) -> None:
        """Begin to take a prompt, or report why not."""
        prompt = TakenPrompt(event, until_s=self._state.now_s + event.ttl_s)
        parts = sum(isinstance(one, TakenPart) for one in self._state.operations.values())
        if parts >= TAKEN_MAX:
            self.report(prompt, BUSY)
            return
        self._go_on(prompt)

    def refuse(self, event: HintReceived) -> None:
        """Report a prompt on whose taking a rule has raised."""
        self.report(TakenPrompt(event, until_s=0.0), RAISED)

    def part_ended(self, part: TakenPart, cause: str) -> None:
        """Read the next part of a prompt, or report what became of it."""
        prompt = part.prompt
        if cause:
            self.report(prompt, cause)
            return
        self._state.run_guarded(lambda: self._go_on(prompt), recover=lambda: self.report(prompt, RAISED))

    def received(self, part: TakenPart, valid: int) -> None:
        """Enter the first `valid` pages of a part, unless the path to them is gone."""
        state, width = self._state, self._state.settings.key_bytes
        begin = part.first * width
        node = state.index.host_end(part.namespace, part.keys[:begin])
        if node.depth_pages < part.first:
            return
        heat = state.index.heat_from(part.prompt.hint.heat)
        keys = part.keys[begin : begin + valid * width]
        _, left = state.index.insert_host(node, keys, part.host_pages[:valid], heat=heat)
        state.count("pages_taken", valid - len(left))
        part.prompt.brought += valid - len(left)
        part.entered(left + part.host_pages[valid:])

    def report(self, prompt: TakenPrompt, cause: str) -> None:
        """Report what host memory has of a prompt now, and why it does not have all."""
        hint = prompt.hint
        count = self._state.index.host_end(hint.namespace, hint.keys).depth_pages
        is_whole = count * self._state.settings.key_bytes == len(hint.keys)
        outcome = "accepted" if is_whole else "clipped" if count else "rejected"
        self._state.count(f"hints_{outcome}")
        self._state.emit(
            ReportHinted(
                call=hint.call,
                outcome=outcome,
                page_count=count,
                # A page that was evicted amid the run, and read again, counts once.
                brought=min(prompt.brought, count),
                cause="" if is_whole else cause,
            )
        )

    def _go_on(self, prompt: TakenPrompt) -> None:
        """Begin the next part, or report what became of the prompt."""
        cause = self._begin_part(prompt)
        if cause is not None:
            self.report(prompt, cause)

    def _begin_part(self, prompt: TakenPrompt) -> str | None:
        """Begin to read what host memory lacks next; returns why that is not possible, None if it has begun."""
        state, settings, hint = self._state, self._state.settings, prompt.hint
        node, heat = state.index.host_end(hint.namespace, hint.keys), state.index.heat_from(hint.heat)
        # What is there is as hot now as where it comes from, and is not evicted for its own end.
        state.index.warm(node, heat)
        first = node.depth_pages
        missing = len(hint.keys) // settings.key_bytes - first
        deadline_s = self.peers.deadline_s(prompt.until_s - state.now_s)
        if not missing or deadline_s <= 0:
            return "the time for it is over"
        wanted = self.peers.allowance(min(missing, settings.copy_run_pages))
        if not wanted:
            return BUSY
        count = self._make_room(wanted, heat)
        if not count:
            return FULL_MEMORY
        with Rollback() as undo:
            pages = state.host.take(count)
            undo.callback(state.host.give_back, pages)
            part = TakenPart(self, state, prompt, first=first, host_pages=pages)
            part.op = state.start_operation(part, deadline_s=deadline_s)
            undo.callback(state.operations.pop, part.op)
            state.count("peer_fetches")
            state.emit(
                FetchPages(
                    op=part.op,
                    request_id="",
                    positions=page_ids(range(first, first + count)),
                    host_pages=pages,
                    timeout_s=min(STOP_SHARE * deadline_s, FETCH_TIMEOUT_MAX_S),
                    peer=hint.peer,
                )
            )
            undo.keep()
        self.peers.pages_in_flight += count
        return None

    def _make_room(self, count: int, heat: Heat) -> int:
        """Return how many of `count` host pages are free, once those of colder prompts were evicted."""
        state = self._state
        short = count - state.host.free
        colder = 0
        if short > 0:
            ours = self._policy.priority(heat)
            for victim in state.index.first_to_go("host", short):
                if self._policy.priority(victim) >= ours:
                    break
                colder += victim.page_count
        return state.make_host_room(min(count, state.host.free + colder))
