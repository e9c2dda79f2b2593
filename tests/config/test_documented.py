"""Every option is documented and in the schema; the page and the known flags match the options."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.support.waits import LIMIT_S
from tidekv.engine.cli.main import app
from tidekv.engine.cli.usage import run_app
from tidekv.engine.config import Configuration
from tidekv.engine.config.engine_config import EngineConfig
from tidekv.engine.config.options import Option, all_options, section_types
from tidekv.engine.config.schema import json_schema
from tidekv.states.validation import allowed
from tools.config_page import MORE, configuration_page

ROOT = Path(__file__).resolve().parent.parent.parent


def run(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tidekv", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={
            "PATH": "/usr/bin:/bin",
            "COLUMNS": "200",
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            **(environment or {}),
        },
    )


def run_here(capsys: pytest.CaptureFixture[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, with its environment."""
    code = run_app(app, arguments)
    said = capsys.readouterr()
    return subprocess.CompletedProcess(arguments, code, said.out, said.err)


def test_the_page_is_written_from_the_code() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == configuration_page(), (
        "run: python -m tools.config_page > docs/configuration.md"
    )
    assert set(MORE) <= set(all_options())


@pytest.mark.parametrize("option", all_options().values(), ids=lambda option: option.path)
def test_every_option_has_an_effect_a_type_and_a_unit_where_its_name_has_one(option: Option) -> None:
    assert option.effect.endswith((".", ".)")), f"{option.path} needs a docstring below it that is a sentence"
    assert allowed(option.type)
    if isinstance(option.default, float):
        assert option.unit, f"{option.path} needs a unit"


def test_every_field_of_the_engine_is_an_option() -> None:
    ours = {option.name for option in all_options().values() if option.section == "engine"}
    groups = {section.rpartition(".")[2] for section in section_types() if section.startswith("engine.")}
    assert ours | groups == set(EngineConfig.__struct_fields__)
    assert not ours & groups


def test_the_schema_has_every_option_with_its_effect_and_default() -> None:
    schema = json.loads(json.dumps(json_schema()))
    root = schema["$defs"]["Configuration"]["properties"]
    for option in all_options().values():
        section = schema["$defs"]["Configuration"]
        for name in option.section.split("."):
            section = schema["$defs"][re.search(r"'#/\$defs/(\w+)'", str(section["properties"][name]))[1]]
        described = section["properties"][option.name]
        assert option.effect in described["description"]
        if option.default not in ({}, {"UCX": {}}):
            assert described["default"] == json.loads(json.dumps(msgspec.to_builtins(option.default)))
    assert schema["$defs"]["Configuration"]["additionalProperties"] is False
    assert set(root) == set(Configuration.__struct_fields__)


def test_the_command_shows_checks_and_prints_the_schema(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "worker.toml"
    file.write_text('[engine.admission]\nqueue_max = 7\n[transport]\nsecret = "hush"\n')
    shown = run("config", "show", "--config", str(file), "--json", environment={"TIDEKV_ENGINE_PEER_ATTEMPTS": "3"})
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert found["engine.admission.queue_max"] == {"value": 7, "from": f"{file}:2"}
    assert found["engine.peer.attempts"] == {"value": 3, "from": "environment variable TIDEKV_ENGINE_PEER_ATTEMPTS"}
    assert found["engine.admission.ageing_s"] == {"value": 5.0, "from": "default"}
    assert set(found) == set(all_options())
    assert "hush" not in shown.stdout
    named = ("--set", "transport.name=[red]one", "--set", "prefill.listen=[::1]:7000")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TIDEKV_CONFIG", str(file))
    table = run_here(capsys, "config", "show", "--given", *named)
    monkeypatch.delenv("TIDEKV_CONFIG")
    assert "[red]one" in table.stdout
    assert "[::1]:7000" in table.stdout
    assert "engine.admission.queue_max" in table.stdout
    assert "engine.admission.ageing_s" not in table.stdout
    good = run_here(capsys, "config", "check", "--config", str(file))
    assert (good.returncode, good.stdout.strip()) == (0, "ok: 2 options are given, the others have their defaults")
    bad = run_here(capsys, "config", "check", "--set", "engine.admission.queue_max=0", "--set", "cache.l1=lots")
    assert bad.returncode == 2
    assert [re.split("[ :]+", line)[1] for line in bad.stderr.splitlines()] == [
        "engine.admission.queue_max",
        "cache.l1",
    ]
    assert json.loads(run_here(capsys, "config", "schema").stdout) == json.loads(json.dumps(json_schema()))


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_worker_does_not_start_with_a_mistake_and_names_all(side: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_here(
        capsys, side, "--set", "engine.admission.queue_max=0", "--page-size", "0", "--set", "engine.x.nothing=1"
    )
    assert found.returncode == 2
    assert (
        "engine.admission.queue_max must be a whole number, 1 or more, not '0' (--set engine.admission.queue_max)"
        in found.stderr
    )
    assert "cache.page_size must be a whole number, 1 or more, not 0 (--page-size)" in found.stderr
    assert "there is no option 'engine.x.nothing'" in found.stderr
    elsewhere = run_here(capsys, side, "--set", "engine.journal.path=/nowhere/run.journal")
    assert elsewhere.returncode == 2
    assert "there is no directory /nowhere" in elsewhere.stderr
