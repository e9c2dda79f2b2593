"""`python3 dev.py sglang`: conversations through real SGLang servers, each token compared with a single server.

python3 dev.py sglang --conversations 12 --turns 4
python3 dev.py sglang faults --cache radix --cache file --fault damage --fault freeze
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer

from benchmarks.servers.cluster import Cluster, Figures
from benchmarks.servers.comparison import as_json, compare, console, main, print_lost, print_progress, right_answers
from benchmarks.servers.conversations import Answers, Load, read_answers, write_answers
from benchmarks.servers.events import STORAGE, Event
from benchmarks.servers.model import ModelShape, make_model
from benchmarks.servers.table import first_token_table, totals_table
from benchmarks.sglang_pair.cluster import SglangCluster, running
from benchmarks.sglang_pair.faults import FAULTS
from benchmarks.sglang_pair.server import ACTIONS, LLAMA, ROOT, ServerOptions
from benchmarks.sglang_pair.storage import ACTIONS as STORAGE_ACTIONS
from benchmarks.sglang_pair.table import faults_table, outcome_words, tiers_table
from benchmarks.sglang_pair.variants import AS_IT_IS, SINGLE, VARIANTS, Variant
from demo.artefact import about

BUILD: Final = ROOT / "build" / "sglang_pair"
RESERVED: Final = 512
"""Tokens that SGLang's decode keeps free for each request that it admits."""
SOURCES: Final = {
    f"tidekv_tokens_total{{{source}}}": f"prompt tokens: {title}"
    for source, title in (
        ("l1", "SGLang's tree"),
        ("l2", "tidekv's host memory"),
        ("l3", "tidekv's storage"),
        ("transfer", "prefill"),
    )
}
"""Rows of a comparison from tidekv's counters; SGLang tells its own at its promise."""
COMPUTED: Final = {
    "sglang:uncached_prompt_tokens_histogram_sum": "prompt tokens that prefill computed",
    "tidekv_tokens_total{peer}": "prompt tokens that prefill read from decode",
}
"""Rows from the metrics of prefill servers."""
QUIET: Final = [name for name in VARIANTS if not name.endswith(AS_IT_IS)]

app = typer.Typer(add_completion=False, no_args_is_help=False)
Caches = Annotated[
    list[str] | None,
    typer.Option("--cache", help=f"A variant, may be repeated: {', '.join(VARIANTS)}. The quiet ones, if none."),
]
Json = Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")]


@app.command()
def conversations(
    cache: Caches = None,
    conversations: Annotated[int, typer.Option(min=1, help="Number of conversations.")] = 12,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 4,
    tokens: Annotated[str, typer.Option(help="Tokens of the first and the last prompts.")] = "1000:2200",
    output: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 16,
    parallel: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 1,
    copies: Annotated[int, typer.Option(min=1, help="Clients that send each prompt at the same time.")] = 1,
    prefill: Annotated[int, typer.Option(min=1, help="Prefill servers.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode servers.")] = 1,
    decode_share: Annotated[float, typer.Option(help="Device pool of decode, as a share of all conversations.")] = 0.33,
    aborts: Annotated[float, typer.Option(min=0, max=1, help="Share of requests that the client aborts once.")] = 0.0,
    at: Annotated[
        list[str] | None,
        typer.Option(
            help=f"TURN:ACTION:SERVER, such as 2:kill:prefill-0; {', '.join(ACTIONS)}; or for the server "
            f"{STORAGE}: {', '.join(STORAGE_ACTIONS)}."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="The conversations are the same for the same seed.")] = 1,
    ranks: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks of each server of a pair.")] = 1,
    decode_ranks: Annotated[
        int | None, typer.Option(min=1, help="Tensor-parallel ranks of decode, if they are not --ranks.")
    ] = None,
    window: Annotated[int | None, typer.Option(help="Serve a Mellum with sliding windows of this size.")] = None,
    latent: Annotated[
        int | None, typer.Option(min=65, help="Serve a DeepSeek V2 with latent attention of this size.")
    ] = None,
    alternate: Annotated[
        bool,
        typer.Option("--alternate", help="Run the servers of all variants at once; they serve by turns."),
    ] = False,
    answers_file: Annotated[
        Path | None,
        typer.Option("--answers", help="Tokens of one server: read if there is such a file, written otherwise."),
    ] = None,
    json_file: Json = None,
) -> None:
    """Serve multi-turn conversations, compare every token with one server, and print a table.

    The exit code is 1 if an answer is wrong or lost. Logs of the servers stay in build/sglang_pair.
    """
    chosen = _chosen(cache)
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
    shape = ModelShape(window=window, latent=latent, for_sglang=True)
    options, decode_tokens = _sizes(load, decode_share / decode, shape, ranks)
    names = [f"prefill-{number}" for number in range(prefill)] + [f"decode-{number}" for number in range(decode)]
    actions = {**dict.fromkeys(names, ACTIONS), STORAGE: STORAGE_ACTIONS}
    events = [Event.parse(text, actions) for text in at or ()]
    folder = _run_folder()
    promised = {}

    def start(variant: Variant) -> AbstractAsyncContextManager[SglangCluster]:
        return running(
            variant,
            options,
            folder / variant.name,
            prefills=prefill,
            decodes=decode,
            decode_tokens=decode_tokens,
            decode_ranks=decode_ranks,
            events=events,
        )

    async def run() -> list[Figures]:
        right, figures = await right_answers(
            load,
            file=answers_file,
            model=shape.name,
            start=lambda: running(SINGLE, options, folder / "reference"),
        )

        async def serve(cluster: Cluster, alternation: asyncio.Lock | None) -> Figures:
            assert isinstance(cluster, SglangCluster)
            await cluster.warm_up()
            served = await cluster.serve(
                load, expected=right, events=events, alternation=alternation, progress=print_progress
            )
            promised[cluster.variant.name] = (cluster.variant, await cluster.promises())
            return served

        # Servers of a pair only: the reference has served.
        served = await compare([variant for variant in chosen if variant.is_pair], start, serve, alternate=alternate)
        return [*([figures] if figures is not None and SINGLE in chosen else []), *served]

    figures = asyncio.run(run())
    shown = console()
    shown.print(first_token_table(load, figures))
    # SGLang's decode tells them at its own promise; tidekv finds its tiers later, and counts them in its metrics.
    counted = {name: given for name, given in promised.items() if VARIANTS[name].settings is None}
    asked = [counted[one.variant.name] for one in figures if one.variant.name in counted]
    if asked:
        shown.print(tiers_table(load, asked))
    shown.print(totals_table(figures, titles=SOURCES, prefill_titles=COMPUTED))
    print_lost(figures)
    if json_file is not None:
        _write(json_file, [{**as_json(one), "promised": _plain(promised.get(one.variant.name))} for one in figures])
    if any(one.outcome.wrong or one.outcome.lost for one in figures):
        raise typer.Exit(1)


@app.command()
def faults(
    cache: Caches = None,
    fault: Annotated[
        list[str] | None, typer.Option(help=f"May be repeated: {', '.join(FAULTS)}. All but the last, if none.")
    ] = None,
    conversations: Annotated[int, typer.Option(min=1, help="Number of conversations for each fault.")] = 6,
    turns: Annotated[int, typer.Option(min=3, help="Turns of each.")] = 4,
    tokens: Annotated[str, typer.Option(help="Tokens of the first and the last prompts.")] = "400:1000",
    parallel: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 3,
    seed: Annotated[int, typer.Option(help="The conversations are the same for the same seed.")] = 1,
    answers_folder: Annotated[
        Path | None,
        typer.Option(
            "--answers", help="Folder with the tokens of one server, by fault: read, or written where missing."
        ),
    ] = None,
    json_file: Json = None,
) -> None:
    """Serve other conversations for each fault that strikes amid them, and print what clients got.

    The exit code is 1 if an answer of tidekv is wrong or lost, or has an HTTP error, or if its servers hold pages at
    the end; what SGLang's own caches do is printed only.
    """
    chosen = [variant for variant in _chosen(cache) if variant.is_pair]
    named = fault or list(FAULTS)[:-1]
    for name in named:
        if name not in FAULTS:
            raise typer.BadParameter(f"{name!r} is no fault; there are {', '.join(FAULTS)}")
    first, _, last = tokens.partition(":")
    plain = Load(
        conversations=conversations,
        turns=turns,
        first=int(first),
        last=int(last or first),
        output=16,
        parallel=parallel,
    )
    # The place among all of them: a fault meets the same conversations in a run of its own.
    numbers = {name: number for number, name in enumerate(FAULTS)}
    loads = {name: replace(plain, seed=seed + numbers[name], aborts=FAULTS[name].aborts) for name in named}
    options, decode_tokens = _sizes(plain, 0.33)
    folder = _run_folder()
    results: dict[str, dict[str, Figures]] = {name: {} for name in named}

    async def run() -> None:
        right = await _right_answers(
            loads, answers_folder, start=lambda: running(SINGLE, options, folder / "reference")
        )
        events = {name: FAULTS[name].parsed(turns) for name in named}
        for variant in chosen:
            async with running(
                variant,
                options,
                folder / variant.name,
                prefills=2 if any(FAULTS[name].is_second_prefill_needed for name in named) else 1,
                decode_tokens=decode_tokens,
                events=[event for several in events.values() for event in several],
            ) as cluster:
                await cluster.warm_up()
                for name, load in loads.items():
                    print(f"{variant.title}: {name}", file=sys.stderr)
                    served = await cluster.serve(
                        load, expected=right[name], events=events[name], progress=print_progress
                    )
                    results[name][variant.name] = served
                    # A long run that is cut has said what it found, and keeps it.
                    print(f"{variant.title}: {name}: {outcome_words(served)}", file=sys.stderr)
                    if json_file is not None:
                        _write(json_file, _by_fault(results))

    asyncio.run(run())
    console().print(faults_table(results, chosen))
    for name, by_variant in results.items():
        print(f"{name}: {FAULTS[name].text}")
        print_lost(list(by_variant.values()))
    if any(_is_bad(one) for several in results.values() for one in several.values()):
        raise typer.Exit(1)


async def _right_answers(
    loads: Mapping[str, Load], folder: Path | None, *, start: Callable[[], AbstractAsyncContextManager[SglangCluster]]
) -> dict[str, Answers]:
    """Return the tokens of one server by fault. It serves only what `folder` does not have, and is started for that."""
    files = {name: None if folder is None else folder / f"{name}.json" for name in loads}
    right = {
        name: known
        for name, load in loads.items()
        if (file := files[name]) is not None and (known := read_answers(file, load, model=LLAMA.name)) is not None
    }
    if missing := [name for name in loads if name not in right]:
        async with start() as reference:
            for name in missing:
                load, file = loads[name], files[name]
                figures = await reference.serve(replace(load, aborts=0.0), expected=None)
                right[name] = figures.outcome.answers
                if file is not None:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    write_answers(file, load, right[name], model=LLAMA.name)
    return right


def _by_fault(results: Mapping[str, Mapping[str, Figures]]) -> list[dict[str, object]]:
    return [
        {"fault": name, "what": FAULTS[name].text, **as_json(one)}
        for name, several in results.items()
        for one in several.values()
    ]


def _is_bad(one: Figures) -> bool:
    outcome = one.outcome
    bad = outcome.wrong or outcome.lost or outcome.http_errors or any(one.held.values())
    return bool(bad) and one.variant.name.startswith("tidekv")


def _chosen(names: list[str] | None) -> list[Variant]:
    for name in names or ():
        if name not in VARIANTS:
            raise typer.BadParameter(f"{name!r} is no variant; there are {', '.join(VARIANTS)}")
    return [VARIANTS[name] for name in names or QUIET]


def _sizes(load: Load, decode_share: float, shape: ModelShape = LLAMA, ranks: int = 1) -> tuple[ServerOptions, int]:
    """Return the options of servers with room for everything, and the tokens of decode's device pool."""
    page = 16
    each = load.conversation_tokens + page
    everything = _pages(load.conversations * each + load.parallel * RESERVED, page)
    least = load.parallel * load.copies * (each + RESERVED)
    model = make_model(BUILD, shape)
    options = ServerOptions(model=model, tokens=everything, shape=shape, page_size=page, ranks=ranks)
    return options, _pages(max(decode_share * load.conversations * each, least), page)


def _pages(tokens: float, page: int) -> int:
    return -(-int(tokens) // page) * page


def _plain(promised: object) -> object:
    return promised[1] if isinstance(promised, tuple) else None


def _write(file: Path, figures: list[dict[str, object]]) -> None:
    file.write_text(json.dumps({"about": about("python3 dev.py sglang"), "figures": figures}, indent=1))


def _run_folder() -> Path:
    BUILD.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=BUILD))
    print(f"logs: {folder}", file=sys.stderr)
    return folder


if __name__ == "__main__":
    main(app, sys.argv[1:], program="dev.py sglang")
