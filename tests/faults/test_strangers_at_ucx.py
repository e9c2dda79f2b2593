"""Strangers at the TCP ports that UCX opens on loopback: random bytes, text, silence, half-closed links.

They do not know UCX's protocol. A program on this machine that speaks it reads and writes memory without any check, as
docs/threat-model.md says.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from tests.faults.test_strangers import Stranger as ControlStranger
from tests.faults.test_strangers import pages_of, resident_bytes
from tidekv.engine.doctor.machine import listening

pytestmark = pytest.mark.nixl

LIMIT_S = 120.0
STRANGERS = 300
AT_ONCE = 25
MEMORY_BOUND = 16 << 20


async def trouble(address: str, source: Random) -> bool:
    """One stranger: sends what is no greeting of UCX, and stays a while. Returns whether it got a link."""
    host, _, port = address.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    try:
        match source.choice(("noise", "silent", "short", "text", "half closed")):
            case "noise":
                writer.write(source.randbytes(source.randint(8, 65536)))
            case "silent":
                pass
            case "short":
                writer.write(source.randbytes(source.randint(1, 7)))
            case "text":
                writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            case "half closed":
                writer.write(source.randbytes(source.randint(0, 256)))
                writer.write_eof()
        async with asyncio.timeout(source.choice((0.0, 0.05, 0.5))):
            while await reader.read(65536):
                pass
    except OSError:
        pass  # A reset link and the timeout end it.
    finally:
        writer.transport.abort()
    return True


async def test_noise_at_ucx_ports_changes_no_byte_and_ends_no_process(
    spawn_prefill: Any, decode_over_nixl: Any, prompt: Callable[..., list[int]]
) -> None:
    child = await spawn_prefill()
    address = child.ready.address
    async with asyncio.timeout(LIMIT_S), decode_over_nixl([address]) as decode:
        held = await decode.restore("held", prompt(1, 8))
        first = await ControlStranger.connect(address)
        hello = await first.hello()
        await first.close()
        of_prefill, of_decode = (set(listening(pid=pid)) - {address} for pid in (child.pid, os.getpid()))
        assert of_prefill and of_decode
        ports = sorted(of_prefill | of_decode)
        before, memory_before = pages_of(child.pid, hello.memory), resident_bytes(child.pid)
        source = Random(20)
        links = 0
        for _ in range(0, STRANGERS, AT_ONCE):
            links += sum(await asyncio.gather(*(trouble(source.choice(ports), source) for _ in range(AT_ONCE))))
        assert links > STRANGERS / 2
        assert pages_of(child.pid, hello.memory) == before
        assert resident_bytes(child.pid) - memory_before < MEMORY_BOUND
        assert decode.wrong(held, prompt(1, 8)) == []
        await decode.engine.finish(held)
        await decode.serve("after", prompt(2, 8))
        await decode.assert_nothing_held()
