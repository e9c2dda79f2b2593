"""A peer's own description is validated before it reaches NIXL."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from benchmarks.nixl_child import NumpyPool
from tidekv.states.errors import LocalProtocolError, PeerMismatch, RemoteProtocolError, TransferFailed
from tidekv.states.types import PoolMemory, Segment, page_ids
from tidekv.transports.nixl import metadata as nixl_metadata

pytestmark = pytest.mark.nixl

PIECES = (4096, 512, 4096, 512)


async def test_metadata_that_is_not_the_peers_is_refused(pair: Any) -> None:
    target = pair.target.transport
    writer = pair.writer.transport
    memory = pair.target.pool.memory
    blob = target.metadata()
    foreign = nixl_metadata.wrap("else-1", nixl_metadata.unwrap(blob, expected_name=target.instance))
    for metadata in (b"", b"\xc1", blob[:-1], blob[:40], blob + b"\0", b"\x93\x01\x02\x03", b"x" * 500):
        with pytest.raises(RemoteProtocolError):
            await writer.add_peer(target.instance, metadata, memory)
    for index in range(0, len(blob), 7):
        damaged = bytearray(blob)
        damaged[index] ^= 1
        with pytest.raises(RemoteProtocolError):
            await writer.add_peer(target.instance, bytes(damaged), memory)
    with pytest.raises(RemoteProtocolError, match="Hello names 'else-0'"):
        await writer.add_peer("else-0", blob, memory)
    with pytest.raises(RemoteProtocolError, match="which is our own"):
        await writer.add_peer(writer.instance, writer.metadata(), pair.writer.pool.memory)
    # A well-made envelope around the blob of an agent with another name, which is a peer of ours already.
    with pytest.raises(RemoteProtocolError, match="holds that of agent"):
        await writer.add_peer("else-1", foreign, memory)
    await pair.write([7], [9])
    pair.check({9: 7})


async def test_a_foreign_blob_of_an_unknown_agent_leaves_nothing_behind(pair: Any, start_worker: Any) -> None:
    third = await start_worker("third", NumpyPool(2, PIECES, seed=9))
    blob = nixl_metadata.unwrap(third.transport.metadata(), expected_name=third.transport.instance)
    writer = pair.writer.transport
    with pytest.raises(RemoteProtocolError, match="holds that of agent"):
        await writer.add_peer("else-1", nixl_metadata.wrap("else-1", blob), third.pool.memory)
    peer = await writer.add_peer(third.transport.instance, third.transport.metadata(), third.pool.memory)
    await writer.write(peer, page_ids([4]), page_ids([1]))
    assert third.pool.page(1) == pair.writer.pool.page(4)


async def test_memory_that_is_not_sound_is_refused(pair: Any) -> None:
    target = pair.target.transport
    memory = pair.target.pool.memory
    last = memory.segments[-1]

    def announce(*segments: Segment, page_count: int = 61) -> PoolMemory:
        return PoolMemory(segments=segments, page_count=page_count)

    unsound = [
        announce(),
        announce(*memory.segments, page_count=60),
        announce(*memory.segments[:3], msgspec.structs.replace(last, address=2**64 - 512)),
        announce(*memory.segments[:3], msgspec.structs.replace(last, stride_bytes=2**62)),
        announce(*memory.segments[:3], msgspec.structs.replace(last, address=0)),
        msgspec.structs.replace(memory, kind="FILE"),
    ]
    for wrong in unsound:
        with pytest.raises(RemoteProtocolError):
            await pair.writer.transport.add_peer(target.instance, target.metadata(), wrong)
    for wrong in (announce(*memory.segments[:3]), announce(*reversed(memory.segments))):
        with pytest.raises(PeerMismatch, match="piece_bytes"):
            await pair.writer.transport.add_peer(target.instance, target.metadata(), wrong)
    # Sound for us, but not what the peer registered: NIXL refuses, and the peer stays reachable.
    elsewhere = announce(*memory.segments[:3], msgspec.structs.replace(last, address=last.address + 4096))
    with pytest.raises(TransferFailed):
        await pair.writer.transport.add_peer(target.instance, target.metadata(), elsewhere)
    await pair.write([0], [60])
    pair.check({60: 0})


async def test_a_peer_added_twice_lives_until_its_last_handle(pair: Any) -> None:
    writer = pair.writer.transport
    again = await pair.add()
    await writer.remove_peer(pair.peer)
    with pytest.raises(LocalProtocolError, match="was removed"):
        await pair.write([1], [1])
    with pytest.raises(LocalProtocolError, match="removed twice"):
        await writer.remove_peer(pair.peer)
    await writer.write(again, page_ids([1]), page_ids([1]))
    pair.check({1: 1})
    await writer.remove_peer(again)
    pair.peer = await pair.add()
    await pair.write([2], [2])
    pair.check({2: 2})


async def test_cancelling_while_a_peer_is_added_undoes_it(pair: Any, start_worker: Any) -> None:
    third = await start_worker("third", NumpyPool(2, PIECES))
    where = (third.transport.instance, third.transport.metadata(), third.pool.memory)
    task = asyncio.create_task(pair.writer.transport.add_peer(*where))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    peer = await pair.writer.transport.add_peer(*where)
    await pair.writer.transport.write(peer, page_ids([4]), page_ids([1]))
    assert third.pool.page(1) == pair.writer.pool.page(4)


async def test_at_hello_metadata_of_another_agent_than_the_hello_names_is_refused(pair: Any) -> None:
    target, writer = pair.target.transport, pair.writer.transport
    blob = nixl_metadata.unwrap(target.metadata(), expected_name=target.instance)
    assert nixl_metadata.agent_name(blob) == target.instance
    writer.check_metadata(target.instance, target.metadata())
    with pytest.raises(RemoteProtocolError, match=f"holds that of agent '{target.instance}'"):
        writer.check_metadata("else-1", nixl_metadata.wrap("else-1", blob))
    with pytest.raises(RemoteProtocolError, match="is of agent"):
        writer.check_metadata("else-1", target.metadata())


def test_metadata_of_an_unknown_format_is_left_to_nixl() -> None:
    for blob in (b"", b"nixlSerDes|Agent", b"nixlSerDes2|Agent\x05"):
        assert nixl_metadata.agent_name(blob) is None
        assert nixl_metadata.unwrap(nixl_metadata.wrap("a-1", blob), expected_name="a-1") == blob
