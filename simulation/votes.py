"""How a rank's core gets its events: at once if the rank is alone, otherwise by votes of all ranks of the group.

Frames and votes take virtual time, different on every rank, so a rank may be far behind. The decisions of all ranks
must be equal, event by event. If a rank dies, the others end their requests without it, and all start again with empty
cores once it is back.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import msgspec

from simulation.memory import Violation
from simulation.schedule import Link
from tidekv.states import events
from tidekv.states.ranks.agreement import Agreement, Opening

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simulation.rank import Rank
    from simulation.world import World
    from tidekv.states.commands import Command
    from tidekv.states.ranks.votes import SlotValues

HOLD_S = 2.0
"""Seconds for which a call waits for the callers of all ranks."""


class Alone:
    """The only rank: its core takes each event at once, and is told the time at its deadlines."""

    is_idle = True

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._clock_at_s = float("inf")
        self._is_stepping = False

    def tell(self, event: events.Event) -> None:
        """Pass an event to the core."""
        if self._is_stepping:
            raise Violation("a command was answered before its step was over")
        self._is_stepping = True
        self._rank.take(event)
        self._is_stepping = False
        self._arm_clock()

    def stepped(self, event: events.Event, given: list[Command]) -> None:
        """Do nothing: there is no other rank."""

    def tell_refusals(self) -> None:
        """Do nothing: no call waits for another rank."""

    def _arm_clock(self) -> None:
        rank, due_s = self._rank, self._rank.core.next_deadline_s()
        if due_s is not None and due_s < self._clock_at_s:
            late_s = rank.delay() * 10 if rank.faults.hits("clock_is_late") else 0.0
            self._clock_at_s = max(due_s, rank.now_s) + late_s
            rank.schedule.at(self._clock_at_s, self._tick, self._clock_at_s)

    def _tick(self, at_s: float) -> None:
        if at_s != self._clock_at_s:
            return  # An earlier deadline has come in between.
        self._clock_at_s = float("inf")
        due_s = self._rank.core.next_deadline_s()
        if due_s is not None and due_s <= self._rank.now_s:
            self.tell(events.ClockAdvanced(at_s=self._rank.now_s))
        else:
            self._arm_clock()


class Member:
    """One rank of several, in one epoch of the group."""

    def __init__(self, rank: Rank, turns: Turns) -> None:
        self._rank = rank
        self._turns = turns
        self._wake_at_s = float("inf")
        self.agreement = Agreement(rank.core, rank=rank.number, epoch=turns.epoch, hold_s=HOLD_S)

    @property
    def is_idle(self) -> bool:
        """Whether no vote is open."""
        return self.agreement.is_idle

    def tell(self, event: events.Event) -> None:
        """Pass an event to the agreement."""
        if not self._rank.is_dead:
            self.agreement.receive(event)
            self.tell_refusals()

    def stepped(self, event: events.Event, given: list[Command]) -> None:
        """Pass a step of the core to the agreement, whose votes its commands open and close."""
        self.agreement.stepped(event, given)

    def tell_refusals(self) -> None:
        """Take the calls that end without a vote, and ask for a turn if there is something to vote on."""
        rank = self._rank
        for refusal in self.agreement.take_refusals(rank.now_s):
            rank.refused(refusal)
        if rank.is_solo:
            rank.schedule.after(0.0, self.take_solo_turn)
        elif self.agreement.has_news:
            self._turns.wish(rank)

    def decide(self, reduced: Sequence[int]) -> None:
        """Apply the result of a vote."""
        decision = self.agreement.decide(reduced)
        for event in decision.events:
            self._rank.take(event)
        for refusal in decision.refusals:
            self._rank.refused(refusal)
        if self.agreement.has_news:
            self.tell_refusals()

    def go_solo(self) -> None:
        """End everything without the other ranks, because one of them is lost."""
        for refusal in self.agreement.go_solo():
            self._rank.refused(refusal)
        self.take_solo_turn()

    def take_solo_turn(self) -> None:
        """Decide alone, until nothing is in flight."""
        rank = self._rank
        if not rank.is_solo or rank.is_dead:
            return
        agreement, due_s = self.agreement, rank.core.next_deadline_s()
        if agreement.has_news or (due_s is not None and due_s <= rank.now_s):
            agreement.open_turn(rank.now_s)
            self.decide(agreement.cast())
        due_s = rank.core.next_deadline_s()
        if due_s is not None and due_s < self._wake_at_s:
            self._wake_at_s = max(due_s, rank.now_s) + 0.001
            rank.schedule.at(self._wake_at_s, self._wake, self._wake_at_s)
        self._turns.try_to_form()

    def _wake(self, at_s: float) -> None:
        if at_s == self._wake_at_s:
            self._wake_at_s = float("inf")
            self.take_solo_turn()


class Turns:
    """The turns of all ranks, and what their cores took. With a single rank there are none."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.epoch = 0
        self.count = 0
        self.events = 0
        """Events that the first of the ranks took, in all epochs."""
        self.digest = 0
        """CRC of every event and command, in order."""
        self._wires: list[Link] = []
        self._votes: dict[int, SlotValues] = {}
        self._log: list[int] = []
        self._is_open = False
        self._wake_at_s = float("inf")

    def stepped(self, rank: Rank, word: int) -> None:
        """Note an event that a rank's core took, with its commands. Raises a Violation if another one took others."""
        if rank.is_solo:
            return
        if rank.events == len(self._log) or rank.is_alone:
            if not rank.is_alone:
                self._log.append(word)
            self.events += 1
            self.digest = zlib.crc32(word.to_bytes(4, "little"), self.digest)
        elif self._log[rank.events] != word:
            raise Violation(f"rank {rank.number} took another event at place {rank.events}")

    @property
    def is_whole(self) -> bool:
        """Whether no rank is lost."""
        return not any(rank.is_dead or rank.is_solo for rank in self._world.ranks)

    @property
    def _leader(self) -> Member:
        driver = self._world.ranks[0].driver
        assert isinstance(driver, Member), "there are several ranks"
        return driver

    def wish(self, rank: Rank) -> None:
        """Inform the leader that a rank has news."""
        delay_s = 0.0 if rank.number == 0 else rank.delay()
        self._world.schedule.after(delay_s, self._open, self.epoch)

    def _wake(self, at_s: float) -> None:
        if at_s == self._wake_at_s:
            self._wake_at_s = float("inf")
            self._open(self.epoch)
            self._arm()

    def _arm(self) -> None:
        leader, schedule = self._world.ranks[0], self._world.schedule
        # The end of an open turn arms the next one.
        is_over = self._is_open or leader.is_dead or leader.is_solo
        due_s = None if is_over else self._leader.agreement.next_deadline_s()
        if due_s is not None and max(due_s, schedule.now_s) < self._wake_at_s:
            late_s = leader.delay() * 10 if leader.faults.hits("clock_is_late") else 0.0
            self._wake_at_s = max(due_s, schedule.now_s) + 0.001 + late_s
            schedule.at(self._wake_at_s, self._wake, self._wake_at_s)

    def _open(self, epoch: int) -> None:
        """Open a turn, unless one is open or there is no reason for one."""
        if self._is_open or epoch != self.epoch or not self.is_whole:
            return
        ranks, schedule, agreement = self._world.ranks, self._world.schedule, self._leader.agreement
        due_s = agreement.next_deadline_s()
        is_due = due_s is not None and due_s <= schedule.now_s
        has_news = any(rank.driver.agreement.has_news for rank in ranks if isinstance(rank.driver, Member))
        is_quiet = agreement.is_idle and ranks[0].core.is_idle and not agreement.is_whole
        if not (has_news or is_due or is_quiet):
            return
        self._is_open = True
        self.count += 1
        self._votes = {}
        frame = msgspec.msgpack.encode(agreement.open_turn(schedule.now_s))
        self._wires = self._wires or [Link(schedule) for _ in ranks]
        for rank, wire in zip(ranks, self._wires, strict=True):
            wire.send(0.0 if rank.number == 0 else rank.delay(), self._opened, rank, frame, self.epoch)

    def _opened(self, rank: Rank, frame: bytes, epoch: int) -> None:
        if epoch != self.epoch or rank.is_dead or rank.is_solo:
            return
        assert isinstance(rank.driver, Member)
        if rank.number:
            rank.driver.agreement.take_opening(msgspec.msgpack.decode(frame, type=Opening))
        self._votes[rank.number] = rank.driver.agreement.cast()
        ranks, schedule = self._world.ranks, self._world.schedule
        if len(self._votes) < len(ranks):
            return
        if len({len(words) for words in self._votes.values()}) > 1:
            raise Violation("votes have different shapes")
        reduced = list(map(min, *self._votes.values()))
        arriving = [schedule.now_s + other.delay() for other in ranks]
        for other, at_s in zip(ranks, arriving, strict=True):
            schedule.at(at_s, self._reduced, other, reduced, epoch)
        schedule.at(max(arriving), self._closed, epoch)

    def _reduced(self, rank: Rank, reduced: list[int], epoch: int) -> None:
        if epoch == self.epoch and not rank.is_dead and not rank.is_solo:
            assert isinstance(rank.driver, Member)
            rank.driver.decide(reduced)

    def _closed(self, epoch: int) -> None:
        # A real leader opens the next turn at once. Frames keep their order, so no rank is overtaken either way.
        if epoch == self.epoch and self.is_whole:
            self._is_open = False
            self._open(epoch)
            self._arm()

    def try_to_form(self) -> None:
        """Form a new group once every rank has nothing in flight."""
        ranks = self._world.ranks
        if not all(not rank.is_dead and rank.is_solo and rank.is_settled for rank in ranks):
            return
        self.epoch += 1
        self._is_open = False
        self._log = []
        for rank in ranks:
            rank.begin_epoch()
        self._world.has_formed()
