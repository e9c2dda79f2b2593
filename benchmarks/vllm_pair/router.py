"""The published vllm-router in front of prefill and decode servers, in the sequential pattern of NixlConnector."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.ports import HOST, free_port
from benchmarks.servers.program import Program


@dataclass
class Router(Program):
    """A vllm-router with a policy of its own for the choice of servers."""

    policy: str = "round_robin"
    prefills: Sequence[Program] = field(default=())
    decodes: Sequence[Program] = field(default=())

    def command(self) -> list[str]:
        """See Program."""
        command = [str(Path(sys.executable).with_name("vllm-router")), f"--host={HOST}", f"--port={self.port}"]
        command += ["--vllm-pd-disaggregation", "--kv-connector=nixl", f"--policy={self.policy}"]
        for prefill in self.prefills:
            command += ["--prefill", prefill.url]
        for decode in self.decodes:
            command += ["--decode", decode.url]
        return [*command, f"--prometheus-port={free_port()}", f"--prometheus-host={HOST}", "--log-level=warning"]

    async def is_ready(self) -> bool:
        """See Program."""
        with contextlib.suppress(httpx.HTTPError):
            async with httpx.AsyncClient() as client:
                return (await client.get(f"{self.url}/health", timeout=2.0)).is_success
        return False
