"""One `vllm serve` process on 127.0.0.1 and its figures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final  # A connector's options are JSON.

import httpx

from benchmarks.ports import HOST
from benchmarks.servers.program import Program

MODEL: Final = "tiny"
ROOT: Final = Path(__file__).resolve().parents[2]
METRICS_S: Final = 5.0
"""Seconds that a server has for its last figures before it is ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What all servers of a comparison have in common, and the size of one server's KV cache.

    `ranks`: tensor-parallel ranks. `handover`: further keys of tidekv's "handover".
    """

    model: Path
    kv_bytes: int
    block_size: int = 32
    max_model_len: int
    max_batched_tokens: int = 2048
    max_requests: int = 16
    ranks: int = 1
    dtype: str = "float32"
    further: tuple[str, ...] = ()
    handover: Mapping[str, object] = field(default_factory=dict)

    @property
    def handover_ranks(self) -> int:
        """Number of ranks in which tidekv hands over, each with a port of its own."""
        return int(str(self.handover.get("ranks", self.ranks)))

    def arguments(self) -> list[str]:
        """Return the arguments of `vllm serve`, without those of one server."""
        return [
            str(self.model),
            f"--served-model-name={MODEL}",
            f"--dtype={self.dtype}",
            "--enforce-eager",
            f"--kv-cache-memory-bytes={self.kv_bytes}",
            f"--block-size={self.block_size}",
            f"--max-model-len={self.max_model_len}",
            f"--max-num-batched-tokens={self.max_batched_tokens}",
            f"--max-num-seqs={self.max_requests}",
            f"--tensor-parallel-size={self.ranks}",
            "--generation-config=vllm",
            *self.further,
        ]


@dataclass(kw_only=True)
class Server(Program):
    """A vLLM server. `transfer`: its `--kv-transfer-config`, None for a plain vLLM. `variables`: of its environment."""

    options: ServerOptions
    transfer: Mapping[str, object] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    _earlier: dict[str, float] = field(default_factory=dict)

    @property
    def handover_address(self) -> str:
        """Addresses of the ranks of tidekv's prefill worker, separated by commas; only for one that has it."""
        assert self.transfer is not None, f"{self.name} is a plain vLLM"
        extra: Any = self.transfer["kv_connector_extra_config"]
        host, _, port = str(extra["handover"]["listen"]).rpartition(":")
        return ",".join(f"{host}:{int(port) + rank}" for rank in range(self.options.handover_ranks))

    def command(self) -> list[str]:
        """See Program."""
        command = [str(Path(sys.executable).with_name("vllm")), "serve", *self.options.arguments()]
        command += [f"--host={HOST}", f"--port={self.port}"]
        if self.transfer is not None:
            command += ["--kv-transfer-config", json.dumps(self.transfer)]
        return command

    async def is_ready(self) -> bool:
        """See Program."""
        with contextlib.suppress(httpx.HTTPError):
            async with httpx.AsyncClient() as client:
                return (await client.get(f"{self.url}/health", timeout=2.0)).is_success
        return False

    async def reset_prefix_cache(self, *, external: bool = False) -> None:
        """Empty its prefix cache, and with `external` make the connector forget, too."""
        async with httpx.AsyncClient() as client:
            query = "?reset_external=true" if external else ""
            (await client.post(f"{self.url}/reset_prefix_cache{query}", timeout=30.0)).raise_for_status()

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

    def environment(self) -> dict[str, str]:
        """See Program."""
        path = [str(ROOT / "src"), str(ROOT), *filter(None, [self.variables.get("PYTHONPATH")])]
        return {
            **os.environ,
            # One OpenMP thread per server: with more threads than free cores libgomp spins, and a server computes less
            # than a token a second.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_HOST_IP": HOST,
            "VLLM_SERVER_DEV_MODE": "1",  # POST /reset_prefix_cache
            # UCX opens ports on all interfaces by default.
            "UCX_TLS": "tcp,sm,self",
            "UCX_NET_DEVICES": "lo",
            **self.variables,
            "PYTHONPATH": os.pathsep.join(path),
        }


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
