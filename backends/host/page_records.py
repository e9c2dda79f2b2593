"""Records of the pages of a lasting host pool: what each page holds, beside the pages in the same file.

A page is found again by its record only. A record names the page's key, the page before it in the prompt, and the
checksum of its bytes; the first page of a prompt names its namespace. There is one slot for each page:

    check | stamp | stamp and number of the page before | lengths | checksum of the page | namespace | key

- A record is written when the page's bytes are complete, and cleared before they change. A process that is killed
  amid a write loses that page, and what follows it in the prompt.
- `check` is a checksum of the slot, seeded with the number of the page. A torn slot, or one in another place, is none.
- Every record gets a stamp that no other has. A page follows another one while that one's record has the stamp that it
  names, so a page never follows one that was replaced. The first stamp of a file is random: no other file has it.

A page of a window or state has a record in the file of its own pool. "The page before it" is then the full page at the
same position, in the file of the full pages: without that one it is not found again.

The loop clears records, a thread writes them: `versions` lets a record that is late be dropped.
"""

from __future__ import annotations

import secrets
import struct
import threading
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from tidekv.backends.checksums import CHECKSUM_BYTES

NAMESPACE_BYTES_MAX: Final = 208
"""Maximum bytes of a namespace, as UTF-8. Prompts in a namespace with a longer name are not found again."""
_FIXED: Final = struct.Struct(f"<QQQiHH{CHECKSUM_BYTES}s")
_CHECK_BYTES: Final = 8
_ALIGNMENT: Final = 64
STAMP_BITS: Final = 62
NO_PAGE: Final = -1
"""The page before the first one of a prompt."""


class PageRecord(NamedTuple):
    """What one page holds."""

    page: int
    stamp: int
    before: int
    """The page before it in the prompt; NO_PAGE at the beginning."""
    stamp_before: int
    namespace: str
    """Empty, unless it is the first page of a prompt."""
    key: bytes
    checksum: bytes


def slot_bytes(key_bytes_max: int) -> int:
    """Return the bytes of a slot for keys of at most that many bytes."""
    used = _FIXED.size + NAMESPACE_BYTES_MAX + key_bytes_max
    return -(-used // _ALIGNMENT) * _ALIGNMENT


def pack(record: PageRecord) -> bytes:
    """Return the bytes of a slot with this record. The caller has checked the lengths."""
    namespace = record.namespace.encode(errors="surrogatepass")
    lengths = len(namespace), len(record.key)
    fixed = _FIXED.pack(0, record.stamp, record.stamp_before, record.before, *lengths, record.checksum)
    body = fixed[_CHECK_BYTES:] + namespace + record.key
    return _check(body, record.page).to_bytes(_CHECK_BYTES, "little") + body


def unpack(slot: bytes, page: int) -> PageRecord | None:
    """Return the record in a slot; None for an empty or torn one."""
    check, stamp, stamp_before, before, namespace_bytes, key_bytes, checksum = _FIXED.unpack_from(slot)
    end = _FIXED.size + namespace_bytes + key_bytes
    if not check or end > len(slot) or _check(slot[_CHECK_BYTES:end], page) != check:
        return None
    at = _FIXED.size + namespace_bytes
    namespace = slot[_FIXED.size : at].decode(errors="surrogatepass")
    return PageRecord(page, stamp, before, stamp_before, namespace, slot[at:end], checksum)


def _check(body: bytes, page: int) -> int:
    # Never 0, which is an empty slot.
    return xxhash.xxh3_64_intdigest(body, page) or 1


class PageRecords:
    """The slots of one pool, as memory that is shared with a file. `slots` is uint8 [pages, bytes of a slot].

    With `is_empty` no slot was ever written: none is looked at, since a read fills a hole of a file in memory.
    """

    def __init__(self, slots: npt.NDArray[np.uint8], *, is_empty: bool = False) -> None:
        self._slots = slots
        self._is_empty = is_empty
        self._full = self
        self._key_bytes_max = slots.shape[1] - _FIXED.size - NAMESPACE_BYTES_MAX
        self._lock = threading.Lock()
        self._stamps = [0] * len(slots)
        """The stamps of the records in use; 0: the page has none."""
        self._versions = [0] * len(slots)
        self._next_stamp = secrets.randbits(STAMP_BITS)

    def find(self) -> list[PageRecord]:
        """Return all records whose pages can be found again: a page's record follows that of the page before it.

        Call it once, before any other method, and that of the full pages first. Other records are cleared.
        """
        written = self._written()
        whole = [record for page in written if (record := unpack(self._slots[page].tobytes(), page)) is not None]
        # Stamps ascend with time, and the page before was recorded before.
        whole.sort(key=lambda record: record.stamp)
        found = []
        for record in whole:
            if not self._follows(record.before, record.stamp_before):
                continue
            self._stamps[record.page] = record.stamp
            self._next_stamp = record.stamp + 1
            found.append(record)
        for page in written:
            if not self._stamps[page]:
                self._slots[page, :_CHECK_BYTES] = 0
        return found

    def _follows(self, before: int, stamp: int) -> bool:
        """Whether a page may come behind page `before`, with a record of that stamp."""
        if before == NO_PAGE:
            return self._full is self
        stamps = self._full._stamps
        return 0 <= before < len(stamps) and stamps[before] == stamp != 0

    def follow(self, full: PageRecords) -> None:
        """Take these as the records of a window or state, beside those of the full pages. Call it before `find`."""
        self._full = full

    def versions(self, pages: Iterable[int]) -> list[int]:
        """Return numbers that change when the record of a page is cleared."""
        return [self._versions[page] for page in pages]

    def checksum(self, page: int) -> bytes:
        """Return the checksum in a page's record."""
        at = _FIXED.size - CHECKSUM_BYTES
        return self._slots[page, at : at + CHECKSUM_BYTES].tobytes()

    def write(self, page: int, version: int, *, before: int, namespace: str, key: bytes, checksum: bytes) -> bool:
        """Record what a page holds, whose bytes are complete. `namespace` matters for the first page of a prompt.

        Returns False, with nothing written, if the page's record was cleared since `version`, if the page before has no
        record, or if namespace or key do not fit.
        """
        name = "" if before != NO_PAGE else namespace
        if len(key) > self._key_bytes_max or len(name.encode(errors="surrogatepass")) > NAMESPACE_BYTES_MAX:
            return False
        with self._lock:
            stamp_before = 0 if before == NO_PAGE else self._full._stamps[before]
            if self._versions[page] != version or not self._follows(before, stamp_before):
                return False
            stamp, self._next_stamp = self._next_stamp, self._next_stamp + 1
            packed = pack(PageRecord(page, stamp, before, stamp_before, name, key, checksum))
            self._is_empty = False
            self._slots[page, : len(packed)] = np.frombuffer(packed, np.uint8)
            self._stamps[page] = stamp
        return True

    def clear(self, pages: Iterable[int]) -> None:
        """Clear the records of pages, whose bytes may change from now on, and of late records that are on their way."""
        with self._lock:
            for page in pages:
                self._versions[page] += 1
                if self._stamps[page]:
                    self._stamps[page] = 0
                    self._slots[page, :_CHECK_BYTES] = 0

    def clear_all(self) -> None:
        """Clear all records, and those of an earlier process that were not read."""
        with self._lock:
            self._versions = [version + 1 for version in self._versions]
            self._stamps = [0] * len(self._stamps)
            self._slots[self._written(), :_CHECK_BYTES] = 0

    def _written(self) -> list[int]:
        """Return the pages whose slots are not empty."""
        if self._is_empty:
            return []
        checks: npt.NDArray[np.uint64] = self._slots[:, :_CHECK_BYTES].copy().view(np.uint64)[:, 0]
        return np.flatnonzero(checks).tolist()
