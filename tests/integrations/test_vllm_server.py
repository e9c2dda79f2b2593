"""The connector in real `vllm serve` processes on a CPU, driven by the harness of `python3 dev.py vllm`.

Skipped unless TIDEKV_TEST_VLLM_VENV names an environment with vLLM for CPUs; `.ci/vllm` makes one and runs these tests.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tidekv.engine.integrations.vllm.handover.jobs import HANDOVER_COUNTS
from tidekv.engine.integrations.vllm.jobs import COUNTS

VENV = os.environ.get("TIDEKV_TEST_VLLM_VENV")
pytestmark = [
    pytest.mark.slow(limit_s=1800),
    pytest.mark.skipif(VENV is None, reason="set TIDEKV_TEST_VLLM_VENV, or run .ci/vllm, to start real vLLM servers"),
]
ROOT = Path(__file__).parents[2]
COUNT = "vllm:tidekv_{}_total"


async def program(*arguments: object) -> tuple[int, str]:
    """Run a module by the environment's Python; returns its exit code and its output."""
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
    printed, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, printed.decode(errors="replace")


async def serve(file: Path, *options: object) -> dict[str, Any]:
    """Serve conversations through one variant; returns its figures. Every token was compared with a single server."""
    code, printed = await program("benchmarks.vllm_pair", *options, "--json", file)
    assert code == 0, printed[-4000:]
    (figures,) = json.loads(await asyncio.to_thread(file.read_text))["figures"]
    assert not figures["wrong"]
    assert not figures["lost"]
    assert not any(figures["held"].values()), "blocks are held after the last answer"
    found: dict[str, Any] = figures
    return found


async def test_every_form_of_the_cpu_kernel_is_converted_exactly() -> None:
    code, printed = await program("tests.support.vllm_cpu_attn")
    assert code == 0, printed[-4000:]
    compared = json.loads(printed.splitlines()[-1])
    assert {form.split()[0] for form in compared} >= {"vec", "vec16"}
    assert all(compared.values())


async def test_blocks_of_windows_and_states_are_handed_over_from_where_vllm_keeps_them() -> None:
    code, printed = await program("tests.support.vllm_tables")
    assert code == 0, printed[-4000:]
    modes = ("none, 0 drafted", "align, 0 drafted", "none, 3 drafted", "align, 3 drafted")
    assert json.loads(printed.splitlines()[-1]) == dict.fromkeys(modes, 196)


async def test_a_server_is_served_from_host_memory_and_storage_and_survives_damage(tmp_path: Path) -> None:
    options = ("--connector", "tidekv-single", "--conversations", 3, "--turns", 5, "--tokens", "200:900")
    events = ("--at", "1:reset:decode-0", "--at", "2:restart:decode-0", "--at", "4:damage:decode-0")
    figures = await serve(tmp_path / "figures", *options, *events)
    counts = {name: figures["metrics"].get(COUNT.format(name), 0) for name in COUNTS}
    assert counts["offer_pages_written"] > 0, counts
    assert counts["restore_tokens_l2"] > 0, counts
    assert counts["restore_tokens_l3"] > 0, counts
    assert counts["restores_partial"] + counts["restores_failed"] > 0, "storage was damaged, and no page was missed"


async def test_a_pair_that_shares_storage_survives_a_kill(tmp_path: Path) -> None:
    options = ("--connector", "tidekv-storage", "--conversations", 4, "--turns", 3, "--tokens", "200:700")
    figures = await serve(tmp_path / "figures", *options, "--at", "1:kill:prefill-0", "--parallel", 2)
    assert figures["metrics"][COUNT.format("restore_tokens_l3")] > 0


async def test_a_pair_hands_over_and_survives_a_kill_and_aborts(tmp_path: Path) -> None:
    options = ("--connector", "tidekv", "--conversations", 4, "--turns", 3, "--tokens", "200:700")
    events = ("--at", "1:kill:prefill-0", "--at", "2:reset:decode-0", "--aborts", 0.3, "--parallel", 2)
    figures = await serve(tmp_path / "figures", *options, *events)
    assert figures["metrics"][COUNT.format("restore_tokens_transfer")] > 0


async def test_a_decode_server_whose_first_step_is_a_decode_step_runs_on_amx(tmp_path: Path) -> None:
    options = ("--connector", "tidekv", "--dtype", "bfloat16", "--conversations", 1, "--turns", 1, "--tokens", "300")
    figures = await serve(tmp_path / "figures", *options)
    assert figures["metrics"][COUNT.format("restore_tokens_transfer")] > 0


async def test_nixl_with_less_noise_is_a_baseline_that_works(tmp_path: Path) -> None:
    options = ("--connector", "nixl-quiet", "--conversations", 2, "--turns", 2, "--tokens", "200:500")
    figures = await serve(tmp_path / "figures", *options)
    assert figures["metrics"]["vllm:nixl_bytes_transferred_sum"] > 0


@pytest.mark.parametrize("connector", ["tidekv", "tidekv-both"])
async def test_a_pair_hands_prompts_over_and_restores_what_decode_kept(tmp_path: Path, connector: str) -> None:
    options = ("--connector", connector, "--conversations", 4, "--turns", 3, "--tokens", "600:1400", "--parallel", 2)
    figures = await serve(tmp_path / "figures", *options, "--aborts", 0.2, "--at", "2:reset:decode-0")
    counts = {name: figures["metrics"].get(COUNT.format(name), 0) for name in HANDOVER_COUNTS}
    assert counts["restore_tokens_transfer"] > 0, counts
    assert counts["restore_tokens_l2"] > 0, counts
    assert counts["offer_pages_written"] > 0, counts


async def test_equal_prompts_at_the_same_time_are_restored_once(tmp_path: Path) -> None:
    prompts, tokens, copies = 3, 1500, 6
    options = ("--connector", "tidekv", "--conversations", prompts, "--turns", 1, "--tokens", tokens)
    figures = await serve(tmp_path / "figures", *options, "--copies", copies, "--decode-share", 1)
    assert not figures["metrics"].get(COUNT.format("restores_failed"))
    # Each further prompt is asked of prefill from its last block on.
    received = figures["metrics"][COUNT.format("restore_tokens_transfer")]
    assert prompts * tokens <= received <= prompts * (tokens + (copies - 1) * 32), received


async def test_a_pair_survives_kills_of_both_ends(tmp_path: Path) -> None:
    options = ("--connector", "tidekv", "--conversations", 4, "--turns", 4, "--tokens", "600:1400", "--parallel", 2)
    figures = await serve(tmp_path / "figures", *options, "--at", "1:kill:prefill-0", "--at", "2:kill:decode-0")
    assert figures["metrics"][COUNT.format("restore_tokens_l3")] > 0, "decode found nothing in storage after its kill"


async def test_tensor_parallel_servers_hand_over_in_pairs(tmp_path: Path) -> None:
    options = ("--connector", "tidekv", "--conversations", 3, "--turns", 3, "--tokens", "300:900", "--parallel", 2)
    figures = await serve(tmp_path / "figures", *options, "--ranks", 2, "--at", "2:reset:decode-0")
    assert figures["metrics"][COUNT.format("restore_tokens_transfer")] > 0
    assert figures["metrics"][COUNT.format("restore_tokens_l2")] > 0


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
async def test_servers_of_other_tensor_parallel_sizes_hand_over(tmp_path: Path, prefill: int, decode: int) -> None:
    options = ("--connector", "tidekv", "--conversations", 3, "--turns", 3, "--tokens", "300:900", "--parallel", 2)
    ranks = ("--ranks", prefill, "--decode-ranks", decode, "--handover", json.dumps({"ranks": 2}))
    figures = await serve(tmp_path / "figures", *options, *ranks, "--at", "2:reset:decode-0")
    assert figures["metrics"][COUNT.format("restore_tokens_transfer")] > 0
    assert figures["metrics"][COUNT.format("restore_tokens_l2")] > 0
    assert not figures["metrics"].get(COUNT.format("restores_failed"))
    assert not figures["metrics"].get(COUNT.format("restores_declined"))


async def test_with_other_numbers_of_tensor_parallel_ranks_decode_computes(tmp_path: Path) -> None:
    options = ("--connector", "tidekv", "--conversations", 2, "--turns", 1, "--tokens", 300, "--ranks", 2)
    # That no block is held at the end is expected far sooner than that.
    patient = ("--handover", json.dumps({"promise_timeout_s": 3600}))
    figures = await serve(tmp_path / "figures", *options, "--decode-ranks", 1, *patient)
    assert not figures["metrics"].get(COUNT.format("restore_tokens_transfer"))
    assert not figures["metrics"].get(COUNT.format("restores_failed"))
    assert figures["metrics"][COUNT.format("restores_declined")] == 2


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="there is no redis-server here")
async def test_a_pair_survives_kills_of_its_storage(tmp_path: Path) -> None:
    options = ("--connector", "tidekv", "--conversations", 4, "--turns", 5, "--tokens", "300:1100", "--parallel", 2)
    events = (
        "--at",
        "1:kill:storage",
        "--at",
        "2:freeze:storage",
        "--at",
        "3:reset:decode-0",
        "--at",
        "4:restart:decode-0",
    )
    figures = await serve(tmp_path / "figures", *options, "--storage", "redis", *events)
    assert figures["metrics"][COUNT.format("restore_tokens_l3")] > 0


async def test_the_published_router_serves_through_two_pairs_and_survives_kills(tmp_path: Path) -> None:
    options = ("--connector", "tidekv", "--conversations", 4, "--turns", 4, "--tokens", "300:900", "--parallel", 2)
    servers = ("--prefill", 2, "--decode", 2, "--router", "round_robin")
    events = ("--at", "1:kill:prefill-0", "--at", "2:kill:decode-1")
    figures = await serve(tmp_path / "figures", *options, *servers, *events)
    assert figures["metrics"][COUNT.format("restore_tokens_transfer")] > 0


async def test_the_published_router_places_prompts_where_only_l2_or_l3_has_their_prefix(
    tmp_path: Path,
) -> None:
    file = tmp_path / "figures"
    code, printed = await program("benchmarks.vllm_pair", "placement", "--prompts", 20, "--json", file)
    assert code == 0, printed[-4000:]
    found = json.loads(await asyncio.to_thread(file.read_text))["figures"]
    assert (found["right"], found["prompts"]) == (20, 20), found
    assert found["own_tokens"] == 0, "vLLM's own caches were not empty"
    assert found["host_tokens"] > 0, found
    assert found["storage_tokens"] > 0, found


# In vLLM 0.32 a plain server with CPU_MLA gives a token another KV in a prefill than in a decode step, and a prefix
# another rotary part in prompts of other lengths. Tokens are therefore compared with those of another pair, for prompts
# that are sent whole and one at a time.
LATENT = ("--latent", 576, "--reference", "nixl-quiet", "--turns", 1, "--parallel", 1)


async def test_models_with_latent_attention_are_handed_over(tmp_path: Path) -> None:
    options = ("--connector", "tidekv", "--conversations", 3, "--turns", 3, "--tokens", "300:900", "--parallel", 2)
    figures = await serve(tmp_path / "figures", *options, *LATENT)
    assert figures["metrics"][COUNT.format("restore_tokens_transfer")] > 0


async def test_models_with_states_are_handed_over(tmp_path: Path) -> None:
    options = ("--connector", "tidekv", "--conversations", 4, "--turns", 3, "--tokens", "200:700", "--parallel", 2)
    figures = await serve(tmp_path / "figures", *options, "--states")
    counts = {name: figures["metrics"].get(COUNT.format(name), 0) for name in HANDOVER_COUNTS}
    assert counts["restore_tokens_transfer"] > 0, counts
    # The full KV of earlier turns; their states are sent by prefill unless a turn ended with a block.
    assert counts["restore_tokens_l2"] > 0, counts
    assert not counts["restores_failed"], counts


WINDOWS_AND_STATES = pytest.mark.parametrize("model", [("--window", 256), ("--states",)], ids=["windows", "states"])


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the right answers of each model, so that one server computes them once for all tests here."""
    return tmp_path_factory.mktemp("answers")


async def serve_amid(
    file: Path, answers: Path, model: tuple[str | int, ...], *faults: str | float, connector: str = "tidekv"
) -> dict[str, float]:
    """Serve a model's conversations amid faults; returns the counts of decode."""
    load = ("--conversations", 6, "--turns", 4, "--tokens", "300:1200", "--parallel", 3)
    right = ("--answers", answers / f"{model[0]}.json")
    figures = await serve(file, "--connector", connector, *load, *right, *model, *faults)
    return {name: figures["metrics"].get(COUNT.format(name), 0) for name in HANDOVER_COUNTS}


@WINDOWS_AND_STATES
async def test_models_with_windows_and_states_survive_faults_of_prefill(
    tmp_path: Path, answers: Path, model: tuple[str | int, ...]
) -> None:
    # Decode asks at once, so that the kill meets transfers.
    counts = await serve_amid(tmp_path / "f", answers, model, "--at", "2:kill:prefill-0", connector="tidekv-both")
    assert counts["restore_tokens_transfer"] > 0, counts
    assert counts["restores_failed"] > 0, counts


@WINDOWS_AND_STATES
async def test_models_with_windows_and_states_survive_faults_of_decode(
    tmp_path: Path, answers: Path, model: tuple[str | int, ...]
) -> None:
    events = ("--at", "1:reset:decode-0", "--at", "2:kill:decode-0")
    counts = await serve_amid(tmp_path / "figures", answers, model, *events)
    assert counts["restore_tokens_transfer"] > 0, counts
    assert counts["restore_tokens_l2"] > 0, counts
    assert counts["restore_tokens_l3"] > 0, counts


@WINDOWS_AND_STATES
async def test_models_with_windows_and_states_survive_faults_of_storage_and_aborts(
    tmp_path: Path, answers: Path, model: tuple[str | int, ...]
) -> None:
    faults = ("--at", "2:damage:decode-0", "--aborts", 0.3)
    counts = await serve_amid(tmp_path / "figures", answers, model, *faults)
    # Damage may have met a page of every prompt: then prefill sends all of it.
    assert counts["restore_tokens_transfer"] > 0, counts


async def test_an_eagle_draft_is_accepted_after_a_hand_over_as_it_is_on_one_server(tmp_path: Path) -> None:
    options = ("--draft", "--conversations", 3, "--turns", 3, "--tokens", "200:700", "--at", "2:reset:decode-0")
    code, printed = await program(
        "benchmarks.vllm_pair",
        *options,
        "--connector",
        "single",
        "--connector",
        "tidekv",
        "--json",
        tmp_path / "figures",
    )
    assert code == 0, printed[-4000:]
    accepted = {}
    for one in json.loads(await asyncio.to_thread((tmp_path / "figures").read_text))["figures"]:
        drafted, taken = (one["metrics"][f"vllm:spec_decode_num_{what}_tokens_total"] for what in ("draft", "accepted"))
        accepted[one["variant"]] = taken / drafted
        counts = {name: one["metrics"].get(COUNT.format(name), 0) for name in HANDOVER_COUNTS}
    # Without its KV the draft guesses: one token of a hundred is accepted.
    assert accepted["single"] > 0.15, accepted
    assert accepted["tidekv"] > 0.7 * accepted["single"], accepted
    assert counts["restore_tokens_transfer"] > 0, counts
    assert counts["restore_tokens_l2"] > 0, counts


async def test_a_draft_model_with_other_heads_is_accepted_after_a_hand_over(tmp_path: Path) -> None:
    options = ("--draft-model", "--connector", "tidekv", "--conversations", 3, "--turns", 3, "--tokens", "200:700")
    figures = await serve(tmp_path / "figures", *options, "--at", "2:reset:decode-0")
    counts = {name: figures["metrics"].get(COUNT.format(name), 0) for name in HANDOVER_COUNTS}
    assert counts["restore_tokens_transfer"] > 0, counts
    assert counts["restore_tokens_l2"] > 0, counts
    drafted, taken = (figures["metrics"][f"vllm:spec_decode_num_{what}_tokens_total"] for what in ("draft", "accepted"))
    # It computes the model's own tokens if it has its KV; vLLM fills the first step of each request with others.
    assert taken > 0.6 * drafted, (taken, drafted)


async def test_later_turns_are_served_by_decode_alone(tmp_path: Path) -> None:
    options = ("--connector", "tidekv-rest", "--conversations", 4, "--turns", 4, "--tokens", "300:1200")
    events = ("--at", "2:reset:decode-0", "--at", "3:restart:decode-0")
    # On a busy machine a look-up takes longer than by default.
    patient = ("--handover", json.dumps({"lookup_timeout_s": 60}))
    figures = await serve(tmp_path / "figures", *options, "--parallel", 2, *events, *patient)
    counts = {name: figures["metrics"].get(COUNT.format(name), 0) for name in HANDOVER_COUNTS}
    assert counts["restore_tokens_l2"] > 0, counts
    assert counts["restore_tokens_l3"] > 0, counts
    # Prefill computed the first turns only.
    assert counts["restore_tokens_transfer"] <= 4 * 300, counts


async def test_the_next_turn_is_served_from_host_memory_that_outlives_decode(tmp_path: Path) -> None:
    options = ("--connector", "tidekv", "--conversations", 4, "--turns", 2, "--tokens", "300:900", "--parallel", 2)
    # Without storage, and with room for everything in vLLM's own cache, which ends with the server.
    lasting = ("--handover", json.dumps({"host_path": str(tmp_path / "pool"), "uri": None}), "--decode-share", 1)
    figures = await serve(tmp_path / "figures", *options, *lasting, "--at", "1:restart:decode-0")
    counts = {name: figures["metrics"].get(COUNT.format(name), 0) for name in HANDOVER_COUNTS}
    # The full blocks of the first prompts with their answers, and the rest of the second ones.
    kept = 4 * ((300 + 24 - 1) // 32 * 32)
    assert counts["restore_tokens_l2"] == kept, counts
    assert counts["restore_tokens_transfer"] == 4 * (300 + 900) - kept, counts


async def test_a_successor_serves_from_host_memory_what_a_drained_decode_server_had(tmp_path: Path) -> None:
    code, printed = await program("tests.support.vllm_successor", tmp_path)
    assert code == 0, printed[-4000:]
    found = json.loads(printed.splitlines()[-1])
    assert found["requests"] == 4 * 3
    assert not found["wrong"] and not found["lost"] and not found["retries"], found
    # The full blocks of the second prompts with their answers; without their last token, which has no KV yet.
    kept = 4 * ((550 + 24 - 1) // 32)
    told = found["told"]
    assert (told["handed"], told["left"], told["failed"]) == (kept, 0, 0), told
    counts = {name: found["metrics"].get(COUNT.format(name), 0) for name in HANDOVER_COUNTS}
    assert counts["restore_tokens_l2"] == 32 * kept, counts
    assert counts["restore_tokens_transfer"] == 4 * 800 - 32 * kept, counts
