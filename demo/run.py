"""`tidekv run`: serve and verify a workload, with a progress bar and a table."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from demo.artefact import write_artefact
from tidekv.states.errors import InvalidConfig, TidekvError
from tidekv.states.validation import checked

if TYPE_CHECKING:
    from rich.console import Console

    from demo.main_job import JobResult
    from demo.phase import Phase, Progress


def run(
    trace: Annotated[Path | None, typer.Option(help="Replay this recording (JSON lines, maybe gzip).")] = None,
    kind: Annotated[str, typer.Option(help="Generated workload: chat or agents.")] = "chat",
    conversations: Annotated[int, typer.Option(help="Generated conversations, or agents.", min=1)] = 10,
    rounds: Annotated[int, typer.Option(help="Requests of each conversation.", min=1)] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the generated workload.", min=0)] = 1,
    length_scale: Annotated[str, typer.Option(help="Factor on a recording's lengths, such as 1/8.")] = "1/8",
    time_scale: Annotated[
        float, typer.Option(help="Factor on a recording's times; 0: as fast as it goes.", min=0.0)
    ] = 0.0,
    requests: Annotated[int, typer.Option(help="Maximum requests of a recording; 0: all.", min=0)] = 500,
    sessions: Annotated[int, typer.Option(help="Maximum sessions of a recording; 0: all.", min=0)] = 20,
    prompt_tokens_max: Annotated[int, typer.Option(help="Leave out longer prompts, as scaled; 0: none.", min=0)] = 0,
    page_size: Annotated[int, typer.Option(help="Tokens a page.", min=1)] = 16,
    l1_pages: Annotated[int, typer.Option(help="Device pages; 0: chosen from the workload.", min=0)] = 0,
    l2_pages: Annotated[int, typer.Option(help="Host pages; 0: chosen from the workload.", min=0)] = 0,
    storage: Annotated[str, typer.Option(help="Storage URI; empty: files in a temporary directory.")] = "",
    in_flight: Annotated[
        int, typer.Option(help="Requests at work at once; 0: 3 generated, 16 recorded, 1 with long prompts.", min=0)
    ] = 0,
    compare: Annotated[bool, typer.Option(help="Run a second time without decode cache.")] = True,
    deployment: Annotated[
        bool, typer.Option(help="Also serve long prompts over the link of a stated deployment, throttled to scale.")
    ] = True,
    damage: Annotated[str, typer.Option(help="Overwrite a page from l1, l2, l3 or transfer: the check fails.")] = "",
    journal: Annotated[str, typer.Option(help="Write every event of the decode engine to this file.")] = "",
    json: Annotated[Path | None, typer.Option(help="Write the figures, with commit, date and machine.")] = None,
) -> None:
    """Serve a workload with a prefill and a decode worker in two processes, verify it, and print tokens by source.

    Exit code 1 if a result differs from the expected one, 2 for a wrong option or file.
    """
    from demo.blocks import TraceOptions
    from demo.conversations import (
        Kind,
        Source,
        WorkloadOptions,
        agent_options,
        long_prompt_options,
        make_workload,
    )
    from demo.traces import read_trace
    from tidekv.backends.storage.uri import open_storage

    # All options are checked before the other imports, which take seconds.
    if damage:
        checked(damage, Source, "--damage")
    if storage:
        open_storage(storage)  # Reads the URI; nothing is opened before the engine starts.
    options = WorkloadOptions(kind=checked(kind, Kind, "--kind"), conversations=conversations, rounds=rounds, seed=seed)
    if kind == "agents":
        options = agent_options(agents=conversations, rounds=rounds, seed=seed)
    if trace is not None:
        recorded = TraceOptions(
            length_scale=_factor(length_scale),
            time_scale=time_scale,
            requests_max=requests,
            sessions_max=sessions,
            prompt_tokens_max=prompt_tokens_max,
        )
        read_trace(trace, recorded)

    from rich.console import Console
    from rich.text import Text

    from demo import main_job
    from demo.link import LARGE_MODEL
    from demo.model import check_installed
    from demo.report import report

    def turns(options: WorkloadOptions) -> int:
        return sum(len(conversation.turns) for conversation in make_workload(options).conversations)

    tiers = main_job.TierOptions(
        page_size=page_size,
        l1_pages=l1_pages,
        l2_pages=l2_pages,
        storage=storage,
        in_flight_max=in_flight,
        compare=compare and not damage,
        journal=journal or None,
    )
    console = Console()
    passes = (main_job.CACHED, main_job.UNCACHED)[: 1 + tiers.compare]
    failed = False
    figures: dict[str, object] = {}
    if trace is not None:
        with progress_bars(console, dict.fromkeys(passes, requests or None)) as progress:
            result = finished(main_job.run_trace(trace, recorded, tiers, progress=progress))
    else:
        check_installed()
        names = (*passes, main_job.COMPARED)
        if tiers.compare and deployment:
            # First what the cache saves in a deployment, then a workload whose prefill is next door and saves nothing.
            long_prompts = long_prompt_options(seed=seed)
            # One request at a time: two processes share few cores here, and a second one would wait for the first.
            slow_tiers = replace(tiers, journal=None, l1_pages=0, l2_pages=0, in_flight_max=in_flight or 1)
            with progress_bars(console, dict.fromkeys(names, turns(long_prompts))) as progress:
                slow = finished(
                    main_job.run_conversations(long_prompts, slow_tiers, deployment=LARGE_MODEL, progress=progress)
                )
            constants = LARGE_MODEL.describe(slow.layout)
            console.print(Text(f"{constants} Requests at once: {slow_tiers.in_flight_max}."))
            console.print(report(slow, is_model=True, shows_saving=True))
            console.print(Text("\nShort prompts, with both workers on this machine and no link between them:"))
            failed = bool(slow.failures)
            figures["times_shorter"] = slow.phases[-1].ready_ms(50) / slow.phases[0].ready_ms(50)
            figures["deployment"] = phase_figures(slow.phases)
        with progress_bars(console, dict.fromkeys(names, turns(options))) as progress:
            result = finished(main_job.run_conversations(options, tiers, damage=damage, progress=progress))
    console.print(report(result, is_model=trace is None))
    failed = failed or bool(result.failures)
    figures["workload"] = phase_figures(result.phases)
    if json is not None and not failed:
        write_artefact(json, figures)
    if failed:
        raise typer.Exit(1)


def phase_figures(phases: Sequence[Phase]) -> dict[str, object]:
    """Return the figures of each pass, by its name."""
    return {
        phase.name: {
            "requests": phase.requests,
            "prompt_tokens": phase.prompt_tokens,
            "tokens": dict(phase.tokens),
            "bytes_sent": phase.bytes_sent,
            "ready_ms_p50": round(phase.ready_ms(50), 1),
            "ready_ms_p99": round(phase.ready_ms(99), 1),
            "wall_s": round(phase.wall_s, 2),
        }
        for phase in phases
    }


def finished(work: Coroutine[object, object, JobResult]) -> JobResult:
    """Run the job on its own loop. From a group of errors, raise the one that the user can fix."""
    import torch
    import uvloop

    torch.set_num_threads(1)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(work)
    except BaseExceptionGroup as group:
        mendable, rest = group.split(TidekvError)
        if mendable is None or rest is not None:
            raise
        error: BaseException = mendable
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from group


@contextmanager
def progress_bars(console: Console, totals: Mapping[str, int | None]) -> Iterator[Progress]:
    """Show one bar per phase; a phase with an unknown total shows a count.

    Nothing is shown before the first phase begins, so that errors of the start are not printed below empty bars.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bars = Progress(*columns, console=console)
    with ExitStack() as shown:
        tasks: dict[str, TaskID] = {}

        def advance(name: str, count: int) -> None:
            if not tasks:
                tasks.update((phase, bars.add_task(phase, total=total, start=False)) for phase, total in totals.items())
                shown.enter_context(bars)
            bars.start_task(tasks[name])
            bars.advance(tasks[name], count)

        yield advance


def _factor(text: str) -> float:
    """Read a number or a fraction such as 1/8. Raises InvalidConfig."""
    try:
        return float(Fraction(text))
    except (ValueError, ZeroDivisionError) as error:
        raise InvalidConfig(f"--length-scale must be a number or a fraction such as 1/8, not {text!r}") from error
