"""Messages of the rank channel: small frames between the leader of a decode instance and its other ranks.

A message is one msgpack array `[tag, field, …]` in a frame of `frames`. The votes themselves are messages of gloo and
do not travel here.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from typing import Annotated

import msgspec

from tidekv.states.ranks.agreement import Opening
from tidekv.transports import frames

VERSION = 1
FRAME_BYTES_MAX = 64 * 1024 * 1024
NONCE_BYTES = 32
JOIN_BYTES_MAX = 4096
"""Maximum size of a frame before the leader has admitted a rank."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=255)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
CAUSE_CHARACTERS_MAX = 4096
Cause = Annotated[str, msgspec.Meta(max_length=CAUSE_CHARACTERS_MAX)]


class RankMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One frame."""


class Challenge(RankMessage, frozen=True, tag="challenge"):
    """The leader's first frame: a nonce for the proof of the group's secret."""

    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class Join(RankMessage, frozen=True, tag="join"):
    """A rank's request to join. `settings` is a digest of everything that configures its core, `epoch` its last
    epoch.
    """

    version: Count
    rank: Rank
    ranks: Rank
    epoch: Count
    settings: bytes
    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    proof: bytes


class Welcome(RankMessage, frozen=True, tag="welcome"):
    """The leader has admitted this rank, and proves that it knows the secret, too."""

    proof: bytes


class Settled(RankMessage, frozen=True, tag="settled"):
    """Nothing of an earlier epoch is in flight on this rank: it can join a new group.

    `epoch` is its last one; the epoch that is being formed means that this rank could not form it.
    """

    epoch: Count


class Form(RankMessage, frozen=True, tag="form"):
    """Form the group of this epoch, with the leader's store at this port. The name is unique among all groups."""

    epoch: Count
    store_port: Count
    name: Name


class Formed(RankMessage, frozen=True, tag="formed"):
    """This rank has formed the group of this epoch."""

    epoch: Count


class RankTurn(RankMessage, frozen=True, tag="turn"):
    """The leader opens a turn."""

    opening: Opening


class Wish(RankMessage, frozen=True, tag="wish"):
    """A rank has new events and requests a turn."""

    epoch: Count


class Beat(RankMessage, frozen=True, tag="beat"):
    """Sign of life; the sender has cast its vote for turn `turn` of `epoch`."""

    epoch: Count
    turn: Count


class VoteFailed(RankMessage, frozen=True, tag="vote_failed"):
    """The vote of a turn ended in an error on this rank."""

    epoch: Count
    turn: Count
    cause: Cause

    def __post_init__(self) -> None:
        _clean_cause(self)


class Lost(RankMessage, frozen=True, tag="lost"):
    """A rank of the group is lost: this epoch is over."""

    epoch: Count
    rank: Rank
    cause: Cause

    def __post_init__(self) -> None:
        _clean_cause(self)


class RankRefused(RankMessage, frozen=True, tag="refused"):
    """The leader refuses this rank, for this cause."""

    cause: Cause

    def __post_init__(self) -> None:
        _clean_cause(self)


AnyRankMessage = (
    Challenge | Join | Welcome | Settled | Form | Formed | RankTurn | Wish | Beat | VoteFailed | Lost | RankRefused
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyRankMessage] = msgspec.msgpack.Decoder(AnyRankMessage)


def _clean_cause(message: VoteFailed | Lost | RankRefused) -> None:
    """Replace the cause by its one-line form, cut to the frame's limit, at both ends."""
    clean = frames.one_line(message.cause, characters_max=CAUSE_CHARACTERS_MAX)
    if clean != message.cause:
        msgspec.structs.force_setattr(message, "cause", clean)


def proof_of(key: bytes, role: bytes, leader: bytes, follower: bytes, rank: int) -> bytes:
    """Return the proof of a role ("join" or "welcome") that it knows the secret whose stretched key this is, for the
    nonces of both ends: HMAC-SHA256. It does not reveal the secret.
    """
    return hmac.digest(key, b"tidekv rank " + role + leader + follower + rank.to_bytes(4, "little"), hashlib.sha256)


def encode(message: RankMessage) -> bytes:
    """Return the frame of a message."""
    body = _encoder.encode(message)
    return frames.LENGTH.pack(len(body)) + body


async def read(reader: asyncio.StreamReader, *, frame_bytes_max: int = FRAME_BYTES_MAX) -> AnyRankMessage:
    """Return the next message. Raises RemoteProtocolError for a malformed frame, IncompleteReadError at the end."""
    prefix = await reader.readexactly(frames.LENGTH.size)
    length = frames.body_length(prefix, frame_bytes_max=frame_bytes_max)
    return frames.decode(_decoder, await reader.readexactly(length))
