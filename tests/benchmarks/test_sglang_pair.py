"""The harness of `python3 dev.py sglang` without SGLang: the client, the route, faults, options, tables.

With SGLang: tests/integrations/test_sglang_server.py.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import socket
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from benchmarks.servers.answers import HttpError
from benchmarks.servers.cluster import Figures
from benchmarks.servers.conversations import Load, Outcome, run_load
from benchmarks.servers.events import Event
from benchmarks.servers.model import ModelShape
from benchmarks.servers.program import ServerFailed
from benchmarks.sglang_pair import __main__ as program
from benchmarks.sglang_pair import storage as storage_module
from benchmarks.sglang_pair.client import Client, PrefillAndDecode
from benchmarks.sglang_pair.faults import FAULTS
from benchmarks.sglang_pair.host_copies import transfer_kv_all_layer_direct_lf_pf, transfer_kv_per_layer_direct_pf_lf
from benchmarks.sglang_pair.server import ROOT, ServerOptions
from benchmarks.sglang_pair.storage import PAUSED, StorageFolder, open_paused
from benchmarks.sglang_pair.table import faults_table, tiers_table
from benchmarks.sglang_pair.variants import ENTRY_POINTS, VARIANTS, Place
from tests.support.waits import expected as happens

OPTIONS = ServerOptions(model=Path("tiny"), tokens=4096)
LOAD = Load(conversations=3, turns=2, first=20, last=40, output=4, vocabulary=100)


class FakeSglang:
    """Answers `/generate` with a function of the prompt, as a stream or whole; keeps what it was asked."""

    def __init__(self, *, fails: int = 0, holds: bool = False) -> None:
        self.seen: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self._fails = fails
        self._holds = holds

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        self.seen.append(body)
        if not body.get("stream"):
            return JSONResponse({"output_ids": [], "meta_info": {}})
        return StreamingResponse(self._answer(body), media_type="text/event-stream")

    async def abort(self, request: Request) -> Response:
        self.aborted.append((await request.json())["rid"])
        return Response()

    async def _answer(self, body: dict[str, Any]) -> AsyncIterator[str]:
        if self._holds:
            self._holds = False
            await asyncio.sleep(5)  # Longer than the client waits, if it has sent this request before its abort.
        if self._fails:
            self._fails -= 1
            ending = {"type": "abort", "message": "Decode (room=7): no restore", "status_code": 500}
            yield _event([], ending)
            return
        tokens: list[int] = []
        for at in range(body["sampling_params"]["max_new_tokens"]):
            tokens.append((sum(body["input_ids"]) + at) % 100)
            yield _event(tokens)
        yield "data: [DONE]\n\n"


def _event(tokens: list[int], ending: dict[str, Any] | None = None) -> str:
    return f"data: {json.dumps({'output_ids': tokens, 'meta_info': {'finish_reason': ending}})}\n\n"


@asynccontextmanager
async def serving(fake: FakeSglang, *, is_up: bool = True) -> AsyncIterator[Any]:
    """Serve it on 127.0.0.1; yields what routes need of a server."""
    routes = [
        Route("/generate", fake.generate, methods=["POST"]),
        Route("/abort_request", fake.abort, methods=["POST"]),
    ]
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="error", lifespan="off", ws="none"))
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve(sockets=[bound]))
            try:
                serves = asyncio.Event()
                if is_up:
                    serves.set()
                port = bound.getsockname()[1]
                yield SimpleNamespace(url=f"http://127.0.0.1:{port}", serving=serves, bootstrap_port=port)
            finally:
                server.should_exit = True


@asynccontextmanager
async def client_of() -> AsyncIterator[Client]:
    client = Client(limit_s=60.0)
    try:
        yield client
    finally:
        await client.close()


async def test_prefill_and_decode_get_the_same_request_with_a_room_of_its_own() -> None:
    prefill, decode = FakeSglang(), FakeSglang()
    async with serving(prefill) as one, serving(decode) as other, client_of() as client:
        outcome = await run_load(LOAD, PrefillAndDecode(client, [one], [other]), expected=None)
    assert len(outcome.answers) == 6
    assert not outcome.http_errors
    rooms = {body["bootstrap_room"] for body in decode.seen}
    assert len(rooms) == 6
    assert {body["bootstrap_port"] for body in decode.seen} == {one.bootstrap_port}
    # Prefill may be asked a moment later than decode, and has answered before it in a real pair.
    by_room = {body["bootstrap_room"]: body for body in decode.seen}
    assert all(by_room[body["bootstrap_room"]]["input_ids"] == body["input_ids"] for body in prefill.seen)


async def test_another_prefill_takes_the_requests_of_one_that_is_down() -> None:
    async with (
        serving(FakeSglang(), is_up=False) as down,
        serving(FakeSglang()) as up,
        serving(decode := FakeSglang()) as other,
        client_of() as client,
    ):
        route = PrefillAndDecode(client, [down, up], [other])
        await run_load(LOAD, route, expected=None)
        assert down not in route.servers, "a retry would wait until it is up again"
    assert {body["bootstrap_port"] for body in decode.seen} == {up.bootstrap_port}


async def test_an_error_within_a_stream_counts_by_the_status_that_it_has_without_one() -> None:
    async with serving(FakeSglang()) as one, serving(FakeSglang(fails=2)) as other, client_of() as client:
        outcome = await run_load(LOAD, PrefillAndDecode(client, [one], [other]), expected=None)
    assert outcome.http_errors == {"500 no restore": 2}
    assert outcome.retries == 2
    assert len(outcome.answers) == 6


async def test_a_request_whose_connection_to_prefill_breaks_is_sent_once_more() -> None:
    seen: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        seen.append(await reader.readexactly(int(head.partition("content-length: ")[2].partition("\r")[0])))
        if len(seen) > 1:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, client_of() as client:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await client.prefill(url, [1, 2], count=1, request_id="r", room={"bootstrap_room": 7})
    assert len(seen) == 2
    assert seen[0] == seen[1]


async def test_a_refused_request_is_an_error_with_its_status() -> None:
    async with serving(FakeSglang(fails=1)) as one, client_of() as client:
        with pytest.raises(HttpError) as caught:
            await client.complete(one.url, [1, 2], count=1, request_id="r")
    assert caught.value.status == 500


async def test_both_servers_are_told_of_an_abort() -> None:
    prefill, decode = FakeSglang(), FakeSglang(holds=True)
    load = Load(conversations=1, turns=1, first=20, last=20, output=4, aborts=1.0, abort_s=0.3)
    async with happens("an answer"), serving(prefill) as one, serving(decode) as other, client_of() as client:
        outcome = await run_load(load, PrefillAndDecode(client, [one], [other]), expected=None)
    assert outcome.aborted == 1
    assert len(outcome.answers) == 1
    assert len(decode.aborted) == 1
    assert decode.aborted == prefill.aborted


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_configures_both_roles(name: str, tmp_path: Path) -> None:
    place = Place(StorageFolder(tmp_path / "storage"), 2048, 4096, 16, 2048, hangs=True)
    for role in ("prefill", "decode"):
        server = VARIANTS[name].server(role, 0, options=OPTIONS, folder=tmp_path, place=place)
        command = server.command()
        assert f"--disaggregation-mode={role}" in command
        assert ("benchmark_quiet" in server.plugins) == (not name.endswith("-as-is"))
        assert ("--disaggregation-decode-enable-radix-cache" in command) == (
            role == "decode" and name not in ("single", "none", "none-as-is")
        )
        assert server.environment()["SGLANG_PLUGINS"] == ",".join(server.plugins)
    found = (tmp_path / "plugins" / "tidekv_benchmark-1.dist-info" / "entry_points.txt").read_text()
    assert all(f"\n{plugin} = " in found for plugin in server.plugins)


def test_a_model_and_ranks_bring_what_a_machine_without_a_gpu_needs_for_them(tmp_path: Path) -> None:
    place = Place(StorageFolder(tmp_path / "storage"), 2048, 4096, 16, 2048)

    def server(**shape: int) -> Any:
        options = replace(OPTIONS, shape=ModelShape(for_sglang=True, **shape), ranks=2)
        return VARIANTS["tidekv"].server("decode", 0, options=options, folder=tmp_path, place=place)

    assert "benchmark_windows" in server(window=64).plugins
    assert "benchmark_latent" in server(latent=96).plugins
    assert server().environment()["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1
    assert not {"benchmark_windows", "benchmark_latent"} & set(server().plugins)


def test_the_plugin_of_tidekv_is_the_one_that_an_installation_has() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["sglang.srt.plugins"] == {"tidekv": ENTRY_POINTS["tidekv"]}


def test_the_backend_tidekv_gets_its_settings_at_both_ends(tmp_path: Path) -> None:
    place = Place(StorageFolder(tmp_path / "storage"), 2048, 4096, 16, 2048, prefills=["127.0.0.1:7", "127.0.0.1:8"])
    sides = {
        role: VARIANTS["tidekv"].server(role, 0, options=OPTIONS, folder=tmp_path, place=place)
        for role in ("prefill", "decode")
    }
    for server in sides.values():
        assert "tidekv" in server.plugins
        assert "--disaggregation-transfer-backend=tidekv" in server.command()
    settings = json.loads(sides["decode"].environment()["TIDEKV_SGLANG"])
    assert settings["host"] == int(1.2 * 4096 * 2048), "as much as HiCache gets"
    assert settings["prefills"] == ["127.0.0.1:7", "127.0.0.1:8"], "those that compute for one that is gone"
    assert settings["engine"]["metrics"]["listen"] == f"127.0.0.1:{sides['decode'].metrics_port}"
    assert sides["prefill"].metrics_port == 0


@pytest.mark.parametrize("name", FAULTS)
def test_the_events_of_a_fault_are_those_that_servers_know(name: str) -> None:
    fault = FAULTS[name]
    assert len(fault.parsed(10)) == len(fault.events)
    assert fault.events or fault.aborts
    assert all(event.turn < 2 for event in fault.parsed(2))


async def test_storage_hangs_while_its_marker_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        name = "engine"

        async def exists(self, keys: list[bytes], *, timeout_s: float) -> list[bool]:
            return [True] * len(keys)

    monkeypatch.setenv("TIDEKV_BENCHMARK_HANG", str(tmp_path / "hang"))
    monkeypatch.setattr(storage_module, "BUILT_IN", {"file": lambda **given: Engine()})
    paused = open_paused(authority="", path="x", options={})
    assert paused.name == "engine"
    assert await paused.exists([b"k"], timeout_s=1.0) == [True]
    monkeypatch.setattr(storage_module, "FREEZE_S", 0.3)
    hanging = asyncio.create_task(StorageFolder(tmp_path / "storage").act("hang"))
    async with happens("a hanging storage"):
        while not (tmp_path / "hang").exists():  # noqa: ASYNC110  # It is a file.
            await asyncio.sleep(0)
        assert await paused.exists([b"k"], timeout_s=1.0) == [True]
    await hanging
    assert not (tmp_path / "hang").exists()


def test_bytes_of_each_stored_page_are_damaged(tmp_path: Path) -> None:
    folder = StorageFolder(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.seg").write_bytes(bytes(40_000))
    (tmp_path / "page.bin").write_bytes(bytes(10))
    (tmp_path / "index").write_bytes(bytes(10))
    assert folder.damage() == 4
    assert (tmp_path / "page.bin").read_bytes() != bytes(10)
    assert (tmp_path / "index").read_bytes() == bytes(10)


def test_a_place_names_the_storage_of_tidekv(tmp_path: Path) -> None:
    place = Place(StorageFolder(tmp_path), 1, 1, 16, 1)
    assert place.uri == f"file:{tmp_path}?capacity=400MB"
    assert Place(StorageFolder(tmp_path), 1, 1, 16, 1, hangs=True).uri.startswith(f"{PAUSED}:")


def test_pages_that_are_copied_to_the_host_come_back_as_they_were() -> None:
    tokens, pages, size, layers = 64, 5, 8, 3
    device = [torch.randn(tokens, 2, 4) for _ in range(2 * layers)]
    host = [torch.zeros(pages, layers, size, 2, 4) for _ in range(2)]
    ours = torch.cat([torch.arange(8, 16), torch.arange(40, 48)])
    theirs = torch.cat([torch.arange(32, 40), torch.arange(0, 8)])
    transfer_kv_all_layer_direct_lf_pf(
        src_ptrs=device, dst_ptrs=host, src_indices=ours, dst_indices=theirs, page_size=size
    )
    assert not any(k_or_v[1:4].any() for k_or_v in host), "pages that were not named are as they were"
    for layer in range(layers):
        back = [torch.zeros(tokens, 2, 4) for _ in range(2)]
        transfer_kv_per_layer_direct_pf_lf(
            src_ptrs=host, dst_ptrs=back, src_indices=theirs, dst_indices=ours, layer_id=layer, page_size=size
        )
        for number, given in enumerate(back):
            source = device[number * layers + layer]
            assert torch.equal(given[ours], source[ours])
            assert not given[16:40].any()


def test_the_stand_in_has_every_kernel_and_none_that_works() -> None:
    script = (
        "import sgl_kernel, importlib.util\n"
        "from sgl_kernel.any.depth import some_kernel\n"
        "assert importlib.util.find_spec('sgl_kernel.scalar_type') is None\n"
        "assert not hasattr(sgl_kernel, '__path_of_nothing__')\n"
        "for kernel in (some_kernel, sgl_kernel.other):\n"
        "    try: kernel(1, x=2)\n"
        "    except NotImplementedError as error: print(error)\n"
    )
    path = Path(importlib.import_module("benchmarks.sglang_pair.stand_ins").__file__ or "").parent
    done = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": str(path)}, capture_output=True, text=True, check=True
    )
    assert [line.split(" ")[0] for line in done.stdout.splitlines()] == [
        "sgl_kernel.any.depth.some_kernel",
        "sgl_kernel.other",
    ]


def test_tables_have_tiers_by_turn_and_outcomes_by_fault() -> None:
    radix, store = VARIANTS["radix"], VARIANTS["store"]
    tiers = tiers_table(LOAD, [(radix, {20: [2, 32, 0, 0]}), (store, {40: [4, 0, 64, 16]})])
    assert [list(column.cells) for column in tiers.columns[2:]] == [["16 + 0 + 0", "-"], ["-", "0 + 16 + 4"]]
    outcome = Outcome(answers={(0, 0): (1,), (0, 1): (2,)}, wrong=[(0, 1)], http_errors={"500 x": 3})
    figures = Figures(radix, outcome, {}, {}, held={"decode-0": 0.25, "prefill-0": 0.0})
    table = faults_table({"damage": {"radix": figures}}, [radix, store])
    assert [list(column.cells) for column in table.columns] == [
        ["damage"],
        ["1 right, 1 wrong, 3 HTTP errors, decode-0 holds 25.0%"],
        ["-"],
    ]


def test_a_run_of_faults_that_is_cut_keeps_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    class Servers:
        served = 0

        async def warm_up(self) -> None: ...

        async def serve(self, load: Load, *, expected: object, **more: object) -> Figures:
            Servers.served += 1
            seeds.append(load.seed)
            if Servers.served == 4:  # Two of the single server, and that of the first fault.
                raise ServerFailed("decode-0 ended")
            return Figures(VARIANTS["radix"], Outcome(answers={(0, 0): (1,)}), {}, {}, held={"decode-0": 0.0})

    @asynccontextmanager
    async def running(*given: object, **more: object) -> AsyncIterator[Servers]:
        yield Servers()

    monkeypatch.setattr(program, "running", running)
    monkeypatch.setattr(program, "make_model", lambda *given: tmp_path)
    monkeypatch.setattr(program, "BUILD", tmp_path)
    file = tmp_path / "figures.json"
    with pytest.raises(ServerFailed):
        program.faults(
            cache=["radix"],
            fault=["flush", "aborts"],
            conversations=1,
            turns=3,
            tokens="20:40",
            parallel=1,
            seed=1,
            json_file=file,
        )
    kept = json.loads(file.read_text())
    assert [(one["fault"], one["answers"]) for one in kept["figures"]] == [("flush", 1)]
    assert kept["figures"][0]["what"] == FAULTS["flush"].text
    assert kept["about"]["command"]
    assert seeds[:2] == [1 + list(FAULTS).index(name) for name in ("flush", "aborts")], "as in a run of all faults"


def test_bytes_from_prefill_are_those_that_prefill_counts() -> None:
    counted = {"sglang:kv_transfer_total_mb_sum": 2.0}
    assert VARIANTS["radix"].bytes_from_prefill({}, counted) == 2 << 20
    assert VARIANTS["single"].bytes_from_prefill({}, counted) is None
    assert Event.parse("1:fill:storage", {"storage": storage_module.ACTIONS}).action == "fill"


async def test_answers_that_a_folder_has_are_not_served_again(tmp_path: Path) -> None:
    served: list[int] = []

    class Reference:
        async def serve(self, load: Load, *, expected: object) -> Figures:
            served.append(load.seed)
            return Figures(VARIANTS["single"], Outcome(answers={(0, 0): (load.seed,)}), {}, {})

    @asynccontextmanager
    async def start() -> AsyncIterator[Any]:
        yield Reference()

    flush, kill = LOAD, replace(LOAD, seed=LOAD.seed + 1, aborts=0.2)
    folder = tmp_path / "answers"
    first = await program._right_answers({"flush": flush}, folder, start=start)
    both = await program._right_answers({"flush": flush, "kill": kill}, folder, start=start)
    assert both == await program._right_answers({"flush": flush, "kill": kill}, folder, start=start)
    assert both == {**first, "kill": {(0, 0): (kill.seed,)}}
    assert served == [flush.seed, kill.seed]
