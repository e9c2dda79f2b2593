"""One `vllm serve` process on 127.0.0.1 and its figures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final  # A connector's options are JSON.

import httpx

from benchmarks.ports import HOST
from benchmarks.servers.events import STRIKES
from benchmarks.servers.file_storage import FILES, damage
from benchmarks.servers.forward_cpu import FOLDER
from benchmarks.servers.model import DRAFT, ModelShape
from benchmarks.servers.model_server import HTTP, SCHEDULER, ModelServer, strike

MODEL: Final = "tiny"
ACTIONS: Final = ("restart", "damage", "reset", "forget", *STRIKES)
ROOT: Final = Path(__file__).resolve().parents[2]


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


def model_options(model: Path, shape: ModelShape, prompt_tokens: int) -> dict[str, Any]:
    """Return what a model needs in vLLM, as fields of `ServerOptions`."""
    if shape.draft:
        draft = {"method": shape.draft, "model": str(model / DRAFT), "num_speculative_tokens": 3}
        return {"further": (f"--speculative-config={json.dumps(draft)}",)}
    if shape.has_states:
        # With prefix caching a plain server on a CPU ends with its first long prompt, in Mamba2's mixer: the kernel
        # returns the state behind the last chunk only.
        return {"further": ("--no-enable-prefix-caching",)}
    if shape.latent is None:
        return {}
    # CPU_MLA has blocks of 16 tokens, and computes a prompt in one step.
    return {
        "block_size": 16,
        "max_batched_tokens": max(2048, prompt_tokens + 64),
        "further": ("--attention-backend=CPU_MLA", "--no-enable-chunked-prefill", "--no-enable-prefix-caching"),
    }


@dataclass(kw_only=True)
class Server(ModelServer):
    """A vLLM server. `transfer`: its `--kv-transfer-config`, None for a plain vLLM."""

    options: ServerOptions
    transfer: Mapping[str, object] | None = None

    @property
    def handover_address(self) -> str:
        """Addresses of the ranks of tidekv's prefill worker, separated by commas; only for one that has it."""
        assert self.transfer is not None, f"{self.name} is a plain vLLM"
        extra: Any = self.transfer["kv_connector_extra_config"]
        host, _, port = str(extra["handover"]["listen"]).rpartition(":")
        return ",".join(f"{host}:{int(port) + rank}" for rank in range(self.options.handover_ranks))

    @property
    def peer_address(self) -> str:
        """Where others read the host memory of tidekv's decode worker; only for one that shares it."""
        assert self.transfer is not None, f"{self.name} is a plain vLLM"
        extra: Any = self.transfer["kv_connector_extra_config"]
        return str(extra["handover"]["engine"]["cache_peers"]["listen"])

    def command(self) -> list[str]:
        """See Program."""
        command = [str(Path(sys.executable).with_name("vllm")), "serve", *self.options.arguments()]
        command += [f"--host={HOST}", f"--port={self.port}"]
        if self.transfer is not None:
            command += ["--kv-transfer-config", json.dumps(self.transfer)]
        return command

    def part_of(self, command: str) -> str:
        """See Program: vLLM names the processes that schedule and compute."""
        return SCHEDULER if command.startswith("VLLM::") else HTTP

    async def act(self, action: str) -> None:
        """See ModelServer; the actions are ACTIONS."""
        if action in ("reset", "forget"):
            with contextlib.suppress(httpx.HTTPError):
                await self.reset_prefix_cache(external=action == "forget")
            return
        if action in STRIKES:
            await strike(self, action)
            return
        await self.end()
        if action == "damage":
            await asyncio.to_thread(damage, self.folder / FILES)
        self.start()
        await self.wait_ready()

    async def held(self) -> float:
        """See ModelServer."""
        return (await self.gauges())["vllm:kv_cache_usage_perc"]

    async def reset_prefix_cache(self, *, external: bool = False) -> None:
        """Empty its prefix cache, and with `external` make the connector forget, too."""
        async with httpx.AsyncClient() as client:
            query = "?reset_external=true" if external else ""
            (await client.post(f"{self.url}/reset_prefix_cache{query}", timeout=30.0)).raise_for_status()

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
            FOLDER: str(self.forward_folder),
            **self.variables,
            "PYTHONPATH": os.pathsep.join(path),
        }
