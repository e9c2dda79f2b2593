"""The proof that a page is the page: headers written and compared, checksums taken. Blocks; for worker threads."""

from __future__ import annotations

from collections.abc import Sequence

from tidekv.backends.storage.base import BufferOf
from tidekv.backends.storage.records import check_header, pack_header, page_checksum
from tidekv.backends.storage.segments import Segments, failure_cause, index_of


def checksums(buffer_of: BufferOf, pages: Sequence[int]) -> list[bytes]:
    """Return the checksum of each host page."""
    return [page_checksum(buffer_of(page)) for page in pages]


def write_headers(
    segments: Segments, keys: Sequence[bytes], slots: Sequence[int], page_checksums: Sequence[bytes]
) -> str:
    """Write the headers of pages; returns why they could not all be written, or nothing."""
    headers = [
        pack_header(segments.geometry, index=index_of(slot), key=key, checksum=checksum)
        for key, slot, checksum in zip(keys, slots, page_checksums, strict=True)
    ]
    try:
        segments.write_headers(slots, headers)
    except OSError as error:
        return failure_cause(error)
    return ""


def verify_pages(
    segments: Segments, buffer_of: BufferOf, keys: Sequence[bytes], slots: Sequence[int], pages: Sequence[int]
) -> list[str]:
    """Compare host pages, read from slots, with the headers of the slots; returns the cause of a miss for each.

    Whether the header is read before or after the page does not matter: it names the key and the checksum, and both
    have to fit.
    """
    return [
        check_header(header, segments.geometry, index=index_of(slot), key=key, checksum=page_checksum(buffer_of(page)))
        for header, key, slot, page in zip(segments.read_headers(slots), keys, slots, pages, strict=True)
    ]


def verify_stored(segments: Segments, keys: Sequence[bytes], slots: Sequence[int]) -> list[str]:
    """Read pages into memory of our own and compare them with their headers; returns the cause of a miss for each."""
    page = memoryview(bytearray(segments.geometry.page_bytes))
    return [
        segments.read_page(slot, page) or verify_pages(segments, lambda _: page, [key], [slot], [0])[0]
        for key, slot in zip(keys, slots, strict=True)
    ]
