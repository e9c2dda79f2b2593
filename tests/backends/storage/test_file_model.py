"""Any mix of calls, restarts and damage against a dict: the file engine may miss, and is never wrong."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.thorough import examples
from tidekv.backends.base import Pollable
from tidekv.backends.storage import Storage, open_storage
from tidekv.states.types import PoolMemory, Segment, page_ids

PAGE_BYTES = 512
PAGES = 12
CAPACITY_BYTES = 64 << 10
NUMBERS = st.lists(st.integers(0, 30), min_size=1, max_size=PAGES, unique=True)


class NoPoller:
    """The plain way of moving pages needs no other component."""

    def submit(self, pollable: Pollable) -> asyncio.Future[None]:
        raise AssertionError("the engine under test has no transfers")


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content_of(number: int, version: int) -> np.ndarray:
    return np.random.default_rng((number, version)).integers(0, 256, PAGE_BYTES, np.uint8)


class NeverWrong(RuleBasedStateMachine):
    """Two engines share a directory; the model knows the last bytes that each key was given."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.root = Path(tempfile.mkdtemp(prefix="tidekv-model-"))
        self.array = np.zeros((PAGES, PAGE_BYTES), np.uint8)
        self.engines: list[Storage] = []
        self.versions: dict[int, int] = {}
        self.version = 0

    def open(self) -> Storage:
        engine = open_storage(f"file:{self.root}?io=threads&chunk=4096&capacity={CAPACITY_BYTES}")
        segment = Segment(
            address=self.array.ctypes.data, piece_bytes=PAGE_BYTES, stride_bytes=PAGE_BYTES, page_count=PAGES
        )
        self.runner.run(
            engine.register(
                PoolMemory(segments=(segment,), page_count=PAGES),
                lambda page: memoryview(self.array[page]),
                namespace=b"n" * 32,
                poller=NoPoller(),
            )
        )
        return engine

    @initialize()
    def start(self) -> None:
        self.engines = [self.open(), self.open()]

    @rule(which=st.integers(0, 1), numbers=NUMBERS)
    def put(self, which: int, numbers: list[int]) -> None:
        self.version += 1
        for page, number in enumerate(numbers):
            self.array[page] = content_of(number, self.version)
        keys = [key_of(number) for number in numbers]
        good = self.runner.run(self.engines[which].put_from(keys, page_ids(range(len(keys))), timeout_s=60))
        for number, stored in zip(numbers, good, strict=True):
            if stored:
                self.versions[number] = self.version

    @rule(which=st.integers(0, 1), numbers=NUMBERS)
    def get(self, which: int, numbers: list[int]) -> None:
        self.array[:] = 0
        keys = [key_of(number) for number in numbers]
        good = self.runner.run(self.engines[which].get_into(keys, page_ids(range(len(keys))), timeout_s=60))
        for page, number in enumerate(numbers):
            if good[page]:
                assert number in self.versions, "a page that nobody put"
                assert (self.array[page] == content_of(number, self.versions[number])).all()

    @rule(which=st.integers(0, 1), numbers=NUMBERS)
    def delete(self, which: int, numbers: list[int]) -> None:
        self.runner.run(self.engines[which].delete([key_of(number) for number in numbers]))
        for number in numbers:
            self.versions.pop(number, None)

    @rule(which=st.integers(0, 1))
    def clear(self, which: int) -> None:
        self.runner.run(self.engines[which].clear())
        self.versions.clear()

    @rule(which=st.integers(0, 1))
    def restart(self, which: int) -> None:
        self.runner.run(self.engines[which].close())
        self.engines[which] = self.open()

    @rule(file=st.integers(0, 100), where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
    def flip(self, file: int, where: float, bit: int) -> None:
        paths = sorted(self.root.glob("*/*.seg"))
        if paths:
            path = paths[file % len(paths)]
            content = bytearray(path.read_bytes())
            if content:
                content[int(where * len(content))] ^= 1 << bit
                with path.open("r+b") as opened:
                    opened.write(content)

    @rule(file=st.integers(0, 100), where=st.floats(0, 1))
    def truncate(self, file: int, where: float) -> None:
        paths = sorted(self.root.glob("*/*.seg"))
        if paths:
            path = paths[file % len(paths)]
            with path.open("r+b") as opened:
                opened.truncate(int(where * path.stat().st_size))

    @rule(file=st.integers(0, 100))
    def remove(self, file: int) -> None:
        paths = sorted(self.root.glob("*/*.seg"))
        if paths:
            paths[file % len(paths)].unlink()

    @invariant()
    def the_bound_holds(self) -> None:
        assert sum(path.stat().st_size for path in self.root.glob("*/*.seg")) <= CAPACITY_BYTES

    def teardown(self) -> None:
        for engine in self.engines:
            self.runner.run(engine.close())
        self.runner.close()
        shutil.rmtree(self.root)


NeverWrong.TestCase.settings = examples(25, stateful_step_count=25)
TestNeverWrong = NeverWrong.TestCase
