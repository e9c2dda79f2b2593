"""A host pool of plain memory, a poller of one thread, and engines on temporary directories."""

from __future__ import annotations

import asyncio
import hashlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tidekv.backends.base import Pollable
from tidekv.backends.storage import Storage, open_storage
from tidekv.states.types import PoolMemory, Segment, page_ids


class ThreadPoller:
    """Drives each operation to its end on one thread, oldest first. `pause` holds back what is submitted."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._work: queue.SimpleQueue[tuple[Pollable, asyncio.Future[None]] | None] = queue.SimpleQueue()
        self.gate = threading.Event()
        self.gate.set()
        self.submitted = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="test-poller")
        self._thread.start()

    def submit(self, pollable: Pollable) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self._loop.create_future()
        self._work.put((pollable, future))
        self.submitted.set()
        return future

    def close(self) -> None:
        self._work.put(None)
        self.gate.set()
        self._thread.join()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            pollable, future = item
            self.gate.wait()
            outcome: BaseException | None = None
            try:
                over = pollable.post()
                while not over:
                    over = pollable.check()
            except Exception as error:  # Reported to the waiter, as by the real poller.
                outcome = error
            try:
                pollable.release()
            except Exception as error:
                outcome = error
            self._loop.call_soon_threadsafe(self._finish, future, outcome)

    @staticmethod
    def _finish(future: asyncio.Future[None], outcome: BaseException | None) -> None:
        if not future.done():
            if outcome is None:
                future.set_result(None)
            else:
                future.set_exception(outcome)


@dataclass
class Pool:
    """Host pages in one numpy array, page first."""

    array: np.ndarray

    @classmethod
    def make(cls, page_count: int, page_bytes: int) -> Pool:
        # Offset to a multiple of 4096, as the real pool is.
        raw = np.zeros(page_count * page_bytes + 4096, np.uint8)
        start = -raw.ctypes.data % 4096
        return cls(raw[start : start + page_count * page_bytes].reshape(page_count, page_bytes))

    @property
    def memory(self) -> PoolMemory:
        count, page_bytes = self.array.shape
        segment = Segment(
            address=self.array.ctypes.data, piece_bytes=page_bytes, stride_bytes=page_bytes, page_count=count
        )
        return PoolMemory(segments=(segment,), page_count=count)

    def page(self, page: int) -> memoryview:
        return memoryview(self.array[page])

    def fill(self, page: int, content: bytes) -> None:
        """Fill a page with a pattern that depends on `content` and position."""
        self.array[page] = np.frombuffer(pattern(content, self.array.shape[1]), np.uint8)

    def holds(self, page: int, content: bytes) -> bool:
        return self.array[page].tobytes() == pattern(content, self.array.shape[1])


def pattern(content: bytes, page_bytes: int) -> bytes:
    """Return page bytes that no other content has at any position."""
    seed = int.from_bytes(content[:8].ljust(8, b"\1"), "little")
    return np.random.default_rng(seed).integers(0, 256, page_bytes, np.uint8).tobytes()


def key_of(number: int) -> bytes:
    """Return a key: a digest of a number."""
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


class Rig:
    """Engines of one kind over one pool; reads and writes of the pool's pages can be held up and seen."""

    NAMESPACE = b"n" * 32
    TIMEOUT_S = 30.0

    def __init__(
        self,
        kind: str,
        root: Path,
        poller: ThreadPoller,
        *,
        server: str = "",
        prefix: str = "",
        page_bytes: int = 4096,
        pages: int = 64,
    ) -> None:
        self.kind = kind
        self.server = server
        self.fixed_prefix = prefix
        self.root = root
        self.poller = poller
        self.pool = Pool.make(pages, page_bytes)
        self.gate = threading.Event()
        self.gate.set()
        self.touched = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._engines: list[Storage] = []

    @property
    def base_uri(self) -> str:
        if self.kind in ("redis", "rediss", "valkey", "mooncake"):
            return f"{self.kind}://{self.server}?prefix={self.prefix}"
        if self.kind == "s3":
            return f"s3://tidekv-test/{self.prefix}?endpoint={self.server}"
        return "memory:" if self.kind == "memory" else f"file:{self.root}"

    @property
    def prefix(self) -> str:
        """What all keys on a server start with, one for each root: the server is one for all tests."""
        return self.fixed_prefix or hashlib.sha256(bytes(self.root)).hexdigest()[:16]

    @property
    def credentials(self) -> dict[str, object]:
        """Options without which the S3 engine would look for keys elsewhere."""
        return {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}

    @property
    def page_a_chunk(self) -> dict[str, object]:
        """Options that cut calls into chunks of one page."""
        if self.kind == "s3":
            # It always does so; here it works on four of them at a time.
            return {"connections": 4}
        return {} if self.kind == "memory" else {"chunk": 4096} | self.on_threads

    @property
    def on_threads(self) -> dict[str, object]:
        """Options without which small reads are made by the event loop, and cannot be held up."""
        return {"inline": 0} if self.kind.startswith("file") else {}

    @property
    def evicts_one_by_one(self) -> dict[str, object]:
        """Options that remove no page more than has to be."""
        return {"low_water": 1.0} if self.kind.startswith("file") else {}

    def make(self, **options: object) -> Storage:
        """Make an engine that has no pool yet."""
        if self.kind.startswith("file"):
            options = {"io": self.kind.removeprefix("file-"), "capacity": 8 << 20} | options
        if self.kind == "s3":
            options = self.credentials | options
        engine = open_storage(self.base_uri, options)
        self._engines.append(engine)
        return engine

    async def open(self, *, namespace: bytes = NAMESPACE, **options: object) -> Storage:
        engine = self.make(**options)
        await engine.register(self.pool.memory, self.buffer_of, namespace=namespace, poller=self.poller)
        return engine

    def buffer_of(self, page: int) -> memoryview:
        """Give a page's memory, as a host pool does; called on the engine's threads."""
        self._loop.call_soon_threadsafe(self.touched.set)
        self.gate.wait()
        return self.pool.page(page)

    @staticmethod
    def keys(numbers: Iterable[int]) -> list[bytes]:
        """Return the keys that stand for some numbers."""
        return [key_of(number) for number in numbers]

    async def put(self, engine: Storage, numbers: Sequence[int], content: Sequence[bytes] | None = None) -> list[bool]:
        """Put the pages of some numbers, from the first pages of the pool."""
        for page, number in enumerate(numbers):
            self.pool.fill(page, key_of(number) if content is None else content[page])
        keys = [key_of(number) for number in numbers]
        return await engine.put_from(keys, page_ids(range(len(keys))), timeout_s=self.TIMEOUT_S)

    async def get(self, engine: Storage, numbers: Sequence[int]) -> list[bool]:
        """Get the pages of some numbers into the first pages of the pool; every one that is there must be right."""
        self.pool.array[:] = 0
        keys = [key_of(number) for number in numbers]
        good = await engine.get_into(keys, page_ids(range(len(keys))), timeout_s=self.TIMEOUT_S)
        assert all(self.pool.holds(page, key) for page, key in enumerate(keys) if good[page])
        return good

    async def close(self) -> None:
        self.gate.set()
        for engine in self._engines:
            await engine.close()


class FileRig(Rig):
    """File engines, and what happens to their files from outside."""

    def segment_files(self) -> list[Path]:
        return sorted(self.root.glob("*/*.seg"))

    def only_segment(self) -> Path:
        """Return the one segment file, where a test stores few pages."""
        (file,) = self.segment_files()
        return file

    @staticmethod
    def overwrite(file: Path, offset: int, content: bytes) -> None:
        with file.open("r+b") as opened:
            opened.seek(offset)
            opened.write(content)

    @classmethod
    def flip(cls, file: Path, offset: int) -> None:
        """Change one bit."""
        cls.overwrite(file, offset, bytes([file.read_bytes()[offset] ^ 0x10]))


# Which fixture starts the server of an engine.
SERVERS = {"redis": "redis_server", "s3": "s3_server", "mooncake": "mooncake_servers"}


@pytest.fixture(
    params=["memory", pytest.param("file-nixl", marks=pytest.mark.nixl), "file-threads", *SERVERS],
)
async def rig(request: pytest.FixtureRequest, tmp_path: Path, poller: ThreadPoller) -> AsyncIterator[Rig]:
    """Every engine."""
    server = request.getfixturevalue(SERVERS[request.param]).address if request.param in SERVERS else ""
    made = Rig(request.param, tmp_path / "store", poller, server=server)
    yield made
    await made.close()


@pytest.fixture
async def rig_on(tmp_path: Path, poller: ThreadPoller) -> AsyncIterator[Callable[..., Rig]]:
    """Engines on a server that the test names."""
    rigs: list[Rig] = []

    def make(kind: str, server: str, **options: Any) -> Rig:
        rigs.append(Rig(kind, tmp_path / "store", poller, server=server, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        await rig.close()


@pytest.fixture
def rig_type() -> type[Rig]:
    """The rig, for tests that run a loop themselves."""
    return Rig


@pytest.fixture(params=[pytest.param("file-nixl", marks=pytest.mark.nixl), "file-threads"])
async def files(request: pytest.FixtureRequest, tmp_path: Path, poller: ThreadPoller) -> AsyncIterator[FileRig]:
    """The file engine, with either way of moving pages."""
    made = FileRig(request.param, tmp_path / "store", poller)
    yield made
    await made.close()


@pytest.fixture
async def poller() -> AsyncIterator[ThreadPoller]:
    made = ThreadPoller()
    yield made
    made.close()
