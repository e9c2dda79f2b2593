"""Generator of the Grafana dashboard: `python -m tools.grafana_dashboard > docs/grafana.json`."""

from __future__ import annotations

import json
import sys

QUANTILES = (0.5, 0.9, 0.99)
COLUMNS, WIDTH, HEIGHT = 2, 12, 8


def _rate(metric: str, label: str) -> list[tuple[str, str]]:
    return [(f"sum by ({label}) (rate({metric}[$__rate_interval]))", f"{{{{{label}}}}}")]


def _quantiles(metric: str, label: str) -> list[tuple[str, str]]:
    return [
        (
            f"histogram_quantile({quantile}, sum by (le, {label}) (rate({metric}_bucket[$__rate_interval])))",
            f"{{{{{label}}}}} p{quantile * 100:g}",
        )
        for quantile in QUANTILES
    ]


PANELS: tuple[tuple[str, str, list[tuple[str, str]]], ...] = (
    ("Time to ready", "s", _quantiles("tidekv_ready_seconds", "outcome")),
    ("Time in state", "s", _quantiles("tidekv_state_seconds", "state")),
    ("Tokens by source", "short", _rate("tidekv_tokens_total", "source")),
    ("Bytes by source", "Bps", _rate("tidekv_bytes_total", "source")),
    ("Pages promised, asked, extended, delivered, wasted", "short", _rate("tidekv_pages_total", "what")),
    ("Extends by cause", "short", _rate("tidekv_cuts_total", "cause")),
    ("Pages of storage declined by cause", "short", _rate("tidekv_declined_pages_total", "cause")),
    ("Circuit breaker of storage", "bool", [("tidekv_storage_breaker_open", "open")]),
    ("Device pages", "short", [('tidekv_pool_pages{pool="device"}', "{{condition}}")]),
    ("Host pages", "short", [('tidekv_pool_pages{pool="host"}', "{{condition}}")]),
    ("Pages of components by pool", "short", [("tidekv_component_pool_pages", "{{component}} {{pool}} {{condition}}")]),
    (
        "Pages of components asked, loaded, cloned, backed up, left",
        "short",
        [("sum by (component, what) (rate(tidekv_component_pages_total[$__rate_interval]))", "{{component}} {{what}}")],
    ),
    ("Requests by state", "short", [("tidekv_requests", "{{state}}")]),
    ("Restores by outcome", "short", _rate("tidekv_requests_ended_total", "outcome")),
    ("Copies and calls to storage", "s", _quantiles("tidekv_call_seconds", "call")),
    ("Failed copies and calls to storage", "short", _rate("tidekv_calls_failed_total", "call")),
    ("Evicted pages", "short", _rate("tidekv_evicted_pages_total", "tier")),
    ("Pages evicted over a namespace's share", "short", _rate("tidekv_evicted_over_share_pages_total", "instance")),
    ("Device pages withheld by prefill", "short", [("tidekv_prefill_pages", "{{prefill}}")]),
    ("Counters of the core", "short", _rate("tidekv_core_total", "what")),
    ("Rules that raised", "short", _rate("tidekv_raises_total", "rule")),
    ("Events", "short", _rate("tidekv_events_total", "type")),
    ("Lag of the event loop", "s", _quantiles("tidekv_loop_lag_seconds", "instance")),
    ("Votes of the ranks", "s", _quantiles("tidekv_vote_seconds", "instance")),
    ("CPU of the pollers", "percentunit", _rate("tidekv_poller_cpu_seconds_total", "poller")),
    ("Parts of the engine", "short", [("tidekv_engine", "{{part}} {{name}}")]),
)


def dashboard() -> dict[str, object]:
    """Return the dashboard in the form that Grafana imports."""
    panels = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": title,
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "gridPos": {"x": number % COLUMNS * WIDTH, "y": number // COLUMNS * HEIGHT, "w": WIDTH, "h": HEIGHT},
            "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
            "targets": [
                {"refId": chr(ord("A") + at), "expr": query, "legendFormat": legend}
                for at, (query, legend) in enumerate(targets)
            ],
        }
        for number, (title, unit, targets) in enumerate(PANELS)
    ]
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    return {
        "uid": "tidekv",
        "title": "tidekv",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source]},
        "panels": panels,
    }


def dashboard_text() -> str:
    """Return the text of docs/grafana.json."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    sys.stdout.write(dashboard_text())
