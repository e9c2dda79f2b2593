"""Exceptions in rules of a running engine: the request falls back; log, metrics and caller see it."""

from __future__ import annotations

import asyncio
import logging
import urllib.request

import pytest

from tests.engine.test_fallback import PROMPT
from tidekv.states.backup.backups import Backups
from tidekv.states.prefix.index import PrefixIndex
from tidekv.states.request.restore import Restore


def raise_once(patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    original, raised = getattr(owner, name), list[bool]()

    def rule(*given: object, **named: object) -> object:
        if not raised:
            raised.append(True)
            raise ZeroDivisionError(f"{name} is broken")
        return original(*given, **named)

    patch.setattr(owner, name, rule)


def raises_logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Messages of the log about rules that raised; each has the exception's traceback."""
    records = [record for record in caplog.records if record.getMessage().startswith("a rule of the core raised")]
    assert all("Traceback (most recent call last)" in record.getMessage() for record in records)
    return [record.getMessage() for record in records]


async def test_a_fallback_by_raise_is_logged_once_counted_and_told(make_pair, monkeypatch, caplog) -> None:
    raise_once(monkeypatch, PrefixIndex, "insert")
    async with make_pair(metrics_listen="127.0.0.1:0", sharing_enabled=False) as pair:
        with caplog.at_level(logging.ERROR, logger="tidekv.engine"):
            ready = await pair.restore("r1", PROMPT)
            # Watchers of the step run behind the caller that it made READY.
            await asyncio.sleep(0)
        (fallback,) = ready.fallbacks
        assert (fallback.rule, fallback.gave_up) == ("Restore.commit", "cache")
        assert fallback.error == "ZeroDivisionError: insert is broken"
        (line,) = raises_logged(caplog)
        assert "the request falls back" in line
        assert "rule=Restore.commit request_id=r1" in line
        address = f"http://{pair.engine.metrics_address}/metrics"
        scraped = await asyncio.to_thread(lambda: urllib.request.urlopen(address, timeout=30).read().decode())
        assert 'tidekv_raises_total{rule="Restore.commit"} 1.0' in scraped
        assert pair.core()["device_cached"] == 0
        await pair.finish(ready, PROMPT, [1])
        assert pair.core()["device_cached"] == 10
        await pair.assert_nothing_held()


@pytest.mark.parametrize(("owner", "name"), [(Restore, "keep"), (Backups, "_begin")])
async def test_a_raise_while_a_request_is_finished_costs_its_backup_and_is_told(
    make_pair, monkeypatch, caplog, owner: type, name: str
) -> None:
    async with make_pair() as pair:
        ready = await pair.restore("r1", PROMPT)
        raise_once(monkeypatch, owner, name)
        with caplog.at_level(logging.ERROR, logger="tidekv.engine"):
            await pair.finish(ready, PROMPT, [1])
        (fallback,) = ready.fallbacks
        assert (fallback.gave_up, fallback.error) == ("backup", f"ZeroDivisionError: {name} is broken")
        assert len(raises_logged(caplog)) == 1
        await pair.engine.wait_settled()
        assert (pair.core()["device_cached"], pair.core()["host_cached"]) == (10, 0)
        await pair.assert_nothing_held()
