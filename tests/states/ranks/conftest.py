"""Cores and agreements of some ranks, stepped together by hand, vote by vote."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest

from tidekv.states import commands, events
from tidekv.states.core import Core
from tidekv.states.errors import RanksDiverged
from tidekv.states.ranks.agreement import Agreement, Decision, Opening
from tidekv.states.ranks.call_votes import without_own_fields
from tidekv.states.settings import CoreSettings
from tidekv.states.types import FULL

SETTINGS = CoreSettings(
    page_size=1,
    key_bytes=1,
    device_pages=16,
    host_pages=16,
    prefetch_threshold_tokens=1,
    growth_reserve_pages=1,
    fetch_run_pages=4,
)


class Ranks:
    """Cores and agreements of some ranks, stepped together by hand."""

    settings = SETTINGS

    def __init__(self, ranks: int = 2, settings: CoreSettings = SETTINGS) -> None:
        self.cores = [Core(settings) for _ in range(ranks)]
        self.agreements = [Agreement(core, rank=rank, hold_s=2.0) for rank, core in enumerate(self.cores)]
        self.given: list[list[commands.Command]] = [[] for _ in range(ranks)]
        self.taken: list[events.Event] = []
        self.now_s = 0.0

    def turn(self, before_result: Callable[[], None] = lambda: None) -> Decision:
        """One turn of all ranks; the decision of rank 0, which is that of all. `before_result` is called when all have
        voted, and none knows the result.
        """
        frame = msgspec.msgpack.encode(self.agreements[0].open_turn(self.now_s))
        for agreement in self.agreements[1:]:
            agreement.take_opening(msgspec.msgpack.decode(frame, type=Opening))
        votes = [list(agreement.cast()) for agreement in self.agreements]
        assert len({len(vote) for vote in votes}) == 1
        before_result()
        reduced = [min(words) for words in zip(*votes, strict=True)]
        decisions = [agreement.decide(reduced) for agreement in self.agreements]
        for rank, decision in enumerate(decisions):
            # Each rank has the tokens and pages of its own caller.
            assert [*map(without_own_fields, decision.events)] == [*map(without_own_fields, decisions[0].events)]
            for event in decision.events:
                given = self.cores[rank].step(event)
                self.agreements[rank].stepped(event, given)
                self.given[rank] += given
            self.cores[rank].check()
        self.taken = decisions[0].events
        return decisions[0]

    def receive(self, kind: type[events.Event], *, ranks: Sequence[int] | None = None, **fields: object) -> None:
        """The same event on some ranks, or all."""
        for rank in range(len(self.cores)) if ranks is None else ranks:
            self.agreements[rank].receive(kind(at_s=self.now_s, **fields))

    def arrive(self, request_id: str = "a", tokens: bytes = b"abcd", **fields: object) -> None:
        """Callers of all ranks make a request."""
        for rank in range(len(self.cores)):
            self.receive(
                events.RequestArrived,
                ranks=[rank],
                **{
                    "request_id": request_id,
                    "request_number": 7 + rank,
                    "keys": tokens,
                    "prompt_tokens": len(tokens),
                    "generation": 100 * rank,
                    **fields,
                },
            )

    def take(self, kind: type[commands.Command], **fields: object) -> commands.Command:
        """The only command of this kind with these fields, the same on all ranks. Copies are those of the full KV."""

        def fits(wish: commands.Command) -> bool:
            wanted = {"component": FULL, **fields} if kind is commands.CopyPages else fields
            return isinstance(wish, kind) and all(getattr(wish, name) == value for name, value in wanted.items())

        found = [[wish for wish in given if fits(wish)] for given in self.given]
        assert all(wishes == found[0] for wishes in found), found
        assert len(found[0]) == 1, found[0]
        for rank, given in enumerate(self.given):
            self.given[rank] = [wish for wish in given if not fits(wish)]
        return found[0][0]

    def ask_storage(self) -> commands.QueryStorage:
        """A prompt arrives at a core with storage; returns the query that follows."""
        self.receive(events.StorageChanged, available=True)
        self.arrive()
        self.turn()
        query = self.take(commands.QueryStorage)
        assert isinstance(query, commands.QueryStorage)
        return query

    def room(self, kind: type[events.Event], *, ranks: Sequence[int] | None = None, **fields: object) -> None:
        """An event of the room of "a"."""
        self.receive(kind, ranks=ranks, request_id="a", generation=0, **fields)

    def make_ready(self, request_id: str = "a", tokens: bytes = b"abcd") -> None:
        """Restore a prompt by prefill only, without storage."""
        self.arrive(request_id, tokens)
        self.turn()
        for agreement in self.agreements:
            agreement.receive(events.PromiseSent(at_s=0.0, request_id="a", generation=0, writer="p", ranks=1))
        self.room(events.ChunkReceived, rank=0, span=0, first=0, count=len(tokens), last=True)
        self.room(events.AuxReceived, rank=0)
        self.turn()
        self.take(commands.SendPromise)
        self.take(commands.SendReceived)

    def types(self) -> list[str]:
        """What the cores took in the last turn."""
        return [type(event).__name__ for event in self.taken]

    def chunk(self, rank: int, first: int, count: int, *, last: bool, writer: int = 0, span: int = 0) -> None:
        """Pages of the room of "a" have come on one rank."""
        self.room(events.ChunkReceived, ranks=[rank], rank=writer, span=span, first=first, count=count, last=last)

    def sent(self, *at: int) -> None:
        """The promise of "a" is on its way on these ranks."""
        for rank in at:
            self.agreements[rank].receive(
                events.PromiseSent(at_s=0.0, request_id="a", generation=0, writer=f"p{rank}", ranks=1)
            )

    def diverged(self, *, whole: bool = False) -> set[str]:
        """What the ranks name when they vote next."""
        if not whole:
            self.receive(events.StorageChanged, available=True)
        with pytest.raises(RanksDiverged) as caught:
            self.turn()
        assert "ranks differ at turn" in str(caught.value)
        return set(caught.value.parts)


@pytest.fixture
def make_ranks() -> type[Ranks]:
    """`make_ranks(3)` has three ranks; `make_ranks.settings` are those of their cores."""
    return Ranks
