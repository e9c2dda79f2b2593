"""A child that was forked beside a thread of tidekv: every call is refused there, none waits, closing does nothing."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tidekv import (
    DevicePool,
    EngineClosed,
    InvalidRequest,
    KVLayout,
    LoopbackNetwork,
    LoopbackTransport,
    PrefillConfig,
    PrefillPeer,
    PrefillThread,
    open_storage,
    prompt_digest,
)
from tidekv.backends.copies.block_order import PagedBlocks
from tidekv.engine.integrations.sglang.storage_thread import StorageThread
from tidekv.engine.integrations.vllm.jobs import LoadJob, SaveJob
from tidekv.engine.integrations.vllm.lookup import PrefixLookup
from tidekv.engine.integrations.vllm.settings import ConnectorSettings, Shared
from tidekv.engine.integrations.vllm.storage_role import WorkerEngine

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", page_size=4)
KEYS = [bytes([1]) * 32]
PROMPT = prompt_digest(range(21))
CHILD_LIMIT_S = 60


def in_child(call: Callable[[], object]) -> str:
    """Return what a call does in a forked child: "returned", the name of its error, or "killed" if it waits."""
    outcomes = ["returned", "EngineClosed", "another error"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Newer Pythons warn of forking with threads.
        child = os.fork()
    if child == 0:
        signal.alarm(CHILD_LIMIT_S)
        code = 0
        try:
            call()
        except EngineClosed:
            code = 1
        except BaseException:
            code = 2
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return outcomes[code] if code >= 0 else "killed"


@pytest.fixture
def prefill() -> Iterator[PrefillThread]:
    transport = LoopbackTransport("prefill", LoopbackNetwork())
    peer = PrefillPeer(PrefillConfig(listen="prefill"), device=DevicePool.allocate(LAYOUT, 16), transport=transport)
    with PrefillThread(peer) as thread:
        thread.open("r1", PROMPT)
        yield thread


def test_a_prefill_thread_refuses_every_call(prefill: PrefillThread) -> None:
    # A thread that is not in the child may hold the lock when the process is forked.
    with prefill._lock:
        told = {
            "open": in_child(lambda: prefill.open("r2", PROMPT)),
            "open again": in_child(lambda: prefill.open("r1", PROMPT)),
            "send": in_child(lambda: prefill.send("r1", [0], start_token=0)),
            "finish": in_child(lambda: prefill.finish("r1", first_token=1)),
            "stop": in_child(lambda: prefill.stop("r1", "x")),
            "restart": in_child(lambda: prefill.restart("r1", "x")),
            "poll": in_child(prefill.poll),
            "long poll": in_child(lambda: prefill.poll(1000.0)),
            "statistics": in_child(prefill.statistics),
        }
        assert set(told.values()) == {"EngineClosed"}, told
        assert in_child(prefill.close) == "returned"
    with pytest.raises(InvalidRequest):
        prefill.open("r1", PROMPT)
    prefill.stop("r1", "enough")
    assert [ended.request_id for ended in prefill.poll(CHILD_LIMIT_S)] == ["r1"]


def test_storage_of_sglang_refuses_every_call() -> None:
    store = StorageThread(open_storage("memory:?capacity=1MiB"), layout=LAYOUT, model="m")
    with store._reading, store._writing:
        told = [
            in_child(lambda: store.leading(KEYS)),
            in_child(lambda: store.get(KEYS, lambda *_: None)),
            in_child(lambda: store.put(KEYS, lambda *_: None)),
            in_child(store.clear),
        ]
        assert set(told) == {"EngineClosed"}, told
        assert in_child(store.close) == "returned"
    assert store.leading(KEYS) == 0
    store.close()


def test_both_sides_of_the_vllm_connector_do_nothing_and_wait_for_nothing(tmp_path: Path) -> None:
    settings = ConnectorSettings(uri=f"file:{tmp_path}?capacity=16MB", host=16 * LAYOUT.page_bytes)
    lookup = PrefixLookup(lambda: open_storage(settings.uri), layout=LAYOUT, model="m", ranks=1, timeout_s=1.0)
    assert in_child(lambda: lookup.ask(KEYS)) == "EngineClosed"
    assert in_child(lookup.close) == "returned"
    lookup.close()

    shared = Shared(
        settings=settings,
        layout=LAYOUT,
        model="m",
        block_size=LAYOUT.page_size,
        num_blocks=4,
        layer_names=("layers.0",),
        rank=0,
        ranks=1,
        is_writer=True,
        loads=True,
        saves=True,
    )
    tensors = [torch.zeros(4, 1, LAYOUT.page_size, 16)]
    blocks = PagedBlocks(tensors, layout=LAYOUT, block_size=LAYOUT.page_size, num_blocks=4)
    worker = WorkerEngine(open_storage(settings.uri), blocks=blocks, shared=shared)
    tokens = bytes(4 * LAYOUT.page_size)

    def load() -> None:
        worker.load(LoadJob("s", b"", tokens, (1,), 0))
        assert worker.take_finished() == (set(), {"s"})
        assert worker.take_invalid_blocks() == {1}

    def save() -> None:
        worker.save(SaveJob("s", b"", tokens, 0, (0,)))
        worker.release("s")
        assert worker.take_counts() == {"offer_pages_declined": 1}

    for work in (load, save, worker.close):
        assert in_child(work) == "returned"
    worker.close()
