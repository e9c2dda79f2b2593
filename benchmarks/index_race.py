"""Comparison of prefix indexes in one process on the same prompts: `python -m benchmarks.index_race sglang|vllm`.

A recording is replayed: for each request the prompt is matched and locked, room is made, pages are taken, the prompt is
inserted and stays locked until 16 later ones have arrived. Prompts are converted to each index's own form in advance:
an int64 array and packed tokens for tidekv, `array("q")` for SGLang, a list of ints for vLLM. Indexes take turns in
rounds; ratios are taken within a round, and their median is the figure; short calls have more rounds. Next to SGLang
also: matching a cached prompt of 32k tokens, evicting 10k tokens from 2,000 leaves, lock and unlock at three depths,
and the chain of page hashes.

Times are CPU times of the one thread, to reduce the influence of other processes. Writes figures as JSON, see
`figures.py`.
"""

from __future__ import annotations

import gc
import statistics
from collections import deque
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from time import thread_time_ns
from typing import Any  # Peers' objects have no types here.

import numpy as np

from benchmarks.figures import Figures, option_parser
from benchmarks.peer_trees import Ids, OurTree, SglangTree, VllmPool, chain, check_tree, check_vllm, enter, numbers
from benchmarks.peers import PeerMissing, default_cache, fetch, make_importable
from demo.blocks import VOCABULARY, TraceOptions
from demo.traces import read_trace
from tidekv.backends.keys.chain import page_digests

PAGE = 64
CAPACITIES = (1_000_000, 3_000_000)
LIVE = 16
WARM = 50
DEPTHS = (1, 32, 256)
LONG = 32_768
EVICTED, LEAVES, LEAF_TOKENS = 10_000, 2000, 1024


def read_prompts(path: Path, count: int) -> list[Ids]:
    """Return the first prompts of a recording, cut to whole pages."""
    prompts = []
    for request in read_trace(path, TraceOptions(time_scale=0.0, requests_max=count)):
        ids = np.frombuffer(request.prompt.packed(VOCABULARY), "<u4").astype(np.int64)
        if whole := len(ids) // PAGE * PAGE:
            prompts.append(ids[:whole])
    return prompts


def replay(tree: OurTree | SglangTree, prompts: list[Ids]) -> list[int]:
    """Return nanoseconds of each request, without the first ones."""
    held: deque[Any] = deque()
    spent = []
    gc.collect()
    gc.freeze()
    for ids in prompts:
        prompt, total = tree.prompt(ids), len(ids)
        began_ns = thread_time_ns()
        found, node, keys = tree.match(prompt)
        locked = tree.lock(node)
        needed = total - found
        while (short := needed - tree.free()) > 0:
            tree.evict(short)
            if tree.free() < needed:
                tree.unlock(held.popleft())
        leaf = tree.insert(keys, node, tree.take(needed))
        held.append(tree.lock(leaf))
        tree.unlock(locked)
        if len(held) > LIVE:
            tree.unlock(held.popleft())
        spent.append(thread_time_ns() - began_ns)
    gc.unfreeze()
    return spent[WARM:]


def replay_vllm(pool: VllmPool, prompts: list[Ids]) -> list[int]:
    """Replay as above, with vLLM's calls."""
    held: deque[Any] = deque()
    spent = []
    gc.collect()
    gc.freeze()
    for ids in prompts:
        prompt, total = pool.prompt(ids), len(ids)
        began_ns = thread_time_ns()
        request = pool.begin(prompt)
        found, blocks = pool.match(request)
        while not pool.enter(request, total, found, blocks):
            pool.end(held.popleft())
        held.append(request)
        if len(held) > LIVE:
            pool.end(held.popleft())
        spent.append(thread_time_ns() - began_ns)
    gc.unfreeze()
    return spent[WARM:]


def race_on_trace(
    figures: Figures, prompts: list[Ids], rounds: int, peer: str, run_peer: Callable[[int], list[int]]
) -> None:
    """Run rounds at each capacity; the figure is the smallest of the capacities' ratios."""
    least: dict[str, tuple[float, str]] = {}
    for capacity in CAPACITIES:
        ratios: dict[str, list[float]] = {}
        times: dict[str, list[float]] = {}
        for _ in range(rounds):
            found = {
                "array": replay(OurTree(PAGE, capacity, packed=False), prompts),
                "packed": replay(OurTree(PAGE, capacity, packed=True), prompts),
                peer: run_peer(capacity),
            }
            for name, spent in found.items():
                times.setdefault(name, []).append(statistics.fmean(spent) / 1e3)
            for form in ("array", "packed"):
                ratios.setdefault(f"{form}.mean", []).append(
                    statistics.fmean(found[peer]) / statistics.fmean(found[form])
                )
                theirs, ours = (float(np.percentile(found[name], 99)) for name in (peer, form))
                ratios.setdefault(f"{form}.p99", []).append(theirs / ours)
        detail = ", ".join(f"{name} {statistics.median(values):.1f} µs" for name, values in times.items())
        figures.note(f"{len(prompts)} requests, {capacity:,} tokens: {detail} a request")
        for name, values in ratios.items():
            words = f"rounds {min(values):.1f} to {max(values):.1f} at {capacity:,} tokens"
            least[name] = min(least.get(name, (float("inf"), "")), (statistics.median(values), words))
    for name, (ratio, words) in least.items():
        figures.add(f"{peer}.replay.{name}", ratio, words)


def per_call_ns(work: Callable[[], object], *, least_ms: float = 4.0) -> float:
    """Return nanoseconds per call of a repeatable function."""
    work()
    count = 1
    while True:
        began_ns = thread_time_ns()
        for _ in range(count):
            work()
        spent = thread_time_ns() - began_ns
        if spent > least_ms * 1e6:
            return spent / count
        count *= 4


def race(ours: Callable[[], float], theirs: Callable[[], float], rounds: int) -> tuple[float, float, float]:
    """Return the median ratio of theirs to ours within rounds, and the medians of both."""
    pairs = [(ours(), theirs()) for _ in range(rounds)]
    ratio = statistics.median(other / own for own, other in pairs)
    return ratio, statistics.median(own for own, _ in pairs), statistics.median(other for _, other in pairs)


def race_match(figures: Figures, rounds: int) -> None:
    """Compare the match of a cached prompt of 32k tokens, as one node."""
    ids = numbers(LONG, 1)
    trees: dict[str, OurTree | SglangTree] = {
        "array": OurTree(PAGE, 1_000_000, packed=False),
        "packed": OurTree(PAGE, 1_000_000, packed=True),
        "sglang": SglangTree(PAGE, 1_000_000),
    }
    calls = {}
    for name, tree in trees.items():
        enter(tree, ids)
        prompt = tree.prompt(ids)
        assert tree.match(prompt)[0] == LONG
        calls[name] = lambda tree=tree, prompt=prompt: per_call_ns(lambda: tree.match(prompt))
    for form in ("array", "packed"):
        ratio, own, other = race(calls[form], calls["sglang"], 7 * rounds)
        words = f"{own / 1e3:.1f} µs against {other / 1e3:.1f} µs"
        figures.add(f"sglang.match.{form}", ratio, words)


def race_eviction(figures: Figures, rounds: int) -> None:
    """Compare the eviction of 10k tokens from 2,000 leaves in LRU order; evicted leaves are inserted again."""
    trees = [OurTree(PAGE, 4_000_000, packed=True), SglangTree(PAGE, 4_000_000)]
    seeds = iter(range(10_000, 90_000))
    for tree in trees:
        for _ in range(LEAVES):
            enter(tree, numbers(LEAF_TOKENS, next(seeds)))

    def evict(tree: OurTree | SglangTree) -> float:
        gc.collect(0)
        began_ns = thread_time_ns()
        tree.evict(EVICTED)
        spent = thread_time_ns() - began_ns
        for _ in range(-(-EVICTED // LEAF_TOKENS)):
            enter(tree, numbers(LEAF_TOKENS, next(seeds)))
        return float(spent)

    ratio, own, other = race(lambda: evict(trees[0]), lambda: evict(trees[1]), 4 * rounds)
    figures.add("sglang.evict", ratio, f"{own / 1e3:.0f} µs against {other / 1e3:.0f} µs")


def race_locks(figures: Figures, rounds: int) -> None:
    """Compare lock and unlock at the end of a path of several nodes; the figure is the smallest ratio of the depths."""
    detail, least = list[str](), float("inf")
    for depth in DEPTHS:
        ids = numbers(PAGE * depth, 9)
        calls = []
        for tree in (OurTree(PAGE, 1_000_000, packed=True), SglangTree(PAGE, 1_000_000)):
            for pages in range(1, depth + 1):
                leaf = enter(tree, ids[: pages * PAGE])

            def there_and_back(tree: OurTree | SglangTree = tree, leaf: Any = leaf) -> None:
                tree.unlock(tree.lock(leaf))

            calls.append(lambda work=there_and_back: per_call_ns(work))
        ratio, own, other = race(*calls, 3 * rounds)
        detail.append(f"depth {depth}: {own / 1e3:.2f} µs against {other / 1e3:.2f} µs, {ratio:.1f} times")
        least = min(least, ratio)
    figures.add("sglang.lock", least, "; ".join(detail))


def race_keys(figures: Figures, rounds: int) -> None:
    """Compare the chain of page hashes over 32k tokens, which must be equal."""
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_hash_str

    ids = numbers(LONG, 1)
    packed = ids.astype("<u4").tobytes()
    key = RadixKey(SglangTree.prompt(None, ids))  # type: ignore[arg-type]  # It needs nothing of a tree.
    for page_size in (64, 16):
        theirs = get_hash_str(key, None, page_size)
        if theirs != chain(packed, page_size):
            raise PeerMissing("its page hashes are not the chain that it documents")
        assert [digest.hex() for digest in page_digests(packed, page_size)] == theirs
        ratio, own, other = race(
            lambda size=page_size: per_call_ns(lambda: page_digests(packed, size)),
            lambda size=page_size: per_call_ns(lambda: get_hash_str(key, None, size)),
            rounds,
        )
        figures.add(f"sglang.keys.{page_size}", 1 / ratio, f"{own / 1e3:.0f} µs against {other / 1e3:.0f} µs")


def note_limits(figures: Figures) -> None:
    """Note lower bounds for comparing, copying or hashing 32k tokens."""
    packed = numbers(LONG, 1).astype("<u4").tobytes()
    same = bytes(bytearray(packed))
    within = b"\0" * 64 + packed
    parts = {
        "compare": lambda: packed == same,
        "copy": lambda: within[64:],
        "SHA-256 in one pass": lambda: sha256(packed).digest(),
    }
    detail = ", ".join(f"{name} {per_call_ns(work) / 1e3:.1f} µs" for name, work in parts.items())
    figures.note(f"limits for 32k packed tokens: {detail}")


def main() -> None:
    """Parse the options, prepare the peer, race."""
    parser = option_parser(__doc__)
    parser.add_argument("peer", choices=("sglang", "vllm"))
    parser.add_argument("--peers", type=Path, default=default_cache(), help="where peers are kept")
    parser.add_argument("--trace", type=Path, help="a recording; without one, measurements that need it are skipped")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    with Figures(chosen.json) as figures:
        prompts = read_prompts(chosen.trace, chosen.requests) if chosen.trace else []
        if not prompts:
            figures.missing(f"{chosen.peer}.replay", "there is no recording (--traces)")
        folder = fetch(chosen.peer, chosen.peers)
        make_importable(chosen.peer, folder)
        check_tree(OurTree(PAGE, 1_000_000, packed=False))
        if chosen.peer == "vllm":
            check_vllm(VllmPool(PAGE, 1_000_000))
            if prompts:
                race_on_trace(
                    figures, prompts, chosen.rounds, "vllm", lambda size: replay_vllm(VllmPool(PAGE, size), prompts)
                )
            return
        check_tree(SglangTree(PAGE, 1_000_000))
        note_limits(figures)
        race_locks(figures, chosen.rounds)
        race_match(figures, chosen.rounds)
        race_eviction(figures, chosen.rounds)
        race_keys(figures, chosen.rounds)
        if prompts:
            race_on_trace(
                figures, prompts, chosen.rounds, "sglang", lambda size: replay(SglangTree(PAGE, size), prompts)
            )


if __name__ == "__main__":
    main()
