"""Conversations in rounds: with host memory and storage below the decode worker's device memory, and without a cache.

A group of conversations sends its requests at once. The next group starts after all of them have ended and their pages
have reached their tiers, so the hit rates are exact. Device memory is flushed in between.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from benchmarks.published.ledger import Unbalanced
from benchmarks.published.prompts import Prompt, Stretch
from benchmarks.published.results import Result, result_of
from benchmarks.published.setups import PAGE_TOKENS, RoundsSetup
from benchmarks.published.world import World
from tidekv.states import events


@dataclass(frozen=True)
class Rounds:
    """All rounds together.

    For each round the mean time to first token and the share of its prompts that was not sent.
    """

    all: Result
    first_token_mean_s: tuple[float, ...]
    hit_rates: tuple[float, ...]


def run_rounds(setup: RoundsSetup, *, cache: bool, seed: int = 1) -> Rounds:
    """Serve all rounds of all conversations."""
    growth = setup.output_tokens // PAGE_TOKENS
    # Pages for output come from a reserve that the core refills at once, so they are needed once more.
    device_pages = int(setup.at_once * (setup.longest_pages + growth) * setup.device_shares) + growth
    settings: dict[str, object] = {
        "device_pages": device_pages,
        "growth_reserve_pages": growth,
        "prefetch": setup.prefetch,
    }
    speeds = setup.speeds
    if cache:
        settings["host_pages"] = int(setup.host_ratio * device_pages)
    else:
        speeds = replace(speeds, storage_bytes_per_s=0.0)
    world = World(speeds, settings, cache=cache)
    random = Random(seed)
    means: list[float] = []
    rates: list[float] = []
    for number in range(setup.rounds):
        clients = list(range(setup.clients))
        random.shuffle(clients)
        first, tokens, sent = len(world.served), world.ledger.prompt_tokens, world.ledger.sources["transfer"]
        for begin in range(0, setup.clients, setup.at_once):
            for client in clients[begin : begin + setup.at_once]:
                world.ask(_prompt(setup, client, number, cache=cache), setup.output_tokens + 1, _nothing)
            world.run()
            world.step(events.FlushRequested(at_s=world.schedule.now_s, call=number, tiers=("l1",)))
            world.run()
        served = world.served[first:]
        means.append(sum(request.first_token_s for request in served) / len(served))
        rates.append(1 - (world.ledger.sources["transfer"] - sent) / (world.ledger.prompt_tokens - tokens))
    if world.core.state.device.cached:
        raise Unbalanced("device memory was flushed but still holds pages")
    return Rounds(result_of(world, world.served, begun_at_s=0.0), tuple(means), tuple(rates))


def _nothing() -> None:
    """Do nothing: the next group starts after the whole group has ended."""


def _prompt(setup: RoundsSetup, client: int, number: int, *, cache: bool) -> Prompt:
    """Return the prompt of a round.

    The first one has the user's tokens. Each later one adds the generated tokens, one of which has no KV, and the
    user's next tokens, which fill up the last page.
    """
    step = setup.user_tokens + setup.output_tokens
    known = max(0, setup.user_tokens + (number - 1) * step) if number else 0
    stored = number * step if cache and setup.prefill_reads_storage else 0
    return Prompt(shared=Stretch(client + 1, setup.user_tokens + number * step), known=known, stored=stored)
