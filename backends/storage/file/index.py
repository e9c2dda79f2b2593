"""The index of a directory of pages: which key is in which slot, shared by processes through SQLite.

It decides which process may write where, and which pages are evicted; whether a page is whole is decided by its record
alone. Every change is one transaction that also advances a clock kept in the index itself, so a process can ask for the
changes since a tick without relying on any clock of the machine.

    a slot:   free ──reserve──▶ writing (by one living writer) ──publish──▶ published ──evict, forget──▶ free

A process that dies leaves slots in writing; another process reclaims them as soon as it finds the writer's lock free.
All methods block and belong to one thread, unless their docstring states otherwise.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import filterfalse
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from tidekv.backends.storage.base import KEY_BYTES
from tidekv.backends.storage.file.ownership import open_file
from tidekv.backends.storage.file.records import Geometry
from tidekv.backends.storage.file.schema import connect
from tidekv.backends.storage.file.segments import (
    INDEX_BITS,
    NO_WAIT,
    namespace_directory,
    segment_name,
    slot_runs,
)
from tidekv.backends.storage.file.slot_cache import SlotCache, SlotState
from tidekv.backends.storage.file.writer_locks import WriterLock

T = TypeVar("T")

INDEX_FILE: Final = "index.sqlite"
BUSY_SLICE_S: Final = 0.1
"""Seconds that SQLite waits for a lock at once. `hurry` is checked between two waits."""
FULL_S: Final = 30.0
"""Seconds after a write for which the disk had no space, until slots that may need more of it are tried again."""
ROWS_AT_ONCE: Final = 1 << 13
PERIODS: Final = 16
"""The use of a page is written once while so many parts of the slots are filled."""
NOTED_MAX: Final = 1 << 16
"""Maximum slots of which it is known that their use is written."""
READ_AT_OPENING_MAX: Final = 1 << 16
"""Slots of a directory that is read before its opening ends; a larger one is read while the engine starts."""
# Pages of fewer bytes than twice this stay together in one file.
RUN_BYTES_MIN: Final = 1 << 20

# Statements for runs of slots, with named parameters. One statement replaces one for each slot,
# each of which would release the interpreter and have to take it back.
_RUN: Final = "WITH RECURSIVE run(slot) AS (SELECT :first UNION ALL SELECT slot + 1 FROM run WHERE slot < :last) "
_SET: Final = (
    _RUN + "INSERT INTO slots(slot, namespace, state, owner, seq, used, key) "
    "SELECT slot, :namespace, :state, :owner, :seq, 0, NULL FROM run WHERE true "
    "ON CONFLICT(slot) DO UPDATE SET state=excluded.state, owner=excluded.owner, seq=excluded.seq, used=0, key=NULL"
)
# :keys are the keys of the run, concatenated.
_PUBLISH: Final = (
    _RUN + "INSERT INTO slots(slot, namespace, state, owner, seq, used, key) "
    "SELECT slot, :namespace, 2, 0, :seq, :used, "
    f"substr(:keys, (slot - :first) * {KEY_BYTES} + 1, {KEY_BYTES}) FROM run WHERE true "
    "ON CONFLICT(slot) DO UPDATE SET state=2, owner=0, seq=excluded.seq, used=excluded.used, key=excluded.key"
)


class SpaceLimits(NamedTuple):
    """Space of one namespace on the disk."""

    capacity_bytes: int
    low_water: float
    """Share of the slots that an eviction leaves in use."""


class FileIndex:
    """The index as one engine uses it, for one namespace."""

    def __init__(
        self,
        root: Path,
        *,
        namespace_id: int,
        geometry: Geometry,
        limits: SpaceLimits,
        writer: WriterLock,
        busy_timeout_s: float,
        erase: Callable[[Sequence[int]], None],
    ) -> None:
        """`erase` clears the headers of slots."""
        self.root = root
        self.geometry = geometry
        self.mirror = SlotCache()
        self._evictions = 0
        self.used_bytes = 0
        self._namespace = namespace_id
        self._limits = limits
        self._writer = writer
        self._erase = erase
        self._busy_timeout_s = busy_timeout_s
        self._in_a_hurry = threading.Event()
        self._tick = ChangeTick(root)
        try:
            self._db = connect(root / INDEX_FILE, busy_timeout_s=min(busy_timeout_s, BUSY_SLICE_S))
        except BaseException:
            self._tick.close()
            raise
        self._seen = -1
        self._data_version = -1
        # Filled on the event loop, emptied by the next change.
        self.touched: deque[int] = deque()
        # The change from which all uses count until a part of the slots is written again, and the slots whose use is
        # written. A use within the same period changes nothing about the order of evictions that matters.
        self._period = 0
        self._noted: set[int] = set()
        self._written = 0
        self._to_remove: list[Path] = []
        self._given_up: list[int] = []
        # Segments whose files were cut to make room on the disk, until a change retires them.
        self._cut: list[tuple[int, bytes]] = []
        self._full_until_s = 0.0
        # No writer id yet, so no slot is ours.
        self._me = -1
        try:
            self.with_room(self._enter)
        except BaseException:
            self._close_files()
            raise

    def _enter(self) -> None:
        """Enter the writer, free what dead ones left, and keep to the capacity.

        The rows of a large directory are read by the first call that needs them, since that takes seconds.
        """
        slots = self._db.execute(
            "SELECT COALESCE(SUM(slots), 0) FROM segments WHERE namespace=? AND retired=0", (self._namespace,)
        ).fetchone()[0]
        with self._change(is_read=slots <= READ_AT_OPENING_MAX) as seq:
            self._me = int(self._db.execute("INSERT INTO writers(name) VALUES(?)", (self._writer.name,)).lastrowid or 0)
            self._take_back_from_the_dead(seq)
            self._shrink(seq)

    @property
    def is_current(self) -> bool:
        """True if the mirror has all changes that were made. From any thread, without waiting. False if that is
        unknown, or if a change is being made.
        """
        return self._tick.is_at(self._seen)

    def refresh(self) -> bool:
        """Apply what other processes changed; False if they changed nothing since the last call."""
        version = self._db.execute("PRAGMA data_version").fetchone()[0]
        if version == self._data_version and self._seen >= 0:
            return False
        self._db.execute("BEGIN")
        try:
            self._pull()
        finally:
            self._db.execute("COMMIT")
        self._data_version = version
        self.mirror.settle(written=True)
        return True

    def reserve(self, count: int) -> list[int]:
        """Reserve up to `count` slots for writing; older pages make room for them. Fewer if that is not enough."""
        with self._change() as seq:
            emptied = self._replace_oldest(count, seq) if time.monotonic() < self._full_until_s else []
            slots = sorted(emptied)
            if not emptied:
                while self.mirror.free_count < count and self._add_segment(seq):
                    pass
                if self.mirror.free_count < count:
                    self._take_back_from_the_dead(seq)
                emptied = self._make_room(count, seq) if self.mirror.free_count < count else []
                slots = self.mirror.take_free(count, run_min=max(RUN_BYTES_MIN // self.geometry.page_bytes, 1))
            # A slot that is freed and taken in one change is written once: rows are the cost of a change.
            self._write_rows(sorted(set(emptied).difference(slots)), SlotState.FREE, seq)
            self._set(slots, SlotState.WRITING, seq)
        return slots

    def publish(self, pairs: Sequence[tuple[bytes, int]], wasted: Sequence[int]) -> list[bool]:
        """Publish written slots under their keys, replacing what was there; free the `wasted` ones. False if a slot is
        no longer ours.
        """
        with self._change() as seq:
            self._set([slot for slot in wasted if self.mirror.owner(slot) == self._me], SlotState.FREE, seq)
            done = [self.mirror.owner(slot) == self._me for _, slot in pairs]
            ours = {key: slot for (key, slot), is_done in zip(pairs, done, strict=True) if is_done}
            # The previous slots of the keys, and slots whose key is repeated later in the batch.
            kept = set(ours.values())
            stale = [self.mirror.slot_by_key[key] for key in ours if key in self.mirror.slot_by_key]
            stale += [slot for (_, slot), is_done in zip(pairs, done, strict=True) if is_done and slot not in kept]
            self._set(stale, SlotState.FREE, seq)
            by_slot = {slot: key for key, slot in ours.items()}
            slots = sorted(by_slot)
            self._db.executemany(
                _PUBLISH,
                [
                    {
                        "first": first,
                        "last": last,
                        "namespace": self._namespace,
                        "seq": seq,
                        "used": self._period,
                        "keys": b"".join([by_slot[slot] for slot in range(first, last + 1)]),
                    }
                    for first, last in _bounds(slots)
                ],
            )
            self.mirror.publish(by_slot)
            self._written += len(slots)
        return done

    def give_up(self, slots: Sequence[int]) -> None:
        """Leave reserved slots to the next change, if the one that should have freed them failed."""
        self._given_up += slots

    def forget(self, pairs: Sequence[tuple[bytes, int | None]]) -> list[bool]:
        """Remove keys; if a slot is given, only if the key is still in that slot. True for each removed."""
        with self._change() as seq:
            found: list[bool] = []
            for key, expected in pairs:
                slot = self.mirror.slot_by_key.get(key)
                is_there = slot is not None and expected in (None, slot)
                found.append(is_there)
                if slot is not None and is_there:
                    self._set([slot], SlotState.FREE, seq)
        return found

    def clear(self) -> int:
        """Remove every page of the namespace and its files; returns how many pages there were."""
        with self._change() as seq:
            return sum(
                self._retire(segment, self.geometry.namespace, seq) for segment in list(self.mirror.slots_by_segment)
            )

    def note_disk_full(self) -> None:
        """Use no slot that may need more of the disk for a while: pages replace older ones. From any thread."""
        self._full_until_s = time.monotonic() + FULL_S

    def with_room(self, work: Callable[[], T]) -> T:
        """Do work that changes the index. If the disk has no space for that, the index's own log makes room, then the
        file of the coldest segment, and the work is done again.
        """
        for make_room in (self._cut_log, self._cut_coldest):
            try:
                return work()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                    raise
                self.note_disk_full()
                make_room()
        return work()

    def _cut_log(self) -> None:
        """Move what the log has into the database, and give its place on the disk back, unless a process reads it."""
        with contextlib.suppress(sqlite3.OperationalError):
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def _cut_coldest(self) -> None:
        """Cut the file of the coldest segment; the next change retires it. Its pages are misses from now on."""
        for segment, digest in self._db.execute(
            # Not one that is being written: its pages would be lost at once.
            "SELECT s.id, n.digest FROM segments s JOIN namespaces n ON n.id=s.namespace WHERE s.retired=0 AND NOT "
            "EXISTS (SELECT 1 FROM slots WHERE state=1 AND slot BETWEEN s.id << :bits AND (s.id + 1 << :bits) - 1) "
            "ORDER BY (SELECT MAX(used) FROM slots WHERE slot BETWEEN s.id << :bits AND (s.id + 1 << :bits) - 1)",
            {"bits": INDEX_BITS},
        ).fetchall():
            if cut_file(namespace_directory(self.root, digest) / segment_name(segment)):
                self._cut.append((segment, digest))
                return

    def take_evictions(self) -> int:
        """Return how many pages were evicted since the last call."""
        evictions, self._evictions = self._evictions, 0
        return evictions

    def touch(self, slots: Iterable[int]) -> None:
        """Note on the event loop that slots are in use, for the next change to write; not again in the same period."""
        self.touched.extend(slots if self._ends_period() else filterfalse(self._noted.__contains__, slots))

    def note_touched(self) -> None:
        """Write down which slots were used; any other change does that too."""
        with self._change():
            pass

    def hurry(self) -> None:
        """Stop waiting for the lock of another process: a change that cannot begin at once fails. From any thread."""
        self._in_a_hurry.set()

    def close(self) -> None:
        """Free reserved slots and the writer's entry, and close the file."""
        try:
            with self._change() as seq:
                self._db.execute("UPDATE slots SET state=0, owner=0, seq=? WHERE state=1 AND owner=?", (seq, self._me))
                self._db.execute("DELETE FROM writers WHERE id=?", (self._me,))
        except sqlite3.Error:
            # The directory is gone or full. The next process reclaims the slots of a dead writer.
            pass
        finally:
            self._close_files()

    def _close_files(self) -> None:
        self._db.close()
        self._tick.close()

    @contextmanager
    def _change(self, *, is_read: bool = True) -> Iterator[int]:
        """One change of the index: brings the mirror up to date first, and writes recency along with it."""
        self._begin()
        left: list[int] = []
        used = set[int]()
        try:
            if is_read:
                self._pull()
            seq = int(self._db.execute("SELECT value FROM clock").fetchone()[0]) + 1
            self._db.execute("UPDATE clock SET value=?", (seq,))
            if self._ends_period():
                self._period, self._noted, self._written = seq, set(), 0
            used = {self.touched.popleft() for _ in range(len(self.touched))} - self._noted
            self._db.executemany(
                "UPDATE slots SET used=MAX(used, ?) WHERE slot BETWEEN ? AND ?",
                [(self._period, first, last) for first, last in _bounds(sorted(used))],
            )
            self._noted |= used
            for segment, digest in self._cut:
                self._retire(segment, digest, seq)
            left, self._given_up = self._given_up, []
            self._set([slot for slot in left if self.mirror.owner(slot) == self._me], SlotState.FREE, seq)
            yield seq
            self.used_bytes = self._total_bytes()
            self._tick.write(seq)
            self._db.execute("COMMIT")
        except BaseException:
            # The mirror may be ahead of what was written: read everything again next time.
            self._seen = -1
            # Kept again at their next use.
            self._noted -= used
            self._given_up += left
            self._to_remove.clear()
            self.mirror.settle(written=False)
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        self._seen = seq if is_read else -1
        self._cut.clear()
        self.mirror.settle(written=True)
        self._remove_files()

    def _ends_period(self) -> bool:
        """Whether the next change begins a period, in which every use is written again."""
        return self._written >= self.mirror.slot_count // PERIODS or len(self._noted) > NOTED_MAX

    def _begin(self) -> None:
        """Take the index's write lock. Raises that it is busy after `busy_timeout_s`, or at once in a hurry."""
        deadline_s = time.monotonic() + self._busy_timeout_s
        while True:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                is_over = self._in_a_hurry.is_set() or time.monotonic() >= deadline_s
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or is_over:
                    raise

    def _pull(self) -> None:
        """Bring the mirror up to date, inside a transaction."""
        is_first = self._seen < 0
        if is_first:
            self.mirror.forget_all()
        for segment, slots, retired in self._db.execute(
            "SELECT id, slots, retired FROM segments WHERE namespace=? AND seq>? ORDER BY id",
            (self._namespace, self._seen),
        ):
            if retired:
                self.mirror.drop_segment(segment)
            else:
                self.mirror.add_segment(segment, slots)
        changed = self._db.execute(
            "SELECT slot, state, owner, key FROM slots WHERE namespace=? AND seq>?", (self._namespace, self._seen)
        )
        # In parts: one call for a million rows would keep the interpreter from the event loop.
        while rows := changed.fetchmany(ROWS_AT_ONCE):
            if is_first:
                self.mirror.load(rows)
                continue
            for row in rows:
                self.mirror.apply(*row)
        self._seen = int(self._db.execute("SELECT value FROM clock").fetchone()[0])

    def _set(self, slots: Sequence[int], state: SlotState, seq: int) -> None:
        """Set slots to a state without a key, in the index and in the mirror."""
        self._write_rows(sorted(slots), state, seq)
        if state == SlotState.WRITING:
            self.mirror.reserve(slots, self._me)
        else:
            self._empty(slots)

    def _write_rows(self, slots: Sequence[int], state: SlotState, seq: int) -> None:
        """Write a state without a key to the index, for sorted slots."""
        owner = self._me if state == SlotState.WRITING else 0
        row = {"namespace": self._namespace, "state": state, "owner": owner, "seq": seq}
        self._db.executemany(_SET, [{"first": first, "last": last, **row} for first, last in _bounds(slots)])

    def _empty(self, slots: Sequence[int]) -> None:
        """Clear slots, in their headers and in the mirror.

        Inside the transaction, since no other process can take the slot before it ends. After a crash before that, the
        page is a miss.
        """
        self._erase(self.mirror.keyed(slots))
        self.mirror.free(slots)

    def _total_bytes(self) -> int:
        return int(self._db.execute("SELECT COALESCE(SUM(bytes), 0) FROM segments WHERE retired=0").fetchone()[0])

    def _add_segment(self, seq: int) -> bool:
        """Add a segment if the bound allows; its file is made when it is first written."""
        if self._total_bytes() + self.geometry.segment_bytes > self._limits.capacity_bytes:
            return False
        row = self._db.execute(
            "INSERT INTO segments(namespace, slots, bytes, retired, seq) VALUES(?, ?, ?, 0, ?)",
            (self._namespace, self.geometry.slots, self.geometry.segment_bytes, seq),
        )
        self.mirror.add_segment(int(row.lastrowid or 0), self.geometry.slots)
        return True

    def _take_back_from_the_dead(self, seq: int) -> None:
        """Free the slots that writers had reserved when they died."""
        for writer, name in self._db.execute("SELECT id, name FROM writers").fetchall():
            if self._writer.is_alive(name):
                continue
            left = "namespace=? AND state=1 AND owner=?"
            mine = self._db.execute(f"SELECT slot FROM slots WHERE {left}", (self._namespace, writer)).fetchall()
            self._set([slot for (slot,) in mine], SlotState.FREE, seq)
            self._db.execute("UPDATE slots SET state=0, owner=0, seq=? WHERE state=1 AND owner=?", (seq, writer))
            self._db.execute("DELETE FROM writers WHERE id=?", (writer,))
            self._writer.forget(name)

    def _make_room(self, count: int, seq: int) -> list[int]:
        """Free slots: whole segments of unused namespaces, or else our own oldest pages.

        Returns the slots of those pages: they are empty and free, but unchanged in the index.
        """
        while self.mirror.free_count < count and self._take_over_segment(seq) and self._add_segment(seq):
            pass
        short = count - self.mirror.free_count
        if short <= 0:
            return []
        spare = int(self.mirror.slot_count * (1 - self._limits.low_water))
        return self._evict(short + spare)

    def _replace_oldest(self, count: int, seq: int) -> list[int]:
        """Empty our oldest slots, which have their place on the disk: free ones may have none. None if a segment of
        another namespace made room on the disk instead, or if there is no page of ours.
        """
        if self._take_over_segment(seq):
            self._full_until_s = 0.0
            return []
        return self._evict(count)

    def _evict(self, count: int) -> list[int]:
        """Empty the slots of our oldest pages; returns them, unchanged in the index."""
        # Of pages used together the last one is evicted first: a prefix without its beginning is worthless.
        found = self._db.execute(
            "SELECT slot FROM slots WHERE namespace=? AND state=2 ORDER BY used, slot DESC LIMIT ?",
            (self._namespace, count),
        ).fetchall()
        victims = [slot for (slot,) in found]
        self._empty(victims)
        self._evictions += len(victims)
        return victims

    def _take_over_segment(self, seq: int) -> bool:
        """Retire the coldest segment of another namespace if we have no pages, or if all of ours were used later."""
        coldest = self._db.execute(
            "SELECT s.id, n.digest, (SELECT COALESCE(MAX(used), 0) FROM slots WHERE slot BETWEEN s.id << ? AND "
            "(s.id + 1 << ?) - 1) AS last FROM segments s JOIN namespaces n ON n.id=s.namespace "
            "WHERE s.retired=0 AND s.namespace<>? ORDER BY last LIMIT 1",
            (INDEX_BITS, INDEX_BITS, self._namespace),
        ).fetchone()
        if coldest is None:
            return False
        segment, digest, last = coldest
        ours = self._db.execute(
            "SELECT MIN(used) FROM slots WHERE namespace=? AND state=2", (self._namespace,)
        ).fetchone()[0]
        if ours is not None and last >= ours:
            return False
        self._retire(segment, digest, seq)
        return True

    def _shrink(self, seq: int) -> None:
        """Retire segments until the capacity holds; it may be lower than last time."""
        while self._total_bytes() > self._limits.capacity_bytes:
            segment, digest = self._db.execute(
                "SELECT s.id, n.digest FROM segments s JOIN namespaces n ON n.id=s.namespace WHERE s.retired=0 "
                "ORDER BY (SELECT MAX(used) FROM slots WHERE slot BETWEEN s.id << ? AND (s.id + 1 << ?) - 1) LIMIT 1",
                (INDEX_BITS, INDEX_BITS),
            ).fetchone()
            self._retire(segment, digest, seq)

    def _retire(self, segment: int, digest: bytes, seq: int) -> int:
        """Drop a segment from the index; its file is removed when the change is written. Returns our pages in it."""
        self._db.execute("UPDATE segments SET retired=1, seq=? WHERE id=?", (seq, segment))
        self._db.execute(
            "DELETE FROM slots WHERE slot BETWEEN ? AND ?", (segment << INDEX_BITS, (segment + 1 << INDEX_BITS) - 1)
        )
        self._to_remove.append(namespace_directory(self.root, digest) / segment_name(segment))
        return self.mirror.drop_segment(segment)

    def _remove_files(self) -> None:
        """Remove the files of retired segments. They are truncated first, since another process may keep one open."""
        while self._to_remove:
            path = self._to_remove.pop()
            cut_file(path)
            # Gone already; otherwise removed when the directory is opened next.
            with contextlib.suppress(OSError):
                path.unlink()


def cut_file(path: Path) -> bool:
    """Truncate a file, so that the disk has its bytes although a process keeps it open. False if it has none."""
    try:
        file = open_file(path, os.O_RDWR)
        try:
            had_bytes = os.fstat(file).st_blocks > 0
            os.ftruncate(file, 0)
        finally:
            os.close(file)
    except OSError:
        return False
    return had_bytes


def _bounds(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and the last slot of each run of neighbors in sorted slots."""
    return [(slots[run.first], slots[run.first + run.count - 1]) for run in slot_runs(slots)]


TICK_FILE: Final = "tick"
_TICK_BYTES: Final = 8


class ChangeTick:
    """The tick of the newest change, in a file of eight bytes: shows whether to ask SQLite, without a thread.

    The event loop reads the file without ever waiting. It only shows that something may have changed: a change writes
    its tick before it is committed, so the tick is visible wherever the change is. A change that fails after that costs
    other processes a query, nothing more. `write` requires the index's write lock.
    """

    def __init__(self, root: Path) -> None:
        self._file = open_file(root / TICK_FILE, os.O_RDWR | os.O_CREAT)

    def write(self, seq: int) -> None:
        """Write that a change of this tick is about to be committed.

        A failure only delays other processes: it must not fail a change that the index accepts.
        """
        with contextlib.suppress(OSError):
            os.pwrite(self._file, seq.to_bytes(_TICK_BYTES, "little"), 0)

    def is_at(self, seq: int) -> bool:
        """True if nothing was changed since that tick. False also if the file cannot be read without waiting."""
        if not NO_WAIT:
            return False
        found = bytearray(_TICK_BYTES)
        try:
            os.preadv(self._file, [found], 0, NO_WAIT)
        except OSError:
            return False
        return int.from_bytes(found, "little") == seq

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
