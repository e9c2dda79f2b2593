"""Snippets that need servers, machines or devices beyond this suite: their names, options and quoting are checked."""

from __future__ import annotations

import ast
import http.server
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import tidekv
from benchmarks.vllm_pair.environment import REQUIREMENTS, UNUSABLE
from dev import COMMANDS
from tests.support.snippets import ROOT, snippet, snippets
from tests.support.waits import LIMIT_S
from tidekv import DecodeRequest, DevicePool, HostPool, KVLayout
from tidekv.backends.copies.copier import PageCopier
from tidekv.engine.integrations.sglang.handover.settings import BACKEND
from tidekv.engine.integrations.sglang.handover.settings import read_settings as read_backend_settings
from tidekv.engine.integrations.vllm.handover.settings import HandoverSettings
from tidekv.engine.integrations.vllm.settings import read_settings

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=16)
# Each command prints a line: its name, the environment that the page sets, and its words.
RECORDED = ("pip", "vllm", "vllm-router", "python3", "git")
SHOW = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]))"
# What `python3 dev.py vllm` and .ci/vllm give to the real servers: an option that is not among these has never run.
HARNESS = "".join(
    file.read_text() for room in ("servers", "vllm_pair") for file in sorted((ROOT / "benchmarks" / room).glob("*.py"))
)


def commands_of(script: str) -> list[tuple[dict[str, str], list[str]]]:
    """Run a snippet in bash with recorders in place of programs; return environment and words of each call."""
    shown = shlex.join([sys.executable, "-c", SHOW])
    recorders = "".join(f'{name}() {{ {shown} {name} "$@"; }}\n' for name in RECORDED)
    # A command that ends with & prints at any time, so that each is waited for.
    body = re.sub(r" &$", "", script, flags=re.MULTILINE).replace(". v/bin/activate", "true")
    done = subprocess.run(
        ["bash", "-euc", recorders + body], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return [(environment, words) for environment, words in map(json.loads, done.stdout.splitlines())]


def check_server(words: list[str]) -> dict[str, Any]:
    """Check the words of a `vllm serve`; return its transfer configuration."""
    for option in words:
        if option.startswith("--"):
            assert f'"{option}' in HARNESS, f"no server of the tests was started with {option}"
    transfer: dict[str, Any] = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert set(transfer) == {
        "kv_connector",
        "kv_connector_module_path",
        "kv_role",
        "kv_load_failure_policy",
        "kv_connector_extra_config",
    }
    assert f'"{transfer["kv_role"]}"' in HARNESS
    module = ROOT / "/".join(transfer["kv_connector_module_path"].split(".")[1:])
    classes = [node.name for node in ast.parse(module.with_suffix(".py").read_text()).body if hasattr(node, "name")]
    assert transfer["kv_connector"] in classes
    return transfer


@pytest.mark.parametrize(("page", "beginning"), [("vllm", "python3 -m venv"), ("vllm-handover", "vllm serve")])
def test_servers_of_a_pair_get_settings_that_are_read(page: str, beginning: str) -> None:
    calls = commands_of(snippet(f"docs/{page}.md", beginning))
    servers = [(environment, words) for environment, words in calls if words[:2] == ["vllm", "serve"]]
    sides = {}
    for _, words in servers:
        transfer = check_server(words)
        extra = transfer["kv_connector_extra_config"]
        assert set(extra) == {"handover"}
        sides[transfer["kv_role"]] = msgspec.convert(extra["handover"], HandoverSettings)
    assert set(sides) == {"kv_producer", "kv_consumer"}
    assert sides["kv_producer"].listen
    assert sides["kv_consumer"].uri


def test_the_environment_of_vllm_is_the_one_that_is_tested() -> None:
    calls = commands_of(snippet("docs/vllm.md", "python3 -m venv"))
    calls += commands_of(snippet("docs/vllm.md", "pip install vllm-router"))
    installed = [words[2:] for _, words in calls if words[:2] == ["pip", "install"]]
    assert sorted(name for names in installed for name in names) == sorted([*REQUIREMENTS, "."])
    assert [words[3:] for _, words in calls if words[:2] == ["pip", "uninstall"]] == [list(UNUSABLE)]
    given = [environment for environment, words in calls if words[0] == "vllm"]
    assert len(given) == 2
    exported = re.findall(r"(\w+)=(\S+)", re.findall(r"^export (.*)$", snippet("docs/vllm.md", "python3"), re.M)[0])
    assert len(exported) == 3
    for name, value in exported:
        assert f'"{name}": "{value}"' in HARNESS, f"no server of the tests was started with {name}={value}"
        assert {environment[name] for environment in given} == {value}


def test_the_router_gets_options_that_it_has() -> None:
    (words,) = [
        words for _, words in commands_of(snippet("docs/vllm.md", "pip install vllm-router")) if "pip" not in words
    ]
    assert words[0] == "vllm-router"
    for option in words:
        assert not option.startswith("--") or f'"{option}' in HARNESS, (
            f"no router of the tests was started with {option}"
        )
    servers = [words for _, words in commands_of(snippet("docs/vllm.md", "python3")) if words[0] == "vllm"]
    ports = [words[words.index("--port") + 1] for words in servers]
    for role, port in zip(("--prefill", "--decode"), ports, strict=True):
        assert words[words.index(role) + 1] == f"http://127.0.0.1:{port}"


def test_the_connector_of_storage_gets_settings_that_are_read() -> None:
    ((_, words),) = commands_of(snippet("docs/vllm.md", "vllm serve my/model --block-size"))
    transfer = check_server(words)
    settings = read_settings(transfer["kv_connector_extra_config"])
    assert settings.model == "my-model"


class Completions(http.server.BaseHTTPRequestHandler):
    """The part of vLLM's completions that a client of a pair sees: prefill gives parameters, decode wants them."""

    asked: list[dict[str, Any]]

    def do_POST(self) -> None:
        """Record a request and answer it."""
        assert self.path == "/v1/completions"
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append(asked)
        is_prefill = asked["kv_transfer_params"].get("do_remote_decode", False)
        answer = {"choices": [{"text": " there was"}], "kv_transfer_params": {"tidekv": 7} if is_prefill else None}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class.
        """Log nothing."""


@pytest.fixture
def pair() -> Iterator[tuple[list[dict[str, Any]], list[int]]]:
    """Two servers: what they were asked, and their ports."""
    asked: list[dict[str, Any]] = []
    handler = type("Recorder", (Completions,), {"asked": asked})
    servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) for _ in range(2)]
    threads = [threading.Thread(target=server.serve_forever) for server in servers]
    for thread in threads:
        thread.start()
    yield asked, [server.server_port for server in servers]
    for server, thread in zip(servers, threads, strict=True):
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_client_of_a_pair_hands_prefills_parameters_to_decode(
    pair: tuple[list[dict[str, Any]], list[int]],
) -> None:
    asked, ports = pair
    program = snippet("docs/vllm.md", "import httpx")
    for theirs, ours in zip(("8101", "8102"), ports, strict=True):
        assert program.count(f"127.0.0.1:{theirs}/") == 1
        program = program.replace(f"127.0.0.1:{theirs}/", f"127.0.0.1:{ours}/")
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == " there was\n"
    first, second = asked
    assert first["max_tokens"] == 1
    assert second["kv_transfer_params"] == {"tidekv": 7}
    assert first["prompt"] == second["prompt"]


def test_servers_of_sglang_get_settings_that_are_read() -> None:
    commands = snippet("docs/sglang.md", "TIDEKV_SGLANG").replace("\\\n", " ").split("\n\n")
    assert len(commands) == 2
    for command in commands:
        environment, *words = shlex.split(command)
        name, _, value = environment.partition("=")
        read_backend_settings({name: value})
        assert words[:2] == ["sglang", "serve"]
        assert words[words.index("--disaggregation-transfer-backend") + 1] == BACKEND


def test_the_extra_config_of_sglang_is_read() -> None:
    words = shlex.split(snippet("docs/sglang.md", "--enable"))
    extra = json.loads(words[words.index("--hicache-storage-backend-extra-config") + 1])
    module = ROOT / "/".join(extra["module_path"].split(".")[1:])
    tree = ast.parse(module.with_suffix(".py").read_text())
    assert extra["class_name"] in [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    # The module needs SGLang to be imported; the names that it accepts are two constants.
    known = {
        node.target.id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.target.id in ("OURS", "LOADERS")
        if node.value is not None
    }
    assert set(known) == {"OURS", "LOADERS"}
    assert set(extra) <= {*known["OURS"], *known["LOADERS"]}
    assert set(known["LOADERS"]) <= set(extra)
    assert tidekv.open_storage(extra["uri"].replace("/var/lib", "/tmp")).uri


async def test_a_forward_pass_follows_the_layers_of_a_copy() -> None:
    """The snippet of docs/gpu.md, on pools in memory."""
    device, host = DevicePool.allocate(LAYOUT, 4), HostPool.allocate(LAYOUT, 4)
    copier = PageCopier(device, host)
    copier.start()
    ran: list[int] = []
    names: dict[str, Any] = {"copier": copier, "host_pages": [0, 1], "device_pages": [2, 3], "run": ran.append}
    body = "".join(f"    {line}\n" for line in snippet("docs/gpu.md", "copy =").splitlines())
    exec(compile(f"async def restore():\n{body}", "gpu.md", "exec"), names)
    try:
        await names["restore"]()
    finally:
        await copier.close()
    assert ran == [0, 1]


def test_every_command_of_a_checkout_exists() -> None:
    used = {name for _, text in snippets() for name in re.findall(r"^python3 dev\.py (\S+)", text, re.MULTILINE)}
    assert {"run", "test", "tidekv"} <= used <= set(COMMANDS)


def test_an_engine_needs_what_the_page_of_ranks_gives_it() -> None:
    """The snippet of docs/ranks.md names other machines, so that its engine is made and not started."""
    names: dict[str, Any] = {name: getattr(tidekv, name) for name in ("DecodeEngine", "NixlTransport", "RankGroup")}
    names |= {"config": tidekv.EngineConfig(), "pool": DevicePool.allocate(LAYOUT, 8), "secret": "s"}
    engine, ready = snippet("docs/ranks.md", "engine =").split("ready = await engine.restore")
    exec(compile(engine, "ranks.md", "exec"), names)
    assert isinstance(names["engine"], tidekv.DecodeEngine)
    request = eval(ready, {"DecodeRequest": DecodeRequest, "ids": [1, 2, 3]})
    assert request.prefill.count(",") == 1
