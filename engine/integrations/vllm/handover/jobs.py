"""Messages between the two sides of the hand-over role. Plain values, since they pass between processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tidekv.engine.kv_events.messages import BlockHash
from tidekv.states.handover.prompt_digest import PromptDigest

PREFILL_FIRST: Final = "prefill-first:"
"""Prefix of rooms that prefill names: decode asks for one only after prefill has computed its prompt."""


@dataclass(frozen=True, slots=True)
class BlockNames:
    """Names of a prompt's first blocks in vLLM's KV events. Only with KV events."""

    hashes: tuple[BlockHash, ...]
    lora_id: int | None
    lora_name: str | None
    salt: str | None


@dataclass(frozen=True, slots=True)
class LookUpJob:
    """Look-up of a prompt that names no prefill; `tokens` are those of its full blocks, as in RestoreJob."""

    request_id: str
    tokens: bytes = field(repr=False)
    namespace: str


@dataclass(frozen=True, slots=True)
class RestoreJob:
    """Restore of a prompt into vLLM's blocks."""

    request_id: str
    room: str
    prefill: str
    """Addresses of prefill's tensor-parallel ranks, separated by commas; empty if host memory and storage are to serve
    the whole prompt.
    """
    tokens: bytes = field(repr=False)
    """The tokens that are handed over, as packed little-endian u32."""
    prompt: PromptDigest
    """The digest of `tokens`, which prefill compares."""
    blocks: tuple[int, ...]
    """The blocks of all tokens."""
    have_tokens: int
    """Tokens at the beginning, in whole blocks, that are valid and stay as they are."""
    namespace: str
    names: BlockNames | None = None
    components: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By component, the blocks that the end of the prompt needs."""
    priority: int = 0
    """As the decode engine has it: requests of higher priority come first."""
    hints: Mapping[str, object] | None = None
    """An envelope with the peers that the request names."""
    next_token: int | None = None
    """The token behind `tokens`, if blocks are named by pairs of tokens and it is known."""


@dataclass(frozen=True, slots=True)
class SendJob:
    """Blocks that a step of the model fills, which prefill sends to decode."""

    request_id: str
    room: str
    prompt: PromptDigest
    start_token: int
    """The first token of the blocks."""
    blocks: tuple[int, ...]
    is_last: bool
    """Whether the prompt ends with these blocks."""
    components: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By component, the blocks that the end of the prompt needs; with the last blocks only."""


@dataclass(frozen=True, slots=True)
class OfferJob:
    """Full blocks of a finished decode, which go to host memory and storage; vLLM holds them meanwhile."""

    request_id: str
    tokens: bytes = field(repr=False)
    """The tokens of the blocks, as packed little-endian u32."""
    blocks: tuple[int, ...]
    namespace: str
    names: BlockNames | None = None
    components: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By component, the blocks that the end of these tokens needs and that vLLM still has."""
    hints: Mapping[str, object] | None = None
    """An envelope of KV hints, applied to the blocks when they are in host memory."""


@dataclass(frozen=True, slots=True)
class DeclineJob:
    """A room that prefill has, or will have, and that decode does not ask for; `prefill` is as in RestoreJob.

    `is_short`: what decode lacks is short enough for it to compute.
    """

    room: str
    prefill: str
    prompt: PromptDigest
    is_short: bool = False


@dataclass(slots=True)
class HandoverJobs:
    """The jobs of one step."""

    lookups: list[LookUpJob] = field(default_factory=list)
    restores: list[RestoreJob] = field(default_factory=list)
    sends: list[SendJob] = field(default_factory=list)
    offers: list[OfferJob] = field(default_factory=list)
    declined: list[DeclineJob] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    """Requests whose restore is not needed any more."""
    preempted: list[str] = field(default_factory=list)
    """Requests whose blocks are given to others with this step."""
    held: dict[str, bool] = field(default_factory=dict)
    """Finished prompts whose blocks vLLM holds until the worker reports them, and whether all blocks were sent."""
    hints: list[Mapping[str, object]] = field(default_factory=list)
    """Envelopes of KV hints of requests that have arrived."""
    is_short: bool = False
    """A request waits for blocks: held blocks that no decode worker asks for are released."""
    is_reset: bool = False
    """Pages that were kept so far are not found any more."""
    publishes_again: bool = False
    """vLLM has published that nothing is left: all pages are published again."""

    @property
    def is_empty(self) -> bool:
        """Whether the step has no jobs."""
        return not (
            self.lookups
            or self.restores
            or self.sends
            or self.offers
            or self.declined
            or self.aborted
            or self.preempted
            or self.held
            or self.hints
            or self.is_short
            or self.is_reset
            or self.publishes_again
        )


HANDOVER_COUNTS: Mapping[str, str] = {
    "restore_tokens_l1": "prompt tokens that vLLM's own blocks had when a restore began",
    "restore_tokens_l2": "prompt tokens restored from host memory",
    "restore_tokens_l3": "prompt tokens restored from storage",
    "restore_tokens_peer": "prompt tokens restored from the host memory of other decode workers",
    "restore_tokens_transfer": "prompt tokens received from prefill",
    "restore_bytes_transfer": "bytes of whole pages of full KV received from prefill; windows and states are not in it",
    "restores_partial": "prompts that were restored in part; vLLM computes the rest",
    "restores_failed": "prompts of which nothing was restored; vLLM computes them",
    "restores_declined": "prompts that decode did not ask prefill for: vLLM computes them, or their client left",
    "restores_short": "prompts that decode did not ask prefill for since it lacked few tokens, which vLLM computes",
    "offer_pages_written": "pages of finished requests copied to host memory",
    "offer_pages_present": "pages of finished requests that host memory had already",
    "offer_pages_passed": "pages of finished requests on their way to storage that host memory cannot keep",
    "offer_pages_declined": "pages of finished requests not kept: storage could not take them, or a copy failed",
    "sends_received": "prompts that decode received",
    "sends_unclaimed": "prompts that no decode worker asked for",
    "sends_failed": "prompts whose hand-over ended before decode had received them",
}
"""Counters of the hand-over role, by name, with their meaning."""
