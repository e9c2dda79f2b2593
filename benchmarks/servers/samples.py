"""Figures by name, and those that a server shows in Prometheus's text format."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping


def read_samples(page: str) -> dict[str, float]:
    """Parse a page in Prometheus's text format: sums by name, and by `name{source}` if there is such a label."""
    samples: dict[str, float] = defaultdict(float)
    for line in page.splitlines():
        if not line or line.startswith("#"):
            continue
        name, value = line.rsplit(" ", 1)
        name, _, labels = name.partition("{")
        samples[name] += float(value)
        _, found, source = labels.partition('source="')
        if found:
            samples[name + "{" + source.partition('"')[0] + "}"] += float(value)
    return dict(samples)


def add_samples(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Return the sums by name."""
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {*one, *other}}
