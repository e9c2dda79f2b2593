"""tidekv in real SGLang servers on a CPU, driven by the harness of `python3 dev.py sglang`.

Skipped unless TIDEKV_TEST_SGLANG_VENV names an environment with SGLang for CPUs; `.ci/sglang` makes one and runs these.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.sglang_copy import CopyOfSglang
from tidekv.engine.integrations.sglang.handover.plugin import HOOKS

VENV = os.environ.get("TIDEKV_TEST_SGLANG_VENV")
pytestmark = [
    pytest.mark.slow(limit_s=1800),
    pytest.mark.skipif(
        VENV is None, reason="set TIDEKV_TEST_SGLANG_VENV, or run .ci/sglang, to start real SGLang servers"
    ),
]
ROOT = Path(__file__).parents[2]
SMALL = ("--conversations", 4, "--turns", 3, "--tokens", "300:700")
OF_ANSWERS = ("--conversations", "--turns", "--tokens", "--output", "--window", "--latent")
"""Options on which the answers of the single server depend."""


def answers_file(folder: Path, arguments: tuple[object, ...]) -> Path:
    """The file of the single server's answers, which tests with the same conversations and model share."""
    pairs = itertools.pairwise(arguments)
    return folder / "-".join(["answers", *(f"{name}{value}".strip("-") for name, value in pairs if name in OF_ANSWERS)])


async def program(*arguments: object) -> str:
    """Run a module by the environment's Python, and return its output; it must succeed."""
    assert VENV is not None
    process = await asyncio.create_subprocess_exec(
        f"{VENV}/bin/python",
        "-m",
        *map(str, arguments),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed = (await process.communicate())[0].decode(errors="replace")
    assert process.returncode == 0, printed[-4000:]
    return printed


async def figures_of(file: Path, *arguments: object) -> list[dict[str, Any]]:
    """Run the harness by the environment's Python; returns its figures. Every token was compared with one server."""
    if "faults" not in arguments:
        arguments += ("--answers", answers_file(file.parents[1], arguments))
    await program("benchmarks.sglang_pair", *arguments, "--json", file)
    found: list[dict[str, Any]] = json.loads(await asyncio.to_thread(file.read_text))["figures"]
    return found


def check_served(figures: dict[str, Any]) -> None:
    assert figures["answers"]
    assert not figures["wrong"]
    assert not figures["lost"]
    assert not figures["http_errors"]
    assert not any(figures["held"].values()), "pages are held after the last answer"


def tokens_by_tier(figures: dict[str, Any]) -> list[int]:
    """Tokens that decode had in L1, L2 and L3 as it asked prefill, over all requests."""
    return [sum(given[tier] for given in figures["promised"].values()) for tier in (1, 2, 3)]


async def test_hicache_is_served_from_our_store(tmp_path: Path) -> None:
    (figures,) = await figures_of(tmp_path / "figures", "--cache", "store", *SMALL, "--at", "2:reset:decode-0")
    check_served(figures)
    assert tokens_by_tier(figures)[2] > 0, "nothing came from storage"


async def test_hicache_serves_right_tokens_from_our_damaged_store(tmp_path: Path) -> None:
    (figures,) = await figures_of(
        tmp_path / "figures", "faults", "--cache", "store", "--fault", "damage", "--conversations", 3, "--turns", 3
    )
    assert figures["answers"] == 9
    assert not figures["wrong"]
    assert not figures["lost"], "SGLang answers HTTP 500, since it has promised the pages; the client asks again"


async def test_a_pair_survives_a_kill_a_flush_and_aborts(tmp_path: Path) -> None:
    events = ("--prefill", 2, "--at", "1:kill:prefill-0", "--at", "2:reset:decode-0", "--aborts", 0.2, "--parallel", 2)
    (figures,) = await figures_of(tmp_path / "figures", "--cache", "tidekv", *SMALL, *events)
    check_served(figures)


@pytest.mark.parametrize(("cache", "tier"), [("tidekv", "l3"), ("tidekv-lasting", "l2")])
async def test_a_decode_server_that_starts_again_is_served_from_what_outlived_it(
    cache: str, tier: str, tmp_path: Path
) -> None:
    # With one turn before it, so that all that a tier gives was written before the start.
    turns = ("--conversations", 4, "--turns", 2, "--tokens", "300:700", "--at", "1:restart:decode-0")
    (figures,) = await figures_of(tmp_path / "figures", "--cache", cache, *turns)
    check_served(figures)
    # Of each prompt the whole pages of the turn before; those of the last one may have been on their way at the end.
    assert figures["metrics"][f"tidekv_tokens_total{{{tier}}}"] >= 3 * 304


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_successor_serves_from_host_memory_what_a_drained_decode_server_had(tmp_path: Path, ranks: int) -> None:
    found = json.loads((await program("tests.support.sglang_successor", tmp_path, ranks)).splitlines()[-1])
    assert found["requests"] == 4 * 3
    assert not found["wrong"] and not found["lost"] and not found["retries"], found
    # The full pages of the second prompts with their answers; without their last token, which has no KV yet.
    kept = 4 * ((550 + 24 - 1) // 16)
    told = found["told"]
    assert (told["handed"], told["left"], told["failed"]) == (kept, 0, 0), told
    assert found["metrics"]["tidekv_tokens_total{l2}"] == 16 * kept, found["metrics"]
    assert found["metrics"]["tidekv_tokens_total{transfer}"] == 4 * 800 - 16 * kept, found["metrics"]


async def test_a_turn_costs_a_prefill_that_reads_its_new_tokens(tmp_path: Path) -> None:
    (figures,) = await figures_of(tmp_path / "figures", "--cache", "tidekv-reads", *SMALL, "--at", "2:reset:prefill-0")
    check_served(figures)
    metrics = figures["prefill_metrics"]
    # Of four conversations with prompts of 300, 500 and 700 tokens and answers of 16, in pages of 16 tokens: all that
    # decode has computed at the end of a turn, which is all but the last token of the answer.
    assert metrics["sglang:cached_tokens_total"] == 4 * (304 + 512)
    # At first what prefill lacks of it, the answer; after the flush all of it.
    assert metrics["tidekv_tokens_total{peer}"] == 4 * (304 - 288 + 512)


async def test_what_sglang_counts_is_there_beside_what_tidekv_counts(tmp_path: Path) -> None:
    (figures,) = await figures_of(tmp_path / "figures", "--cache", "tidekv", *SMALL)
    check_served(figures)
    metrics = figures["metrics"]
    # Of SGLang's main process, of its scheduler, and of the decode engine.
    assert metrics["sglang:time_to_first_token_seconds_count"] == 12
    assert metrics["sglang:cached_tokens_total"] >= metrics["tidekv_tokens_total{l2}"] > 0
    assert metrics["sglang:kv_transfer_alloc_ms_count"] == 12


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--decode-ranks", 2), id="two ranks behind one"),
        pytest.param(("--ranks", 2, "--decode-ranks", 1), id="one rank behind two"),
        pytest.param(("--ranks", 2), id="two ranks behind two"),
        pytest.param(("--latent", 96), id="latent attention"),
        pytest.param(("--latent", 96, "--decode-ranks", 2), id="latent attention, two ranks behind one"),
        pytest.param(("--window", 128), id="sliding windows"),
        pytest.param(("--window", 128, "--decode-ranks", 2), id="sliding windows, two ranks behind one"),
    ],
)
async def test_ranks_latents_and_windows_are_served(tmp_path: Path, options: tuple[object, ...]) -> None:
    (figures,) = await figures_of(tmp_path / "figures", "--cache", "tidekv", *SMALL, *options)
    check_served(figures)
    assert figures["metrics"]["tidekv_tokens_total{l2}"] > 0


@pytest.mark.parametrize("options", [(), ("--window", 128)], ids=["full attention", "sliding windows"])
async def test_a_retracted_request_goes_on(
    tmp_path: Path, options: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    # SGLang's own switch: it retracts one of several running requests every few steps.
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "true")
    arguments = ("--cache", "tidekv", *SMALL, "--parallel", 3, "--output", 48, *options)
    (figures,) = await figures_of(tmp_path / "figures", *arguments)
    check_served(figures)
    assert figures["metrics"]["sglang:num_retracted_requests_total"] > 0


IS_ROOT = os.geteuid() == 0
MOUNTS = "storage without room is a file system, which root alone can mount"


@pytest.mark.parametrize(
    "fault",
    [
        *("flush", "memory", "freeze", "kill", "damage", "hang"),
        pytest.param("full", marks=pytest.mark.skipif(not IS_ROOT, reason=MOUNTS)),
    ],
)
async def test_no_fault_reaches_a_client(tmp_path: Path, fault: str) -> None:
    arguments = ("faults", "--cache", "tidekv", "--fault", fault, "--conversations", 4, "--turns", 3)
    (figures,) = await figures_of(tmp_path / "figures", *arguments)
    check_served(figures)


@pytest.mark.skipif(not IS_ROOT, reason=MOUNTS)
async def test_three_hundred_requests_amid_all_faults_and_aborts_are_answered(tmp_path: Path) -> None:
    arguments = ("faults", "--cache", "tidekv", "--fault", "all", "--conversations", 30, "--turns", 10)
    (figures,) = await figures_of(tmp_path / "figures", *arguments)
    check_served(figures)
    assert figures["answers"] == 300
    assert figures["aborted"] > 0


@pytest.fixture(scope="module")
def copy_of_sglang(tmp_path_factory: pytest.TempPathFactory) -> CopyOfSglang:
    assert VENV is not None
    return CopyOfSglang(Path(VENV) / "bin" / "python", tmp_path_factory.mktemp("copy"))


@pytest.fixture
def renamed(copy_of_sglang: CopyOfSglang, request: pytest.FixtureRequest) -> Iterator[CopyOfSglang]:
    """The copy, in which the hooked function that is the parameter has another name."""
    copy_of_sglang.rename(request.param)
    yield copy_of_sglang
    copy_of_sglang.restore(request.param)


def test_the_backend_is_given_out_on_a_copy_of_sglang(copy_of_sglang: CopyOfSglang) -> None:
    assert "given out: <class 'tidekv" in copy_of_sglang.start()


@pytest.mark.parametrize(
    ("target", "renamed"), [(hook.target, hook.target) for hook in HOOKS], indirect=["renamed"], ids=lambda value: value
)
def test_a_function_that_a_copy_of_sglang_names_otherwise_is_named_at_the_start(
    target: str, renamed: CopyOfSglang
) -> None:
    printed = renamed.start()
    assert "InvalidConfig: transfer backend tidekv" in printed
    assert f"take hold of {target};" in printed, "it names this one alone"
    assert "given out" not in printed


LOADS = next(hook.target for hook in HOOKS if hook.target.endswith(".load_kv_cache"))


@pytest.mark.parametrize("renamed", [LOADS], indirect=True)
def test_a_server_on_such_a_copy_ends_at_its_start(renamed: CopyOfSglang, tmp_path: Path) -> None:
    status, printed = renamed.serve(tmp_path)
    assert status != 0
    assert f"take hold of {LOADS};" in printed
