"""A real engine publishes to a router what it has in each tier."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from tests.support.configs import engine_config
from tests.support.inside import runtime_of
from tests.support.waits import LIMIT_S
from tidekv import DecodeEngine, DecodeRequest, DevicePool, HostPool, KVLayout, NixlTransport, PrefillPeer
from tidekv.backends.keys.chain import page_digests
from tidekv.backends.storage.uri import open_storage
from tidekv.engine.kv_events.messages import hash_of
from tidekv.engine.synthetic.prefill import SyntheticPrefill
from tidekv.states.errors import InvalidConfig

zmq = pytest.importorskip("zmq")
zmq_asyncio = pytest.importorskip("zmq.asyncio")

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32", page_size=16)


def applied(held: dict[str, set[int]], events: list[dict[str, object]]) -> None:
    for event in events:
        if event["type"] == "AllBlocksCleared":
            for known in held.values():
                known.clear()
            continue
        hashes = set(event["block_hashes"])
        if event["type"] == "BlockStored":
            held[event["medium"]] |= hashes
        else:
            held[event["medium"]] -= hashes


@pytest.mark.nixl
async def test_a_router_sees_all_three_tiers_of_an_engine(tmp_path: Path) -> None:
    tokens = list(range(70))
    config = engine_config(
        kv_events_endpoint="tcp://127.0.0.1:*",
        kv_events_replay="tcp://127.0.0.1:*",
        kv_events_topic="kv",
        kv_events_data_parallel_rank=3,
    )
    prefill_pool = DevicePool.allocate(LAYOUT, 32)
    synthetic = SyntheticPrefill(prefill_pool, vocabulary=1000)
    engine = DecodeEngine(
        config,
        device=DevicePool.allocate(LAYOUT, 32),
        host=HostPool.allocate(LAYOUT, 32),
        storage=open_storage(f"file:{tmp_path}?capacity=64MB"),
        transport=NixlTransport(name="decode-0", dials=["127.0.0.1:*"]),
    )
    async with (
        PrefillPeer(device=prefill_pool, transport=NixlTransport("prefill-0"), on_room=synthetic.serve) as peer,
        engine,
    ):
        publisher = runtime_of(engine).kv_events
        assert publisher is not None
        context = zmq_asyncio.Context()
        asker = context.socket(zmq.DEALER)
        asker.linger = 0
        asker.connect(publisher.replay_address)

        async def seen() -> dict[str, set[int]]:
            """What a router makes of all batches so far; they come from the replay socket, so that none is missed."""
            held: dict[str, set[int]] = {"GPU": set(), "CPU": set(), "STORAGE": set()}
            await asker.send_multipart([b"", bytes(8)])
            expected = 0
            while (frames := await asker.recv_multipart())[2] != b"\xff" * 8:
                assert frames[1] == b"kv"
                assert int.from_bytes(frames[2], "big") == expected
                expected += 1
                _, events, rank = msgspec.msgpack.decode(frames[3])
                assert rank == 3
                applied(held, events)
            return held

        ready = await engine.restore(
            DecodeRequest(request_id="r1", tokens=tokens, prefill=peer.address, send_prompt=True)
        )
        await engine.finish(ready, [ready.first_token])
        await engine.wait_settled()
        packed = b"".join(token.to_bytes(4, "little") for token in tokens)
        pages = {hash_of(digest) for digest in page_digests(packed, 16)}
        assert len(pages) == 4
        async with asyncio.timeout(LIMIT_S):
            while (held := await seen())["STORAGE"] != pages:
                pass
            assert held == {"GPU": pages, "CPU": pages, "STORAGE": pages}
            await engine.flush(tiers=("l1",))
            while (held := await seen())["GPU"]:
                pass
            assert held["CPU"] == pages
        asker.close()
        context.term()
    assert not publisher._thread.is_alive()


async def test_an_endpoint_that_cannot_be_bound_stops_the_start() -> None:
    engine = DecodeEngine(
        engine_config(kv_events_endpoint="nonsense"),
        device=DevicePool.allocate(LAYOUT, 4),
        transport=NixlTransport(name="decode-0", dials=["127.0.0.1:*"]),
    )
    with pytest.raises(InvalidConfig, match="KV events cannot be served"):
        async with engine:
            raise AssertionError("it has started")


def test_wrong_settings_are_named() -> None:
    with pytest.raises(InvalidConfig, match="kept_batches must be a whole number, 1 or more, not 0"):
        engine_config(kv_events_kept_batches=0)
    with pytest.raises(InvalidConfig, match=r"kv_events\.replay needs kv_events\.endpoint"):
        engine_config(kv_events_replay="tcp://*:5558")


@pytest.mark.nixl
async def test_an_engine_that_publishes_does_not_wait_for_its_endless_tasks_as_it_closes(tmp_path: Path) -> None:
    config = engine_config(
        close_deadline_s=100 * LIMIT_S,
        kv_events_endpoint=f"ipc://{tmp_path}/events",
        kv_events_load=f"ipc://{tmp_path}/load",
    )
    engine = DecodeEngine(
        config, device=DevicePool.allocate(LAYOUT, 4), transport=NixlTransport(name="decode-0", dials=["127.0.0.1:*"])
    )
    async with asyncio.timeout(LIMIT_S / 2), engine:
        pass
