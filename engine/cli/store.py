"""`tidekv store`: inspect, check, clean or copy the pages of a storage engine."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Annotated, Final

import typer

from tidekv.states.errors import StorageFailed
from tidekv.states.validation import printable

if TYPE_CHECKING:
    from tidekv.engine.cli.store_tools import OpenStore, Place

WIDTH_UNSEEN: Final = 240

store_app = typer.Typer(
    help="Inspect storage: file:/path, redis://host, s3://bucket, mooncake://host, or what a package adds.",
    no_args_is_help=True,
)

Uri = Annotated[str, typer.Argument(help="URI of the store, as for open_storage.", metavar="URI")]
Options = Annotated[str | None, typer.Option(help="More options: a JSON object, or @file (JSON, TOML, YAML).")]
Namespace = Annotated[str | None, typer.Option(help="The namespace or a prefix of its name, if there are several.")]
PageBytes = Annotated[int | None, typer.Option(help="Bytes of a page, if the store does not record them.", min=1)]


def register(app: typer.Typer) -> None:
    """Add `store` to the command line."""
    app.add_typer(store_app, name="store")


@store_app.command("ls")
def list_namespaces(uri: Uri, options: Options = None) -> None:
    """List the namespaces of a store: model, dtype, layout, page size, pages, and when they were written.

    Model, dtype and layout come from a label that engines store; a store of an earlier version shows "unknown".
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from tidekv.backends.storage.label import read_label
    from tidekv.engine.cli.store_tools import Place, holdings_of

    found = asyncio.run(holdings_of(Place(uri, options)))
    console = Console()
    # Output that is not a terminal is not truncated. On one, the beginning of a namespace is enough for --namespace.
    digits = 16 if console.is_terminal else None
    console = console if console.is_terminal else Console(width=WIDTH_UNSEEN)
    table = Table()
    table.add_column("namespace", no_wrap=True)
    for column in ("model", "dtype", "layout"):
        table.add_column(column)
    for column in ("page size", "pages", "their KV", "written"):
        table.add_column(column, justify="right")
    # Three numbers of one store that differ, each of them right.
    table.caption = "their KV: pages times page size. What counts against the capacity: tidekv store stat."
    now_s = time.time()
    for one in found:
        size = "?" if one.page_bytes is None else _size(one.page_bytes)
        together = "?" if one.page_bytes is None else _size(one.page_bytes * one.pages)
        label = read_label(one.label)
        known = ("unknown",) * 3 if label is None else (label.model or "(no name)", label.dtype, label.layout)
        # The label may come from any writer of the store.
        shown = [Text(printable(each)) for each in known]
        written = "unknown" if one.written_s is None else _ages(*one.written_s, now_s=now_s)
        # Text, since a model's name may have the brackets of rich's markup.
        table.add_row(one.namespace.hex()[:digits], *shown, size, f"{one.pages:,}", together, written)
    console.print(table if found else "no namespace")


@store_app.command("stat")
def show(uri: Uri, options: Options = None, namespace: Namespace = None, page_bytes: PageBytes = None) -> None:
    """Open one namespace, write and read a page, and print the engine's statistics.

    Exit code 1 if it cannot be used now.
    """
    from rich.console import Console
    from rich.table import Table

    async def look() -> tuple[dict[str, str], bool]:
        async with _one(_place(uri, options), namespace, page_bytes) as store:
            started_s = time.perf_counter()
            try:
                await store.storage.probe()
                probed = f"ok, {1000 * (time.perf_counter() - started_s):.1f} ms"
            except StorageFailed as failed:
                probed = f"failed: {failed}"
            said = store.storage.statistics()
            is_file = said.uri.startswith("file:")
            counted = "segment files, of all namespaces, in full size" if is_file else "pages with their headers"
            rows = {
                "engine": said.uri.partition("?")[0],
                "pages of this namespace": f"{said.pages:,}",
                "counts against the capacity": f"{_size(said.used_bytes)} ({counted})",
            }
            return {**rows, "probe": probed}, probed.startswith("ok")

    rows, usable = asyncio.run(look())
    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    Console(soft_wrap=True).print(table)
    if not usable:
        raise typer.Exit(1)


@store_app.command("verify")
def verify(uri: Uri, options: Options = None, namespace: Namespace = None, page_bytes: PageBytes = None) -> None:
    """Read every page of a namespace, and print each damaged one. Exit code 1 if there is one."""
    from tidekv.engine.cli.store_tools import check

    async def run() -> bool:
        async with _one(_place(uri, options), namespace, page_bytes) as store:
            with _progress("verify", store.pages) as advance:
                checked = await check(store, advance)
            for key, cause in checked.damaged.items():
                print(f"{key.hex()} {cause}")
            print(f"{checked.whole:,} pages whole, {len(checked.damaged):,} damaged")
            return not checked.damaged

    if not asyncio.run(run()):
        raise typer.Exit(1)


@store_app.command("gc")
def collect(
    uri: Uri,
    options: Options = None,
    namespace: Namespace = None,
    page_bytes: PageBytes = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be removed, and remove nothing.")
    ] = False,
) -> None:
    """Read every page of a namespace, and remove the damaged ones. Prints each with the reason.

    Whole pages stay: engines evict them by themselves if they need the room.
    """
    from tidekv.engine.cli.store_tools import check

    async def run() -> None:
        async with _one(_place(uri, options), namespace, page_bytes) as store:
            with _progress("gc", store.pages) as advance:
                checked = await check(store, advance)
            damaged = checked.damaged
            gone = dict(zip(damaged, await store.storage.delete(list(damaged)), strict=True)) if not dry_run else {}
        for key, cause in damaged.items():
            done = "would remove" if dry_run else "removed" if gone[key] else "gone already"
            print(f"{done} {key.hex()}: {cause}")
        causes = ", ".join(f"{cause}: {count:,}" for cause, count in Counter(damaged.values()).most_common())
        found = f"{checked.whole:,} pages whole, {len(damaged):,} damaged" + (f" ({causes})" if causes else "")
        print(f"{found}, nothing removed" if dry_run else f"{found}, {sum(gone.values()):,} removed")

    asyncio.run(run())


@store_app.command("cp")
def copy_pages(
    source: Annotated[str, typer.Argument(help="The store to copy from.", metavar="FROM")],
    target: Annotated[str, typer.Argument(help="The store to copy to; a file: store needs a capacity.", metavar="TO")],
    options: Options = None,
    to_options: Annotated[str | None, typer.Option(help="More options of the target.")] = None,
    namespace: Namespace = None,
    page_bytes: PageBytes = None,
) -> None:
    """Copy the pages of a namespace that another store lacks to that store. Damaged pages are skipped.

    Exit code 1 if a page could not be copied.
    """
    from tidekv.engine.cli.store_tools import choose, copy, opened

    async def run() -> bool:
        place, there = _place(source, options), _place(target, to_options)
        chosen, size = await choose(place, namespace=namespace, page_bytes=page_bytes)
        engines = place.open(), there.open(to_write=True)
        async with opened(*engines, namespace=chosen, page_bytes=size) as (first, second):
            with _progress("cp", first.pages) as advance:
                copied = await copy(first, second, advance)
        print(f"{copied.copied:,} pages copied, {copied.there:,} were there, {copied.lost:,} could not be")
        return not copied.lost

    if not asyncio.run(run()):
        raise typer.Exit(1)


def _place(uri: str, options: str | None) -> Place:
    from tidekv.engine.cli.store_tools import Place

    return Place(uri, options)


@asynccontextmanager
async def _one(place: Place, namespace: str | None, page_bytes: int | None) -> AsyncIterator[OpenStore]:
    from tidekv.engine.cli.store_tools import choose, opened

    chosen, size = await choose(place, namespace=namespace, page_bytes=page_bytes)
    async with opened(place.open(), namespace=chosen, page_bytes=size) as (store,):
        yield store


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr, so that stdout can be piped to another program."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("pages"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total)
        yield lambda pages: progress.advance(task, pages)


def _ages(oldest_s: float, newest_s: float, *, now_s: float) -> str:
    """Return how long ago the oldest and the newest page were written."""
    oldest, newest = _age(now_s - oldest_s), _age(now_s - newest_s)
    return f"{oldest} ago" if oldest == newest else f"{oldest} to {newest} ago"


def _age(seconds: float) -> str:
    for unit, length_s in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _size(size_bytes: int) -> str:
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size >= 1024:
            size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if size == int(size) else f"{size:.1f} {unit}"
