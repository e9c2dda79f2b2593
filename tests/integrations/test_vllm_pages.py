"""A vLLM worker of the storage role: loads and saves with storage that is good, slow, broken or full, and blocks that
show it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any  # The wrapped engine's calls are passed on as they are.

import pytest
import torch

from tests.support.vllm_contract import settle
from tests.support.waits import LIMIT_S
from tidekv import KVLayout
from tidekv.backends.copies.block_order import PagedBlocks
from tidekv.backends.keys.chain import pack_tokens, page_digests
from tidekv.backends.storage.base import Storage
from tidekv.backends.storage.label import label_of, read_label
from tidekv.backends.storage.uri import open_storage
from tidekv.engine import shared_storage
from tidekv.engine.integrations.vllm import storage_role
from tidekv.engine.integrations.vllm.jobs import LoadJob, SaveJob
from tidekv.engine.integrations.vllm.lookup import PrefixLookup
from tidekv.engine.integrations.vllm.settings import ConnectorSettings, Shared
from tidekv.engine.integrations.vllm.storage_role import WorkerEngine
from tidekv.engine.shared_storage import BreakerLimits
from tidekv.states.errors import EngineClosed, InvalidConfig, StorageFailed, TidekvError

LAYERS, HEADS, DIM, BLOCK, BLOCKS = 2, 2, 4, 4, 40
LAYOUT = KVLayout(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype="float32", page_size=BLOCK)
KEYS = [bytes([number]) * 32 for number in range(1, 30)]


def tokens_of(prompt: int, tokens: int) -> bytes:
    return pack_tokens([prompt * 1000 + at for at in range(tokens)])


def keys_of(prompt: int, pages: int) -> list[bytes]:
    return page_digests(tokens_of(prompt, pages * BLOCK), BLOCK)


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
    """Tensors full of noise, and the engine in them."""

    def __init__(
        self, uri: str, *, seed: int = 0, host_pages: int = 16, layout: KVLayout = LAYOUT, **settings: Any
    ) -> None:
        shape = (LAYERS, BLOCKS, HEADS, BLOCK, 2 * DIM)
        self.tensors = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        self.ended: dict[str, tuple[int, ...]] = {}
        """By load that has ended, the blocks that it left out."""
        self.freed: set[str] = set()
        self.store: Any = Storehouse(open_storage(uri))
        self.shared = Shared(
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
        self.engine = WorkerEngine(self.store, blocks=blocks, shared=self.shared)
        self.page = layout.page_size

    @property
    def copier(self) -> Any:
        return self.engine.engine._engine._runtime.copier

    def block(self, number: int) -> torch.Tensor:
        return self.tensors[:, number].clone()

    def save(self, count: int, *, prompt: int = 0, name: str = "s") -> None:
        """Save the first pages of a prompt, which blocks 0, 1, … hold."""
        per_page = self.page // BLOCK
        self.engine.save(SaveJob(name, b"", tokens_of(prompt, count * self.page), 0, tuple(range(count * per_page))))

    def load(self, count: int, *, prompt: int = 0, at: int = 20, have: int = 0, name: str = "r") -> None:
        """Load the first pages of a prompt into blocks `at`, …, of which vLLM has the first `have`."""
        blocks = tuple(range(at, at + count * self.page // BLOCK))
        self.engine.load(LoadJob(name, b"", tokens_of(prompt, count * self.page), blocks, have * BLOCK))

    def settled(self) -> dict[str, int]:
        """Wait until nothing is on its way; returns what was counted."""
        settle(self.engine)
        self.take()
        return {name: count for name, count in self.engine.take_counts().items() if count}

    def take(self) -> None:
        freed, loaded = self.engine.take_finished()
        invalid = self.engine.take_invalid_blocks()
        assert not loaded & self.ended.keys(), "reported twice"
        self.freed |= freed
        self.ended.update(dict.fromkeys(loaded, tuple(sorted(invalid))))

    def until(self, is_so: Callable[[], bool]) -> None:
        """Take what has ended until that is so."""
        end_s = time.monotonic() + LIMIT_S
        while not is_so():
            assert time.monotonic() < end_s
            self.take()
            time.sleep(0.001)


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
        for gate in one.store.held.values():
            gate.set()
        one.engine.close()


def same(theirs: Worker, ours: Worker, pairs: Sequence[tuple[int, int]]) -> bool:
    return all(torch.equal(theirs.block(source), ours.block(target)) for source, target in pairs)


def test_what_one_worker_saved_another_loads(worker: Callable[..., Worker]) -> None:
    writer, reader = worker(seed=1), worker(seed=2)
    writer.save(5)
    assert writer.settled() == {"offer_pages_written": 5}
    untouched = reader.block(25)
    reader.load(5)
    assert reader.settled() == {"restore_tokens_l3": 5 * BLOCK}
    assert reader.ended == {"r": ()}
    assert same(writer, reader, [(number, 20 + number) for number in range(5)])
    assert torch.equal(reader.block(25), untouched)
    reader.load(5, at=30, name="again")
    assert reader.settled() == {"restore_tokens_l2": 5 * BLOCK}, "host memory has them now"
    assert same(writer, reader, [(number, 30 + number) for number in range(5)])


def test_a_worker_labels_what_it_stores(worker: Callable[..., Worker], uri: str) -> None:
    worker()
    (holding,) = asyncio.run(open_storage(uri).holdings())
    assert read_label(holding.label) == label_of(LAYOUT.identity("m"))


def held_copies(one: Worker, gate: threading.Event, begun: threading.Event, name: str = "to_host") -> None:
    """Let copies of a worker wait for the gate."""
    move = getattr(one.copier._mover, name)

    def slow(*given: Any) -> None:
        begun.set()
        gate.wait(LIMIT_S)
        move(*given)

    setattr(one.copier._mover, name, slow)


def test_blocks_of_a_preempted_request_are_released_once_they_were_read(worker: Callable[..., Worker]) -> None:
    writer, reader = worker(seed=1), worker(seed=2)
    saved = [writer.block(number) for number in range(3)]
    gate, begun = threading.Event(), threading.Event()
    held_copies(writer, gate, begun)
    writer.save(3)
    assert begun.wait(LIMIT_S)
    threading.Timer(0.05, gate.set).start()
    writer.engine.release("s")
    assert gate.is_set(), "released while the copy still read its blocks"
    assert not writer.engine._reading and not writer.engine._tokens, "nothing is kept of it"
    writer.tensors.zero_()
    assert writer.settled() == {"offer_pages_written": 3}
    reader.load(3)
    reader.settled()
    assert all(torch.equal(reader.block(20 + number), page) for number, page in enumerate(saved))


def test_a_copy_of_a_preempted_request_that_does_not_end_is_not_waited_for_without_end(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = worker(seed=1)
    gate, begun = threading.Event(), threading.Event()
    held_copies(writer, gate, begun)
    writer.save(3)
    assert begun.wait(LIMIT_S)
    monkeypatch.setattr(storage_role, "RELEASE_S", 0.05)
    with pytest.raises(TidekvError, match="preempted request 's'"):
        writer.engine.release("s")
    assert not gate.is_set()
    gate.set()
    assert writer.settled() == {"offer_pages_written": 3}


def test_a_finished_request_is_reported_once_its_blocks_were_read(worker: Callable[..., Worker]) -> None:
    writer = worker(seed=1)
    gate, begun = threading.Event(), threading.Event()
    held_copies(writer, gate, begun)
    writer.save(3)
    assert begun.wait(LIMIT_S)
    writer.engine.hold("s")
    writer.take()
    assert writer.engine.is_transferring() and not writer.freed
    gate.set()
    writer.until(lambda: writer.freed == {"s"})
    assert not writer.engine.is_transferring()
    assert not writer.engine._reading and not writer.engine._tokens, "nothing is kept of it"


def test_pages_are_saved_as_they_fill(worker: Callable[..., Worker]) -> None:
    writer, reader = worker(seed=1), worker(seed=2)
    writer.save(2)
    for page in (2, 3):
        tokens = tokens_of(0, (page + 1) * BLOCK)[page * BLOCK * 4 :]
        writer.engine.save(SaveJob("s", b"", tokens, page, (page,)))
    assert writer.settled() == {"offer_pages_written": 4}
    reader.load(4)
    assert reader.settled() == {"restore_tokens_l3": 4 * BLOCK}
    assert same(writer, reader, [(number, 20 + number) for number in range(4)])


def test_what_host_memory_cannot_keep_passes_through_it(worker: Callable[..., Worker]) -> None:
    writer, reader = worker(seed=1, host_pages=8), worker(seed=2)
    writer.save(6)
    writer.settled()
    writer.save(6, prompt=1, name="other")
    writer.settled()
    # Its beginning is not in host memory any more.
    tokens = tokens_of(0, 8 * BLOCK)[6 * BLOCK * 4 :]
    writer.engine.save(SaveJob("s", b"", tokens, 6, (6, 7)))
    assert writer.settled() == {"offer_pages_passed": 2}
    writer.save(20, prompt=2, name="long")
    counts = writer.settled()
    assert counts.pop("offer_pages_written", 0) + counts.pop("offer_pages_passed") == 20
    assert not counts
    for prompt, pages in ((0, 8), (2, 20)):
        reader.load(pages, prompt=prompt, name=f"r{prompt}")
        assert reader.settled() == {"restore_tokens_l3": pages * BLOCK}
        assert same(writer, reader, [(number, 20 + number) for number in range(pages)])


def test_a_load_ends_at_the_first_page_that_is_missing(worker: Callable[..., Worker]) -> None:
    writer, reader = worker(seed=1), worker(seed=2)
    writer.save(4)
    writer.settled()
    writer.engine.engine.call(lambda _: writer.store.delete(keys_of(0, 4)[2:3]))
    reader.load(4)
    assert reader.settled() == {"restore_tokens_l3": 2 * BLOCK, "restores_partial": 1}
    assert reader.ended == {"r": (22, 23)}
    assert same(writer, reader, [(0, 20), (1, 21)])


def test_more_pages_than_the_host_has_go_in_parts(worker: Callable[..., Worker]) -> None:
    writer, reader = worker(seed=1, host_pages=40), worker(seed=2, host_pages=4)
    writer.save(20)
    assert writer.settled() == {"offer_pages_written": 20}
    reader.load(20)
    reader.load(20, at=0, name="other")
    counts = reader.settled()
    assert counts["restore_tokens_l3"] + counts.get("restore_tokens_l2", 0) == 40 * BLOCK
    assert reader.ended == {"r": (), "other": ()}
    assert same(writer, reader, [(number, 20 + number) for number in range(20)])


@pytest.mark.parametrize("have", [0, 1, 2, 4])
def test_loads_that_start_within_a_page_fill_each_block_that_is_missing(
    worker: Callable[..., Worker], have: int
) -> None:
    layout = KVLayout(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype="float32", page_size=3 * BLOCK)
    writer, reader = worker(seed=1, layout=layout), worker(seed=2, host_pages=4, layout=layout)
    writer.save(6)
    assert writer.settled() == {"offer_pages_written": 6}
    before = [reader.block(number) for number in range(BLOCKS)]
    reader.load(6, have=have)
    held = have // 3 * 3 * BLOCK
    assert reader.settled() == {
        "restore_tokens_l3": 18 * BLOCK - held,
        **({"restore_tokens_l1": held} if held else {}),
    }
    assert reader.ended == {"r": ()}
    into = range(20 + have, 38)
    assert same(writer, reader, [(number - 20, number) for number in into])
    untouched = [number for number in range(BLOCKS) if number not in into]
    assert all(torch.equal(reader.block(number), before[number]) for number in untouched)


def test_a_load_that_vllm_shortened_within_a_page_writes_no_other_block(worker: Callable[..., Worker]) -> None:
    layout = KVLayout(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype="float32", page_size=3 * BLOCK)
    writer, reader = worker(seed=1, layout=layout), worker(seed=2, layout=layout)
    writer.save(2)
    writer.settled()
    before = [reader.block(number) for number in range(BLOCKS)]
    reader.engine.load(LoadJob("r", b"", tokens_of(0, 6 * BLOCK), (20, 21, 22, 23), 0))
    reader.settled()
    assert reader.ended == {"r": ()}
    assert same(writer, reader, [(number, 20 + number) for number in range(4)])
    untouched = [number for number in range(BLOCKS) if number not in range(20, 24)]
    assert all(torch.equal(reader.block(number), before[number]) for number in untouched)


def test_a_load_waits_while_the_host_has_no_page_for_it(worker: Callable[..., Worker]) -> None:
    writer, reader = worker(seed=1, host_pages=40), worker(seed=2, host_pages=4)
    for prompt in range(3):
        writer.save(4, prompt=prompt, name=f"s{prompt}")
    writer.settled()
    gate = reader.store.held["get_into"] = threading.Event()
    reader.load(4, at=12, name="r0")
    assert reader.store.reached.wait(LIMIT_S)
    for number in (1, 2):
        reader.load(4, prompt=number, at=12 + 4 * number, name=f"r{number}")
    reader.take()
    assert not reader.ended
    gate.set()
    assert reader.settled() == {"restore_tokens_l3": 12 * BLOCK}
    assert reader.ended == {"r0": (), "r1": (), "r2": ()}
    assert same(writer, reader, [(number, 12 + 4 * load + number) for load in range(3) for number in range(4)])


def test_what_storage_has_already_is_not_written_again(worker: Callable[..., Worker]) -> None:
    first, second = worker(seed=1), worker(seed=2)
    first.save(3)
    first.settled()
    second.save(3)
    assert second.settled() == {"offer_pages_written": 3}
    assert "put_from" not in second.store.calls
    second.save(3, name="again")
    assert second.settled() == {"offer_pages_present": 3}


def test_pages_of_storage_that_cannot_be_read_have_failed(
    worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture
) -> None:
    reader = worker()
    reader.store.says = [True, True]
    reader.store.fails.add("get_into")
    reader.load(2)
    assert reader.settled() == {"restores_failed": 1}
    assert reader.ended == {"r": (20, 21)}
    assert "no disk" in caplog.text


@pytest.mark.parametrize("call", ["exists", "put_from"])
def test_storage_that_cannot_be_written_is_left_alone_after_a_while(
    worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture, call: str
) -> None:
    writer = worker()
    writer.store.fails.add(call)
    for number in range(8):
        writer.save(1, prompt=number, name=f"s{number}")
        assert writer.settled() == {"offer_pages_written": 1}
    calls = writer.store.calls.count(call)
    assert calls == 8
    writer.save(1, prompt=9)
    assert writer.settled() == {"offer_pages_written": 1}
    assert writer.store.calls.count(call) == calls
    assert "no disk" in caplog.text


def test_a_load_that_takes_too_long_is_given_up_and_never_written(worker: Callable[..., Worker]) -> None:
    writer, reader = worker(seed=1), worker(seed=2, load_timeout_s=0.2)
    writer.save(3)
    writer.settled()
    before = [reader.block(20 + number) for number in range(3)]
    reader.store.held["get_into"] = threading.Event()
    reader.load(3)
    reader.until(lambda: "r" in reader.ended)
    assert reader.ended == {"r": (20, 21, 22)}
    reader.store.held["get_into"].set()
    assert reader.settled() == {"restores_failed": 1}
    assert all(torch.equal(reader.block(20 + number), page) for number, page in enumerate(before))


def test_a_load_has_not_ended_while_it_still_writes_to_blocks(worker: Callable[..., Worker]) -> None:
    writer, reader = worker(seed=1), worker(seed=2, load_timeout_s=0.5)
    writer.save(2)
    writer.settled()
    gate, begun = threading.Event(), threading.Event()
    held_copies(reader, gate, begun, "to_device")
    reader.load(2)
    assert begun.wait(LIMIT_S)
    end_s = time.monotonic() + 1.0
    while time.monotonic() < end_s:
        reader.take()
        time.sleep(0.01)
    assert not reader.ended, "its deadline has passed, and its copy has not ended"
    gate.set()
    reader.settled()
    assert reader.ended.keys() == {"r"}


@pytest.mark.parametrize("name", ["to_device", "to_host"])
def test_a_copy_that_fails_is_recomputed_or_not_saved(worker: Callable[..., Worker], name: str) -> None:
    writer, reader = worker(seed=1), worker(seed=2)
    writer.save(2)
    writer.settled()

    def broken(*_: object) -> None:
        raise RuntimeError("no device")

    setattr(reader.copier._mover, name, broken)
    if name == "to_device":
        reader.load(2)
        assert reader.settled() == {"restores_failed": 1}
        assert reader.ended == {"r": (20, 21)}
    else:
        reader.save(2)
        reader.engine.hold("s")
        assert reader.settled() == {"offer_pages_declined": 2}
        assert reader.freed == {"s"}


def test_closing_stores_what_was_saved_and_ends_what_was_loaded(uri: str) -> None:
    writer = Worker(uri, seed=1)
    writer.save(6)
    writer.load(2, prompt=5)
    writer.engine.close()
    writer.take()
    assert writer.ended == {"r": (20, 21)}
    writer.engine.close()
    writer.load(1, name="late")
    writer.take()
    assert writer.ended["late"] == (20,)
    reader = Worker(uri, seed=2)
    reader.load(6)
    assert reader.settled() == {"restore_tokens_l3": 6 * BLOCK}
    reader.engine.close()


def test_a_place_that_cannot_be_used_leaves_no_thread(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    before = threading.active_count()
    with pytest.raises((StorageFailed, InvalidConfig)):
        Worker(f"file:{tmp_path}/file?capacity=16MB")
    assert threading.active_count() == before


async def _probed(lookup: PrefixLookup) -> None:
    if lookup._guard.is_open:
        await asyncio.wait(lookup._guard._tasks._tasks, timeout=LIMIT_S)


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


@pytest.mark.parametrize("call", ["get_into", "put_from", "exists"])
def test_calls_that_storage_cancels_have_failed(worker: Callable[..., Worker], call: str) -> None:
    """SGLang #38428: a job whose call raised what nothing expected never ended."""
    one = worker()
    one.store.fails.add(call)
    one.store.raises = CANCELLED
    for number in range(8):
        if call == "get_into":
            one.store.says = [True, True]
            one.load(2, prompt=number, name=f"r{number}")
            assert one.settled() == {"restores_failed": 1}
            assert one.ended[f"r{number}"] == (20, 21)
        else:
            one.save(2, prompt=number, name=f"s{number}")
            assert one.settled() == {"offer_pages_written": 2}


@pytest.mark.parametrize("call", ["exists", "put_from"])
def test_storage_that_is_left_alone_is_not_asked_for_a_load(worker: Callable[..., Worker], call: str) -> None:
    """Each request would wait for a storage that is gone, until its timeout."""
    one = worker()
    one.store.fails.add(call)
    for number in range(8):
        one.save(2, prompt=number, name=f"s{number}")
        one.settled()
    one.store.calls.clear()
    one.load(2, prompt=9, name="later")
    assert one.settled() == {"restores_failed": 1}
    assert one.ended == {"later": (20, 21)}
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
