"""The engine's log: structured records of structlog, and sensible ones of the standard library without it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from simulation.rig import Rig
from tidekv.engine.log import CoreLog, engine_log
from tidekv.states import commands, events
from tidekv.states.records.stages import State
from tidekv.states.request.restore import Restore

LOG = engine_log("tidekv.engine")
"""Made at import, as the engine's modules make theirs: before an application configures anything."""


@pytest.fixture
def application() -> Iterator[list[dict[str, Any]]]:
    """An application that has configured structlog; returns the records that it gets."""
    records: list[dict[str, Any]] = []

    def keep(logger: object, method: str, record: dict[str, Any]) -> dict[str, Any]:
        records.append({"level": method, **record})
        raise structlog.DropEvent

    structlog.configure(processors=[keep])
    try:
        yield records
    finally:
        structlog.reset_defaults()


def test_an_application_that_has_configured_structlog_gets_every_record_with_its_fields(
    application: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    LOG.bind(request_id="r1").warning("a thing happened", pages=3)
    (record,) = application
    assert record == {
        "level": "warning", "logger": "tidekv.engine", "event": "a thing happened", "request_id": "r1", "pages": 3,
    }  # fmt: skip
    assert not caplog.records


def test_a_value_from_outside_forges_no_record_and_commands_no_terminal(caplog: pytest.LogCaptureFixture) -> None:
    forged = "r1\nWARNING tidekv.engine: the prefill is dead"
    LOG.warning(
        "a hand-over ended", room=forged, cause="\x1b[2J", peers=["a\nb"], other="x state=READY", trick="\u202e"
    )
    LOG.warning("it raised", error=ValueError("a\nb"), exception="Traceback\n  ValueError: \x1b]0;title\x07\r")
    first, second = [record.getMessage() for record in caplog.records]
    assert first == (
        "a hand-over ended: room='r1\\nWARNING tidekv.engine: the prefill is dead' cause='\\x1b[2J' peers=['a\\nb'] "
        "other='x state=READY' trick='\\u202e'"
    )
    assert second == "it raised: error=a\\nb\nTraceback\n  ValueError: \\x1b]0;title\\x07\\r"


def test_without_structlog_records_go_to_the_standard_library_in_words_and_with_their_fields(
    caplog: pytest.LogCaptureFixture,
) -> None:
    LOG.warning("a thing happened", share="100 %d", pages=3, stack="line 1\nline 2")
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("tidekv.engine", "WARNING")
    assert record.getMessage() == "a thing happened: share='100 %d' pages=3\nline 1\nline 2"
    assert record.tidekv == {  # type: ignore[attr-defined]  # What the engine's log adds.
        "event": "a thing happened", "share": "100 %d", "pages": 3, "stack": "line 1\nline 2",
    }  # fmt: skip


def test_records_below_the_level_of_their_logger_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "tidekv.engine"):
        LOG.warning("a thing happened")
        LOG.error("a worse thing happened")
    assert caplog.messages == ["a worse thing happened"]


def test_a_handled_exception_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise KeyError("x")
    except KeyError:
        LOG.exception("it raised", part="writer")
    (record,) = caplog.records
    assert record.getMessage().startswith("it raised: part=writer\nTraceback (most recent call last):\n")
    assert record.getMessage().endswith("\nKeyError: 'x'")
    # As text only: formatters may render the locals of an exception's frames, which hold prompts.
    assert record.exc_info is None


def test_a_rule_that_raises_is_logged_with_its_request_and_its_traceback(
    application: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig()
    CoreLog(rig.core)
    fix_plan, raised = Restore.fix_plan, list[int]()

    def fails_once(self: Restore, *given: Any) -> None:
        if not raised:
            raised.append(1)
            raise ZeroDivisionError("a bug")
        fix_plan(self, *given)

    monkeypatch.setattr(Restore, "fix_plan", fails_once)
    rig.arrive("a", b"abcdefgh")
    (record,) = application
    assert (record["event"], record["level"]) == ("a rule of the core raised, the request falls back", "error")
    assert (record["request_id"], record["generation"], record["state"]) == ("a", 0, State.MATCH.value)
    assert "ZeroDivisionError: a bug" in record["exception"]
    assert "exc_info" not in record


def test_the_breaker_is_logged_when_it_opens_and_when_it_closes(application: list[dict[str, Any]]) -> None:
    rig = Rig(breaker_failures=1)
    log = CoreLog(rig.core)
    rig.attach_storage()
    rig.arrive("a", b"abcdefgh")
    log.end_turn()
    assert not application
    query = rig.take(commands.QueryStorage)
    rig.step(events.StorageAnswered, op=query.op, found=0, error="no server")
    log.end_turn()
    log.end_turn()
    assert [record["level"] for record in application] == ["warning"]
    probe = rig.take_all(commands.ProbeStorage)
    if not probe:
        rig.wait_until(rig.core.next_deadline_s())
        probe = rig.take_all(commands.ProbeStorage)
    rig.step(events.StorageProbed, op=probe[0].op)
    log.end_turn()
    assert [record["level"] for record in application] == ["warning", "info"]


def test_the_call_site_of_a_record_is_the_line_that_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    LOG.warning("without structlog")
    (record,) = caplog.records
    assert record.pathname == __file__
    assert record.funcName == "test_the_call_site_of_a_record_is_the_line_that_logs_it"
    found: list[dict[str, Any]] = []
    add_call_site = structlog.processors.CallsiteParameterAdder()

    def keep(logger: object, method: str, fields: dict[str, Any]) -> dict[str, Any]:
        found.append(dict(fields))
        raise structlog.DropEvent

    structlog.configure(processors=[add_call_site, keep])
    try:
        LOG.warning("with structlog")
    finally:
        structlog.reset_defaults()
    assert (found[0]["pathname"], found[0]["func_name"]) == (__file__, record.funcName)


@pytest.mark.parametrize(("level", "kept"), [
    (None, ["info", "error"]),
    (logging.DEBUG, ["debug", "info", "error"]),
    (logging.ERROR, ["error"]),
])  # fmt: skip
def test_the_level_of_the_logger_holds_with_structlog_too(
    level: int | None, kept: list[str], application: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("tidekv"), "level", level or logging.NOTSET)
    for name in ("debug", "info", "error"):
        getattr(engine_log("tidekv.engine"), name)("a thing happened")
    assert [record["level"] for record in application] == kept


def test_a_structlog_whose_methods_are_coroutine_functions_gets_records_at_once() -> None:
    records: list[str] = []

    def keep(logger: object, method: str, fields: dict[str, Any]) -> dict[str, Any]:
        records.append(fields["event"])
        raise structlog.DropEvent

    structlog.configure(processors=[keep], wrapper_class=structlog.stdlib.AsyncBoundLogger)
    try:
        LOG.warning("a thing happened")
    finally:
        structlog.reset_defaults()
    assert records == ["a thing happened"]


def test_a_configuration_that_raises_ends_the_records_of_requests_and_not_the_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(logger: object, method: str, fields: dict[str, Any]) -> dict[str, Any]:
        raise TypeError("not serializable")

    rig = Rig()
    log = CoreLog(rig.core)
    structlog.configure(processors=[fails])
    try:
        for name in ("a", "b"):
            rig.arrive(name, b"abcdefgh")
            arrived = events.RequestArrived(
                at_s=1.0,
                request_id=name,
                request_number=1,
                keys=b"",
                prompt_tokens=1,
                namespace="",
                prefills=("prefill",),
            )
            log.stepped(arrived, [])
    finally:
        structlog.reset_defaults()
    (record,) = caplog.records
    assert "requests are not logged any more" in record.getMessage()


def test_a_lost_peer_is_logged_by_its_name(application: list[dict[str, Any]]) -> None:
    log = CoreLog(Rig().core)
    log.note_event(events.AuxReceived(at_s=1.0, request_id="a", generation=0, rank=0))
    log.note_event(events.WriterLost(at_s=1.0, writer="prefill.1", cause="no heartbeat"))
    (record,) = application
    assert (record["peer"], record["cause"]) == ("prefill.1", "no heartbeat")


def test_a_command_is_logged_with_its_request_and_the_state_of_that(application: list[dict[str, Any]]) -> None:
    rig = Rig()
    log = CoreLog(rig.core)
    rig.arrive("a", b"abcdefgh")
    log.of_command(rig.take(commands.SendPromise)).warning("starting a command raised")
    (record,) = application
    assert {name: record[name] for name in ("command", "request_id", "generation", "state")} == {
        "command": "SendPromise", "request_id": "a", "generation": 0, "state": "TRANSFER",
    }  # fmt: skip
