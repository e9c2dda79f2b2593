"""The redis: engine against a real server: damage, death, delay, rights, TLS, a cluster, and more than one process."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ports import free_port
from tests.support.waits import LIMIT_S
from tidekv.backends.storage import open_storage
from tidekv.states.errors import InvalidConfig, StorageFailed
from tidekv.states.types import page_ids

# The rig and servers of conftest.py, which test modules cannot import.
Rig = Any
RedisServer = Any

# A server on a busy machine answers in time, too.
QUICK = {"request_timeout_s": 1.0, "connect_timeout_s": 1.0}
AUTHORITY = Path(__file__).parent / "authority.pem"
CERTIFICATE = Path(__file__).parent / "localhost.pem"


@pytest.fixture
async def redis(rig_on: Callable[..., Rig], redis_server: RedisServer) -> Rig:
    """Engines on the server of all tests."""
    return rig_on("redis", redis_server.address)


@pytest.fixture
async def hurt(rig_on: Callable[..., Rig], start_redis: Callable[..., RedisServer]) -> tuple[RedisServer, Rig]:
    """A server of a test's own, which it may hurt, and engines on it."""
    server = start_redis()
    return server, rig_on("redis", server.address)


def page_name(rig: Rig, number: int) -> str:
    """Return the server's name of a page."""
    return f"{rig.prefix}:{rig.NAMESPACE.hex()}:p:{{{rig.keys([number])[0].hex()}}}"


async def test_a_restarted_engine_finds_its_pages(redis: Rig) -> None:
    engine = await redis.open()
    await redis.put(engine, range(20))
    await engine.close()
    again = await redis.open()
    assert again.statistics().pages == 20
    assert all(await redis.get(again, range(20)))


async def test_damaged_pages_are_misses_go_away_and_can_be_put_again(redis: Rig, redis_server: RedisServer) -> None:
    engine = await redis.open()
    await redis.put(engine, range(8))
    redis_server.command("SETRANGE", page_name(redis, 1), "2000", "damage")
    redis_server.command("SETRANGE", page_name(redis, 2), "20", "damage")
    redis_server.command("SET", page_name(redis, 3), "short")
    redis_server.command("APPEND", page_name(redis, 4), "long")
    redis_server.command("COPY", page_name(redis, 0), page_name(redis, 5), "REPLACE")
    redis_server.command("DEL", page_name(redis, 6))
    redis_server.command("RPUSH", page_name(redis, 6), "a list")
    redis_server.command("DEL", page_name(redis, 7))
    assert await engine.exists(redis.keys([3, 4, 6, 7]), timeout_s=5) == [False] * 4
    assert await redis.get(engine, range(8)) == [True] + [False] * 7
    assert engine.statistics().misses == {"corrupt": 2, "truncated": 1, "foreign": 3, "missing": 1}
    assert engine.statistics().pages == 1
    assert await engine.exists(redis.keys(range(8)), timeout_s=5) == [True] + [False] * 7
    assert all(await redis.put(engine, range(8)))
    assert all(await redis.get(engine, range(8)))


async def test_a_page_that_vanishes_between_exists_and_get_is_a_miss(redis: Rig, redis_server: RedisServer) -> None:
    engine = await redis.open()
    await redis.put(engine, [1, 2])
    assert await engine.exists(redis.keys([1, 2]), timeout_s=5) == [True, True]
    redis_server.command("DEL", page_name(redis, 1))
    assert await redis.get(engine, [1, 2]) == [False, True]
    assert engine.statistics().pages == 1


async def test_a_wrong_type_in_the_place_of_a_page_is_replaced(redis: Rig, redis_server: RedisServer) -> None:
    engine = await redis.open()
    redis_server.command("RPUSH", page_name(redis, 1), "a list")
    assert await redis.put(engine, [1]) == [True]
    assert await redis.get(engine, [1]) == [True]


@pytest.mark.parametrize("part", ["4KiB", "64KiB", "1GiB"])
async def test_big_pages_arrive_whole_in_parts_of_any_size(
    rig_on: Callable[..., Rig], redis_server: RedisServer, part: str
) -> None:
    rig = rig_on("redis", redis_server.address, page_bytes=(1 << 20) + 4096, pages=4)
    engine = await rig.open(part=part)
    assert all(await rig.put(engine, range(4)))
    assert all(await rig.get(engine, range(4)))
    assert await rig.put(engine, [0], [b"new"]) == [True]
    assert await engine.get_into(rig.keys([0]), page_ids([2]), timeout_s=5) == [True]
    assert rig.pool.holds(2, b"new")
    names = redis_server.command("KEYS", f"{rig.prefix}:*").splitlines()
    assert len(names) == 4 + 2, "pages, the index, the page size, and nothing half-written"
    assert redis_server.command("TTL", page_name(rig, 0)) == "-1"


async def test_one_bound_holds_for_all_processes(redis: Rig) -> None:
    one = await redis.open(capacity=20 * (4096 + 128))
    other = await redis.open(capacity=20 * (4096 + 128))
    for first in range(0, 40, 4):
        assert all(await redis.put(one if first % 8 else other, range(first, first + 4)))
    assert one.statistics().evictions + other.statistics().evictions == 20
    assert await redis.get(one, range(20, 40)) == [True] * 20
    assert await redis.get(other, range(20)) == [False] * 20


async def test_a_worker_whose_clock_is_behind_loses_nothing_that_it_puts(
    redis: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, behind = [await redis.open(capacity=8 * (4096 + 128)) for _ in range(2)]
    assert all(await redis.put(ahead, range(8)))
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s - 600)
    assert all(await redis.put(behind, [10, 11]))
    assert await redis.get(behind, [10, 11]) == [True, True]
    assert await redis.get(ahead, range(8)) == [True] * 6 + [False] * 2


async def test_pages_that_the_index_lost_are_found_by_verify_and_go_first(
    redis: Rig, redis_server: RedisServer
) -> None:
    engine = await redis.open(capacity=10 * (4096 + 128))
    await redis.put(engine, range(6))
    redis_server.command("DEL", f"{redis.prefix}:{redis.NAMESPACE.hex()}:index")
    await redis.put(engine, range(6, 10))
    assert engine.statistics().pages == 4
    verdicts = [verdict async for verdict in engine.verify()]
    assert all(verdict.ok for verdict in verdicts)
    assert len(verdicts) == engine.statistics().pages == 10
    await redis.put(engine, range(10, 16))
    assert await redis.get(engine, range(16)) == [False] * 6 + [True] * 10


async def test_verify_tells_what_is_damaged_and_leaves_it(redis: Rig, redis_server: RedisServer) -> None:
    engine = await redis.open()
    await redis.put(engine, range(4))
    redis_server.command("SETRANGE", page_name(redis, 1), "2000", "damage")
    redis_server.command("SET", page_name(redis, 2), "short")
    for _ in range(2):
        verdicts = {verdict.key: verdict.cause async for verdict in engine.verify()}
        assert [verdicts[key] for key in redis.keys(range(4))] == ["", "corrupt", "truncated", ""]


async def test_clear_spares_other_namespaces(redis: Rig) -> None:
    one = await redis.open()
    other = await redis.open(namespace=b"o" * 32)
    await redis.put(one, range(5))
    await redis.put(other, range(3))
    assert await redis.get(other, range(5)) == [True] * 3 + [False] * 2
    assert await one.clear() == 5
    assert await redis.get(other, range(3)) == [True] * 3
    assert await redis.get(one, range(5)) == [False] * 5


async def test_another_page_size_in_the_same_namespace_is_refused(redis: Rig) -> None:
    await redis.open()
    smaller = type(redis.pool).make(8, 2048)
    with pytest.raises(InvalidConfig, match="pages of 4096 bytes there; the pool has 2048"):
        await redis.make().register(smaller.memory, smaller.page, namespace=redis.NAMESPACE, poller=redis.poller)


async def test_a_server_that_dies_fails_calls_and_is_found_again(
    hurt: tuple[RedisServer, Rig], start_redis: Callable[..., RedisServer]
) -> None:
    server, rig = hurt
    engine = await rig.open(**QUICK)
    await rig.put(engine, range(4))
    server.stop()
    with pytest.raises(StorageFailed):
        await rig.get(engine, range(4))
    with pytest.raises(StorageFailed):
        await rig.put(engine, range(4))
    with pytest.raises(StorageFailed):
        await engine.exists(rig.keys([1]), timeout_s=5)
    with pytest.raises(StorageFailed):
        await engine.probe()
    assert sum(engine.statistics().misses.values()) == 4
    start_redis(port=server.port)
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await engine.probe()
                break
            except StorageFailed:
                continue
    assert await rig.get(engine, range(4)) == [False] * 4
    assert all(await rig.put(engine, range(4)))
    assert all(await rig.get(engine, range(4)))


async def test_no_server_is_said_when_the_engine_opens_and_a_later_one_is_used(
    hurt: tuple[RedisServer, Rig], start_redis: Callable[..., RedisServer]
) -> None:
    server, rig = hurt
    server.stop()
    engine = rig.make(**QUICK)
    for _ in range(2):
        with pytest.raises(StorageFailed, match=f"unreachable: .*:{server.port}: Connection refused"):
            await engine.register(rig.pool.memory, rig.buffer_of, namespace=rig.NAMESPACE, poller=rig.poller)
    start_redis(port=server.port)
    await engine.register(rig.pool.memory, rig.buffer_of, namespace=rig.NAMESPACE, poller=rig.poller)
    assert all(await rig.put(engine, range(4)))


async def test_a_server_that_hangs_costs_one_timeout_a_call_and_no_page(hurt: tuple[RedisServer, Rig]) -> None:
    server, rig = hurt
    engine = await rig.open(**QUICK, chunk=4096)
    await rig.put(engine, range(16))
    server.signal(signal.SIGSTOP)
    assert await engine.exists(rig.keys([1]), timeout_s=0.01) == [False], "nobody waits beyond the deadline"
    rig.pool.array[:] = 7
    with pytest.raises(StorageFailed, match="timeout"):
        await engine.get_into(rig.keys(range(16)), page_ids(range(16)), timeout_s=30)
    assert (rig.pool.array == 7).all()
    # Two connections gave up; the other fourteen pages were not asked for.
    assert engine.statistics().misses == {"timeout": 16}
    server.signal(signal.SIGCONT)
    assert all(await rig.get(engine, range(16)))


async def test_closing_while_the_server_hangs_ends(hurt: tuple[RedisServer, Rig]) -> None:
    server, rig = hurt
    engine = await rig.open(**QUICK)
    await rig.put(engine, range(4))
    server.signal(signal.SIGSTOP)
    rig.touched.clear()
    reading = asyncio.ensure_future(engine.get_into(rig.keys(range(4)), page_ids(range(4)), timeout_s=30))
    await rig.touched.wait()
    await engine.close()
    with pytest.raises(StorageFailed):
        await reading


async def test_passwords_and_rights_are_checked_and_never_shown(
    rig_on: Callable[..., Rig], start_redis: Callable[..., RedisServer]
) -> None:
    server = start_redis("--requirepass", "s3cret/word")
    for who, allowed in ((":s3cret%2Fword@", True), (":wr0ng@", False), ("", False), ("ghost:s3cret%2Fword@", False)):
        rig = rig_on("redis", who + server.address)
        engine = rig.make(**QUICK)
        assert "s3cret" not in engine.uri and "wr0ng" not in engine.uri and "ghost" not in engine.uri
        registering = engine.register(rig.pool.memory, rig.buffer_of, namespace=rig.NAMESPACE, poller=rig.poller)
        if allowed:
            await registering
            assert all(await rig.put(engine, range(4)))
        else:
            with pytest.raises(StorageFailed, match="refused") as caught:
                await registering
            assert "s3cret" not in str(caught.value) and "wr0ng" not in str(caught.value)


COMMANDS = (
    "+get +getrange +set +setrange +strlen +rename +persist +pexpire +unlink +zadd +zrem +zcard +zrevrange +zpopmin "
    "+scan +ping +info +hello +client|setname"
)


async def test_a_user_with_few_rights_is_enough_and_one_without_writing_fails_puts_only(
    rig_on: Callable[..., Rig], start_redis: Callable[..., RedisServer]
) -> None:
    server = start_redis()
    server.command("ACL", "SETUSER", "tide", "on", ">word", "~tidekv-test:*", *COMMANDS.split())
    rig = rig_on("redis", "tide:word@" + server.address, prefix="tidekv-test")
    engine = await rig.open(**QUICK, part=4096)
    assert all(await rig.put(engine, range(4)))
    assert all(await rig.get(engine, range(4)))
    assert await engine.delete(rig.keys([0])) == [True]
    await engine.probe()
    assert len([verdict async for verdict in engine.verify()]) == 3
    assert await engine.clear() == 3
    await rig.put(engine, range(4))
    server.command("ACL", "SETUSER", "tide", "-set", "-setrange")
    with pytest.raises(StorageFailed, match="refused"):
        await rig.put(engine, range(4, 8))
    assert all(await rig.get(engine, range(4)))
    with pytest.raises(StorageFailed, match="permissions"):
        await engine.probe()


async def test_a_full_server_fails_puts_and_serves_gets(hurt: tuple[RedisServer, Rig]) -> None:
    server, rig = hurt
    engine = await rig.open(**QUICK)
    await rig.put(engine, range(4))
    server.command("CONFIG", "SET", "maxmemory", "1mb")
    assert await rig.put(engine, range(4, 8)) == [False] * 4
    assert engine.statistics().failures["full"] == 4
    assert await rig.get(engine, range(8)) == [True] * 4 + [False] * 4
    with pytest.raises(StorageFailed, match="full"):
        await engine.probe()


async def test_a_server_that_evicts_by_itself_costs_hits_and_nothing_else(
    rig_on: Callable[..., Rig], start_redis: Callable[..., RedisServer]
) -> None:
    server = start_redis("--maxmemory", "2mb", "--maxmemory-policy", "allkeys-random")
    rig = rig_on("redis", server.address)
    engine = await rig.open(**QUICK)
    for first in range(0, 600, 60):
        await rig.put(engine, range(first, first + 60))
        await rig.get(engine, range(first, first + 60))
    await rig.get(engine, range(60))
    assert server.command("INFO", "stats").split("evicted_keys:")[1].split()[0] != "0"
    await engine.probe()


async def test_tls_is_spoken_and_certificates_are_checked(
    rig_on: Callable[..., Rig], start_redis: Callable[..., RedisServer]
) -> None:
    files = f"--tls-cert-file {CERTIFICATE} --tls-key-file {CERTIFICATE} --tls-ca-cert-file {AUTHORITY}".split()
    server = start_redis(*files, tls=CERTIFICATE)
    trusting = {**QUICK, "tls_ca": str(AUTHORITY)}
    known = {**trusting, "tls_cert": str(CERTIFICATE), "tls_key": str(CERTIFICATE)}
    rig = rig_on("rediss", f"localhost:{server.port}")
    engine = await rig.open(**known)
    assert all(await rig.put(engine, range(4)))
    assert all(await rig.get(engine, range(4)))
    for options in ({**known, "tls_ca": str(CERTIFICATE)}, trusting):
        with pytest.raises(StorageFailed, match="unreachable"):
            await rig.open(**options)
    server.command("CONFIG", "SET", "tls-auth-clients", "no")
    for options in (trusting, {**QUICK, "tls_insecure": True}):
        await (await rig.open(**options)).probe()
    with pytest.raises(InvalidConfig, match="cannot be read"):
        await rig.open(**QUICK, tls_ca="/nowhere.pem")


async def test_a_cluster_serves_all_calls(rig_on: Callable[..., Rig], start_redis: Callable[..., RedisServer]) -> None:
    # By default the bus between servers has the port 10,000 above, which may be that of any connection.
    server = start_redis("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    server.command("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
    give_up_s = time.monotonic() + LIMIT_S
    while "cluster_state:ok" not in server.command("CLUSTER", "INFO"):
        assert time.monotonic() < give_up_s, "the cluster does not form"
    rig = rig_on("valkey", server.address)
    engine = await rig.open(cluster=True, part=4096, capacity=50 * (4096 + 128))
    assert all(await rig.put(engine, range(40)))
    assert all(await rig.get(engine, range(40)))
    await engine.probe()
    assert len([verdict async for verdict in engine.verify()]) == 40
    await rig.put(engine, range(40, 60))
    assert engine.statistics().evictions == 10
    assert await engine.delete(rig.keys([59, 99])) == [True, False]
    assert await engine.clear() == 49


def test_wrong_uris_and_options_are_refused_by_name() -> None:
    for uri, words in (
        ("redis:", "needs a server"),
        ("redis://:6379", "cannot read the server"),
        ("redis://host:99999", "cannot read the server"),
        ("redis://[::1", "cannot read the server"),
        ("redis://host/db", "by a number"),
        ("redis://host?connections=9", "an int from 1 to 4"),
        ("redis://host?pool=9", "no option 'pool'; allowed: capacity"),
        ("redis://host?tls_ca=/x", "need tls=true"),
        ("rediss://host?tls_cert=/x", "go together"),
        ("redis://host/3?cluster=yes", "no database but 0"),
        ("redis://user@host", "a username needs a password"),
        ("redis://:one@host?password=two", "password is given twice"),
        ("redis://host?prefix=a:b", "letters, digits"),
        ("rediss://host?tls=no", "speaks TLS"),
    ):
        with pytest.raises(InvalidConfig, match=words):
            open_storage(uri)


def test_several_servers_and_addresses_of_all_kinds_are_read() -> None:
    engine = open_storage("valkeys://me:pw@a,b:7000,[::1]:7001/0?cluster=true", {"capacity": "1GB"})
    assert engine.uri == "rediss://a:6379,b:7000,[::1]:7001/0?prefix=tidekv"


@pytest.mark.parametrize("connections", [1, 4])
async def test_a_probe_tries_every_connection_and_gives_each_back(
    rig_on: Callable[..., Rig], redis_server: RedisServer, connections: int
) -> None:
    rig = rig_on("redis", redis_server.address)
    engine = await rig.open(connections=connections)
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*(engine.probe() for _ in range(3)))
        assert all(await rig.put(engine, range(8)))
        assert all(await rig.get(engine, range(8)))
    assert engine._service._workers.qsize() == connections
