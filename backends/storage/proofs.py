"""The proof that pages are the pages: headers of many pages at once, and pages read into memory of our own. Blocks; for
worker threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tidekv.backends.storage.records import (
    CHECKSUM_BYTES,
    HEADER_BYTES,
    are_headers,
    check_header,
    pack_headers,
    page_checksum,
)
from tidekv.backends.storage.segments import Segments, failure_cause, index_of, indices_of

NO_CHECKSUM: Final = bytes(CHECKSUM_BYTES)
"""Stands for a page that did not come; its header is not looked at."""


def write_headers(segments: Segments, keys: Sequence[bytes], slots: Sequence[int], checksums: Sequence[bytes]) -> str:
    """Write the headers of pages; returns why they could not all be written, or nothing."""
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

    Whether the header is read before or after the page does not matter: it names the key and the checksum, and both
    have to fit. What a good header is, is made for all pages at once and compared at once; only where one differs is it
    asked why.
    """
    headers = segments.read_headers(slots)
    indices = indices_of(slots)
    if len(headers) == len(slots) * HEADER_BYTES:
        if are_headers(headers, segments.geometry, indices=indices, keys=keys, checksums=checksums):
            return [""] * len(slots)
        apart = [segments.read_headers([slot]) for slot in slots]
    else:
        # Some could not be read, or the file ends before them: each for itself.
        apart = [segments.read_headers([slot]) for slot in slots]
    return [
        check_header(header, segments.geometry, index=index, key=key, checksum=checksum)
        for header, index, key, checksum in zip(apart, indices, keys, checksums, strict=True)
    ]


def verify_stored(segments: Segments, keys: Sequence[bytes], slots: Sequence[int]) -> list[str]:
    """Read pages into memory of our own and compare them with their headers; returns the cause of a miss for each.

    Stricter than a read: the header's own checksum has to be right too.
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
