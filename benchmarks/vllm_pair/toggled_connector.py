"""`TidekvConnector` whose calls do nothing in every other group of decode steps, and how long both kinds of steps take.

The steps that are compared are a few apart and in one process: on a shared machine a step of one process changes by ten
percent from one second to the next, and equal processes differ by several percent. For servers that have nothing to
transfer: jobs wait for the next group with calls. Only what the scheduler hears of a worker is passed on in any group.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.vllm_pair.variants import STEP_TIMES
from tidekv.engine.integrations.vllm import connector

GROUP: Final = 8
"""Steps of a group."""
SKIPPED: Final = 2
"""First steps of a group that do not count: vLLM schedules a step while its worker computes the one before."""
WRITE_PAIRS: Final = 20
"""Pairs of groups between two versions of a file."""


@dataclass
class ToggledMetadata(connector.TidekvMetadata):
    """Jobs of a step, and the group to which it belongs."""

    group: int = 0

    @property
    def is_off(self) -> bool:
        """Whether the calls of this group do nothing: on, off, off, on, and so forth, against any drift."""
        return bool((self.group ^ self.group >> 1) & 1)


class StepPairs:
    """Seconds of a step with and without the calls, of groups 2n and 2n + 1 each, in a file of this process."""

    def __init__(self) -> None:
        """Name the file, in the folder that STEP_TIMES names."""
        self._path = Path(os.environ[STEP_TIMES]) / f"{os.getpid()}.json"
        self._pairs: list[tuple[float, float]] = []
        self._present = ToggledMetadata(None, group=-1)
        self._started_s: list[float] = []
        self._first_s: float | None = None
        """Of a pair whose second group is not over."""

    def add(self, metadata: ToggledMetadata, now_s: float) -> None:
        """Add a step that starts now, which is when the one before it ends."""
        if metadata.group != self._present.group:
            self._end_group(now_s)
            self._present = metadata
            self._started_s = []
        self._started_s.append(now_s)

    def _end_group(self, now_s: float) -> None:
        # With another number of steps the worker joined in its midst, or a step of a kind that calls nothing was in it.
        step_s = (now_s - self._started_s[SKIPPED]) / (GROUP - SKIPPED) if len(self._started_s) == GROUP else None
        if self._present.group % 2 == 0:
            self._first_s = step_s
            return
        if step_s is not None and self._first_s is not None:
            self._pairs.append((self._first_s, step_s) if self._present.is_off else (step_s, self._first_s))
            if len(self._pairs) % WRITE_PAIRS == 0:
                # A reader finds a whole file at any time.
                begun = self._path.with_suffix(".begun")
                begun.write_text(json.dumps(self._pairs))
                begun.replace(self._path)
        self._first_s = None


class TidekvConnector(connector.TidekvConnector):
    """The connector, by turns with one that does nothing."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """See TidekvConnector."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._steps = 0
        self._is_off = False
        self._pairs = StepPairs()

    def build_connector_meta(self, scheduler_output: Any) -> ToggledMetadata:
        """Return this step's jobs; in a group without calls they wait."""
        metadata = ToggledMetadata(None, group=self._steps // GROUP)
        self._steps, self._is_off = self._steps + 1, metadata.is_off
        if not self._is_off:
            jobs = super().build_connector_meta(scheduler_output)
            metadata.jobs, metadata.is_empty = jobs.jobs, jobs.is_empty
        return metadata

    def handle_preemptions(self, kv_connector_metadata: ToggledMetadata) -> None:
        """Note the step that starts."""
        self._pairs.add(kv_connector_metadata, time.perf_counter())
        self._is_off = kv_connector_metadata.is_off
        if not self._is_off:
            super().handle_preemptions(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See TidekvConnector."""
        if not self._is_off:
            super().start_load_kv(forward_context, **kwargs)

    def wait_for_save(self) -> None:
        """See TidekvConnector."""
        if not self._is_off:
            super().wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See TidekvConnector."""
        return (None, None) if self._is_off else super().get_finished(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See TidekvConnector."""
        return set() if self._is_off else super().get_block_ids_with_load_errors()

    def get_kv_connector_stats(self) -> connector.TidekvStats | None:
        """See TidekvConnector."""
        return None if self._is_off else super().get_kv_connector_stats()
