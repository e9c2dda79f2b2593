"""Protocols of the two sides of a role of `TidekvConnector`: storage (`scheduler`, `storage_role`) or
hand-over (`handover`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol  # vLLM's objects are not typed here: tests and type checks go without vLLM.


class SchedulerRole(Protocol):
    """The scheduler's side. All calls come from the scheduler's thread."""

    def arrived(self, request: Any) -> None:
        """Take note of a new request."""
        ...

    def matched(self, request: Any, computed: int) -> int | None:
        """Return how many tokens beyond `computed` are loaded asynchronously; None if it is not known yet."""
        ...

    def allocated(self, request: Any, table: Sequence[Sequence[int]], external_tokens: int) -> None:
        """Plan the load of `external_tokens` tokens into the request's blocks, by group and position."""
        ...

    def step_jobs(self, scheduler_output: Any) -> object | None:
        """Return the worker's jobs for one step, which pickle can carry; None without any. Called once per step."""
        ...

    def heard(self, connector_output: Any) -> None:
        """Process what the workers report: `finished_recving`, `invalid_block_ids`."""
        ...

    def finished(self, request: Any, table: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """End a request. True: its blocks are held until a worker reports it. The second value goes to the client."""
        ...

    def take_counts(self) -> dict[str, int]:
        """Return the counts since the last call, by name."""
        ...

    def reset(self) -> None:
        """Make pages saved so far unfindable for this instance."""
        ...

    def close(self) -> None:
        """Close everything. Idempotent."""
        ...


class WorkerRole(Protocol):
    """A worker's side. All calls come from the thread that runs the model.

    A step without jobs, while nothing is under way, makes it wait for `is_transferring` and `take_counts` only.
    """

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Take the worker's tensors and start. Raises InvalidConfig for unsupported tensors."""
        ...

    def before_forward(self, jobs: Any) -> None:
        """Act before a step overwrites blocks that were given up by preempted or aborted requests."""
        ...

    def start_loads(self, jobs: Any) -> None:
        """Start the loads of a step."""
        ...

    def after_forward(self, jobs: Any) -> None:
        """Take the blocks that a step filled."""
        ...

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Return requests whose held blocks are free again, and requests whose loads ended, each once."""
        ...

    def is_transferring(self) -> bool:
        """Whether a load or a hand-over is under way that vLLM waits for, or has ended and was not reported yet."""
        ...

    def take_invalid_blocks(self) -> set[int]:
        """Return the blocks with garbage, of the loads that `take_finished` returned last."""
        ...

    def take_failed(self) -> set[str]:
        """Return the requests, of the loads that `take_finished` returned last, all of whose blocks are to be
        recomputed. With several groups vLLM takes no single blocks.
        """
        ...

    def take_counts(self) -> dict[str, int]:
        """Return the counts since the last call, by name."""
        ...

    def close(self) -> None:
        """Finish running jobs and close everything. Idempotent."""
        ...
