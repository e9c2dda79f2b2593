"""Use of the page pools over time, for the timeline: a bounded number of samples, whatever the length of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidekv.states.core import Core

SAMPLES_MAX = 4096
"""Samples that are kept of a run; beyond that, samples that are close in time are merged."""


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Pages by condition from `at_s` on: (owned, cached, draining) of each pool."""

    at_s: float
    device: tuple[int, int, int]
    host: tuple[int, int, int]

    @property
    def fullness(self) -> int:
        """Pages of both pools that are not free."""
        return sum(self.device) + sum(self.host)


class PoolHistory:
    """Samples of one core's pools, in order of time."""

    def __init__(self, core: Core, *, samples_max: int = SAMPLES_MAX) -> None:
        self.pages = {"device": sum(core.state.device.counts), "host": sum(core.state.host.counts)}
        """Pages of each pool."""
        self._samples: list[PoolUse] = []
        self._skipped: PoolUse | None = None
        """The latest sample, if it was too close to the one before it."""
        self._samples_max = samples_max
        self._gap_s = 0.0

    @property
    def samples(self) -> list[PoolUse]:
        """All samples. The last one is the present use."""
        return self._samples if self._skipped is None else [*self._samples, self._skipped]

    def note(self, core: Core, at_s: float) -> None:
        """Record the pools after a step, if their use has changed."""
        (_, *device), (_, *host) = core.state.device.counts, core.state.host.counts
        sample = PoolUse(at_s, (device[0], device[1], device[2]), (host[0], host[1], host[2]))
        last = self._skipped or (self._samples[-1] if self._samples else None)
        if last is not None and (sample.device, sample.host) == (last.device, last.host):
            return
        self._add(sample)
        if len(self._samples) > self._samples_max:
            # Two samples a gap at most: half of the limit is left.
            self._gap_s = 4 * (at_s - self._samples[0].at_s) / self._samples_max
            samples, self._samples, self._skipped = self.samples, [], None
            for kept in samples:
                self._add(kept)

    def _add(self, sample: PoolUse) -> None:
        """Append a sample. Of samples within one gap the fullest and the last stay: peaks and pauses are shown."""
        last = self._samples[-1] if self._samples else None
        if last is None or sample.at_s - last.at_s > self._gap_s:
            self._samples += [sample] if self._skipped is None else [self._skipped, sample]
            self._skipped = None
        elif sample.at_s == last.at_s or sample.fullness > last.fullness:
            self._samples[-1] = PoolUse(last.at_s, sample.device, sample.host)
            self._skipped = None
        else:
            self._skipped = sample
