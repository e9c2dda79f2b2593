"""One bad request is refused, or fails alone, whatever is in its fields."""

from __future__ import annotations

import itertools

import pytest

from tests.support.configs import engine_config
from tidekv import (
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    EngineConfig,
    InvalidConfig,
    InvalidRequest,
    KVLayout,
    NixlTransport,
)
from tidekv.backends.keys.namespaces import join_namespaces, split_namespace

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", "x" * 513),
        ("request_id", "two\nlines"),
        ("request_id", "\ud800"),
        ("request_id", 5),
        ("priority", "high"),
        ("priority", 1.5),
        ("priority", float("nan")),
        ("priority", 10**100),
        ("priority", True),
        ("namespace", None),
        ("namespace", 7),
        ("namespace", "\ud800"),
        ("namespace", "\0" + "1:ab"),
        ("max_new_tokens", 1.5),
        ("max_new_tokens", "many"),
        ("deadline_s", "soon"),
        ("deadline_s", float("nan")),
        ("deadline_s", 0),
        ("deadline_s", True),
        ("deadline_s", float("inf")),
        ("deadline_s", 10**400),
        ("deadline_s", "5"),
        ("send_prompt", 1),
        ("prefill", "a,a"),
        ("prefill", ["a", 5]),
        ("cache", "no"),
        ("prefill", None),
        ("prefill", 5),
        ("prefill", [""]),
    ],
)
def test_a_field_of_the_wrong_kind_is_refused_by_its_name(field: str, value: object) -> None:
    fields: dict[str, object] = {"request_id": "r", "tokens": [1], "prefill": "p"}
    with pytest.raises(InvalidRequest, match=field):
        DecodeRequest(**{**fields, field: value})


@pytest.mark.parametrize(
    "address", ["a" * 64 + ".example:1", "a..b:1", "x\0y:1", "\ud800:1", "nowhere", "localhost:port", "[::1:7", ":7"]
)
@pytest.mark.nixl
async def test_a_malformed_address_is_refused_by_the_call(address: str) -> None:
    transport = NixlTransport("decode-0", dials=["127.0.0.1:*"])
    async with DecodeEngine(EngineConfig(), device=DevicePool.allocate(LAYOUT, 8), transport=transport) as engine:
        for prefill in (address, ["127.0.0.1:7000", address], f"127.0.0.1:7000,{address}"):
            with pytest.raises(InvalidRequest, match="prefill"):
                await engine.restore(DecodeRequest(request_id="r", tokens=[1], prefill=prefill))
        assert engine.states() == {}
        assert (await engine.drain(5.0)).live == []


def test_names_of_engine_and_request_are_joined_so_that_none_can_be_forged() -> None:
    names = ["", "a", "ab", "b", "1:a", "1:a1:b", "2:ab", "1:ab"]
    joined = {join_namespaces(engine, request) for engine in names[1:] for request in names[1:] if engine != request}
    assert len(joined) == (len(names) - 1) * (len(names) - 2)
    assert joined.isdisjoint(names)
    assert [join_namespaces("a", ""), join_namespaces("", "a"), join_namespaces("", "")] == ["a", "a", ""]
    assert join_namespaces("a", "a") == "a", "a request that names the namespace of its engine is in it"
    adapted = {join_namespaces(*given) for given in itertools.product(names, names, names[1:])}
    assert adapted.isdisjoint(joined | set(names))
    assert len(adapted) == len({join_namespaces(*given) for given in itertools.product(names, names)}) * len(names[1:])


def test_joined_names_can_be_taken_apart() -> None:
    names = ["", "a", "1:a", "2:ab"]
    for engine, request, adapter in itertools.product(names, names, names):
        assert split_namespace(join_namespaces(engine, request, adapter)) == (request or engine, adapter)
    with pytest.raises(InvalidConfig, match="namespace"):
        engine_config(namespace="\0" + "1:ab")


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("cache", [True, False])
async def test_prompts_at_the_border_of_a_page(make_pair, count: int, cache: bool) -> None:
    async with make_pair() as pair:
        for turn in range(3):
            ready = await pair.restore(f"r{turn}", range(50, 50 + count), cache=cache)
            hit = count // 4 * 4 if cache and turn else 0
            assert ready.sources == {"l1": hit, "l2": 0, "l3": 0, "transfer": count - hit}
            assert len(ready.pages) == -(-count // 4)
            new = pair.engine.grow(ready, 1)
            assert len(new) == (count % 4 == 0)
            if turn == 1:
                retracted = await pair.engine.retract(ready, [1, 2])
                assert retracted.held_tokens == ((count + 1) // 4 * 4 if cache else 0)
                pair.engine.drop(retracted)
            else:
                await pair.engine.finish(ready, [1, 2] if turn else ())
        await pair.assert_nothing_held()
