"""Records of a lasting host pool: what a process that is killed at any byte leaves is right, or nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tidekv.backends.host.page_records import (
    NAMESPACE_BYTES_MAX,
    NO_PAGE,
    PageRecord,
    PageRecords,
    pack,
    slot_bytes,
    unpack,
)

KEY_BYTES = 12
PAGES = 6
SLOT = slot_bytes(KEY_BYTES)

RECORDS = st.builds(
    PageRecord,
    page=st.integers(0, PAGES - 1),
    stamp=st.integers(1, 2**64 - 1),
    before=st.integers(NO_PAGE, PAGES - 1),
    stamp_before=st.integers(0, 2**64 - 1),
    namespace=st.text(max_size=NAMESPACE_BYTES_MAX // 4),
    key=st.binary(max_size=KEY_BYTES),
    checksum=st.binary(min_size=16, max_size=16),
)


def whole(record: PageRecord) -> bytes:
    return pack(record).ljust(SLOT, b"\0")


def fresh() -> np.ndarray:
    return np.zeros((PAGES, SLOT), np.uint8)


@given(record=RECORDS)
def test_a_record_is_read_as_it_was_written_and_in_its_own_slot_only(record: PageRecord) -> None:
    assert unpack(whole(record), record.page) == record
    assert unpack(whole(record), record.page + 1) is None


@given(before=RECORDS, after=RECORDS)
def test_a_write_torn_at_any_byte_leaves_the_new_record_or_none(before: PageRecord, after: PageRecord) -> None:
    # The slot was cleared first: what it had starts with an empty check.
    old, new = b"\0" * 8 + whole(before)[8:], pack(after)
    for torn in range(len(new) + 1):
        found = unpack(new[:torn] + old[torn:], after.page)
        assert found is None or found == after, torn
        assert torn < len(new) or found == after


@given(record=RECORDS)
def test_a_clear_torn_at_any_byte_leaves_the_record_or_none(record: PageRecord) -> None:
    slot = whole(record)
    for torn in range(9):
        found = unpack(b"\0" * torn + slot[torn:], record.page)
        assert found is None or found == record
    assert found is None


@given(record=RECORDS, at=st.integers(0, 8 * SLOT - 1))
def test_a_flipped_bit_leaves_the_record_or_none(record: PageRecord, at: int) -> None:
    slot = bytearray(whole(record))
    slot[at // 8] ^= 1 << at % 8
    assert unpack(bytes(slot), record.page) in (None, record)


@given(slot=st.binary(min_size=SLOT, max_size=SLOT))
def test_a_slot_of_anything_is_read_without_an_error(slot: bytes) -> None:
    assert unpack(slot, 0) is None


def test_what_does_not_fit_is_not_recorded() -> None:
    records = PageRecords(fresh())
    assert not records.write(0, 0, before=NO_PAGE, namespace="é" * 105, key=b"k", checksum=b"c" * 16)
    assert not records.write(0, 0, before=NO_PAGE, namespace="", key=b"k" * 200, checksum=b"c" * 16)
    assert records.write(0, 0, before=NO_PAGE, namespace="é" * 104, key=b"k", checksum=b"c" * 16)


def test_a_late_record_of_a_page_that_was_cleared_meanwhile_is_dropped() -> None:
    slots = fresh()
    records = PageRecords(slots)
    (version,) = records.versions([2])
    records.clear([2])
    assert not records.write(2, version, before=NO_PAGE, namespace="", key=b"k", checksum=b"c" * 16)
    assert not slots.any()


class Restarts(RuleBasedStateMachine):
    """Pages are recorded and cleared; now and then the process is killed in the middle of a write, and begins again.

    The model: which pages are recorded, behind which. A page is found again exactly if all pages before it are.
    """

    @initialize()
    def begin(self) -> None:
        self.slots = fresh()
        self.records = PageRecords(self.slots)
        assert self.records.find() == []
        self.model: dict[int, tuple[int, bytes]] = {}
        self.content = 0

    @rule(page=st.integers(0, PAGES - 1), before=st.integers(NO_PAGE, PAGES - 1))
    def write(self, page: int, before: int) -> None:
        if page in self.model or page == before:
            return
        assert self._write(page, before) is (before == NO_PAGE or before in self.model)

    def _write(self, page: int, before: int) -> bool:
        self.content += 1
        key = self.content.to_bytes(KEY_BYTES, "little")
        (version,) = self.records.versions([page])
        done = self.records.write(page, version, before=before, namespace="n", key=key, checksum=key[:4] * 4)
        if done:
            self.model[page] = (before, key)
        return done

    @rule(pages=st.sets(st.integers(0, PAGES - 1)))
    def clear(self, pages: set[int]) -> None:
        # As the index does: a page leaves with all that follows it.
        leaving = self._with_followers(pages)
        self.records.clear(leaving)
        for page in leaving:
            self.model.pop(page, None)

    @rule(page=st.integers(0, PAGES - 1))
    def clear_with_followers_left(self, page: int) -> None:
        """A page's record goes alone: the pages behind it are not found again, even once another page has its slot."""
        self.records.clear([page])
        for gone in self._with_followers({page}):
            self.model.pop(gone, None)
        self.kill(torn=SLOT)

    @rule()
    def clear_all(self) -> None:
        self.records.clear_all()
        self.model = {}

    @rule(page=st.integers(0, PAGES - 1), before=st.integers(NO_PAGE, PAGES - 1), torn=st.integers(0, SLOT))
    def kill_in_a_write(self, page: int, before: int, torn: int) -> None:
        if page in self.model or page == before:
            return
        was = self.slots[page].copy()
        if self._write(page, before) and not np.array_equal(self.slots[page][torn:], was[torn:]):
            self.slots[page][torn:] = was[torn:]
            del self.model[page]
        self.kill(torn=SLOT)

    @rule(torn=st.just(SLOT))
    def kill(self, torn: int) -> None:
        self.records = PageRecords(self.slots)
        self.records.find()

    @invariant()
    def another_process_finds_what_the_model_has(self) -> None:
        if not hasattr(self, "slots"):
            return
        found = PageRecords(self.slots.copy()).find()
        assert {record.page: (record.before, record.key) for record in found} == self.model
        names = {record.before: record.namespace for record in found}
        assert names.get(NO_PAGE, "n") == "n" and not any(names[before] for before in names if before != NO_PAGE)
        places = {record.page: place for place, record in enumerate(found)}
        assert all(record.before == NO_PAGE or places[record.before] < places[record.page] for record in found)

    def _with_followers(self, pages: set[int]) -> set[int]:
        leaving = set(pages)
        while more := {page for page, (before, _) in self.model.items() if before in leaving} - leaving:
            leaving |= more
        return leaving


TestRestarts = Restarts.TestCase


@pytest.mark.parametrize("version", [1, 7])
def test_records_continue_with_stamps_that_none_has(version: int) -> None:
    slots = fresh()
    for page in range(version % PAGES + 1):
        records = PageRecords(slots)
        records.find()
        assert records.write(page, 0, before=page - 1, namespace="", key=bytes([page]), checksum=b"c" * 16)
    stamps = [record.stamp for record in PageRecords(slots).find()]
    assert stamps == list(range(stamps[0], stamps[0] + version % PAGES + 1))


def test_pages_of_a_window_are_found_beside_the_full_pages_that_they_were_recorded_with() -> None:
    slots, window_slots = fresh(), fresh()

    def opened() -> tuple[PageRecords, PageRecords, list[int]]:
        full, window = PageRecords(slots), PageRecords(window_slots)
        window.follow(full)
        full.find()
        return full, window, [record.page for record in window.find()]

    full, window, found = opened()
    assert found == [] and not window.write(0, 0, before=NO_PAGE, namespace="", key=b"", checksum=b"c" * 16)
    for page in range(3):
        assert not window.write(page, 0, before=page, namespace="", key=b"", checksum=b"c" * 16)
        assert full.write(page, 0, before=page - 1, namespace="", key=b"k", checksum=b"c" * 16)
        assert window.write(page, 0, before=page, namespace="", key=b"", checksum=b"c" * 16)
    full, window, found = opened()
    assert found == [0, 1, 2]
    full.clear([2])
    full, window, found = opened()
    assert found == [0, 1]
    # The file of the full pages is made again, and happens to have the same pages.
    slots[:] = 0
    full, window, _ = opened()
    for page in range(3):
        assert full.write(page, 0, before=page - 1, namespace="", key=b"k", checksum=b"c" * 16)
    assert opened()[2] == []
