"""The embedder's values beside the first token (logprobs, seeds), as bytes in an `Aux` message.

A link passes them on as bytes: only the end that takes them for a room decodes them. Keys are text at every depth.
Python hashes text with a secret of the process, but numbers, and the tuples that arrays become, without one: a peer
that chose such keys could make one map take minutes. msgspec cannot express that rule for nested values of any kind, so
the bytes are walked first, which makes no objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from tidekv.states.errors import InvalidRequest, RemoteProtocolError
from tidekv.transports import frames

AUX_BYTES_MAX: Final = 64 * 1024
AUX_VALUES_MAX: Final = 16 * 1024
"""Maximum number of values, maps, lists and keys included. The walk over them takes a few milliseconds."""
AUX_DEPTH_MAX: Final = 32
"""Maximum depth of maps and lists, the outermost map included."""
_FIXED: Final = dict.fromkeys((0xC0, 0xC2, 0xC3), 0) | {
    0xCA: 4,
    0xCB: 8,
    0xCC: 1,
    0xCD: 2,
    0xCE: 4,
    0xCF: 8,
    0xD0: 1,
    0xD1: 2,
    0xD2: 4,
    0xD3: 8,
}
"""Bytes behind the tag of values of a fixed size: none, booleans, floats, integers."""
_SIZED: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""Bytes of the length behind the tag of bytes and text."""
_COUNTED: Final = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
"""Bytes of the count behind the tag of lists and maps."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[dict[str, Any]] = msgspec.msgpack.Decoder(dict[str, Any])


def encode_aux(values: Mapping[str, Any]) -> bytes:
    """Return the bytes of an embedder's values. Raises InvalidRequest for values that the other end would refuse."""
    try:
        raw = _encoder.encode(dict(values))
        decode_aux(raw)
    except (TypeError, OverflowError, RecursionError, ValueError, RemoteProtocolError) as error:
        raise InvalidRequest(f"aux holds a value that cannot be sent: {error}") from error
    return raw


def decode_aux(raw: bytes) -> dict[str, Any]:
    """Return the values of an `Aux`; the caller owns them. Raises RemoteProtocolError."""
    if len(raw) > AUX_BYTES_MAX:
        raise RemoteProtocolError(f"aux has {len(raw)} bytes, {AUX_BYTES_MAX} are allowed")
    _check_keys(raw)
    return frames.decode(_decoder, raw)


def _check_keys(raw: bytes) -> None:
    """Raise RemoteProtocolError for a key that is not text, and beyond the limits. Incomplete bytes are left to the
    decoder.
    """
    at, values, end = 0, 0, len(raw)
    # Of each open map and list: the values still to come, and whether it is a map, whose keys are every other one.
    open_: list[tuple[int, bool]] = []
    while at < end:
        tag = raw[at]
        at += 1
        values += 1
        if values > AUX_VALUES_MAX:
            raise RemoteProtocolError(f"aux has more than {AUX_VALUES_MAX} values")
        is_key = bool(open_) and open_[-1][1] and not open_[-1][0] % 2
        if is_key and not (0xA0 <= tag <= 0xBF or 0xD9 <= tag <= 0xDB):
            raise RemoteProtocolError("aux has a map with a key that is not text")
        if open_:
            open_[-1] = (open_[-1][0] - 1, open_[-1][1])
        children, is_map = 0, False
        if 0x80 <= tag <= 0x9F:
            is_map = tag <= 0x8F
            children = (tag & 0x0F) * (2 if is_map else 1)
        elif 0xA0 <= tag <= 0xBF:
            at += tag & 0x1F
        elif tag in _FIXED:
            at += _FIXED[tag]
        elif tag in _SIZED:
            width = _SIZED[tag]
            at += width + int.from_bytes(raw[at : at + width], "big")
        elif tag in _COUNTED:
            width, is_map = _COUNTED[tag], tag >= 0xDE
            children = int.from_bytes(raw[at : at + width], "big") * (2 if is_map else 1)
            at += width
        elif 0xC0 < tag < 0xE0:
            raise RemoteProtocolError("aux has a value of a kind that is not passed on: an extension or no kind")
        if children:
            open_.append((children, is_map))
            if len(open_) > AUX_DEPTH_MAX:
                raise RemoteProtocolError(f"aux is nested more than {AUX_DEPTH_MAX} deep")
        while open_ and not open_[-1][0]:
            open_.pop()
