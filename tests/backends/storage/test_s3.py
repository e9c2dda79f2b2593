"""The s3: engine against moto: damage, death, delay, rights, lists of former pages."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tidekv.backends.storage import open_storage
from tidekv.backends.storage.base import Holding
from tidekv.states.errors import InvalidConfig, StorageFailed
from tidekv.states.types import page_ids

# The rig and servers of conftest.py, which test modules cannot import.
Rig = Any
S3Server = Any

# A server on a busy machine answers in time, too.
QUICK = {"request_timeout_s": 2.0, "connect_timeout_s": 1.0}
VALUE_BYTES = 4096 + 128


@pytest.fixture
async def s3(rig_on: Callable[..., Rig], s3_server: S3Server) -> Rig:
    """Engines on the server of all tests."""
    return rig_on("s3", s3_server.address)


def object_path(rig: Rig, number: int) -> str:
    return f"/{rig.prefix}/{rig.NAMESPACE.hex()}/p/{rig.keys([number])[0].hex()}"


async def test_a_restarted_engine_finds_its_pages_and_their_order(s3: Rig) -> None:
    engine = await s3.open()
    await s3.put(engine, range(20))
    await engine.close()
    again = await s3.open(capacity=25 * VALUE_BYTES)
    assert again.statistics().pages == 20
    assert all(await s3.get(again, range(0, 20, 2)))
    assert all(await s3.put(again, range(20, 30)))
    assert again.statistics().evictions == 5
    assert all(await s3.get(again, range(0, 20, 2)))
    assert sum(await s3.get(again, range(1, 20, 2))) == 5


async def test_a_smaller_capacity_holds_from_the_first_put(s3: Rig) -> None:
    engine = await s3.open()
    await s3.put(engine, range(20))
    await engine.close()
    again = await s3.open(capacity=8 * VALUE_BYTES)
    await s3.put(again, [20])
    assert again.statistics().pages == 8
    assert sum(await s3.get(again, range(21))) == 8


async def test_damaged_objects_are_misses_go_away_and_can_be_put_again(s3: Rig, s3_server: S3Server) -> None:
    engine = await s3.open()
    await s3.put(engine, range(6))
    whole = s3_server.request("GET", object_path(s3, 0))
    s3_server.request("PUT", object_path(s3, 1), whole)
    s3_server.request("PUT", object_path(s3, 2), whole[:-1])
    s3_server.request("PUT", object_path(s3, 3), whole + b"x")
    mine = s3_server.request("GET", object_path(s3, 4))
    s3_server.request("PUT", object_path(s3, 4), mine[:1000] + bytes([mine[1000] ^ 1]) + mine[1001:])
    s3_server.request("DELETE", object_path(s3, 5))
    verdicts = {verdict.key: verdict.cause async for verdict in engine.verify()}
    assert [verdicts[key] for key in s3.keys(range(5))] == ["", "foreign", "truncated", "foreign", "corrupt"]
    assert await s3.get(engine, range(6)) == [True] + [False] * 5
    assert engine.statistics().misses == {"foreign": 2, "truncated": 1, "corrupt": 1, "missing": 1}
    assert await engine.exists(s3.keys(range(6)), timeout_s=5) == [True] + [False] * 5
    assert all(await s3.put(engine, range(6)))
    assert all(await s3.get(engine, range(6)))


async def test_what_another_process_stored_is_found(s3: Rig) -> None:
    one, other = await s3.open(), await s3.open(connections=4)
    await s3.put(one, range(10))
    keys = s3.keys(range(40))
    # Four at a time, in order, until four are missing.
    assert await other.exists(keys, timeout_s=10) == [True] * 10 + [False] * 30
    assert await other.exists(keys[::-1], timeout_s=10) == [False] * 30 + [True] * 10
    assert all(await s3.get(other, range(10)))
    assert other.statistics().pages == 10


async def test_clear_spares_other_namespaces_and_prefixes(s3: Rig, rig_on: Callable[..., Rig]) -> None:
    one, other = await s3.open(), await s3.open(namespace=b"o" * 32)
    await s3.put(one, range(5))
    await s3.put(other, range(3))
    assert await one.clear() == 5
    assert await s3.get(one, range(5)) == [False] * 5
    assert await s3.get(other, range(5)) == [True] * 3 + [False] * 2


async def test_another_page_size_in_the_same_namespace_is_refused(s3: Rig) -> None:
    await s3.open()
    smaller = type(s3.pool).make(8, 2048)
    with pytest.raises(InvalidConfig, match="pages of 4096 bytes there; the pool has 2048"):
        await s3.make().register(smaller.memory, smaller.page, namespace=s3.NAMESPACE, poller=s3.poller)


async def test_big_pages_arrive_whole(rig_on: Callable[..., Rig], s3_server: S3Server) -> None:
    rig = rig_on("s3", s3_server.address, page_bytes=8 << 20, pages=2)
    engine = await rig.open()
    assert all(await rig.put(engine, range(2)))
    assert all(await rig.get(engine, range(2)))


async def test_a_server_without_bulk_deletion_is_served(s3: Rig) -> None:
    engine = await s3.open(bulk_delete=False, capacity=10 * VALUE_BYTES)
    await s3.put(engine, range(10))
    await s3.put(engine, range(10, 15))
    assert engine.statistics().evictions == 5
    assert await engine.delete(s3.keys([14, 99])) == [True, False]
    assert await engine.clear() == 9


async def test_a_server_that_hangs_or_dies_fails_calls_and_is_found_again(
    rig_on: Callable[..., Rig], start_s3: Callable[..., S3Server]
) -> None:
    server = start_s3()
    rig = rig_on("s3", server.address)
    engine = await rig.open(**QUICK, connections=4)
    await rig.put(engine, range(16))
    server.signal(signal.SIGSTOP)
    assert await engine.exists(rig.keys([99]), timeout_s=0.01) == [False], "nobody waits beyond the deadline"
    rig.pool.array[:] = 7
    with pytest.raises(StorageFailed, match="timeout"):
        await engine.get_into(rig.keys(range(16)), page_ids(range(16)), timeout_s=30)
    assert (rig.pool.array == 7).all()
    assert engine.statistics().misses == {"timeout": 16}
    rig.touched.clear()
    writing = asyncio.ensure_future(rig.put(engine, range(4)))
    await rig.touched.wait()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert engine.statistics().calls_in_flight == 0
    server.stop()
    for failing in (rig.get(engine, [1]), rig.put(engine, [1]), engine.probe(), engine.delete(rig.keys([1]))):
        with pytest.raises(StorageFailed):
            await failing
    with pytest.raises(StorageFailed):
        await engine.clear()
    with pytest.raises(StorageFailed):
        assert [verdict async for verdict in engine.verify()]
    start_s3(server.port)
    await engine.probe()
    assert await rig.get(engine, range(4)) == [False] * 4
    assert all(await rig.put(engine, range(4)))
    assert all(await rig.get(engine, range(4)))


async def test_a_bucket_that_is_not_there_is_said_when_the_engine_opens(s3: Rig) -> None:
    engine = open_storage(s3.base_uri.replace("tidekv-test", "nowhere"), s3.credentials)
    with pytest.raises(StorageFailed, match="refused: NoSuchBucket: The specified bucket does not exist"):
        await engine.register(s3.pool.memory, s3.buffer_of, namespace=s3.NAMESPACE, poller=s3.poller)
    await engine.close()


async def test_no_server_is_said_when_the_engine_opens(rig_on: Callable[..., Rig], free_address: str) -> None:
    rig = rig_on("s3", "http://" + free_address)
    with pytest.raises(StorageFailed, match="unreachable"):
        await rig.open(**QUICK)


def test_wrong_uris_and_options_are_refused_by_name() -> None:
    for uri, words in (
        ("s3:", "needs a bucket"),
        ("s3://key:secret@bucket", "needs a bucket and no more"),
        ("s3://bucket/a//b", "an empty part"),
        ("s3://bucket/../other", "one that is"),
        ("s3://bucket?connections=100", "an int from 1 to 64"),
        ("s3://bucket?chunk=1MB", "no option 'chunk'; allowed: access_key_id"),
        ("s3://bucket?access_key_id=me", "go together"),
        ("s3://bucket?endpoint=host:9000", "http://host:port"),
        ("s3://bucket?endpoint=http://a:b@host", "no password"),
    ):
        with pytest.raises(InvalidConfig, match=words):
            open_storage(uri)
    assert "s3cret" not in open_storage("s3://bucket/p", {"access_key_id": "me", "secret_access_key": "s3cret"}).uri


async def test_holdings_leave_out_what_is_no_namespace(s3: Rig) -> None:
    engine = await s3.open()
    await s3.put(engine, range(3))
    link, prefix = engine._service._link, engine._service._options.prefix
    odd = b"d" * 32
    for name in ("notes/p/a", "zz/p/b", f"{b'short'.hex()}/p/c", f"{odd.hex()}ab/p/d", "meta"):
        await link.put(f"{prefix}/{name}", b"4096")
    # A namespace without a numeric size in its record still has pages.
    await link.put(f"{prefix}/{odd.hex()}/p/{bytes(32).hex()}", b"x")
    await link.put(f"{prefix}/{odd.hex()}/meta", b"4 KiB")
    await link.put(f"{prefix}x/{bytes(32).hex()}/p/e", b"x")
    assert sorted(await engine.holdings(), key=lambda holding: holding.namespace) == [
        Holding(namespace=odd, page_bytes=None, pages=1),
        Holding(namespace=s3.NAMESPACE, page_bytes=4096, pages=3),
    ]
