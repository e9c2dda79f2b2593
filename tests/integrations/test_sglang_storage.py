"""SGLang's storage over ours: pages of every host layout, byte for byte what a decode engine has, and the reverse."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any  # SGLang's objects have no types.

import pytest
import torch

from tests.support.configs import engine_config
from tests.support.waits import LIMIT_S
from tidekv import (
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    HostPool,
    KVLayout,
    NixlTransport,
    PrefillConfig,
    PrefillPeer,
)
from tidekv.backends.keys.chain import pack_tokens, page_digests
from tidekv.backends.storage.label import label_of, read_label
from tidekv.backends.storage.uri import open_storage
from tidekv.engine import shared_storage
from tidekv.engine.integrations.sglang import storage_thread
from tidekv.engine.integrations.sglang.page_layouts import HostPages
from tidekv.engine.integrations.sglang.storage_thread import StorageThread
from tidekv.engine.shared_storage import BreakerLimits, StorageGuard
from tidekv.engine.synthetic.prefill import SyntheticPrefill
from tidekv.states.errors import EngineClosed, InvalidConfig, InvalidRequest, StorageFailed

LAYERS, HEADS, DIM, SIZE, PAGES = 3, 2, 4, 8, 6
MHA = {
    "layer_first": (2, LAYERS, PAGES * SIZE, HEADS, DIM),
    "page_first": (2, PAGES * SIZE, LAYERS, HEADS, DIM),
    "page_first_direct": (2, PAGES, LAYERS, SIZE, HEADS, DIM),
    "page_head": (2, PAGES, HEADS, SIZE, LAYERS, DIM),
}
MLA = {
    "layer_first": (LAYERS, PAGES * SIZE, 1, DIM),
    "page_first": (PAGES * SIZE, LAYERS, 1, DIM),
    "page_first_direct": (PAGES, LAYERS, SIZE, 1, DIM),
}
ALL = [(layout, False) for layout in MHA] + [(layout, True) for layout in MLA]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up on a busy machine has as long as it takes."""
    monkeypatch.setattr(storage_thread, "LOOK_UP_S", LIMIT_S)


class FakeHostPool:
    """The tensors of SGLang's host pools, as its classes shape them."""

    def __init__(self, layout: str, *, is_mla: bool, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.layout, self.dtype = layout, dtype
        self.page_size, self.layer_num, self.head_num = SIZE, LAYERS, HEADS
        self.head_dim = self.kv_cache_dim = DIM
        shape = (MLA if is_mla else MHA)[layout]
        self.kv_buffer = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        self.is_mla = is_mla

    def element(self, layer: int, part: int, token: int, head: int) -> torch.Tensor:
        """One head's elements of one token, found by the names of the axes."""
        page, slot = divmod(token, SIZE)
        if self.is_mla:
            at = {
                "layer_first": (layer, token, 0),
                "page_first": (token, layer, 0),
                "page_first_direct": (page, layer, slot, 0),
            }
            return self.kv_buffer[at[self.layout]]
        at = {
            "layer_first": (part, layer, token, head),
            "page_first": (part, token, layer, head),
            "page_first_direct": (part, page, layer, slot, head),
            "page_head": (part, page, head, slot, layer),
        }
        return self.kv_buffer[at[self.layout]]

    def page_bytes(self, page: int) -> bytes:
        """The bytes that tidekv has for that page, element by element: too simple to be wrong."""
        parts = (0,) if self.is_mla else (0, 1)
        heads = range(1 if self.is_mla else HEADS)
        found = [
            self.element(layer, part, page * SIZE + slot, head)
            for layer in range(LAYERS)
            for part in parts
            for slot in range(SIZE)
            for head in heads
        ]
        return torch.cat(found).contiguous().view(torch.uint8).numpy().tobytes()

    def flat_page(self, page: int) -> torch.Tensor:
        """As get_data_page does."""
        first = page * SIZE
        whole = slice(None)
        at: dict[str, tuple[Any, ...]] = {
            "layer_first": (whole, slice(first, first + SIZE))
            if self.is_mla
            else (whole, whole, slice(first, first + SIZE)),
            "page_first": (slice(first, first + SIZE),) if self.is_mla else (whole, slice(first, first + SIZE)),
            "page_first_direct": (page,) if self.is_mla else (whole, page),
            "page_head": (whole, page),
        }
        return self.kv_buffer[at[self.layout]].flatten()

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self.flat_page(0))


def indices_of(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * SIZE, (page + 1) * SIZE) for page in pages])


def keys_of(tokens: list[int]) -> list[str]:
    return [digest.hex() for digest in page_digests(pack_tokens(tokens), SIZE)]


def config_of(uri: str, *, is_mla: bool = False, is_writer: bool = True, **changes: object) -> SimpleNamespace:
    extra = {"backend_name": "tidekv", "interface_v1": 1, "uri": uri, "model": "m"}
    given = {"pp_size": 1, "attn_cp_size": 1, "tp_rank": 0, "tp_size": 1, "model_name": "other", "extra_config": extra}
    return SimpleNamespace(**{**given, "is_mla_model": is_mla, "is_storage_writer": is_writer, **changes})


@contextmanager
def opened(backend: ModuleType, uri: str, pool: FakeHostPool, **changes: Any) -> Iterator[Any]:
    storage = backend.TidekvHiCacheStorage(config_of(uri, is_mla=pool.is_mla, **changes), {})
    storage.register_mem_pool_host(pool)
    try:
        yield storage
    finally:
        storage.close()


@pytest.mark.parametrize(("layout", "is_mla"), ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_page_of_any_layout_has_the_bytes_of_ours(layout: str, is_mla: bool, dtype: torch.dtype) -> None:
    pool = FakeHostPool(layout, is_mla=is_mla, dtype=dtype)
    pages = HostPages(pool, is_mla=is_mla)
    for page in range(PAGES):
        assert pages.view(page * SIZE).contiguous().view(torch.uint8).numpy().tobytes() == pool.page_bytes(page)
        flat = pool.flat_page(page)
        assert pages.flat_view(flat).contiguous().view(torch.uint8).numpy().tobytes() == pool.page_bytes(page)
    assert pages.layout.page_bytes == len(pool.page_bytes(0))


@pytest.mark.parametrize(("layout", "is_mla"), ALL)
def test_what_one_host_pool_wrote_another_of_another_layout_reads(
    backend: ModuleType, tmp_path: Path, layout: str, is_mla: bool
) -> None:
    uri = f"file:{tmp_path}?capacity=16MB"
    ours = FakeHostPool(layout, is_mla=is_mla, seed=1)
    keys = keys_of(list(range(4 * SIZE)))
    with opened(backend, uri, ours) as storage:
        assert storage.batch_exists(keys) == 0
        assert storage.batch_set_v1(keys[:3], indices_of(4, 0, 2)) == [True] * 3
        assert storage.batch_exists(keys) == 3
        assert storage.exists(keys[0])
        assert not storage.exists(keys[3])
    theirs = FakeHostPool("page_first", is_mla=is_mla, seed=2)
    with opened(backend, uri, theirs) as storage:
        before = theirs.page_bytes(3)
        assert storage.batch_get_v1(keys, indices_of(1, 5, 0, 3)) == [True, True, True, False]
        assert [theirs.page_bytes(page) for page in (1, 5, 0)] == [ours.page_bytes(page) for page in (4, 0, 2)]
        assert theirs.page_bytes(3) == before, "a miss leaves the page as it was"
        flat = storage.get(keys[0])
        assert flat is not None
        assert storage.get(keys[3]) is None
        found = storage.batch_get(keys, [torch.zeros_like(flat) for _ in keys])
        assert [page is not None for page in found] == [True, True, True, False]
        assert torch.equal(found[0], theirs.flat_page(1))
        assert storage.set(keys[3], theirs.flat_page(3))
        assert storage.batch_exists(keys) == 4
        storage.clear()
        assert storage.batch_exists(keys) == 0


def test_only_one_of_equal_ranks_writes(backend: ModuleType, tmp_path: Path) -> None:
    pool = FakeHostPool("page_first", is_mla=True)
    keys = keys_of(list(range(SIZE)))
    with opened(backend, f"file:{tmp_path}?capacity=16MB", pool, is_writer=False) as storage:
        assert storage.batch_set_v1(keys, indices_of(0)) == [True]
        assert storage.batch_set(keys, [pool.flat_page(0)])
        assert storage.batch_exists(keys) == 0


def test_ranks_and_models_do_not_read_each_others_pages(backend: ModuleType, tmp_path: Path) -> None:
    uri = f"file:{tmp_path}?capacity=16MB"
    keys = keys_of(list(range(SIZE)))
    with opened(backend, uri, FakeHostPool("page_first", is_mla=False), tp_rank=0, tp_size=2) as storage:
        assert storage.batch_set_v1(keys, indices_of(0)) == [True]
    with opened(backend, uri, FakeHostPool("page_first", is_mla=False), tp_rank=1, tp_size=2) as storage:
        assert storage.batch_exists(keys) == 0
    other = {"uri": uri}  # The model's name is SGLang's own then.
    with opened(backend, uri, FakeHostPool("page_first", is_mla=False), extra_config=other) as storage:
        assert storage.batch_exists(keys) == 0


def test_each_rank_labels_what_it_stores(backend: ModuleType, tmp_path: Path) -> None:
    uri = f"file:{tmp_path}?capacity=16MB"
    for rank in range(2):
        with opened(backend, uri, FakeHostPool("page_first", is_mla=False), tp_rank=rank, tp_size=2) as storage:
            layout = storage._store.layout
    labels = [read_label(holding.label) for holding in asyncio.run(open_storage(uri).holdings())]
    assert len(labels) == 2
    for rank in range(2):
        assert label_of(layout.identity("m"), rank=rank, ranks=2) in labels


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"extra_config": {"uri": "memory:", "capasity": 1}}, "no option 'capasity'"),
        ({"extra_config": {}}, 'needs "uri"'),
        ({"extra_config": None}, 'needs "uri"'),
        ({"pp_size": 2}, "pipeline stages"),
        ({"attn_cp_size": 2}, "context-parallel"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name(backend: ModuleType, changes: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        backend.TidekvHiCacheStorage(config_of("memory:?capacity=1MB", **changes), {})


def test_host_pools_without_counterpart_are_refused() -> None:
    pool = FakeHostPool("page_first", is_mla=False)
    pool.layout = "page_unified"
    with pytest.raises(InvalidConfig, match="'page_unified' cannot be shared"):
        HostPages(pool, is_mla=False)
    pool.layout, pool.dtype = "page_first", torch.int32
    with pytest.raises(InvalidConfig, match=r"torch\.int32 cannot be shared"):
        HostPages(pool, is_mla=False)
    pool.dtype, pool.v_head_dim = torch.float32, DIM + 1
    with pytest.raises(InvalidConfig, match="heads of different length"):
        HostPages(pool, is_mla=False)


def test_wrong_calls_change_nothing(backend: ModuleType, tmp_path: Path) -> None:
    unopened = backend.TidekvHiCacheStorage(config_of("memory:?capacity=1MB"), {})
    with pytest.raises(InvalidRequest, match="register_mem_pool_host comes before"):
        unopened.exists("00" * 32)
    unopened.close()
    with opened(backend, f"file:{tmp_path}?capacity=16MB", FakeHostPool("page_first", is_mla=False)) as storage:
        with pytest.raises(InvalidRequest, match="not a hex digest"):
            storage.exists("page-0")
        with pytest.raises(InvalidRequest, match="not a digest of 32 bytes"):
            storage.exists("00")
        with pytest.raises(InvalidRequest, match="1 pages of 8 tokens do not have 9 indices"):
            storage.batch_get_v1(["00" * 32], torch.arange(9))
    with pytest.raises(EngineClosed):
        storage.exists("00" * 32)
    storage.close()


async def probed(guard: StorageGuard) -> None:
    """Wait until the probes of storage have ended."""
    if guard.is_open:
        await asyncio.wait(guard._tasks._tasks, timeout=LIMIT_S)


def test_keys_of_the_pages_before_a_call_are_taken_and_touched(
    backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(list(range(4 * SIZE)))
    touched: list[list[bytes]] = []
    with opened(backend, f"file:{tmp_path}?capacity=16MB", FakeHostPool("page_first", is_mla=False)) as storage:
        engine = storage._opened()._storage
        touch = engine.touch

        async def noted(keys: list[bytes], *, timeout_s: float) -> list[bool]:
            touched.append(list(keys))
            return await touch(keys, timeout_s=timeout_s)

        monkeypatch.setattr(engine, "touch", noted)
        assert storage.batch_set_v1(keys[:2], indices_of(0, 1)) == [True, True]
        extra = SimpleNamespace(prefix_keys=keys[:2])
        assert storage.batch_set_v1(keys[2:], indices_of(2, 3), extra) == [True, True]
        assert touched[-1] == [bytes.fromhex(key) for key in keys], "the head is evicted last"
        assert storage.batch_exists(keys[2:], extra) == 2
        assert storage.batch_get_v1(keys[2:], indices_of(2, 3), extra) == [True, True]
        with pytest.raises(InvalidRequest):
            storage.batch_exists(keys[2:], SimpleNamespace(prefix_keys=["no digest"]))


class Broken:
    """Calls of a storage engine that raise while `raised` is set, and are counted but for probes."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.raised: BaseException | None = None
        self.calls = 0
        for name in ("touch", "exists", "get_into", "put_from", "probe"):
            monkeypatch.setattr(engine, name, self._of(getattr(engine, name)))

    def _of(self, call: Any) -> Any:
        async def counted(*args: Any, **given: Any) -> Any:
            self.calls += call.__name__ != "probe"
            if self.raised is not None:
                raise self.raised
            return await call(*args, **given)

        return counted


@pytest.mark.parametrize(
    ("raised", "level"),
    [
        (StorageFailed("no disk"), "WARNING"),
        (asyncio.CancelledError(), "WARNING"),
        (ZeroDivisionError("a bug of a client"), "ERROR"),
    ],
    ids=["failed", "cancelled", "a bug"],
)
def test_what_a_client_of_storage_raises_is_a_miss_and_ends_no_thread_of_sglang(
    backend: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    raised: BaseException,
    level: str,
) -> None:
    """SGLang #38428: its thread of backups ended with the first exception that it did not expect."""
    with opened(backend, f"file:{tmp_path}?capacity=16MB", FakeHostPool("page_first", is_mla=False)) as storage:
        keys = keys_of(list(range(SIZE)))
        broken = Broken(storage._store._storage, monkeypatch)
        broken.raised = raised
        assert storage.batch_exists(keys) == 0
        assert storage.batch_get_v1(keys, indices_of(0)) == [False]
        assert storage.batch_set_v1(keys, indices_of(0)) == [False]
        assert [record.levelname for record in caplog.records] == [level] * 3
        broken.raised = None
        assert storage.batch_set_v1(keys, indices_of(0)) == [True]
        assert storage.batch_exists(keys) == 1


def test_storage_that_fails_again_and_again_is_left_alone_until_a_probe_succeeds(
    backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each call of storage that is gone would hold up a thread of SGLang until its timeout."""
    monkeypatch.setattr(shared_storage, "DEFAULT_LIMITS", BreakerLimits(backoff_s=0.001))
    with opened(backend, f"file:{tmp_path}?capacity=16MB", FakeHostPool("page_first", is_mla=False)) as storage:
        keys = keys_of(list(range(SIZE)))
        store = storage._store
        broken = Broken(store._storage, monkeypatch)
        broken.raised = StorageFailed("no disk")
        for _ in range(8):
            assert storage.batch_exists(keys) == 0
        assert caplog.text.count("storage is not used until a probe succeeds") == 1
        broken.calls = 0
        assert storage.batch_exists(keys) == 0
        assert storage.batch_get_v1(keys, indices_of(0)) == [False]
        assert storage.batch_set_v1(keys, indices_of(0)) == [False]
        assert broken.calls == 0
        assert "counts as a miss: cause='no disk'" in caplog.text
        broken.raised = None
        store._loop.call(probed(store._guard))
        assert storage.batch_set_v1(keys, indices_of(0)) == [True]
        assert storage.batch_exists(keys) == 1


def test_a_copy_that_raises_is_logged_and_its_call_has_no_page(
    backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(backend, f"file:{tmp_path}?capacity=16MB", FakeHostPool("page_first", is_mla=False)) as storage:
        keys = keys_of(list(range(SIZE)))
        assert storage.batch_set_v1(keys, indices_of(0)) == [True]

        def breaks(*_: object) -> None:
            raise RuntimeError("shapes differ")

        monkeypatch.setattr(HostPages, "view", breaks)
        assert storage.batch_get_v1(keys, indices_of(0)) == [False]
        assert storage.batch_set_v1(keys, indices_of(0)) == [False]
        assert caplog.text.count("shapes differ") >= 2


def test_storage_that_hangs_holds_up_its_caller_once(
    backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang's decode server looks up in the thread that schedules all of its requests."""
    answers = threading.Event()
    asked = []

    async def hangs(keys: list[bytes], **_: object) -> list[bool]:
        asked.append(len(keys))
        await asyncio.to_thread(answers.wait, LIMIT_S)
        return [True] * len(keys)

    with opened(backend, f"file:{tmp_path}?capacity=16MB", FakeHostPool("page_first", is_mla=False)) as storage:
        keys = keys_of(list(range(2 * SIZE)))
        engine = storage._store._storage
        monkeypatch.setattr(engine, "touch", hangs)
        monkeypatch.setattr(storage_thread, "LOOK_UP_S", 0.01)
        assert storage.batch_exists(keys) == 0
        late = storage._store._late
        monkeypatch.setattr(storage_thread, "LOOK_UP_S", LIMIT_S)
        # Would wait for the limit of the test, if it waited.
        assert [storage.batch_exists(keys) for _ in range(3)] == [0, 0, 0]
        assert asked == [2]
        assert caplog.text.count("does not answer a look-up") == 1
        answers.set()
        assert late.result(LIMIT_S) == [True, True]
        assert storage.batch_exists(keys) == 2


def test_many_pages_go_in_batches(tmp_path: Path) -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", page_size=16)
    store = StorageThread(open_storage(f"file:{tmp_path}?capacity=16MB"), layout=layout, model="m")
    keys = [bytes([number % 256, number // 256]) * 16 for number in range(300)]

    def fill(number: int, page: torch.Tensor) -> None:
        page.fill_(number % 251)

    assert store.put(keys, fill) == [True] * 300
    seen: dict[int, int] = {}
    assert store.get(keys, lambda number, page: seen.update({number: int(page[0])})) == [True] * 300
    assert seen == {number: number % 251 for number in range(300)}
    store.close()


def test_a_place_that_cannot_be_used_leaves_nothing_running(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", page_size=16)
    with pytest.raises((StorageFailed, InvalidConfig)):
        StorageThread(open_storage(f"file:{tmp_path}/file?capacity=16MB"), layout=layout, model="m")


@pytest.mark.nixl
async def test_a_decode_engine_hits_what_sglang_wrote_and_the_reverse(backend: ModuleType, tmp_path: Path) -> None:
    uri = f"file:{tmp_path}?capacity=64MB"
    layout = KVLayout(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype="float32", page_size=SIZE)
    theirs, mine = list(range(100, 100 + 4 * SIZE)), list(range(500, 500 + 4 * SIZE))
    host = FakeHostPool("page_first", is_mla=False, seed=5)
    with opened(backend, uri, host) as storage:
        assert storage.batch_set_v1(keys_of(theirs), indices_of(0, 1, 2, 3)) == [True] * 4
    prefill_pool = DevicePool.allocate(layout, 32)
    synthetic = SyntheticPrefill(prefill_pool, vocabulary=1000)
    device = DevicePool.allocate(layout, 64)
    engine = DecodeEngine(
        engine_config(model="m", prefetch_threshold_tokens=1),
        device=device,
        host=HostPool.allocate(layout, 64),
        storage=open_storage(uri),
        transport=NixlTransport(name="decode-0", dials=["127.0.0.1:*"]),
    )
    peer = PrefillPeer(
        PrefillConfig(model="m"), device=prefill_pool, transport=NixlTransport("prefill-0"), on_room=synthetic.serve
    )
    async with peer, engine:

        async def restored(request_id: str, tokens: list[int]) -> tuple[dict[str, int], list[bytes]]:
            ready = await engine.restore(
                DecodeRequest(request_id=request_id, tokens=tokens, prefill=peer.address, send_prompt=True)
            )
            pages = [page.numpy().tobytes() for page in device.read_pages(ready.pages[:4])]
            await engine.finish(ready, [ready.first_token])
            return dict(ready.sources), pages

        sources, pages = await restored("theirs", [*theirs, 1, 2])
        assert sources == {"l1": 0, "l2": 0, "l3": 4 * SIZE, "transfer": 2}
        assert pages == [host.page_bytes(page) for page in range(4)]
        sources, computed = await restored("mine", [*mine, 1, 2])
        assert sources["l3"] == 0
        await engine.wait_settled()
    reader = FakeHostPool("page_first_direct", is_mla=False, seed=6)
    with opened(backend, uri, reader) as storage:
        assert storage.batch_exists(keys_of(mine)) == 4
        assert storage.batch_get_v1(keys_of(mine), indices_of(5, 4, 3, 2)) == [True] * 4
        assert [reader.page_bytes(page) for page in (5, 4, 3, 2)] == computed
