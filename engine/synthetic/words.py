"""Streams of pseudo-random 64-bit words, for content and tokens of tests. They are not cryptographic."""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = "npt.NDArray[np.uint64]"

GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)


def mix64(words: Words) -> Words:
    """Return splitmix64's output function of each word: a bijection in which each input bit affects all 64."""
    mixed = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def stream64(seeds: Words, count: int) -> Words:
    """Return `count` words for each seed, shape [len(seeds), count]."""
    steps = (np.arange(1, count + 1, dtype=np.uint64)) * GOLDEN
    return mix64(mix64(seeds)[:, None] + steps[None, :])
