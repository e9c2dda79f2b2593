"""Storage that is damaged, full or read-only: a miss that is counted, and a request that is READY with right bytes."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.waits import LIMIT_S
from tidekv import open_storage
from tidekv.states.errors import StorageFailed

pytestmark = pytest.mark.nixl

PAGE_SIZE = 16
PAGES = 20
DAMAGED = 6  # The page of the prompt that is damaged.


@dataclass
class Disk:
    """A small file system of its own."""

    path: Path
    filler: Path

    def fill(self) -> None:
        """Leave no byte."""
        with self.filler.open("wb", buffering=0) as file:
            size = 1 << 20
            while size:
                try:
                    file.write(bytes(size))
                except OSError:
                    size //= 2

    def make_room(self) -> None:
        self.filler.unlink()

    def make_read_only(self) -> None:
        """What the kernel does to a file system on a failing disk: open files cannot be written any more either."""
        subprocess.run(["mount", "-o", "remount,abort", str(self.path)], check=True)


def mounted(path: Path, *arguments: str) -> Iterator[Disk]:
    path.mkdir()
    done = subprocess.run(["mount", *arguments, str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a file system of our own cannot be mounted here: {done.stderr.strip()}")
    try:
        yield Disk(path, path / "filler")
    finally:
        busy = subprocess.run(["umount", str(path)], check=False).returncode
        if busy:
            subprocess.run(["umount", "--lazy", str(path)], check=True)
        assert not busy, "somebody left a file open"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Disk]:
    yield from mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=4m", "tmpfs")


@pytest.fixture
def failing_disk(tmp_path: Path) -> Iterator[Disk]:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(32 << 20)
    try:
        subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    except FileNotFoundError:
        pytest.skip("mkfs.ext4 is not installed")
    yield from mounted(tmp_path / "disk", "-o", "loop,errors=remount-ro", str(image))


async def store(decode: Any, request_id: str, tokens: list[int]) -> None:
    """Serve a prompt, and leave it in storage alone, as far as storage takes it."""
    await decode.serve(request_id, tokens)
    await decode.engine.wait_settled()
    await decode.engine.flush()


def storage_counts(decode: Any) -> dict[str, Any]:
    statistics = decode.engine.statistics()["storage"]
    assert isinstance(statistics, dict)
    return statistics


def place_of(root: Path, content: bytes) -> tuple[Path, int]:
    """The segment file that holds these bytes, and where in it."""
    for path in root.glob("*/*.seg"):
        at = path.read_bytes().find(content)
        if at >= 0:
            return path, at
    raise AssertionError("these bytes are in no segment")


def damage(path: Path, at: int, kind: str) -> None:
    if kind == "removed":
        path.unlink()
    elif kind == "truncated":
        os.truncate(path, at + 100)
    else:
        with path.open("r+b") as file:
            file.seek(at + 100)
            byte = file.read(1)
            file.seek(at + 100)
            file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("kind", ["corrupt", "truncated", "removed"])
async def test_a_damaged_page_is_a_miss_and_comes_from_prefill(
    tmp_path: Path, prefill_over_nixl: Any, decode_over_nixl: Any, prompt: Any, kind: str, restarted: bool
) -> None:
    tokens = prompt(1, PAGES)

    @asynccontextmanager
    async def opened(prefill: Any) -> AsyncIterator[Any]:
        storage = open_storage(f"file:{tmp_path}?capacity=64MiB")
        async with decode_over_nixl([prefill.address], storage=storage) as decode:
            yield decode
            await decode.assert_nothing_held()

    async def damage_one_page(decode: Any) -> None:
        ready = await decode.restore("first", tokens)
        piece = decode.device.rows[0][int(ready.pages[DAMAGED])].numpy().tobytes()
        await decode.engine.finish(ready)
        await decode.engine.wait_settled()
        await decode.engine.flush()
        damage(*place_of(tmp_path, piece), kind)

    async def serve_and_look(decode: Any) -> None:
        sources = await decode.serve("damaged", tokens)
        misses = storage_counts(decode)["misses"]
        if kind == "removed" and not restarted:
            # What is open can be read on, as any file that was unlinked.
            assert sources["l3"] == PAGES * PAGE_SIZE
            return
        assert PAGE_SIZE <= sources["transfer"] == PAGES * PAGE_SIZE - sources["l3"]
        assert misses[{"removed": "missing"}.get(kind, kind)] >= 1
        assert kind != "corrupt" or misses == {"corrupt": 1}
        await decode.engine.wait_settled()
        await decode.engine.flush()
        # The damaged pages have been stored again.
        assert (await decode.serve("mended", tokens))["l3"] == PAGES * PAGE_SIZE

    async with asyncio.timeout(LIMIT_S), prefill_over_nixl() as prefill:
        async with opened(prefill) as decode:
            await damage_one_page(decode)
            if not restarted:
                await serve_and_look(decode)
        if restarted:
            async with opened(prefill) as decode:
                await serve_and_look(decode)


async def test_a_full_disk_takes_the_newest_prompts_in_the_place_of_older_ones(
    small_disk: Disk, prefill_over_nixl: Any, decode_over_nixl: Any, prompt: Any
) -> None:
    storage = open_storage(f"file:{small_disk.path / 'pages'}?capacity=64MiB")
    async with (
        asyncio.timeout(LIMIT_S),
        prefill_over_nixl() as prefill,
        decode_over_nixl([prefill.address], storage=storage) as decode,
    ):
        await store(decode, "r1", prompt(1, PAGES))
        small_disk.fill()
        for number in range(2, 6):
            await store(decode, f"r{number}", prompt(number, PAGES))
        counts = storage_counts(decode)
        assert counts["failures"] == {}
        assert counts["evictions"] >= 3 * PAGES
        assert (await decode.serve("r5", prompt(5, PAGES)))["l3"] == PAGES * PAGE_SIZE
        await decode.serve("r1", prompt(1, PAGES))
        small_disk.make_room()
        await decode.engine.wait_settled()
        await decode.engine.flush()
        await store(decode, "r7", prompt(7, PAGES))
        assert (await decode.serve("r7", prompt(7, PAGES)))["l3"] == PAGES * PAGE_SIZE
        await decode.assert_nothing_held()


async def test_a_disk_that_turns_read_only_stops_no_request(
    failing_disk: Disk, prefill_over_nixl: Any, decode_over_nixl: Any, prompt: Any
) -> None:
    storage = open_storage(f"file:{failing_disk.path / 'pages'}?capacity=16MiB")
    async with (
        asyncio.timeout(LIMIT_S),
        prefill_over_nixl() as prefill,
        decode_over_nixl([prefill.address], storage=storage) as decode,
    ):
        await store(decode, "kept", prompt(1, PAGES))
        failing_disk.make_read_only()
        for number in range(2, 6):
            await store(decode, f"r{number}", prompt(number, PAGES))
        assert sum(storage_counts(decode)["failures"].values()) >= PAGES
        assert storage_counts(decode)["puts"] == PAGES
        assert (await decode.serve("kept", prompt(1, PAGES)))["l3"] == PAGES * PAGE_SIZE
        await decode.serve("r2", prompt(2, PAGES))
        await decode.assert_nothing_held()


async def test_storage_that_cannot_be_opened_is_refused_while_serving_goes_on(
    small_disk: Disk, prefill_over_nixl: Any, decode_over_nixl: Any, prompt: Any
) -> None:
    uri = f"file:{small_disk.path / 'pages'}?capacity=64MiB"
    async with (
        asyncio.timeout(LIMIT_S),
        prefill_over_nixl() as prefill,
        decode_over_nixl([prefill.address]) as decode,
    ):
        small_disk.fill()
        with pytest.raises(StorageFailed, match="cannot be used"):
            await decode.engine.attach_storage(uri)
        await store(decode, "r1", prompt(1, PAGES))
        small_disk.make_room()
        await decode.engine.attach_storage(uri)
        await store(decode, "r1", prompt(1, PAGES))
        assert (await decode.serve("r1", prompt(1, PAGES)))["l3"] == PAGES * PAGE_SIZE
        await decode.assert_nothing_held()
