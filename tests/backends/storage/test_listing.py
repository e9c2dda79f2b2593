"""What engines report to tools about their location, before and after they have a pool."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tidekv.backends.storage.base import Census, Holding
from tidekv.backends.storage.file.schema import file_holdings
from tidekv.backends.storage.label import LABEL_BYTES_MAX
from tidekv.states.errors import InvalidConfig, StorageFailed

# The rig and servers of conftest.py, which test modules cannot import.
Rig = Any

OTHER = b"o" * 32


@pytest.fixture(params=["file-threads", "redis", "s3", "mooncake"])
async def places(
    request: pytest.FixtureRequest, rig_on: Callable[..., Rig]
) -> AsyncIterator[tuple[Rig, dict[str, object]]]:
    """Each engine that can list its contents, with the options required for that."""
    if request.param == "file-threads":
        yield rig_on(request.param, ""), {}
    elif request.param == "mooncake":
        servers = request.getfixturevalue("mooncake_servers")
        yield rig_on(request.param, servers.address), {"admin": servers.admin}
    else:
        yield rig_on(request.param, request.getfixturevalue(f"{request.param}_server").address), {}


async def test_holdings_are_told_without_a_pool_and_pages_with_one(places: tuple[Rig, dict[str, object]]) -> None:
    rig, options = places
    one, other = await rig.open(**options), await rig.open(namespace=OTHER, **options)
    await rig.put(one, range(10))
    await rig.put(other, range(3))
    looking = rig.make(**options)
    assert isinstance(looking, Census)
    page_bytes = None if rig.kind == "mooncake" else 4096
    assert await looking.holdings() == [
        Holding(namespace=rig.NAMESPACE, page_bytes=page_bytes, pages=10),
        Holding(namespace=OTHER, page_bytes=page_bytes, pages=3),
    ]
    if rig.kind != "mooncake":
        # The first label stays: engines of one namespace write the same.
        for label in (b"label", b"another"):
            await one.set_label(label)
        assert [holding.label for holding in await looking.holdings()] == [b"label", b""]
    if rig.kind in ("file", "s3"):
        now_s = time.time()
        for holding in await looking.holdings():
            assert holding.written_s is not None
            assert now_s - 3600 < holding.written_s[0] <= holding.written_s[1] < now_s + 60
    assert sorted([key async for keys in one.listed() for key in keys]) == sorted(rig.keys(range(10)))
    assert await one.clear() == 10
    assert [key async for keys in one.listed() for key in keys] == []


async def test_what_cannot_be_asked_says_so(rig_on: Callable[..., Rig], free_address: str, tmp_path: Path) -> None:
    for kind, server in (("redis", free_address), ("s3", "http://" + free_address)):
        # The storage, and then what is wrong: two of them may be in use.
        with pytest.raises(StorageFailed, match=rf"^{kind}://.*: unreachable: "):
            await rig_on(kind, server).make(connect_timeout_s=0.3).holdings()
    with pytest.raises(StorageFailed, match="unreachable"):
        await rig_on("mooncake", free_address).make(admin="http://" + free_address).holdings()
    with pytest.raises(InvalidConfig, match="give the option admin"):
        await rig_on("mooncake", free_address).make().holdings()
    with pytest.raises(StorageFailed, match="is not a storage directory"):
        file_holdings(tmp_path)
    (tmp_path / "index.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(StorageFailed, match="cannot be read"):
        file_holdings(tmp_path)


@pytest.mark.parametrize("kind", ["redis", "s3"])
async def test_records_of_a_server_are_not_read_beyond_their_limit(
    request: pytest.FixtureRequest, rig_on: Callable[..., Rig], kind: str
) -> None:
    rig = rig_on(kind, request.getfixturevalue(f"{kind}_server").address)
    engine = await rig.open()
    assert all(await rig.put(engine, range(3)))
    # What anyone who can write to the server may leave there: a huge label, size and page.
    service = engine._service
    huge = {"label": bytes(1 << 20), "meta": b"9" * (1 << 20)}
    pages = [service._page(key) for key in rig.keys([0, 1])]
    if kind == "s3":
        for name, value in [(f"{service._prefix}/{name}", value) for name, value in huge.items()]:
            await service._link.put(name, value)
        for name in pages:
            await service._link.put(name, bytes(1 << 20))
    else:
        values = [(service._names + name.encode(), value) for name, value in huge.items()]
        values += [(name, bytes(1 << 20)) for name in pages]
        await service._on_worker(lambda worker: worker.link.batch([(b"SET", *pair) for pair in values]))
    (holding,) = await rig.make().holdings()
    assert (len(holding.label), holding.page_bytes) == (LABEL_BYTES_MAX + 1, None)
    with pytest.raises(InvalidConfig, match=r"has pages of 9{11} bytes there"):
        await rig.open()
    assert await rig.get(engine, range(3)) == [False, False, True]
    assert engine.statistics().misses == {"foreign": 2}
