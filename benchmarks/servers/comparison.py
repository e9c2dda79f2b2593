"""A comparison of variants: the reference first, then each variant alone or all by turns; the end of a command."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import typer
from rich.console import Console

from benchmarks.servers.cluster import Cluster, Figures, Variant
from benchmarks.servers.conversations import Answers, Load, read_answers, write_answers
from benchmarks.servers.table import progress_line
from tidekv.states.errors import TidekvError

V = TypeVar("V", bound=Variant)


async def right_answers(
    load: Load, *, file: Path | None, model: str, start: Callable[[], AbstractAsyncContextManager[Cluster]]
) -> tuple[Answers, Figures | None]:
    """Return the tokens of the reference, and its figures if it served now.

    They are read from `file` if there is such a file, else those that the servers of `start` answer, undisturbed; they
    are written to `file`. Raises InvalidConfig for a file with answers to other prompts.
    """
    known = None if file is None else read_answers(file, load, model=model)
    if known is not None:
        return known, None
    # Servers with room for everything answer first; their tokens are the reference.
    async with start() as cluster:
        undisturbed = Load(**{**asdict(load), "aborts": 0.0, "copies": 1})
        figures = await cluster.serve(undisturbed, expected=None, progress=print_progress)
    if file is not None:
        write_answers(file, load, figures.outcome.answers, model=model)
    return figures.outcome.answers, figures


async def compare(
    variants: Sequence[V],
    start: Callable[[V], AbstractAsyncContextManager[Cluster]],
    serve: Callable[[Cluster, asyncio.Lock | None], Awaitable[Figures]],
    *,
    alternate: bool,
) -> list[Figures]:
    """Start the servers of each variant and `serve` them, one after the other.

    `alternate`: all variants run at once, and `serve` gets the lock that their loads share.
    """
    alternation, barrier = (asyncio.Lock(), asyncio.Barrier(len(variants))) if alternate else (None, asyncio.Barrier(1))

    async def one(variant: V) -> Figures:
        async with start(variant) as cluster:
            await barrier.wait()
            print(f"serving: {variant.title}", file=sys.stderr)
            served = await serve(cluster, alternation)
            # Servers end when all have served, so that their ends do not disturb others.
            await barrier.wait()
            return served

    if not alternate:
        return [await one(variant) for variant in variants]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(variant)) for variant in variants]
    return [task.result() for task in tasks]


def print_lost(figures: Sequence[Figures]) -> None:
    """Print each lost request and each kind of HTTP error with its reason."""
    for one in figures:
        for (conversation, turn), reason in one.outcome.lost.items():
            print(f"{one.variant.name}: conversation {conversation}, turn {turn} is lost: {reason}")
        for reason, count in one.outcome.http_errors.items():
            print(f"{one.variant.name}: {count} times HTTP {reason}")


def as_json(one: Figures) -> dict[str, object]:
    """Return figures as JSON has them."""
    return {
        "variant": one.variant.name,
        "first_token_s": one.outcome.first_s,
        "metrics": one.metrics,
        "prefill_metrics": one.prefill_metrics,
        "bytes_from_prefill": one.bytes_from_prefill,
        "cpu_s": one.cpu_s,
        "held": one.held,
        "seconds": one.outcome.seconds,
        "answers": len(one.outcome.answers),
        "wrong": one.outcome.wrong,
        "lost": {f"{conversation}.{turn}": reason for (conversation, turn), reason in one.outcome.lost.items()},
        "http_errors": one.outcome.http_errors,
        "retries": one.outcome.retries,
        "aborted": one.outcome.aborted,
    }


def print_progress(figures: Figures) -> None:
    """Print the figures so far on stderr."""
    print(progress_line(figures), file=sys.stderr)


def console() -> Console:
    """Return where tables are printed; wide, unless it is a terminal."""
    return Console(width=None if sys.stdout.isatty() else 200)


def main(app: typer.Typer, arguments: list[str], *, program: str) -> None:
    """Run a command of `app`; conversations, if none is named. If servers fail, it ends with what they report.

    SIGTERM is as Ctrl-C: servers are ended, since they are process groups of their own.
    """
    # A job in the background ignores SIGINT until it is handled.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _end_once)
    named = [command.callback.__name__ for command in app.registered_commands if command.callback is not None]
    try:
        app(arguments if arguments[:1] and arguments[0] in (*named, "--help") else ["conversations", *arguments])
    except* TidekvError as errors:
        # Servers that start side by side fail in a group.
        sys.exit("\n".join(f"{program}: {text}" for text in _texts(errors)))


def _end_once(number: int, frame: object) -> None:
    # timeout(1) sends it to the process and to its group; a second one would interrupt the end of the servers.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.raise_signal(signal.SIGINT)


def _texts(errors: BaseExceptionGroup) -> Iterator[str]:
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _texts(error)
        else:
            yield str(error)
