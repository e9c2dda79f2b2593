"""Vote items for operations and requests: what the ranks must agree on before their cores learn of it.

A command or an event of the core, the same on all ranks, opens a vote item, which takes slots of the vote vector. The
item encodes this rank's own outcomes as slot values, and decodes the reduced values into the events that every core
takes. Texts in these events are built from the values, so they are the same on every rank; details stay in the log of
the rank that failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states import commands, events

if TYPE_CHECKING:
    from tidekv.states.commands import OperationCommand
    from tidekv.states.events import Event
    from tidekv.states.ranks.votes import VoteVector

NO_ERROR = 255
COUNT_MAX = 1 << 40
WRITTEN_BITS = 20
WRITTEN_MAX = (1 << WRITTEN_BITS) - 1
ABSTAINS = 1 << 50
"""Value of an offer on the ranks that do not make it, above every answer."""
LOST_RANK = "a rank was lost"
NOT_TAKEN = "the answer to the first rank"
"""Error of an offer, for which that rank has words."""
CAUSES = ("aborted", "cancelled by the caller", "engine closed", LOST_RANK)
"""Causes of an abort. A slot holds an index into them; any other cause counts as the first."""


def has_failed(event: Event) -> bool:
    """Whether an outcome is a failure."""
    return isinstance(event, events.CommandRaised) or bool(getattr(event, "error", ""))


def encode_end(count: int, rank: int, *, failed: bool) -> int:
    """The slot value of an ended operation: above 0, ordered by count, then by the lowest rank with an error."""
    return (min(max(count, 0), COUNT_MAX) << 8 | (rank if failed else NO_ERROR)) + 1


def decode_end(value: int) -> tuple[int, str]:
    """Count and error of an operation that has ended on all ranks, from the minimum of their values."""
    count, culprit = (value - 1) >> 8, (value - 1) & 0xFF
    return count, "" if culprit == NO_ERROR else f"failed on rank {culprit}"


class OperationVote:
    """The end of an operation on all ranks: it ends with the last of them, and with the result of the worst.

    The value is 0 until the operation has ended on this rank, then that of `encode_end`. A copy by layer has a second
    slot, the number of leading layers in place on this rank: a layer is in place once it is on every rank. A copy that
    has ended well has all of them; one that has failed gets no more.
    """

    __slots__ = ("is_over", "kind", "layers_slot", "number", "op", "slot")

    def __init__(self, number: int, vote_vector: VoteVector, command: OperationCommand) -> None:
        self.number = number
        self.op = command.op
        self.kind = type(command)
        self.slot = vote_vector.open(self)
        by_layer = isinstance(command, commands.CopyPages) and command.by_layer
        self.layers_slot = vote_vector.open(self) if by_layer else None
        self.is_over = False
        """Whether the operation has ended on all ranks: the item is closed then."""

    def receive(self, vote_vector: VoteVector, rank: int, event: Event) -> None:
        """Take the outcome on this rank, or layers of a copy; only the first outcome counts."""
        if isinstance(event, events.LayersCopied):
            assert self.layers_slot is not None, "only a copy by layer reports layers"
            vote_vector.set(self.layers_slot, max(event.layers, vote_vector.value(self.layers_slot)))
        elif not vote_vector.value(self.slot):
            count = next((getattr(event, name) for name in ("found", "valid", "stored") if hasattr(event, name)), 0)
            if isinstance(event, events.PagesStored):
                count = max(count, 0) << WRITTEN_BITS | min(max(event.written, 0), WRITTEN_MAX)
            if self.kind in (commands.CopyPages, commands.SharePages):
                # The fewest intact pages of all ranks count: every rank drops the same pages from host memory.
                intact = getattr(event, "intact", None)
                count = COUNT_MAX if intact is None else intact
            failed = has_failed(event)
            vote_vector.set(self.slot, encode_end(count, rank, failed=failed))
            if self.layers_slot is not None and not failed:
                vote_vector.set(self.layers_slot, COUNT_MAX)

    def decide(self, vote_vector: VoteVector, at_s: float) -> list[Event]:
        """See `VoteItem`."""
        value = vote_vector.agreed(self.slot)
        if not value:
            layers = 0 if self.layers_slot is None else vote_vector.agreed(self.layers_slot)
            return [events.LayersCopied(at_s=at_s, op=self.op, layers=layers)] if layers else []
        self.is_over = True
        count, error = decode_end(value)
        kind = self.kind
        if kind is commands.ReportEarly:
            return [events.EarlyUseEnded(at_s=at_s, op=self.op, error=error)]
        if kind is commands.QueryStorage:
            return [events.StorageAnswered(at_s=at_s, op=self.op, found=count, error=error)]
        if kind is commands.FetchPages:
            return [events.PagesFetched(at_s=at_s, op=self.op, valid=count, error=error)]
        if kind is commands.StorePages:
            # `written` is that of a rank that has stored the fewest pages: it only counts.
            return [
                events.PagesStored(
                    at_s=at_s, op=self.op, stored=count >> WRITTEN_BITS, written=count & WRITTEN_MAX, error=error
                )
            ]
        if kind is commands.ProbeStorage:
            return [events.StorageProbed(at_s=at_s, op=self.op, error=error)]
        if kind is commands.Recompute:
            return [events.Recomputed(at_s=at_s, op=self.op, error=error)]
        return [events.CopyEnded(at_s=at_s, op=self.op, error=error, intact=None if count >= COUNT_MAX else count)]

    def close(self, vote_vector: VoteVector) -> None:
        """See `VoteItem`."""
        vote_vector.close(self.slot)
        if self.layers_slot is not None:
            vote_vector.close(self.layers_slot)


class OfferVote:
    """The answer to an offer of a prompt to a successor, which the first rank makes for all ranks.

    The value is 0 until that rank has the answer; the others abstain.
    """

    __slots__ = ("is_over", "number", "op", "slot")

    def __init__(self, number: int, vote_vector: VoteVector, command: OperationCommand) -> None:
        self.number = number
        self.op = command.op
        self.slot = vote_vector.open(self)
        self.is_over = False
        """Whether the answer is known on all ranks: the item is closed then."""

    def receive(self, vote_vector: VoteVector, rank: int, event: Event) -> None:
        """Take the outcome on this rank; only the first one counts."""
        if vote_vector.value(self.slot):
            return
        if rank:
            vote_vector.set(self.slot, ABSTAINS)
            return
        counts, refuses = 0, False
        if isinstance(event, events.PromptHanded):
            there, brought = (min(max(count, 0), WRITTEN_MAX) for count in (event.there, event.brought))
            counts, refuses = there << WRITTEN_BITS | brought, event.refuses
        vote_vector.set(self.slot, (counts << 2 | refuses << 1 | has_failed(event)) + 1)

    def decide(self, vote_vector: VoteVector, at_s: float) -> list[Event]:
        """See `VoteItem`."""
        value = vote_vector.agreed(self.slot)
        if not value:
            return []
        self.is_over = True
        # If all abstain, the rank that offers is lost, and this one votes alone.
        counts, flags = divmod(value - 1, 4) if value != ABSTAINS else (0, 3)
        return [
            events.PromptHanded(
                at_s=at_s,
                op=self.op,
                there=counts >> WRITTEN_BITS,
                brought=counts & WRITTEN_MAX,
                error=NOT_TAKEN if flags & 1 else "",
                refuses=bool(flags & 2),
            )
        ]

    def close(self, vote_vector: VoteVector) -> None:
        """See `VoteItem`."""
        vote_vector.close(self.slot)


class RequestVote:
    """Calls for a live request: an abort by any caller, growth as far as all callers have grown.

    The value of the first slot is the number of reserve pages taken so far or, below zero, the cause of an abort; that
    of the second is the number of pages that all callers want.
    """

    __slots__ = ("_reported", "_taken", "early_op", "number", "request_id", "slots")

    def __init__(self, number: int, vote_vector: VoteVector, request_id: str) -> None:
        self.number = number
        self.request_id = request_id
        self.slots = (vote_vector.open(self), vote_vector.open(self))
        self.early_op = 0
        """Operation of its last early READY; 0 if it had none."""
        self._taken = 0
        self._reported = 0

    def abort(self, vote_vector: VoteVector, cause: str) -> None:
        """Record that the caller on this rank aborts."""
        number = CAUSES.index(cause) if cause in CAUSES else 0
        vote_vector.set(self.slots[0], min(-1 - number, vote_vector.value(self.slots[0])))

    def grow(self, vote_vector: VoteVector, page_count: int, wanted: int) -> None:
        """Record that the caller on this rank took pages of its reserve, and wants more."""
        self._taken += page_count
        if vote_vector.value(self.slots[0]) >= 0:
            vote_vector.set(self.slots[0], self._taken)
        vote_vector.set(self.slots[1], max(wanted, vote_vector.value(self.slots[1])))

    def decide(self, vote_vector: VoteVector, at_s: float) -> list[Event]:
        """See `VoteItem`."""
        before, taken = self._reported, vote_vector.agreed(self.slots[0])
        wanted = vote_vector.agreed(self.slots[1])
        if before < 0:
            return []
        self._reported = taken
        if taken < 0:
            return [events.AbortRequested(at_s=at_s, request_id=self.request_id, cause=CAUSES[-1 - taken])]
        if wanted:
            # Each wish is granted once; what this caller wants beyond it stays in the slot for the next vote.
            vote_vector.reset(self.slots[1], max(vote_vector.value(self.slots[1]) - wanted, 0))
        if taken == before and not wanted:
            return []
        return [events.GrowthTaken(at_s=at_s, request_id=self.request_id, page_count=taken - before, wanted=wanted)]

    def close(self, vote_vector: VoteVector) -> None:
        """See `VoteItem`."""
        for slot in self.slots:
            vote_vector.close(slot)
