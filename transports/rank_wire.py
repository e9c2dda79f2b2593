"""The words of the rank channel: small frames between the leader of a decode instance and its other ranks.

A frame is a little-endian u32 length and one msgpack array `[tag, field, …]`, decoded strictly. The votes themselves do
not travel here: they are an all-reduce.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import struct
from typing import Annotated

import msgspec

from tidekv.states.agreement import Opening
from tidekv.states.errors import RemoteProtocolError

VERSION = 2
FRAME_BYTES_MAX = 64 * 1024 * 1024
LENGTH = struct.Struct("<I")

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=255)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Cause = Annotated[str, msgspec.Meta(max_length=4096)]


class RankMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One frame."""


class Challenge(RankMessage, frozen=True, tag="challenge"):
    """The leader's first frame: prove that you know the secret of this group."""

    nonce: bytes


class Join(RankMessage, frozen=True, tag="join"):
    """A rank is here. `settings` is a digest of everything that its core is configured by; `epoch` its last one."""

    version: Count
    rank: Rank
    ranks: Rank
    epoch: Count
    settings: bytes
    proof: bytes


class Settled(RankMessage, frozen=True, tag="settled"):
    """Nothing of an earlier epoch is in flight on this rank: it can be part of a new group."""


class Form(RankMessage, frozen=True, tag="form"):
    """Form the group of this epoch, by the store at this port of the leader. No other group has this name."""

    epoch: Count
    store_port: Count
    name: Name


class Formed(RankMessage, frozen=True, tag="formed"):
    """This rank has formed the group of this epoch."""

    epoch: Count


class Turn(RankMessage, frozen=True, tag="turn"):
    """The leader opens a turn."""

    opening: Opening


class Wish(RankMessage, frozen=True, tag="wish"):
    """A rank has news: it wants a turn."""

    epoch: Count


class Beat(RankMessage, frozen=True, tag="beat"):
    """The sender lives, and has cast its vote for turn `turn` of `epoch`."""

    epoch: Count
    turn: Count


class VoteFailed(RankMessage, frozen=True, tag="vote_failed"):
    """The all-reduce of a turn ended in an error on this rank."""

    epoch: Count
    turn: Count
    cause: Cause


class Lost(RankMessage, frozen=True, tag="lost"):
    """A rank of the group is out of reach: this epoch is over."""

    epoch: Count
    rank: Rank
    cause: Cause


class Refused(RankMessage, frozen=True, tag="refused"):
    """The leader does not take this rank, and why."""

    cause: Cause


AnyRankMessage = Challenge | Join | Settled | Form | Formed | Turn | Wish | Beat | VoteFailed | Lost | Refused

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyRankMessage] = msgspec.msgpack.Decoder(AnyRankMessage)


def proof_of(secret: str, nonce: bytes, rank: int) -> bytes:
    """What shows that a rank knows the secret, without telling it."""
    return hmac.digest(secret.encode(), nonce + rank.to_bytes(4, "little"), hashlib.sha256)


def encode(message: RankMessage) -> bytes:
    """The frame of a message."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


async def read(reader: asyncio.StreamReader) -> AnyRankMessage:
    """The next message. Raises RemoteProtocolError for what is no frame, IncompleteReadError at the end."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if not 0 < length <= FRAME_BYTES_MAX:
        raise RemoteProtocolError(f"a rank announces a frame of {length} bytes; {FRAME_BYTES_MAX} are allowed")
    body = await reader.readexactly(length)
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise RemoteProtocolError(f"a rank sent a frame that is no message: {error}") from error
