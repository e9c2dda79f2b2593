"""The capacity effect: many requests with one long prefix, with and without a radix cache on the decode worker.

Without the cache each request needs pages for its whole prompt, so few run and the others wait for memory. With it they
share the pages of the prefix, all of them run, and prefill sends only the suffix. More running requests make every
decoding step slower.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from benchmarks.published.prompts import Prompt, Stretch
from benchmarks.published.results import Result, result_of
from benchmarks.published.setups import PAGE_TOKENS, CapacitySetup
from benchmarks.published.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX_TEXT = 1


def run_capacity(setup: CapacitySetup, *, cache: bool, seed: int = 1) -> Result:
    """Serve all requests with `in_flight` at once; each end starts the next one."""
    spread = round(setup.output_tokens * setup.output_spread)
    prompt_tokens = setup.prefix_tokens + setup.suffix_tokens
    growth = _pages(prompt_tokens + setup.output_tokens + spread - 1) - _pages(prompt_tokens)
    settings = {"device_pages": setup.pool_tokens // PAGE_TOKENS, "growth_reserve_pages": growth}
    world = World(setup.speeds, settings, cache=cache)
    random = Random(seed)
    asked = _asked(setup, random, spread)
    if setup.warm:
        world.ask(_prompt(setup, 0), setup.output_tokens, lambda: None)
        world.run()
    begun_at_s, warm, sent = world.schedule.now_s, len(world.served), world.link.served

    def ask_next() -> None:
        following = next(asked, None)
        if following is not None:
            world.ask(*following, ask_next)

    for _ in range(setup.in_flight):
        ask_next()
    world.run()
    return result_of(world, world.served[warm:], begun_at_s=begun_at_s, sent_before=sent)


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)


def _asked(setup: CapacitySetup, random: Random, spread: int) -> Iterator[tuple[Prompt, int]]:
    for number in range(1, setup.requests + 1):
        yield _prompt(setup, number), setup.output_tokens + random.randint(-spread, spread)


def _prompt(setup: CapacitySetup, number: int) -> Prompt:
    return Prompt(
        shared=Stretch(PREFIX_TEXT, setup.prefix_tokens),
        own=Stretch(PREFIX_TEXT + 1 + number, setup.suffix_tokens),
        known=setup.prefix_tokens,
    )
