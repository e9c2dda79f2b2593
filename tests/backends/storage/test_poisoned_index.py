"""An index with rows that no engine writes: damage, and never a path, a size or an error that the writer chose."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from tidekv.backends.storage.file.records import pack_segment, unpack_segment
from tidekv.backends.storage.file.schema import LABEL_NAME, file_holdings
from tidekv.backends.storage.file.segments import namespace_directory
from tidekv.backends.storage.label import Label, read_label
from tidekv.states.errors import StorageFailed

# The rig of conftest.py, which test modules cannot import.
Rig = Any

FUZZ_S = float(os.environ.get("TIDEKV_FUZZ_S", "20"))
"""Seconds of the fuzz below. By hand: TIDEKV_FUZZ_S=3600 python -m pytest -k fuzz -s."""
SEED = int(os.environ.get("TIDEKV_FUZZ_SEED", "0")) or int.from_bytes(os.urandom(4))

POISON = {
    "a writer's name is a path": "INSERT INTO writers(name) VALUES('../../victim')",
    "a writer has no name": "INSERT INTO writers(name) VALUES(x'00')",
    "a writer's name goes on behind a NUL": f"INSERT INTO writers(name) VALUES(CAST(x'{'61' * 32}002f2e2e' AS TEXT))",
    "a writer's name is no text": "INSERT INTO writers(name) VALUES(CAST(zeroblob(1) || x'a3a3' AS TEXT))",
    "a table's statement is no text": "PRAGMA writable_schema=1; UPDATE sqlite_schema "
    "SET sql=CAST(CAST(sql AS BLOB) || x'2d2da3' AS TEXT) WHERE name='clock'",
    "a table's name is no text, nor its statement SQL": "PRAGMA writable_schema=1; UPDATE sqlite_schema "
    "SET name=CAST(x'a3' AS TEXT), sql='CREATE TABLE x(' WHERE name='clock'",
    "segments of billions of slots": "UPDATE segments SET slots=1 << 31",
    "namespaces of billions of slots": "UPDATE namespaces SET slots=1 << 31",
    "both": "UPDATE segments SET slots=1 << 31; UPDATE namespaces SET slots=1 << 31",
    "no slots": "UPDATE segments SET slots=0; UPDATE namespaces SET slots=0",
    "slots that are text": "UPDATE segments SET slots='many'",
    "a segment of a negative number": "INSERT INTO segments VALUES(-1, 1, 8, 40960, 0, 0)",
    "a segment of too high a number": "UPDATE segments SET id=1 << 60",
    "no more numbers for segments": "UPDATE sqlite_sequence SET seq=9223372036854775807",
    "a segment of an unknown namespace": "UPDATE segments SET namespace=77",
    "a segment that is neither there nor gone": "UPDATE segments SET retired=7",
    "a segment of another size": "UPDATE segments SET bytes=-1",
    "a segment of the size of the world": "UPDATE segments SET bytes=1 << 62",
    "a segment of a size in words": "UPDATE segments SET bytes='x'",
    "a change after the clock": "UPDATE slots SET seq=1 << 62",
    "a use after the clock": "UPDATE slots SET used=9223372036854775807",
    "a clock at its end": "UPDATE clock SET value=9223372036854775807",
    "a clock in words": "UPDATE clock SET value='noon'",
    "no clock": "DELETE FROM clock",
    "page bytes at the end": "UPDATE namespaces SET page_bytes=9223372036854775807",
    "page bytes below zero": "UPDATE namespaces SET page_bytes=-4096",
    "a namespace that is text": "UPDATE namespaces SET digest='../../../../../../../tmp/x'",
    "a short namespace": "UPDATE namespaces SET digest=x'abcd'",
    "a key that is text": "UPDATE slots SET key='k' WHERE state=2",
    "a short key": "UPDATE slots SET key=x'00' WHERE state=2",
    "no key": "UPDATE slots SET key=NULL WHERE state=2",
    "an unknown state": "UPDATE slots SET state=9",
    "a state in words": "UPDATE slots SET state='x'",
    "an owner of a page": "UPDATE slots SET owner=1 WHERE state=2",
    "an owner in words": "UPDATE slots SET owner='me', state=1, key=NULL",
    "a slot beyond its segment": "UPDATE slots SET slot=slot + 1000 WHERE state=2",
    "a slot below zero": "UPDATE slots SET slot=-slot",
    "a slot of an unknown segment": "UPDATE slots SET slot=slot + (5 << 20) WHERE state=2",
    "a slot of another namespace": "UPDATE slots SET namespace=9",
    "a table is a view": "DROP TABLE writers; CREATE VIEW writers AS SELECT 1 AS id, 'x' AS name",
    "a trigger": "CREATE TRIGGER x AFTER INSERT ON writers BEGIN DELETE FROM slots; END",
    "another table": "CREATE TABLE x(y)",
    "another index": "CREATE INDEX x ON slots(key)",
    "a table less": "DROP TABLE writers",
}


def poison(root: Path, statements: str) -> None:
    with contextlib.closing(sqlite3.connect(root / "index.sqlite")) as db:
        db.executescript(statements)


@pytest.mark.parametrize(
    ("files", "what"),
    [
        *(pytest.param("file-threads", what) for what in POISON),
        pytest.param("file-nixl", "no clock", marks=pytest.mark.nixl),
    ],
    indirect=["files"],
)
async def test_a_row_that_no_engine_writes_is_damage(files: Rig, tmp_path: Path, what: str) -> None:
    engine = await files.open()
    assert all(await files.put(engine, range(6)))
    await engine.close()
    victim = tmp_path / "victim.lock"
    victim.write_text("the user's")
    poison(files.root, POISON[what])
    with pytest.raises(StorageFailed, match="cannot be read"):
        file_holdings(files.root)
    engine = await files.open()
    # Recovered from the segments, like any index that is damaged.
    assert all(await files.get(engine, range(6)))
    assert (files.root / "index.bad").exists()
    assert victim.read_text() == "the user's"
    assert all(await files.put(engine, range(6, 20)))


async def test_an_index_that_is_poisoned_in_use_is_refused(files: Rig) -> None:
    engine = await files.open()
    await files.put(engine, range(3))
    poison(files.root, POISON["a writer's name is a path"])
    with pytest.raises(StorageFailed, match=r"is damaged .*table writers.*stop every process"):
        await files.open()
    assert all(await files.get(engine, range(3)))


@pytest.mark.parametrize("name", ["'../../victim'", "x'2e2e2f'", "CAST(x'2e2e2f002f' AS TEXT)"])
async def test_a_writer_that_is_poisoned_in_use_is_no_path(files: Rig, tmp_path: Path, name: str) -> None:
    """A running engine takes the slots of dead writers; what it reads then was not there at the opening's check."""
    engine = await files.open(capacity=40 * 4096)
    await files.put(engine, range(3))
    victim = tmp_path / "victim.lock"
    victim.write_text("the user's")
    poison(files.root, f"INSERT INTO writers(name) VALUES({name})")
    for first in range(0, 120, 20):
        assert all(await files.put(engine, range(first, first + 20)))
    assert victim.read_text() == "the user's"


async def test_all_that_engines_write_passes_the_check(files: Rig) -> None:
    one, other = await files.open(capacity=40 * 4096), await files.open(capacity=40 * 4096, namespace=b"o" * 32)
    for first in range(0, 60, 10):
        await files.put(one, range(first, first + 10))
        await files.put(other, range(first, first + 5))
    await one.delete(files.keys([55, 56]))
    await files.get(one, range(60))
    files.touched.clear()
    files.gate.clear()
    task = asyncio.ensure_future(files.put(one, range(100, 104)))
    await files.touched.wait()
    # Slots are reserved, free, published and retired at this moment.
    await (await files.open(capacity=40 * 4096)).close()
    files.gate.set()
    await task
    await other.clear()
    await one.close()
    await other.close()
    await files.open()
    assert not (files.root / "index.bad").exists()


@pytest.mark.parametrize("page_bytes", [1 << 63, (1 << 64) - 1, 1 << 40])
async def test_a_segment_with_impossible_pages_makes_no_index(files: Rig, page_bytes: int) -> None:
    engine = await files.open()
    assert all(await files.put(engine, range(3)))
    await engine.close()
    segment = files.only_segment()
    geometry = unpack_segment(segment.read_bytes()[:4096])
    assert geometry is not None
    impossible = type(geometry)(namespace=geometry.namespace, page_bytes=page_bytes, slots=1)
    segment.with_name("0000000002.seg").write_bytes(pack_segment(impossible).ljust(9000, b"\0"))
    (files.root / "index.sqlite").unlink()
    engine = await files.open()
    assert all(await files.get(engine, range(3)))


VALUES = [
    "NULL", "0", "-1", "1", "2", "3", "7", "1 << 20", "1 << 31", "1 << 40", "(1 << 62)", "9223372036854775807",
    "-9223372036854775808", "1.5", "1e300", "''", "'../../../x'", "'1'", "x''", "x'00'", "zeroblob(32)",
    "randomblob(32)", "zeroblob(5000)", "'" + "a" * 32 + "'",
]  # fmt: skip
COLUMNS = {
    "clock": ["id", "value"],
    "namespaces": ["id", "digest", "page_bytes", "slots"],
    "segments": ["id", "namespace", "slots", "bytes", "retired", "seq"],
    "slots": ["slot", "namespace", "state", "owner", "seq", "used", "key"],
    "writers": ["id", "name"],
    "sqlite_sequence": ["name", "seq"],
}


def odd_statement(dice: random.Random) -> str:
    table = dice.choice(list(COLUMNS))
    columns = COLUMNS[table]
    kind = dice.randrange(4)
    if kind == 0:
        return f"DELETE FROM {table} WHERE random() % 2"
    if kind == 1:
        values = ", ".join(dice.choice(VALUES) for _ in columns)
        return f"INSERT INTO {table}({', '.join(columns)}) VALUES({values})"
    column = dice.choice(columns)
    value = dice.choice([*VALUES, f"{column} + 1", f"{column} * 2", f"-{column}"])
    return f"UPDATE OR IGNORE {table} SET {column}={value}" + ("" if kind == 2 else " WHERE random() % 2")


def damage_file(dice: random.Random, path: Path) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(dice.randrange(1, 6)):
        first = dice.randrange(len(content)) if dice.randrange(3) else dice.randrange(min(len(content), 200))
        content[first : first + dice.choice([1, 8, 64])] = dice.randbytes(dice.choice([1, 8, 64]))
    if not dice.randrange(4):
        del content[dice.randrange(len(content)) :]
    path.write_bytes(content)


@pytest.mark.slow(limit_s=120 + 2 * FUZZ_S)
async def test_fuzz_of_the_index_the_segments_and_the_label(files: Rig) -> None:
    """Each round damages a directory in some way and opens it: every page that is served is right, every error is
    StorageFailed, and what is put afterwards is found.
    """
    if files.kind == "file-nixl":
        pytest.skip("pages move in one way only: what is damaged is looked at before they do")
    print(f"TIDEKV_FUZZ_SEED={SEED}")
    end_s, rounds = time.monotonic() + FUZZ_S, 0
    keep = files.root
    while time.monotonic() < end_s:
        dice = random.Random(f"{SEED} {rounds}")
        files.root = keep / str(rounds)
        try:
            await one_round(files, dice)
        except Exception as error:
            error.add_note(f"round {rounds} of TIDEKV_FUZZ_SEED={SEED}")
            raise
        rounds += 1
    print(f"{rounds} rounds")


async def one_round(files: Rig, dice: random.Random) -> None:
    files.root.mkdir(parents=True, mode=0o700)
    engine = await files.open()
    assert all(await files.put(engine, range(12)))
    await engine.set_label(b'{"model":"m","dtype":"f","kind":"mha","page_size":1,"layers":1,"kv_heads":1,"head_dim":1}')
    await engine.close()
    label = namespace_directory(files.root, files.NAMESPACE) / LABEL_NAME
    with contextlib.closing(sqlite3.connect(files.root / "index.sqlite")) as db:
        if dice.randrange(3):
            for _ in range(dice.randrange(1, 4)):
                with contextlib.suppress(sqlite3.Error, OverflowError):
                    db.executescript(odd_statement(dice))
    for path in (files.root / "index.sqlite", files.root / "tick", label, *files.root.glob("*/*.seg")):
        if not dice.randrange(3) and path.exists() and path.stat().st_size:
            damage_file(dice, path)
    with contextlib.suppress(StorageFailed):
        for holding in file_holdings(files.root):
            found = read_label(holding.label)
            assert found is None or isinstance(found, Label)
    try:
        engine = await files.open()
    except StorageFailed as failed:
        # The one number that decides alone: an index of a version to come is never taken for damage.
        assert "is of version" in str(failed), failed
        return
    # What is served is right: the rig compares every byte.
    await files.get(engine, range(12))
    assert all(await files.put(engine, range(12, 24)))
    assert all(await files.get(engine, range(12, 24)))
    await engine.probe()
    async for verdict in engine.verify():
        assert verdict.ok or verdict.cause
    await engine.close()
