"""The public API, call by call as it is documented: every line of it works as written, over real NIXL."""

from __future__ import annotations

import asyncio
import inspect
import json
from pathlib import Path

import numpy as np
import pytest

import tidekv
from tests.support.configs import engine_config
from tidekv import (
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    EngineConfig,
    HostPool,
    KVLayout,
    NixlTransport,
    PrefillCause,
    PrefillConfig,
    PrefillPeer,
    ReadyRequest,
    RequestFailed,
    open_storage,
    prompt_digest,
)
from tidekv.backends.keys.chain import pack_tokens


def make_pools() -> tuple[DevicePool, DevicePool, HostPool]:
    """Pools of prefill and decode, and decode's host pool."""
    layout = KVLayout(num_layers=4, num_kv_heads=2, head_dim=32, dtype="float32", page_size=16)
    device = DevicePool.allocate(layout, num_pages=64, device="cpu")
    wrapped = DevicePool.wrap(list(device.k), list(device.v), layout)
    assert wrapped.num_pages == 64
    return DevicePool.allocate(layout, num_pages=64), wrapped, HostPool.allocate(layout, num_pages=96)


@pytest.mark.nixl
async def test_every_call_works_as_documented(tmp_path: Path) -> None:
    prefill_pool, device, host = make_pools()
    storage = open_storage(f"file:{tmp_path}?capacity=1GB")
    ids = list(range(1000, 1070))  # Four full pages of 16 tokens, and six tokens.
    received: list[str] = []

    async with PrefillPeer(
        PrefillConfig(listen="127.0.0.1:0"),
        device=prefill_pool,
        transport=NixlTransport(name="prefill-0"),
        storage=None,
        on_room=None,
    ) as peer:

        async def serve(request_id: str, page_count: int, tokens: object = ids) -> None:
            room = await peer.room(request_id, prompt_digest(tokens))
            assert room.decode_prefix_len % 16 == 0
            pages = list(range(page_count))
            await room.send(pages[:2], start_token=0)
            await room.send(pages[2:], start_token=32)
            await room.finish(first_token=7, aux={"logprobs": [0.5]})
            received.append(str(await room.received()))

        async with (
            asyncio.TaskGroup() as group,
            DecodeEngine(
                engine_config(prefetch_threshold_tokens=0),
                device=device,
                host=host,
                storage=storage,
                transport=NixlTransport(name="decode-0", dials=["127.0.0.1:*", "nobody:1"]),
            ) as engine,
        ):
            group.create_task(serve("r1", 5))
            ready = await engine.restore(
                DecodeRequest(request_id="r1", tokens=ids, prefill=peer.address, max_new_tokens=256, deadline_s=30.0)
            )
            assert isinstance(ready, ReadyRequest)
            assert ready.pages.dtype == np.int32
            assert len(ready.pages) == 5
            assert (ready.first_token, ready.aux) == (7, {"logprobs": [0.5]})
            assert ready.sources == {"l1": 0, "l2": 0, "l3": 0, "transfer": 70}
            output_tokens = [ready.first_token, 8, 9]
            assert engine.grow(ready, 1) == []
            assert len(engine.grow(ready, 10)) == 1

            group.create_task(serve("r1", 5, [*ids, *output_tokens]))
            retracted = await engine.retract(ready, output_tokens)
            ready = await engine.resume(retracted)
            assert sum(ready.sources.values()) == len(ids) + len(output_tokens)
            await engine.finish(ready, [10])
            await engine.wait_settled()

            forms = (bytes(pack_tokens(ids)), np.array(ids), memoryview(pack_tokens(ids)), tuple(ids))
            for number, tokens in enumerate(forms):
                group.create_task(serve(f"form{number}", 5))
                again = await engine.restore(
                    DecodeRequest(request_id=f"form{number}", tokens=tokens, prefill=[peer.address, "nobody:1"])
                )
                assert again.sources == {"l1": 64, "l2": 0, "l3": 0, "transfer": 6}
                await engine.finish(again)

            group.create_task(serve("r2", 5))
            await engine.restore(DecodeRequest(request_id="r2", tokens=ids, prefill=peer.address))
            assert await engine.abort("r2")
            assert not await engine.abort("r2")
            await engine.wait_settled()
            assert await engine.flush(tiers=("l1", "l2")) == {
                "dropped": {"l1": 4, "l2": 4},
                "spared": {"l1": 0, "l2": 0},
            }
            assert json.dumps(engine.statistics(), default=str)
            await engine.attach_storage("memory:?capacity=1MiB")
            await engine.detach_storage()
            with pytest.raises(RequestFailed) as failed:
                await engine.restore(DecodeRequest(request_id="r3", tokens=ids, prefill="127.0.0.1:1"))
            assert failed.value.cause == PrefillCause.CONNECTION_REFUSED
    assert set(received) == {"received"}


@pytest.mark.nixl
async def test_prefill_is_called_where_the_promise_brings_the_tokens() -> None:
    prefill_pool, device, _ = make_pools()
    seen: list[bytes] = []

    async def start_prefill(room: object) -> None:
        seen.append(room.tokens)
        await room.send([0], start_token=0)
        await room.finish(first_token=1)

    async with (
        PrefillPeer(device=prefill_pool, transport=NixlTransport("prefill-0"), on_room=start_prefill) as peer,
        DecodeEngine(
            EngineConfig(), device=device, transport=NixlTransport("decode-0", dials=["127.0.0.1:*"])
        ) as engine,
    ):
        request = DecodeRequest(request_id="r1", tokens=[5, 6], prefill=peer.address, send_prompt=True)
        ready = await engine.restore(request)
        assert seen == [pack_tokens([5, 6])]
        await engine.finish(ready, [ready.first_token])


def test_every_public_name_is_there_and_documented() -> None:
    for name in tidekv.__all__:
        value = getattr(tidekv, name)
        if isinstance(value, type) or inspect.isfunction(value):  # An alias of a type has no docstring of its own.
            assert value.__doc__, name
        assert name in dir(tidekv)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tidekv.nothing


def test_the_page_names_the_calls_that_are_awaited() -> None:
    calls = {name: getattr(DecodeEngine, name) for name in dir(DecodeEngine) if not name.startswith("_")}
    awaited = {name for name, call in calls.items() if inspect.iscoroutinefunction(call)} | {"offer"}
    page = " ".join((Path(__file__).parents[1] / "docs" / "api.md").read_text().split())
    sentence = page[page.index("these are awaited") : page.index("All others take effect at once")]
    assert set(sentence.split("`")[1::2]) == awaited


def test_help_on_a_room_shows_what_an_embedder_may_call() -> None:
    shown = {name for name in dir(tidekv.Room) if not name.startswith("_")}
    assert shown == {
        *("confirm", "send", "send_component_pages", "keep_component_pages", "finish", "fail", "received", "held"),
        *("pages", "component_pages", "sends_nothing", "writes_in_flight", "is_finished", "cause"),
        *("bytes_sent", "peer_addresses"),
    }
    hidden = {"reserve", "generation"} & set(dir(ReadyRequest))
    assert not hidden
