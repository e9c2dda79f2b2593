"""`TidekvConnector` that notes how long vLLM waits for its calls: a file for each process, with the seconds by step.

vLLM calls the scheduler's side and the worker's side in every step, in processes of their own; on each side the call
for statistics is the last one of a step.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.vllm_pair.variants import CALL_TIMES
from tidekv.engine.integrations.vllm import connector

LAST: Final = "get_kv_connector_stats"
CALLS: Final = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "handle_preemptions",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    LAST,
)
WRITE_STEPS: Final = 50
"""Steps between two versions of a file."""


class TidekvConnector(connector.TidekvConnector):
    """The connector, timed."""


class _Steps:
    """Seconds in calls, by step, of one side."""

    def __init__(self, side: str) -> None:
        self._path = Path(os.environ[CALL_TIMES]) / f"{side}-{os.getpid()}.json"
        self._all: list[float] = []
        self._spent_s = 0.0

    def add(self, seconds: float, *, is_last: bool) -> None:
        """Add a call to the present step."""
        self._spent_s += seconds
        if is_last:
            self._all.append(self._spent_s)
            self._spent_s = 0.0
            if len(self._all) % WRITE_STEPS == 0:
                # A reader finds a whole file at any time.
                begun = self._path.with_suffix(".begun")
                begun.write_text(json.dumps(self._all))
                begun.replace(self._path)


@functools.cache
def _steps(side: str) -> _Steps:
    return _Steps(side)


def _timed(name: str) -> Callable[..., Any]:
    call = getattr(connector.TidekvConnector, name)

    @functools.wraps(call)
    def timed(self: Any, *args: Any, **named: Any) -> Any:
        started_s = time.perf_counter()
        try:
            return call(self, *args, **named)
        finally:
            spent_s = time.perf_counter() - started_s
            side = "worker" if self._scheduler is None else "scheduler"
            _steps(side).add(spent_s, is_last=name == LAST)

    return timed


for _name in CALLS:
    setattr(TidekvConnector, _name, _timed(_name))
