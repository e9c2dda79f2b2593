"""Storage keys of pages: a SHA-256 chain over the prompt, identical to that of SGLang's HiCache.

    digest[0] = SHA256(seed ‖ tokens of page 0)          seed: nothing, or 32 bytes of the request's namespace
    digest[i] = SHA256(digest[i - 1] ‖ tokens of page i)

Tokens are little-endian u32. A digest names the whole prefix up to the end of its page. It does not name the model:
bytes are interchangeable only within one `storage_namespace`.

With speculative decoding of the EAGLE family a position stands for a pair, its own token and the next one: eight bytes
a position, and the last position of a page needs one token more than the page has.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256
from io import BytesIO
from typing import Any, Final, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from tidekv.backends.keys.namespaces import SEEDED
from tidekv.states.errors import InvalidRequest
from tidekv.states.types import Identity
from tidekv.states.validation import short

DIGEST_BYTES: Final = 32
TOKEN_BYTES: Final = 4
TOKEN_MAX: Final = 2**32 - 1
_NATIVE_LONG: Final = np.dtype(np.int64)
_UNSIGNED_LONG: Final = np.dtype(np.uint64)
_UNSIGNED: Final = np.dtype(np.uint32)
# From so many tokens on, writing them where they stay is faster than making them elsewhere and copying.
_IN_PLACE_MIN: Final = 16_384
# Part of every storage namespace: increase it when the bytes of a page in storage change their meaning.
STORAGE_FORMAT: Final = 1
NAMESPACE_MAGIC: Final = b"sglang-cache-namespace-v1"


class TokenArray(Protocol):
    """An array of another library that converts itself to numpy: a torch tensor in host memory, a JAX array."""

    def __array__(self) -> npt.NDArray[Any]: ...

    def __len__(self) -> int: ...


Tokens: TypeAlias = "Sequence[int] | array[int] | npt.NDArray[np.integer] | TokenArray | bytes | bytearray | memoryview"


def namespace_seed(namespace: str = "", *, salt: str | None = None) -> bytes:
    """Return the seed of a namespace's chain: 32 bytes, or none if neither is given."""
    if not namespace and salt is None:
        return b""
    if namespace.startswith(SEEDED):
        return bytes.fromhex(namespace[len(SEEDED) :])
    digest = sha256(NAMESPACE_MAGIC)
    for text in (namespace or None, salt):
        if text is None:
            digest.update(b"\x00")
            continue
        try:
            encoded = text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"namespace {text!r} is not valid text: {error}") from error
        digest.update(b"\x01" + len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def page_digests(
    packed: bytes | bytearray | memoryview,
    page_size: int,
    *,
    namespace: str = "",
    prefix: bytes = b"",
    bigrams: bool = False,
) -> list[bytes]:
    """Return the digests of the full pages of packed tokens, in order; a partial last page has none.

    `prefix` is the digest of the page before the first one here, to continue a chain; it includes the namespace. With
    `bigrams`, n tokens are n - 1 positions (EAGLE); writers and readers must agree on it. Costs about a microsecond a
    page.
    """
    if page_size < 1:
        raise InvalidRequest(f"page_size must be at least 1, not {page_size}")
    if len(prefix) not in (0, DIGEST_BYTES):
        raise InvalidRequest(f"prefix must be a digest of {DIGEST_BYTES} bytes or empty, not {len(prefix)} bytes")
    previous = prefix or namespace_seed(namespace)
    whole = _pairs(packed) if bigrams else bytes(packed)
    width = page_size * TOKEN_BYTES * (2 if bigrams else 1)
    digests = []
    for start in range(0, len(whole) - width + 1, width):
        previous = sha256(previous + whole[start : start + width]).digest()
        digests.append(previous)
    return digests


def storage_namespace(identity: Identity, *, rank: int = 0, ranks: int = 1) -> bytes:
    """Return the digest of everything that makes stored bytes interchangeable: model, layout, rank slice, storage
    format.
    """
    if not 0 <= rank < ranks:
        raise InvalidRequest(f"rank must be from 0 to {ranks - 1}, not {rank}")
    # The kind of keys does not change the bytes of pages, and keys of one kind never equal those of the other.
    bytes_of = msgspec.structs.replace(identity, bigram_keys=False)
    return sha256(msgspec.msgpack.encode([STORAGE_FORMAT, bytes_of, rank, ranks])).digest()


def component_namespace(full: bytes, component: str) -> bytes:
    """Return the namespace in which pages of a component are stored beside the full pages of the namespace `full`. That
    one covers everything that makes its bytes interchangeable: identities list all components.
    """
    return sha256(msgspec.msgpack.encode([STORAGE_FORMAT, full, "component", component])).digest()


def pack_tokens(tokens: Tokens, *, vocabulary: int | None = None) -> bytes:
    """Return token ids as little-endian u32 bytes.

    `tokens` is a sequence of ints, an array of any integer type (numpy's, torch's in host memory), or packed bytes.
    `vocabulary` is the number of ids. Raises InvalidRequest, which names the first wrong token and its position.
    """
    packed = tokens if type(tokens) is bytes and not len(tokens) % TOKEN_BYTES else _packed(tokens)
    if not packed:
        raise InvalidRequest("tokens are empty: a prompt has at least one token")
    if vocabulary is not None:
        ids = np.frombuffer(packed, dtype="<u4")
        if int(ids.max()) >= vocabulary:
            position = int((ids >= vocabulary).argmax())
            raise InvalidRequest(
                f"token {ids[position]} at position {position} is not below the vocabulary, {vocabulary}"
            )
    return packed


def _pairs(packed: bytes | bytearray | memoryview) -> bytes:
    """Return each packed token with the one after it; the last one only ends a pair."""
    ids = np.frombuffer(packed, "<u4")
    return np.stack([ids[:-1], ids[1:]], axis=1).tobytes()


def _packed(tokens: Tokens) -> bytes:
    if isinstance(tokens, memoryview) and tokens.format not in ("B", "b", "c"):
        tokens = np.asarray(tokens)
    if isinstance(tokens, bytes | bytearray | memoryview):
        packed = bytes(tokens)
        if len(packed) % TOKEN_BYTES:
            raise InvalidRequest(f"packed tokens are {len(packed)} bytes, which is not a multiple of {TOKEN_BYTES}")
        return packed
    if isinstance(tokens, np.ndarray | array):
        return _packed_array(np.asarray(tokens))
    if hasattr(tokens, "__array__"):
        try:
            return _packed_array(np.asarray(tokens))
        except (TypeError, RuntimeError) as error:  # torch: not in host memory, or part of a computation of gradients
            raise InvalidRequest(f"tokens cannot be read as an array: {error}") from error
    if not isinstance(tokens, Sequence):
        raise InvalidRequest(f"tokens must be a sequence of ints, an array or bytes, not {type(tokens).__name__}")
    try:
        found = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise _wrong_token(tokens) from error
    # A bool is an int to Python, and a mask in place of ids is a mistake. Only ids 0 and 1 can be bools.
    small = np.frombuffer(found, np.uintc) <= 1
    if small.any() and any(isinstance(tokens[position], bool) for position in np.flatnonzero(small).tolist()):
        raise _wrong_token(tokens)
    if sys.byteorder == "big":
        found.byteswap()
    return found.tobytes()


def _packed_array(ids: npt.NDArray[np.integer]) -> bytes:
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidRequest(f"tokens must be a flat array of ints, not {ids.ndim}-d {ids.dtype}")
    # The common case: an int64 array.
    if ids.dtype == _NATIVE_LONG and ids.flags.c_contiguous and sys.byteorder == "little" and ids.size:
        packed = _halved(ids)
        if packed is not None:
            return packed
    # One pass where all is well: a negative id, or one of more than 32 bits, shows in the bits of all of them together.
    if ids.size and not 0 <= int(np.bitwise_or.reduce(ids)) <= TOKEN_MAX:
        outside = (ids < 0) | (ids > TOKEN_MAX) if ids.dtype.itemsize > TOKEN_BYTES else ids < 0
        position = int(outside.argmax())
        raise InvalidRequest(f"token {ids[position]} at position {position} is not from 0 to {TOKEN_MAX}")
    return ids.astype("<u4").tobytes()


def _halved(ids: npt.NDArray[np.integer]) -> bytes | None:
    """Return the lower halves of contiguous int64 numbers; None where one is not from 0 to TOKEN_MAX."""
    # Without a sign, a negative id is a great one. Numpy finds the place of the greatest sooner than the greatest.
    unsigned = ids.view(_UNSIGNED_LONG)
    if unsigned.item(unsigned.argmax()) > TOKEN_MAX:
        return None
    if ids.size < _IN_PLACE_MIN:
        return ids.astype(_UNSIGNED).tobytes()
    # A stream makes room for them, has it written by numpy, and gives it away as bytes without a copy.
    stream = BytesIO()
    stream.seek(ids.size * TOKEN_BYTES - 1)
    stream.write(b"\0")
    with stream.getbuffer() as room:
        np.frombuffer(room, _UNSIGNED)[:] = ids
    return stream.getvalue()


def _wrong_token(tokens: Sequence[int]) -> InvalidRequest:
    """Find the token that the fast path stumbled over."""
    for position, token in enumerate(tokens):
        if isinstance(token, float | bool) or not hasattr(token, "__index__"):
            return InvalidRequest(f"token {short(token)} at position {position} is not an int")
        if not 0 <= token <= TOKEN_MAX:
            return InvalidRequest(f"token {token} at position {position} is not from 0 to {TOKEN_MAX}")
    return InvalidRequest(f"tokens must be a sequence of ints, not {type(tokens).__name__}")
