"""Messages between the two sides of the hand-over role. Plain values, since they pass between processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RestoreJob:
    """Restore of a prompt into vLLM's blocks.

    `blocks` are those of the whole prompt; the first `have_tokens` tokens, whole blocks, are valid and stay as they
    are. `tokens` is the prompt as packed little-endian u32.
    """

    request_id: str
    room: str
    prefill: str
    tokens: bytes = field(repr=False)
    blocks: tuple[int, ...]
    have_tokens: int
    namespace: str


@dataclass(frozen=True, slots=True)
class SendJob:
    """Blocks that a step fills, from `start_token` on. `is_last`: the prompt ends with them."""

    request_id: str
    room: str
    prompt_tokens: int
    start_token: int
    blocks: tuple[int, ...]
    is_last: bool


@dataclass(slots=True)
class HandoverJobs:
    """The jobs of one step.

    `aborted`: requests whose restore is not needed any more. `preempted`: requests whose blocks are given to others
    with this step. `held`: requests that have finished and whose blocks vLLM holds until the worker reports them; True
    if all of their blocks were sent.
    """

    restores: list[RestoreJob] = field(default_factory=list)
    sends: list[SendJob] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    held: dict[str, bool] = field(default_factory=dict)


HANDOVER_COUNTS: Mapping[str, str] = {
    "restore_tokens_l1": "prompt tokens restored from the pages of tidekv's own pool",
    "restore_tokens_l2": "prompt tokens restored from host memory",
    "restore_tokens_l3": "prompt tokens restored from storage",
    "restore_tokens_transfer": "prompt tokens received from prefill",
    "restore_bytes_transfer": "bytes of whole pages received from prefill",
    "restores_failed": "prompts that were not restored; vLLM computes them",
    "sends_received": "prompts that decode received",
    "sends_unclaimed": "prompts that no decode worker asked for",
    "sends_failed": "prompts whose hand-over ended before decode had received them",
}
"""Counters of the hand-over role, by name, with their meaning."""
