"""A vLLM worker's pages: loads and saves with storage that is good, slow, broken or full, and blocks that show it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any  # The wrapped engine's calls are passed on as they are.

import pytest
import torch

from tests.support.placing_storage import PlacingStorage
from tests.support.waits import LIMIT_S
from tidekv import KVLayout
from tidekv.backends.copies.block_order import PagedBlocks
from tidekv.backends.storage.base import Storage
from tidekv.backends.storage.label import label_of, read_label
from tidekv.backends.storage.uri import open_storage
from tidekv.engine import shared_storage
from tidekv.engine.integrations.vllm.jobs import LoadEnded, LoadJob, SaveJob
from tidekv.engine.integrations.vllm.lookup import PrefixLookup
from tidekv.engine.integrations.vllm.pages import WorkerPages
from tidekv.engine.integrations.vllm.settings import ConnectorSettings, Shared
from tidekv.engine.shared_storage import BreakerLimits
from tidekv.states.errors import EngineClosed, InvalidConfig, StorageFailed

LAYERS, HEADS, DIM, BLOCK, BLOCKS = 2, 2, 4, 4, 40
LAYOUT = KVLayout(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype="float32", page_size=BLOCK)
KEYS = [bytes([number]) * 32 for number in range(1, 30)]


class Storehouse:
    """A storage engine with calls that a test can hold or fail. Everything else is the real engine's."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self.fails: set[str] = set()
        self.raises: BaseException = StorageFailed("no disk")
        self.held: dict[str, threading.Event] = {}
        self.reached = threading.Event()
        self.calls: list[str] = []
        self.says: list[bool] | None = None
        """What is there, whatever is."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    # Since Python 3.12 `isinstance` with a protocol does not see what `__getattr__` returns.
    async def set_label(self, label: bytes) -> None:
        await self._inner.set_label(label)

    async def exists(self, *args: Any, **given: Any) -> list[bool]:
        return self.says or await self._call("exists", *args, **given)

    async def touch(self, *args: Any, **given: Any) -> list[bool]:
        return await self.exists(*args, **given)

    async def get_into(self, *args: Any, **given: Any) -> list[bool]:
        return await self._call("get_into", *args, **given)

    async def put_from(self, *args: Any, **given: Any) -> list[bool]:
        return await self._call("put_from", *args, **given)

    async def probe(self) -> None:
        if "probe" in self.fails:
            self.fails.remove("probe")
            raise self.raises
        await self._inner.probe()

    async def _call(self, name: str, *args: Any, **given: Any) -> list[bool]:
        self.calls.append(name)
        if name in self.fails:
            raise self.raises
        found: list[bool] = await getattr(self._inner, name)(*args, **given)
        if name in self.held:
            self.reached.set()
            await asyncio.to_thread(self.held[name].wait)
        return found


class Worker:
    """Tensors full of noise, and pages over them."""

    def __init__(
        self,
        uri: str,
        *,
        seed: int = 0,
        host_pages: int = 16,
        layout: KVLayout = LAYOUT,
        kind: Callable[[Storage], Any] = Storehouse,
        **settings: Any,
    ) -> None:
        """`kind` wraps the engine for the test."""
        shape = (LAYERS, BLOCKS, HEADS, BLOCK, 2 * DIM)
        self.tensors = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        self.ended: list[LoadEnded] = []
        self.store = kind(open_storage(uri))
        shared = Shared(
            settings=ConnectorSettings(uri=uri, host=host_pages * layout.page_bytes, **settings),
            layout=layout,
            model="m",
            block_size=BLOCK,
            num_blocks=BLOCKS,
            layer_names=("layers.0", "layers.1"),
            rank=0,
            ranks=1,
            is_writer=True,
            loads=True,
            saves=True,
        )
        blocks = PagedBlocks(list(self.tensors), layout=layout, block_size=BLOCK, num_blocks=BLOCKS)
        self.pages = WorkerPages(self.store, blocks=blocks, shared=shared)

    def block(self, number: int) -> torch.Tensor:
        return self.tensors[:, number].clone()

    def save(self, first: int, count: int) -> None:
        """Save blocks 0, 1, … under keys `first`, `first` + 1, …"""
        self.pages.save(SaveJob("s", tuple(KEYS[first : first + count]), tuple(range(count))))

    def load(self, first: int, count: int, *, at: int = 20, name: str = "r") -> None:
        """Load keys `first`, … into blocks `at`, …"""
        self.pages.load(LoadJob(name, tuple(KEYS[first : first + count]), tuple(range(at, at + count))))

    def settled(self) -> dict[str, int]:
        """Wait until nothing is on its way; returns what was counted."""
        self.pages._loop.call(_idle(self.pages))
        self.ended += self.pages.take_ended()
        return {name: count for name, count in self.pages.take_counts().items() if count}


async def _idle(pages: WorkerPages) -> None:
    while len(pages._tasks):
        pages._changed.clear()
        await pages._changed.wait()


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return f"file:{tmp_path}?capacity=16MB"


@pytest.fixture
def worker(uri: str) -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def make(**given: Any) -> Worker:
        made.append(Worker(uri, **given))
        return made[-1]

    yield make
    for one in made:
        for gate in getattr(one.store, "held", {}).values():
            gate.set()
        one.pages.close()


def same(theirs: Worker, ours: Worker, pairs: Sequence[tuple[int, int]]) -> bool:
    return all(torch.equal(theirs.block(source), ours.block(target)) for source, target in pairs)


def test_what_one_worker_saved_another_loads(worker: Callable[..., Worker]) -> None:
    writer, reader = worker(seed=1), worker(seed=2)
    writer.save(0, 5)
    assert writer.settled() == {"save_pages_stored": 5}
    untouched = reader.block(25)
    reader.load(0, 5)
    assert reader.settled() == {"load_pages_storage": 5}
    assert reader.ended == [LoadEnded("r")]
    assert same(writer, reader, [(number, 20 + number) for number in range(5)])
    assert torch.equal(reader.block(25), untouched)
    reader.load(0, 5, at=30, name="again")
    assert reader.settled() == {"load_pages_host": 5}, "host memory has them now"
    assert same(writer, reader, [(number, 30 + number) for number in range(5)])


def test_a_worker_labels_what_it_stores(worker: Callable[..., Worker], uri: str) -> None:
    worker()
    (holding,) = asyncio.run(open_storage(uri).holdings())
    assert read_label(holding.label) == label_of(LAYOUT.identity("m"))


def test_what_is_read_out_may_be_overwritten_at_once(worker: Callable[..., Worker]) -> None:
    writer, reader = worker(seed=1), worker(seed=2)
    writer.store.held["exists"] = threading.Event()
    saved = [writer.block(number) for number in range(3)]
    writer.save(0, 3)
    writer.tensors.zero_()
    writer.store.held["exists"].set()
    assert writer.settled() == {"save_pages_stored": 3}
    reader.load(0, 3)
    reader.settled()
    assert all(torch.equal(reader.block(20 + number), page) for number, page in enumerate(saved))


def test_a_load_ends_at_the_first_page_that_is_missing(worker: Callable[..., Worker]) -> None:
    writer, reader = worker(seed=1), worker(seed=2)
    writer.save(0, 2)
    writer.pages.save(SaveJob("s", (KEYS[3],), (3,)))
    writer.settled()
    before = [reader.block(number) for number in (22, 23)]
    reader.load(0, 4)
    assert reader.settled() == {"load_pages_storage": 2, "load_pages_missing": 1, "load_pages_behind": 1}
    assert reader.ended == [LoadEnded("r", (22, 23))]
    assert same(writer, reader, [(0, 20), (1, 21)])
    assert [torch.equal(reader.block(number), page) for number, page in zip((22, 23), before, strict=True)] == [
        True
    ] * 2


def test_more_pages_than_the_host_has_go_in_batches(worker: Callable[..., Worker]) -> None:
    writer, reader = worker(seed=1, host_pages=40), worker(seed=2, host_pages=4)
    writer.save(0, 20)
    assert writer.settled() == {"save_pages_stored": 20}
    reader.load(0, 20)
    reader.load(0, 20, at=0, name="other")
    counts = reader.settled()
    assert counts["load_pages_storage"] + counts.get("load_pages_host", 0) == 40
    assert {one.request_id: one.failed_blocks for one in reader.ended} == {"r": (), "other": ()}
    assert same(writer, reader, [(number, 20 + number) for number in range(20)])


@pytest.mark.parametrize("skip", [0, 1, 2])
def test_loads_of_several_batches_that_start_within_a_page_fill_each_block(
    worker: Callable[..., Worker], skip: int
) -> None:
    layout = KVLayout(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype="float32", page_size=3 * BLOCK)
    writer, reader = worker(seed=1, layout=layout), worker(seed=2, host_pages=4, layout=layout)
    keys = tuple(KEYS[:6])
    writer.pages.save(SaveJob("s", keys, tuple(range(18))))
    assert writer.settled() == {"save_pages_stored": 6}
    before = [reader.block(number) for number in range(BLOCKS)]
    # Two pages at once: three batches. Its first blocks vLLM has already, and they are not among those of the job.
    into = tuple(range(20 + skip, 38))
    reader.pages.load(LoadJob("r", keys, into, skip))
    assert reader.settled() == {"load_pages_storage": 6}
    assert reader.ended == [LoadEnded("r", ())]
    assert same(writer, reader, [(number - 20, number) for number in into])
    untouched = [number for number in range(BLOCKS) if number not in into]
    assert all(torch.equal(reader.block(number), before[number]) for number in untouched)


def test_a_load_waits_while_the_host_has_no_page_for_it(worker: Callable[..., Worker]) -> None:
    writer, reader = worker(seed=1, host_pages=40), worker(seed=2, host_pages=4)
    writer.save(0, 12)
    writer.settled()
    gate = reader.store.held["get_into"] = threading.Event()
    # Two batches of two pages hold all four; the third load finds none.
    for number in range(3):
        reader.load(4 * number, 4, at=12 + 4 * number, name=f"r{number}")
    reader.pages._loop.call(_are_waiting(reader))
    assert reader.store.calls.count("get_into") == 2, "nothing is read into pages that are not there"
    assert reader.pages.take_ended() == []
    gate.set()
    assert reader.settled() == {"load_pages_storage": 12}
    assert sorted(one.request_id for one in reader.ended) == ["r0", "r1", "r2"]
    assert not any(one.failed_blocks for one in reader.ended)
    writer.save(0, 12)
    assert same(writer, reader, [(number, 12 + number) for number in range(12)])


async def _are_waiting(worker: Worker) -> None:
    """Return when two loads read, and a third waits for its turn to take pages."""
    for _ in range(1_000_000):
        if worker.store.calls.count("get_into") == 2 and worker.pages._turn.locked():
            break
        await asyncio.sleep(0)
    for _ in range(50):
        await asyncio.sleep(0)


def test_saves_use_half_of_the_host_and_drop_the_rest(worker: Callable[..., Worker]) -> None:
    writer, other = worker(seed=1, host_pages=8), worker(seed=3)
    other.save(10, 2)
    other.settled()
    writer.store.held["put_from"] = threading.Event()
    writer.save(0, 6)
    assert writer.store.reached.wait(30)
    writer.load(10, 2)
    writer.pages._loop.call(_a_load_has_ended(writer.pages))
    assert writer.pages.take_ended() == [LoadEnded("r")], "a load has room, whatever storage does with saves"
    writer.store.held["put_from"].set()
    assert writer.settled() == {"save_pages_stored": 4, "save_pages_dropped": 2, "load_pages_storage": 2}


async def _a_load_has_ended(pages: WorkerPages) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not pages._ended:
            pages._changed.clear()
            await pages._changed.wait()


async def _probed(lookup: PrefixLookup) -> None:
    if lookup._guard.is_open:
        await asyncio.wait(lookup._guard._tasks._tasks, timeout=LIMIT_S)


def test_what_storage_has_already_is_not_written_again(worker: Callable[..., Worker]) -> None:
    first, second = worker(seed=1), worker(seed=2)
    first.save(0, 3)
    first.settled()
    second.save(0, 5)
    assert second.settled() == {"save_pages_present": 3, "save_pages_stored": 2}
    second.save(0, 5)
    assert second.settled() == {"save_pages_present": 5}


def test_pages_of_storage_that_cannot_be_read_have_failed(
    worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture
) -> None:
    reader = worker()
    reader.store.fails.add("get_into")
    reader.load(0, 2)
    assert reader.settled() == {"load_pages_failed": 2}
    assert reader.ended == [LoadEnded("r", (20, 21))]
    assert "no disk" in caplog.text


@pytest.mark.parametrize("call", ["exists", "put_from"])
def test_storage_that_cannot_be_written_is_left_alone_after_a_while(
    worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture, call: str
) -> None:
    writer = worker()
    writer.store.fails.add(call)
    for number in range(8):
        writer.save(number, 1)
        assert writer.settled() == {"save_pages_failed": 1}
    writer.save(9, 2)
    assert writer.settled() == {"save_pages_dropped": 2}
    assert caplog.text.count("no disk") == 8
    assert "not used until a probe succeeds" in caplog.text


def test_a_load_that_takes_too_long_is_given_up_and_never_written(worker: Callable[..., Worker]) -> None:
    writer, reader = worker(seed=1), worker(seed=2, load_timeout_s=0.05)
    writer.save(0, 3)
    writer.settled()
    before = [reader.block(20 + number) for number in range(3)]
    reader.store.held["get_into"] = threading.Event()
    reader.load(0, 3)
    reader.pages._loop.call(_a_load_has_ended(reader.pages))
    assert reader.pages.take_ended() == [LoadEnded("r", (20, 21, 22))]
    assert reader.pages._cache.available() == 13, "the read has its pages until it ends"
    reader.store.held["get_into"].set()
    assert reader.settled() == {"load_pages_late": 3}
    assert reader.ended == []
    assert [torch.equal(reader.block(20 + number), page) for number, page in enumerate(before)] == [True] * 3
    assert reader.pages._cache.available() == 16


def test_a_load_has_not_ended_while_it_still_writes_to_blocks(worker: Callable[..., Worker]) -> None:
    writer, reader = worker(seed=1), worker(seed=2)
    writer.save(0, 2)
    writer.settled()
    write, begun = reader.pages._copies.write, threading.Event()
    gate = reader.store.held["write"] = threading.Event()

    def slow(*given: Any, **named: Any) -> None:
        begun.set()
        gate.wait()
        # A report of the load at this point would be too early.
        assert reader.pages.take_ended() == []
        write(*given, **named)

    reader.pages._copies.write = slow  # type: ignore[method-assign]  # A device that takes its time.
    reader.load(0, 2)
    assert begun.wait(30)
    reader.pages._loop.call(_stop_the_load(reader.pages))
    gate.set()
    assert reader.settled() == {"load_pages_failed": 2}
    assert reader.ended == [LoadEnded("r", (20, 21))]


async def _stop_the_load(pages: WorkerPages) -> None:
    """Cancel the load's task, which is not to heed it yet."""
    (load,) = [task for task in pages._tasks._tasks if "load" in task.get_name()]
    load.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not load.done()


def test_a_copy_that_fails_is_recomputed(worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture) -> None:
    writer, reader = worker(seed=1), worker(seed=2)
    writer.save(0, 2)
    writer.settled()

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no device")

    reader.pages._copies.write = broken  # type: ignore[method-assign]  # A device that fails.
    with caplog.at_level(logging.ERROR, "tidekv.vllm"):
        reader.load(0, 2)
        assert reader.settled() == {"load_pages_failed": 2}
    assert reader.ended == [LoadEnded("r", (20, 21))]
    assert "no device" in caplog.text
    assert reader.pages._cache.available() == 16


def test_closing_stores_what_was_saved_and_ends_what_was_loaded(uri: str) -> None:
    writer = Worker(uri, seed=1)
    writer.save(0, 6)
    writer.load(20, 2)
    writer.pages.close()
    assert writer.pages.take_ended() == [LoadEnded("r", (20, 21))]
    writer.pages.close()
    with pytest.raises(EngineClosed):
        writer.load(0, 1)
    reader = Worker(uri, seed=2)
    reader.load(0, 6)
    assert reader.settled() == {"load_pages_storage": 6}
    reader.pages.close()


def test_a_place_that_cannot_be_used_leaves_no_thread(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    before = threading.active_count()
    with pytest.raises((StorageFailed, InvalidConfig)):
        Worker(f"file:{tmp_path}/file?capacity=16MB")
    assert threading.active_count() == before


def test_an_engine_that_places_by_prefix_is_told_the_whole_prompt_with_each_call(
    worker: Callable[..., Worker],
) -> None:
    writer, reader = (worker(seed=seed, host_pages=8, kind=PlacingStorage) for seed in (1, 2))
    writer.save(0, 2)
    assert writer.settled() == {"save_pages_stored": 2}
    writer.pages.save(SaveJob("s", tuple(KEYS[2:5]), (2, 3, 4), prefix_keys=tuple(KEYS[:2])))
    assert writer.settled() == {"save_pages_stored": 3}
    reader.load(0, 1)
    assert reader.settled() == {"load_pages_storage": 1}
    # In batches of four pages, the first of which host memory has already.
    reader.load(0, 5)
    assert reader.settled() == {"load_pages_storage": 4, "load_pages_host": 1}
    assert writer.store.calls and reader.store.calls
    for name, keys in [*writer.store.calls, *reader.store.calls]:
        assert keys == KEYS[: len(keys)], name
    assert sorted(len(keys) for _, keys in reader.store.calls) == [1, 4, 5]
    assert same(writer, reader, [(number, 20 + number) for number in range(5)])


def test_pages_behind_one_that_is_not_saved_are_not_saved_either(worker: Callable[..., Worker]) -> None:
    writer = worker(host_pages=8)
    writer.save(5, 1)
    assert writer.settled() == {"save_pages_stored": 1}
    gate = writer.store.held["exists"] = threading.Event()
    writer.save(0, 4)
    # Nothing is free for the first of these two; host memory has the second.
    writer.save(4, 2)
    gate.set()
    assert writer.settled() == {"save_pages_stored": 4, "save_pages_dropped": 2}
    assert writer.pages._cache.available() == 8


@pytest.fixture
def unprobed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage that is left alone is not probed during the test, however busy the machine is."""
    monkeypatch.setattr(shared_storage, "DEFAULT_LIMITS", BreakerLimits(backoff_s=3600.0, backoff_max_s=3600.0))


def lookup_of(stores: list[Storehouse]) -> PrefixLookup:
    left = iter(stores)
    return PrefixLookup(lambda: next(left), layout=LAYOUT, model="m", ranks=len(stores), timeout_s=30.0)


def test_a_lookup_counts_what_all_ranks_have(uri: str, worker: Callable[..., Worker]) -> None:
    stores = [Storehouse(open_storage(uri)) for _ in range(2)]
    lookup = lookup_of(stores)
    assert lookup.ask(KEYS[:4]).result() == 0
    stores[0].says = [True, True, True, False]
    stores[1].says = [True, True, False, True]
    assert lookup.ask(KEYS[:4]).result() == 2
    assert lookup.ask([]).result() == 0
    lookup.close()
    with pytest.raises(EngineClosed):
        lookup.ask(KEYS)


def test_a_lookup_says_whether_its_engine_places_by_prefix(uri: str) -> None:
    for store, takes in ((Storehouse(open_storage(uri)), False), (PlacingStorage(open_storage(uri)), True)):
        lookup = PrefixLookup(lambda made=store: made, layout=LAYOUT, model="m", ranks=1, timeout_s=30.0)  # type: ignore[misc]
        assert lookup.takes_prefix_keys is takes
        assert lookup.ask(KEYS[:3]).result(LIMIT_S) == 0
        lookup.close()


@pytest.mark.usefixtures("unprobed")
def test_a_lookup_of_storage_that_fails_is_a_miss_and_then_not_tried(
    uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = Storehouse(open_storage(uri))
    lookup = lookup_of([store])
    store.fails.add("exists")
    for _ in range(20):
        assert lookup.ask(KEYS).result() == 0
    assert store.calls.count("exists") == 8
    assert "counts as a miss: cause='no disk'" in caplog.text
    lookup.close()


def test_a_lookup_of_a_place_that_cannot_be_used_leaves_no_thread(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    before = threading.active_count()
    with pytest.raises((StorageFailed, InvalidConfig)):
        lookup_of([Storehouse(open_storage(f"file:{tmp_path}/file?capacity=16MB"))])
    assert threading.active_count() == before


def test_storage_that_is_well_again_is_used_again(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_storage, "DEFAULT_LIMITS", BreakerLimits(backoff_s=0.05))
    store = Storehouse(open_storage(uri))
    lookup = lookup_of([store])
    store.fails.add("exists")
    while not lookup._guard.is_open:
        lookup.ask(KEYS).result()
    store.fails.clear()
    lookup._loop.call(_probed(lookup))
    assert not lookup._guard.is_open
    calls = len(store.calls)
    assert lookup.ask(KEYS).result() == 0
    assert len(store.calls) == calls + 1
    lookup.close()


CANCELLED = asyncio.CancelledError("by a client of the store")


@pytest.mark.usefixtures("unprobed")
def test_a_lookup_that_storage_cancels_is_a_miss_and_not_an_error_of_vllms_scheduler(
    uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang #38428, seen from here: what a client of a store raises must not reach the serving engine."""
    store = Storehouse(open_storage(uri))
    lookup = lookup_of([store])
    store.fails.add("exists")
    store.raises = CANCELLED
    for _ in range(20):
        assert lookup.ask(KEYS).result(LIMIT_S) == 0
    assert store.calls.count("exists") == 8, "it is left alone then"
    assert "cancelled itself" in caplog.text
    lookup.close()


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize("call", ["get_into", "put_from", "exists"])
def test_calls_that_storage_cancels_have_failed(worker: Callable[..., Worker], call: str) -> None:
    """SGLang #38428: a job whose call raised what nothing expected never ended."""
    one = worker()
    one.store.fails.add(call)
    one.store.raises = CANCELLED
    for number in range(8):
        if call == "get_into":
            one.load(0, 2, name=f"r{number}")
            assert one.settled() == {"load_pages_failed": 2}
            assert one.ended[-1] == LoadEnded(f"r{number}", (20, 21))
        else:
            one.save(0, 2)
            assert one.settled() == {"save_pages_failed": 2}
    assert one.pages._guard.is_open


@pytest.mark.usefixtures("unprobed")
def test_a_load_does_not_ask_storage_that_is_left_alone(worker: Callable[..., Worker]) -> None:
    """Each request would wait for a storage that is gone, until its timeout."""
    one = worker()
    one.store.fails.add("get_into")
    for number in range(8):
        one.load(0, 2, name=f"r{number}")
        one.settled()
    one.store.fails.clear()
    one.store.calls.clear()
    one.load(0, 2, name="later")
    assert one.settled() == {"load_pages_failed": 2}
    assert one.ended[-1] == LoadEnded("later", (20, 21))
    assert one.store.calls == []


@pytest.mark.parametrize("raised", [CANCELLED, ZeroDivisionError("a bug of the probe")], ids=["cancelled", "a bug"])
def test_storage_whose_probe_raises_anything_is_probed_again(
    uri: str, monkeypatch: pytest.MonkeyPatch, raised: BaseException
) -> None:
    """SGLang #38428: the thread that would have come back to storage had ended."""
    monkeypatch.setattr(shared_storage, "DEFAULT_LIMITS", BreakerLimits(backoff_s=0.05))
    store = Storehouse(open_storage(uri))
    lookup = lookup_of([store])
    store.fails.update(("exists", "probe"))
    while not lookup._guard.is_open:
        lookup.ask(KEYS).result(LIMIT_S)
    store.raises = raised
    store.fails.remove("exists")
    lookup._loop.call(_probed(lookup))
    assert not lookup._guard.is_open
    lookup.close()
