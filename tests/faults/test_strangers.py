"""Strangers at the control port of a prefill process in the default configuration: random bytes, truncated and mutated
frames, many links. They change no byte, end no process, and its memory stays within a bound.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tidekv.engine.doctor.machine import listening
from tidekv.states.errors import TidekvError
from tidekv.states.types import PoolMemory
from tidekv.transports import wire
from tidekv.transports.control import addresses, challenge
from tidekv.transports.control import connection as control

pytestmark = pytest.mark.nixl

LIMIT_S = 120.0
STRANGERS = 400
AT_ONCE = 25
OPTIONS = control.ControlOptions()
LINK_BYTES = 512 * 1024
"""More than what a link can hold beside its unfinished frame: buffers of its stream and of the last read."""
MEMORY_BOUND = OPTIONS.greeting_bytes_max + OPTIONS.links_per_address_max * LINK_BYTES


def resident_bytes(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) * 1024


def pages_of(pid: int, memory: PoolMemory) -> list[bytes]:
    """Every byte of the pool of another process."""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as file:
        return [
            os.pread(file.fileno(), segment.stride_bytes * segment.page_count, segment.address)
            for segment in memory.segments
        ]


class Stranger:
    """A connection from one of the many addresses that a machine has on loopback."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, address: str, source: str = "127.0.0.1") -> Stranger:
        host, port = addresses.parse_address(address)
        return cls(*await asyncio.open_connection(host, port, local_addr=(source, 0)))

    async def hello(self) -> wire.Hello:
        """Pass the challenge, as every program can without a secret; prefill's Hello."""
        host, port = self.writer.get_extra_info("peername")
        await challenge.prove(self.reader, self.writer, key=b"", dialled=f"{host}:{port}")
        link = control.ControlLink(self.reader, self.writer, peer_label="prefill", options=OPTIONS)
        found = await link.receive()
        assert isinstance(found, wire.Hello)
        return found

    async def close(self) -> None:
        self.writer.transport.abort()


def mutated(frame: bytes, source: Random) -> bytes:
    raw = bytearray(frame)
    for _ in range(source.randint(1, 8)):
        at = source.randrange(len(raw))
        match source.choice(("flip", "cut", "insert", "length")):
            case "flip":
                raw[at] ^= 1 << source.randrange(8)
            case "cut":
                del raw[at : at + source.randint(1, 64)]
            case "insert":
                raw[at:at] = source.randbytes(source.randint(1, 64))
            case "length":
                raw[:4] = source.randbytes(4)
        if len(raw) < 5:
            break
    return bytes(raw)


async def trouble(address: str, number: int, source: Random, hello: wire.Hello) -> None:
    """One stranger: sends something wrong, and stays as long as it is allowed to."""
    stranger = await Stranger.connect(address, f"127.1.{number // 250}.{1 + number % 250}")
    frame = wire.encode_frame(hello)
    try:
        match source.choice(("noise", "greeting", "proof", "frame noise", "hello", "truncated", "huge", "other")):
            case "noise":
                stranger.writer.write(source.randbytes(source.randint(1, 4096)))
            case "greeting":
                stranger.writer.write(mutated(challenge.greeting(source.randbytes(32)), source))
            case "proof":
                stranger.writer.write(challenge.greeting(source.randbytes(32)) + source.randbytes(64))
            case "frame noise":
                await stranger.hello()
                noise = source.randbytes(source.randint(1, 4096))
                stranger.writer.write(wire.LENGTH.pack(len(noise)) + noise)
            case "hello":
                await stranger.hello()
                stranger.writer.write(mutated(frame, source))
            case "truncated":
                await stranger.hello()
                stranger.writer.write(frame[: source.randrange(len(frame))])
                stranger.writer.write_eof()
            case "huge":
                await stranger.hello()
                stranger.writer.write(wire.LENGTH.pack(source.randrange(wire.HELLO_BYTES_MAX, 2**32)) + bytes(4096))
            case "other":
                await stranger.hello()
                room = wire.RoomId(instance="x", epoch="y", request_id="r", generation=0)
                message = source.choice((wire.Abort(room=room), wire.Ping(sent_at=0.0), wire.Bye(cause="\x1b[2J\n")))
                stranger.writer.write(wire.encode_frame(message))
        async with asyncio.timeout(source.choice((0.0, 0.05, 0.5))):
            await stranger.reader.read()
    except (OSError, TidekvError, asyncio.IncompleteReadError):
        return
    finally:
        await stranger.close()


async def test_strangers_change_no_byte_end_no_process_and_take_bounded_memory(
    spawn_prefill: Any, decode_over_nixl: Any, prompt: Callable[..., list[int]]
) -> None:
    child = await spawn_prefill()
    address = child.ready.address
    assert all(port.startswith("127.0.0.1:") for port in listening(pid=child.pid))
    async with asyncio.timeout(LIMIT_S), decode_over_nixl([address]) as decode:
        assert all(port.startswith("127.0.0.1:") for port in listening())
        held = await decode.restore("held", prompt(1, 8))
        first = await Stranger.connect(address)
        hello = await first.hello()
        await first.close()
        before, memory_before = pages_of(child.pid, hello.memory), resident_bytes(child.pid)

        # Unfinished frames on as many links as one address gets, and on some more that it does not.
        strangers = []
        for _ in range(OPTIONS.links_per_address_max + 16):
            stranger = await Stranger.connect(address)
            strangers.append(stranger)
            try:
                await stranger.hello()
            except (OSError, TidekvError, asyncio.IncompleteReadError):
                continue
            stranger.writer.write(wire.LENGTH.pack(wire.HELLO_BYTES_MAX) + bytes(wire.HELLO_BYTES_MAX - 1))
        counts = await child.counts()
        assert counts["links_over_quota"] >= 16
        # The amount that the child will read is unknown: it is looked at for a while, and the most counts.
        memory_peak = 0
        for _ in range(20):
            memory_peak = max(memory_peak, resident_bytes(child.pid))
            await asyncio.sleep(0.05)
        for stranger in strangers:
            await stranger.close()
        assert memory_peak - memory_before < MEMORY_BOUND

        source = Random(20)
        for first_number in range(0, STRANGERS, AT_ONCE):
            numbers = range(first_number, first_number + AT_ONCE)
            await asyncio.gather(*(trouble(address, number, source, hello) for number in numbers))
        assert pages_of(child.pid, hello.memory) == before
        assert resident_bytes(child.pid) - memory_before < MEMORY_BOUND
        counts = await child.counts()
        assert counts["violations"] > STRANGERS / 4
        assert counts["peers"] == 1
        assert decode.wrong(held, prompt(1, 8)) == []
        await decode.engine.finish(held)
        await decode.serve("after", prompt(2, 8))
        await decode.assert_nothing_held()
