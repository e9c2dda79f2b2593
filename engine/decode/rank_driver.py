"""Driver of one rank, which passes events to the core after a vote of all ranks.

Posted events go to the agreement; agreed events go to the `Driver`, which steps the core. A turn is over on this rank
when the core has taken all of its events; only then does the next one begin.

    FORMING ──all ranks are there──▶ VOTING ──a rank is lost──▶ ALONE ──nothing in flight──▶ FORMING, with an empty core

In ALONE this rank votes with itself: every request fails, and the rank waits for all operations that still read or
write their pages, and for callers that have begun early. Calls raise RankLost until the group is formed again.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from tidekv.engine.log import engine_log, own_context
from tidekv.engine.metrics.fold import Histogram
from tidekv.engine.ranks.group import open_channel
from tidekv.states import commands, events
from tidekv.states.errors import InvalidConfig, InvalidRequest, RankBroken, RankLost, RanksDiverged
from tidekv.states.ranks.agreement import LEADER, Agreement, Decision, Opening
from tidekv.states.ranks.call_votes import held_until_s
from tidekv.states.ranks.vote_items import LOST_RANK
from tidekv.transports.tasks import OwnedTasks

if TYPE_CHECKING:
    from tidekv.engine.decode.driver import Driver
    from tidekv.engine.decode.pending_calls import PendingCalls
    from tidekv.engine.ranks.group import RankGroup
    from tidekv.states.commands import Command
    from tidekv.states.core import Core
    from tidekv.states.events import Event
    from tidekv.states.ranks.call_votes import Refusal
    from tidekv.states.ranks.votes import SlotValues


class RankPhase(enum.Enum):
    """State of this rank."""

    FORMING = "forming"
    VOTING = "voting"
    ALONE = "alone"
    CLOSED = "closed"


EPOCH_GENERATIONS = 1 << 44
"""Generations of one epoch of a group; none is used again after a change of the leader."""
TIMER_MIN_S = 0.001
OF_THE_LEADER = (
    events.FlushRequested,
    events.HintReceived,
    events.PolicyChanged,
    events.RequestChanged,
    events.StoreRequested,
)
"""Calls for all ranks, which only rank 0 may make."""
HELD = (events.RequestArrived, events.PagesOffered, events.ShareRequested)
"""Calls that wait for those of the other ranks, and end without them."""
LAST_VOTE_S = 0.1
"""Maximum seconds between the ends of one complete vote on different ranks."""

LOG = engine_log("tidekv.engine")


class RankDriver:
    """Driver of one rank for callers, effects and receiver. Every method is called on the loop."""

    def __init__(
        self,
        group: RankGroup,
        *,
        settings: bytes,
        calls: PendingCalls,
        renew: Callable[[], Awaitable[None]],
        on_broken: Callable[[BaseException], None],
    ) -> None:
        """`renew` makes an empty core and its driver, and attaches them here."""
        self.lost: RankLost | None = None
        """Reason for which calls are refused."""
        self.turns = 0
        self.losses = 0
        self.vote_s = Histogram()
        """Durations from this rank's vote to the answer of all ranks."""
        self.hold_s = group.hold_s
        """Maximum seconds that a call waits for the callers of all ranks."""
        self._group = group
        self._calls = calls
        self._renew = renew
        self._on_broken = on_broken
        self._phase = RankPhase.FORMING
        self._channel = open_channel(group, self, settings=settings)
        self._tasks = OwnedTasks("rank driver")
        self._loop = asyncio.get_running_loop()
        self._context = own_context()
        self._held: deque[Event] = deque()
        """Posted while the core has not taken all of a turn."""
        self._answers: dict[int, str] = {}
        """What the successor said to offers whose end is being voted on, by operation: ranks vote on counts."""
        self._openings: deque[Opening] = deque()
        self._in_turn = False
        self._is_voting = False
        self._is_called = False
        self._has_wished = False
        self._is_wished = False
        self._clock_offset_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._formed: asyncio.Future[None] = self._loop.create_future()
        self._left: asyncio.Future[None] = self._loop.create_future()

    def attach(self, core: Core, driver: Driver, *, has_storage: bool) -> None:
        """Begin with this core, which has taken no event, and its driver, which reports every step to this object."""
        self.core = core
        self._driver = driver
        self._agreement = Agreement(core, rank=self._group.rank, hold_s=self._group.hold_s)
        if has_storage:
            component_pages = core.state.components is not None
            self._agreement.receive(events.StorageChanged(at_s=0.0, available=True, component_pages=component_pages))

    async def start(self) -> None:
        """Connect to the other ranks. Raises RankLost if they are not connected in time, InvalidConfig if the leader
        refuses this rank.
        """
        await self._channel.start()
        self._channel.settled()
        try:
            async with asyncio.timeout(self._group.form_timeout_s):
                await self.wait_formed()
        except TimeoutError:
            raise RankLost(
                rank=LEADER,
                cause=f"the {self._group.ranks} ranks did not all connect to {self._group.address} within "
                f"{self._group.form_timeout_s:g} s",
            ) from None

    async def wait_formed(self) -> None:
        """Wait until all ranks are connected.

        Unbounded: the caller sets the deadline (`start` does); `close` ends it with a cancellation.
        """
        await asyncio.shield(self._formed)

    async def leave(self, timeout_s: float) -> None:
        """Leave the group, so that no rank counts as lost. Waits at most `timeout_s` for the other ranks.

        Nothing may be in flight.
        """
        if self._phase is RankPhase.VOTING:
            self._agreement.leave()
            self._heard()
            await asyncio.wait([self._left], timeout=timeout_s)

    async def close(self) -> None:
        """Stop voting, and close the channel."""
        self._phase = RankPhase.CLOSED
        self._channel.leave()
        if self._timer is not None:
            self._timer.cancel()
        for future in (self._formed, self._left):
            future.cancel()
        await self._tasks.close()
        await self._channel.close()

    # --- Interface of a driver for callers, effects and receiver ---

    def clock(self) -> float:
        """Monotonic seconds of this rank; the core's time is the leader's."""
        return self._driver.clock()

    @property
    def generations_from(self) -> int:
        """The first generation of this epoch."""
        return self._channel.epoch * EPOCH_GENERATIONS

    @property
    def group_name(self) -> str:
        """Name of the ranks of this epoch towards prefill, unique to this group."""
        return self._channel.group_name

    def check(self) -> None:
        """Raise RankLost while a rank is lost."""
        if self.lost is not None:
            raise self.lost

    @property
    def is_caught_up(self) -> bool:
        """Whether the core has taken every event of this rank and its callers."""
        has_news = self._agreement.has_news and self._phase is not RankPhase.FORMING
        return self._driver.is_caught_up and not self._in_turn and not has_news

    def post(self, event: Event) -> None:
        """Take an event of this rank or a call of its callers into the next vote. Having changed nothing, raises
        InvalidRequest for calls that only rank 0 may make, and RankLost for these while a rank is lost; any other
        exception breaks the engine.
        """
        if self._phase is RankPhase.CLOSED:
            return
        if isinstance(event, OF_THE_LEADER):
            if self._group.rank != LEADER:
                raise InvalidRequest(
                    "flush, hint, change_policy, change_request and drain(store_s=, to=) are for all ranks: call them"
                    f" on rank {LEADER} only"
                )
            self.check()
        if isinstance(event, events.RequestArrived):
            event = msgspec.structs.replace(event, generation=event.generation + self.generations_from)
        if isinstance(event, HELD) and self._group.rank != LEADER:
            # Bounded: the leader's caller may never make this call.
            held_s = held_until_s(event, event.at_s, self._group.hold_s) - event.at_s
            self._loop.call_later(held_s + TIMER_MIN_S, self._heard, context=self._context)
        if isinstance(event, events.RoomFailed | events.RoomRefused):
            # Ranks vote on the cause; its message differs between them.
            self._calls.note_prefill(event.request_id, event.cause)
            LOG.warning(
                "a prefill failed for this rank",
                rank=self._group.rank, request_id=event.request_id, generation=event.generation, cause=event.cause,
            )  # fmt: skip
        elif isinstance(event, events.PromptHanded):
            self._answers[event.op] = event.error
        elif isinstance(event, events.WriterLost):
            LOG.warning(
                "a prefill is out of reach of this rank", rank=self._group.rank, peer=event.writer, cause=event.cause
            )
        if self._driver.is_caught_up:
            self._receive(event)
        else:
            # The agreement does not know yet what the core makes of this turn: an abort would miss a request that
            # arrives in it, and the end of an early use its operation.
            self._held.append(event)

    def _receive(self, event: Event) -> None:
        try:
            self._agreement.receive(event)
            self._heard()
        except BaseException as error:
            # The agreement may hold the event already, and the ranks would take it: raising it to a caller, which then
            # withdraws its request, would leave an event without its id. So the engine breaks, and every call ends.
            self._on_broken(error)
            if not isinstance(error, Exception):
                raise

    def take_now(self, event: Event) -> None:
        """As `post`: a rank does not step its core without a vote, so the event takes effect later."""
        self.post(event)

    def stop(self) -> None:
        """Take no more events, since this rank's engine broke or ends; a last vote informs the other ranks."""
        self._driver.stop()
        if self._phase is RankPhase.VOTING:
            self._agreement.has_broken = True
            self._ask_for_turn()

    def stepped(self, event: Event, given: list[Command], error: str = "") -> None:
        """See `Watcher`."""
        if isinstance(event, events.RequestArrived) and not error:
            self._calls.adopt(event.request_id, event.request_number)
        self._agreement.stepped(event, given, error)

    def after_drain(self) -> None:
        """Handle events taken by the core; the last event of a turn ends it."""
        if self._driver.is_caught_up and (self._in_turn or self._phase is RankPhase.ALONE):
            self._end_turn()

    def statistics(self) -> dict[str, int | str]:
        """Return rank, ranks, phase, epoch, turns, votes, slots (in use), losses (of a rank)."""
        return {
            "rank": self._group.rank,
            "ranks": self._group.ranks,
            "phase": self._phase.value,
            "epoch": self._channel.epoch,
            "turns": self.turns,
            "votes": self._channel.votes,
            "slots": self._agreement.slots_taken,
            "losses": self.losses,
        }

    # --- Turns ---

    def _heard(self) -> None:
        if self._phase is RankPhase.CLOSED:
            return
        for refusal in self._agreement.take_refusals(self.clock()):
            self._refuse(refusal)
        if self._agreement.has_news:
            self._ask_for_turn()

    def _ask_for_turn(self) -> None:
        if self._phase is RankPhase.VOTING and self._group.rank != LEADER:
            if not self._has_wished and not self._in_turn and not self._openings:
                self._has_wished = True
                self._channel.wish()
        elif not self._is_called:
            # After the other callbacks of this turn of the loop, so that their events share one vote.
            self._is_called = True
            self._loop.call_soon(self._begin_turn, context=self._context)

    def _begin_turn(self) -> None:
        """Begin the next turn if there are events and no turn is under way."""
        self._is_called = False
        if self._in_turn or not (self._driver.is_caught_up or self._agreement.has_broken):
            return
        if self._phase is RankPhase.ALONE:
            self._take_turn_alone()
        elif self._phase is RankPhase.VOTING and self._group.rank == LEADER:
            self._open_turn()
        elif self._phase is RankPhase.VOTING and self._openings:
            self._agreement.take_opening(opening := self._openings.popleft())
            self._vote(opening)

    def _open_turn(self) -> None:
        agreement, now_s = self._agreement, self.clock()
        due_s = agreement.next_deadline_s()
        is_due = due_s is not None and due_s <= now_s
        is_quiet = agreement.is_idle and self.core.is_idle and not agreement.is_whole
        if agreement.has_news or agreement.has_broken or self._is_wished or is_due or is_quiet:
            self._is_wished = False
            opening = agreement.open_turn(now_s)
            self._channel.open_turn(opening)
            self._vote(opening)
        else:
            self._arm(due_s, now_s)

    def _vote(self, opening: Opening) -> None:
        self._in_turn = self._is_voting = True
        self._has_wished = False
        self.turns += 1
        self._clock_offset_s = opening.at_s - self.clock()
        vote = self._channel.vote(opening.turn, self._agreement.cast())
        vote.add_done_callback(partial(self._voted, opening, self.clock()))

    def _voted(self, opening: Opening, cast_at_s: float, vote: asyncio.Future[SlotValues]) -> None:
        self._is_voting = False
        self.vote_s.observe(self.clock() - cast_at_s)
        failed = None if vote.cancelled() else vote.exception()
        if self._phase is not RankPhase.VOTING or opening.epoch != self._channel.epoch or vote.cancelled():
            return
        if failed is not None:
            # This turn never ends: the group ends as soon as the lost rank is known.
            self._channel.vote_failed(opening.turn, str(failed))
            return
        try:
            decision = self._agreement.decide(vote.result())
        except (RankBroken, RanksDiverged) as error:
            self._phase = RankPhase.CLOSED
            self._channel.leave()
            self._on_broken(error)
            return
        if decision.all_leave and not self._left.done():
            self._phase = RankPhase.CLOSED
            self._channel.leave()
            self._left.set_result(None)
            return
        self._follow(decision)

    def _follow(self, decision: Decision) -> None:
        """Pass the agreed events to the core."""
        self._in_turn = True
        for refusal in decision.refusals:
            self._refuse(refusal)
        for event in decision.events:
            self._driver.post(self._in_words(event))
        if self._driver.is_caught_up:
            self._end_turn()

    def _end_turn(self) -> None:
        self._in_turn = False
        self._is_called = True
        self._loop.call_soon(self._begin_turn, context=self._context)
        while self._held:
            self._receive(self._held.popleft())
        self._heard()
        # Waiting for a core that is caught up could not end within the turn.
        self._calls.after_drain()

    def _refuse(self, refusal: Refusal) -> None:
        call = refusal.call
        if isinstance(call, events.PagesOffered):
            # A cache may decline any page. No rank has begun to read them.
            LOG.info("an offer was declined, because the ranks did not all make it", detail=refusal.detail)
            declined = len(call.pages)
            self._calls.tell(commands.ReportOffered(offer=call.offer, written=0, present=0, declined=declined))
        elif isinstance(call, events.ShareRequested):
            LOG.info("a read by a peer was refused, because not all ranks were asked", detail=refusal.detail)
            self._calls.tell(commands.ReportHinted(call=call.call, outcome="rejected", page_count=0))
        elif isinstance(call, events.RequestArrived) and self._calls.number_of(call.request_id) == call.request_number:
            self._calls.tell(
                commands.ReportFailed(request_id=call.request_id, cause=refusal.cause, detail=refusal.detail)
            )

    def _arm(self, due_s: float | None, now_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due_s is not None:
            self._timer = self._loop.call_later(max(due_s - now_s, TIMER_MIN_S), self._begin_turn)

    # --- Alone ---

    def _in_words(self, event: Event) -> Event:
        if isinstance(event, events.AbortRequested) and event.cause == LOST_RANK and self.lost is not None:
            return msgspec.structs.replace(event, cause=str(self.lost))
        if isinstance(event, events.PromptHanded):
            own = self._answers.pop(event.op, "")
            return msgspec.structs.replace(event, error=own or event.error) if event.error else event
        return event

    def _take_turn_alone(self) -> None:
        agreement, now_s = self._agreement, self.clock() + self._clock_offset_s
        due_s = self.core.next_deadline_s()
        if agreement.has_news or (due_s is not None and due_s <= now_s):
            agreement.open_turn(now_s)
            self._follow(agreement.decide(agreement.cast()))
        elif agreement.is_idle and self.core.is_idle:
            self._phase = RankPhase.FORMING
            self._tasks.spawn(self._restart(), name="begin again")
        else:
            self._arm(due_s, now_s)

    async def _restart(self) -> None:
        await self._renew()
        self._calls.after_drain()
        if self._group.group is None:
            self._channel.settled()

    # --- Callbacks of the channel ---

    def group_formed(self, epoch: int) -> None:
        """See `RankOwner`."""
        self._agreement.epoch = epoch
        self._phase = RankPhase.VOTING
        self._openings.clear()
        self._in_turn = self._has_wished = self._is_wished = False
        self.lost = None
        self._calls.drop_cause = "aborted"
        if not self._formed.done():
            self._formed.set_result(None)
        self._heard()

    def turn_opened(self, opening: Opening) -> None:
        """See `RankOwner`."""
        self._openings.append(opening)
        self._begin_turn()

    def turn_wished(self) -> None:
        """See `RankOwner`."""
        self._is_wished = True
        self._ask_for_turn()

    def rank_refused(self, cause: str) -> None:
        """See `RankOwner`."""
        if not self._formed.done():
            self._formed.set_exception(InvalidConfig(f"rank 0 refuses rank {self._group.rank}: {cause}"))

    def rank_lost(self, rank: int, cause: str) -> None:
        """See `RankOwner`."""
        if self._phase is RankPhase.FORMING:
            # Nothing is in flight, so all ranks try again.
            self._channel.settled()
        elif self._phase is RankPhase.VOTING:
            # The last agreement may reach this rank slightly after the end of another rank.
            self._loop.call_later(LAST_VOTE_S if self._is_voting else 0.0, self._lose, RankLost(rank=rank, cause=cause))

    def _lose(self, lost: RankLost) -> None:
        if self._phase is not RankPhase.VOTING:
            return
        if not self._driver.is_caught_up:
            # A request that arrives in this turn is not live before the core has taken it, so it would not be aborted.
            self._loop.call_soon(self._lose, lost)
            return
        if self._agreement.is_leaving and not self._left.done():
            self._left.set_result(None)
        self._phase = RankPhase.ALONE
        self.losses += 1
        self._in_turn = self._is_voting = False
        self.lost = lost
        self._calls.drop_cause = str(lost)
        self._calls.fail_flushes(lost)
        self._formed = self._loop.create_future()
        for refusal in self._agreement.go_solo():
            self._refuse(msgspec.structs.replace(refusal, cause=str(lost)))
        self._ask_for_turn()
