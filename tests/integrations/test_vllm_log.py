"""tidekv's records in the log of a vLLM process."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog

from tidekv.engine.integrations.vllm.log import log_with_vllm
from tidekv.engine.log import engine_log


class Output(logging.Handler):
    """Keeps the messages of all records."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture(autouse=True)
def loggers() -> Iterator[dict[str, logging.Logger]]:
    """The loggers as in a fresh process, in which only "vllm" is configured, and not passed on to the root."""
    names = ("", "vllm", "tidekv")
    found = {name: logging.getLogger(name) for name in names}
    before = {name: (one.handlers[:], one.level, one.propagate) for name, one in found.items()}
    found["tidekv"].handlers[:] = [logging.NullHandler()]
    found["tidekv"].setLevel(logging.NOTSET)
    found["vllm"].handlers[:] = [Output()]
    found["vllm"].setLevel(logging.INFO)
    found["vllm"].propagate = False
    yield found
    for name, (handlers, level, propagate) in before.items():
        found[name].handlers[:] = handlers
        found[name].setLevel(level)
        found[name].propagate = propagate


def messages(logger: logging.Logger) -> list[str]:
    return [message for handler in logger.handlers if isinstance(handler, Output) for message in handler.messages]


@pytest.mark.parametrize("name", ["tidekv.vllm", "tidekv.engine"])
def test_a_record_is_once_in_the_log_of_vllm_at_its_level(name: str, loggers: dict[str, logging.Logger]) -> None:
    loggers[""].handlers[:] = []  # Those of pytest, which it adds when a test is called.
    for _ in range(2):
        log_with_vllm()
    engine_log(name).warning("a hand-over failed", cause="prefill")
    engine_log(name).info("a hand-over ended")
    engine_log(name).debug("not shown")
    assert messages(loggers["vllm"]) == ["a hand-over failed: cause=prefill", "a hand-over ended"]


@pytest.mark.parametrize("name", ["", "tidekv"])
def test_an_output_of_the_application_is_kept(name: str, loggers: dict[str, logging.Logger]) -> None:
    loggers[""].handlers[:] = []
    loggers[name].addHandler(Output())
    log_with_vllm()
    engine_log("tidekv.vllm").warning("a hand-over failed")
    assert messages(loggers[name]) == ["a hand-over failed"]
    assert messages(loggers["vllm"]) == []


def test_a_configured_structlog_is_kept(loggers: dict[str, logging.Logger], monkeypatch: pytest.MonkeyPatch) -> None:
    loggers[""].handlers[:] = []
    monkeypatch.setattr(structlog, "is_configured", lambda: True)
    log_with_vllm()
    assert not any(isinstance(handler, Output) for handler in loggers["tidekv"].handlers)
