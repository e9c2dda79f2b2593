"""Statistics of one run of a workload: sources, times, resources left over, and the hits of an unlimited cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, cast

import numpy as np

from tidekv.backends.keys.chain import TOKEN_BYTES, page_digests
from tidekv.engine.decode.decode_engine import DecodeEngine
from tidekv.engine.decode.values import ReadyRequest


def reusable_tokens(
    requests: Iterable[tuple[bytes, bytes]], page_size: int, *, keep_output: bool = True
) -> Iterator[int]:
    """Yield, for each (prompt, output) of packed tokens, how many tokens of the prompt an unlimited cache would have.

    This is the reference for the hits of a replay: no eviction, no tiers, one request at a time. Each request is
    assumed to finish before the next one arrives, and to leave the full pages of its prompt and, with `keep_output`,
    of its output without the last token, which has no KV yet.
    """
    seen: set[bytes] = set()
    for prompt, output in requests:
        pages = 0
        for digest in page_digests(prompt, page_size):
            if digest not in seen:
                break
            pages += 1
        yield pages * page_size
        seen.update(page_digests(prompt + output[:-TOKEN_BYTES] if keep_output else prompt, page_size))


Progress: TypeAlias = Callable[[str, int], None]
"""Called with the name of a phase and how many of its requests have just ended; 0 when the phase begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The engine that serves one pass over a workload, and how it is driven.

    `cache=False` restores and keeps nothing, to measure the cost without a decode cache. At most `in_flight_max`
    requests are in flight.
    """

    engine: DecodeEngine
    prefill: str | Sequence[str]
    phase: Phase
    in_flight_max: int
    cache: bool = True
    progress: Progress | None = None

    def advance(self) -> None:
        """Report one more request that has ended."""
        if self.progress is not None:
            self.progress(self.phase.name, 1)


@dataclass(slots=True)
class Phase:
    """Statistics of one run. Times are in seconds; `tokens` counts prompt tokens by source."""

    name: str
    requests: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    ready_s: list[float] = field(default_factory=list)
    retractions: int = 0
    wall_s: float = 0.0
    prompt_pages: int = 0
    """Pages of all prompts: the number to send if decode had nothing."""
    delta_pages: int = 0
    """Pages of all deltas: the number that must be sent."""
    pages_sent: int = 0
    bytes_sent: int = 0
    held: dict[str, float] = field(default_factory=dict)
    """Resources not given back after the last request; empty if there are none."""

    def note(self, ready: ReadyRequest, ready_s: float, *, page_size: int) -> None:
        """Add one restored prompt."""
        pages = -(-ready.prompt_tokens // page_size)
        self.requests += 1
        self.tokens.update(ready.sources)
        self.ready_s.append(ready_s)
        self.prompt_pages += pages
        self.delta_pages += pages - (ready.prompt_tokens - ready.sources["transfer"]) // page_size

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(self.tokens.values())

    @property
    def hit_rate(self) -> float:
        """The share of the prompt tokens that were not transferred."""
        return 1 - self.tokens["transfer"] / self.prompt_tokens if self.prompt_tokens else 0.0

    def ready_ms(self, percent: float) -> float:
        """Return a percentile of the time to ready, in milliseconds."""
        return float(np.percentile(self.ready_s, percent)) * 1000 if self.ready_s else 0.0


def held_by(engine: DecodeEngine) -> dict[str, float]:
    """Return all resources that an engine without requests should not hold; empty if every pool is free + cached."""
    core = cast("dict[str, int]", engine.statistics()["core"])
    names = [name for name in core if name.endswith(("_owned", "_draining", "_protected")) or _is_live(name)]
    held: dict[str, float] = {name: core[name] for name in names if core[name]}
    for pool in ("device", "host"):
        missing = core[f"{pool}_total"] - core[f"{pool}_free"] - core[f"{pool}_cached"]
        if missing:
            held[f"{pool}_missing"] = missing
    return held


def _is_live(name: str) -> bool:
    states = ("prealloc", "match", "prefetch", "local_restore", "transfer", "ready", "retracted")
    return name in {"queue", "loads", "backups", "operations", "rooms", *(f"requests_{state}" for state in states)}
