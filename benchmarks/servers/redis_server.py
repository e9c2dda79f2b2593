"""A redis-server that decode workers share as storage (L3); it keeps everything in memory."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from benchmarks.ports import HOST
from benchmarks.servers.program import Program


@dataclass
class RedisServer(Program):
    """A redis-server without persistence: a start is empty."""

    @property
    def uri(self) -> str:
        """The URI of tidekv's storage on it."""
        return f"redis://{HOST}:{self.port}"

    def command(self) -> list[str]:
        """See Program."""
        return ["redis-server", "--bind", HOST, "--port", str(self.port), "--save", "", "--appendonly", "no"]

    async def is_ready(self) -> bool:
        """See Program."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(2.0):
                reader, writer = await asyncio.open_connection(HOST, self.port)
                try:
                    writer.write(b"PING\r\n")
                    return await reader.readline() == b"+PONG\r\n"
                finally:
                    writer.close()
        return False
