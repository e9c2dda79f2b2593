"""The Grafana dashboard and the alert rules: their metrics exist, and a real Prometheus accepts every query."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.ports import free_address
from tests.support.waits import LIMIT_S
from tidekv.engine.metrics.collector import CONDITIONS, POOLS
from tools.grafana_dashboard import COLUMNS, dashboard, dashboard_text
from tools.metrics_page import metric_families

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "docs" / "alerts.yaml"
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool: apt-get install prometheus")
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no Prometheus: apt-get install prometheus"
)


def panels() -> list[dict[str, Any]]:
    """All panels of the dashboard; those of collapsed rows, too, and the rows themselves."""
    outer: list[Any] = dashboard()["panels"]  # type: ignore[assignment]  # Of JSON.
    return [panel for row in outer for panel in (row, *row.get("panels", ()))]


def queries() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel.get("targets", ())]


def samples() -> set[str]:
    """Names of all time series of the collector."""
    names: set[str] = set()
    for family in metric_families():
        endings = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}.get(family.type, ("",))
        names |= {family.name + ending for ending in endings}
    return names


def names_in(query: str) -> set[str]:
    return set(re.findall(r"tidekv_[a-z_]+", query))


def test_dashboard_in_docs_is_generated() -> None:
    text = (ROOT / "docs" / "grafana.json").read_text()
    assert text == dashboard_text(), "python -m tools.grafana_dashboard > docs/grafana.json"


def test_dashboard_shows_every_metric_and_no_other() -> None:
    asked = set().union(*map(names_in, queries()))
    assert asked <= samples()
    shown = {re.sub(r"_(total|bucket|count|sum)$", "", name) for name in asked}
    # A metric that no panel uses, and the core's live request count.
    assert {family.name for family in metric_families()} - shown == {"tidekv_poller_rounds", "tidekv_live"}


def test_alerts_ask_for_metrics_and_labels_that_exist() -> None:
    for rule in RULES:
        assert names_in(rule["expr"]) <= samples(), rule["alert"]
    for query in [*queries(), *(rule["expr"] for rule in RULES)]:
        for value in re.findall(r'condition=~?"([^"]+)"', query):
            assert set(value.split("|")) <= set(CONDITIONS), query
        for value in re.findall(r'pool="([^"]+)"', query):
            assert value in POOLS, query


def test_every_alert_says_what_is_wrong_and_where() -> None:
    for rule in RULES:
        assert rule["alert"].startswith("Tidekv")
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert "$labels.instance" in rule["annotations"]["summary"], rule["alert"]
        assert rule["annotations"]["description"].endswith(".")
    assert len({rule["alert"] for rule in RULES}) == len(RULES)


def test_every_panel_has_a_description_and_its_own_place() -> None:
    taken: set[tuple[int, int]] = set()
    shown = panels()
    assert [panel["title"] for panel in shown if panel["type"] == "stat"][:2] == ["Requests", "Hit rate"]
    assert [panel["type"] for panel in shown].count("row") >= 5
    assert len({panel["id"] for panel in shown}) == len(shown)
    for panel in shown:
        if panel["type"] == "row":
            continue
        assert panel["description"].endswith("."), panel["title"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= COLUMNS
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
        for target in panel["targets"]:
            assert 'instance=~"$instance"' in target["expr"], panel["title"]
    (_, instance) = dashboard()["templating"]["list"]  # type: ignore[index]  # Of JSON.
    assert (instance["name"], instance["includeAll"]) == ("instance", True)


@needs_promtool
def test_promtool_accepts_the_rules_and_they_fire_when_they_should() -> None:
    for command in (
        ["check", "rules", str(ALERTS)],
        ["test", "rules", str(Path(__file__).with_name("alerts_test.yaml"))],
    ):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
async def test_a_real_prometheus_scrapes_a_worker_and_answers_every_query(make_pair, tmp_path: Path) -> None:
    address = free_address()
    async with make_pair(metrics_listen="127.0.0.1:0") as pair:
        await pair.finish(await pair.restore("r1", list(range(20))), list(range(20)), [1, 2])
        await pair.engine.wait_settled()
        targets = {"job_name": "tidekv", "static_configs": [{"targets": [pair.engine.metrics_address]}]}
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(ALERTS)],
            "scrape_configs": [targets],
        }
        (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML.
        command = [
            "prometheus",
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address={address}",
        ]
        with (tmp_path / "log").open("w") as log:
            process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
        try:
            async with asyncio.timeout(LIMIT_S):
                arrived = "sum(tidekv_requests_arrived_total)"
                while [sample["value"][1] for sample in await answers(address, arrived)] != ["1"]:
                    assert process.returncode is None, (tmp_path / "log").read_text()
                    await asyncio.sleep(0.2)
                for query in queries():
                    await answers(address, query.replace("$instance", ".*").replace("$__rate_interval", "5m"))
                rules: list[Any] = []
                while not rules or {rule["health"] for rule in rules} == {"unknown"}:
                    found = await ask(address, "rules", {})
                    rules = [rule for group in found["data"]["groups"] for rule in group["rules"]]
                    await asyncio.sleep(0.2)
                assert [rule["name"] for rule in rules] == [rule["alert"] for rule in RULES]
                assert not [rule["lastError"] for rule in rules if rule.get("lastError")]
                assert not [rule["name"] for rule in rules if rule["state"] == "firing"]
        finally:
            process.terminate()
            await process.wait()


async def ask(address: str, path: str, fields: dict[str, str]) -> Any:
    """Ask Prometheus' API. An answer that is not 200 raises, with the reason in its body."""

    def get() -> Any:
        url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(fields)}"
        with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
            return json.loads(answer.read())

    return await asyncio.to_thread(get)


async def answers(address: str, query: str) -> list[Any]:
    try:
        found: list[Any] = (await ask(address, "query", {"query": query}))["data"]["result"]
    except urllib.error.HTTPError as error:
        if error.code == 503:
            return []  # Prometheus is starting.
        raise AssertionError(f"{query}: {error.read().decode()}") from error
    except urllib.error.URLError:
        return []  # Prometheus does not listen yet.
    return found
