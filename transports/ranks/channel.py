"""The rank channel: who is there, when turns begin, who is lost, and when all form a group again.

Rank 0 leads: it listens, the others dial it. A group lives from its forming to the first loss:

    every rank joined and settled ──Form──▶ all formed ──▶ turns … ──a rank is lost──▶ every rank settles by itself
           ▲                                                                                        │
           └────────────────────── the lost one is back, everybody has settled ◀────────────────────┘

A rank is lost when its connection ends, when it is silent for too long, or when it does not vote in time. The leader
names it to all others. Who dials again after a loss is a rank of the next epoch, never of the one that is over.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import TYPE_CHECKING, Protocol

from tidekv.states.errors import RemoteProtocolError, TidekvError
from tidekv.states.ranks.agreement import LEADER
from tidekv.transports.ranks import wire as wire
from tidekv.transports.ranks.peer import RankPeer, greet
from tidekv.transports.ranks.vote_thread import VoteThread
from tidekv.transports.tasks import OwnedTasks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tidekv.states.ranks.agreement import Opening
    from tidekv.states.ranks.votes import SlotValues

LOG = logging.getLogger("tidekv.transports")
REDIAL_S_MAX = 1.0
STRANGERS_MAX = 64
"""Maximum number of connections that the leader has not let in yet; further ones are closed at once."""


class RankOwner(Protocol):
    """Whoever votes: the engine of this rank. Called on the loop."""

    def group_formed(self, epoch: int) -> None:
        """All ranks are there: begin with an empty core. The leader may open turns."""

    def turn_opened(self, opening: Opening) -> None:
        """A follower has the leader's frame."""

    def turn_wished(self) -> None:
        """A follower has news for the leader."""

    def rank_refused(self, cause: str) -> None:
        """The leader does not take this rank; it goes on trying."""

    def rank_lost(self, rank: int, cause: str) -> None:
        """The group is over: end everything, and tell `settled`."""


class RankChannel:
    """One rank's end of the channel, and its votes."""

    def __init__(
        self,
        owner: RankOwner,
        *,
        rank: int,
        ranks: int,
        address: str,
        secret: str,
        settings: bytes,
        silence_s: float,
        vote_timeout_s: float,
        group: ProcessGroup | None = None,
    ) -> None:
        """`group`: one that the embedder made, to vote in; None: one is made for each epoch. Raises InvalidConfig."""
        host, _, port = address.rpartition(":")
        self.epoch = 0
        self.is_formed = False
        self.turn = 0
        """The last turn that this rank has voted in."""
        self.group_name = ""
        """What the ranks of this epoch call themselves together; no other group anywhere has this name."""
        self._owner = owner
        self._rank = rank
        self._ranks = ranks
        self._host, self._port = host, int(port)
        self._secret = secret
        self._settings = settings
        self._silence_s = silence_s
        self._thread = VoteThread(rank=rank, ranks=ranks, host=host, timeout_s=vote_timeout_s)
        self._own_group = group is None
        if group is not None:
            self._thread.use(group)
        self._tasks = OwnedTasks(f"rank {rank}")
        self._peers: dict[int, RankPeer] = {}
        self._strangers = 0
        self._server: asyncio.Server | None = None
        self._is_settled = False
        self._is_forming = False
        self._formed_epoch = -1
        self._store_port = 0
        self._forming: asyncio.Future[None] | None = None
        """What the thread tries to form, which it cannot give up before its time is over."""

    @property
    def votes(self) -> int:
        """Votes so far."""
        return self._thread.votes

    async def start(self) -> None:
        """Listen, or dial until somebody listens. Raises OSError where the address cannot be listened at, and
        TransferFailed where there can be no store to form groups by.
        """
        self._thread.start()
        if self._rank == LEADER:
            if self._own_group:
                self._store_port = await self._thread.open_store()
            self._server = await asyncio.start_server(self._serve, self._host, self._port)
        else:
            self._tasks.spawn(self._follow(), name="follow the leader")
        self._tasks.spawn(self._beat(), name="beat")

    async def close(self) -> None:
        """Leave: the others see that this rank is gone."""
        if self._server is not None:
            self._server.close()
        for peer in list(self._peers.values()):
            peer.close()
        await self._tasks.close()
        await self._thread.close()

    # --- What the owner does ---

    def settled(self) -> None:
        """Nothing of an earlier epoch is in flight here."""
        self._is_settled = True
        self._tell_settled()

    def _tell_settled(self, _: object = None) -> None:
        """Say so as soon as the thread is free for the next group: one that is behind would never catch up."""
        if not self._is_settled or self.is_formed:
            return
        if self._forming is not None and not self._forming.done():
            self._forming.add_done_callback(self._tell_settled)
        elif self._rank == LEADER:
            self._form_if_all_are_there()
        else:
            self._say_to_leader(wire.Settled(self.epoch))

    def open_turn(self, opening: Opening) -> None:
        """Leader: tell all other ranks that a turn begins."""
        frame = wire.Turn(opening)
        for peer in self._peers.values():
            peer.say(frame)

    def leave(self) -> None:
        """All ranks leave together: nobody is lost who ends from now on."""
        self.is_formed = False

    def wish(self) -> None:
        """Follower: ask the leader for a turn."""
        self._say_to_leader(wire.Wish(self.epoch))

    def vote(self, turn: int, words: SlotValues) -> asyncio.Future[SlotValues]:
        """Take part in the vote of a turn. Raises TransferFailed; say so by `vote_failed`."""
        self.turn = turn
        return self._thread.reduce(words)

    def vote_failed(self, turn: int, cause: str) -> None:
        """The vote of a turn ended in an error: whoever is behind it is found and named, within the silence allowed."""
        if not self.is_formed:
            return
        if self._rank == LEADER:
            self._tasks.spawn(self._name_culprit(self.epoch, turn, cause), name="name who did not vote")
        else:
            self._say_to_leader(wire.VoteFailed(self.epoch, turn, cause))
            self._tasks.spawn(self._expect_a_name(self.epoch, cause), name="wait for who did not vote")

    # --- Losses ---

    def _lose(self, rank: int, cause: str) -> None:
        if not self.is_formed and not self._is_forming:
            return
        LOG.error("rank %s: rank %s is lost: %s", self._rank, rank, cause)
        self.is_formed = self._is_forming = self._is_settled = False
        for peer in self._peers.values():
            peer.is_settled = False
            if self._rank == LEADER:
                peer.say(wire.Lost(self.epoch, rank, cause))
        self._owner.rank_lost(rank, cause)

    async def _name_culprit(self, epoch: int, turn: int, cause: str) -> None:
        # A process that has ended closes its connection, one that hangs falls silent: both are seen where they are.
        await asyncio.sleep(self._silence_s)
        if epoch != self.epoch or not self.is_formed:
            return
        behind = [rank for rank, peer in self._peers.items() if (peer.epoch, peer.turn) < (epoch, turn)]
        self._lose(min(behind, default=LEADER), f"it did not vote in time ({cause})" if behind else cause)

    async def _expect_a_name(self, epoch: int, cause: str) -> None:
        await asyncio.sleep(2 * self._silence_s)
        if epoch == self.epoch and self.is_formed:
            self._lose(LEADER, f"it named nobody after a vote had failed ({cause})")

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._silence_s / 4)
            for peer in self._peers.values():
                peer.say(wire.Beat(self.epoch, self.turn))

    # --- The leader's side ---

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._strangers >= STRANGERS_MAX:
            writer.transport.abort()
            return
        self._strangers += 1
        self._tasks.spawn(self._take(reader, writer), name="a rank")

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = RankPeer(reader, writer, silence_s=self._silence_s)
        rank = -1
        try:
            try:
                join = await greet(peer, secret=self._secret, ranks=self._ranks, settings=self._settings)
            finally:
                self._strangers -= 1
            rank = join.rank
            peer.epoch = join.epoch
            if (before := self._peers.get(rank)) is not None:
                # It was started again before its end was seen.
                before.close()
                self._lose(rank, "it was started again")
            self._peers[rank] = peer
            while True:
                self._take_from(rank, peer, await peer.hear())
        except TidekvError as error:
            peer.close()
            if self._peers.get(rank) is peer:
                del self._peers[rank]
                self._lose(rank, str(error))
        except asyncio.CancelledError:
            peer.close()
            raise

    def _take_from(self, rank: int, peer: RankPeer, message: wire.AnyRankMessage) -> None:
        match message:
            case wire.Beat(epoch=epoch, turn=turn):
                peer.epoch, peer.turn = epoch, turn
            case wire.Wish(epoch=epoch):
                if epoch == self.epoch and self.is_formed:
                    self._owner.turn_wished()
            case wire.Settled(epoch=epoch):
                if self._is_forming and epoch == self.epoch:
                    self._lose(rank, "it could not form the group")
                peer.is_settled = True
                self._form_if_all_are_there()
            case wire.Formed(epoch=epoch):
                peer.formed_epoch = peer.epoch = epoch
                self._begin_if_all_have_formed()
            case wire.VoteFailed(epoch=epoch, turn=turn, cause=cause):
                if epoch == self.epoch:
                    self.vote_failed(turn, f"rank {rank}: {cause}")
            case _:
                raise RemoteProtocolError(f"rank {rank} sent {type(message).__name__}, which is the leader's to send")

    def _form_if_all_are_there(self) -> None:
        is_free = self._forming is None or self._forming.done()
        ready = self._is_settled and is_free and len(self._peers) == self._ranks - 1
        if ready and not self.is_formed and not self._is_forming and all(p.is_settled for p in self._peers.values()):
            self._is_forming = True
            self.epoch = max(self.epoch, 0, *(peer.epoch for peer in self._peers.values())) + 1
            self.group_name = f"{uuid.uuid4().hex}-{self.epoch}"
            # At once: who hears that this epoch is lost before he hears of it would wait for it without end.
            for peer in self._peers.values():
                peer.say(wire.Form(self.epoch, self._store_port, self.group_name))
            self._begin_forming(self.epoch, self._store_port)

    def _begin_forming(self, epoch: int, port: int) -> None:
        self._forming = self._thread.form(epoch, port) if self._own_group else None
        self._tasks.spawn(self._end_forming(epoch, self._forming), name="form the group")

    async def _end_forming(self, epoch: int, forming: asyncio.Future[None] | None) -> None:
        try:
            if forming is not None:
                await forming
        except TidekvError as error:
            if epoch == self.epoch and self._is_forming:
                self._lose(self._rank, f"it could not form the group: {error}")
            return
        if self._rank == LEADER:
            self._formed_epoch = epoch
            self._begin_if_all_have_formed()
        elif epoch == self.epoch and self._is_forming:
            # The leader's first frame may be on its way as soon as it hears this.
            self._begin()
            self._say_to_leader(wire.Formed(epoch))

    def _begin_if_all_have_formed(self) -> None:
        formed = [self._formed_epoch, *(peer.formed_epoch for peer in self._peers.values())]
        if self._is_forming and len(formed) == self._ranks and set(formed) == {self.epoch}:
            self._begin()

    def _begin(self) -> None:
        self._is_forming = False
        self.is_formed = True
        self.turn = 0
        self._owner.group_formed(self.epoch)

    # --- A follower's side ---

    def _say_to_leader(self, message: wire.RankMessage) -> None:
        if (leader := self._peers.get(LEADER)) is not None:
            leader.say(message)

    async def _follow(self) -> None:
        pause_s = 0.05
        while True:
            try:
                reader, writer = await asyncio.open_connection(self._host, self._port)
            except OSError:
                # Nobody listens there yet, or not any more.
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, REDIAL_S_MAX)
                continue
            leader = RankPeer(reader, writer, silence_s=self._silence_s)
            try:
                await self._join(leader)
                pause_s = 0.05
                while True:
                    self._take_from_leader(await leader.hear())
            except TidekvError as error:
                LOG.warning("rank %s: the link to the leader ended: %s", self._rank, error)
                self._lose(LEADER, str(error))
            finally:
                self._peers.pop(LEADER, None)
                leader.close()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, REDIAL_S_MAX)

    async def _join(self, leader: RankPeer) -> None:
        challenge = await leader.hear()
        if not isinstance(challenge, wire.Challenge):
            raise RemoteProtocolError(f"the leader began with {type(challenge).__name__} instead of Challenge")
        leader.say(
            wire.Join(
                wire.VERSION,
                self._rank,
                self._ranks,
                self.epoch,
                self._settings,
                wire.proof_of(self._secret, challenge.nonce, self._rank),
            )
        )
        self._peers[LEADER] = leader
        self._tell_settled()

    def _take_from_leader(self, message: wire.AnyRankMessage) -> None:
        match message:
            case wire.Beat():
                return
            case wire.Turn(opening=opening):
                if self.is_formed and opening.epoch == self.epoch:
                    self._owner.turn_opened(opening)
            case wire.Form(epoch=epoch, store_port=port, name=name):
                self.epoch, self.group_name, self._is_forming = epoch, name, True
                self._begin_forming(epoch, port)
            case wire.Lost(epoch=epoch, rank=rank, cause=cause):
                if epoch == self.epoch and not (self.is_formed or self._is_forming) and self._is_settled:
                    # It had given up forming before the leader did, which has forgotten that it settled.
                    self._tell_settled()
                elif epoch == self.epoch:
                    self._lose(rank, cause)
            case wire.Refused(cause=cause):
                self._owner.rank_refused(cause)
                raise RemoteProtocolError(f"the leader refuses this rank: {cause}")
            case _:
                raise RemoteProtocolError(f"the leader sent {type(message).__name__}, which is ours to send")
