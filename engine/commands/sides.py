"""`tidekv prefill` and `tidekv decode`: one side of the main job each, on this machine or on two."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

SECRET_HELP = "Shared secret of both sides; better given by the environment."


def register(app: typer.Typer) -> None:
    """Add `prefill` and `decode` to the command line."""
    app.command()(prefill)
    app.command()(decode)


def prefill(
    listen: Annotated[str, typer.Option(help="Where decode workers find this one; port 0: any.")] = "127.0.0.1:7000",
    secret: Annotated[str, typer.Option(envvar="TIDEKV_SECRET", help=SECRET_HELP)] = "",
    page_size: Annotated[int, typer.Option(help="Tokens a page; decode must have the same.")] = 16,
    pages: Annotated[int, typer.Option(help="Pages of the KV pool.")] = 1024,
) -> None:
    """Run a prefill worker with the small model until Ctrl-C."""
    import torch
    import uvloop
    from rich.console import Console

    from tidekv.engine.main_job import model_layout, model_order
    from tidekv.engine.workload.model import ModelShape
    from tidekv.engine.workload.prefill_process import prefill_worker

    shape = ModelShape()
    order = model_order(shape, model_layout(shape, page_size), num_pages=pages)
    console = Console()

    async def serve() -> None:
        async with prefill_worker(order, listen=listen, secret=secret) as (peer, _, _):
            console.print(
                f"prefill worker at {peer.address}, model {order.fingerprint}; Ctrl-C ends it", soft_wrap=True
            )
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                counts = peer.statistics()
                console.print(f"sent {counts['pages_sent']:,} pages, {counts['bytes_sent']:,} bytes")

    torch.set_num_threads(1)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(serve())
        except KeyboardInterrupt:
            console.print("ended")


def decode(
    prefill: Annotated[str, typer.Option(help="Address of a running `tidekv prefill`.")] = "127.0.0.1:7000",
    secret: Annotated[str, typer.Option(envvar="TIDEKV_SECRET", help=SECRET_HELP)] = "",
    conversations: Annotated[int, typer.Option(help="Generated conversations.")] = 10,
    rounds: Annotated[int, typer.Option(help="Requests of each conversation.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the generated workload.")] = 1,
    page_size: Annotated[int, typer.Option(help="Tokens a page; prefill must have the same.")] = 16,
    storage: Annotated[str, typer.Option(help="Storage URI; empty: files in a temporary directory.")] = "",
    journal: Annotated[str, typer.Option(help="Write every event of the decode engine to this file.")] = "",
) -> None:
    """Serve generated conversations with the small model against a prefill worker that runs elsewhere.

    Prints what came from where, and compares every token with those of one process. Exit code 1 if any differs.
    """
    from rich.console import Console

    from tidekv.engine import main_job
    from tidekv.engine.commands.run import finished, progress_bars
    from tidekv.engine.main_report import report
    from tidekv.engine.workload.conversations import WorkloadOptions, make_workload

    options = WorkloadOptions(conversations=conversations, rounds=rounds, seed=seed)
    tiers = main_job.TierOptions(page_size=page_size, storage=storage, compare=False, journal=journal or None)
    turns = sum(len(conversation.turns) for conversation in make_workload(options).conversations)
    console = Console()
    with progress_bars(console, dict.fromkeys((main_job.CACHED, main_job.COMPARED), turns)) as progress:
        result = finished(
            main_job.run_conversations(options, tiers, prefill_address=prefill, secret=secret, progress=progress)
        )
    console.print(report(result, is_model=True))
    if result.failures:
        raise typer.Exit(1)
