"""What callers of the decode engine give and get."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from tidekv.states.errors import InvalidRequest
from tidekv.transports.wire import check_name

if TYPE_CHECKING:
    from tidekv.backends.keys import Tokens
    from tidekv.engine.tails import ReadyTail

PRIORITY_MAX = 1_000_000
NAMESPACE_MARK = "\0"
"""No namespace may hold it: names that were joined begin with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRequest:
    """A prompt whose KV is wanted on this device.

    `tokens`: a sequence of ints, an array, a numpy array, or packed little-endian u32 bytes (fastest).
    `prefill`: the address of the prefill worker, or several, tried in order when one is lost. One of several ranks is
    named by the addresses of all of them, in order, joined by commas; the same on all ranks of a decode instance.
    `prompt`: "send" puts the tokens into the promise, where no router brings them to prefill.
    `cache`: False inserts nothing in the cache (warm-up, hidden tokens).
    `max_new_tokens`: how many tokens are to be generated at most, as far as it is known; a hint.
    `deadline_s`: how long the restore may take, from the call on; None: as the engine's configuration says.
    `priority`: the higher is admitted first; within `ageing_s` seconds a lower one gains a step.
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
        """Raises InvalidRequest, which names the field."""
        if not isinstance(self.request_id, str):
            raise InvalidRequest(f"request_id must be a string, not {self.request_id!r}")
        try:
            check_name(self.request_id)
        except InvalidRequest as error:
            raise InvalidRequest(f"request_id: {error}") from None
        if self.prompt not in ("routed", "send"):
            raise self._wrong("prompt", "'routed' or 'send'")
        if not isinstance(self.prefill, str | Sequence) or not self.prefill:
            raise self._wrong("prefill", "one address or more")
        if not all(isinstance(address, str) and address for address in self.prefills):
            raise self._wrong("prefill", "one address or more")
        ranks = [address.split(",") for address in self.prefills]
        if any(len(set(addresses)) < len(addresses) or "" in addresses for addresses in ranks):
            raise self._wrong("prefill", "addresses of all ranks of a worker, each once, joined by commas")
        if self.deadline_s is not None and not (isinstance(self.deadline_s, int | float) and self.deadline_s > 0):
            raise self._wrong("deadline_s", "more than 0 seconds")
        if type(self.max_new_tokens) is not int or self.max_new_tokens < 0:
            raise self._wrong("max_new_tokens", "a count of tokens")
        if type(self.priority) is not int or abs(self.priority) > PRIORITY_MAX:
            raise self._wrong("priority", f"an int from -{PRIORITY_MAX} to {PRIORITY_MAX}")
        if not isinstance(self.cache, bool):
            raise self._wrong("cache", "True or False")
        if not isinstance(self.namespace, str) or NAMESPACE_MARK in self.namespace:
            raise self._wrong("namespace", f"a string without {NAMESPACE_MARK!r}")
        try:
            self.namespace.encode()
        except UnicodeEncodeError:
            raise self._wrong("namespace", "text that can be encoded") from None

    def _wrong(self, field: str, wanted: str) -> InvalidRequest:
        return InvalidRequest(f"request {self.request_id!r}: {field} must be {wanted}, not {getattr(self, field)!r}")

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
    tails: Mapping[str, ReadyTail] = field(default_factory=dict)
    """By component, where its window or state at the prompt's end is to be written; none of it is there yet."""


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
    reserve: deque[int] = field(default_factory=deque, repr=False)
    """Pages that `grow` hands out next. They are the engine's to take and to refill."""
    tails: Mapping[str, ReadyTail] = field(default_factory=dict)
    """What it has of each of the engine's components, by name: windows and states at the prompt's end."""


@dataclass(frozen=True, slots=True, eq=False)
class RetractedRequest:
    """A request that gave its device pages back. What of its KV is in host memory stays there until `resume`."""

    request: DecodeRequest
    packed_tokens: bytes = field(repr=False)
    """Prompt and output so far, as packed little-endian u32."""
    held_tokens: int
    """Tokens, counted from the first, whose KV is held in host memory."""


def join_namespaces(engine: str, request: str) -> str:
    """The namespace of a request within that of its engine. Where both have a name, no other names give the same: it
    begins with a mark that no name may hold.
    """
    if engine and request:
        return f"{NAMESPACE_MARK}{len(engine)}:{engine}{request}"
    return engine or request
