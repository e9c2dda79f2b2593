"""The mooncake: engine against a real master and store node: damage, death, delay, a full store."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.waits import LIMIT_S
from tidekv.backends.storage import open_storage
from tidekv.states.errors import InvalidConfig, StorageFailed
from tidekv.states.types import page_ids

# The rig and servers of conftest.py, which test modules cannot import.
Rig = Any
MooncakeServers = Any

VALUE_BYTES = 4096 + 128


@pytest.fixture
async def mooncake(rig_on: Callable[..., Rig], mooncake_servers: MooncakeServers) -> Rig:
    """Engines on the store of all tests."""
    return rig_on("mooncake", mooncake_servers.address)


class Damage:
    """A client of the test's own, in a process: the library ends slowly, and everything waits for it."""

    PROGRAM = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", sys.argv[1]) == 0
print("ready", flush=True)
while line := sys.stdin.readline():
    do, name, content = line.strip().split(",")
    if do == "get":
        print(store.get(name).hex(), flush=True)
    elif do == "put":
        print(store.upsert(name, bytes.fromhex(content)), flush=True)
    else:
        print(store.remove(name, True), flush=True)
import os; os._exit(0)
"""

    def __init__(self, address: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.PROGRAM, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answer("ready")

    def get(self, name: str) -> bytes:
        return bytes.fromhex(self._do("get", name))

    def put(self, name: str, content: bytes) -> None:
        assert self._do("put", name, content.hex()) == "0"

    def remove(self, name: str) -> None:
        assert self._do("remove", name) == "0"

    def close(self) -> None:
        self._process.communicate()

    def _do(self, *words: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(",".join([*words, ""][:3]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self, wanted: str = "") -> str:
        assert self._process.stdout is not None
        # The library writes to standard output too.
        while line := self._process.stdout.readline().strip():
            if line == wanted or (not wanted and re.fullmatch(r"-?[0-9a-f]+", line)):
                return line
        raise AssertionError("the client of the test ended")


def name_of(rig: Rig, number: int) -> str:
    return f"{rig.prefix}/{rig.NAMESPACE.hex()}/p/{rig.keys([number])[0].hex()}"


async def test_damaged_objects_are_misses_go_away_and_can_be_put_again(
    mooncake: Rig, mooncake_servers: MooncakeServers
) -> None:
    engine = await mooncake.open(admin=mooncake_servers.admin)
    await mooncake.put(engine, range(6))
    client = Damage(mooncake_servers.address)
    whole, mine = client.get(name_of(mooncake, 0)), client.get(name_of(mooncake, 4))
    for number, content in (
        (1, whole),
        (2, whole[:-1]),
        (3, whole + b"x"),
        (4, mine[:1000] + bytes([mine[1000] ^ 1]) + mine[1001:]),
    ):
        client.put(name_of(mooncake, number), content)
    client.remove(name_of(mooncake, 5))
    client.close()
    verdicts = {verdict.key: verdict.cause async for verdict in engine.verify()}
    assert [verdicts[key] for key in mooncake.keys(range(5))] == ["", "foreign", "truncated", "foreign", "corrupt"]
    assert await mooncake.get(engine, range(6)) == [True] + [False] * 5
    assert engine.statistics().misses == {"foreign": 2, "truncated": 1, "corrupt": 1, "missing": 1}
    assert await engine.exists(mooncake.keys(range(6)), timeout_s=5) == [True] + [False] * 5
    assert all(await mooncake.put(engine, range(6)))
    assert all(await mooncake.get(engine, range(6)))


async def test_what_another_process_stored_is_found_and_listed(
    mooncake: Rig, mooncake_servers: MooncakeServers
) -> None:
    one, other = await mooncake.open(), await mooncake.open(admin=mooncake_servers.admin)
    await mooncake.put(one, range(10))
    assert await other.exists(mooncake.keys(range(12)), timeout_s=10) == [True] * 10 + [False] * 2
    assert len([verdict async for verdict in other.verify() if verdict.ok]) == 10
    assert all(await mooncake.get(other, range(10)))
    assert await other.clear() == 10
    assert await mooncake.get(one, range(10)) == [False] * 10


async def test_a_full_store_fails_puts_and_serves_gets(
    rig_on: Callable[..., Rig], mooncake_servers: MooncakeServers
) -> None:
    rig = rig_on("mooncake", mooncake_servers.address, page_bytes=8 << 20, pages=10)
    engine = await rig.open()
    stored = await rig.put(engine, range(10))
    assert any(stored)
    assert engine.statistics().failures.get("full", 0) == 10 - sum(stored)
    # A store that is nearly full also evicts, as fast as it can, what it took.
    found = await rig.get(engine, range(10))
    assert sum(found) <= 8
    assert all(was for was, there in zip(stored, found, strict=True) if there)
    await engine.clear()


async def test_a_store_that_hangs_keeps_no_page_and_one_that_dies_is_found_again(
    rig_on: Callable[..., Rig], start_mooncake: Callable[..., MooncakeServers]
) -> None:
    servers = start_mooncake()
    rig = rig_on("mooncake", servers.address)
    engine = await rig.open(request_timeout_s=0.3)
    await rig.put(engine, range(8))
    servers.node.send_signal(signal.SIGSTOP)
    rig.pool.array[:] = 7
    with pytest.raises(StorageFailed, match="timeout"):
        await engine.get_into(rig.keys(range(8)), page_ids(range(8)), timeout_s=30)
    # What comes from now on goes nowhere near the pool.
    servers.node.send_signal(signal.SIGCONT)
    give_up_s = time.monotonic() + LIMIT_S
    while not all(await engine.exists(rig.keys(range(8)), timeout_s=5)):
        assert time.monotonic() < give_up_s
    assert (rig.pool.array == 7).all()
    assert all(await rig.get(engine, range(8)))

    servers.stop()
    rig.pool.array[:] = 7
    for failing in (
        engine.get_into(rig.keys(range(8)), page_ids(range(8)), timeout_s=30),
        engine.exists(rig.keys([1]), timeout_s=5),
        engine.probe(),
        engine.clear(),
    ):
        with pytest.raises(StorageFailed, match=r"unreachable|timeout"):
            await failing
    assert (rig.pool.array == 7).all()
    start_mooncake(servers.port)
    give_up_s = time.monotonic() + LIMIT_S
    while True:
        try:
            await engine.probe()
            break
        except StorageFailed:
            assert time.monotonic() < give_up_s
    assert await rig.get(engine, range(8)) == [False] * 8
    assert all(await rig.put(engine, range(8)))
    assert all(await rig.get(engine, range(8)))


async def test_no_master_is_said_at_once_when_the_engine_opens(rig_on: Callable[..., Rig], free_address: str) -> None:
    rig = rig_on("mooncake", free_address)
    with pytest.raises(StorageFailed, match="unreachable: no master"):
        await rig.open()


def test_wrong_uris_and_options_are_refused_by_name() -> None:
    for uri, words in (
        ("mooncake:", "needs a server"),
        ("mooncake://a,b", "at one master"),
        ("mooncake://:secret@host", "without password"),
        ("mooncake://host/path", "without password or path"),
        ("mooncake://host?clients=9", "an int from 1 to 4"),
        ("mooncake://host?protocol=nvlink", "one of tcp, rdma"),
        ("mooncake://host?admin=host:9003", "the master's HTTP address"),
    ):
        with pytest.raises(InvalidConfig, match=words):
            open_storage(uri)
