"""Cost of the NIXL transport relative to NIXL itself: `python -m benchmarks.transfer`.

A second process offers the target pool; the loop is uvloop, as in every process of tidekv. The target is bandwidth:
writes of the same pages in a stream, eight at a time, as a prefill worker with several requests has them, by
`NixlTransport.write` and by bare requests of NIXL. Both take turns in changing order, and the figure is the median over
pairs of neighbors, because the machine's own speed changes by half within seconds. The difference between two equal
measurements is measured too (bare next to bare), since no ratio is more precise than that.

Each turn begins with untimed writes, a quarter of the timed ones. A core that has slept for a tenth of a second copies
slower at first, also with bare NIXL after a pause; and the transport's thread sleeps during the turns of the other. The
ratio including these writes is printed as well.

The bare side posts one request per write, with all its descriptors. The transport splits and merges: 64 MiB go in two
parts, and queued writes of 4 MiB go four at a time as one request, and each ends with that. Both are properties of the
transport; bytes and descriptors are the same.

The time of a single write, with nothing before or after it, is printed as well. It is a latency: it includes the plan
and the way to the polling thread and back, which in a stream overlap with the copies of other writes. Between both
stands the same bare request made by a thread to which a loop passes it and from which it receives the end. NIXL copies
while it posts, for milliseconds, so no loop can have the result sooner: this is the limit of the transport's latency.

Below that stands the share of a core that the sleeping progress thread takes when idle.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.figures import Figures
from benchmarks.nixl_child import NumpyPool
from benchmarks.transfer_pairs import Handed, Lists, Rig, Shape, bare_lone, bare_streamed, our_lone, our_streamed
from tidekv.engine.poller import PollerThread
from tidekv.transports.nixl.transport import NixlTransport

IDLE_S = 3.0
PAIRS = 21
LONE_PAIRS = 15
TURN_S = 0.1  # Duration of a stream, short enough that the machine's speed stays constant.
TRIAL_WRITES = 16  # Used to find how many writes fit into that.
LEAD_SHARE = 4
ONE_PAGE = Shape(1, 65536, 1)
SHAPES = [ONE_PAGE, Shape(1024, 65536, 1), Shape(1024, 4096, 1), Shape(64, 32768, 32)]
ORDERS = ("random", "consecutive")


@dataclass
class Row:
    """One shape in one order: seconds of each turn, by kind of measurement."""

    shape: Shape
    order: str
    stream_writes: int = 0
    streamed: list[float] = field(default_factory=list)
    bare_streamed: list[float] = field(default_factory=list)
    led: list[float] = field(default_factory=list)
    """Times of the untimed writes before `streamed`."""
    bare_led: list[float] = field(default_factory=list)
    bare_again: list[float] = field(default_factory=list)
    lone: list[float] = field(default_factory=list)
    by_thread: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.shape}, {self.order}"

    @property
    def is_bulk(self) -> bool:
        """Whether bandwidth matters. For one page it is the elapsed time."""
        return self.shape != ONE_PAGE

    def share(self) -> float:
        """Percentage of bare NIXL's bandwidth in a stream."""
        return 100 * of_pairs(self.bare_streamed, self.streamed)

    def words(self) -> str:
        """All ratios of the row as text."""
        again = [100 * one / other for one, other in zip(self.bare_again, self.bare_streamed, strict=True)]
        low, *_, high = statistics.quantiles(again, n=10)
        from_rest = of_pairs(
            [lead + rest for lead, rest in zip(self.bare_led, self.bare_streamed, strict=True)],
            [lead + rest for lead, rest in zip(self.led, self.streamed, strict=True)],
        )
        return (
            f"{self.name}: {self.share():.0f} % (with the start {100 * from_rest:.0f} %, "
            f"bare beside bare {low:.0f} to {high:.0f} %), "
            f"a lone write {100 * of_pairs(self.bare, self.lone):.0f} %, "
            f"which is {100 * of_pairs(self.by_thread, self.lone):.0f} % of its limit"
        )

    def cells(self) -> list[str]:
        """Cells of the table: time of one write, by kind of measurement, and GB/s in a stream."""
        streams = [statistics.median(seconds) / self.stream_writes for seconds in (self.streamed, self.bare_streamed)]
        alone = [statistics.median(seconds) for seconds in (self.lone, self.by_thread, self.bare)]
        cells = [text for s in streams for text in (f"{s * 1e6:.0f}", f"{self.shape.size_bytes / s / 1e9:.2f}")]
        return [str(self.shape), self.order, *cells, f"{self.share():.0f}", *(f"{s * 1e6:.0f}" for s in alone)]


def of_pairs(limits_s: list[float], ours_s: list[float]) -> float:
    """Return the speed of the second relative to the first: the median over neighboring measurements."""
    return statistics.median(limit_s / s for limit_s, s in zip(limits_s, ours_s, strict=True))


async def measure_stream(row: Row, rig: Rig, lists: list[Lists], *, pairs: int = PAIRS) -> None:
    """Measure streams in turns: transport and bare in alternating order, and bare once more next to bare."""
    parts = [rig.whole(some) for some in lists]
    bare_streamed(rig, parts, TRIAL_WRITES)
    trial_s = bare_streamed(rig, parts, TRIAL_WRITES)
    row.stream_writes = max(LEAD_SHARE, round(TURN_S / trial_s * TRIAL_WRITES))
    lead_writes = row.stream_writes // LEAD_SHARE

    def bare(led: list[float], streamed: list[float]) -> None:
        led.append(bare_streamed(rig, parts, lead_writes))
        streamed.append(bare_streamed(rig, parts, row.stream_writes))

    async def ours() -> None:
        row.led.append(await our_streamed(rig, lists, lead_writes))
        row.streamed.append(await our_streamed(rig, lists, row.stream_writes))

    for turn in range(pairs):
        gc.collect()
        if turn % 2:
            bare([], row.bare_again)
            bare(row.bare_led, row.bare_streamed)
            await ours()
        else:
            await ours()
            bare(row.bare_led, row.bare_streamed)
            bare([], row.bare_again)


async def measure_lone(row: Row, rig: Rig, lists: list[Lists]) -> None:
    """Measure single writes in turns, of the same pages within a turn."""
    handed = Handed()
    for turn in range(LONE_PAIRS if row.is_bulk else 20 * LONE_PAIRS):
        some = lists[turn % len(lists)]
        # In alternating order, because each measurement leaves the caches in a state that affects the next.
        if turn % 2:
            row.bare.append(bare_lone(rig, some))
        row.lone.append(await our_lone(rig, some))
        row.by_thread.append(await handed.seconds(partial(bare_lone, rig, some)))
        if not turn % 2:
            row.bare.append(bare_lone(rig, some))
    handed.close()


async def measure(shape: Shape) -> list[Row]:
    """Measure both orders of one shape."""
    rig = Rig(shape)
    await rig.start()
    rows = [Row(shape, order) for order in ORDERS]
    for row in rows:
        lists = rig.page_lists(row.order)
        await measure_stream(row, rig, lists)
        await measure_lone(row, rig, lists)
    await rig.close()
    return rows


async def idle_share() -> float:
    """Return the share of a core that a started transport and its poller take when idle."""
    poller = PollerThread()
    poller.start()
    transport = NixlTransport("idle")
    await transport.start(poller=poller)
    await transport.register(NumpyPool(16, (4096,)).memory)
    before = os.times()
    await asyncio.sleep(IDLE_S)
    after = os.times()
    await transport.close()
    await poller.close()
    return (after.user + after.system - before.user - before.system) / IDLE_S


async def main(path: Path | None) -> None:
    """Measure and print; with a path, write the figures there."""
    heads = ("write", "pages", "stream µs", "GB/s", "bare µs", "GB/s", "%", "lone µs", "by thread µs", "bare µs")
    table = Table(*heads, title="one write: in a stream of eight, and alone (medians)")
    rows: list[Row] = []
    for shape in SHAPES:
        rows += await measure(shape)
    for row in rows:
        table.add_row(*row.cells())
    console = Console()
    console.print(table)
    for row in rows:
        console.print(row.words())
    console.print(f"idle transport: {100 * await idle_share():.1f} % of a core")
    if path is not None:
        with Figures(path) as figures:
            least = min((row for row in rows if row.is_bulk), key=Row.share)
            figures.add("transfer.least", least.share(), "; ".join(row.words() for row in rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures there")
    uvloop.run(main(parser.parse_args().json))
