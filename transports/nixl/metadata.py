"""The envelope around NIXL's metadata: whose it is, and that all of it is here.

NIXL may crash over a mangled blob, and a name that failed to load cannot be used again, so that everything that can be
known of a blob is checked before NIXL sees it. This guards against mistakes; against malice the link's challenge does.
"""

from __future__ import annotations

import hashlib
import struct

import msgspec

from tidekv.states.errors import RemoteProtocolError

NIXL_START = b"nixlSerDes|Agent"
"""What the metadata of NIXL 1.5 begins with, before the length and the bytes of the agent's name."""
NIXL_LENGTH = struct.Struct("<Q")


class Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What travels: the agent's name, NIXL's blob, and the SHA-256 of both."""

    name: str
    blob: bytes
    digest: bytes


def wrap(name: str, blob: bytes) -> bytes:
    """Make what a peer's `unwrap` takes."""
    return msgspec.msgpack.encode(Envelope(name=name, blob=blob, digest=_digest(name, blob)))


def unwrap(metadata: bytes, *, expected_name: str) -> bytes:
    """Return NIXL's blob. Raises RemoteProtocolError unless it is whole, and both the envelope and the blob are of the
    expected agent.
    """
    try:
        envelope = msgspec.msgpack.decode(metadata, type=Envelope)
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(f"metadata of {expected_name} cannot be read: {error}") from error
    if envelope.name != expected_name:
        raise RemoteProtocolError(f"metadata is of agent {envelope.name!r}, the peer says it is {expected_name!r}")
    if envelope.digest != _digest(envelope.name, envelope.blob):
        raise RemoteProtocolError(f"metadata of {expected_name} is damaged: its digest differs")
    if (inner := agent_name(envelope.blob)) not in (None, expected_name):
        # Loading it would give the peer of that name other addresses.
        raise RemoteProtocolError(f"metadata of {expected_name} holds that of agent {inner!r}")
    return envelope.blob


def agent_name(blob: bytes) -> str | None:
    """The agent that NIXL's metadata is of; None for a format that is not known here, where the name that NIXL reports
    after loading it has to do.
    """
    if not blob.startswith(NIXL_START) or len(blob) < (start := len(NIXL_START) + NIXL_LENGTH.size):
        return None
    (length,) = NIXL_LENGTH.unpack_from(blob, len(NIXL_START))
    return blob[start : start + length].decode(errors="replace")


def _digest(name: str, blob: bytes) -> bytes:
    encoded = name.encode()
    return hashlib.sha256(len(encoded).to_bytes(4, "little") + encoded + blob).digest()
