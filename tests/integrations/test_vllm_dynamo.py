"""Dynamo's vLLM worker knows the connector."""

from __future__ import annotations

import importlib
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from tidekv.engine.integrations.vllm import dynamo

ROOT = Path(__file__).resolve().parents[2]


class Protocol:
    """As Dynamo's of NixlConnector."""


def table(monkeypatch: pytest.MonkeyPatch, **names: object) -> ModuleType:
    module = ModuleType(dynamo.TABLE)
    module.__dict__.update(names)
    monkeypatch.setitem(sys.modules, dynamo.TABLE, module)
    return module


def test_the_connector_hands_over_as_that_of_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    protocols: dict[str, type] = {"NixlConnector": Protocol}
    table(monkeypatch, KV_CONNECTOR_PROTOCOLS=protocols, NixlConnectorProtocol=Protocol)
    dynamo.register()
    assert protocols == {"NixlConnector": Protocol, "TidekvConnector": Protocol}


def test_an_entry_of_dynamos_own_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    protocols: dict[str, type] = {"TidekvConnector": int}
    table(monkeypatch, KV_CONNECTOR_PROTOCOLS=protocols, NixlConnectorProtocol=Protocol)
    dynamo.register()
    assert protocols == {"TidekvConnector": int}


def test_without_dynamo_or_with_another_table_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, dynamo.TABLE, raising=False)
    dynamo.register()
    table(monkeypatch)
    dynamo.register()


def test_vllm_finds_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["tidekv"].partition(":")
    assert getattr(importlib.import_module(module), name) is dynamo.register
