"""Generator of the list of metrics in docs/observability.md: `python -m tools.metrics_page docs/observability.md`.

Only the part between the two marks is replaced.
"""

from __future__ import annotations

import sys
from pathlib import Path

from prometheus_client.core import Metric

from tidekv.engine.metrics.collector import MetricsCollector
from tidekv.engine.metrics.fold import Histogram, MetricsFold
from tidekv.engine.metrics.prefill_collector import PrefillCollector
from tidekv.engine.trace.causes import EXTENDED
from tidekv.states.core import Core
from tidekv.states.records.causes import DECLINED
from tidekv.states.settings import CoreSettings

BEGIN = "<!-- All metrics, from the code: python -m tools.metrics_page docs/observability.md -->"
END = "<!-- End of all metrics. -->"
LABELS = {
    "outcome": "ready, or the cause of a failure; of a room: received, lease ended, aborted, replaced, failed, closed",
    "source": "l1, l2, l3, transfer, recompute",
    "cause": "why the pages were not restored here; of a room: a cause of `tidekv.PrefillCause`, or its outcome",
    "rule": "a function of `tidekv.states`, as `Class.method`",
    "call": "query, fetch, store, probe, copy_to_device, copy_to_host, recompute",
    "state": "a state of the request machine; of a room: pending, sending, finished, draining",
    "condition": "free, owned, cached (evictable, or protected by requests and transfers), draining, total",
    "name": "a number of `DecodeEngine.statistics()`, or of `PrefillPeer.statistics()`",
}
"""Values of labels that their metric does not explain."""


def metric_families() -> list[Metric]:
    """Return all families that an engine can export, without a running engine."""
    fold = MetricsFold(Core(CoreSettings(page_size=1, key_bytes=4, device_pages=1)))
    pollers = {"cpu_s": 0.0, "poll_rounds": 0}
    collector = MetricsCollector(
        fold,
        page_bytes=1,
        statistics=lambda: {"poller": pollers, "storage_poller": pollers},
        loop_lag=Histogram(),
        vote_s=Histogram(),
    )
    return list(collector.collect())


def prefill_families() -> list[Metric]:
    """Return all families that a prefill worker can export, without a running one."""
    return list(PrefillCollector(dict, ended={}, aborts={}, write_s=Histogram(), loop_lag=Histogram()).collect())


def metrics_table() -> str:
    """Return the families of decode and of prefill in the order of a scrape, then the tables of labels and causes."""
    lines = [*_rows(metric_families()), "", "Of a prefill worker:", "", *_rows(prefill_families())]
    lines += ["", "| label | values |", "|---|---|"]
    lines += [f"| {label} | {words} |" for label, words in LABELS.items()]
    lines += [
        "",
        "Causes of `tidekv_cuts_total` and `tidekv_declined_pages_total`:",
        "",
        "| cause | meaning |",
        "|---|---|",
    ]
    of_components = ("component_", "end_")
    lines += [
        f"| {cause} | {words} |"
        for cause, words in {**EXTENDED, **DECLINED}.items()
        if not cause.startswith(of_components)
    ]
    lines += [
        "",
        "`component_…` and `end_…` are the same causes for windows and states, own and shared ones.",
    ]
    return "\n".join(lines)


def _rows(families: list[Metric]) -> list[str]:
    lines = ["| metric and its labels | meaning |", "|---|---|"]
    for family in families:
        name = family.name + ("_total" if family.type == "counter" else "")
        # prometheus_client has no public accessor for the names of labels.
        labels = ",".join(getattr(family, "_labelnames", ()))
        lines.append(f"| `{name}{f'{{{labels}}}' if labels else ''}` | {family.documentation} |")
    return lines


def with_metrics(page: str) -> str:
    """Return the page with the current list."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{metrics_table()}\n\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_metrics(path.read_text()))
