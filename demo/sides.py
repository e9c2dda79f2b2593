"""`tidekv prefill` and `tidekv decode`: the two sides of `tidekv run`, on one machine or two.

Both are configured by a file, environment variables and flags; see `tidekv.engine.config`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from tidekv.engine.cli.config import ConfigFile, Settings
from tidekv.states.errors import InvalidConfig

if TYPE_CHECKING:
    from tidekv.engine.config import Loaded
    from tidekv.transports.nixl.transport import NixlTransport

PageSize = Annotated[int | None, typer.Option(help="Tokens a page; both sides must have the same (default 16).")]
PREFILL_PAGES = 1024


def prefill(
    config: ConfigFile = None,
    settings: Settings = None,
    listen: Annotated[
        str | None, typer.Option(help="Address for decode workers to dial; port 0: any (default 127.0.0.1:7000).")
    ] = None,
    page_size: PageSize = None,
    pages: Annotated[int | None, typer.Option(help="Pages of the KV pool (default 1024).", min=1)] = None,
) -> None:
    """Run a prefill worker with the small model until Ctrl-C or SIGTERM."""
    flags = {
        "prefill.listen": ("--listen", listen),
        "cache.page_size": ("--page-size", page_size),
        "cache.l1": ("--pages", None if pages is None else f"{pages} pages"),
    }
    loaded = _loaded(config, settings, flags, defaults={"cache.l1": f"{PREFILL_PAGES} pages"})

    import torch
    import uvloop
    from rich.console import Console

    from demo.main_job import model_layout, model_order
    from demo.model import ModelShape
    from demo.prefill_process import prefill_worker

    shape = ModelShape()
    layout = model_layout(shape, loaded.configuration.cache.page_size)
    order = model_order(shape, layout, num_pages=_pools(loaded, layout.page_bytes)[0] or PREFILL_PAGES)
    section = loaded.configuration.prefill
    console = Console()

    async def serve() -> None:
        # Before the address is printed: a supervisor may stop the worker as soon as it has read it.
        _cancel_at_signals()
        async with prefill_worker(
            order,
            listen=section.listen,
            transport=_transport(loaded, "prefill-0", listens=True),
            lease_s=section.lease_s,
            rooms_max=section.rooms_max,
            close_deadline_s=section.close_deadline_s,
            # The option belongs to both sides, which may share one file.
            bigram_keys=loaded.configuration.engine.bigram_keys,
            metrics_listen=section.metrics_listen,
        ) as (peer, _, _):
            console.print(
                f"prefill worker at {peer.address}, model {order.fingerprint}; Ctrl-C ends it", soft_wrap=True
            )
            if peer.metrics_address is not None:
                console.print(f"metrics at http://{peer.metrics_address}/metrics", soft_wrap=True)
            try:
                await asyncio.Event().wait()
            finally:
                counts = peer.statistics()
                console.print(f"sent {counts['pages_sent']:,} pages, {counts['bytes_sent']:,} bytes")

    torch.set_num_threads(1)
    # Ctrl-C may arrive before the handler is set.
    with (
        contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(serve())
    console.print("ended")


def _cancel_at_signals() -> None:
    """Cancel the calling task at SIGTERM or Ctrl-C: its worker closes in order, whether it has started or not.

    Further signals change nothing, since a close is bounded. Ctrl-C stays ignored if it is, as for background jobs of a
    shell.
    """
    task = asyncio.current_task()
    assert task is not None, "called in a task"

    def end() -> None:
        if not task.cancelling():
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, end)


def decode(
    config: ConfigFile = None,
    settings: Settings = None,
    prefill: Annotated[
        str | None,
        typer.Option(help="Address of a running `tidekv prefill`, or several with commas (default 127.0.0.1:7000)."),
    ] = None,
    conversations: Annotated[int, typer.Option(help="Generated conversations.", min=1)] = 10,
    rounds: Annotated[int, typer.Option(help="Requests of each conversation.", min=1)] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the generated workload.", min=0)] = 1,
    page_size: PageSize = None,
    storage: Annotated[str | None, typer.Option(help="Storage URI; none: files in a temporary directory.")] = None,
    journal: Annotated[str | None, typer.Option(help="Write every event of the decode engine to this file.")] = None,
) -> None:
    """Serve generated conversations with the small model against a prefill worker that runs elsewhere.

    Prints tokens by source, and compares every token with those of a single process. Exit code 1 if any differs.
    """
    addresses = None if prefill is None else [address.strip() for address in prefill.split(",")]
    flags = {
        "decode.prefill": ("--prefill", addresses),
        "cache.page_size": ("--page-size", page_size),
        "storage.uri": ("--storage", storage),
        "engine.journal.path": ("--journal", journal),
    }
    # A small workload has short prefixes: the command shows that storage works, not when it pays.
    loaded = _loaded(
        config,
        settings,
        flags,
        defaults={"engine.storage.prefetch_threshold_tokens": 16, "engine.default_deadline_s": 300.0},
    )

    from rich.console import Console

    from demo import main_job
    from demo.conversations import WorkloadOptions, make_workload
    from demo.model import ModelShape
    from demo.report import report
    from demo.run import finished, progress_bars

    options = WorkloadOptions(conversations=conversations, rounds=rounds, seed=seed)
    cache, chosen = loaded.configuration.cache, loaded.configuration
    shape = ModelShape(vocab_size=options.vocabulary)
    l1_pages, l2_pages = _pools(loaded, main_job.model_layout(shape, cache.page_size).page_bytes)
    if not l2_pages and cache.l2 != "auto":
        raise InvalidConfig("cache.l2: this command shows storage, which needs a host pool")
    tiers = main_job.TierOptions(
        page_size=cache.page_size,
        l1_pages=l1_pages,
        l2_pages=l2_pages,
        l2_path=cache.l2_path,
        storage=chosen.storage.uri,
        storage_options=chosen.storage.options,
        compare=False,
        journal=chosen.engine.journal.path,
        engine=chosen.engine,
        transport=_transport(loaded, "decode-0", listens=False),
    )
    turns = sum(len(conversation.turns) for conversation in make_workload(options).conversations)
    console = Console()
    with progress_bars(console, dict.fromkeys((main_job.CACHED, main_job.COMPARED), turns)) as progress:
        result = finished(
            main_job.run_conversations(options, tiers, prefill_address=chosen.decode.prefill, progress=progress)
        )
    console.print(report(result, is_model=True))
    if result.failures:
        raise typer.Exit(1)


def _loaded(
    config: str | None,
    settings: list[str] | None,
    flags: Mapping[str, tuple[str, object]],
    *,
    defaults: Mapping[str, object],
) -> Loaded:
    """Read the configuration and check it against this machine. Raises InvalidConfig."""
    from tidekv.engine.config import load
    from tidekv.engine.config.check import errors_here
    from tidekv.engine.config.load import refuse

    loaded = load(config, settings=settings or (), flags=flags, defaults=defaults)
    refuse("the configuration cannot be used here", list(errors_here(loaded)))
    if loaded.configuration.cache.device != "cpu":
        raise InvalidConfig("cache.device: the small model of this command runs on the cpu only")
    return loaded


def _pools(loaded: Loaded, page_bytes: int) -> tuple[int, int]:
    from tidekv.engine.config.memory import host_memory

    memory = host_memory()
    return loaded.configuration.cache.pool_pages(page_bytes, device=memory, host=memory)


def _transport(loaded: Loaded, name: str, *, listens: bool) -> Callable[[], NixlTransport]:
    """Return a factory of this worker's transport, since a transport is used once."""
    from tidekv.engine.config.tls import dial_context, listen_context

    section = loaded.configuration.transport
    secret = section.read_secret()
    peers = loaded.configuration.engine.cache_peers
    listen_tls = listen_context(section) if listens or peers.listen is not None else None
    dial_tls = None if listens else dial_context(section)

    def make() -> NixlTransport:
        from tidekv.transports.nixl.transport import ListenOptions, NixlOptions, NixlTransport

        return NixlTransport(
            section.name or name,
            secret=secret,
            listen_tls=listen_tls,
            dial_tls=dial_tls,
            dials=() if listens else (*loaded.configuration.decode.prefill, *peers.dials_of(0, 1)),
            listening=ListenOptions(announces=section.announces, allow_no_secret=section.allow_no_secret),
            nixl=NixlOptions(
                backends=section.backends,
                progress_delay_us=section.progress_delay_us,
                call_timeout_s=section.call_timeout_s,
                close_timeout_s=section.close_timeout_s,
                data_network=section.data_network,
            ),
        )

    return make
