"""Conversations in rounds: with host memory and storage under the decode worker's device memory, and without a cache.

A group of conversations asks at once, and the next group when all of it is done and what it left is in its tiers: so
the hit rates are exact, not typical. Device memory is emptied in between.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from tidekv.engine.published.ledger import Unbalanced
from tidekv.engine.published.prompts import Prompt, Stretch
from tidekv.engine.published.results import Result, result_of
from tidekv.engine.published.setups import PAGE_TOKENS, RoundsSetup
from tidekv.engine.published.world import World
from tidekv.states import events


@dataclass(frozen=True)
class Rounds:
    """All rounds together, and for each the mean time to first token and the part of its prompts that was not sent."""

    all: Result
    first_token_mean_s: tuple[float, ...]
    hit_rates: tuple[float, ...]


def run_rounds(setup: RoundsSetup, *, cache: bool, seed: int = 1, **policies: object) -> Rounds:
    """Serve all rounds of all conversations. `policies` are those of the core, by name."""
    growth = setup.output_tokens // PAGE_TOKENS
    # The core refills what a request takes for its output, and gets it back at once: that much is not in use.
    device_pages = int(setup.at_once * (setup.longest_pages + growth) * setup.device_shares) + growth
    settings: dict[str, object] = {"device_pages": device_pages, "growth_reserve_pages": growth, **policies}
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
        served = world.served[first:]
        means.append(sum(request.first_token_s for request in served) / len(served))
        rates.append(1 - (world.ledger.sources["transfer"] - sent) / (world.ledger.prompt_tokens - tokens))
    if world.core.state.device.cached:
        raise Unbalanced("device memory was emptied, and holds something")
    return Rounds(result_of(world, world.served, begun_at_s=0.0), tuple(means), tuple(rates))


def _nothing() -> None:
    """The group goes on together."""


def _prompt(setup: RoundsSetup, client: int, number: int, *, cache: bool) -> Prompt:
    """The first has the user's tokens; each later one the tokens generated before, one of which has no KV, and what
    the user adds to full pages.
    """
    step = setup.user_tokens + setup.output_tokens
    known = max(0, setup.user_tokens + (number - 1) * step) if number else 0
    stored = number * step if cache and setup.prefill_reads_storage else 0
    return Prompt(shared=Stretch(client + 1, setup.user_tokens + number * step), known=known, stored=stored)
