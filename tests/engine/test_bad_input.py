"""What is wrong is named, and changes nothing."""

from __future__ import annotations

import re

import pytest

from tests.support.configs import engine_config
from tests.support.inside import serve_rooms
from tidekv import (
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    EngineConfig,
    HostPool,
    InvalidConfig,
    InvalidRequest,
    KVLayout,
    LoopbackTransport,
    PrefillConfig,
    PrefillPeer,
    RequestFailed,
    open_storage,
)
from tidekv.transports.loopback import LoopbackNetwork


def layout(**changes: object) -> KVLayout:
    fields: dict[str, object] = {
        "num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "dtype": "float32", "page_size": 4,
    }  # fmt: skip
    return KVLayout(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "model", "field"),
    [
        ({"page_size": 8}, "m", "page_size"),
        ({"dtype": "float16"}, "m", "dtype"),
        ({"num_layers": 3}, "m", "layers"),
        ({"num_kv_heads": 1}, "m", "kv_heads"),
        ({"head_dim": 16}, "m", "head_dim"),
        ({}, "another model", "model"),
    ],
)
async def test_a_prefill_that_differs_is_refused_by_the_field(
    changes: dict[str, object], model: str, field: str
) -> None:
    network = LoopbackNetwork()
    async with (
        PrefillPeer(
            PrefillConfig(listen="prefill", model=model),
            device=DevicePool.allocate(layout(**changes), 8),
            transport=LoopbackTransport("prefill-0", network),
        ),
        DecodeEngine(
            EngineConfig(model="m"),
            device=DevicePool.allocate(layout(), 8),
            transport=LoopbackTransport("decode-0", network),
        ) as engine,
    ):
        with pytest.raises(RequestFailed) as failed:
            await engine.restore(DecodeRequest(request_id="r", tokens=[1, 2, 3], prefill="prefill", send_prompt=True))
        assert re.search(rf"\b{field}\b", str(failed.value.detail))
        await engine.wait_settled()
        core = engine.statistics()["core"]
        assert core["device_free"] == core["device_total"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"request_id": ""}, "request_id"),
        ({"prefill": ""}, "prefill"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"send_prompt": "perhaps"}, "send_prompt must be true or false, not 'perhaps'"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
    ],
)
def test_a_wrong_field_of_a_request_is_named(changes: dict[str, object], words: str) -> None:
    fields: dict[str, object] = {"request_id": "r", "tokens": [1], "prefill": "p"}
    with pytest.raises(InvalidRequest, match=words):
        DecodeRequest(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocabulary": -1}, "vocabulary"),
        ({"lease_s": 0}, "lease_s"),
        ({"fetch_run_pages": 0}, "fetch_run_pages"),
        ({"copy_deadline_s": -1}, "copy_deadline_s"),
    ],
)
def test_a_wrong_setting_is_named_before_anything_starts(changes: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        DecodeEngine(
            engine_config(**changes),
            device=DevicePool.allocate(layout(), 8),
            transport=LoopbackTransport("decode-0", LoopbackNetwork()),
        )


def test_pools_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="layout"):
        DecodeEngine(
            EngineConfig(),
            device=DevicePool.allocate(layout(), 8),
            host=HostPool.allocate(layout(page_size=8), 8),
            transport=LoopbackTransport("decode-0", LoopbackNetwork()),
        )
    with pytest.raises(InvalidConfig, match="host pool"):
        DecodeEngine(
            EngineConfig(),
            device=DevicePool.allocate(layout(), 8),
            storage=open_storage("memory:?capacity=1MiB"),
            transport=LoopbackTransport("decode-0", LoopbackNetwork()),
        )


async def test_output_without_room_and_a_tier_that_is_none_are_refused(make_pair) -> None:
    async with make_pair() as pair:
        ready = await pair.restore("r1", list(range(8)))
        with pytest.raises(InvalidRequest, match="grow before writing"):
            await pair.engine.finish(ready, [1, 2, 3])
        with pytest.raises(InvalidRequest, match="l4"):
            await pair.engine.flush(("l4",))
        await pair.engine.finish(ready, [1])
        with pytest.raises(InvalidRequest, match="given back"):
            await pair.engine.finish(ready, [1])
        await pair.assert_nothing_held()


async def test_pages_that_prefill_does_not_have_are_refused(make_pair) -> None:
    failures: list[InvalidRequest] = []

    async def serve(room) -> None:
        try:
            await room.send([100_000], start_token=0)
        except InvalidRequest as error:
            failures.append(error)
            raise

    async with make_pair() as pair:
        pair.prefill.serve = serve
        serve_rooms(pair.peer, serve)
        with pytest.raises(RequestFailed, match="100000"):
            await pair.engine.restore(pair.request("r1", [1, 2, 3, 4]))
        assert "100000" in str(failures[0])
        await pair.assert_nothing_held()
