"""One connection of the rank channel, and how the leader finds out whom it leads to."""

from __future__ import annotations

import asyncio
import hmac
import secrets

from tidekv.states.errors import LinkClosed, RemoteProtocolError
from tidekv.transports.ranks import wire as wire

OUTGOING_BYTES_MAX = 64 * 1024 * 1024


class RankPeer:
    """One connection of the channel."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, silence_s: float) -> None:
        self.epoch = 0
        self.turn = 0
        """The last turn that the other end has voted in."""
        self.is_settled = False
        self.formed_epoch = -1
        self._reader = reader
        self._writer = writer
        self._silence_s = silence_s

    def say(self, message: wire.RankMessage) -> None:
        """Queue a frame; one that goes nowhere is noticed by whoever reads."""
        if not self._writer.is_closing():
            if self._writer.transport.get_write_buffer_size() > OUTGOING_BYTES_MAX:
                self._writer.transport.abort()
                return
            self._writer.write(wire.encode(message))

    async def hear(self, *, frame_bytes_max: int = wire.FRAME_BYTES_MAX) -> wire.AnyRankMessage:
        """The next frame. Raises LinkClosed at the end, and when the other end is silent for too long."""
        try:
            async with asyncio.timeout(self._silence_s):
                message = await wire.read(self._reader, frame_bytes_max=frame_bytes_max)
        except TimeoutError:
            raise LinkClosed(f"silent for {self._silence_s:g} s") from None
        except (OSError, asyncio.IncompleteReadError) as error:
            raise LinkClosed(f"its connection ended ({type(error).__name__})") from error
        return message

    def close(self) -> None:
        """End the connection, with what was queued as far as it goes at once."""
        self._writer.close()


async def greet(peer: RankPeer, *, secret: str, ranks: int, settings: bytes) -> wire.Join:
    """The leader's first words to whoever dialled. Raises RemoteProtocolError, having told it why."""
    nonce = secrets.token_bytes(32)
    peer.say(wire.Challenge(nonce))
    join = await peer.hear(frame_bytes_max=wire.JOIN_BYTES_MAX)
    if not isinstance(join, wire.Join):
        raise RemoteProtocolError(f"a rank began with {type(join).__name__} instead of Join")
    cause = ""
    if not hmac.compare_digest(join.proof, wire.proof_of(secret, nonce, join.rank)):
        cause = "the secrets differ"
    elif join.version != wire.VERSION:
        cause = f"the versions differ: {wire.VERSION} and {join.version}"
    elif join.ranks != ranks or not 0 < join.rank < ranks:
        cause = f"the leader has {ranks} ranks, and this says that it is number {join.rank} of {join.ranks}"
    elif join.settings != settings:
        cause = "the ranks are configured differently: pools, page size and all settings must be equal"
    if cause:
        peer.say(wire.Refused(cause))
        raise RemoteProtocolError(cause)
    return join
