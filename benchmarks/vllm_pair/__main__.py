"""`python3 dev.py vllm`: conversations through real vLLM servers, each token compared with a single server.

python3 dev.py vllm --conversations 20 --turns 10 --tokens 2000:5000
python3 dev.py vllm --connector tidekv-storage --prefill 2 --decode 2 --at 3:kill:decode-0 --at 5:reset:decode-1
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.servers.model import ModelShape, make_model
from benchmarks.vllm_pair.cluster import STORAGE, Event, Figures, running
from benchmarks.vllm_pair.conversations import Answers, Load, read_answers, write_answers
from benchmarks.vllm_pair.overhead import measure_overhead, overhead_table
from benchmarks.vllm_pair.server import ROOT, ServerOptions
from benchmarks.vllm_pair.table import first_token_table, progress_line, totals_table
from benchmarks.vllm_pair.variants import VARIANTS, Variant
from tidekv.engine.demo.artefact import about
from tidekv.states.errors import TidekvError

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
    shape = ModelShape(window=window, latent=latent)
    each = load.conversation_tokens * shape.kv_bytes_per_token
    options = ServerOptions(
        model=make_model(BUILD, shape),
        kv_bytes=_rounded(conversations * each),
        max_model_len=load.conversation_tokens + 64,
        dtype=dtype,
        ranks=ranks,
        handover=json.loads(handover),
        **shape.server_options(load.conversation_tokens),
    )
    # vLLM refuses a cache that does not hold one request of the greatest length.
    decode_bytes = _rounded(max(decode_share * conversations * each / decode, 1.5 * each))
    on_redis = storage is Storage.REDIS
    servers = [f"prefill-{number}" for number in range(prefill)] + [f"decode-{number}" for number in range(decode)]
    events = [Event.parse(text, [*servers, *([STORAGE] if on_redis else [])]) for text in at or ()]
    folder = _run_folder()

    async def right_answers() -> tuple[Answers, Figures | None]:
        """Return the tokens of the reference, and its figures if it served now."""
        known = None if answers_file is None else read_answers(answers_file, load, model=shape.name)
        if known is not None:
            return known, None
        # Servers with room for everything answer first; their tokens are the reference.
        async with running(VARIANTS[reference], options, folder / "reference") as cluster:
            figures = await cluster.serve(_undisturbed(load), expected=None, progress=_print_progress)
        if answers_file is not None:
            write_answers(answers_file, load, figures.outcome.answers, model=shape.name)
        return figures.outcome.answers, figures

    async def compare() -> list[Figures]:
        right, figures = await right_answers()
        alternation, start = (asyncio.Lock(), asyncio.Barrier(len(chosen))) if alternate else (None, asyncio.Barrier(1))

        async def serve(variant: Variant) -> Figures:
            if figures is not None and variant.name == reference and not (events or aborts or alternate):
                return figures
            async with running(
                variant,
                options,
                folder / variant.name,
                prefills=prefill,
                decodes=decode,
                decode_kv_bytes=decode_bytes,
                decode_ranks=decode_ranks,
                on_redis=on_redis,
                router_policy=router,
            ) as cluster:
                await start.wait()
                print(f"serving: {variant.title}", file=sys.stderr)
                served = await cluster.serve(
                    load, expected=right, events=events, alternation=alternation, progress=_print_progress
                )
                # Servers end when all have served, so that their ends do not disturb others.
                await start.wait()
                return served

        if not alternate:
            return [await serve(variant) for variant in chosen]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(serve(variant)) for variant in chosen]
        return [task.result() for task in tasks]

    figures = asyncio.run(compare())
    console = _console()
    console.print(first_token_table(load, figures))
    console.print(totals_table(figures))
    for one in figures:
        for (conversation, turn), reason in one.outcome.lost.items():
            print(f"{one.variant.name}: conversation {conversation}, turn {turn} is lost: {reason}")
    if json_file is not None:
        report = {"about": about("python3 dev.py vllm"), "figures": [_plain(one) for one in figures]}
        json_file.write_text(json.dumps(report, indent=1))
    if any(one.outcome.wrong or one.outcome.lost for one in figures):
        raise typer.Exit(1)


@app.command()
def overhead(
    steps: Annotated[int, typer.Option(min=1, help="Decode steps of each server.")] = 20_000,
    idle: Annotated[float, typer.Option(min=1, help="Seconds without requests.")] = 60.0,
) -> None:
    """Measure what tidekv costs a server with nothing to transfer: idle CPU, and a decode step."""
    options = ServerOptions(model=make_model(BUILD), kv_bytes=64 << 20, max_model_len=4096)
    _console().print(overhead_table(asyncio.run(measure_overhead(options, _run_folder(), steps=steps, idle_s=idle))))


def _run_folder() -> Path:
    BUILD.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=BUILD))
    print(f"logs: {folder}", file=sys.stderr)
    return folder


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 200)


def _print_progress(figures: Figures) -> None:
    print(progress_line(figures), file=sys.stderr)


def _known(name: str) -> bool:
    if name not in VARIANTS:
        raise typer.BadParameter(f"{name!r} is no variant; there are {', '.join(VARIANTS)}")
    return True


def _undisturbed(load: Load) -> Load:
    return Load(**{**asdict(load), "aborts": 0.0, "copies": 1})


def _rounded(size: float) -> int:
    """Return a size of a KV cache: whole MiB, with some room for what vLLM keeps for itself."""
    return (int(size) // (1 << 20) + 3) << 20


def _plain(one: Figures) -> dict[str, object]:
    """Return figures as JSON has them."""
    return {
        "variant": one.variant.name,
        "first_token_s": one.outcome.first_s,
        "metrics": one.metrics,
        "cpu_s": one.cpu_s,
        "held": one.held,
        "seconds": one.outcome.seconds,
        "answers": len(one.outcome.answers),
        "wrong": one.outcome.wrong,
        "lost": {f"{conversation}.{turn}": reason for (conversation, turn), reason in one.outcome.lost.items()},
        "retries": one.outcome.retries,
        "aborted": one.outcome.aborted,
    }


def main(arguments: list[str]) -> None:
    """Run a command; conversations, if none is named. If servers fail, it ends with what they report."""
    named = [command.callback.__name__ for command in app.registered_commands if command.callback is not None]
    try:
        app(arguments if arguments[:1] and arguments[0] in (*named, "--help") else ["conversations", *arguments])
    except* TidekvError as errors:
        # Servers that start side by side fail in a group.
        sys.exit("\n".join(f"dev.py vllm: {text}" for text in _texts(errors)))


def _texts(errors: BaseExceptionGroup) -> Iterator[str]:
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _texts(error)
        else:
            yield str(error)


if __name__ == "__main__":
    # As Ctrl-C: servers are ended, since they are process groups of their own.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main(sys.argv[1:])
