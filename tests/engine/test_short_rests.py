"""A short rest: decode computes it at once, though there is a prefill; the answers are the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.loopback_pair import LAYOUT, PAGE, Pair, loopback_pair
from tidekv import DevicePool, EngineConfig, InvalidConfig, JournalOptions
from tidekv.backends.keys.chain import pack_tokens
from tidekv.engine.decode.values import RecomputeJob
from tidekv.engine.journal.replayer import Replayer
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.engine.synthetic.prefill import synthetic_first_token

PROMPT = list(range(4 * PAGE))
THRESHOLD = 2 * PAGE


class Caller:
    """A caller that computes what it is asked for, and checks what it gets."""

    def __init__(self) -> None:
        self.device = DevicePool.allocate(LAYOUT, 32)
        self.starts: list[int] = []
        self.fails = False
        self._kv = SyntheticKV(self.device)

    async def recompute(self, job: RecomputeJob) -> tuple[int, dict[str, object]]:
        self.starts.append(job.start_token)
        if self.fails:
            raise MemoryError("no room for activations")
        first = job.start_token // PAGE
        self._kv.fill(job.pages[first:].tolist(), prompt_digests(job.packed_tokens, PAGE)[first:])
        return synthetic_first_token(job.packed_tokens, 1000), {}

    async def serve(self, pair: Pair, tokens: Sequence[int]) -> dict[str, int]:
        """Restore a prompt, check first token and pages, and give it back; returns where its tokens came from."""
        ready = await pair.ready(tokens)
        packed = pack_tokens(list(tokens))
        assert ready.first_token == synthetic_first_token(packed, 1000)
        assert self._kv.verify(ready.pages.tolist(), prompt_digests(packed, PAGE)) == []
        await pair.engine.finish(ready, [])
        await pair.engine.wait_settled()
        return {source: tokens for source, tokens in ready.sources.items() if tokens}


def config(threshold: int = THRESHOLD, journal: Path | None = None) -> EngineConfig:
    options = JournalOptions(path=None if journal is None else str(journal))
    return EngineConfig(recompute_threshold=threshold, vocabulary=1000, journal=options)


async def test_what_the_device_lacks_is_computed_if_it_is_short_and_sent_if_it_is_not() -> None:
    caller = Caller()
    async with loopback_pair(config(), device=caller.device, recompute=caller.recompute) as pair:
        assert await caller.serve(pair, PROMPT) == {"transfer": 64}
        longer = [*PROMPT, *range(500, 500 + THRESHOLD)]
        assert (await pair.engine.look_up(longer)).recompute == THRESHOLD
        assert await caller.serve(pair, longer) == {"l1": 64, "recompute": THRESHOLD}
        assert await caller.serve(pair, [*longer, *range(600, 601 + THRESHOLD)]) == {"l1": 96, "transfer": 33}
        assert caller.starts == [64]
        assert pair.engine.statistics()["core"]["short_rests"] == 1


async def test_what_host_memory_has_is_not_computed_unless_it_is_short_with_the_rest() -> None:
    caller = Caller()
    async with loopback_pair(config(), device=caller.device, recompute=caller.recompute) as pair:
        await caller.serve(pair, PROMPT)
        await pair.engine.flush(("l1",))
        assert await caller.serve(pair, [*PROMPT, 7]) == {"l2": 64, "transfer": 1}


async def test_a_short_rest_that_cannot_be_computed_is_asked_of_prefill() -> None:
    caller = Caller()
    async with loopback_pair(config(), device=caller.device, recompute=caller.recompute) as pair:
        await caller.serve(pair, PROMPT)
        caller.fails = True
        assert await caller.serve(pair, [*PROMPT, 7]) == {"l1": 64, "transfer": 1}
        assert caller.starts == [64]
        assert pair.engine.statistics()["core"]["sent_back"] == 1


@pytest.mark.parametrize("seed", range(4))
async def test_answers_are_those_of_prefill_whatever_is_computed_and_the_run_replays(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    caller = Caller()
    options = config(dice.choice((1, PAGE, 3 * PAGE)), tmp_path / "journal")
    async with loopback_pair(options, device=caller.device, recompute=caller.recompute) as pair:
        for _ in range(25):
            caller.fails = dice.random() < 0.2
            start = PROMPT[: PAGE * dice.randint(0, 4)]
            await caller.serve(pair, [*start, *(dice.randrange(3) for _ in range(dice.randint(1, 3 * PAGE)))])
            if dice.random() < 0.2:
                await pair.engine.flush(("l1",))
        pair.engine.check()
    assert Replayer(tmp_path / "journal").run().complete


async def test_a_threshold_without_a_caller_that_computes_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="recompute_threshold needs recompute_with"):
        async with loopback_pair(config()):
            pass
