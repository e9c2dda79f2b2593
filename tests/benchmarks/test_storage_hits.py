"""Hit ratio of a store beside an optimal one: the optimal one against a search over all choices, and the real store."""

from __future__ import annotations

import asyncio
import gzip
from itertools import combinations, takewhile
from pathlib import Path
from random import Random

import msgspec
import pytest

from benchmarks.storage_hits import file_hits, optimal_hits, prompts_of, without_subagents


def best_of_all_choices(prompts: list[list[bytes]], capacity: int) -> int:
    """Return the most hits that any choice of the pages kept after each request gives."""
    best = {frozenset[bytes](): 0}
    for prompt in prompts:
        after: dict[frozenset[bytes], int] = {}
        for kept, hits in best.items():
            now = hits + sum(1 for _ in takewhile(kept.__contains__, prompt))
            held = kept.union(prompt)
            for choice in combinations(sorted(held), min(capacity, len(held))):
                after[frozenset(choice)] = max(after.get(frozenset(choice), 0), now)
        best = after
    return max(best.values())


def prompts_in_a_tree(chooser: Random, count: int) -> list[list[bytes]]:
    """Draw prompts; a page's key has the path to it, so that equal keys have equal beginnings."""
    paths = ["".join(chooser.choice("ab") for _ in range(chooser.randint(1, 3))) for _ in range(count)]
    return [[path[:length].encode().ljust(32, b".") for length in range(1, len(path) + 1)] for path in paths]


@pytest.mark.parametrize("seed", range(30))
def test_the_optimal_store_has_as_many_hits_as_the_best_of_all_choices(seed: int) -> None:
    chooser = Random(seed)
    prompts = prompts_in_a_tree(chooser, 7)
    capacity = chooser.randint(1, 4)
    assert optimal_hits(prompts, capacity) == best_of_all_choices(prompts, capacity)


def test_a_store_that_holds_everything_has_all_hits_of_the_optimal_one() -> None:
    prompts = prompts_in_a_tree(Random(1), 40)
    different = len({key for prompt in prompts for key in prompt})
    assert asyncio.run(file_hits(prompts, 1000)) == (optimal_hits(prompts, different), different)


def test_a_workload_without_subagents_has_the_other_requests(tmp_path: Path) -> None:
    step = {"t": 0.0, "type": "n", "in": 1024, "out": 1, "h": [0, 0, 16]}
    inner = {"t": 1.0, "type": "subagent", "requests": [{**step, "h": [0, 100, 16]}]}
    recording = tmp_path / "recording.jsonl.gz"
    with gzip.open(recording, "wb") as file:
        for name in "ab":
            file.write(msgspec.json.encode({"id": name, "requests": [step, inner, step]}) + b"\n")
    alone = without_subagents(recording, 1, tmp_path / "alone.jsonl.gz")
    assert [len(prompt) for prompt in prompts_of(recording, sessions=1)] == [2, 2, 2]
    assert [len(prompt) for prompt in prompts_of(alone, sessions=0)] == [2, 2]
    assert [len(prompt) for prompt in prompts_of(recording, sessions=1, tokens_max=512)] == [1, 1, 1]
