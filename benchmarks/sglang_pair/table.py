"""Tables of SGLang's comparison beyond the common ones: tokens by tier and turn, and what clients get amid faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from benchmarks.servers.cluster import Figures, Variant
from benchmarks.servers.conversations import Load

Promises = Mapping[int, Sequence[int]]
"""Requests, and tokens that decode had in L1, L2 and L3 as it asked prefill, by length of the prompt."""


def tiers_table(load: Load, promises: Sequence[tuple[Variant, Promises]]) -> Table:
    """Mean tokens of a prompt that decode had in each tier, by turn and variant."""
    table = Table(title="Tokens of a prompt that decode had: L1 + L2 + L3")
    table.add_column("turn", justify="right")
    table.add_column("prompt", justify="right")
    for variant, _ in promises:
        table.add_column(variant.title, justify="right")
    for turn in range(load.turns):
        tokens = load.prompt_tokens(turn)
        table.add_row(str(turn), str(tokens), *(_tiers(given.get(tokens)) for _, given in promises))
    return table


def faults_table(results: Mapping[str, Mapping[str, Figures]], variants: Sequence[Variant]) -> Table:
    """What clients got, by fault and variant."""
    table = Table(title="Answers amid faults")
    table.add_column("fault")
    for variant in variants:
        table.add_column(variant.title)
    for fault, by_variant in results.items():
        table.add_row(fault, *(outcome_words(by_variant.get(variant.name)) for variant in variants))
    return table


def outcome_words(one: Figures | None) -> str:
    """Return what clients got, and what servers hold at the end, in a few words."""
    if one is None:
        return "-"
    outcome = one.outcome
    counts = {
        "right": len(outcome.answers) - len(outcome.wrong),
        "wrong": len(outcome.wrong),
        "lost": len(outcome.lost),
        "HTTP errors": sum(outcome.http_errors.values()),
        "aborted": outcome.aborted,
    }
    words = [f"{count} {name}" for name, count in counts.items() if count]
    held = [f"{name} holds {share:.1%}" for name, share in one.held.items() if share]
    return ", ".join([*words, *held])


def _tiers(given: Sequence[int] | None) -> str:
    if not given or not given[0]:
        return "-"
    requests, *tiers = given
    return " + ".join(f"{tokens / requests:,.0f}" for tokens in tiers)
