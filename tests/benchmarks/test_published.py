"""The published tables on a modeled clock: alike for a seed, balanced to the byte, and seen where they are wrong."""

from __future__ import annotations

import heapq
import io
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from benchmarks.published.capacity import run_capacity
from benchmarks.published.ledger import Unbalanced
from benchmarks.published.printing import print_paper
from benchmarks.published.prompts import Prompt, Stretch, page_names
from benchmarks.published.results import quantile
from benchmarks.published.rounds import run_rounds
from benchmarks.published.setups import CapacitySetup, RoundsSetup
from benchmarks.published.stations import DecodeBatch, Line
from benchmarks.published.sweep import CAPACITY_VARIED, Gains, Swept, sweep
from benchmarks.published.tables import DEFAULT_PREFETCH, capacity_arms, rounds_arms, run_paper
from benchmarks.published.world import World
from simulation.schedule import Schedule
from tidekv.states import commands

CAPACITY = CapacitySetup(
    speeds=replace(CapacitySetup().speeds, prefill_tokens_per_s=20_000.0),
    requests=60,
    in_flight=16,
    prefix_tokens=64 * 20 + 10,
    suffix_tokens=64 * 2,
    output_tokens=64,
    pool_tokens=6 * 64 * 26,
)
ROUNDS = RoundsSetup(clients=12, at_once=3, user_tokens=256, output_tokens=512)


def test_the_same_seed_gives_the_same_tables_and_another_one_others() -> None:
    capacity, rounds = replace(CAPACITY, requests=24), replace(ROUNDS, clients=3, rounds=2)
    once, again = (run_paper(capacity, rounds, swept=False) for _ in range(2))
    assert once == again
    assert run_paper(capacity, rounds, seed=2, swept=False) != once


def test_more_requests_run_where_they_share_their_prefix() -> None:
    arms = capacity_arms(replace(CAPACITY, warm=True))
    assert arms.gains.first > 1
    assert arms.gains.first_token > 2
    # Of each request but the one before, the prefix's full pages are not sent.
    assert arms.cached.sources["l1"] == 60 * 64 * 20
    assert arms.bytes_saved == pytest.approx(20 / 23)


@pytest.mark.parametrize(("running", "published_ms"), [(37, 65.2), (128, 134.6)])
def test_steps_by_token_are_those_that_were_published(running: int, published_ms: float) -> None:
    setup = CapacitySetup().by_token_step()
    step_s = setup.speeds.step_base_s + running * setup.speeds.step_request_s
    assert 1e3 * step_s == pytest.approx(published_ms, rel=0.04)
    assert replace(setup, speeds=CapacitySetup().speeds) == CapacitySetup()
    # Seconds for the suffixes of the 1,000 requests, far less than the 622 s that the published run took.
    assert 1000 * setup.suffix_tokens / (3 * setup.speeds.prefill_tokens_per_s) < 100


def test_where_all_fit_without_a_cache_only_the_bytes_differ() -> None:
    arms = capacity_arms(replace(CAPACITY, in_flight=4))
    assert arms.gains.first == pytest.approx(1, abs=0.02)
    assert 1 <= arms.gains.first_token < 1.5
    assert arms.bytes_saved > 0.7


def test_hit_rates_of_the_rounds_are_those_that_follow_from_their_lengths() -> None:
    arms = rounds_arms(ROUNDS)
    assert arms.cached.hit_rates == pytest.approx((0, 0.75, 24 / 28, 0.9, 48 / 52, 0.9375))
    assert arms.without.hit_rates == (0,) * 6
    assert arms.cached.all.sources["l1"] == 0
    assert arms.cached.all.sent_bytes == 12 * 6 * 256 * ROUNDS.speeds.token_bytes
    assert sum(arms.cached.all.sources.values()) == arms.cached.all.prompt_tokens
    assert min(arms.cached.all.sources[tier] for tier in ("l2", "l3")) > 0


FEW_CLIENTS = RoundsSetup(clients=32, host_ratio=0.6, prefetch=DEFAULT_PREFETCH)
"""The published rounds with fewer conversations, and host memory for as large a part of them."""


def test_the_default_policy_saves_what_was_published_and_more() -> None:
    gains = rounds_arms(FEW_CLIENTS).gains
    # 60 % and 50 % less; published are 39 % and 52 %.
    assert gains.first_token > 1 / (1 - 0.6)
    assert gains.first > 1 / (1 - 0.5)


@pytest.mark.parametrize("slow", ["storage_bytes_per_s", "copy_bytes_per_s"])
def test_storage_or_host_memory_of_an_eighth_of_the_speed_costs_the_default_policy_nothing(slow: str) -> None:
    speeds = replace(FEW_CLIENTS.speeds, **{slow: getattr(FEW_CLIENTS.speeds, slow) / 8})
    arms = rounds_arms(replace(FEW_CLIENTS, speeds=speeds))
    for share in (0.5, 0.99):
        without, cached = (quantile(arm.all.first_token_s, share) for arm in (arms.without, arms.cached))
        assert cached <= 1.05 * without


def test_what_host_memory_cannot_hold_is_sent_and_is_not_lost() -> None:
    rounds = run_rounds(replace(ROUNDS, host_ratio=0.2), cache=True)
    assert rounds.all.prompt_tokens == sum(rounds.all.sources.values())
    assert rounds.hit_rates[-1] < 0.9375


def test_bytes_that_are_counted_twice_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = Line.serve

    def twice(line: Line, amount: float, action: object) -> None:
        line.served += amount
        serve(line, amount, action)  # type: ignore[arg-type]  # What was given is passed on.

    monkeypatch.setattr(Line, "serve", twice)
    with pytest.raises(Unbalanced, match="pages were requested from prefill, and the link has served"):
        run_capacity(CAPACITY, cache=True)


def test_a_source_that_is_told_too_much_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = World._ready

    def boasting(world: World, command: commands.ReportReady) -> None:
        command.sources["l1"] += 64
        ready(world, command)

    monkeypatch.setattr(World, "_ready", boasting)
    with pytest.raises(Unbalanced, match="for a prompt of"):
        run_capacity(CAPACITY, cache=True)


def test_pages_that_are_sent_and_used_by_nobody_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = World._ready

    def modest(world: World, command: commands.ReportReady) -> None:
        moved = command.sources["transfer"] // 2
        command.sources["transfer"] -= moved
        command.sources["l1"] += moved
        ready(world, command)

    monkeypatch.setattr(World, "_ready", modest)
    with pytest.raises(Unbalanced, match="requests report"):
        run_capacity(CAPACITY, cache=True)


def test_a_world_in_which_a_request_is_forgotten_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "_promise", lambda world, command: world.ledger.asked(command))
    with pytest.raises(Unbalanced, match="no event is scheduled, but 16 requests have not ended"):
        run_capacity(CAPACITY, cache=False)


@given(
    st.lists(st.tuples(st.floats(0, 10), st.integers(1, 50)), min_size=1, max_size=12),
    st.floats(0.01, 1),
    st.floats(0, 0.5),
)
def test_the_batch_ends_each_request_when_steps_of_the_right_length_have_passed(
    load: list[tuple[float, int]], base_s: float, request_s: float
) -> None:
    schedule = Schedule()
    batch = DecodeBatch(schedule, base_s=base_s, request_s=request_s)
    ended: dict[int, float] = {}
    for number, (at_s, tokens) in enumerate(load):
        schedule.at(
            at_s,
            lambda number=number, tokens=tokens: batch.join(tokens, lambda: ended.update({number: schedule.now_s})),
        )
    while schedule.run_next():
        pass
    assert ended == pytest.approx(_ends(load, base_s, request_s), rel=1e-4, abs=1e-4)


def _ends(load: list[tuple[float, int]], base_s: float, request_s: float) -> dict[int, float]:
    """The same, token by token: what is left of each, from one change of the batch to the next."""
    coming = [(at_s, number) for number, (at_s, _) in enumerate(load)]
    heapq.heapify(coming)
    left: dict[int, float] = {}
    ended: dict[int, float] = {}
    now_s = 0.0
    while coming or left:
        step_s = base_s + len(left) * request_s
        end_s = now_s + min(left.values()) * step_s if left else float("inf")
        next_s = min(end_s, coming[0][0] if coming else float("inf"))
        left = {number: tokens - (next_s - now_s) / step_s for number, tokens in left.items()}
        now_s = next_s
        if next_s == end_s:
            least = min(left, key=lambda number: left[number])
            ended[least] = now_s
            del left[least]
        else:
            _, number = heapq.heappop(coming)
            left[number] = load[number][1]
    return ended


def test_a_stalled_batch_is_later_by_the_time_it_stood() -> None:
    schedule, ended = Schedule(), []
    batch = DecodeBatch(schedule, base_s=1.0, request_s=0.0)
    batch.stall(5.0)  # No request is present, so none is delayed.
    batch.join(10, lambda: ended.append(schedule.now_s))
    schedule.at(3.0, batch.stall, 2.0)
    while schedule.run_next():
        pass
    assert ended == pytest.approx([12.0])


def test_a_line_serves_in_order_of_asking() -> None:
    schedule, served = Schedule(), []
    line = Line(schedule, 10.0)
    for amount in (20, 10):
        line.serve(amount, lambda amount=amount: served.append((amount, schedule.now_s)))
    schedule.at(5.0, line.serve, 10, lambda: served.append((0, schedule.now_s)))
    while schedule.run_next():
        pass
    assert served == [(20, 2.0), (10, 3.0), (0, 6.0)]


def test_prompts_have_the_pages_in_common_that_their_texts_share() -> None:
    one, other = (Prompt(Stretch(1, 100), Stretch(text, 92)) for text in (2, 3))
    names = [page_names(prompt, 192) for prompt in (one, other)]
    assert names[0][:1] == names[1][:1]
    # The page with the end of the shared text and the begin of the own one is already another.
    assert not set(names[0][1:]) & set(names[1][1:])
    assert page_names(Prompt(Stretch(5, 128)), 256)[:2] == page_names(Prompt(Stretch(5, 192)), 192)[:2]


def test_a_sweep_finds_where_a_gain_ends_on_either_side() -> None:
    def gain(setup: CapacitySetup) -> Gains:
        return Gains(1.0, {16: 3.0, 32: 2.0, 64: 0.1, 8: 1.2, 4: 1.0}.get(setup.in_flight, 1.0))

    (swept,) = sweep(CAPACITY, [CAPACITY_VARIED[-1]], gain)
    assert set(swept.gains) == {0.25, 0.5, 1.0, 2.0, 4.0}
    below, above = swept.ends
    assert below == pytest.approx(0.25 + 0.25 * 0.05 / 0.2)
    assert above == pytest.approx(2 + 2 * 0.95 / 1.9)


def test_a_gain_that_does_not_fall_is_not_followed_further() -> None:
    (swept,) = sweep(CAPACITY, [CAPACITY_VARIED[0]], lambda setup: Gains(1.0, 4.0))
    assert set(swept.gains) == {0.5, 1.0, 2.0}
    assert swept.ends == []
    assert swept.least == (0.5, 4.0)


def test_all_of_it_is_printed_and_every_constant_is_swept() -> None:
    capacity, rounds = replace(CAPACITY, requests=24), replace(ROUNDS, clients=3, rounds=2)
    console = Console(file=io.StringIO(), record=True, width=200)
    print_paper(run_paper(capacity, rounds), console)
    said = console.export_text()
    for words in ("30 in flight", "as published", "L2 + L3 over the rounds", "hit rate", "shared prefix", "storage"):
        assert words in said
    # Nothing hides the assumed policy, nor the default beside it; both tables use one set of link speeds.
    for words in (
        "prefetch wait_complete",
        f"prefetch {DEFAULT_PREFETCH}, the default",
        "one set of link speeds",
        "22.5",
    ):
        assert words in said


def test_a_world_has_the_default_policy_unless_its_setup_names_another() -> None:
    speeds = replace(ROUNDS.speeds, storage_bytes_per_s=0.0)
    assert World(speeds, {"device_pages": 4}, cache=True).core.settings.prefetch == DEFAULT_PREFETCH
    assert RoundsSetup().prefetch == "wait_complete"


def test_the_range_over_a_sweep_is_that_of_all_factors() -> None:
    swept = Swept[RoundsSetup]("link", {0.5: Gains(1.5, 1), 1.0: Gains(2.0, 1), 2.0: Gains(0.7, 1)})
    assert swept.first_range == (0.7, 2.0)
