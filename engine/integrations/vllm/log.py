"""tidekv's records in vLLM's log.

vLLM gives its handler to the logger "vllm" alone, so the records of "tidekv" would reach no output in a server.
"""

from __future__ import annotations

import logging

import structlog


def log_with_vllm() -> None:
    """Give the logger "tidekv" the handlers and the level of the logger "vllm". Idempotent.

    Does nothing if the application has an output for it: a configured structlog, or a handler of "tidekv" or of the
    root logger.
    """
    ours, theirs = logging.getLogger("tidekv"), logging.getLogger("vllm")
    has_output = any(not isinstance(handler, logging.NullHandler) for handler in ours.handlers)
    if structlog.is_configured() or has_output or (ours.propagate and logging.getLogger().handlers):
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    if ours.level == logging.NOTSET:
        ours.setLevel(theirs.level)
