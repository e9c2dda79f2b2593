"""What a segment file looks like, and how a page in it proves that it is the page that was asked for.

    [0, 4096)               the segment's own record: magic, version, namespace, page bytes, slots
    [4096, data)            one 128-byte header a slot
    [data, …)               the pages, `page_bytes` each; data is a multiple of 4096

Headers lie apart from the pages so that neighboring pages are one read or write. A header names the page's key and the
checksum of its bytes, and carries a checksum of itself. Whatever is torn, late, reused or foreign fails one of the two:
that, and not the index, is what makes a page safe to use.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import xxhash

BLOCK_BYTES: Final = 4096
HEADER_BYTES: Final = 128
FORMAT_VERSION: Final = 1

_SEGMENT_MAGIC: Final = b"TIDEKVSG"
_PAGE_MAGIC: Final = b"TIDEKVPG"
# Magic, version, slot, page bytes, namespace, key, checksum of the page; then the header's own checksum.
_HEADER: Final = struct.Struct("<8sIIQ32s32s16s")
# Magic, version, slots, page bytes, namespace; then the record's own checksum.
_SEGMENT: Final = struct.Struct("<8sIIQ32s")
_SUM_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Geometry:
    """How the segments of one namespace are cut: `slots` pages of `page_bytes`."""

    namespace: bytes
    page_bytes: int
    slots: int

    @property
    def data_offset(self) -> int:
        """Where page 0 starts."""
        return _align(BLOCK_BYTES + self.slots * HEADER_BYTES)

    @property
    def segment_bytes(self) -> int:
        """Length of a whole segment file."""
        return self.data_offset + self.slots * self.page_bytes

    def header_offset(self, index: int) -> int:
        """Where the header of a slot starts."""
        return BLOCK_BYTES + index * HEADER_BYTES

    def page_offset(self, index: int) -> int:
        """Where the page of a slot starts."""
        return self.data_offset + index * self.page_bytes


def page_checksum(page: memoryview) -> bytes:
    """Return the 16-byte checksum of a page's bytes. Releases the interpreter while it works."""
    return xxhash.xxh3_128_digest(page)


def pack_header(geometry: Geometry, *, index: int, key: bytes, checksum: bytes) -> bytes:
    """Return the header of a page, HEADER_BYTES long."""
    body = _HEADER.pack(_PAGE_MAGIC, FORMAT_VERSION, index, geometry.page_bytes, geometry.namespace, key, checksum)
    return (body + _self_sum(body)).ljust(HEADER_BYTES, b"\0")


def check_header(header: bytes, geometry: Geometry, *, index: int, key: bytes, checksum: bytes) -> str:
    """Compare a header with the page that was asked for and the bytes that were read; returns the cause of a miss.

    "truncated": the file ends before it. "corrupt": it is damaged, or the page's bytes are. "foreign": it is whole, but
    of another page, namespace, size or format.
    """
    if len(header) < HEADER_BYTES:
        return "truncated"
    body, own_sum = header[: _HEADER.size], header[_HEADER.size : _HEADER.size + _SUM_BYTES]
    if _self_sum(body) != own_sum:
        return "corrupt"
    magic, version, found_index, page_bytes, namespace, found_key, found_checksum = _HEADER.unpack(body)
    expected = (_PAGE_MAGIC, FORMAT_VERSION, index, geometry.page_bytes, geometry.namespace, key)
    if (magic, version, found_index, page_bytes, namespace, found_key) != expected:
        return "foreign"
    return "" if found_checksum == checksum else "corrupt"


def pack_segment(geometry: Geometry) -> bytes:
    """Return the record at the start of a segment file."""
    body = _SEGMENT.pack(_SEGMENT_MAGIC, FORMAT_VERSION, geometry.slots, geometry.page_bytes, geometry.namespace)
    return body + _self_sum(body)


def is_segment_of(record: bytes, geometry: Geometry) -> bool:
    """True if a file that starts with `record` is a segment of exactly this geometry."""
    return record[: _SEGMENT.size + _SUM_BYTES] == pack_segment(geometry)


def _self_sum(body: bytes) -> bytes:
    return xxhash.xxh3_64_digest(body)


def _align(offset: int) -> int:
    return -(-offset // BLOCK_BYTES) * BLOCK_BYTES
