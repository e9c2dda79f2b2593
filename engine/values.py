"""What callers of the decode engine give and get."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from tidekv.states.errors import InvalidRequest

if TYPE_CHECKING:
    from tidekv.backends.keys import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRequest:
    """A prompt whose KV is wanted on this device.

    `tokens`: a sequence of ints, an array, a numpy array, or packed little-endian u32 bytes (fastest).
    `prefill`: the address of the prefill worker, or several, tried in order when one is lost.
    `prompt`: "send" puts the tokens into the promise, where no router brings them to prefill.
    `cache`: False inserts nothing in the cache (warm-up, hidden tokens).
    """

    request_id: str
    tokens: Tokens
    prefill: str | Sequence[str]
    max_new_tokens: int = 0
    deadline_s: float | None = None
    priority: int = 0
    namespace: str = ""
    cache: bool = True
    prompt: Literal["routed", "send"] = "routed"

    def __post_init__(self) -> None:
        if not self.request_id or not isinstance(self.request_id, str):
            raise InvalidRequest(f"request_id must be a string that is not empty, not {self.request_id!r}")
        if self.prompt not in ("routed", "send"):
            raise InvalidRequest(f"request {self.request_id!r}: prompt must be 'routed' or 'send', not {self.prompt!r}")
        if not self.prefills or not all(isinstance(address, str) and address for address in self.prefills):
            raise InvalidRequest(
                f"request {self.request_id!r}: prefill must be one address or more, not {self.prefill!r}"
            )
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise InvalidRequest(
                f"request {self.request_id!r}: deadline_s must be more than 0, not {self.deadline_s!r}"
            )
        if self.max_new_tokens < 0:
            raise InvalidRequest(
                f"request {self.request_id!r}: max_new_tokens must not be negative: {self.max_new_tokens!r}"
            )

    @property
    def prefills(self) -> tuple[str, ...]:
        """The addresses to try, in order."""
        return (self.prefill,) if isinstance(self.prefill, str) else tuple(self.prefill)


@dataclass(frozen=True, slots=True, eq=False)
class RecomputeJob:
    """What the caller of the engine is asked to compute itself, because no prefill is left."""

    request: DecodeRequest
    pages: npt.NDArray[np.int32]
    """The page table of the whole prompt. Pages before `start_token` hold their KV; the others are to be written."""
    start_token: int
    packed_tokens: bytes = field(repr=False)
    """The prompt, as packed little-endian u32."""


Recompute = Callable[[RecomputeJob], Awaitable["tuple[int, Mapping[str, object]]"]]
"""Writes the KV of the rest of a prompt into its pages; returns the first token and aux. What it raises fails the
request with its words. The pages are its to write until it returns, even where the request was aborted meanwhile."""


@dataclass(slots=True, eq=False)
class ReadyRequest:
    """A restored request. Its pages are the caller's to read and to append to until `finish`, `retract` or `abort`."""

    request_id: str
    pages: npt.NDArray[np.int32]
    """One device page per page of the prompt, in order; pages for new tokens are appended by `grow`."""
    prompt_tokens: int
    first_token: int
    aux: Mapping[str, object]
    sources: Mapping[str, int]
    """Prompt tokens by where they came from: l1, l2, l3, transfer."""
    length: int
    """Tokens that there is room for: the prompt, and what `grow` was asked for."""
    packed_tokens: bytes = field(repr=False)
    """The prompt, as packed little-endian u32."""
    generation: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class RetractedRequest:
    """A request that gave its device pages back. What of its KV is in host memory stays there until `resume`."""

    request: DecodeRequest
    packed_tokens: bytes = field(repr=False)
    """Prompt and output so far, as packed little-endian u32."""
    held_tokens: int
    """Tokens, counted from the first, whose KV is held in host memory."""
