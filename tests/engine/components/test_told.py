"""What an engine reports about its components: metrics, which follow from the journal, and current statistics."""

from __future__ import annotations

import asyncio
import http.server
import io
import threading
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

from tests.support.recount import counters_of, recount, scraped
from tidekv import Replayer
from tidekv.engine.metrics import MetricsCollector, MetricsFold
from tidekv.engine.trace.top import scrape, show

SIZE = 4
PROMPT = list(range(100, 100 + 6 * SIZE))
OUTPUT = list(range(500, 500 + 2 * SIZE + 1))
KEPT = PROMPT + OUTPUT[:-1]


async def test_every_counter_of_components_follows_from_the_journal(worker, tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    settings = {"metrics_listen": "127.0.0.1:0", "prefetch_threshold_tokens": 0}
    async with worker(journal=path, storage="memory:?capacity=64MiB", **settings) as made:
        await made.answer("r1", PROMPT, OUTPUT)
        await made.answer("r2", KEPT, OUTPUT)
        await made.engine.flush(("l1",))
        await made.answer("r3", KEPT, [])
        await made.engine.flush()
        await made.answer("r4", KEPT, [])
        held = await made.restore("r5", KEPT)
        await made.engine.wait_settled()
        now = await asyncio.to_thread(scrape, made.engine.metrics_address)
        core, copies = made.core(), made.engine.statistics()["component_copies"]
        await made.engine.finish(held)
    counted = {at: count for at, count in now["tidekv_component_pages_total"].items() if count}
    # Asked: three pages of the window and one record of the first prompt. A clone for r2, and one for r5.
    assert counted["window", "asked"] == 3 and counted["state", "asked"] == 1 and counted["state", "cloned"] == 2
    assert counted["state", "fetched"] == 1 and counted["window", "fetched"] == 3
    assert counted["window", "loaded"] == 6 and counted["state", "loaded"] == 2
    pools = now["tidekv_component_pool_pages"]
    for (name, condition, tier), count in pools.items():
        assert count == core[f"{name}_{tier}_{condition}"]
    assert pools["state", "owned", "device"] == 1
    assert copies["state"]["failed"] == 0 < copies["state"]["cloned_bytes"]

    replayer = Replayer(path)
    fold = MetricsFold(replayer.core)
    naive = recount(replayer, fold, page_bytes=1)
    registry = CollectorRegistry()
    registry.register(MetricsCollector(fold, page_bytes=1))
    found = counters_of(scraped(generate_latest(registry).decode())[1])
    assert set(found) == set(naive)
    assert found == pytest.approx(naive)

    console = Console(width=160, file=io.StringIO())
    console.print(show(now, None, 0.0))
    told = console.file.getvalue()
    assert all(f"{name}, {tier}" in told for name in ("window", "state") for tier in ("device", "host"))


def test_labels_of_metrics_command_no_terminal() -> None:
    text = (
        '# TYPE tidekv_requests gauge\ntidekv_requests{state="\x1b[2J[red]"} 1\n'
        '# TYPE tidekv_prefill_pages gauge\ntidekv_prefill_pages{prefill="p\\nforged"} 1\n'
        '# TYPE tidekv_pool_pages gauge\ntidekv_pool_pages{condition="free",pool="device"} 1\n'
    )

    class Metrics(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Metrics) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        now = scrape(f"127.0.0.1:{server.server_port}")
        server.shutdown()
        thread.join()
    console = Console(width=160, file=io.StringIO())
    console.print(show(now, None, 0.0))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "\\x1b[2J[red]" in shown and "\x1b" not in shown
    assert "p\\nforged" in shown
