"""Tables for a terminal: published next to modeled results, and the sweep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from benchmarks.published.results import Result, quantile
from benchmarks.published.setups import ASSUMED_PREFETCH
from benchmarks.published.sweep import ENDED
from benchmarks.published.tables import (
    DEFAULT_PREFETCH,
    HIGH_IN_FLIGHT,
    LOW_IN_FLIGHT,
    CapacityArms,
    Paper,
    RoundsArms,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.published.setups import CapacitySetup, RoundsSetup
    from benchmarks.published.sources import Raced
    from benchmarks.published.sweep import Swept

PUBLISHED_CAPACITY = ("1.243", "1.608", "71.94", "6.99", "98.05", "70.67", "")
PUBLISHED_HIGH = ("", "1.690", "", "", "", "", "")
PUBLISHED_MEANS = (
    ("2.29", "7.25", "12.72", "18.01", "23.40", "28.50"),
    ("1.59", "5.56", "9.19", "11.93", "12.52", "15.18"),
)


def print_paper(paper: Paper, console: Console | None = None) -> None:
    """Print all tables. The clock is modeled, so no figure depends on the machine that ran them."""
    console = console or Console()
    console.print(_capacity_table(paper))
    console.print(_rounds_table(paper))
    console.print(
        _summary(f"L2 + L3 over the rounds, prefetch {ASSUMED_PREFETCH}", paper.rounds),
        _summary(f"the same, prefetch {DEFAULT_PREFETCH}, the default", paper.rounds_default),
        _summary("the same, if prefill computes again what decode generated", paper.rounds_alone),
        sep="\n",
        soft_wrap=True,
    )
    if paper.capacity_swept:
        head = ("requests/s", "first token p50")
        console.print(_sweep_table("Capacity effect: gain by constant", head, paper.capacity_swept))
        console.print(_sweep_table(f"{LOW_IN_FLIGHT} in flight: gain by constant", head, paper.low_swept))
        head = ("first token p99", "first token mean")
        for prefetch, swept in (
            (ASSUMED_PREFETCH, paper.rounds_swept),
            (f"{DEFAULT_PREFETCH}, the default", paper.rounds_default_swept),
        ):
            console.print(_sweep_table(f"L2 + L3, prefetch {prefetch}: gain by constant", head, swept))
    if paper.links:
        console.print(_links_table(paper))


def print_sources(raced: Sequence[Raced], console: Console | None = None) -> None:
    """Print the race of the planned policy against fixed ones."""
    table = Table(title="Mean time to ready, s: source of pages that storage and prefill both have, on a modeled clock")
    for column in ("link : disk", "in flight", *raced[0].ready_s, "planned over best fixed"):
        table.add_column(column, justify="right")
    for one in raced:
        ratio = f"{one.ratio:g} : 1" if one.ratio >= 1 else f"1 : {1 / one.ratio:g}"
        times = (f"{mean:.3f}" for mean in one.mean_s.values())
        table.add_row(ratio, str(one.in_flight), *times, f"{one.over_best_fixed:.3f}")
    (console or Console()).print(table)


def _capacity_table(paper: Paper) -> Table:
    table = Table(title="Capacity effect: without / with a decode radix cache, on a modeled clock")
    table.add_column("run")
    for column in ("requests/s", "first token p50, s", "latency p50, s"):
        table.add_column(column, justify="right")
    for column in ("ms a token", "gain requests/s", "gain first token", "bytes saved"):
        table.add_column(column, justify="right")
    for name, arms, published in (
        ("128 in flight", paper.capacity, PUBLISHED_CAPACITY),
        ("  one request before", paper.warm, PUBLISHED_CAPACITY),
        ("  step of 40 + 0.7 n ms", paper.token_step, PUBLISHED_CAPACITY),
        ("  and prefill that slow", paper.token_step_alone, PUBLISHED_CAPACITY),
        (f"{HIGH_IN_FLIGHT} in flight", paper.high, PUBLISHED_HIGH),
        (f"{LOW_IN_FLIGHT} in flight", paper.low, None),
    ):
        table.add_row(name, *_capacity_row(arms))
        if published is not None and not name.startswith(" "):
            pairs = [f"{published[at] or '-'} / {published[at + 1] or '-'}" for at in (0, 2, 4)]
            table.add_row("  as published", *pairs, style="dim")
    return table


def _capacity_row(arms: CapacityArms) -> list[str]:
    def both(value: Iterable[float], form: str) -> str:
        return " / ".join(format(one, form) for one in value)

    pair = (arms.without, arms.cached)
    return [
        both((one.requests_per_s for one in pair), ".3f"),
        both((quantile(one.first_token_s, 0.5) for one in pair), ".2f"),
        both((quantile(one.latency_s, 0.5) for one in pair), ".2f"),
        both((one.token_s * 1e3 for one in pair), ".1f"),
        f"{arms.gains.first:.3f} x",
        f"{arms.gains.first_token:.2f} x",
        f"{arms.bytes_saved:.1%}",
    ]


def _rounds_table(paper: Paper) -> Table:
    table = Table(title="Mean time to first token by round, s: L2 + L3 under the decode worker, on a modeled clock")
    table.add_column("")
    for number in range(len(paper.rounds.cached.hit_rates)):
        table.add_column(f"round {number}", justify="right")
    arms = paper.rounds
    for name, way, published in (
        ("without", arms.without, PUBLISHED_MEANS[0]),
        (f"with L2 + L3, {ASSUMED_PREFETCH}", arms.cached, None),
        (f"with L2 + L3, {DEFAULT_PREFETCH} (default)", paper.rounds_default.cached, PUBLISHED_MEANS[1]),
    ):
        table.add_row(name, *(f"{mean:.2f}" for mean in way.first_token_mean_s))
        if published is not None:
            table.add_row("  as published", *published[: len(way.first_token_mean_s)], style="dim")
    table.add_row("hit rate", *(f"{rate:.4f}" for rate in arms.cached.hit_rates))
    return table


def _links_table(paper: Paper) -> Table:
    table = Table(title="Gains at one set of link speeds")
    for column in (
        "link, GB/s", "requests/s", "first token p50",
        f"rounds, {ASSUMED_PREFETCH}: p99", "mean", f"rounds, {DEFAULT_PREFETCH} (default): p99", "mean",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for at in paper.links:
        gains = [
            number for one in (at.capacity, at.rounds, at.rounds_default) for number in (one.first, one.first_token)
        ]
        table.add_row(f"{at.bytes_per_s / 1e9:.1f}", *(f"{gain:.2f}" for gain in gains))
    return table


def _summary(name: str, arms: RoundsArms) -> str:
    without, cached = arms.without.all, arms.cached.all

    def less(share: float | None) -> str:
        before, after = ((_first(one, share)) for one in (without, cached))
        return f"{before:.2f} → {after:.2f} s ({after / before - 1:+.1%})"

    return (
        f"{name}: first token mean {less(None)}, p90 {less(0.9)}, p99 {less(0.99)};"
        f" ms a token {without.token_s * 1e3:.2f} → {cached.token_s * 1e3:.2f} ({arms.token_more:+.1%})"
    )


def _first(result: Result, share: float | None) -> float:
    return result.first_token_mean_s if share is None else quantile(result.first_token_s, share)


def _sweep_table(
    title: str, head: tuple[str, str], swept: Iterable[Swept[CapacitySetup] | Swept[RoundsSetup]]
) -> Table:
    table = Table(title=title)
    table.add_column("constant")
    for gain in head:
        table.add_column(f"{gain}: half / as is / double", justify="right")
    table.add_column("the former, over all factors")
    table.add_column("the latter ends at")
    for one in swept:
        three = [one.gains[factor] for factor in (0.5, 1.0, 2.0)]
        first = " / ".join(f"{gains.first:.2f}" for gains in three)
        token = " / ".join(f"{gains.first_token:.2f}" for gains in three)
        table.add_row(one.name, first, token, "{:.2f} to {:.2f}".format(*one.first_range), end_in_words(one))
    return table


def end_in_words(one: Swept[CapacitySetup] | Swept[RoundsSetup]) -> str:
    """Describe where the gain ends, as factors of the constant, or its minimum if it does not end."""
    if one.gains[1.0].first_token <= ENDED:
        return "there is hardly any"
    if one.ends:
        return " and ".join(f"x {factor:.2g}" for factor in one.ends)
    factor, left = one.least
    return f"none from x {min(one.gains):g} to x {max(one.gains):g}; least {left:.2f}, at x {factor:g}"
