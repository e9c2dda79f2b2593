"""The format of a segment file, and the check that a page in it is the page that was asked for.

    [0, 4096)               the segment's own record: magic, version, namespace, page bytes, slots
    [4096, data)            one 128-byte header a slot
    [data, …)               the pages, `page_bytes` each; data is a multiple of 4096

Headers lie apart from the pages so that neighboring pages are one read or write. A header holds the page's key, the
checksum of its bytes, and a checksum of itself. A torn, late, reused or foreign page fails one of the two: that check,
and not the index, makes a page safe to use.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Final

import numpy as np
import numpy.typing as npt
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
BODY_BYTES: Final = _HEADER.size
"""The part of a header before its own checksum."""
_BODY: Final = struct.Struct(f"{BODY_BYTES}s{HEADER_BYTES - BODY_BYTES}x")
KEY_BYTES: Final = 32
CHECKSUM_BYTES: Final = 16
_INDEX: Final = slice(12, 16)
_KEY: Final = slice(56, 88)
_CHECKSUM: Final = slice(88, 104)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Geometry of the segments of one namespace: `slots` pages of `page_bytes`."""

    namespace: bytes
    page_bytes: int
    slots: int

    @property
    def data_offset(self) -> int:
        """Offset of page 0."""
        return _align(BLOCK_BYTES + self.slots * HEADER_BYTES)

    @property
    def segment_bytes(self) -> int:
        """Length of a whole segment file."""
        return self.data_offset + self.slots * self.page_bytes

    def header_offset(self, index: int) -> int:
        """Return the offset of a slot's header."""
        return BLOCK_BYTES + index * HEADER_BYTES

    def page_offset(self, index: int) -> int:
        """Return the offset of a slot's page."""
        return self.data_offset + index * self.page_bytes


def page_checksum(page: memoryview) -> bytes:
    """Return the 16-byte checksum of a page's bytes."""
    return xxhash.xxh3_128_digest(page)


def header_bodies(
    geometry: Geometry, *, indices: Sequence[int], keys: Sequence[bytes], checksums: Sequence[bytes]
) -> npt.NDArray[np.uint8]:
    """Return the headers of pages without their own checksums: uint8 [n, BODY_BYTES], built in one pass."""
    blank = _HEADER.pack(_PAGE_MAGIC, FORMAT_VERSION, 0, geometry.page_bytes, geometry.namespace, b"", b"")
    bodies = np.empty((len(indices), BODY_BYTES), np.uint8)
    bodies[:] = np.frombuffer(blank, np.uint8)
    bodies[:, _INDEX] = np.array(indices, "<u4")[:, None].view(np.uint8)
    bodies[:, _KEY] = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)
    bodies[:, _CHECKSUM] = np.frombuffer(b"".join(checksums), np.uint8).reshape(-1, CHECKSUM_BYTES)
    return bodies


def are_headers(
    headers: bytes, geometry: Geometry, *, indices: Sequence[int], keys: Sequence[bytes], checksums: Sequence[bytes]
) -> bool:
    """Compare consecutive headers with pages: True if all match. Ignores the headers' own checksums.

    Not by numpy, which releases the interpreter at every step, and waits for it while other threads read pages.
    """
    page_bytes, namespace = repeat(geometry.page_bytes), repeat(geometry.namespace)
    wanted = map(
        _HEADER.pack, repeat(_PAGE_MAGIC), repeat(FORMAT_VERSION), indices, page_bytes, namespace, keys, checksums
    )
    return [body for (body,) in _BODY.iter_unpack(headers)] == list(wanted)


def pack_headers(
    geometry: Geometry, *, indices: Sequence[int], keys: Sequence[bytes], checksums: Sequence[bytes]
) -> bytes:
    """Return consecutive headers of pages, HEADER_BYTES each."""
    headers = np.zeros((len(indices), HEADER_BYTES), np.uint8)
    headers[:, :BODY_BYTES] = header_bodies(geometry, indices=indices, keys=keys, checksums=checksums)
    flat = headers.reshape(-1).data
    sums = b"".join([_self_sum(flat[first : first + BODY_BYTES]) for first in range(0, headers.size, HEADER_BYTES)])
    headers[:, BODY_BYTES : BODY_BYTES + _SUM_BYTES] = np.frombuffer(sums, np.uint8).reshape(-1, _SUM_BYTES)
    return headers.tobytes()


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


def unpack_segment(record: bytes) -> Geometry | None:
    """Return the geometry in a segment file's record; None if it is damaged, foreign or implausible."""
    if len(record) < _SEGMENT.size + _SUM_BYTES:
        return None
    _, _, slots, page_bytes, namespace = _SEGMENT.unpack(record[: _SEGMENT.size])
    geometry = Geometry(namespace=namespace, page_bytes=page_bytes, slots=slots)
    return geometry if slots and page_bytes and is_segment_of(record, geometry) else None


def keys_in(headers: bytes, geometry: Geometry) -> dict[int, bytes]:
    """Return the key of each slot of a segment by its headers; damaged and foreign headers are left out."""
    count = len(headers) // HEADER_BYTES
    found = np.frombuffer(headers[: count * HEADER_BYTES], np.uint8).reshape(count, HEADER_BYTES)
    wanted = header_bodies(
        geometry, indices=range(count), keys=[bytes(KEY_BYTES)] * count, checksums=[bytes(CHECKSUM_BYTES)] * count
    )
    named = (found[:, : _KEY.start] == wanted[:, : _KEY.start]).all(axis=1).nonzero()[0].tolist()
    own_sum = slice(BODY_BYTES, BODY_BYTES + _SUM_BYTES)
    return {
        index: found[index, _KEY].tobytes()
        for index in named
        if _self_sum(found[index, :BODY_BYTES].data) == found[index, own_sum].tobytes()
    }


def is_segment_of(record: bytes, geometry: Geometry) -> bool:
    """True if a file that starts with `record` is a segment of exactly this geometry."""
    return record[: _SEGMENT.size + _SUM_BYTES] == pack_segment(geometry)


def _self_sum(body: bytes | memoryview) -> bytes:
    return xxhash.xxh3_64_digest(body)


def _align(offset: int) -> int:
    return -(-offset // BLOCK_BYTES) * BLOCK_BYTES
