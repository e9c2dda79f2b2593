"""The journal as records in the application's own log: read between other lines, in any order, over rotated files."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import pytest
import structlog

from tests.support.inside import core_of
from tidekv import InvalidConfig, JournalDamaged, Replayer
from tidekv.engine.cli import main
from tidekv.engine.config.engine_config import JournalOptions
from tidekv.engine.journal.digest import final_state
from tidekv.states.errors import JournalRefused

PROMPT = list(range(100, 122))
LOG = structlog.get_logger("app")


def renamed_and_sorted(logger: object, method: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A processor of an application that has its own names, as Elastic's and Google's formats do."""
    return dict(sorted({**fields, "message": fields.pop("event"), "severity": method.upper()}.items()))


@pytest.fixture
def app_log(tmp_path: Path) -> Iterator[Path]:
    """A service that logs JSON by structlog and the standard library, to a file that is rotated often."""
    path = tmp_path / "app.log"
    handler = RotatingFileHandler(path, maxBytes=10_000, backupCount=100)
    root, level = logging.getLogger(), logging.getLogger().level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.add_logger_name,
            structlog.processors.TimeStamper(fmt="iso"),
            renamed_and_sorted,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    try:
        yield path
    finally:
        structlog.reset_defaults()
        root.removeHandler(handler)
        root.setLevel(level)
        handler.close()


async def serve(make_pair: Callable[..., Any], *, requests: int = 12) -> Any:
    """Run an engine whose journal goes to the log, with lines of the application between; returns the pair."""
    async with make_pair(journal_log=True, device_pages=16) as pair:
        for turn in range(requests):
            prompt = [*PROMPT[: 8 + turn], turn, *range(300 + turn % 3, 310 + turn % 3)]
            ready = await pair.restore(f"r{turn}", prompt)
            LOG.info("a line of the application", turn=turn, words='with "journal_run" in it')
            await pair.finish(ready, prompt, [1, 2, 3, 4, 5, turn])
    return pair


async def test_a_log_with_other_lines_replays_over_its_rotated_files(make_pair, app_log: Path) -> None:
    pair = await serve(make_pair)
    assert len(list(app_log.parent.glob("app.log.*"))) > 2
    replayer = Replayer(app_log)
    assert replayer.run().complete
    assert final_state(replayer.core) == final_state(core_of(pair.engine))


async def test_the_commands_read_a_log(make_pair, app_log: Path, monkeypatch, capsys) -> None:
    await serve(make_pair, requests=4)
    for arguments, words in (
        (["replay"], "identical: "),
        (["explain", "--request", "r1"], "r1: READY after"),
        (["timeline"], "r3"),
    ):
        monkeypatch.setattr("sys.argv", ["tidekv", arguments[0], str(app_log), *arguments[1:]])
        with pytest.raises(SystemExit) as raised:
            main.main()
        assert not raised.value.code
        assert words in capsys.readouterr().out


async def test_a_log_in_another_order_replays_and_one_with_a_lost_record_is_damaged_there(
    make_pair, app_log: Path, tmp_path: Path
) -> None:
    await serve(make_pair, requests=4)
    lines = [line for file in app_log.parent.glob("app.log*") for line in file.read_text().splitlines()]
    random.Random(1).shuffle(lines)
    mixed = tmp_path / "collected.log"
    mixed.write_text("\n".join(lines))
    assert Replayer(mixed).run().complete
    kept = [line for line in lines if json.loads(line).get("journal_line") != 3]
    mixed.write_text("\n".join(kept))
    with pytest.raises(JournalDamaged, match="one before it is missing"):
        Replayer(mixed).run()
    without_end = [line for line in lines if '"event": "end"' not in line]
    mixed.write_text("\n".join(without_end))
    replayed = Replayer(mixed).run()
    assert not replayed.complete
    assert replayed.torn is not None


async def test_a_log_of_several_runs_replays_the_newest_or_the_named_one(make_pair, app_log: Path) -> None:
    await serve(make_pair, requests=2)
    first = Replayer(app_log).header.run
    await serve(make_pair, requests=3)
    newest = Replayer(app_log)
    assert newest.header.run != first
    assert newest.run().complete
    named = Replayer(app_log, run=first[:6])
    assert named.header.run == first
    assert named.run().complete
    with pytest.raises(JournalRefused, match="no journal of a run 'zz': it has"):
        Replayer(app_log, run="zz")


async def test_without_a_configured_structlog_the_engine_does_not_start(make_pair) -> None:
    with pytest.raises(InvalidConfig, match=r"call structlog\.configure with a JSON renderer"):
        async with make_pair(journal_log=True):
            pass


def test_a_journal_is_in_a_file_or_in_the_log() -> None:
    with pytest.raises(InvalidConfig, match="leave out path"):
        JournalOptions(log=True, path="run.journal")


async def test_a_log_that_raises_ends_the_journal_and_not_the_engine(make_pair, app_log: Path) -> None:
    def fails_later(logger: object, method: str, fields: dict[str, Any]) -> dict[str, Any]:
        if fields.get("journal_line", 0) > 2:
            raise TypeError("not serializable")
        return fields

    structlog.configure(processors=[fails_later, *structlog.get_config()["processors"]])
    await serve(make_pair, requests=3)
    assert not Replayer(app_log).run().complete
