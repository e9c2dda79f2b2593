"""A server of a model on 127.0.0.1 with its figures, whatever engine it is."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx

from benchmarks.servers import forward_cpu
from benchmarks.servers.program import Program
from benchmarks.servers.samples import add_samples, read_samples

SCHEDULER: Final = "scheduler"
HTTP: Final = "HTTP"
"""Parts of a server: what schedules, computes, stores and transfers; and what speaks HTTP and makes tokens of text."""
METRICS_S: Final = 5.0
"""Seconds that a server has for its last figures before it is ended."""
FREEZE_S: Final = 12.0
"""Longer than the lease for which prefill holds the blocks of a decode server that gives no sign of life."""


async def strike(program: Program, action: str) -> None:
    """Kill a program and start it again, or freeze it for FREEZE_S seconds."""
    if action == "freeze":
        program.signal(signal.SIGSTOP)
        await asyncio.sleep(FREEZE_S)
        program.signal(signal.SIGCONT)
        return
    await program.kill()
    program.start()
    await program.wait_ready()


@dataclass(kw_only=True)
class ModelServer(Program):
    """A server with `/health` and `/metrics`. `variables`: of its environment."""

    variables: Mapping[str, str] = field(default_factory=dict)
    _earlier: dict[str, float] = field(default_factory=dict)

    @abstractmethod
    async def act(self, action: str) -> None:
        """Do what an event asks of it, one of its engine's actions."""

    @abstractmethod
    async def held(self) -> float:
        """Return the share of its KV cache that requests hold."""

    @property
    def forward_folder(self) -> Path:
        """Where its processes keep the CPU time of their forward passes, if its plugin counts them."""
        return self.folder / f"{self.name}-forward"

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds by part; forward passes, if they are counted, are a part of their own."""
        spent, forward_s = super().cpu_s(), forward_cpu.spent_s(self.forward_folder)
        return add_samples(spent, {SCHEDULER: -forward_s, "forward passes": forward_s}) if forward_s else spent

    async def is_ready(self) -> bool:
        """See Program."""
        with contextlib.suppress(httpx.HTTPError):
            async with httpx.AsyncClient() as client:
                return (await client.get(f"{self.url}/health", timeout=2.0)).is_success
        return False

    async def metrics(self) -> dict[str, float]:
        """Return its Prometheus samples, summed over all starts, as `read_samples` names them."""
        return add_samples(self._earlier, await self.gauges())

    async def gauges(self) -> dict[str, float]:
        """Return the samples of the present start alone."""
        async with httpx.AsyncClient() as client:
            page = await client.get(f"{self.url}/metrics", timeout=30.0)
        page.raise_for_status()
        return read_samples(page.text)

    async def before_end(self, group: int) -> None:
        """Add the samples of the present start to those of the earlier ones; a frozen server has none."""
        await super().before_end(group)
        with contextlib.suppress(httpx.HTTPError, TimeoutError):
            async with asyncio.timeout(METRICS_S):
                self._earlier = await self.metrics()
