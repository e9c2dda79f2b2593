"""Envelope around NIXL's metadata: the name of its agent, and a digest.

NIXL may crash over a mangled blob, and cannot reuse a name that failed to load. So everything that can be checked is
checked before NIXL gets the blob. The envelope protects against mistakes; the link's challenge protects against malice.
"""

from __future__ import annotations

import hashlib
import struct

import msgspec

from tidekv.states.errors import RemoteProtocolError

NIXL_START = b"nixlSerDes|Agent"
"""First bytes of the metadata of NIXL 1.5, before the length and the bytes of the agent's name."""
NIXL_LENGTH = struct.Struct("<Q")


class Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """NIXL metadata as a peer sends it: the agent's name, NIXL's blob, and the SHA-256 of both."""

    name: str
    blob: bytes
    digest: bytes


def wrap(name: str, blob: bytes) -> bytes:
    """Return the envelope that a peer passes to `unwrap`."""
    return msgspec.msgpack.encode(Envelope(name=name, blob=blob, digest=_digest(name, blob)))


def unwrap(metadata: bytes, *, expected_name: str) -> bytes:
    """Return NIXL's blob. Raises RemoteProtocolError unless it is complete, and envelope and blob name the expected
    agent.
    """
    try:
        envelope = msgspec.msgpack.decode(metadata, type=Envelope)
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(f"metadata of {expected_name} cannot be read: {error}") from error
    if envelope.name != expected_name:
        raise RemoteProtocolError(f"metadata is of agent {envelope.name!r}, the peer's Hello names {expected_name!r}")
    if envelope.digest != _digest(envelope.name, envelope.blob):
        raise RemoteProtocolError(f"metadata of {expected_name} is damaged: its digest differs")
    if (inner := agent_name(envelope.blob)) not in (None, expected_name):
        # Loading it would replace the addresses of the peer with that name.
        raise RemoteProtocolError(f"metadata of {expected_name} holds that of agent {inner!r}")
    return envelope.blob


def agent_name(blob: bytes) -> str | None:
    """Return the agent named in NIXL's metadata; None for an unknown format.

    In that case the name that NIXL reports after loading is compared instead.
    """
    if not blob.startswith(NIXL_START) or len(blob) < (start := len(NIXL_START) + NIXL_LENGTH.size):
        return None
    (length,) = NIXL_LENGTH.unpack_from(blob, len(NIXL_START))
    return blob[start : start + length].decode(errors="replace")


def _digest(name: str, blob: bytes) -> bytes:
    encoded = name.encode()
    return hashlib.sha256(len(encoded).to_bytes(4, "little") + encoded + blob).digest()
