"""The file of a lasting host pool: it always opens, for one process at a time, and never with pages of another pool."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tidekv import HostPool, InvalidConfig, KVLayout, OutOfMemory
from tidekv.backends.host import pool_file
from tidekv.backends.host.page_records import NO_PAGE
from tidekv.backends.host.pool_file import PoolFile, read_first_block

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=4)
MODEL_A, MODEL_B = b"a" * 32, b"b" * 32


def opened(path: Path, *, page_count: int = 16, page_bytes: int = 1024) -> PoolFile:
    return PoolFile.open(path, page_count=page_count, page_bytes=page_bytes, key_bytes_max=20)


def with_a_page(path: Path, identity: bytes = MODEL_A) -> None:
    file = opened(path)
    assert file.begin(identity, "model a") == ""
    file.pages[3] = 7
    (version,) = file.records.versions([3])
    assert file.records.write(3, version, before=NO_PAGE, namespace="", key=b"key", checksum=b"c" * 16)
    file.close()


def found(path: Path, identity: bytes = MODEL_A, **shape: int) -> tuple[str, list[int]]:
    file = opened(path, **shape)
    try:
        return file.begin(identity, "model b"), [record.page for record in file.records.find()]
    finally:
        file.close()


def test_pages_and_records_outlive_the_pool(tmp_path: Path) -> None:
    with_a_page(tmp_path / "pool")
    file = opened(tmp_path / "pool")
    assert file.begin(MODEL_A, "model a") == ""
    (record,) = file.records.find()
    assert (record.page, record.key, record.checksum) == (3, b"key", b"c" * 16)
    assert (file.pages[3] == 7).all() and file.pages.ctypes.data % 4096 == 0
    file.close()


def test_a_pool_of_another_model_or_shape_starts_empty_and_says_why(tmp_path: Path) -> None:
    for shape, words in (
        ({}, "it has pages of model a"),
        ({"page_count": 17}, "it has 16 pages of 1024 bytes, not 17 pages of 1024 bytes"),
        ({"page_bytes": 2048}, "it has 16 pages of 1024 bytes, not 16 pages of 2048 bytes"),
    ):
        with_a_page(path := tmp_path / f"pool {words}")
        assert found(path, MODEL_B, **shape) == (words, [])
        # From then on it is the pool of that one.
        assert found(path, MODEL_B, **shape) == ("", [])


def test_a_damaged_first_block_starts_an_empty_pool(tmp_path: Path) -> None:
    with_a_page(path := tmp_path / "pool")
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)
    assert found(path) == ("its first block is damaged, or of another version", [])


def test_a_file_whose_creation_was_cut_off_at_any_byte_opens_empty(tmp_path: Path) -> None:
    with_a_page(path := tmp_path / "pool", MODEL_B)
    old = path.read_bytes()[:4096]
    assert found(path) == ("it has pages of model a", [])
    whole = path.read_bytes()
    first, end = whole[:4096], len(whole[:4096].rstrip(b"\0"))
    # The order of `begin`: the check is cleared, the block is written, and then the check.
    cleared = old[:8] + b"\0" * 8 + old[16:]
    states = [old[:at] + b"\0" * (16 - at) + old[16:] for at in range(8, 17)]
    states += [cleared[:16] + first[16:at] + cleared[at:] for at in range(16, end)]
    states += [first[:at] + b"\0" * (16 - at) + first[16:] for at in range(8, 17)]
    states += [whole[:at].ljust(4096, b"\0") for at in range(9)]
    for state in states:
        path.write_bytes(state + whole[4096:])
        # No record has been written yet, so nothing can be found, whatever the block says.
        assert found(path)[1] == []
        assert read_first_block(path.read_bytes()[:4096]) is not None
    for size in (0, 1, 8, 4095, 4096, 9000):
        path.write_bytes(whole[:size])
        assert found(path)[1] == []


def test_a_file_that_is_no_pool_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("tidal notes")
    with pytest.raises(InvalidConfig, match="not a pool of tidekv: name another path"):
        opened(tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == "tidal notes"
    (tmp_path / "link").symlink_to(tmp_path / "notes")
    with pytest.raises(InvalidConfig, match="cannot be opened"):
        opened(tmp_path / "link")
    with pytest.raises(InvalidConfig, match="cannot be opened"):
        opened(tmp_path / "missing" / "pool")


HOLD = """
import sys
from pathlib import Path
from tidekv.backends.host.pool_file import PoolFile
file = PoolFile.open(Path(sys.argv[1]), page_count=16, page_bytes=1024, key_bytes_max=20)
file.begin(b"a" * 32, "model a")
print("held", flush=True)
sys.stdin.read()
"""


def test_one_process_at_a_time_has_a_pool_and_the_next_waits_for_the_end_of_one_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pool"
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with monkeypatch.context() as patch:
            patch.setattr(pool_file, "LOCK_WAIT_S", 0.0)
            with pytest.raises(InvalidConfig, match=f"in use by another process .process {holder.pid}.: stop it"):
                opened(path)
        holder.kill()
        assert found(path) == ("", [])


def test_a_pool_that_was_removed_while_its_lock_was_awaited_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_a_page(path := tmp_path / "pool")
    real = os.fstat

    def removed_once(file: int) -> os.stat_result:
        monkeypatch.setattr(pool_file.os, "fstat", real)
        path.unlink()
        path.touch()
        return real(file)

    monkeypatch.setattr(pool_file.os, "fstat", removed_once)
    file = opened(path)
    assert path.stat().st_ino == os.fstat(file._file).st_ino
    file.close()


def test_a_file_system_without_room_is_refused_with_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pool"
    with pytest.raises(OutOfMemory, match=r"needs \d+ bytes; its file system has \d+ for it"):
        opened(path, page_count=2**20, page_bytes=2**30)
    assert found(path) == ("", [])


def test_a_large_pool_in_memory_is_sparse() -> None:
    path = Path(f"/dev/shm/tidekv-test-{os.getpid()}")
    room = os.statvfs("/dev/shm")
    page_count = min(64 << 30, room.f_bavail * room.f_frsize // 2) // LAYOUT.page_bytes // 64
    try:
        pool = HostPool.allocate(LAYOUT, page_count, path=path)
        assert pool.file is not None and pool.file.begin(MODEL_A, "model a") == "" and pool.file.records.find() == []
        pool.page(page_count - 1)[:4] = b"abcd"
        assert path.stat().st_blocks * 512 < 1 << 20
        pool.close()
    finally:
        path.unlink(missing_ok=True)
