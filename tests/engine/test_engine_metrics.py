"""Metrics and journal never disagree: what is scraped is what a replay of the journal counts."""

from __future__ import annotations

import asyncio
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from tests.support.inside import core_of
from tests.support.waits import LIMIT_S
from tidekv import InvalidConfig, InvalidRequest, Replayer, RequestFailed, open_storage
from tidekv.engine.metrics import MetricsCollector, MetricsFold
from tidekv.engine.trace import top
from tools.metrics_page import metric_families, prefill_families, with_metrics

PROMPT = list(range(100, 122))
OF_THE_PROCESS = {
    "tidekv_engine",
    "tidekv_loop_lag_seconds",
    "tidekv_poller_cpu_seconds",
    "tidekv_poller_rounds",
}
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples_of(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if family.name not in OF_THE_PROCESS and not sample.name.endswith("_created")
    }


async def scrape(address: str) -> str:
    def get() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=LIMIT_S) as answer:
            text: str = answer.read().decode()
            return text

    return await asyncio.to_thread(get)


async def test_scrape_is_what_the_journal_counts(make_pair, tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    storage = open_storage("memory:?capacity=64MiB")
    async with make_pair(
        storage=storage, fetch_run_pages=2, device_pages=16, journal_path=str(path), metrics_listen="127.0.0.1:0"
    ) as pair:
        for turn in range(8):
            prompt = [*PROMPT[: 8 + turn], turn, *range(300 + turn % 3, 310 + turn % 3)]
            ready = await pair.restore(f"r{turn}", prompt)
            await pair.finish(ready, prompt, [1, 2, 3, 4, 5, turn])
            await pair.engine.wait_settled()
            if turn % 3 == 2:
                await pair.engine.flush(("l1", "l2") if turn == 5 else ("l1",))
        aborted = asyncio.ensure_future(pair.restore("aborted", PROMPT))
        await asyncio.sleep(0)
        await pair.engine.abort("aborted")
        with pytest.raises(RequestFailed):
            await aborted
        await pair.engine.wait_settled()
        assert pair.engine.metrics_address is not None
        text = await scrape(pair.engine.metrics_address)
        seen = await asyncio.to_thread(top.scrape, pair.engine.metrics_address)
    scraped = samples_of(text)
    assert 'tidekv_engine{name="' in text
    console = Console(width=160)
    with console.capture() as capture:
        console.print(top.show(seen, seen, 1.0))
    assert "device" in capture.get()
    assert "ready" in capture.get()

    replayer = Replayer(path)
    fold = MetricsFold(replayer.core)
    for step in replayer.steps():
        fold.stepped(step.event, step.commands, step.error)
    registry = CollectorRegistry()
    registry.register(MetricsCollector(fold, page_bytes=int(str(replayer.header.layout["page_bytes"]))))
    assert samples_of(generate_latest(registry).decode()) == scraped

    # And they are what happened; test_metrics_and_journal counts all of it once more without the fold.
    for source in ("l1", "l2", "l3", "transfer"):
        assert scraped["tidekv_tokens_total", (("source", source),)] > 0
    assert scraped["tidekv_requests_ended_total", (("outcome", "ready"),)] == 8
    assert scraped["tidekv_requests_ended_total", (("outcome", "aborted"),)] == 1
    assert scraped["tidekv_requests_arrived_total", ()] == 9
    assert scraped["tidekv_ready_seconds_count", (("outcome", "ready"),)] == 8


async def test_gauges_are_what_is_held_at_that_moment(make_pair) -> None:
    """Each above 0, and each another number: a gauge of another pool, state or prefill would show."""
    async with make_pair(device_pages=32, host_pages=32, metrics_listen="127.0.0.1:0") as pair:
        reached, opened = asyncio.Event(), asyncio.Event()
        ready = await pair.restore("cached", PROMPT)
        await pair.finish(ready, PROMPT, [])
        await pair.engine.wait_settled()
        held = [await pair.restore(f"ready {first}", list(range(first, first + 10))) for first in (500, 550)]

        async def hold(writer: str, target: str, pages: int) -> None:
            reached.set()
            await opened.wait()

        pair.network.before_write = hold
        waiting = asyncio.ensure_future(pair.restore("waits", list(range(700, 730))))
        async with asyncio.timeout(LIMIT_S):
            await reached.wait()
        found = samples_of(await scrape(pair.engine.metrics_address))
        core, withheld = pair.core(), core_of(pair.engine).state.quota.held["prefill"]
        opened.set()
        held.append(await waiting)

        def gauge(name: str, **labels: str) -> float:
            return found[name, tuple(sorted(labels.items()))]

        for pool in ("device", "host"):
            for condition in ("owned", "cached", "evictable", "free"):
                assert gauge("tidekv_pool_pages", pool=pool, condition=condition) == core[f"{pool}_{condition}"]
        assert gauge("tidekv_pool_pages", pool="device", condition="owned") > 0
        assert gauge("tidekv_pool_pages", pool="host", condition="cached") == 5
        assert gauge("tidekv_pool_pages", pool="device", condition="free") != core["host_free"]
        assert gauge("tidekv_requests", state="READY") == 2 and gauge("tidekv_requests", state="TRANSFER") == 1
        assert gauge("tidekv_prefill_pages", prefill="prefill") == withheld >= 8
        for each in held:
            await pair.engine.finish(each)


async def test_without_metrics_nothing_listens(make_pair) -> None:
    async with make_pair() as pair:
        assert pair.engine.metrics_address is None


@pytest.mark.parametrize("listen", ["nowhere", ":9000", "127.0.0.1:x", "127.0.0.1:99999", "256.0.0.1:80"])
async def test_wrong_address_is_named(make_pair, listen: str) -> None:
    with pytest.raises(InvalidConfig, match=r"listen must be host:port|metrics cannot be served"):
        async with make_pair(metrics_listen=listen):
            pass


def test_top_of_nobody_is_one_clear_error() -> None:
    with pytest.raises(InvalidRequest, match="no engine answers"):
        top.scrape("127.0.0.1:9")


def test_list_of_metrics_in_docs_is_generated() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "observability.md").read_text()
    assert page == with_metrics(page), "python -m tools.metrics_page docs/observability.md"
    assert page.count("| `tidekv_") == len(metric_families()) + len(prefill_families())


def test_the_name_of_a_metric_tells_its_type_as_the_page_says() -> None:
    for family in (*metric_families(), *prefill_families()):
        ends = {"counter": True, "histogram": family.name.endswith("_seconds")}
        assert ends.get(family.type, not family.name.endswith("_seconds")), family.name
