"""Generator of the Grafana dashboard: `python -m tools.grafana_dashboard > docs/grafana.json`."""

from __future__ import annotations

import json
import sys
from dataclasses import KW_ONLY, dataclass
from itertools import count

QUANTILES = (0.5, 0.9, 0.99)
COLUMNS = 24
HERE = 'instance=~"$instance"'
"""Selector of the workers that are chosen at the top of the dashboard."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `targets`: query and legend of each line."""

    title: str
    description: str
    unit: str
    targets: list[tuple[str, str]]
    _: KW_ONLY
    kind: str = "timeseries"
    width: int = 12
    stacked: bool = False
    limits: tuple[tuple[str, float], ...] = ()
    """Colors from these values on; green below them."""


def _stat(title: str, description: str, unit: str, query: str, limits: tuple[tuple[str, float], ...] = ()) -> Panel:
    return Panel(title, description, unit, [(query, "")], kind="stat", width=4, limits=limits)


def _per_second(metric: str, label: str, *, only: str = "") -> list[tuple[str, str]]:
    selector = f"{HERE}, {only}" if only else HERE
    return [(f"sum by ({label}) (rate({metric}{{{selector}}}[$__rate_interval]))", f"{{{{{label}}}}}")]


def _quantiles(metric: str, label: str) -> list[tuple[str, str]]:
    return [(_quantile(quantile, metric, label), f"{{{{{label}}}}} p{quantile * 100:g}") for quantile in QUANTILES]


def _quantile(quantile: float, metric: str, label: str = "") -> str:
    labels = f"le, {label}" if label else "le"
    return f"histogram_quantile({quantile}, sum by ({labels}) (rate({metric}_bucket{{{HERE}}}[$__rate_interval])))"


def _pages(metric: str, label: str, only: str) -> list[tuple[str, str]]:
    return [(f"sum by ({label}) ({metric}{{{HERE}, {only}}})", f"{{{{{label}}}}}")]


TOKENS = f"rate(tidekv_tokens_total{{{HERE}}}[$__rate_interval])"
CACHED_TOKENS = f'rate(tidekv_tokens_total{{{HERE}, source=~"l1|l2|l3"}}[$__rate_interval])'
HIT_RATE = f"sum({CACHED_TOKENS}) / sum({TOKENS})"
ENDED = f"rate(tidekv_requests_ended_total{{{HERE}}}[$__rate_interval])"
FAILED = f'rate(tidekv_requests_ended_total{{{HERE}, outcome!="ready"}}[$__rate_interval])'
USE = 'condition=~"free|owned|evictable|protected|draining"'

ROWS: dict[str, tuple[Panel, ...]] = {
    "Overview": (
        _stat(
            "Requests",
            "Requests per second that asked for a restore.",
            "reqps",
            f"sum(rate(tidekv_requests_arrived_total{{{HERE}}}[$__rate_interval]))",
        ),
        _stat(
            "Hit rate",
            "Share of prompt tokens restored from device, host or storage, which prefill did not send.",
            "percentunit",
            HIT_RATE,
        ),
        _stat(
            "Restore, p50",
            "Median time from arrival to READY.",
            "s",
            _quantile(0.5, "tidekv_ready_seconds"),
            (("orange", 0.5), ("red", 2)),
        ),
        _stat(
            "Restore, p99",
            "99th percentile of the time from arrival to READY.",
            "s",
            _quantile(0.99, "tidekv_ready_seconds"),
            (("orange", 1), ("red", 5)),
        ),
        _stat(
            "Failed restores",
            "Share of restores that ended in a failure. A failed cache tier alone fails no restore.",
            "percentunit",
            f"(sum({FAILED}) or vector(0)) / sum({ENDED})",
            (("orange", 0.001), ("red", 0.01)),
        ),
        _stat(
            "Device memory in use",
            "Share of device pages that cannot be had now: owned, draining, or cached and locked.",
            "percentunit",
            f'sum(tidekv_pool_pages{{{HERE}, pool="device", condition=~"owned|draining|protected"}})'
            f' / sum(tidekv_pool_pages{{{HERE}, pool="device", condition="total"}})',
            (("orange", 0.8), ("red", 0.95)),
        ),
    ),
    "Requests": (
        Panel(
            "Time to ready", "From arrival to READY, by quantile.", "s", _quantiles("tidekv_ready_seconds", "outcome")
        ),
        Panel(
            "Time in state",
            "Where restores wait: PREALLOC is memory, PREFETCH storage, LOCAL_RESTORE the copy, TRANSFER prefill.",
            "s",
            _quantiles("tidekv_state_seconds", "state"),
        ),
        Panel(
            "Requests by state",
            "Live requests. A growing PREALLOC means that device memory is short.",
            "short",
            [(f"sum by (state) (tidekv_requests{{{HERE}}})", "{{state}}")],
            stacked=True,
        ),
        Panel(
            "Restores by outcome",
            "Restores per second that are ready, or failed by cause (errors.md explains each cause).",
            "reqps",
            _per_second("tidekv_requests_ended_total", "outcome"),
        ),
    ),
    "Sources": (
        Panel(
            "Hit rate",
            "Share of prompt tokens by each tier, and by all together.",
            "percentunit",
            [
                (HIT_RATE, "all tiers"),
                (f"sum by (source) ({CACHED_TOKENS}) / scalar(sum({TOKENS}))", "{{source}}"),
            ],
        ),
        Panel(
            "Tokens by source",
            "Prompt tokens per second of READY requests.",
            "short",
            _per_second("tidekv_tokens_total", "source"),
            stacked=True,
        ),
        Panel(
            "Bytes by source",
            "KV bytes per second of READY requests.",
            "Bps",
            _per_second("tidekv_bytes_total", "source"),
            stacked=True,
        ),
        Panel(
            "Pages promised, asked, extended, delivered, wasted",
            "What prefill was promised and asked for. Much that is wasted means rooms that were left.",
            "short",
            _per_second("tidekv_pages_total", "what"),
        ),
        Panel(
            "Extends by cause",
            "Promises that were withdrawn, so that prefill sent more.",
            "short",
            _per_second("tidekv_cuts_total", "cause"),
        ),
        Panel(
            "Device pages withheld by prefill",
            "Pages that requests of each prefill hold before READY, and its quarantine. "
            "The quota is engine.admission.prefill_share.",
            "short",
            [(f"sum by (prefill) (tidekv_prefill_pages{{{HERE}}})", "{{prefill}}")],
        ),
    ),
    "Memory": (
        Panel(
            "Device pages",
            "Evictable pages are cached and can be had at once; protected ones are locked or pinned.",
            "short",
            _pages("tidekv_pool_pages", "condition", f'pool="device", {USE}'),
            stacked=True,
        ),
        Panel(
            "Host pages",
            "Evictable pages are cached and can be had at once; protected ones are locked or pinned.",
            "short",
            _pages("tidekv_pool_pages", "condition", f'pool="host", {USE}'),
            stacked=True,
        ),
        Panel(
            "Evicted pages",
            "Pages per second that left the index, by tier.",
            "short",
            _per_second("tidekv_evicted_pages_total", "tier"),
        ),
        Panel(
            "Pages evicted over a namespace's share",
            "Pages per second that a namespace lost because it was above engine.namespace_share.",
            "short",
            _per_second("tidekv_evicted_over_share_pages_total", "instance"),
        ),
    ),
    "Storage and copies": (
        Panel(
            "Copies and calls to storage",
            "Duration by kind of call and quantile.",
            "s",
            _quantiles("tidekv_call_seconds", "call"),
        ),
        Panel(
            "Failed copies and calls to storage",
            "Failures per second by kind of call. Restores go on by transfer.",
            "short",
            _per_second("tidekv_calls_failed_total", "call"),
        ),
        Panel(
            "Circuit breaker of storage",
            "1 while storage is not used because its calls failed or were too slow.",
            "bool",
            [(f"tidekv_storage_breaker_open{{{HERE}}}", "{{instance}}")],
        ),
        Panel(
            "Pages of storage declined by cause",
            "Pages that storage had and that were not fetched.",
            "short",
            _per_second("tidekv_declined_pages_total", "cause"),
        ),
        Panel(
            "Pages not asked of other decode workers by cause",
            "Pages that no tier had and no other decode worker was asked for; workers that hints named in vain.",
            "short",
            [
                *_per_second("tidekv_peer_declined_pages_total", "cause"),
                (f"rate(tidekv_peers_refused_total{{{HERE}}}[$__rate_interval])", "workers refused"),
            ],
        ),
    ),
    "Windows and states": (
        Panel(
            "Pages of components by pool",
            "Pages of sliding windows and records of states. Empty without components.",
            "short",
            [
                (
                    f"sum by (component, pool, condition) (tidekv_component_pool_pages{{{HERE}, {USE}}})",
                    "{{component}} {{pool}} {{condition}}",
                )
            ],
        ),
        Panel(
            "Pages of components asked, loaded, cloned, backed up, left",
            "Pages per second by component. Empty without components.",
            "short",
            [
                (
                    f"sum by (component, what) (rate(tidekv_component_pages_total{{{HERE}}}[$__rate_interval]))",
                    "{{component}} {{what}}",
                )
            ],
        ),
        Panel(
            "Snapshots of states kept, evicted, used",
            "Snapshots, prompts and computations that they served, tokens saved, per second. Empty without states.",
            "short",
            [
                (
                    f"sum by (component, what) (rate(tidekv_snapshots_total{{{HERE}}}[$__rate_interval]))",
                    "{{component}} {{what}}",
                )
            ],
        ),
    ),
    "Process": (
        Panel(
            "Lag of the event loop",
            "How late the loop was while there was work. Above 50 ms something blocks it.",
            "s",
            _quantiles("tidekv_loop_lag_seconds", "instance"),
        ),
        Panel(
            "CPU of the pollers",
            "Share of one core that each poller's thread uses.",
            "percentunit",
            _per_second("tidekv_poller_cpu_seconds_total", "poller"),
        ),
        Panel(
            "Rules that raised",
            "Always zero. Anything else is a bug of tidekv: please report it with the journal.",
            "short",
            _per_second("tidekv_raises_total", "rule"),
        ),
        Panel(
            "Votes of the ranks",
            "Time that ranks need to agree. Empty with one rank.",
            "s",
            _quantiles("tidekv_vote_seconds", "instance"),
        ),
        Panel("Events", "Events per second that the core took.", "short", _per_second("tidekv_events_total", "type")),
        Panel(
            "Counters of the core",
            "What the core counts of its own, per second.",
            "short",
            _per_second("tidekv_core_total", "what"),
        ),
        Panel(
            "Parts of the engine",
            "Numbers of DecodeEngine.statistics(), as they are.",
            "short",
            [(f"tidekv_engine{{{HERE}}}", "{{instance}} {{part}} {{name}}")],
            width=24,
        ),
    ),
}
ROW_HEIGHT, STAT_HEIGHT, PLOT_HEIGHT = 1, 4, 8
LATER = ("Windows and states", "Process")
"""Rows that are collapsed at first."""


def dashboard() -> dict[str, object]:
    """Return the dashboard in the form that Grafana imports."""
    ids = count(1)
    placed: list[dict[str, object]] = []
    y = 0
    for title, panels in ROWS.items():
        is_collapsed = title in LATER
        row: dict[str, object] = {
            "id": next(ids),
            "type": "row",
            "title": title,
            "collapsed": is_collapsed,
            "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": ROW_HEIGHT},
        }
        y += ROW_HEIGHT
        inner: list[dict[str, object]] = []
        x = 0
        for panel in panels:
            height = STAT_HEIGHT if panel.kind == "stat" else PLOT_HEIGHT
            inner.append(_panel(panel, next(ids), {"x": x, "y": y, "w": panel.width, "h": height}))
            x += panel.width
            if x + panel.width > COLUMNS:
                x, y = 0, y + height
        if x:
            y += height
        # Grafana keeps the panels of a collapsed row inside of it.
        placed += [row | {"panels": inner}] if is_collapsed else [row | {"panels": []}, *inner]
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    instance = {
        "name": "instance",
        "type": "query",
        "label": "Worker",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": "label_values(tidekv_requests_arrived_total, instance)", "refId": "instance"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
    return {
        "uid": "tidekv",
        "title": "tidekv",
        "description": "Decode workers with tidekv: restores, sources of KV, memory, storage, process.",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "graphTooltip": 1,
        "templating": {"list": [source, instance]},
        "panels": placed,
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, object]:
    defaults: dict[str, object] = {"unit": panel.unit}
    options: dict[str, object] = {}
    if panel.unit == "percentunit":
        defaults["min"] = 0
    if panel.kind == "stat":
        colors: list[dict[str, object]] = [{"color": "green", "value": None}]
        colors += [{"color": color, "value": value} for color, value in panel.limits]
        defaults |= {"thresholds": {"mode": "absolute", "steps": colors}, "noValue": "no data"}
        options = {"colorMode": "value", "graphMode": "area", "reduceOptions": {"calcs": ["lastNotNull"]}}
    else:
        custom: dict[str, object] = {"lineWidth": 1, "fillOpacity": 10}
        if panel.stacked:
            custom |= {"stacking": {"mode": "normal"}, "fillOpacity": 40}
        defaults["custom"] = custom
        options = {
            "tooltip": {"mode": "multi", "sort": "desc"},
            "legend": {"displayMode": "list", "placement": "bottom"},
        }
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": {"type": "prometheus", "uid": "${datasource}"},
                "expr": query,
                "legendFormat": legend,
            }
            for at, (query, legend) in enumerate(panel.targets)
        ],
    }


def dashboard_text() -> str:
    """Return the text of docs/grafana.json."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    sys.stdout.write(dashboard_text())
