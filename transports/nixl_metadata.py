"""The envelope around NIXL's metadata: whose it is, and that all of it is here.

NIXL may crash over a mangled blob, and a name that failed to load cannot be used again, so that everything that can be
known of a blob is checked before NIXL sees it. This guards against mistakes; against malice the link's challenge does.
"""

from __future__ import annotations

import hashlib

import msgspec

from tidekv.states.errors import RemoteProtocolError


class Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What travels: the agent's name, NIXL's blob, and the SHA-256 of both."""

    name: str
    blob: bytes
    digest: bytes


def wrap(name: str, blob: bytes) -> bytes:
    """Make what a peer's `unwrap` takes."""
    return msgspec.msgpack.encode(Envelope(name=name, blob=blob, digest=_digest(name, blob)))


def unwrap(metadata: bytes, *, expected_name: str) -> bytes:
    """Return NIXL's blob. Raises RemoteProtocolError unless it is whole and of the expected agent."""
    try:
        envelope = msgspec.msgpack.decode(metadata, type=Envelope)
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(f"metadata of {expected_name} cannot be read: {error}") from error
    if envelope.name != expected_name:
        raise RemoteProtocolError(f"metadata is of agent {envelope.name!r}, the peer says it is {expected_name!r}")
    if envelope.digest != _digest(envelope.name, envelope.blob):
        raise RemoteProtocolError(f"metadata of {expected_name} is damaged: its digest differs")
    return envelope.blob


def _digest(name: str, blob: bytes) -> bytes:
    encoded = name.encode()
    return hashlib.sha256(len(encoded).to_bytes(4, "little") + encoded + blob).digest()
