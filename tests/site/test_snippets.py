"""Every snippet of the README, of docs/ and the examples is run by a test, or checked by one with the reason why."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import tidekv
from tests.support import warm_python
from tests.support.neighbours import PROMPT, neighbours, sharing
from tests.support.snippets import ROOT, snippet, snippets
from tests.support.waits import LIMIT_S
from tidekv import DecodeRequest, DevicePool, KVLayout, LoopbackTransport, PrefillConfig, PrefillPeer, Room
from tidekv.backends.storage.uri import ENTRY_POINT_GROUP
from tidekv.testing import loopback_pair
from tidekv.transports.loopback import LoopbackNetwork

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=16)

# By page and the beginning of a snippet: the test that runs it. "" stands for all snippets of a page.
HERE = "tests/site/test_snippets.py"
CHECKED = "tests/site/test_checked_snippets.py"
OF_PAGES = "tests/docs/test_pages.py"
RUN = {
    ("README.md", "import asyncio"): "tests/test_readme.py::test_the_program_runs_when_pasted",
    ("docs/configuration.md", ""): f"{OF_PAGES}::test_the_file_and_the_snippet_of_the_configuration_work",
    ("docs/deployment.md", "tidekv doctor"): f"{HERE}::test_commands_run",
    ("docs/embedding.md", ""): "tests/service/test_embedding_guide.py::guide",
    ("docs/gpu.md", "copy ="): f"{CHECKED}::test_a_forward_pass_follows_the_layers_of_a_copy",
    ("docs/hints.md", "outcomes ="): f"{HERE}::test_a_hint_is_answered",
    ("docs/how-it-works.md", ""): "tests/site/test_site.py::test_diagrams_are_in_the_page_light_and_dark",
    ("docs/journal.md", "{"): f"{HERE}::test_the_line_of_a_journal_is_one",
    ("docs/observability.md", "tidekv run"): f"{HERE}::test_commands_run",
    ("docs/observability.md", "import structlog"): f"{HERE}::test_logs_are_configured",
    ("docs/observability.md", "provider ="): f"{HERE}::test_spans_are_made",
    ("docs/operating.md", "import gc"): f"{HERE}::test_the_collector_is_set",
    ("docs/operating.md", "def freeze_survivors"): f"{HERE}::test_what_survives_a_full_collection_is_frozen",
    (
        "docs/quickstart.md",
        "import asyncio\nimport tempfile",
    ): f"{OF_PAGES}::test_the_program_of_the_quick_start_prints_what_the_page_shows",
    ("docs/quickstart.md", "first"): f"{OF_PAGES}::test_the_program_of_the_quick_start_prints_what_the_page_shows",
    (
        "docs/quickstart.md",
        "import asyncio\nimport time\n",
    ): "tests/docs/test_quickstart_retry.py::test_the_second_prefill_of_the_list_serves_if_the_first_is_not_there",
    ("docs/quickstart.md", "python examples/pair"): "tests/service/test_pair_example.py::",
    (
        "docs/quickstart.md",
        "python3 dev.py tidekv",
    ): "tests/demo/test_sides.py::test_a_decode_worker_finds_a_prefill_worker_that_runs_already",
    ("docs/storage.md", "from tidekv import open_storage"): f"{HERE}::test_storage_is_opened",
    (
        "docs/storage.md",
        "tidekv store",
    ): "tests/backends/storage/test_store_command.py::test_the_lines_of_the_page_of_storage_work",
    ("docs/storage.md", "[project.entry"): f"{HERE}::test_the_entry_point_is_the_one_that_is_looked_up",
    ("docs/storage.md", "from collections.abc"): f"{HERE}::test_the_opener_of_another_package_is_a_function",
    ("docs/testing.md", "import asyncio"): "tests/test_testing.py::test_the_page_about_testing_is_true",
    ("docs/testing.md", "AssertionError"): "tests/test_testing.py::test_the_example_finds_a_planted_leak",
    ("docs/troubleshooting.md", "tidekv doctor"): f"{HERE}::test_commands_run",
    ("docs/when-a-worker-goes-away.md", "config ="): f"{HERE}::test_a_prefix_is_read_from_a_peer",
    ("docs/vllm.md", "import httpx"): f"{CHECKED}::test_the_client_of_a_pair_hands_prefills_parameters_to_decode",
    (
        "examples/service/README.md",
        "python3 dev.py setup",
    ): "tests/service/test_chat.py::test_the_commands_of_the_readme_are_answered",
}
# The reason why it is not run, and the test that checks its names, options and quoting.
NOT_RUN = {
    ("README.md", "python3 dev.py run"): (
        "It downloads an environment and serves for minutes; tests/demo runs the same job.",
        f"{CHECKED}::test_every_command_of_a_checkout_exists",
    ),
    ("docs/quickstart.md", "git clone"): (
        "The address of the repository is not known; tests/demo runs the same job.",
        f"{CHECKED}::test_every_command_of_a_checkout_exists",
    ),
    ("docs/ranks.md", "engine ="): (
        "It names other machines; tests/engine/ranks runs groups of ranks in processes.",
        f"{CHECKED}::test_an_engine_needs_what_the_page_of_ranks_gives_it",
    ),
    ("docs/sglang.md", "TIDEKV_SGLANG"): (
        "These are servers of SGLang; .ci/sglang starts them with these arguments.",
        f"{CHECKED}::test_servers_of_sglang_get_settings_that_are_read",
    ),
    ("docs/sglang.md", "# decode"): (
        "These are settings of SGLang's servers; benchmarks.sglang_pair starts pairs with them.",
        "tests/integrations/test_sglang_reads.py::test_a_turn_costs_prefill_its_new_tokens",
    ),
    ("examples/fleet/README.md", "python3 dev.py setup"): (
        "It downloads the routers and serves for minutes; tests/service/test_fleet.py runs a smaller fleet.",
        f"{CHECKED}::test_every_command_of_a_checkout_exists",
    ),
    ("docs/sglang.md", "--enable"): (
        "These are arguments of SGLang's server, which has no build for this suite.",
        f"{CHECKED}::test_the_extra_config_of_sglang_is_read",
    ),
    ("docs/vllm-handover.md", '{"remote_kv_source"'): (
        "This is a part of an answer of vLLM's server, which has no build for this suite.",
        "tests/integrations/test_vllm_hints.py::test_prefill_reads_the_turn_before_from_decode",
    ),
    ("docs/vllm-handover.md", "vllm serve"): (
        "It needs servers of vLLM; .ci/vllm starts them with these arguments.",
        f"{CHECKED}::test_servers_of_a_pair_get_settings_that_are_read",
    ),
    ("docs/vllm.md", "python3 -m venv"): (
        "It downloads vLLM and starts servers of it; .ci/vllm does so with these arguments.",
        f"{CHECKED}::test_the_environment_of_vllm_is_the_one_that_is_tested",
    ),
    ("docs/vllm.md", "pip install vllm-router"): (
        "It downloads vLLM's router; .ci/vllm starts it with these arguments.",
        f"{CHECKED}::test_the_router_gets_options_that_it_has",
    ),
    ("docs/vllm.md", "vllm serve"): (
        "It needs a server of vLLM; .ci/vllm starts one with these arguments.",
        f"{CHECKED}::test_the_connector_of_storage_gets_settings_that_are_read",
    ),
}
# Commands of a block that test_commands_run leaves out, and the file that tests them.
ELSEWHERE = {"tidekv run": "tests/demo/test_main_job.py", "tidekv top": "tests/engine/test_top.py"}


def test_every_snippet_is_run_or_has_a_reason() -> None:
    listed = [*RUN, *NOT_RUN]
    used = set()
    for page, text in snippets():
        keys = [key for key in listed if key[0] == page and text.lstrip().startswith(key[1])]
        assert len(keys) == 1, f"{page}: run this snippet in a test, or give the reason why not:\n{text}"
        used.update(keys)
    assert used == set(listed), "these snippets are gone"
    for reason, _ in NOT_RUN.values():
        assert reason.endswith("."), reason
        for file in re.findall(r"tests/[\w/.]*\w", reason):
            assert (ROOT / file).exists(), reason


@pytest.mark.parametrize("reference", sorted({*RUN.values(), *(check for _, check in NOT_RUN.values())}))
def test_the_test_that_runs_or_checks_a_snippet_exists(reference: str) -> None:
    file, _, name = reference.partition("::")
    assert re.search(rf"^(?:async )?def {name}", (ROOT / file).read_text(), re.MULTILINE), reference


@pytest.fixture
async def folder(make_pair: Any, tmp_path: Path) -> Path:
    """A folder with a journal, a configuration file and a store, as the commands name them."""
    async with make_pair(journal_path=str(tmp_path / "run.journal")) as pair:
        await pair.finish(await pair.restore("r1", list(range(30))), list(range(30)), [1, 2])
        await pair.engine.wait_settled()
    (tmp_path / "FILE").with_suffix(".toml").write_text("[cache]\npage_size = 64\n")
    (tmp_path / "store").mkdir()
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("key", [key for key, test in RUN.items() if test == f"{HERE}::test_commands_run"])
async def test_commands_run(folder: Path, key: tuple[str, str]) -> None:
    lines = [line for line in snippet(*key).splitlines() if line.strip()]
    assert lines
    for line in lines:
        (program, *arguments) = shlex.split(line, comments=True)
        assert program == "tidekv"
        if f"tidekv {arguments[0]}" in ELSEWHERE:
            assert (ROOT / ELSEWHERE[f"tidekv {arguments[0]}"]).is_file()
            continue
        known = {"FILE": "FILE.toml", "/var/lib/tidekv": str(folder / "store")}
        command = [warm_python.executable(), "-m", "tidekv", *(known.get(argument, argument) for argument in arguments)]
        done = await asyncio.to_thread(
            subprocess.run, command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        # The doctor ends with 1 if this machine lacks something.
        assert done.returncode in ((0, 1) if arguments[0] == "doctor" else (0,)), line + done.stdout + done.stderr
        assert "Traceback" not in done.stderr


def run_alone(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_logs_are_configured() -> None:
    program = snippet("docs/observability.md", "import structlog")
    program += '\nfrom tidekv.engine.log import engine_log\nengine_log("tidekv.engine").warning("late", request="r1")\n'
    record = json.loads(run_alone(program))
    assert record.pop("timestamp")
    assert record == {"event": "late", "request": "r1", "logger": "tidekv.engine", "level": "warning"}


def test_the_collector_is_set() -> None:
    program = snippet("docs/operating.md", "import gc")
    shown = run_alone(program + "\nprint(gc.get_threshold(), gc.get_freeze_count() > 0)\n")
    assert shown == "(50000, 20, 50) True\n"
    assert gc.get_threshold()[0] != 50_000, "it must not change this process"


def test_what_survives_a_full_collection_is_frozen() -> None:
    program = "import gc\n" + snippet("docs/operating.md", "def freeze_survivors")
    shown = run_alone(
        program
        + "\ngc.collect(1)\nyoung = gc.get_freeze_count()\ngc.collect()\nprint(young, gc.get_freeze_count() > 0)\n"
    )
    assert shown == "0 True\n"


def test_the_line_of_a_journal_is_one() -> None:
    line = json.loads(snippet("docs/journal.md", "{"))
    assert line["event"] == "turn"
    assert [event[0] for event in line["took"]] == ["RequestArrived"]


async def test_spans_are_made() -> None:
    exporter, network = InMemorySpanExporter(), LoopbackNetwork()

    async def serve(room: Room) -> None:
        await room.send(range(3), start_token=0)
        await room.finish(first_token=1)
        await room.received()

    peer = PrefillPeer(
        PrefillConfig(listen="prefill"),
        device=DevicePool.allocate(LAYOUT, 8),
        transport=LoopbackTransport("prefill-0", network),
        on_room=serve,
    )
    names: dict[str, Any] = {
        "TracerProvider": TracerProvider,
        "BatchSpanProcessor": BatchSpanProcessor,
        "exporter": exporter,
        "tidekv": tidekv,
        "config": tidekv.EngineConfig(),
        "parts": {
            "device": DevicePool.allocate(LAYOUT, 8),
            "transport": LoopbackTransport("decode-0", network),
        },
        "request": DecodeRequest(request_id="r1", tokens=list(range(40)), prefill="prefill", send_prompt=True),
    }
    body = "".join(f"    {line}\n" for line in snippet("docs/observability.md", "provider =").splitlines())
    exec(compile(f"async def run():\n{body}    provider.shutdown()\n", "observability.md", "exec"), names)
    async with peer:
        await names["run"]()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert {"completion", "tidekv.restore", "tidekv.transfer"} <= set(spans)
    parent = spans["tidekv.restore"].parent
    assert parent is not None
    assert parent.span_id == spans["completion"].context.span_id


async def test_a_prefix_is_read_from_a_peer() -> None:
    program = snippet("docs/when-a-worker-goes-away.md", "config =")
    config, restore = program.split("# In the engine's block:\n")
    assert "10.0.0.5:7100" in config and "10.0.0.6:7100" in restore
    names: dict[str, Any] = {"EngineConfig": tidekv.EngineConfig, "CachePeerOptions": tidekv.CachePeerOptions}
    exec(compile(config, "when-a-worker-goes-away.md", "exec"), names)
    body = "".join(f"    {line}\n" for line in restore.replace('["10.0.0.6:7100"]', "[peer]").splitlines())
    names["DecodeRequest"] = DecodeRequest
    told: list[object] = []
    names["print"] = told.append
    source = restore_of = f"async def serve(engine, tokens, prefill, peer):\n{body}    return ready\n"
    exec(compile(restore_of.replace("prefill=prefill", "prefill=prefill, send_prompt=True"), source, "exec"), names)
    options = names["config"].cache_peers
    assert options.listen == "10.0.0.5:7100"
    async with neighbours(options=sharing(listen="peers:0")) as all_of:
        first, second = all_of.workers
        await first.serve(PROMPT)
        await first.engine.wait_settled()
        ready = await names["serve"](second.engine, PROMPT, second.prefill, first.address)
        await second.engine.finish(ready, [])
        address = second.address
    assert told == [address, {"l1": 0, "l2": 0, "l3": 0, "transfer": 2, "peer": 40}]


async def test_a_hint_is_answered() -> None:
    names: dict[str, Any] = {}
    body = "".join(f"    {line}\n" for line in snippet("docs/hints.md", "outcomes =").splitlines())
    exec(compile(f"async def hint(engine):\n{body}    return outcomes\n", "hints.md", "exec"), names)
    async with loopback_pair() as pair:
        (outcome,) = await names["hint"](pair.engine)
    assert (outcome.action_id, outcome.outcome) == ("a-1", "missing")


def test_storage_is_opened(tmp_path: Path) -> None:
    (tmp_path / "storage.toml").write_text("")
    program = snippet("docs/storage.md", "from tidekv import open_storage")
    for theirs, ours in {
        "/var/lib/tidekv": tmp_path / "kv",
        "/etc/tidekv/storage.toml": tmp_path / "storage.toml",
    }.items():
        assert theirs in program
        program = program.replace(theirs, str(ours))
    names: dict[str, Any] = {}
    exec(compile(program, "storage.md", "exec"), names)
    assert "cache.internal" in names["storage"].uri


def test_the_entry_point_is_the_one_that_is_looked_up() -> None:
    project = tomllib.loads(snippet("docs/storage.md", "[project.entry"))["project"]
    assert list(project["entry-points"]) == [ENTRY_POINT_GROUP]


def test_the_opener_of_another_package_is_a_function() -> None:
    names: dict[str, Any] = {}
    exec(compile(snippet("docs/storage.md", "from collections.abc"), "storage.md", "exec"), names)
    assert callable(names["open_attic"])
