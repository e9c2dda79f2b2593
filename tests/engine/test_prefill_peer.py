"""The prefill worker as its embedder sees it, joined over loopback with a receiver."""

from __future__ import annotations

import asyncio
import contextlib
import time
import urllib.request
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.support.prompts import DIGEST, PROMPT
from tests.support.waits import LIMIT_S
from tidekv.engine.poller import PollerThread
from tidekv.engine.prefill.prefill_config import PrefillConfig
from tidekv.engine.prefill.prefill_peer import PrefillPeer, Room
from tidekv.states import events
from tidekv.states.errors import EngineClosed, InvalidConfig, InvalidRequest, PrefillCause, TransferFailed
from tidekv.states.types import Identity, PoolMemory, Segment, page_ids
from tidekv.transports.decode.receiver import Receiver
from tidekv.transports.local_rank import LocalRank
from tidekv.transports.loopback import LoopbackNetwork, LoopbackTransport

PAGE = 4
PAGE_BYTES = 32


class Pool:
    """What a device pool shows to a peer, on a plain array."""

    def __init__(self, *, fill: int) -> None:
        self.pages = np.zeros((16, PAGE_BYTES), np.uint8)
        self.pages[:] = np.arange(16)[:, None] * fill
        self.memory = PoolMemory(segments=(Segment(self.pages.ctypes.data, PAGE_BYTES, PAGE_BYTES, 16),), page_count=16)
        self.layout = SimpleNamespace(
            identity=lambda model: Identity(model, "mha", "uint8", PAGE, 1, 1, 4, PAGE_BYTES, (PAGE_BYTES,))
        )


class Decode:
    """A receiver and the events it emitted."""

    def __init__(self, network: LoopbackNetwork, *, model: str = "m", vocabulary: int = 0) -> None:
        self.pool = Pool(fill=0)
        self.transport = LoopbackTransport("decode-0", network)
        self.events: list[events.AnyEvent] = []
        self.aux: list[int] = []
        self.news = asyncio.Event()
        self.receiver = Receiver(
            self.transport,
            LocalRank(identity=self.pool.layout.identity(model), memory=self.pool.memory, vocabulary=vocabulary),
            deliver=self._deliver,
            deliver_aux=lambda request_id, generation, first_token, aux: self.aux.append(first_token),
            clock=time.monotonic,
        )

    def _deliver(self, event: events.AnyEvent) -> None:
        self.events.append(event)
        self.news.set()

    async def __aenter__(self) -> Decode:
        await self.transport.start(poller=None)
        await self.transport.register(self.pool.memory)
        await self.receiver.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.receiver.close()
        await self.transport.close()

    async def wait(self, kind: type[events.Event]) -> events.AnyEvent:
        async with asyncio.timeout(LIMIT_S):
            while not (found := [event for event in self.events if isinstance(event, kind)]):
                self.news.clear()
                await self.news.wait()
        return found[-1]

    def promise(self, address: str, request_id: str = "r1", *, page: int = 3, tokens: bytes | None = None) -> None:
        self.receiver.promise(
            address,
            request_id,
            0,
            prompt_tokens=8,
            promised_tokens=4,
            pages=page_ids([page]),
            prompt_digest=DIGEST,
            tokens=tokens,
        )


@pytest.fixture
def network() -> LoopbackNetwork:
    return LoopbackNetwork()


def peer(network: LoopbackNetwork, **settings: object) -> PrefillPeer:
    parts = {"device": Pool(fill=3), "transport": LoopbackTransport("prefill-0", network)}
    config = {name: settings.pop(name) for name in PrefillConfig.__struct_fields__ if name in settings}
    return PrefillPeer(PrefillConfig(**{"model": "m", **config}), **(parts | settings))


async def test_a_prompt_is_handed_over(network: LoopbackNetwork) -> None:
    async with peer(network) as prefill, Decode(network) as decode:
        asked = asyncio.create_task(prefill.room("r1", PROMPT))
        decode.promise(prefill.address)
        room = await asked
        assert (room.request_id, room.generation, room.decode_prefix_len) == ("r1", 0, 4)
        await room.send([7, 8], start_token=0)
        await room.finish(first_token=1)
        await decode.wait(events.AuxReceived)
        await decode.wait(events.ChunkReceived)
        assert decode.pool.pages[3].tolist() == [24] * PAGE_BYTES
        assert prefill.statistics()["rooms_finished"] == 1
        decode.receiver.received("r1", 0)
        assert await room.received() == "received"
        statistics = prefill.statistics()
    assert (statistics["bytes_sent"], statistics["pages_sent"], statistics["rooms_received"]) == (PAGE_BYTES, 1, 1)


async def test_on_room_is_run_for_each_promise_with_its_tokens(network: LoopbackNetwork) -> None:
    async def serve(room: Room) -> None:
        assert room.tokens == b"abcdefgh" * 4
        await room.send([7, 8], start_token=0)
        await room.finish(first_token=1)
        await room.received()

    async with peer(network, on_room=serve) as prefill, Decode(network) as decode:
        decode.promise(prefill.address, tokens=b"abcdefgh" * 4)
        await decode.wait(events.AuxReceived)


async def test_an_exception_of_on_room_fails_its_room_in_its_own_words(
    network: LoopbackNetwork, caplog: pytest.LogCaptureFixture
) -> None:

    async def fail(room: Room) -> None:
        raise MemoryError("no page left")

    async with peer(network, on_room=fail) as prefill, Decode(network) as decode:
        decode.promise(prefill.address)
        failed = await decode.wait(events.RoomFailed)
        assert failed.cause == "prefill raised: MemoryError: no page left"
        await decode.wait(events.RoomDrained)
        assert prefill.statistics()["rooms_failed"] == 1
    assert "on_room raised, the room fails: request_id=r1" in caplog.text
    assert "MemoryError: no page left" in caplog.text


async def test_an_on_room_that_returns_without_finish_fails_its_room_and_is_logged(
    network: LoopbackNetwork, caplog: pytest.LogCaptureFixture
) -> None:
    async def forget(room: Room) -> None:
        room.confirm(room.prompt)
        await room.send([7, 8], start_token=0)

    async with peer(network, on_room=forget) as prefill, Decode(network) as decode:
        decode.promise(prefill.address)
        failed = await decode.wait(events.RoomFailed)
        assert failed.cause == "prefill unfinished: on_room returned without room.finish"
        assert PrefillCause.parse(failed.cause)[0] is PrefillCause.UNFINISHED
        assert not PrefillCause.UNFINISHED.retryable
        await decode.wait(events.RoomDrained)
        assert "on_room has returned without room.finish" in caplog.text
        assert prefill._sender.aborts == {"prefill unfinished": 1}


async def test_first_tokens_are_checked_where_they_are_given(network: LoopbackNetwork) -> None:
    async with peer(network, vocabulary=1000) as prefill, Decode(network) as decode:
        decode.promise(prefill.address)
        room = await prefill.room("r1", PROMPT)
        await room.send([7, 8], start_token=0)
        for token in (1000, -1, 1.5, None, True, "1", 2**40, torch.tensor(1.0), np.float32(1)):
            with pytest.raises(InvalidRequest, match="first_token must be an int from 0 to 999"):
                await room.finish(first_token=token)
        assert not room.is_finished
        await room.finish(first_token=np.int64(999))
        await decode.wait(events.AuxReceived)
        assert decode.aux == [999]
        decode.receiver.received("r1", 0)
        decode.promise(prefill.address, "r2", page=4)
        room = await prefill.room("r2", PROMPT)
        await room.send([7, 8], start_token=0)
        await room.finish(first_token=torch.tensor(7))


async def test_a_first_token_beyond_decodes_vocabulary_fails_its_room(network: LoopbackNetwork) -> None:
    async with peer(network) as prefill, Decode(network, vocabulary=1000) as decode:
        decode.promise(prefill.address)
        room = await prefill.room("r1", PROMPT)
        await room.send([7, 8], start_token=0)
        await room.finish(first_token=1000)
        failed = await decode.wait(events.RoomFailed)
        assert failed.cause.startswith("protocol error: ")
        assert "the first token is 1000, and the vocabulary has 1000 tokens" in failed.cause
        assert decode.aux == []


async def test_leaving_the_block_fails_open_rooms_and_stops_on_room(network: LoopbackNetwork) -> None:
    started, stopped = asyncio.Event(), asyncio.Event()

    async def forever(room: Room) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async with Decode(network) as decode:
        async with peer(network, on_room=forever) as prefill:
            decode.promise(prefill.address)
            room = await prefill.room("r1", PROMPT)
            await started.wait()
        assert stopped.is_set()
        assert await room.received() == "closed"
        assert "shutting down" in (await decode.wait(events.RoomFailed)).cause
        await decode.wait(events.WriterLost)
        await decode.wait(events.WriterDead)
    with pytest.raises(EngineClosed):
        await prefill.room("r1", PROMPT)


async def test_another_model_is_refused_by_name(network: LoopbackNetwork) -> None:
    async with peer(network) as prefill, Decode(network, model="other") as decode:
        decode.promise(prefill.address)
        assert "differs in model" in (await decode.wait(events.RoomFailed)).cause


async def test_a_start_that_fails_leaves_nothing_open(network: LoopbackNetwork) -> None:
    async with peer(network, listen="prefill:7") as first:
        assert first.address == "prefill:7"
        second = peer(network, listen="prefill:7")
        with pytest.raises(InvalidConfig, match="taken"):
            async with second:
                pass
    async with peer(network, listen="prefill:7"):
        pass


async def test_a_shared_poller_is_used_and_left_running(network: LoopbackNetwork) -> None:
    poller = PollerThread()
    poller.start()
    prefill = peer(network)
    prefill._poller = poller
    async with prefill:
        pass

    class Done:
        rounds = 0

        def post(self) -> bool:
            return True

        def check(self) -> bool:
            return True

        def release(self) -> None: ...

    await poller.submit(Done())
    await poller.close()


async def test_leaving_the_block_ends_though_a_decode_worker_hangs(network: LoopbackNetwork) -> None:
    """A write to a process that is stopped ends with the transport and not before, as NIXL has it."""

    class Hanging(LoopbackTransport):
        def __init__(self) -> None:
            super().__init__("prefill-0", network)
            self.began = asyncio.Event()
            self.closed = asyncio.Event()

        async def write(self, peer: object, our_pages: object, their_pages: object) -> int:
            self.began.set()
            work = asyncio.ensure_future(self.closed.wait())
            while not work.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([work])
            raise TransferFailed("the transport is closed")

        async def close(self) -> None:
            self.closed.set()
            await super().close()

    served: list[str] = []

    async def serve(room: Room) -> None:
        try:
            room.confirm(room.prompt)
            await room.send([7, 8], start_token=0)
            await asyncio.Event().wait()
        finally:
            room.fail("cancelled")
            served.append(await room.received())

    async with Decode(network) as decode:
        transport = Hanging()
        async with asyncio.timeout(LIMIT_S):
            async with peer(network, transport=transport, on_room=serve, close_deadline_s=0.05) as prefill:
                decode.promise(prefill.address)
                await transport.began.wait()
                assert not transport.closed.is_set()
        assert served == ["failed"]
        await decode.wait(events.RoomFailed)


def scraped(address: str) -> dict[str, float]:
    """Return the samples of a scrape by name and label, without those of the other statistics."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=LIMIT_S) as answer:
        text = answer.read().decode()
    return {
        "/".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_metrics_of_prefill_count_what_was_sent_withdrawn_and_aborted(
    network: LoopbackNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One room for each way to end; each asks for one page, which two of them send."""
    now_s = 0.0

    async def serve(room: Room) -> None:
        if room.request_id == "raises":
            raise MemoryError("no page left")
        await room.received()

    fields = {"on_room": serve, "metrics_listen": "127.0.0.1:0", "lease_s": 5.0}
    monkeypatch.setattr(PrefillPeer, "_clock", staticmethod(lambda: now_s))
    async with peer(network, **fields) as prefill, Decode(network) as decode:
        assert prefill.metrics_address is not None
        rooms = {}
        for page, request_id in enumerate(("sent", "aborted", "sent and late", "late", "raises")):
            decode.promise(prefill.address, request_id, page=page)
            rooms[request_id] = await prefill.room(request_id, PROMPT) if request_id != "raises" else None
        for request_id in ("sent", "sent and late"):
            await rooms[request_id].send([7, 8], start_token=0)
            await rooms[request_id].finish(first_token=1)
        while prefill.statistics()["pages_sent"] < 2 or not prefill.statistics()["rooms_failed"]:  # noqa: ASYNC110  # No wake-up.
            await asyncio.sleep(0)
        found = await asyncio.to_thread(scraped, prefill.metrics_address)
        assert found["tidekv_prefill_rooms/sending"] == found["tidekv_prefill_rooms/finished"] == 2
        decode.receiver.received("sent", 0)
        decode.receiver.abort("aborted", 0)
        assert [await rooms[name].received() for name in ("sent", "aborted")] == ["received", "aborted"]
        now_s = 6.0
        prefill._sender.check_leases()
        assert [await rooms[name].received() for name in ("late", "sent and late")] == ["lease ended", "lease ended"]
        found = await asyncio.to_thread(scraped, prefill.metrics_address)
        statistics = prefill.statistics()
    assert not any(found[f"tidekv_prefill_rooms/{state}"] for state in ("pending", "sending", "finished", "draining"))
    ended = {"received": 1, "aborted": 1, "lease ended": 2, "failed": 1, "replaced": 0, "closed": 0}
    for outcome, count in ended.items():
        assert found[f"tidekv_prefill_rooms_ended_total/{outcome}"] == count, outcome
    aborts = {name: value for name, value in found.items() if name.startswith("tidekv_prefill_aborts_total/")}
    assert aborts == {
        "tidekv_prefill_aborts_total/aborted": 1,
        "tidekv_prefill_aborts_total/lease ended": 2,
        "tidekv_prefill_aborts_total/prefill raised": 1,
    }
    assert found["tidekv_prefill_pages_sent_total"] == 2
    assert found["tidekv_prefill_bytes_sent_total"] == 2 * PAGE_BYTES
    assert found["tidekv_prefill_pages_withdrawn_total"] == statistics["pages_withdrawn"] == 3
    assert found["tidekv_prefill_write_seconds_count"] == 2
    assert found["tidekv_prefill/links_lost"] == 0
    with pytest.raises(OSError):
        scraped(prefill.metrics_address)


async def test_without_a_metrics_address_prefill_serves_no_metrics(network: LoopbackNetwork) -> None:
    async with peer(network) as prefill:
        assert prefill.metrics_address is None
    with pytest.raises(InvalidConfig, match="metrics_listen must be host:port"):
        peer(network, metrics_listen="nowhere")


async def test_an_on_room_that_blocks_the_loop_is_logged_with_its_place_and_measured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    network = LoopbackNetwork()

    def compute() -> None:
        end_s = time.monotonic() + LIMIT_S
        while not peer.statistics()["loop_stalls"] and time.monotonic() < end_s:
            time.sleep(0.001)

    async def blocks(room: Room) -> None:
        compute()
        room.fail("enough")

    peer = PrefillPeer(
        PrefillConfig(listen="prefill", model="m", loop_stall_report_s=0.02, metrics_listen="127.0.0.1:0"),
        device=Pool(fill=1),
        transport=LoopbackTransport("prefill-0", network),
        on_room=blocks,
    )
    async with peer, Decode(network) as decode:
        decode.promise("prefill", "r1")
        failed = await decode.wait(events.RoomFailed)
        assert "enough" in str(failed)
        assert peer.statistics()["loop_stalls"] >= 1
        assert "the event loop stalls" in caplog.text
        assert "test_prefill_peer.py" in caplog.text
        scraped = await asyncio.to_thread(
            urllib.request.urlopen, f"http://{peer.metrics_address}/metrics", None, LIMIT_S
        )
        families = {family.name for family in text_string_to_metric_families(scraped.read().decode())}
        assert "tidekv_prefill_loop_lag_seconds" in families
