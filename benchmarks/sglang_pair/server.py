"""One SGLang server on 127.0.0.1 and its figures."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final  # JSON of SGLang.

import httpx

from benchmarks.ports import HOST, free_port
from benchmarks.servers.events import STRIKES
from benchmarks.servers.forward_cpu import FOLDER
from benchmarks.servers.model import ModelShape
from benchmarks.servers.model_server import HTTP, METRICS_S, SCHEDULER, ModelServer, strike
from benchmarks.servers.samples import add_samples, read_samples
from benchmarks.sglang_pair.names import REPORT

MODEL: Final = "tiny"
LLAMA: Final = ModelShape(for_sglang=True)
ROOT: Final = Path(__file__).resolve().parents[2]
STAND_INS: Final = Path(__file__).resolve().parent / "stand_ins"
FLUSH_S: Final = 30.0
"""Maximum seconds until a server is idle, so that it can be flushed."""
PLAIN: Final = "plain"
ACTIONS: Final = ("restart", "damage", "reset", "kill", "freeze")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What all servers of a comparison have in common. `tokens`: KV of one server's device pool."""

    model: Path
    tokens: int
    shape: ModelShape = LLAMA
    page_size: int = 16
    max_requests: int = 16
    ranks: int = 1

    def arguments(self) -> list[str]:
        """Return the arguments of `sglang.launch_server`, without those of one server."""
        return [
            f"--model-path={self.model}",
            f"--served-model-name={MODEL}",
            "--device=cpu",
            "--dtype=float32",
            "--attention-backend=torch_native",
            "--sampling-backend=pytorch",
            "--grammar-backend=none",
            "--disable-cuda-graph",
            "--disable-overlap-schedule",
            "--skip-server-warmup",
            "--mem-fraction-static=0.3",
            f"--max-total-tokens={self.tokens}",
            f"--page-size={self.page_size}",
            f"--max-running-requests={self.max_requests}",
            f"--tp-size={self.ranks}",
            "--enable-metrics",
            "--enable-cache-report",
            "--sleep-on-idle",  # Else an idle scheduler takes a whole core.
        ]


@dataclass(kw_only=True)
class Server(ModelServer):
    """An SGLang server. `role`: PLAIN, "prefill" or "decode". `arguments`: those of this server.

    `plugins`: names of the plugins that it loads; others that are installed stay out. `plugin_folder`: their entry
    points. `damage`: overwrites bytes of its storage. `metrics_port`: where the backend `tidekv` shows its own metrics.
    """

    role: str
    options: ServerOptions
    arguments: Sequence[str] = ()
    plugins: Sequence[str] = ()
    plugin_folder: Path
    damage: Callable[[], object] = lambda: None
    metrics_port: int = 0
    bootstrap_port: int = field(default_factory=free_port)
    promised: dict[int, list[int]] = field(default_factory=dict)

    def command(self) -> list[str]:
        """See Program."""
        command = [sys.executable, "-m", "sglang.launch_server", *self.options.arguments()]
        command += [f"--host={HOST}", f"--port={self.port}"]
        if self.role != PLAIN:
            command.append(f"--disaggregation-mode={self.role}")
        if self.role == "prefill":
            command.append(f"--disaggregation-bootstrap-port={self.bootstrap_port}")
        return [*command, *self.arguments]

    def part_of(self, command: str) -> str:
        """See Program."""
        return SCHEDULER if "scheduler" in command else HTTP

    def environment(self) -> dict[str, str]:
        """See Program."""
        path = [str(STAND_INS), str(self.plugin_folder), str(ROOT / "src"), str(ROOT)]
        return {
            **os.environ,
            "SGLANG_USE_CPU_ENGINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            # With more threads than free cores libgomp spins.
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **self._cores(),
            "SGLANG_HOST_IP": HOST,
            "SGLANG_PLUGINS": ",".join(self.plugins),
            # All KV passes through the loopback device; UCX opens ports on all interfaces by default.
            "UCX_TLS": "tcp,self",
            "UCX_NET_DEVICES": "lo",
            FOLDER: str(self.forward_folder),
            **self.variables,
            "PYTHONPATH": os.pathsep.join(path),
        }

    def _cores(self) -> dict[str, str]:
        """Return the variable without which SGLang gives no core to ranks beyond the machine's sockets."""
        cores = sorted(os.sched_getaffinity(0))
        ranks = range(self.options.ranks)
        bound = "|".join(str(cores[rank % len(cores)]) for rank in ranks)
        return {"SGLANG_CPU_OMP_THREADS_BIND": bound} if len(ranks) > 1 else {}

    async def act(self, action: str) -> None:
        """See ModelServer; the actions are ACTIONS."""
        if action in STRIKES:
            await strike(self, action)
        elif action == "restart":
            await self.end()
            self.start()
            await self.wait_ready()
        else:
            await self.flush()
            if action == "damage":
                await asyncio.to_thread(self.damage)

    async def flush(self) -> None:
        """Empty its device and host memory, as soon as it is idle. Raises TimeoutError after FLUSH_S."""
        async with asyncio.timeout(FLUSH_S), httpx.AsyncClient() as client:
            while True:
                # It refuses while a request holds pages.
                if (await client.post(f"{self.url}/flush_cache", timeout=FLUSH_S)).is_success:
                    return
                await asyncio.sleep(0.2)

    async def held(self) -> float:
        """See ModelServer."""
        report = await self.report()
        return float(report["held"]) / float(report["size"])

    async def gauges(self) -> dict[str, float]:
        """See ModelServer: SGLang's samples, and tidekv's if it has any."""
        samples = await super().gauges()
        if self.metrics_port:
            async with httpx.AsyncClient() as client:
                page = await client.get(f"http://{HOST}:{self.metrics_port}/metrics", timeout=30.0)
            page.raise_for_status()
            samples = add_samples(samples, read_samples(page.text))
        return samples

    async def report(self) -> dict[str, Any]:
        """Return what `plugin.watch` reports of the present start."""
        async with httpx.AsyncClient() as client:
            page = await client.get(f"{self.url}/server_info", timeout=30.0)
        page.raise_for_status()
        report: dict[str, Any] = page.json()["internal_states"][0][REPORT]
        return report

    async def before_end(self, group: int) -> None:
        """See ModelServer; the promises of this start are kept, too."""
        await super().before_end(group)
        with contextlib.suppress(httpx.HTTPError, TimeoutError):
            async with asyncio.timeout(METRICS_S):
                self.promised = await self.promises()

    async def promises(self) -> dict[int, list[int]]:
        """Return requests, and tokens that decode had in L1, L2 and L3, by length of the prompt, over all starts."""
        sums = {tokens: list(given) for tokens, given in self.promised.items()}
        for tokens, given in (await self.report())["promised"].items():
            kept = sums.setdefault(int(tokens), [0] * len(given))
            kept[:] = [one + other for one, other in zip(kept, given, strict=True)]
        return sums
