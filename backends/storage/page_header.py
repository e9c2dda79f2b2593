"""The format of a page on a server: a header with the page's key and checksum, then the bytes.

    [0, 128)                   magic, version, page bytes, namespace, key, checksum of the page, checksum of all that
    [128, 128 + page_bytes)    the page

A server may lose, truncate, mix up or flip what it keeps, and everyone with access may write there. An answer is a page
only if the header is the one that was asked for and the bytes have its checksum.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash

from tidekv.backends.storage.file.records import page_checksum

HEADER_BYTES: Final = 128
FORMAT_VERSION: Final = 1

_MAGIC: Final = b"TIDEKVRM"
# Magic, version, flags that are 0, page bytes, namespace, key, checksum of the page; then the header's own checksum.
_HEADER: Final = struct.Struct("<8sIIQ32s32s16s")
_SUM_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class PageHeader:
    """Wraps the pages of one namespace. All methods copy or read whole pages, so they belong on worker threads."""

    namespace: bytes
    page_bytes: int

    @property
    def value_bytes(self) -> int:
        """Bytes of a wrapped page."""
        return HEADER_BYTES + self.page_bytes

    def header(self, key: bytes, page: memoryview) -> bytes:
        """Return the header of a page, HEADER_BYTES long."""
        body = _HEADER.pack(_MAGIC, FORMAT_VERSION, 0, self.page_bytes, self.namespace, key, page_checksum(page))
        return (body + xxhash.xxh3_64_digest(body)).ljust(HEADER_BYTES, b"\0")

    def wrap(self, key: bytes, page: memoryview, value: memoryview) -> None:
        """Fill `value`, value_bytes long, with a page and its header."""
        copy_bytes(value[HEADER_BYTES:], page)
        value[:HEADER_BYTES] = self.header(key, value[HEADER_BYTES:])

    def unwrap(self, key: bytes, value: memoryview, page: memoryview) -> str:
        """Copy a page out of `value`; returns the cause of a miss, or an empty string if the page is the one of the
        key.
        """
        if value.nbytes != self.value_bytes:
            return "truncated" if value.nbytes < self.value_bytes else "foreign"
        copy_bytes(page, value[HEADER_BYTES:])
        return self.fault(key, bytes(value[:HEADER_BYTES]), page)

    def fault(self, key: bytes, header: bytes, page: memoryview) -> str:
        """Compare a page with its header; returns the cause of a miss, or an empty string.

        "corrupt": the header or the bytes are damaged. "foreign": whole, but of another key, namespace, size or format.
        """
        body, own_sum = header[: _HEADER.size], header[_HEADER.size : _HEADER.size + _SUM_BYTES]
        if len(own_sum) != _SUM_BYTES or xxhash.xxh3_64_digest(body) != own_sum:
            return "corrupt"
        magic, version, _, page_bytes, namespace, found_key, checksum = _HEADER.unpack(body)
        if (magic, version, page_bytes, namespace, found_key) != (
            _MAGIC,
            FORMAT_VERSION,
            self.page_bytes,
            self.namespace,
            key,
        ):
            return "foreign"
        return "" if page_checksum(page) == checksum else "corrupt"


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy bytes between equally long buffers. numpy releases the interpreter meanwhile; a slice assignment would hold
    it.
    """
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
