"""Which prompt's claim gets which room, against a model that is too simple to be wrong."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tidekv.states.handover.room_claims import DECLINE_KEPT_S, MISMATCH_S, RoomClaims

NAMES, DIGESTS = st.sampled_from(["r1", "r2"]), st.sampled_from([b"a", b"b", b"c"])
DECLINES_MAX = 3


class Claims(RuleBasedStateMachine):
    """Rooms and claims are (kind, number, name, digest): a pair that differs in the last two is a prompt mixed up."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self.numbers = itertools.count()
        self.shut: set[Any] = set()
        self.rooms: list[Any] = []
        self.waiting: list[Any] = []
        self.since_s: dict[Any, float] = {}
        self.declined: dict[tuple[str, bytes], float] = {}
        self.claims: RoomClaims[Any, Any] = RoomClaims(
            is_open=lambda room: room not in self.shut, declines_max=DECLINES_MAX
        )

    def new(self, kind: str, name: str, digest: bytes) -> Any:
        made = (kind, next(self.numbers), name, digest)
        self.since_s[made] = self.now_s
        return made

    @rule(name=NAMES, digest=DIGESTS)
    def open(self, name: str, digest: bytes) -> None:
        room = self.new("room", name, digest)
        claim = self.claims.open(name, digest, room, self.now_s)
        self.declined.pop((name, digest), None)
        expected = next((one for one in self.waiting if one[2:] == (name, digest)), None)
        assert claim == expected
        if claim is None:
            self.rooms.append(room)
        else:
            self.waiting.remove(claim)

    @rule(name=NAMES, digest=DIGESTS)
    def claim(self, name: str, digest: bytes) -> None:
        claim = self.new("claim", name, digest)
        room = self.claims.claim(name, digest, claim, self.now_s)
        open_rooms = [one for one in self.rooms if one[2:] == (name, digest) and one not in self.shut]
        assert room == (open_rooms[-1] if open_rooms else None)
        if room is not None:
            self.rooms.remove(room)
            return
        until_s = self.claims.declined_until_s(name, digest, self.now_s)
        expected_s = self.declined.pop((name, digest), 0.0)
        assert until_s == (expected_s if expected_s > self.now_s else None)
        self.waiting.append(claim)

    @rule(name=NAMES, digest=DIGESTS)
    def decline(self, name: str, digest: bytes) -> None:
        ended = self.claims.decline(name, digest, self.now_s)
        assert ended == next((one for one in self.waiting if one[2:] == (name, digest)), None)
        if ended is not None:
            self.waiting.remove(ended)
            return
        self.declined.pop((name, digest), None)
        self.declined[name, digest] = self.now_s + DECLINE_KEPT_S
        if len(self.declined) > DECLINES_MAX:
            del self.declined[next(iter(self.declined))]

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        if self.waiting:
            claim = data.draw(st.sampled_from(self.waiting))
            self.waiting.remove(claim)
            self.claims.withdraw(claim[2], claim)
            self.claims.withdraw(claim[2], claim)

    @rule(data=st.data(), forgets=st.booleans())
    def end_room(self, data: st.DataObject, forgets: bool) -> None:
        if self.rooms:
            room = data.draw(st.sampled_from(self.rooms))
            self.shut.add(room)
            if forgets:
                self.rooms.remove(room)
                self.claims.close(room[2], room)

    @rule(seconds=st.sampled_from([0.1, MISMATCH_S, DECLINE_KEPT_S]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def a_mismatch_is_a_room_beside_a_claim_of_its_name(self) -> None:
        late_s = self.now_s - MISMATCH_S
        names = {claim[2] for claim in self.waiting if self.since_s[claim] <= late_s}
        expected = {
            room for room in self.rooms if room not in self.shut and room[2] in names and self.since_s[room] <= late_s
        }
        assert set(self.claims.mismatched(self.now_s)) == expected
        assert self.claims.claim_count == len(self.waiting)
        assert sorted(self.claims.claims()) == sorted(self.waiting)


TestClaims = Claims.TestCase
