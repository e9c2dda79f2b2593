"""How messages become frames on a stream: a little-endian u32 length, then one msgpack value, decoded strictly.

A length is judged before a byte is set aside for it. Nothing is ever unpickled or evaluated.
"""

from __future__ import annotations

import struct
from typing import TypeVar

import msgspec

from tidekv.states.errors import RemoteProtocolError

LENGTH = struct.Struct("<I")

Message = TypeVar("Message")


def frame(body: bytes) -> bytes:
    """The frame of an encoded message."""
    return LENGTH.pack(len(body)) + body


def body_length(prefix: bytes, *, frame_bytes_max: int) -> int:
    """The length that a frame's first four bytes announce. Raises RemoteProtocolError where it is out of bounds."""
    if len(prefix) != LENGTH.size:
        raise RemoteProtocolError(f"a frame starts with {LENGTH.size} bytes of length, got {len(prefix)}")
    (length,) = LENGTH.unpack(prefix)
    if not 0 < length <= frame_bytes_max:
        raise RemoteProtocolError(f"peer announces a frame of {length} bytes; 1 to {frame_bytes_max} are allowed")
    return int(length)


def decode(decoder: msgspec.msgpack.Decoder[Message], body: bytes) -> Message:
    """The message of one frame's body. Raises RemoteProtocolError, whatever the bytes are."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise RemoteProtocolError(f"peer sent a frame of {len(body)} bytes that is no message: {error}") from error
