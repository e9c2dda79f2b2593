"""Verification of pages: headers of many pages at once, and pages read into separate memory. Blocks; for worker
threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tidekv.backends.storage.file.records import (
    CHECKSUM_BYTES,
    HEADER_BYTES,
    are_headers,
    check_header,
    pack_headers,
    page_checksum,
)
from tidekv.backends.storage.file.segments import Segments, failure_cause, index_of, indices_of

NO_CHECKSUM: Final = bytes(CHECKSUM_BYTES)
"""Stands for a page that was not read; its header is not checked."""


def write_headers(segments: Segments, keys: Sequence[bytes], slots: Sequence[int], checksums: Sequence[bytes]) -> str:
    """Write the headers of pages; returns the cause of a failure, or an empty string."""
    headers = pack_headers(segments.geometry, indices=indices_of(slots), keys=keys, checksums=checksums)
    try:
        segments.write_headers(slots, headers)
    except OSError as error:
        return failure_cause(error)
    return ""


def verify_headers(
    segments: Segments, keys: Sequence[bytes], slots: Sequence[int], checksums: Sequence[bytes]
) -> list[str]:
    """Compare the headers of slots with keys, and with the checksums of what was read; the cause of a miss for each.

    The order of reading header and page does not matter: the header names the key and the checksum, and both have to
    match. The expected headers of all pages are built and compared at once; only if one differs is the cause looked up.
    """
    headers = segments.read_headers(slots)
    indices = indices_of(slots)
    if len(headers) == len(slots) * HEADER_BYTES:
        if are_headers(headers, segments.geometry, indices=indices, keys=keys, checksums=checksums):
            return [""] * len(slots)
        apart = [segments.read_headers([slot]) for slot in slots]
    else:
        # Some could not be read, or the file ends before them: read each separately.
        apart = [segments.read_headers([slot]) for slot in slots]
    return [
        check_header(header, segments.geometry, index=index, key=key, checksum=checksum)
        for header, index, key, checksum in zip(apart, indices, keys, checksums, strict=True)
    ]


def verify_stored(segments: Segments, keys: Sequence[bytes], slots: Sequence[int]) -> list[str]:
    """Read pages into separate memory and compare them with their headers; returns the cause of a miss for each.

    Stricter than a read: the header's own checksum has to match too.
    """
    page = memoryview(bytearray(segments.geometry.page_bytes))
    return [
        segments.read_page(slot, page)
        or check_header(
            segments.read_headers([slot]),
            segments.geometry,
            index=index_of(slot),
            key=key,
            checksum=page_checksum(page),
        )
        for key, slot in zip(keys, slots, strict=True)
    ]
