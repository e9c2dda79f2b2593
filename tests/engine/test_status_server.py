"""What routers and orchestrators ask of an engine over HTTP."""

from __future__ import annotations

import asyncio
import http.client
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import engine_config
from tests.support.inside import core_of, runtime_of
from tests.support.kv_hints import envelope
from tests.support.loopback_pair import PAGE, loopback_pair
from tests.support.waits import LIMIT_S
from tidekv.backends.keys.chain import page_digests
from tidekv.backends.storage.uri import open_storage
from tidekv.engine.kv_events.load_publisher import LoadStat
from tidekv.engine.kv_events.messages import hash_of
from tidekv.states.errors import InvalidConfig


def call(
    address: str | None, method: str, path: str, body: object = None, token: str = "", origin: str = ""
) -> tuple[int, Any]:
    """One request; returns the status and the answer, decoded if it is JSON."""
    assert address is not None
    connection = http.client.HTTPConnection(address, timeout=60)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    headers |= {"Origin": origin} if origin else {}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    raw = answer.read()
    connection.close()
    return answer.status, json.loads(raw) if answer.headers["content-type"] == "application/json" else raw.decode()


async def ask(*arguments: Any, **options: Any) -> tuple[int, Any]:
    """`call`, while the engine's loop goes on."""
    return await asyncio.to_thread(call, *arguments, **options)


async def test_an_engine_is_ready_until_it_drains_and_healthy_until_it_ends() -> None:
    async with loopback_pair(engine_config(status_listen="127.0.0.1:0")) as pair:
        address = pair.engine.status_address
        assert await ask(address, "GET", "/health") == (200, {"status": "ok"})
        assert await ask(address, "GET", "/ready") == (200, {"status": "ok"})
        await pair.engine.drain(0)
        assert (await ask(address, "GET", "/ready"))[0] == 503
        assert (await ask(address, "GET", "/health"))[0] == 200
        assert (await ask(address, "POST", "/health"))[0] == 405
        assert (await ask(address, "GET", "/other"))[0] == 404


async def test_the_load_counts_requests_pages_and_tokens_and_has_the_names_of_vllm_too() -> None:
    config = engine_config(status_listen="127.0.0.1:0", model="m")
    async with loopback_pair(config, device_pages=8, host_pages=16) as pair:
        address = pair.engine.status_address
        held = await pair.ready(range(5 * PAGE), lora_name="sql")
        waiting = asyncio.create_task(pair.ready(range(1000, 1000 + 6 * PAGE)))
        async with asyncio.timeout(LIMIT_S):
            while (load := (await ask(address, "GET", "/load"))[1])["requests_waiting"] < 1:
                pass
        assert load["requests_running"] == 1
        # One more page is the reserve of the answer.
        assert load["device"] == {"total": 8, "free": 2, "evictable": 0}
        assert (load["tokens_used"], load["tokens_max"], load["usage"]) == (6 * PAGE, 8 * PAGE, 6 / 8)
        assert (load["tokens_waiting"], load["tokens_waiting_uncached"]) == (6 * PAGE, 6 * PAGE)
        _, text = await ask(address, "GET", "/metrics")
        for line in (
            'vllm:num_requests_running{model_name="m"} 1.0',
            'vllm:num_requests_waiting{model_name="m"} 1.0',
            'vllm:kv_cache_usage_perc{model_name="m"} 0.75',
            f'vllm:cache_config_info{{block_size="{PAGE}",num_gpu_blocks="8"}} 1.0',
            'vllm:lora_requests_info{running_lora_adapters="sql",waiting_lora_adapters=""} 1.0',
        ):
            assert line in text.splitlines()
        await pair.engine.finish(held)
        await pair.engine.finish(await waiting)


async def test_a_hundred_prompts_are_probed_at_once_and_answered_as_probe_prefix_does() -> None:
    async with loopback_pair(engine_config(status_listen="127.0.0.1:0")) as pair:
        address = pair.engine.status_address
        await pair.serve(range(4 * PAGE), namespace="tenant", lora_name="sql")
        await pair.serve(range(3 * PAGE))
        await pair.engine.flush(("l1",))
        await pair.serve(range(2 * PAGE))
        prompts = [list(range(PAGE * (number % 6))) or [7] for number in range(100)]
        for names in ({}, {"namespace": "tenant", "lora_name": "sql"}, {"namespace": "tenant"}):
            status, found = await ask(address, "POST", "/probe", {"prompts": prompts, **names})
            assert status == 200
            assert found == [pair.engine.probe_prefix(prompt, **names) for prompt in prompts]
        assert {"l1": 2 * PAGE, "l2": PAGE} in (await ask(address, "POST", "/probe", {"prompts": prompts}))[1]


async def test_prompts_are_probed_by_the_hashes_of_their_pages_too() -> None:
    pytest.importorskip("zmq")
    config = engine_config(status_listen="127.0.0.1:0", kv_events_endpoint="tcp://127.0.0.1:*")
    async with loopback_pair(config) as pair:
        await pair.serve(range(4 * PAGE), namespace="tenant")
        packed = b"".join(token.to_bytes(4, "little") for token in range(4 * PAGE))
        hashes = [hash_of(digest) for digest in page_digests(packed, PAGE, namespace="tenant")]
        asked = {"block_hashes": [hashes, hashes[:2], [7], []]}
        status, found = await ask(pair.engine.status_address, "POST", "/probe", asked)
        assert status == 200
        assert [each["l1"] for each in found] == [4 * PAGE, 2 * PAGE, 0, 0]
        assert (await ask(pair.engine.status_address, "POST", "/look_up", asked))[0] == 400
        both = {"prompts": [[1]], "block_hashes": [[1]]}
        assert (await ask(pair.engine.status_address, "POST", "/probe", both))[0] == 400


async def test_a_prompt_is_looked_up_in_every_tier_with_what_prefill_would_send(tmp_path: Path) -> None:
    config = engine_config(status_listen="127.0.0.1:0")
    storage = open_storage(f"file:{tmp_path}?capacity=64MB")
    async with loopback_pair(config, storage=storage) as pair:
        await pair.serve(range(4 * PAGE))
        await pair.engine.flush()
        prompt = list(range(4 * PAGE)) + [900] * PAGE
        asked = {"prompts": [prompt], "timeout_s": 1.0}
        status, (found,) = await ask(pair.engine.status_address, "POST", "/look_up", asked)
        assert status == 200
        assert (found["l1"], found["l2"], found["l3"], found["transfer"]) == (0, 0, 4 * PAGE, PAGE)
        assert "ready_s" in found


async def test_hints_are_acted_on_and_answered_as_hint_does() -> None:
    prompt = list(range(3 * PAGE))
    async with loopback_pair(engine_config(status_listen="127.0.0.1:0")) as pair:
        address = pair.engine.status_address
        await pair.serve(prompt)
        status, outcomes = await ask(address, "POST", "/hints", envelope("kv.pin", token_ids=prompt, ttl_ms=60_000))
        assert status == 200
        assert outcomes == [{"action_id": "a", "outcome": "accepted", "tokens": 3 * PAGE, "cause": ""}]
        assert core_of(pair.engine).hints.pinned_pages == 3
        for body, word in (({"actions": []}, "no envelope"), ([], "no envelope"), (envelope("kv.pin"), None)):
            status, answer = await ask(address, "POST", "/hints", body)
            assert (status, word is None) in ((400, False), (200, True))
            assert word in answer if word else answer[0]["outcome"] == "rejected"
        assert (await ask(address, "GET", "/hints"))[0] == 405


async def test_a_page_in_a_browser_gives_no_hints() -> None:
    prompt = list(range(3 * PAGE))
    async with loopback_pair(engine_config(status_listen="127.0.0.1:0")) as pair:
        await pair.serve(prompt)
        pinned = envelope("kv.pin", token_ids=prompt, ttl_ms=60_000)
        for path, body in (("/hints", pinned), ("/probe", {"prompts": [prompt]})):
            asked = await ask(pair.engine.status_address, "POST", path, body, origin="http://example.org")
            assert asked[0] == 403
        assert core_of(pair.engine).hints.pinned_pages == 0


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b'{"prompts": [[-1]]}', b'{"prompts": [[]]}', b'{"prompts": 3}', b'{"prompts": [], "other": 1}'],
)
async def test_a_malformed_question_changes_nothing_and_is_named(body: bytes) -> None:
    def post() -> tuple[int, str]:
        connection = http.client.HTTPConnection(address, timeout=60)
        connection.request("POST", "/probe", body)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    async with loopback_pair(engine_config(status_listen="127.0.0.1:0")) as pair:
        address = pair.engine.status_address
        assert address is not None
        status, text = await asyncio.to_thread(post)
        assert status == 400 and text.strip()


async def test_with_a_token_only_its_holders_are_answered(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    config = engine_config(status_listen="127.0.0.1:0", token_file=str(tmp_path / "token"))
    async with loopback_pair(config) as pair:
        address = pair.engine.status_address
        for token, status in (("", 401), ("other", 401), ("secret", 200)):
            assert (await ask(address, "GET", "/load", token=token))[0] == status
            assert (await ask(address, "POST", "/probe", {"prompts": [[1]]}, token=token))[0] == status
            assert (await ask(address, "POST", "/hints", envelope("kv.pin", token_ids=[1], ttl_ms=1), token=token))[
                0
            ] == status
            assert (await ask(address, "GET", "/ready", token=token))[0] == 200


@pytest.mark.parametrize(
    ("start", "status"),
    [
        ("POST /probe", 401),
        ("POST /look_up", 401),
        ("POST /hints", 401),
        ("POST /health", 401),
        ("GET /ready", 413),
    ],
)
async def test_no_body_is_read_without_the_token(tmp_path: Path, start: str, status: int) -> None:
    (tmp_path / "token").write_text("secret\n")
    config = engine_config(status_listen="127.0.0.1:0", token_file=str(tmp_path / "token"))
    async with loopback_pair(config) as pair:
        host, _, port = str(pair.engine.status_address).rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        # The body never comes: only an answer before it ends this.
        writer.write(f"{start} HTTP/1.1\r\nContent-Length: 30000000\r\n\r\n".encode())
        assert (await reader.readline()).startswith(f"HTTP/1.1 {status} ".encode())
        writer.close()


def test_the_network_is_served_with_a_token_or_by_permission_only() -> None:
    for listen in ("0.0.0.0:8000", "[::]:8000", "decode-0:8000"):
        with pytest.raises(InvalidConfig, match=r"status\.token_file"):
            engine_config(status_listen=listen)
        engine_config(status_listen=listen, token_file="somewhere")
        engine_config(status_listen=listen, status_allow_network=True)
    engine_config(status_listen="localhost:8000")


@pytest.mark.parametrize(("written", "words"), [(None, "cannot be read"), ("", "has 0 bytes")])
async def test_a_token_file_that_is_none_stops_the_start(tmp_path: Path, written: str | None, words: str) -> None:
    if written is not None:
        (tmp_path / "token").write_text(written)
    config = engine_config(status_listen="127.0.0.1:0", token_file=str(tmp_path / "token"))
    with pytest.raises(InvalidConfig, match=words):
        async with loopback_pair(config):
            raise AssertionError("it has started")


async def test_the_load_message_has_sglangs_frames_and_is_repeated_while_nothing_changes() -> None:
    msgspec = pytest.importorskip("msgspec")
    zmq = pytest.importorskip("zmq")
    zmq_asyncio = pytest.importorskip("zmq.asyncio")
    config = engine_config(kv_events_load="tcp://127.0.0.1:*", kv_events_data_parallel_rank=2)
    async with loopback_pair(config, device_pages=8) as pair:
        publisher = runtime_of(pair.engine).load
        assert publisher is not None
        context = zmq_asyncio.Context()
        sub = context.socket(zmq.SUB)
        sub.linger = 0
        sub.subscribe(b"")
        sub.connect(publisher.address)
        async with asyncio.timeout(LIMIT_S):
            first, second = await sub.recv_multipart(), await sub.recv_multipart()
            assert first[0] == b"load"
            assert int.from_bytes(second[1], "big") == int.from_bytes(first[1], "big") + 1
            assert msgspec.msgpack.decode(first[2]) == ["LoadStat", 0, 0, 0, 8 * PAGE, 2, 0, 0, 0, 0, 0]
            held = await pair.ready(range(PAGE))
            while msgspec.msgpack.decode((await sub.recv_multipart())[2], type=LoadStat).num_running_reqs != 1:
                pass
            await pair.engine.finish(held)
        sub.close()
        context.term()
    with pytest.raises(InvalidConfig, match="load messages would be served"):
        async with loopback_pair(engine_config(kv_events_load="tcp://0.0.0.0:5999")):
            raise AssertionError("it has started")
