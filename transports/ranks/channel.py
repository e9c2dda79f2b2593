"""The rank channel: joins the ranks of one instance to a group, opens turns, and detects lost ranks.

Rank 0 leads: it listens, the others dial it. A group lives from its forming to the first loss:

    every rank joined and settled ──Form──▶ all formed ──▶ turns … ──a rank is lost──▶ every rank settles by itself
           ▲                                                                                        │
           └──────────────────── the lost rank has joined again, all have settled ◀─────────────────┘

A rank is lost when its connection ends, when it is silent for too long, or when it does not vote in time. The leader
names it to all others. A rank that dials again after a loss belongs to the next epoch, never to the one that is over.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tidekv.states.errors import InvalidConfig, LinkClosed, RemoteProtocolError, TidekvError
from tidekv.states.ranks.agreement import LEADER
from tidekv.transports.control.addresses import is_loopback
from tidekv.transports.control.challenge import stretched
from tidekv.transports.log import engine_log
from tidekv.transports.ranks import wire
from tidekv.transports.ranks.vote_thread import VoteThread
from tidekv.transports.tasks import OwnedTasks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tidekv.states.ranks.agreement import Opening
    from tidekv.states.ranks.votes import SlotValues

LOG = engine_log("tidekv.transports")
OUTGOING_BYTES_MAX = 64 * 1024 * 1024
REDIAL_S_MAX = 1.0
UNADMITTED_MAX = 64
"""Maximum number of connections that have not passed the leader's checks yet; further ones are closed at once."""


class RankOwner(Protocol):
    """Callbacks of the channel's owner, the engine of this rank. Called on the loop."""

    def group_formed(self, epoch: int) -> None:
        """All ranks have formed the group: start with an empty core. The leader may open turns."""

    def turn_opened(self, opening: Opening) -> None:
        """A follower has received the leader's opening of a turn."""

    def turn_wished(self) -> None:
        """A follower has requested a turn."""

    def rank_refused(self, cause: str) -> None:
        """The leader refuses this rank; the channel keeps trying."""

    def rank_lost(self, rank: int, cause: str) -> None:
        """The group is over: end everything in flight, then call `settled`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelOptions:
    """How the ranks of an instance reach one another, and for how long they wait."""

    address: str
    """host:port at which rank 0 listens; the others dial it."""
    secret: str
    silence_s: float
    """Seconds without a frame after which a rank is lost."""
    vote_timeout_s: float
    """Maximum seconds of each vote and of each forming."""
    group: ProcessGroup | None = None
    """The embedder's process group to vote in; None: one is made for each epoch."""


class RankChannel:
    """One rank's end of the channel, and its votes."""

    def __init__(
        self,
        owner: RankOwner,
        *,
        rank: int,
        ranks: int,
        settings: bytes,
        options: ChannelOptions,
    ) -> None:
        """`settings` is a digest of what must be equal on all ranks. Raises InvalidConfig."""
        host, _, port = options.address.rpartition(":")
        self.epoch = 0
        self.is_formed = False
        self.turn = 0
        """The last turn in which this rank has voted."""
        self.group_name = ""
        """Name of the group of this epoch, unique among all groups."""
        self._owner = owner
        self._rank = rank
        self._ranks = ranks
        self._address = options.address
        self._host, self._port = host, int(port)
        self._secret = options.secret
        self._key = b""
        self._settings = settings
        self._silence_s = options.silence_s
        self._thread = VoteThread(rank=rank, ranks=ranks, host=host, timeout_s=options.vote_timeout_s)
        self._makes_groups = options.group is None
        if options.group is not None:
            # Kept over all epochs: only the embedder can make another one.
            self._thread.use(options.group)
        self._tasks = OwnedTasks(f"rank {rank}")
        self._peers: dict[int, RankPeer] = {}
        self._unadmitted = 0
        self._server: asyncio.Server | None = None
        self._is_settled = False
        self._is_forming = False
        self._formed_epoch = -1
        self._store_port = 0
        self._forming: asyncio.Future[None] | None = None
        """The forming under way in the vote thread, which cannot be cancelled before its timeout."""

    @property
    def votes(self) -> int:
        """Number of votes so far."""
        return self._thread.votes

    async def start(self) -> None:
        """Listen, or dial until the leader listens.

        Raises InvalidConfig for an address of the network without a secret, OSError if the address cannot be listened
        at, TransferFailed if the store that forms groups cannot be opened.
        """
        if self._rank == LEADER and not self._secret and not await is_loopback(self._address):
            raise InvalidConfig(
                f"rank 0 cannot listen on {self._address}: without a secret, every program that reaches it could join "
                "the ranks. Give RankGroup a secret, or an address on 127.0.0.1"
            )
        self._key = await stretched(self._secret)
        self._thread.start()
        if self._rank == LEADER:
            if self._makes_groups:
                self._store_port = await self._thread.open_store()
            self._server = await asyncio.start_server(self._serve, self._host, self._port)
        else:
            self._tasks.spawn(self._follow(), name="follow the leader")
        self._tasks.spawn(self._beat(), name="beat")

    async def close(self) -> None:
        """Leave: the other ranks see the connection end."""
        if self._server is not None:
            self._server.close()
        for peer in list(self._peers.values()):
            peer.close()
        await self._tasks.close()
        await self._thread.close()

    # --- Calls of the owner ---

    def settled(self) -> None:
        """Record that nothing of an earlier epoch is in flight on this rank."""
        self._is_settled = True
        self._send_settled()

    def _send_settled(self, _: object = None) -> None:
        """Report this rank as settled, as soon as the vote thread is free for the next group.

        A rank reported earlier could be stuck in an old forming and would miss the new one.
        """
        if not self._is_settled or self.is_formed:
            return
        if self._forming is not None and not self._forming.done():
            self._forming.add_done_callback(self._send_settled)
        elif self._rank == LEADER:
            self._form_if_all_settled()
        else:
            self._send_to_leader(wire.Settled(self.epoch))

    def open_turn(self, opening: Opening) -> None:
        """Leader: send the opening of a turn to all other ranks."""
        frame = wire.RankTurn(opening)
        for peer in self._peers.values():
            peer.send(frame)

    def leave(self) -> None:
        """End the group in order, on all ranks together: connections that end from now on are not losses."""
        self.is_formed = False

    def wish(self) -> None:
        """Follower: request a turn from the leader."""
        self._send_to_leader(wire.Wish(self.epoch))

    def vote(self, turn: int, slots: SlotValues) -> asyncio.Future[SlotValues]:
        """Cast this rank's vote of a turn. The result arrives in `slots`, under MIN over all ranks.

        Raises TransferFailed; the caller then calls `vote_failed`.
        """
        self.turn = turn
        return self._thread.reduce(slots)

    def vote_failed(self, turn: int, cause: str) -> None:
        """Find the rank that made the vote of a turn fail, within `silence_s`, and report it as lost."""
        if not self.is_formed:
            return
        if self._rank == LEADER:
            self._tasks.spawn(self._find_late_rank(self.epoch, turn, cause), name="find the late rank")
        else:
            self._send_to_leader(wire.VoteFailed(self.epoch, turn, cause))
            self._tasks.spawn(self._expect_lost(self.epoch, cause), name="expect the lost rank")

    # --- Losses ---

    def _lose(self, rank: int, cause: str) -> None:
        if not self.is_formed and not self._is_forming:
            return
        LOG.error("a rank is lost", rank=self._rank, lost=rank, cause=cause)
        self.is_formed = self._is_forming = self._is_settled = False
        for peer in self._peers.values():
            peer.is_settled = False
            if self._rank == LEADER:
                peer.send(wire.Lost(self.epoch, rank, cause))
        self._owner.rank_lost(rank, cause)

    async def _find_late_rank(self, epoch: int, turn: int, cause: str) -> None:
        # A process that has ended closes its connection, and a hung one falls silent: both are found meanwhile by the
        # task that reads that connection, with a better cause.
        """Leader: report the lowest rank that did not vote in this turn as lost."""
        await asyncio.sleep(self._silence_s)
        if epoch != self.epoch or not self.is_formed:
            return
        behind = [rank for rank, peer in self._peers.items() if (peer.epoch, peer.turn) < (epoch, turn)]
        self._lose(min(behind, default=LEADER), f"it did not vote in time ({cause})" if behind else cause)

    async def _expect_lost(self, epoch: int, cause: str) -> None:
        """Follower: report the leader as lost if it names no lost rank in time."""
        await asyncio.sleep(2 * self._silence_s)
        if epoch == self.epoch and self.is_formed:
            self._lose(LEADER, f"it named no lost rank after a vote had failed ({cause})")

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._silence_s / 4)
            for peer in self._peers.values():
                peer.send(wire.Beat(self.epoch, self.turn))

    # --- Leader ---

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._unadmitted >= UNADMITTED_MAX:
            writer.transport.abort()
            return
        self._unadmitted += 1
        self._tasks.spawn(self._take(reader, writer), name="a rank")

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = RankPeer(reader, writer, silence_s=self._silence_s)
        rank = -1
        try:
            try:
                join = await admit(peer, key=self._key, ranks=self._ranks, settings=self._settings)
            finally:
                self._unadmitted -= 1
            rank = join.rank
            peer.epoch = join.epoch
            if (before := self._peers.get(rank)) is not None:
                # The rank was restarted before the end of its old connection was noticed.
                before.close()
                self._lose(rank, "it was started again")
            self._peers[rank] = peer
            while True:
                self._take_from(rank, peer, await peer.receive())
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
                # Settled in the epoch that is being formed means that this rank's forming has failed.
                if self._is_forming and epoch == self.epoch:
                    self._lose(rank, "it could not form the group")
                peer.is_settled = True
                self._form_if_all_settled()
            case wire.Formed(epoch=epoch):
                peer.formed_epoch = peer.epoch = epoch
                self._begin_if_all_have_formed()
            case wire.VoteFailed(epoch=epoch, turn=turn, cause=cause):
                if epoch == self.epoch:
                    self.vote_failed(turn, f"rank {rank}: {cause}")
            case _:
                raise RemoteProtocolError(f"rank {rank} sent {type(message).__name__}, which is the leader's to send")

    def _form_if_all_settled(self) -> None:
        is_free = self._forming is None or self._forming.done()
        ready = self._is_settled and is_free and len(self._peers) == self._ranks - 1
        if ready and not self.is_formed and not self._is_forming and all(p.is_settled for p in self._peers.values()):
            self._is_forming = True
            self.epoch = max(self.epoch, 0, *(peer.epoch for peer in self._peers.values())) + 1
            self.group_name = f"{uuid.uuid4().hex}-{self.epoch}"
            # Sent before anything else can fail: a rank that received Lost of this epoch before its Form would ignore
            # the loss and then wait for the epoch for ever.
            for peer in self._peers.values():
                peer.send(wire.Form(self.epoch, self._store_port, self.group_name))
            self._begin_forming(self.epoch, self._store_port)

    def _begin_forming(self, epoch: int, port: int) -> None:
        self._forming = self._thread.form(epoch, port) if self._makes_groups else None
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
            # Before Formed is sent: the leader may open the first turn as soon as it has received it.
            self._begin()
            self._send_to_leader(wire.Formed(epoch))

    def _begin_if_all_have_formed(self) -> None:
        formed = [self._formed_epoch, *(peer.formed_epoch for peer in self._peers.values())]
        if self._is_forming and len(formed) == self._ranks and set(formed) == {self.epoch}:
            self._begin()

    def _begin(self) -> None:
        self._is_forming = False
        self.is_formed = True
        self.turn = 0
        self._owner.group_formed(self.epoch)

    # --- Follower ---

    def _send_to_leader(self, message: wire.RankMessage) -> None:
        if (leader := self._peers.get(LEADER)) is not None:
            leader.send(message)

    async def _follow(self) -> None:
        pause_s = 0.05
        while True:
            try:
                reader, writer = await asyncio.open_connection(self._host, self._port)
            except OSError:
                # The leader does not listen yet, or has ended.
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, REDIAL_S_MAX)
                continue
            leader = RankPeer(reader, writer, silence_s=self._silence_s)
            try:
                await self._join(leader)
                pause_s = 0.05
                while True:
                    self._take_from_leader(await leader.receive())
            except TidekvError as error:
                LOG.warning("the link to the leader ended", rank=self._rank, cause=str(error))
                self._lose(LEADER, str(error))
            finally:
                self._peers.pop(LEADER, None)
                leader.close()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, REDIAL_S_MAX)

    async def _join(self, leader: RankPeer) -> None:
        challenge = await leader.receive()
        if not isinstance(challenge, wire.Challenge):
            raise RemoteProtocolError(f"the leader began with {type(challenge).__name__} instead of Challenge")
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        proofs = [wire.proof_of(self._key, role, challenge.nonce, nonce, self._rank) for role in (b"join", b"welcome")]
        leader.send(wire.Join(wire.VERSION, self._rank, self._ranks, self.epoch, self._settings, nonce, proofs[0]))
        welcome = await leader.receive(frame_bytes_max=wire.JOIN_BYTES_MAX)
        if isinstance(welcome, wire.RankRefused):
            self._take_from_leader(welcome)
        # Nothing else is taken before the proof: any program may answer at the address.
        if not isinstance(welcome, wire.Welcome) or not hmac.compare_digest(welcome.proof, proofs[1]):
            raise RemoteProtocolError("the leader did not prove that it knows the secret")
        self._peers[LEADER] = leader
        self._send_settled()

    def _take_from_leader(self, message: wire.AnyRankMessage) -> None:
        match message:
            case wire.Beat():
                return
            case wire.RankTurn(opening=opening):
                if self.is_formed and opening.epoch == self.epoch:
                    self._owner.turn_opened(opening)
            case wire.Form(epoch=epoch, store_port=port, name=name):
                self.epoch, self.group_name, self._is_forming = epoch, name, True
                self._begin_forming(epoch, port)
            case wire.Lost(epoch=epoch, rank=rank, cause=cause):
                if epoch == self.epoch and not (self.is_formed or self._is_forming) and self._is_settled:
                    # This rank's forming failed before the leader's did: the leader has reset the Settled it sent then.
                    self._send_settled()
                elif epoch == self.epoch:
                    self._lose(rank, cause)
            case wire.RankRefused(cause=cause):
                self._owner.rank_refused(cause)
                raise RemoteProtocolError(f"the leader refuses this rank: {cause}")
            case _:
                raise RemoteProtocolError(f"the leader sent {type(message).__name__}, which is ours to send")


class RankPeer:
    """One connection of the channel."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, silence_s: float) -> None:
        self.epoch = 0
        self.turn = 0
        """The last turn in which the other end has voted."""
        self.is_settled = False
        self.formed_epoch = -1
        self._reader = reader
        self._writer = writer
        self._silence_s = silence_s

    def send(self, message: wire.RankMessage) -> None:
        """Queue a frame. Errors are not raised here: the task that reads the connection gets them."""
        if not self._writer.is_closing():
            # A peer that does not read is cut off, which ends `receive` and so the membership of the rank.
            if self._writer.transport.get_write_buffer_size() > OUTGOING_BYTES_MAX:
                self._writer.transport.abort()
                return
            self._writer.write(wire.encode(message))

    async def receive(self, *, frame_bytes_max: int = wire.FRAME_BYTES_MAX) -> wire.AnyRankMessage:
        """Return the next frame. Raises LinkClosed at the end, and if the other end is silent for too long."""
        try:
            async with asyncio.timeout(self._silence_s):
                message = await wire.read(self._reader, frame_bytes_max=frame_bytes_max)
        except TimeoutError:
            raise LinkClosed(f"silent for {self._silence_s:g} s") from None
        except (OSError, asyncio.IncompleteReadError) as error:
            raise LinkClosed(f"its connection ended ({type(error).__name__})") from error
        return message

    def close(self) -> None:
        """Close the connection after sending what is queued."""
        self._writer.close()


async def admit(peer: RankPeer, *, key: bytes, ranks: int, settings: bytes) -> wire.Join:
    """Leader: challenge a connection, check its Join, and prove the secret in return.

    Raises RemoteProtocolError, after sending Refused with the cause.
    """
    nonce = secrets.token_bytes(wire.NONCE_BYTES)
    peer.send(wire.Challenge(nonce))
    join = await peer.receive(frame_bytes_max=wire.JOIN_BYTES_MAX)
    if not isinstance(join, wire.Join):
        raise RemoteProtocolError(f"a rank began with {type(join).__name__} instead of Join")
    cause = ""
    if not hmac.compare_digest(join.proof, wire.proof_of(key, b"join", nonce, join.nonce, join.rank)):
        cause = "the secrets differ"
    # The proof is checked first: without it no other field of the frame can be trusted.
    elif join.version != wire.VERSION:
        cause = f"the versions differ: {wire.VERSION} and {join.version}"
    elif join.ranks != ranks or not 0 < join.rank < ranks:
        cause = f"the leader has {ranks} ranks, and this one is configured as rank {join.rank} of {join.ranks}"
    elif join.settings != settings:
        cause = "the ranks are configured differently: pools, page size and all settings must be equal"
    if cause:
        peer.send(wire.RankRefused(cause))
        raise RemoteProtocolError(cause)
    peer.send(wire.Welcome(wire.proof_of(key, b"welcome", nonce, join.nonce, join.rank)))
    return join
