"""The harness of `python3 dev.py vllm` without vLLM: prompts, the route through a pair, retries, aborts, metrics.

With vLLM: tests/integrations/test_vllm_server.py.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import typer
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route as Path_

from benchmarks.ports import _never_given, free_port
from benchmarks.servers import comparison, model_server, routes
from benchmarks.servers.answers import Answer, RequestLost
from benchmarks.servers.cluster import Figures
from benchmarks.servers.conversations import Load, Outcome, read_answers, run_load, write_answers
from benchmarks.servers.events import STRIKES, WHEN, Event
from benchmarks.servers.program import Program, ServerFailed
from benchmarks.servers.redis_server import RedisServer
from benchmarks.servers.routes import OneServer
from benchmarks.servers.samples import add_samples, read_samples
from benchmarks.servers.table import progress_line
from benchmarks.vllm_pair.client import Client
from benchmarks.vllm_pair.overhead import Cost, median_interval, overhead_table, read_pairs
from benchmarks.vllm_pair.placement import Listener, PlacingRouter
from benchmarks.vllm_pair.rest import ASKED, WAYS, Stream, Turns, meeting, rest_table
from benchmarks.vllm_pair.routes import PrefillReadsDecode, PrefillThenDecode
from benchmarks.vllm_pair.server import ServerOptions
from benchmarks.vllm_pair.variants import STEP_TIMES, TOGGLED, VARIANTS
from tests.support.waits import expected as happens
from tests.support.waits import until
from tidekv.states.errors import InvalidConfig

OPTIONS = ServerOptions(model=Path("tiny"), kv_bytes=1 << 20, max_model_len=512, ranks=2)
LOAD = Load(conversations=3, turns=3, first=20, last=60, output=4, vocabulary=100)


class FakeVllm:
    """Answers completions with a function of the prompt, as a stream or with `kv_transfer_params`."""

    def __init__(self, *, refuses: int = 0, wrong_from: int | None = None, holds: bool = False) -> None:
        self.seen: list[dict[str, Any]] = []
        self.left = 0
        self._refuses = refuses
        self._wrong_from = wrong_from
        self._holds = holds

    async def completions(self, request: Request) -> JSONResponse | StreamingResponse:
        body = await request.json()
        self.seen.append(body)
        if self._refuses:
            self._refuses -= 1
            return JSONResponse({"error": "starting"}, status_code=503)
        if not body.get("stream"):
            return JSONResponse(
                {"choices": [], "kv_transfer_params": {"remote_engine_id": "p", "room": len(self.seen)}}
            )
        return StreamingResponse(self._answer(body), media_type="text/event-stream")

    async def _answer(self, body: dict[str, Any]) -> AsyncIterator[str]:
        try:
            if self._holds:
                self._holds = False
                await asyncio.sleep(5)  # Longer than the client waits, if it has sent this request before its abort.
            for at in range(body["max_tokens"]):
                is_wrong = self._wrong_from is not None and len(body["prompt"]) >= self._wrong_from
                token = (sum(body["prompt"]) + at + is_wrong) % 100
                yield f"data: {json.dumps({'choices': [{'token_ids': [token]}]})}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            self.left += 1


@asynccontextmanager
async def serving(fake: FakeVllm) -> AsyncIterator[Any]:
    """Serve it on 127.0.0.1; yields what routes need of a server."""
    app = Starlette(routes=[Path_("/v1/completions", fake.completions, methods=["POST"])])
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", ws="none"))
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve(sockets=[bound]))
            try:
                serves = asyncio.Event()
                serves.set()
                yield SimpleNamespace(url=f"http://127.0.0.1:{bound.getsockname()[1]}", serving=serves)
            finally:
                server.should_exit = True


@asynccontextmanager
async def client_of() -> AsyncIterator[Client]:
    client = Client(limit_s=60.0)
    try:
        yield client
    finally:
        await client.close()


def test_prompts_grow_and_continue_with_the_answers() -> None:
    answers = {(conversation, turn): (7, 8, 9, turn) for conversation in range(3) for turn in range(3)}
    prompts = [LOAD.prompt(1, turn, answers) for turn in range(3)]
    assert [len(prompt) for prompt in prompts] == [20, 40, 60]
    assert prompts[1][:20] == prompts[0]
    assert prompts[1][20:24] == [7, 8, 9, 0]
    assert prompts[2][:40] == prompts[1]
    assert LOAD.prompt(2, 0, answers) != prompts[0]
    assert LOAD.prompt(1, 2, answers) == prompts[2]


async def test_decode_gets_what_prefill_returned() -> None:
    prefill, decode = FakeVllm(), FakeVllm()
    so_far: list[int] = []

    async def after_turn(outcome: Outcome) -> None:
        so_far.append(len(outcome.answers))

    async with serving(prefill) as one, serving(decode) as other, client_of() as client:
        outcome = await run_load(LOAD, PrefillThenDecode(client, [one], [other]), expected=None, after_turn=after_turn)
        again = await run_load(LOAD, OneServer(client, other), expected=outcome.answers)
    assert len(outcome.answers) == 9
    assert so_far == [3, 6, 9]
    assert not outcome.lost
    assert not again.wrong
    assert all(body["max_tokens"] == 1 for body in prefill.seen)
    assert all(body["kv_transfer_params"]["do_remote_decode"] for body in prefill.seen)
    rooms = [body["kv_transfer_params"]["room"] for body in decode.seen[:9]]
    assert rooms == list(range(1, 10))
    assert {turn: len(times) for turn, times in outcome.first_s.items()} == {0: 3, 1: 3, 2: 3}


async def test_later_turns_tell_prefill_what_decode_has_of_the_conversation() -> None:
    prefill, decode = FakeVllm(), FakeVllm()
    async with serving(prefill) as one, serving(decode) as other, client_of() as client:
        other.peer_address = "127.0.0.1:7100"
        await run_load(LOAD, PrefillReadsDecode(client, [one], [other]), expected=None)
    told = [body["kv_transfer_params"].get("remote_kv_source") for body in prefill.seen]
    assert told[:3] == 3 * [None]
    # All of the turn before but the last token of its answer.
    answered = [len(body["prompt"]) + body["max_tokens"] - 1 for body in decode.seen]
    assert sorted(source["tokens"] for source in told[3:]) == sorted(answered[:6])
    assert all((source["remote_host"], source["remote_port"]) == ("127.0.0.1", 7100) for source in told[3:])


async def test_a_wrong_token_is_found_and_does_not_change_later_prompts() -> None:
    async with serving(FakeVllm()) as good, serving(FakeVllm(wrong_from=40)) as bad, client_of() as client:
        reference = await run_load(LOAD, OneServer(client, good), expected=None)
        outcome = await run_load(LOAD, OneServer(client, bad), expected=reference.answers)
    assert sorted(outcome.wrong) == [(conversation, turn) for conversation in range(3) for turn in (1, 2)]


async def test_a_refused_request_is_sent_again_under_another_name() -> None:
    fake = FakeVllm(refuses=1)
    async with serving(fake) as server, client_of() as client:
        outcome = await run_load(LOAD, OneServer(client, server), expected=None)
    assert outcome.retries == 1
    assert [text.partition(" ")[0] for text in outcome.http_errors] == ["503"]
    assert len(outcome.answers) == 9
    assert len(outcome.first_s[0]) == 2, "a request that was sent again has no time to its first token"


async def test_a_request_waits_for_a_killed_server_however_long_it_takes_to_return(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Killed:
        """A route whose server is away; it returns when the first request has been lost."""

        def __init__(self) -> None:
            self.server = Ends("one", Path())
            self.servers = (self.server,)

        async def complete(self, prompt: list[int], *, count: int, conversation: int, name: str) -> Answer:
            if self.server.serving.is_set():
                return Answer((1,), 0.1, 0.2)
            asyncio.get_running_loop().call_later(0.05, self.server.serving.set)
            raise RequestLost("no connection")

    monkeypatch.setattr(routes, "RETRIES_S", 0.0)
    monkeypatch.setattr(routes, "RETRY_S", 0.0)
    async with happens("an answer"):
        answer, retries = await routes.complete_with_retries(Killed(), [1], count=1, conversation=0, name="r")
    assert answer.tokens == (1,)
    assert retries == 1


async def test_an_abort_closes_the_connection_and_the_request_follows_again() -> None:
    fake = FakeVllm(holds=True)
    load = Load(conversations=1, turns=1, first=20, last=20, output=4, aborts=1.0, abort_s=0.3)
    async with happens("an answer"), serving(fake) as server, client_of() as client:
        outcome = await run_load(load, OneServer(client, server), expected=None)
    assert outcome.aborted == 1
    assert len(outcome.answers) == 1


async def test_loads_that_alternate_serve_a_turn_each() -> None:
    served: list[tuple[str, int]] = []

    class Noted(OneServer):
        async def complete(self, prompt: list[int], *, count: int, conversation: int, name: str) -> Answer:
            served.append((str(self.server), len(prompt)))
            await asyncio.sleep(0)
            return Answer((1,) * count, 0.1, 0.2)

    alternation = asyncio.Lock()
    one, other = (Noted(cast(Client, None), cast(Program, name)) for name in ("one", "other"))
    async with asyncio.TaskGroup() as group:
        for route in (one, other):
            group.create_task(run_load(LOAD, route, expected=None, alternation=alternation))
    turns = [(name, tokens) for tokens in (20, 40, 60) for name in ("one", "other") for _ in range(3)]
    assert served == turns


def test_answers_are_read_again_for_the_same_prompts_only(tmp_path: Path) -> None:
    file = tmp_path / "answers"
    assert read_answers(file, LOAD, model="tiny") is None
    answers = {(0, 0): (1, 2), (0, 1): (3, 4)}
    write_answers(file, LOAD, answers, model="tiny")
    assert read_answers(file, replace(LOAD, aborts=0.3, parallel=4), model="tiny") == answers
    with pytest.raises(InvalidConfig, match="name another file"):
        read_answers(file, replace(LOAD, seed=2), model="tiny")


def test_samples_are_summed_by_name_and_by_source() -> None:
    page = '# HELP a b\na_total{engine="0",source="x"} 2.0\na_total{engine="0",source="y"} 3.0\nb 1e3\n'
    assert read_samples(page) == {"a_total": 5.0, "a_total{x}": 2.0, "a_total{y}": 3.0, "b": 1000.0}
    assert add_samples({"a": 1.0}, {"a": 2.0, "b": 3.0}) == {"a": 3.0, "b": 3.0}


def test_events_are_parsed_and_wrong_ones_refused() -> None:
    servers = {"prefill-0": WHEN, "decode-0": WHEN, "storage": STRIKES}
    assert Event.parse("5:kill:decode-0", servers) == Event(5, "kill", "decode-0")
    assert Event.parse("5:freeze:storage", servers) == Event(5, "freeze", "storage")
    for wrong in ("kill:decode-0", "5:burn:decode-0", "5:kill:", "x:kill:decode-0"):
        with pytest.raises(InvalidConfig, match="TURN:ACTION:SERVER"):
            Event.parse(wrong, servers)
    with pytest.raises(InvalidConfig, match="no server 'decode-1'; there are decode-0, prefill-0, storage"):
        Event.parse("5:kill:decode-1", servers)
    with pytest.raises(InvalidConfig, match="storage knows kill, freeze, not reset"):
        Event.parse("5:reset:storage", servers)


def test_a_line_of_progress_has_answers_time_and_bytes_so_far() -> None:
    outcome = Outcome({(0, 0): (1,), (0, 1): (2,)}, {0: [0.1], 1: [0.2, 0.4]}, wrong=[(0, 1)], seconds=7.4)
    metrics = {"vllm:tidekv_restore_bytes_transfer_total": 3.0 * (1 << 20)}
    assert progress_line(Figures(VARIANTS["tidekv"], outcome, metrics, {})) == (
        "tidekv: 2 answers (1 wrong, 0 lost) in 7 s, turn 1: 300 / 400 ms to the first token, 3.0 MiB from prefill"
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_configures_vllm_for_both_roles(name: str, tmp_path: Path) -> None:
    for role in ("prefill", "decode"):
        server = VARIANTS[name].server(role, 0, options=OPTIONS, folder=tmp_path, storage="redis://127.0.0.1:7000")
        if server.transfer is not None:
            assert server.transfer["kv_load_failure_policy"] == "recompute"
            assert json.dumps(server.transfer) in server.command()
        assert "--tensor-parallel-size=2" in server.command()


def test_ranks_of_prefill_listen_at_ports_in_a_row(tmp_path: Path) -> None:
    server = VARIANTS["tidekv"].server("prefill", 0, options=OPTIONS, folder=tmp_path, storage="")
    first, second = (int(address.rpartition(":")[2]) for address in server.handover_address.split(","))
    assert second == first + 1


def test_ports_of_servers_are_none_that_the_kernel_gives_away_and_none_is_returned_twice() -> None:
    # A port for outgoing connections may be taken before its server binds it, minutes later or again after a kill.
    lowest, highest = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    firsts = [free_port(3) for _ in range(300)]
    ports = [first + at for first in firsts for at in range(3)]
    assert len(set(ports)) == 900
    if highest - lowest < 60_000:
        assert not any(lowest <= first <= highest for first in firsts)


def test_two_processes_do_not_choose_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "from benchmarks.ports import free_port; print(free_port(), flush=True); input()"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = int(other.stdout.readline())
        offered, choice = [theirs], random.choice
        monkeypatch.setattr(random, "choice", lambda among: offered.pop() if offered else choice(among))
        assert free_port() != theirs
        assert not offered
        other.communicate("\n")


def test_a_port_that_is_taken_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        taken = holder.getsockname()[1]
        offered, choice = [taken, taken - 1], random.choice
        monkeypatch.setattr(random, "choice", lambda among: offered.pop() if offered else choice(among))
        first = free_port(2)
    assert not offered
    assert first not in (taken, taken - 1), "a row of ports has the one that is taken"


def test_ranges_of_ports_outside_those_for_connections_are_found(tmp_path: Path) -> None:
    setting = tmp_path / "range"
    for given, outside in (("32768 60999", range(1024, 32768)), ("1024\t20000", range(20001, 65536))):
        setting.write_text(given + "\n")
        assert _never_given(setting) == outside
    setting.write_text("1024 65535")
    assert _never_given(setting) == range(1024, 65536), "there is none outside"


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="there is no redis-server here")
async def test_storage_is_killed_frozen_and_returns_empty(tmp_path: Path) -> None:
    redis = RedisServer("storage", tmp_path)
    try:
        redis.start()
        await redis.wait_ready(60.0)
        group = redis.group
        redis.signal(signal.SIGSTOP)
        assert not await redis.is_ready()
        redis.signal(signal.SIGCONT)
        assert await redis.is_ready()
        await redis.kill()
        assert not await redis.is_ready()
        redis.start()
        await redis.wait_ready(60.0)
        assert redis.group not in (None, group)
    finally:
        await redis.end()
    assert redis.group is None
    assert not await redis.is_ready()


def test_the_interval_of_a_median_holds_it_in_nineteen_of_twenty_cases() -> None:
    assert median_interval([1.0, 2.0, 3.0]) == (1.0, 3.0)
    chance = random.Random(1)
    held = 0
    for _ in range(1000):
        lowest, highest = median_interval(sorted(chance.expovariate(1.0) for _ in range(30)))
        held += lowest <= math.log(2) <= highest
    assert 940 <= held <= 990


def test_a_listener_knows_the_blocks_of_each_medium() -> None:
    listener = Listener("inproc://no-publisher")

    def tell(*events: dict[str, Any]) -> tuple[int, set[str]]:
        listener.take(msgspec.msgpack.encode([0.0, list(events), 0]))
        return listener.blocks, listener.media

    def stored(medium: str, *hashes: int) -> dict[str, Any]:
        return {"type": "BlockStored", "medium": medium, "block_hashes": hashes}

    assert tell(stored("GPU", 1, 2), stored("CPU", 2, 3)) == (3, {"GPU", "CPU"})
    assert tell({"type": "BlockRemoved", "medium": "CPU", "block_hashes": [2, 3, 9]}) == (2, {"GPU"})
    assert tell({"type": "AllBlocksCleared"}, stored("STORAGE", 4)) == (1, {"STORAGE"})
    assert tell({"type": "BlockRemoved", "medium": "CPU", "block_hashes": [4]}) == (1, {"STORAGE"})
    listener.close()


def test_a_router_that_places_is_told_where_each_server_publishes(tmp_path: Path) -> None:
    servers = [SimpleNamespace(url=f"http://127.0.0.1:{number}") for number in (1, 2)]
    sources = [("tcp://127.0.0.1:3", "tcp://127.0.0.1:4"), ("tcp://127.0.0.1:5", "tcp://127.0.0.1:6")]
    command = PlacingRouter("router", tmp_path, decodes=cast(list[Program], servers), sources=sources).command()
    pairs = list(itertools.pairwise(command))
    assert ("--kv-event-source", "http://127.0.0.1:2=tcp://127.0.0.1:5") in pairs
    assert ("--kv-event-replay-source", "http://127.0.0.1:1=tcp://127.0.0.1:4") in pairs
    assert command[-2:] == ["http://127.0.0.1:1", "http://127.0.0.1:2"]


def turns_of(medians_s: dict[int, tuple[float, float]], *, streams: int = 0) -> list[Turns]:
    """Second turns of both kinds of ways: seconds of decode alone, and of the others, by length."""
    return [
        Turns(way, rest, streams, [each_s], [0.25])
        for rest, (alone_s, asked_s) in medians_s.items()
        for way, each_s in zip(WAYS, (alone_s, asked_s, asked_s), strict=True)
    ]


def test_ways_of_a_rest_meet_at_the_length_from_which_on_decode_alone_is_no_faster() -> None:
    turns = turns_of({64: (0.1, 0.1), 128: (0.1, 0.2), 256: (0.3, 0.3), 512: (0.5, 0.4)})
    turns += turns_of({64: (0.1, 0.2), 128: (0.2, 0.3)}, streams=4)
    assert [meeting(turns, 0, way) for way in ASKED] == [256, 256]
    assert meeting(turns, 4, ASKED[0]) is None
    cells = [list(column.cells) for column in rest_table(turns).columns]
    assert cells[:3] == [
        ["0", "0", "0", "0", "4", "4"],
        ["64", "128", "256", "512", "64", "128"],
        ["100, 250", "100, 250", "300, 250", "500, 250", "100, 250", "200, 250"],
    ]
    assert cells[-1] == ["1.00", "0.50", "1.00", "1.25", "0.50", "0.67"]


async def test_a_stream_notes_its_longest_pause_and_begins_again() -> None:
    fake = FakeVllm()
    async with serving(fake) as server, client_of() as client:
        stream = Stream(client, server, tokens=3)
        running = asyncio.create_task(stream.run())
        await until(lambda: len(fake.seen) > 1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert stream.running.is_set()
    assert stream.take_pause() > 0


def test_a_step_with_the_calls_is_compared_with_its_neighbour_without() -> None:
    # The machine has half its speed for a while, and one group of steps meets other work.
    pairs = [(1.1, 1.0), (2.2, 2.0), (9.0, 1.0), (1.1, 1.0), (2.1, 2.0)]
    table = overhead_table([Cost("plain", 0.01, 2.0), Cost("ours", 0.02, 0.005, pairs)])
    assert [list(column.cells) for column in table.columns] == [
        ["plain", "ours"],
        ["1.00%", "2.00%"],
        ["2000.000", "5.000"],
        ["-", "1.1000 (1.0500 to 9.0000)"],
        ["-", "5"],
    ]


class Ends(Program):
    """A program that ends at once."""

    def command(self) -> list[str]:
        return [sys.executable, "-c", "print('no luck'); raise SystemExit(3)"]

    async def is_ready(self) -> bool:
        return False


async def test_a_program_that_ends_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    program = Ends("one", tmp_path)
    program.start()
    with pytest.raises(ServerFailed, match=r"(?s)one ended with 3; .*no luck"):
        await program.wait_ready(60.0)
    await program.end()


async def test_a_frozen_server_is_ended_without_its_last_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_server, "METRICS_S", 0.05)
    server = VARIANTS["single"].server("decode", 0, options=OPTIONS, folder=tmp_path, storage="memory:")
    # The kernel accepts connections for a process that is stopped.
    with socket.create_server(("127.0.0.1", server.port)):
        await server.before_end(os.getpgid(0))
    assert server.cpu_s()[model_server.HTTP] > 0


def test_pairs_of_steps_are_read_of_all_workers(tmp_path: Path) -> None:
    server = TOGGLED.server("decode", 0, options=OPTIONS, folder=tmp_path, storage="memory:")
    for name, pairs in (("1", [[3, 1]]), ("2", [[5, 4], [6, 2]])):
        Path(server.variables[STEP_TIMES], f"{name}.json").write_text(json.dumps(pairs))
    assert read_pairs(server) == [(3, 1), (5, 4), (6, 2)]
    plain = VARIANTS["single"].server("decode", 0, options=OPTIONS, folder=tmp_path / "plain", storage="memory:")
    assert read_pairs(plain) == []


def test_servers_that_fail_side_by_side_end_the_command_with_their_reports() -> None:
    class Failing:
        registered_commands = ()

        def __call__(self, arguments: list[str]) -> None:
            raise ExceptionGroup("side by side", [ServerFailed("one"), ExceptionGroup("inner", [ServerFailed("two")])])

    with pytest.raises(SystemExit, match=r"^dev\.py vllm: one\ndev\.py vllm: two$"):
        comparison.main(cast(typer.Typer, Failing()), [], program="dev.py vllm")


def test_a_command_that_is_ended_twice_ends_its_servers_once() -> None:
    script = (
        "import asyncio, os, signal, sys, typer\n"
        "from benchmarks.servers.comparison import main\n"
        "app = typer.Typer()\n"
        "async def serve():\n"
        "    try:\n"
        "        for _ in range(2): os.kill(os.getpid(), signal.SIGTERM)\n"
        "        await asyncio.sleep(60)\n"
        "    finally:\n"
        "        await asyncio.sleep(0)\n"
        "        print('ended')\n"
        "@app.command()\n"
        "def conversations(): asyncio.run(serve())\n"
        "@app.command()\n"
        "def other(): pass\n"
        "main(app, [], program='x')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.split() == ["ended"]
    assert done.returncode
