"""`python3 dev.py vllm`: conversations through real vLLM servers, each token compared with a single server.

python3 dev.py vllm --conversations 20 --turns 10 --tokens 2000:5000
python3 dev.py vllm --connector tidekv-storage --prefill 2 --decode 2 --at 3:kill:decode-0 --at 5:reset:decode-1
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.servers.cluster import Cluster, Figures
from benchmarks.servers.comparison import as_json, compare, console, main, print_lost, print_progress, right_answers
from benchmarks.servers.conversations import Load
from benchmarks.servers.events import STORAGE, STRIKES, Event
from benchmarks.servers.model import DraftKind, ModelShape, make_model
from benchmarks.servers.table import first_token_table, totals_table
from benchmarks.vllm_pair.cluster import running
from benchmarks.vllm_pair.overhead import measure_overhead, overhead_table
from benchmarks.vllm_pair.placement import measure_placement
from benchmarks.vllm_pair.rest import ASKED, Turns, measure_rest, meeting, rest_table
from benchmarks.vllm_pair.server import ACTIONS, ROOT, ServerOptions, model_options
from benchmarks.vllm_pair.variants import VARIANTS, Variant
from demo.artefact import about

SOURCES = {
    f"vllm:prompt_tokens_by_source_total{{{source}}}": f"prompt tokens: {title}"
    for source, title in (
        ("local_cache_hit", "decode's own cache"),
        ("external_kv_transfer", "connector"),
        ("local_compute", "computed by decode"),
    )
}
DRAFTED = {
    "vllm:spec_decode_num_draft_tokens_total": "tokens of the draft",
    "vllm:spec_decode_num_accepted_tokens_total": "tokens of the draft that were accepted",
}
BUILD = ROOT / "build" / "vllm_pair"


class Storage(StrEnum):
    """Kinds of storage (L3)."""

    FILE = "file"
    REDIS = "redis"


app = typer.Typer(add_completion=False, no_args_is_help=False)


@app.command()
def conversations(
    connector: Annotated[
        list[str] | None, typer.Option(help=f"A variant, may be repeated: {', '.join(VARIANTS)}. All, if none.")
    ] = None,
    conversations: Annotated[int, typer.Option(min=1, help="Number of conversations.")] = 20,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 10,
    tokens: Annotated[str, typer.Option(help="Tokens of the first and the last prompts.")] = "2000:5000",
    output: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 24,
    parallel: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 1,
    copies: Annotated[int, typer.Option(min=1, help="Clients that send each prompt at the same time.")] = 1,
    prefill: Annotated[int, typer.Option(min=1, help="Prefill servers.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode servers.")] = 1,
    decode_share: Annotated[float, typer.Option(help="KV cache of decode, as a share of all conversations.")] = 0.33,
    aborts: Annotated[float, typer.Option(min=0, max=1, help="Share of requests that the client aborts once.")] = 0.0,
    at: Annotated[
        list[str] | None,
        typer.Option(
            help="TURN:ACTION:SERVER, such as 5:kill:decode-0; also freeze, restart, damage, reset, forget. "
            "With --storage redis, storage is a server, too."
        ),
    ] = None,
    storage: Annotated[Storage, typer.Option(help="Storage (L3) of tidekv; redis needs redis-server.")] = Storage.FILE,
    router: Annotated[
        str | None, typer.Option(help="Put the published vllm-router with this policy in front, such as round_robin.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks of each server.")] = 1,
    decode_ranks: Annotated[
        int | None, typer.Option(min=1, help="Tensor-parallel ranks of decode, if they are not --ranks.")
    ] = None,
    handover: Annotated[
        str, typer.Option(help='Further keys of tidekv\'s "handover" as JSON, such as {"promise_timeout_s": 600}.')
    ] = "{}",
    window: Annotated[int | None, typer.Option(help="Serve a Gemma 3 with sliding windows of this size.")] = None,
    states: Annotated[
        bool, typer.Option("--states", help="Serve a Falcon H1, whose layers keep states beside their KV.")
    ] = False,
    draft: Annotated[
        bool,
        typer.Option("--draft", help="Serve the Llama with an EAGLE draft, which drafts three tokens at a time."),
    ] = False,
    draft_model: Annotated[
        bool,
        typer.Option("--draft-model", help="Serve the Llama with a draft model, which has twice the KV heads."),
    ] = False,
    latent: Annotated[
        int | None,
        typer.Option(
            help="Serve a DeepSeek V2 with MLA of this size; vLLM: 576. Needs --reference nixl-quiet --turns 1."
        ),
    ] = None,
    reference: Annotated[str, typer.Option(help="The variant whose tokens are the right ones.")] = "single",
    dtype: Annotated[str, typer.Option(help="bfloat16 uses AMX where the processor has it.")] = "float32",
    seed: Annotated[int, typer.Option(help="The conversations are the same for the same seed.")] = 1,
    alternate: Annotated[
        bool,
        typer.Option(
            "--alternate",
            help="Run the servers of all variants at once; they serve by turns, so that other load meets all of them.",
        ),
    ] = False,
    answers_file: Annotated[
        Path | None,
        typer.Option("--answers", help="Tokens of the reference: read if there is such a file, written otherwise."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Serve multi-turn conversations, compare every token with one server or --reference, and print a table.

    The exit code is 1 if an answer is wrong or lost. Logs of the servers stay in build/vllm_pair.
    """
    chosen = [VARIANTS[name] for name in connector or VARIANTS if _known(name)]
    _known(reference)
    first, _, last = tokens.partition(":")
    load = Load(
        conversations=conversations,
        turns=turns,
        first=int(first),
        last=int(last or first),
        output=output,
        parallel=parallel,
        copies=copies,
        aborts=aborts,
        seed=seed,
    )
    kind: DraftKind | None = "eagle" if draft else "draft_model" if draft_model else None
    shape = ModelShape(window=window, has_states=states, latent=latent, draft=kind)
    each = load.conversation_tokens * shape.kv_bytes_per_token
    model = make_model(BUILD, shape)
    options = ServerOptions(
        model=model,
        kv_bytes=_rounded(conversations * each),
        max_model_len=load.conversation_tokens + 64,
        dtype=dtype,
        ranks=ranks,
        handover=json.loads(handover),
        **model_options(model, shape, load.conversation_tokens),
    )
    # vLLM refuses a cache that does not hold one request of the greatest length.
    decode_bytes = _rounded(max(decode_share * conversations * each / decode, 1.5 * each))
    on_redis = storage is Storage.REDIS
    names = [f"prefill-{number}" for number in range(prefill)] + [f"decode-{number}" for number in range(decode)]
    actions = {**dict.fromkeys(names, ACTIONS), **({STORAGE: STRIKES} if on_redis else {})}
    events = [Event.parse(text, actions) for text in at or ()]
    folder = _run_folder()

    def start(variant: Variant) -> AbstractAsyncContextManager[Cluster]:
        return running(
            variant,
            options,
            folder / variant.name,
            prefills=prefill,
            decodes=decode,
            decode_kv_bytes=decode_bytes,
            decode_ranks=decode_ranks,
            on_redis=on_redis,
            router_policy=router,
        )

    async def run() -> list[Figures]:
        right, figures = await right_answers(
            load,
            file=answers_file,
            model=shape.name,
            start=lambda: running(VARIANTS[reference], options, folder / "reference"),
        )

        async def serve(cluster: Cluster, alternation: asyncio.Lock | None) -> Figures:
            return await cluster.serve(
                load, expected=right, events=events, alternation=alternation, progress=print_progress
            )

        # A reference that was not disturbed has its figures already.
        is_served = figures is not None and not (events or aborts or alternate)
        rest = [variant for variant in chosen if not (is_served and variant.name == reference)]
        served = {one.variant.name: one for one in await compare(rest, start, serve, alternate=alternate)}
        if figures is not None and is_served:
            served[reference] = figures
        return [served[variant.name] for variant in chosen]

    figures = asyncio.run(run())
    shown = console()
    shown.print(first_token_table(load, figures))
    shown.print(totals_table(figures, titles=SOURCES | (DRAFTED if kind else {}), ours="vllm:tidekv_"))
    print_lost(figures)
    if json_file is not None:
        report = {"about": about("python3 dev.py vllm"), "figures": [as_json(one) for one in figures]}
        json_file.write_text(json.dumps(report, indent=1))
    if any(one.outcome.wrong or one.outcome.lost for one in figures):
        raise typer.Exit(1)


@app.command()
def placement(
    prompts: Annotated[int, typer.Option(min=2, help="Number of prompts.")] = 20,
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of each.")] = 600,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Have vllm-router place prompts whose prefix only the host memory or storage of one decode server has.

    The exit code is 1 if one is placed at the other server.
    """
    shape = ModelShape()
    of_a_server = prompts // 2 * tokens * shape.kv_bytes_per_token
    options = ServerOptions(
        model=make_model(BUILD, shape),
        kv_bytes=_rounded(4 * of_a_server),
        max_model_len=tokens + 64,
        # Host memory has a third of a server's prompts, and only storage the others.
        handover={"host": of_a_server // 3},
    )
    found = asyncio.run(measure_placement(options, _run_folder(), prompts=prompts, tokens=tokens))
    console().print(
        f"{found.right} of {found.prompts} prompts were placed at the server that has their prefix; the servers had "
        f"{found.host_tokens} of their tokens in host memory, {found.storage_tokens} in storage and "
        f"{found.own_tokens} in vLLM's own caches"
    )
    if json_file is not None:
        report = {"about": about("python3 dev.py vllm"), "figures": asdict(found)}
        json_file.write_text(json.dumps(report, indent=1))
    if found.right < found.prompts:
        raise typer.Exit(1)


@app.command()
def rest(
    first: Annotated[int, typer.Option(min=64, help="Tokens of the first prompts.")] = 1000,
    lengths: Annotated[str, typer.Option(help="Tokens by which second prompts are longer.")] = "32,128,512,1024,2048",
    streams: Annotated[str, typer.Option(help="Other clients whose requests decode serves meanwhile.")] = "0,4",
    repeats: Annotated[int, typer.Option(min=1, help="Second turns of each way and length.")] = 9,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Measure second turns of conversations whose rest prefill computes, or decode alone."""
    wanted = [int(each) for each in lengths.split(",")]
    shape = ModelShape()
    longest = first + max(wanted) + 64
    options = ServerOptions(
        model=make_model(BUILD, shape),
        kv_bytes=_rounded(16 * longest * shape.kv_bytes_per_token),
        max_model_len=longest,
    )

    def show(turns: list[Turns]) -> None:
        console().print(rest_table(turns))
        if json_file is None:
            return
        meets = [
            {"streams": count, "way": way, "rest": meeting(turns, count, way)}
            for count in sorted({one.streams for one in turns})
            for way in ASKED
        ]
        figures = {"turns": [asdict(one) for one in turns], "meets": meets}
        json_file.write_text(json.dumps({"about": about("python3 dev.py vllm"), "figures": figures}, indent=1))

    numbers = [int(each) for each in streams.split(",")]
    measured = measure_rest(
        options, _run_folder(), first=first, lengths=wanted, streams=numbers, repeats=repeats, progress=show
    )
    asyncio.run(measured)


@app.command()
def overhead(
    steps: Annotated[int, typer.Option(min=1, help="Decode steps of each server.")] = 20_000,
    idle: Annotated[float, typer.Option(min=1, help="Seconds without requests.")] = 60.0,
) -> None:
    """Measure what tidekv costs a server with nothing to transfer: idle CPU, and a decode step."""
    options = ServerOptions(model=make_model(BUILD), kv_bytes=64 << 20, max_model_len=4096)
    console().print(overhead_table(asyncio.run(measure_overhead(options, _run_folder(), steps=steps, idle_s=idle))))


def _run_folder() -> Path:
    BUILD.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=BUILD))
    print(f"logs: {folder}", file=sys.stderr)
    return folder


def _known(name: str) -> bool:
    if name not in VARIANTS:
        raise typer.BadParameter(f"{name!r} is no variant; there are {', '.join(VARIANTS)}")
    return True


def _rounded(size: float) -> int:
    """Return a size of a KV cache: whole MiB, with some room for what vLLM keeps for itself."""
    return (int(size) // (1 << 20) + 3) << 20


if __name__ == "__main__":
    main(app, sys.argv[1:], program="dev.py vllm")
