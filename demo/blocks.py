"""Recorded requests without text: ids of the blocks of a prompt, and tokens derived from the ids.

Equal ids give equal tokens in every process and on every machine, so a replay has the prefix structure of its
recording. Scaling shortens every block by the same factor, which preserves that structure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash

from tidekv.engine.synthetic.words import GOLDEN, Words, mix64, stream64
from tidekv.states.errors import InvalidConfig

VOCABULARY: Final = 1 << 17
# Maximum prompt length that a line may state; bounds the size of an id list.
PROMPT_TOKENS_MAX: Final = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """Part of a recording to replay, and its scaling. Raises InvalidConfig, which names the wrong field.

    `time_scale` multiplies every time (0.01 is a hundred times as fast, 0 starts all at once). `length_scale`
    multiplies every length; above 0 and at most 1. Requests whose scaled prompt exceeds `prompt_tokens_max` are left
    out. Recordings of sessions have no times between sessions: `sessions_at_once` are open at a time, and another one
    starts when one ends. With `shared_beginnings`, sessions with the same model and the same lengths of tools and
    system prompt begin with the same blocks. 0 disables the limits `requests_max`, `sessions_max` and
    `prompt_tokens_max`.
    """

    time_scale: float = 1.0
    length_scale: float = 1.0
    requests_max: int = 0
    sessions_max: int = 0
    prompt_tokens_max: int = 0
    sessions_at_once: int = 4
    shared_beginnings: bool = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.time_scale) and self.time_scale >= 0):
            raise InvalidConfig(f"time_scale must be a finite number of at least 0, not {self.time_scale}")
        if not 0 < self.length_scale <= 1:
            raise InvalidConfig(f"length_scale must be above 0 and at most 1, not {self.length_scale}")
        for name, least in (
            ("requests_max", 0),
            ("sessions_max", 0),
            ("prompt_tokens_max", 0),
            ("sessions_at_once", 1),
        ):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise InvalidConfig(f"{name} must be an int from {least}, not {value!r}")

    def scaled_output(self, tokens: int) -> int:
        """Scale an output's length; at least one token, since each request has a first one."""
        return max(1, round(tokens * self.length_scale))


@dataclass(frozen=True, slots=True, eq=False)
class PromptBlocks:
    """A prompt as block ids, unique over the whole recording, of `block_tokens` tokens each.

    Either the last block is cut at `token_count`, or the tokens after the last block are derived from `component_seed`.
    """

    ids: Words
    block_tokens: int
    token_count: int
    component_seed: int

    @classmethod
    def scaled(
        cls, ids: Words, *, block_tokens: int, token_count: int, component_seed: int, options: TraceOptions
    ) -> PromptBlocks:
        """Shorten each block and the rest of the prompt by the same factor; nothing becomes empty."""
        short = max(1, round(block_tokens * options.length_scale))
        full = min(len(ids), token_count // block_tokens)
        rest = token_count - full * block_tokens
        return cls(
            ids=ids,
            block_tokens=short,
            token_count=full * short + -(-rest * short // block_tokens),
            component_seed=component_seed,
        )

    def packed(self, vocabulary: int = VOCABULARY) -> bytes:
        """Return the prompt's tokens, packed as little-endian u32."""
        made = _tokens(stream64(self.ids, self.block_tokens).reshape(-1), vocabulary)[: self.token_count]
        tail = stream64(np.array([self.component_seed], dtype=np.uint64), self.token_count - len(made))
        return made.tobytes() + _tokens(tail.reshape(-1), vocabulary).tobytes()


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One recorded request: its scaled arrival time, and the lengths of prompt and output.

    `session` is empty if the recording has no sessions.
    """

    request_id: str
    at_s: float
    session: str
    prompt: PromptBlocks
    output_length: int

    def output(self, vocabulary: int = VOCABULARY) -> bytes:
        """Return the output's tokens, packed as little-endian u32; equal in every replay of this request.

        Later prompts do not contain them, because the recording has other ids for the real answers.
        """
        seed = np.array([text_seed(f"output of {self.request_id}")], dtype=np.uint64)
        return _tokens(stream64(seed, self.output_length).reshape(-1), vocabulary).tobytes()


def text_seed(text: str) -> int:
    """Return a 64-bit hash of a text."""
    return xxhash.xxh3_64_intdigest(text.encode())


def salted(ids: Words, salt: int) -> Words:
    """Map ids of one scope to ids that are unique over all scopes, up to a probability of 2^-64."""
    return mix64(mix64(ids + GOLDEN) ^ np.uint64(salt))


def _tokens(words: Words, vocabulary: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Map words to token ids below `vocabulary`, evenly."""
    return (((words >> np.uint64(32)) * np.uint64(vocabulary)) >> np.uint64(32)).astype("<u4")
