"""Challenge of a control connection, and the seals of the frames behind it.

Before any message of the peer is decoded, both ends prove that they know the shared secret, for one address:

    dialler  → listener   magic, version, nonce d
    listener → dialler    magic, version, nonce l
    dialler  → listener   length of t, t, HMAC(key, "dial"   ‖ d ‖ l ‖ t)
    listener → dialler                    HMAC(key, "listen" ‖ d ‖ l ‖ t)

t names the address that was dialled, and the address that the connection has reached. The listener refuses a dialler
that meant another one: a program in between, which passes the challenge on, gets no link of its own.

The dialler proves first, so a mere connection obtains no proof, and the role inside the proof prevents a replay in the
other direction. The key is stretched from the secret (scrypt), so that each guess at a passphrase costs a listener that
was dialled, or a reader of the network, as much.

With a secret, each frame carries a MAC under a key of this challenge and direction, over a counter and the body: a
program in between cannot change, repeat, reorder or leave out a frame. It can read them; where that matters, use TLS.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from tidekv.states.errors import PeerMismatch, PrefillCause, RemoteProtocolError, TransferFailed
from tidekv.transports import wire
from tidekv.transports.base import DialFailed
from tidekv.transports.blocking import call_in_thread
from tidekv.transports.control.addresses import format_address

MAGIC: Final = b"tidekv\r\n"
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
SEAL_BYTES: Final = 16
TARGET_BYTES_MAX: Final = 1024
GREETING_BYTES: Final = len(MAGIC) + 2 + NONCE_BYTES
OTHER_BYTES_SHOWN: Final = 16
"""Maximum bytes of another protocol that an error shows."""
REFUSED_PROOF: Final = bytes(PROOF_BYTES)
"""The answer to a proof of another secret. Without it, a process that ends during a handshake would look like one."""
REFUSED_TARGET: Final = bytes(PROOF_BYTES - 1) + b"\x01"
"""The answer to a dialler that meant another address."""
REFUSED_FULL: Final = bytes(PROOF_BYTES - 1) + b"\x02"
"""The answer to a dialler beyond the limits of links."""
STRETCH_S: Final = 30.0
KEYS_KEPT_MAX: Final = 16

_keys: dict[str, bytes] = {}
"""Stretched keys by secret, the newest ones: a process has few secrets, and stretching takes 50 ms."""


class Seal:
    """MACs of the frames in one direction of one link, in order."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def next(self, body: bytes) -> bytes:
        """Return the MAC of the next frame: `SEAL_BYTES`."""
        mac = hashlib.blake2b(self._count.to_bytes(8, "little"), key=self._key, digest_size=SEAL_BYTES)
        mac.update(body)
        self._count += 1
        return mac.digest()

    def check(self, body: bytes, mac: bytes) -> None:
        """Raise RemoteProtocolError unless this is the MAC of the next frame."""
        if not hmac.compare_digest(self.next(body), mac):
            raise RemoteProtocolError(
                "peer sent a frame that is not authentic: it was changed, repeated or left out on the way"
            )


class Seals(NamedTuple):
    """Both directions of one link."""

    ours: Seal
    theirs: Seal


class MisdirectedDial(TransferFailed):
    """The dialler knows the secret, and meant another address."""


class TooManyLinks(TransferFailed):
    """The dialler knows the secret, and the listener takes no more links."""


async def stretched(secret: str) -> bytes:
    """Return the key of a secret; empty without a secret. The first call for a secret takes 50 ms, in a thread."""
    if not secret:
        return b""
    if (key := _keys.get(secret)) is None:
        stretch = partial(hashlib.scrypt, secret.encode(), salt=MAGIC, n=2**14, r=8, p=1, dklen=32)
        key = await call_in_thread(stretch, what="stretching the secret", timeout_s=STRETCH_S)
        _keys[secret] = key
        if len(_keys) > KEYS_KEPT_MAX:
            del _keys[next(iter(_keys))]
    return key


async def prove(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, key: bytes, dialled: str
) -> Seals | None:
    """Pass the challenge as the dialler of the address `dialled`. None: without a secret frames have no seals.

    Raises DialFailed, RemoteProtocolError, IncompleteReadError and OSError.
    """
    ours = secrets.token_bytes(NONCE_BYTES)
    writer.write(greeting(ours))
    theirs = _nonce_of(await _greeting_of(reader))
    target = "\n".join((dialled, _place(writer, "peername"))).encode()[:TARGET_BYTES_MAX]
    said = ours + theirs + target
    writer.write(len(target).to_bytes(2, "little") + target + proof(key, b"dial", said))
    try:
        answered = await reader.readexactly(PROOF_BYTES)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise DialFailed(PrefillCause.UNREACHABLE, "it closed the connection before it answered our proof") from error
    if hmac.compare_digest(answered, REFUSED_PROOF):
        raise DialFailed(PrefillCause.WRONG_SECRET, "it refused our proof: the secrets differ")
    if hmac.compare_digest(answered, REFUSED_TARGET):
        raise DialFailed(
            PrefillCause.MISCONFIGURED,
            "the worker that answered does not listen there: name this address in `announces` of that worker if "
            "connections to it are forwarded; otherwise a program in between passes them on",
        )
    if hmac.compare_digest(answered, REFUSED_FULL):
        raise DialFailed(PrefillCause.UNREACHABLE, "it has as many links as it takes, in all or of this address")
    if not hmac.compare_digest(answered, proof(key, b"listen", said)):
        raise DialFailed(PrefillCause.WRONG_SECRET, "it did not prove that it knows the secret")
    return _seals(key, said, is_dialler=True)


async def answer(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    *,
    key: bytes,
    announces: Collection[str],
    admit: Callable[[], bool],
) -> Seals | None:
    """Pass the challenge as the listener, of the address that the connection has reached and of those in `announces`.

    `admit` is called for a dialler that has passed; False refuses it. None: without a secret frames have no seals.
    Raises TransferFailed, RemoteProtocolError, IncompleteReadError and OSError.
    """
    ours = secrets.token_bytes(NONCE_BYTES)
    writer.write(greeting(ours))
    theirs = _nonce_of(await _greeting_of(reader))
    length = int.from_bytes(await reader.readexactly(2), "little")
    if length > TARGET_BYTES_MAX:
        raise RemoteProtocolError(f"the dialler names an address of {length} bytes")
    target = await reader.readexactly(length)
    said = theirs + ours + target
    if not hmac.compare_digest(await reader.readexactly(PROOF_BYTES), proof(key, b"dial", said)):
        await _refuse(writer, REFUSED_PROOF)
        raise TransferFailed("the dialler did not prove that it knows the secret")
    dialled, _, reached = target.decode(errors="replace").partition("\n")
    if reached != _place(writer, "sockname") and dialled not in announces:
        await _refuse(writer, REFUSED_TARGET)
        raise MisdirectedDial(f"the dialler meant {dialled[:100]!r}, at {reached[:100]!r}, which is not here")
    if not admit():
        await _refuse(writer, REFUSED_FULL)
        raise TooManyLinks("the dialler is beyond the limits of links")
    writer.write(proof(key, b"listen", said))
    return _seals(key, said, is_dialler=False)


def greeting(nonce: bytes) -> bytes:
    """Return the first bytes of either end."""
    return MAGIC + wire.VERSION.to_bytes(2, "little") + nonce


def proof(key: bytes, role: bytes, said: bytes) -> bytes:
    """Return the proof of one role for what was said: the nonces of dialler and listener, and the target."""
    return hmac.digest(key, MAGIC + role + said, "sha256")


def _seals(key: bytes, said: bytes, *, is_dialler: bool) -> Seals | None:
    if not key:
        return None
    of_dialler, of_listener = (Seal(proof(key, role, said)) for role in (b"frames of dial", b"frames of listen"))
    return Seals(of_dialler, of_listener) if is_dialler else Seals(of_listener, of_dialler)


async def _greeting_of(reader: asyncio.StreamReader) -> bytes:
    """Read the greeting of the other end. Its first bytes show another protocol: a server that sends fewer bytes than
    a greeting, and waits, is not silent.
    """
    received = b""
    while len(received) < GREETING_BYTES:
        more = await reader.read(GREETING_BYTES - len(received))
        received += more
        if not MAGIC.startswith(received[: len(MAGIC)]):
            raise RemoteProtocolError(
                f"the other end does not speak this protocol: it begins with {received[:OTHER_BYTES_SHOWN]!r}"
            )
        if not more:
            raise asyncio.IncompleteReadError(received, GREETING_BYTES)
    return received


def _nonce_of(greeting: bytes) -> bytes:
    version = int.from_bytes(greeting[len(MAGIC) : len(MAGIC) + 2], "little")
    if version != wire.VERSION:
        raise PeerMismatch(field="version", ours=wire.VERSION, theirs=version)
    return greeting[-NONCE_BYTES:]


def _place(writer: asyncio.StreamWriter, end: str) -> str:
    """The address of one end of a connection, in the form that both ends give it."""
    host, port = writer.get_extra_info(end)[:2]
    return format_address(host, port)


async def _refuse(writer: asyncio.StreamWriter, answer: bytes) -> None:
    writer.write(answer)
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
