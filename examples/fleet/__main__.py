"""A fleet on one machine, by one command: `python -m examples.fleet`.

    users ──▶ router ──▶ decode-0, decode-1, decode-2 ──▶ prefill-0, prefill-1
                 ▲                   │         ▲
                 └──── KV events ────┘         └──▶ store (redis), shared

Two prefill and three decode workers of `examples.service`, a shared store, and a published router: vllm-router, or
Dynamo's selection service, which names the worker. Users hold conversations through OpenAI's client, while processes
are killed and the decode workers restarted one after the other. The same is done once with the policy `round_robin` and
once with `kv_aware`, which learns from tidekv's KV events which worker has which prefix.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress, TaskID

from demo.artefact import about
from examples.fleet.network import leave_network
from examples.fleet.processes import Fleet, FleetOptions, Member, Router, find_environment
from tidekv import InvalidConfig

if TYPE_CHECKING:
    from examples.fleet.report import Run
    from examples.fleet.routes import Routes

POLICIES = ("round_robin", "kv_aware")
DOWN_S = 2.0
"""Seconds for which a killed process is missing."""
START_AND_END_S = 45.0
"""Time that starting the processes and checking the answers take beside each run, as is printed."""
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    seconds: Annotated[float, typer.Option(help="Seconds of each of the two runs.", min=10)] = 120.0,
    users: Annotated[int, typer.Option(help="Users at the same time.", min=1)] = 30,
    policy: Annotated[list[str], typer.Option(help="Policies of the router, one run each.")] = list(POLICIES),  # noqa: B006
    kills: Annotated[bool, typer.Option(help="Kill one process of each kind, and restart the decode workers.")] = True,
    store: Annotated[bool, typer.Option(help="Give the decode workers a shared store.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of the conversations.")] = 1,
    router: Annotated[
        Router, typer.Option(help="Router; dynamo runs in a network namespace of its own.")
    ] = "vllm-router",
    environment: Annotated[
        Path | None, typer.Option(help="Python environment that has the router; without it .venv-routers.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the run over time into this .svg or .png.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the figures.")] = None,
    logs: Annotated[Path | None, typer.Option(help="Directory for what the processes print.")] = None,
) -> None:
    """Serve users by a fleet, kill parts of it, and compare the router's policies."""
    console = Console()
    # As Ctrl-C: what was started ends with this program.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if unknown := set(policy) - set(POLICIES):
            raise InvalidConfig(f"--policy {unknown.pop()} is none of {', '.join(POLICIES)}")
        environment = find_environment(router, environment)
        if router == "dynamo":
            _leave_network()
        folder = logs or Path(tempfile.mkdtemp(prefix="fleet-"))
        options = FleetOptions(router=router, environment=environment, logs=folder, store=store)
        minutes = len(policy) * (seconds + START_AND_END_S) / 60
        console.print(f"{len(policy)} runs, about {minutes:.0f} min; logs of the processes: {folder}", soft_wrap=True)
        # After the checks: torch takes seconds to import.
        from examples.fleet.report import draw, print_table

        runs: list[Run] = []
        for name in policy:
            runs.append(asyncio.run(_run(console, options, name, seconds=seconds, users=users, seed=seed, kills=kills)))
            if json is not None:  # After each run: a long one is not lost with the next.
                report = {"about": about("python -m examples.fleet"), "figures": runs}
                json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
            if picture is not None:
                draw(runs, picture)
        print_table(console, runs)
        if picture is not None:
            console.print(f"picture: {picture}")
    except* InvalidConfig as group:
        # A process that does not start again ends a task, whose error is in a group.
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise SystemExit(f"examples.fleet: {error}") from None
    if any(run.failed or run.wrong for run in runs):
        raise SystemExit(1)


def _leave_network() -> None:
    """Leave the machine's network: Dynamo's selection service listens on every address, and has no password."""
    try:
        leave_network()
    except OSError as error:
        raise InvalidConfig(
            f"--router dynamo needs a network namespace, since the service listens on every address: {error.strerror}; "
            "run it as root, or permit user namespaces (sysctl kernel.unprivileged_userns_clone=1)"
        ) from None


async def _run(
    console: Console, options: FleetOptions, policy: str, *, seconds: float, users: int, seed: int, kills: bool
) -> Run:
    from examples.fleet.load import Load, wrong_answers
    from examples.fleet.report import Happening, Setting, run_of
    from examples.service.model import load

    happenings: list[Happening] = []
    with Progress(console=console) as progress:
        task = progress.add_task(f"{policy}: starting", total=seconds)
        async with Fleet(options, policy) as fleet:
            talk = Load(_routes(fleet, options.router, policy), users, seed=seed)
            start_s = time.monotonic()

            def note(what: str, *, is_decode_killed: bool = False) -> None:
                happenings.append(Happening(time.monotonic(), what, is_decode_killed))
                progress.update(task, description=f"{policy}: {what}")

            async with asyncio.TaskGroup() as tasks:
                talking = tasks.create_task(talk.run())
                clock = tasks.create_task(_tick(progress, task, start_s))
                note("serving")
                if kills:
                    await _cause_faults(fleet, start_s, seconds, note)
                await _until(start_s + seconds)
                talk.stop()
                await talking
                clock.cancel()
        progress.update(task, description=f"{policy}: checking the answers")
        model = await asyncio.to_thread(load, "", page_size=1)
        wrong = sum([await asyncio.to_thread(wrong_answers, model, each) for each in talk.conversations])
    return run_of(
        Setting(options.router, policy, seconds, users),
        talk.turns,
        happenings,
        wrong=wrong,
        token_bytes=model.layout.page_bytes,
        cpu_s={member.name: member.cpu_s for member in fleet.members},
    )


def _routes(fleet: Fleet, router: Router, policy: str) -> Routes:
    from examples.fleet.routes import InTurn, Selection, ThroughRouter

    if router == "vllm-router":
        return ThroughRouter(fleet.url)
    urls = [worker.url for worker in fleet.workers]
    return Selection(fleet.url, urls) if policy == "kv_aware" else InTurn(urls)


async def _cause_faults(fleet: Fleet, start_s: float, seconds: float, note: Callable[..., None]) -> None:
    """Kill one process of each kind, and then restart the decode workers one after the other, as an update does."""

    async def lose(member: Member) -> None:
        note(f"{member.name} killed", is_decode_killed=member in fleet.decodes)
        await member.kill()
        await asyncio.sleep(DOWN_S)
        await member.start()

    victims = [*([] if fleet.store is None else [fleet.store]), fleet.prefills[0], fleet.decodes[0]]
    for share, member in zip((0.2, 0.35, 0.5), victims, strict=False):
        await _until(start_s + share * seconds)
        await lose(member)
    await _until(start_s + 0.65 * seconds)
    for member in fleet.decodes:
        note(f"{member.name} restarts")
        await member.stop()
        await member.start()


async def _tick(progress: Progress, task: TaskID, start_s: float) -> None:
    while True:
        progress.update(task, completed=time.monotonic() - start_s)
        await asyncio.sleep(0.5)


async def _until(at_s: float) -> None:
    await asyncio.sleep(max(0.0, at_s - time.monotonic()))


if __name__ == "__main__":
    app()
