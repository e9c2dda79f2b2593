"""Votes on calls: whether the callers on all ranks have made the same arrival, finish, retract, offer or read.

The leader names its calls in its own order, in the frame that opens a turn; only that order counts. A call that the
caller on another rank has not made yet is held back on all ranks until it has been, or until the hold time or the
deadline of the request is over: then the call is refused on all ranks, with the number of a rank that lacked it. Calls
of one name with different contents are refused too.

Device pages that a caller lends or offers are those of its own rank: ranks agree on their number.

The callers of a read are the ranks of another decode worker, each of which reads from the rank at its place.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from tidekv.states import events

if TYPE_CHECKING:
    from tidekv.states.events import Event
    from tidekv.states.ranks.votes import VoteVector

Call: TypeAlias = (
    "events.RequestArrived | events.FinishRequested | events.RetractRequested | events.RetractedDropped"
    " | events.PagesOffered | events.ShareRequested"
)
CALLS = (
    events.RequestArrived,
    events.FinishRequested,
    events.RetractRequested,
    events.RetractedDropped,
    events.PagesOffered,
    events.ShareRequested,
)
"""Calls that a caller makes on every rank."""
CallName: TypeAlias = "tuple[type[Event], str]"

OWN_FIELDS: dict[str, object] = {
    "keys": b"",
    "rest": b"",
    "lent_pages": (),
    "lent_components": {},
    "pages": (),
    "offered_components": {},
    "offer": 0,
    "call": 0,
}
"""Fields of calls that the leader's frame does not carry, with their empty value. Each rank has its own: tokens are the
same on all, but need not travel; pages, and numbers of offers and reads, are not.
"""
SHARE_HOLD_S = 1.0
"""Maximum seconds for which a read waits for the ranks of its reader, which by default wait no longer for pages."""
ABORTED = -1
PRESENT = 256
"""Values from here on are contents; smaller ones name a rank whose caller has not made the call."""


class Refusal(msgspec.Struct, frozen=True):
    """A call that never reached the core; `cause` and `detail` are for the caller."""

    call: Call
    cause: str
    detail: str


def name_of(call: Call) -> CallName:
    """The name of a call on all ranks: a request has at most one call of a kind at a time, and so has an offer of the
    same pages, or a read.
    """
    if isinstance(call, events.ShareRequested):
        return type(call), call.read
    return type(call), call.content if isinstance(call, events.PagesOffered) else call.request_id


def with_content(offer: events.PagesOffered) -> events.PagesOffered:
    """Return the offer with its name on all ranks: what it offers, but not where it lies."""
    components = sorted((name, len(pages)) for name, pages in offer.offered_components.items())
    words = hashlib.sha256(f"{len(offer.pages)} {components} {offer.namespace}".encode())
    words.update(offer.keys)
    return msgspec.structs.replace(offer, content=words.hexdigest())


def without_own_fields(event: Event) -> Event:
    """Return a call as the leader's frame carries it."""
    empty = {name: value for name, value in OWN_FIELDS.items() if name in event.__struct_fields__}
    return msgspec.structs.replace(event, **empty) if isinstance(event, CALLS) else event


def content_of(call: Call) -> int:
    """A digest of everything in a call that must be the same on all ranks."""
    if isinstance(call, events.RequestArrived):
        prompt, how = (call.prompt_tokens, call.namespace, call.prefills), (call.priority, call.cache, call.early)
        lent = (len(call.lent_pages), call.held_pages)
        plain = zlib.crc32(repr((*prompt, *how, call.can_recompute, call.tokens_max, *lent)).encode())
        return zlib.crc32(call.rest, zlib.crc32(call.keys, plain))
    if isinstance(call, events.FinishRequested | events.RetractRequested):
        return zlib.crc32(call.keys, zlib.crc32(repr((call.tokens, call.component_pages)).encode()))
    if isinstance(call, events.ShareRequested):
        return zlib.crc32(call.keys, zlib.crc32(call.namespace.encode()))
    return 0


def held_until_s(call: Call, from_s: float, hold_s: float) -> float:
    """Return until when a call waits for the callers of all ranks: for the hold time, an arrival no longer than until
    its deadline, and a read no longer than its reader.
    """
    until_s = from_s + (min(hold_s, SHARE_HOLD_S) if isinstance(call, events.ShareRequested) else hold_s)
    return min(until_s, call.deadline_at_s) if isinstance(call, events.RequestArrived) else until_s


class CallVote:
    """One call that the leader has named. `leaders` is its event, without tokens.

    The value of the first slot is ABORTED, a rank where the call is missing, or PRESENT plus the digest of the
    contents. That of the second is the negative of the latter.
    """

    __slots__ = ("abort_cause", "call", "leaders", "named_at_s", "number", "refusal", "slots")

    def __init__(self, number: int, vote_vector: VoteVector, leaders: Call, *, rank: int, at_s: float) -> None:
        self.number = number
        self.leaders = leaders
        self.call: Call | None = None
        """This rank's own event."""
        self.named_at_s = at_s
        self.slots = (vote_vector.open(self, rank), vote_vector.open(self))
        self.refusal: Refusal | None = None
        self.abort_cause = ""
        """Why the caller on this rank aborts the call; empty if it does not."""

    def make(self, vote_vector: VoteVector, call: Call) -> None:
        """Record that the caller on this rank has made the call."""
        self.call = call
        content = PRESENT + content_of(call)
        vote_vector.set(self.slots[0], content)
        vote_vector.set(self.slots[1], -content)

    def abort(self, vote_vector: VoteVector, cause: str) -> None:
        """Record that the caller on this rank aborts the call."""
        self.abort_cause = cause
        vote_vector.set(self.slots[0], ABORTED)

    def is_decidable(self, vote_vector: VoteVector, at_s: float, hold_s: float) -> bool:
        """Whether the call can be decided: all have made it, one has aborted it, or the hold time is over."""
        value = vote_vector.agreed(self.slots[0])
        return value >= PRESENT or value == ABORTED or at_s >= self.held_until_s(hold_s)

    def held_until_s(self, hold_s: float) -> float:
        """Return until when it waits for the callers of all ranks, by the leader's clock."""
        return held_until_s(self.leaders, self.named_at_s, hold_s)

    def decide(self, vote_vector: VoteVector, at_s: float) -> list[Event]:
        """The event of the call, with the leader's numbers. If the call is refused, sets `refusal` instead."""
        value, negative = (vote_vector.agreed(slot) for slot in self.slots)
        call = self.call
        if value == -negative and call is not None:
            ours = {name: getattr(call, name) for name in OWN_FIELDS if name in call.__struct_fields__}
            return [msgspec.structs.replace(self.leaders, at_s=at_s, **ours)]
        if value == ABORTED:
            self.refusal = Refusal(call or self.leaders, "aborted", "before all ranks had taken it")
        elif value < PRESENT:
            self.refusal = Refusal(call or self.leaders, "ranks differ", f"rank {value} did not make the call in time")
        else:
            self.refusal = Refusal(
                call or self.leaders, "ranks differ", "the callers of the ranks gave it different contents"
            )
        if isinstance(self.leaders, events.RequestArrived | events.PagesOffered | events.ShareRequested):
            return []
        # The request is live, and the ranks do not agree on what it leaves: it is dropped on all of them.
        return [events.AbortRequested(at_s=at_s, request_id=self.leaders.request_id, cause=self.refusal.detail)]

    def close(self, vote_vector: VoteVector) -> None:
        """See `VoteItem`."""
        for slot in self.slots:
            vote_vector.close(slot)
