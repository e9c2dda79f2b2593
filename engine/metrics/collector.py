"""Metrics in the Prometheus data model, made on each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tidekv.engine.metrics.fold import BOUNDS_S, Histogram, MetricsFold
from tidekv.states.records.stages import State

POOLS = ("device", "host")
CONDITIONS = ("free", "owned", "cached", "draining", "total", "evictable", "protected")
LIVE = (
    "queue", "loads", "lookahead_pages", "backups", "offers", "operations", "rooms", "rooms_draining",
    "requests_retracted", "requests_returning", "requests_running", "hint_pinned_pages", "pages_to_store",
    "shared_pages", "peer_pages_in_flight",
)  # fmt: skip
POLLERS = {"poller": "transport", "storage_poller": "storage"}


class MetricsCollector(Collector):
    """Collector for a `prometheus_client.CollectorRegistry`.

    `page_bytes` turns pages into bytes. `statistics` are those of a running engine that no event carries: poller,
    copies, storage, ranks; `loop_lag` is the measured lateness of the loop, `vote_s` the duration of votes.
    A scrape may come from any thread: it copies what it reads, and a number may be one step newer than its neighbor.
    """

    def __init__(
        self,
        fold: MetricsFold,
        *,
        page_bytes: int = 0,
        statistics: Callable[[], Mapping[str, object]] | None = None,
        loop_lag: Histogram | None = None,
        vote_s: Histogram | None = None,
    ) -> None:
        self._fold = fold
        self._page_bytes = page_bytes
        self._statistics = statistics
        self._loop_lag = loop_lag
        self._vote_s = vote_s

    def collect(self) -> Iterator[Metric]:
        """Return all families, always in the same order."""
        fold = self._fold
        yield CounterMetricFamily("tidekv_requests_arrived", "Requests that asked for a restore.", value=fold.arrived)
        yield labeled_counter(
            "tidekv_requests_ended", "Restores by outcome: ready, or the cause.", "outcome", fold.ended
        )
        yield labeled_counter("tidekv_tokens", "Prompt tokens of READY requests by source.", "source", fold.tokens)
        if self._page_bytes:
            token_bytes = self._page_bytes / fold.core.settings.page_size
            sized = {source: tokens * token_bytes for source, tokens in fold.tokens.items()}
            yield labeled_counter("tidekv_bytes", "KV bytes of READY requests by source.", "source", sized)
        yield labeled_counter(
            "tidekv_pages",
            "Pages promised, asked of prefill, asked by extend, delivered, of them wasted in rooms that were left,"
            " fetched from storage, read from peers and by them, and stored.",
            "what",
            fold.pages,
        )
        components = CounterMetricFamily(
            "tidekv_component_pages",
            "Pages of windows and records of states, by what was done with them.",
            labels=("component", "what"),
        )
        for (component, what), count in sorted(dict(fold.component_pages).items()):
            components.add_metric((component, what), count)
        yield components
        snapshots = CounterMetricFamily(
            "tidekv_snapshots",
            "Snapshots of states: kept, declined, evicted and used, and the tokens whose computation they saved.",
            labels=("component", "what"),
        )
        rules = fold.core.component_pages
        for name, counts in sorted(({} if rules is None else rules.snapshots.statistics()).items()):
            for what, count in counts.items():
                snapshots.add_metric((name, what), count)
        yield snapshots
        yield labeled_counter("tidekv_cuts", "Extends by what had failed.", "cause", fold.cuts)
        yield labeled_counter(
            "tidekv_declined_pages", "Pages that storage or host memory had, not loaded.", "cause", fold.declined
        )
        yield labeled_counter(
            "tidekv_peer_declined_pages", "Pages that no tier had, not asked of peers.", "cause", fold.peer_declined
        )
        yield CounterMetricFamily(
            "tidekv_peers_refused", "Peers named by hints that may not be asked.", value=fold.peers_refused
        )
        yield labeled_counter("tidekv_raises", "Rules of the core that raised: each is a bug.", "rule", fold.raises)
        yield labeled_counter("tidekv_evicted_pages", "Pages that left the index, by tier.", "tier", fold.evicted)
        yield CounterMetricFamily(
            "tidekv_evicted_over_share_pages",
            "Pages evicted because their namespace was above its share.",
            value=fold.core.state.index.evicted_over_share,
        )
        yield labeled_counter("tidekv_events", "Events that the core took.", "type", fold.events)
        yield labeled_counter("tidekv_core", "What the core counts of its own.", "what", fold.core.state.counters)
        yield labeled_counter(
            "tidekv_calls_failed", "Copies, and calls to storage and peers, that failed.", "call", fold.calls_failed
        )
        yield _histograms("tidekv_state_seconds", "Time in each state.", "state", fold.state_s)
        yield _histograms(
            "tidekv_call_seconds", "Copies, and calls to storage and peers, by kind.", "call", fold.calls_s
        )
        yield _histograms("tidekv_ready_seconds", "From arrival to READY.", "outcome", {"ready": fold.ready_s})
        yield from self._gauges()

    def _gauges(self) -> Iterator[Metric]:
        counts = self._fold.core.statistics()
        pools = GaugeMetricFamily("tidekv_pool_pages", "Pages by pool and condition.", labels=("pool", "condition"))
        for pool in POOLS:
            for condition in CONDITIONS:
                pools.add_metric((pool, condition), counts[f"{pool}_{condition}"])
        yield pools
        component_pages = GaugeMetricFamily(
            "tidekv_component_pool_pages",
            "Pages of windows and records of states by pool and condition.",
            labels=("component", "pool", "condition"),
        )
        for component in self._fold.core.settings.components:
            for pool in POOLS:
                for condition in CONDITIONS:
                    component_pages.add_metric(
                        (component.name, pool, condition), counts[f"{component.name}_{pool}_{condition}"]
                    )
        yield component_pages
        prefills = GaugeMetricFamily(
            "tidekv_prefill_pages",
            "Device pages withheld by requests of each prefill before READY, and by its quarantine.",
            labels=("prefill",),
        )
        for prefill, pages in sorted(dict(self._fold.core.state.quota.held).items()):
            prefills.add_metric((prefill,), pages)
        yield prefills
        requests = GaugeMetricFamily("tidekv_requests", "Live requests by state.", labels=("state",))
        for state in State:
            if state is not State.FAILED:
                requests.add_metric((state.value,), counts[f"requests_{state.value.lower()}"])
        yield requests
        live = GaugeMetricFamily("tidekv_live", "What else is live in the core.", labels=("what",))
        for name in LIVE:
            live.add_metric((name,), counts[name])
        yield live
        yield GaugeMetricFamily(
            "tidekv_storage_breaker_open",
            "1 while the breaker is open and storage is not used.",
            value=counts["l3_breaker_open"],
        )
        if self._loop_lag is not None:
            yield one_histogram(
                "tidekv_loop_lag_seconds", "How late the event loop was, while there was work.", self._loop_lag
            )
        if self._vote_s is not None:
            yield one_histogram(
                "tidekv_vote_seconds", "From this rank's casting its vote to the answer of all ranks.", self._vote_s
            )
        if self._statistics is not None:
            statistics = self._statistics()
            yield from _pollers(statistics)
            engine = GaugeMetricFamily(
                "tidekv_engine", "Statistics of the engine's parts, as they are.", labels=("part", "name")
            )
            for part, name, value in _numbers(statistics):
                engine.add_metric((part, name), value)
            yield engine


def labeled_counter(name: str, help_text: str, label: str, values: Mapping[str, float]) -> Metric:
    """Return a family with one counter for each value of a label."""
    family = CounterMetricFamily(name, help_text, labels=(label,))
    for key, value in sorted(dict(values).items()):
        family.add_metric((key,), value)
    return family


def _histograms(name: str, help_text: str, label: str, values: Mapping[str, Histogram]) -> Metric:
    family = HistogramMetricFamily(name, help_text, labels=(label,))
    for key, histogram in sorted(dict(values).items()):
        family.add_metric((key,), _buckets(histogram), histogram.sum_s)
    return family


def one_histogram(name: str, help_text: str, histogram: Histogram) -> Metric:
    """Return a family of one histogram without labels."""
    return HistogramMetricFamily(name, help_text, buckets=_buckets(histogram), sum_value=histogram.sum_s)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return cumulative counts, by upper bound."""
    total = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), histogram.buckets, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets


def _pollers(statistics: Mapping[str, object]) -> Iterator[Metric]:
    cpu = CounterMetricFamily("tidekv_poller_cpu_seconds", "CPU time of the pollers' threads.", labels=("poller",))
    rounds = CounterMetricFamily(
        "tidekv_poller_rounds", "Looks of the pollers at what is in flight.", labels=("poller",)
    )
    for part, name in POLLERS.items():
        values = statistics.get(part)
        if isinstance(values, Mapping):
            cpu.add_metric((name,), values["cpu_s"])
            rounds.add_metric((name,), values["poll_rounds"])
    yield cpu
    yield rounds


def _numbers(statistics: Mapping[str, object]) -> Iterator[tuple[str, str, float]]:
    """Yield every number in the statistics, by part and name; those of the core have metrics of their own."""
    for part, values in statistics.items():
        if part in ("core", "prefill_pages"):
            continue
        if isinstance(values, bool | int | float):
            yield "engine", part, values
        elif isinstance(values, Mapping):
            for name, value in values.items():
                if isinstance(value, bool | int | float):
                    yield part, str(name), value
                elif isinstance(value, Mapping):
                    for cause, count in value.items():
                        if isinstance(count, bool | int | float):
                            yield part, f"{name}_{cause}", count
