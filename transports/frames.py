"""Frames on a stream: a little-endian u32 length, then one msgpack value, decoded strictly.

A length is checked before any buffer is allocated for it. Nothing is ever unpickled or evaluated.
"""

from __future__ import annotations

import struct
from typing import Final, TypeVar

import msgspec

from tidekv.states.errors import RemoteProtocolError

LENGTH = struct.Struct("<I")
ERROR_CHARACTERS_MAX = 300
"""Maximum length of a decoder's error text, which may quote the peer."""

NO_MESSAGE: Final = (msgspec.DecodeError, ValueError, TypeError, OverflowError, RecursionError)
"""Errors of a decoder for bytes that are no message."""

Message = TypeVar("Message")


def body_length(prefix: bytes, *, frame_bytes_max: int) -> int:
    """Return the length that a frame's first four bytes announce. Raises RemoteProtocolError if it is out of bounds."""
    if len(prefix) != LENGTH.size:
        raise RemoteProtocolError(f"a frame starts with {LENGTH.size} bytes of length, got {len(prefix)}")
    (length,) = LENGTH.unpack(prefix)
    if not 0 < length <= frame_bytes_max:
        raise RemoteProtocolError(f"peer announces a frame of {length} bytes; 1 to {frame_bytes_max} are allowed")
    return int(length)


def one_line(text: str, *, characters_max: int) -> str:
    """Return text as one printable line for logs: unprintable characters escaped, cut to `characters_max`. Idempotent.

    A peer chooses part of the text that is logged: a newline in it would forge an entry, an escape sequence would reach
    the terminal.
    """
    if not text.isprintable():
        # Cut first: escapes are up to ten times as long.
        text = "".join(
            character if character.isprintable() else character.encode("unicode_escape").decode()
            for character in text[:characters_max]
        )
    return text if len(text) <= characters_max else text[: characters_max - 1] + "…"


def decode(decoder: msgspec.msgpack.Decoder[Message], body: bytes) -> Message:
    """Return the message of one frame's body. Raises RemoteProtocolError for any other bytes."""
    try:
        return decoder.decode(body)
    except NO_MESSAGE as error:
        raise refusal_of(body, error) from error


def refusal_of(body: bytes, error: Exception) -> RemoteProtocolError:
    """Return the error for a frame's body that raised one of NO_MESSAGE."""
    why = one_line(str(error), characters_max=ERROR_CHARACTERS_MAX)
    return RemoteProtocolError(f"peer sent a frame of {len(body)} bytes that is no message: {why}")
