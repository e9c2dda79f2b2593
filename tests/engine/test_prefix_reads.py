"""Prefill reads from decode what decode has of a prompt: every byte checked, and what each failure of decode costs."""

from __future__ import annotations

import asyncio
import ctypes
from pathlib import Path

import pytest

from tests.support.inside import serve_rooms
from tests.support.neighbours import LAYOUT, PROMPT, Gate, Worker, sharing
from tests.support.prefix_reads import Read, Talk, settled, talk
from tests.support.waits import expected, until
from tidekv import (
    CachePeerOptions,
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    EngineClosed,
    EngineConfig,
    HostPool,
    InvalidConfig,
    InvalidRequest,
    JournalOptions,
    LoopbackNetwork,
    LoopbackTransport,
    PrefillConfig,
    PrefillPeer,
    Replayer,
    StorageOptions,
)
from tidekv.backends.keys.chain import pack_tokens
from tidekv.engine.synthetic.kv import prompt_digests
from tidekv.engine.trace.explain import explain
from tidekv.engine.trace.request_traces import read_request_traces
from tidekv.states.types import PageIds
from tidekv.transports.loopback import LoopbackPeer

MORE = [*PROMPT, *range(500, 519)]
"""The next turn of PROMPT, which is ten pages of four tokens and two tokens."""
NOTHING = Read(had=0, read=0, prompt=61, decode_had=40)


async def warm(all_of: Talk, tokens: list[int] = PROMPT, **fields: str) -> None:
    """Bring a prompt into the host memory of the first worker, without a read; forget that it was asked for."""
    await all_of.workers[0].serve(tokens, (), **fields)
    await settled(all_of.workers[0])
    all_of.prefill.reads.clear()


async def begin_read(all_of: Talk, worker: Worker) -> tuple[Gate, asyncio.Future[dict[str, int]]]:
    """Let prefill begin to read from a worker, whose writes are held; returns the gate and the request that asks."""
    await warm(all_of)
    gate = all_of.hold(worker)
    serving = asyncio.ensure_future(worker.serve(MORE))
    async with expected("a write of decode"):
        await gate.reached.wait()
    return gate, serving


async def test_a_turn_costs_prefill_what_decode_does_not_have() -> None:
    async with talk() as all_of:
        (decode,) = all_of.workers
        await warm(all_of)
        assert await decode.serve(MORE) == {"l1": 40, "l2": 0, "l3": 0, "transfer": 21}
        assert all_of.prefill.reads == [Read(had=0, read=40, prompt=61, decode_had=40)]
        await settled(decode)
        # The first pages are in the host memory of prefill by now.
        assert await decode.serve([*MORE, *range(7)]) == {"l1": 60, "l2": 0, "l3": 0, "transfer": 8}
        assert all_of.prefill.reads[1] == Read(had=0, read=60, prompt=68, decode_had=60)
        assert all_of.core()["peer_fetches"] == 2
        counts = all_of.peer.statistics()
        assert (counts["prefix_reads"], counts["prefix_reads_failed"]) == (2, 0)
        assert counts["prefix_tokens_read"] == counts["prefix_tokens_wanted"] == 100
        await all_of.settle()


async def test_what_prefill_has_itself_is_neither_read_nor_touched() -> None:
    async with talk(keeps=True) as all_of:
        (decode,) = all_of.workers
        await warm(all_of)
        await decode.serve(MORE)
        await settled(decode)
        await decode.serve([*MORE, *range(7)])
        assert all_of.prefill.reads == [
            Read(had=40, read=0, prompt=61, decode_had=40),
            Read(had=60, read=0, prompt=68, decode_had=60),
        ]
        assert all_of.peer.statistics()["prefix_reads"] == 0
        await all_of.settle()


async def test_the_output_of_the_last_turn_is_read_and_nothing_else() -> None:
    async with talk(keeps=True) as all_of:
        (decode,) = all_of.workers
        ready = await decode.ready(PROMPT)
        output = list(range(900, 915))
        decode.engine.grow(ready, len(output) - 1)
        # What the model of decode computes: the last token of an answer has no KV.
        digests = prompt_digests(pack_tokens([*PROMPT, *output[:-1]]), 4)
        decode.kv.fill(ready.pages[10:].tolist()[: len(digests) - 10], digests[10:])
        await decode.engine.finish(ready, output)
        await settled(decode)
        turn = [*PROMPT, *output, 1, 2, 3]
        await decode.serve(turn)
        assert all_of.prefill.reads[1:] == [Read(had=40, read=16, prompt=60, decode_had=56)]
        await all_of.settle()


async def test_the_page_of_the_last_token_is_not_read() -> None:
    async with talk() as all_of:
        (decode,) = all_of.workers
        await warm(all_of)
        # The whole prompt is on whole pages that decode has: prefill computes the last page for the first token.
        await decode.serve(PROMPT[:40])
        assert all_of.prefill.reads == [Read(had=0, read=36, prompt=40, decode_had=40)]
        await all_of.settle()


@pytest.mark.parametrize("engine_namespace", ["", "fleet"])
async def test_a_namespace_that_prefill_does_not_know_is_read_by_its_seed(engine_namespace: str) -> None:
    async with talk(configs={"namespace": engine_namespace}) as all_of:
        (decode,) = all_of.workers
        ids = [await decode.engine.restore(_request(decode.prefill, f"{name}0", PROMPT[:40], name)) for name in "ab"]
        for ready in ids:
            await decode.engine.finish(ready, [])
        await settled(decode)
        all_of.prefill.reads.clear()
        more = [*PROMPT[:40], *range(500, 520)]
        for name in "ab":
            ready = await decode.engine.restore(_request(decode.prefill, f"{name}1", more, name))
            await decode.engine.finish(ready, [])
        assert all_of.prefill.reads == 2 * [Read(had=0, read=40, prompt=60, decode_had=40)]
        # Pages of one namespace are none of the other's.
        assert all_of.core()["peer_fetches"] == 2
        await all_of.settle()


def _request(prefill: str, request_id: str, tokens: list[int], namespace: str) -> DecodeRequest:
    return DecodeRequest(
        request_id=request_id, tokens=tokens, prefill=prefill, send_prompt=True, namespace=f"tenant {namespace} é"
    )


async def test_a_prompt_that_is_not_to_be_kept_is_not_read() -> None:
    async with talk() as all_of:
        (decode,) = all_of.workers
        await warm(all_of)
        await decode.serve(MORE, cache=False)
        assert all_of.prefill.reads == [NOTHING]
        assert all_of.peer.statistics()["prefix_reads"] == 0


async def test_reads_go_on_side_by_side() -> None:
    prompts = [[1000 + 50 * number + at for at in range(40)] for number in range(6)]
    async with talk() as all_of:
        (decode,) = all_of.workers
        for tokens in prompts[:3]:
            await warm(all_of, tokens)
        await asyncio.gather(*(decode.serve([*tokens, *range(9)]) for tokens in prompts))
        assert sorted(read.read for read in all_of.prefill.reads) == [0, 0, 0, 40, 40, 40]
        await all_of.settle()


# --- Decode workers that do not deliver ---


@pytest.mark.parametrize("how", ["device alone", "no room for reads", "shares nothing", "draining"])
async def test_what_decode_does_not_send_is_computed(how: str) -> None:
    options = {
        "no room for reads": sharing(read_share=0.01),
        "shares nothing": CachePeerOptions(),
    }.get(how, sharing())
    fields = {"storage": StorageOptions(write="back", prefetch_threshold_tokens=1)} if how == "device alone" else {}
    async with talk(options=options, **fields) as all_of:
        (decode,) = all_of.workers
        await warm(all_of)
        if how == "draining":
            serving = asyncio.ensure_future(decode.serve(MORE))
            await until(lambda: "decode-0-2" in decode.engine.states())
            draining = asyncio.ensure_future(decode.engine.drain())
            assert (await serving)["transfer"] == 21
            await draining
            # It refuses, or was asked before.
            assert all_of.prefill.reads[0] in (NOTHING, Read(had=0, read=40, prompt=61, decode_had=40))
        else:
            assert (await decode.serve(MORE))["transfer"] == 21
            assert all_of.prefill.reads == [NOTHING]
            failed = 0 if how == "shares nothing" else 1
            assert all_of.peer.statistics()["prefix_reads_failed"] == failed
        await all_of.settle()


async def test_decode_with_a_part_in_host_memory_sends_that_part() -> None:
    async with talk() as all_of:
        (decode,) = all_of.workers
        await warm(all_of, PROMPT[:20])
        # The rest stays on the device alone.
        decode.engine.change_policy(write="back")
        await warm(all_of)
        await decode.serve(MORE)
        assert all_of.prefill.reads == [Read(had=0, read=20, prompt=61, decode_had=40)]
        assert all_of.core()["peer_pages_short"] == 5
        await all_of.settle()


async def test_a_silent_decode_worker_costs_its_share_of_the_time_and_writes_to_no_page_of_prefill() -> None:
    async with talk(reads={"cache_peers": sharing(listen=None, wait_s=0.2, pause_s=600.0)}) as all_of:
        (decode,) = all_of.workers
        await warm(all_of)
        gate = all_of.hold(decode)
        # Every byte that decode gets is verified, and so is what prefill has read: nothing.
        assert (await decode.serve(MORE))["transfer"] == 21
        assert gate.reached.is_set() and all_of.prefill.reads == [NOTHING]
        await until(lambda: len(all_of.prefill.free) == 256)
        # Only the host pages of the reader wait for the late bytes.
        assert all_of.core()["peer_pages_in_flight"] == 10 <= all_of.core()["host_owned"]
        # It is not asked again so soon.
        await decode.serve([*MORE, 1])
        assert all_of.core()["peer_fetches"] == 1
        gate.opened.set()
        await all_of.settle()


async def test_a_decode_worker_that_dies_in_mid_read_leaves_prefill_to_serve_the_others() -> None:
    async with talk(2, reads={"cache_peers": sharing(listen=None, wait_s=0.3)}) as all_of:
        first, second = all_of.workers
        gate, serving = await begin_read(all_of, first)
        all_of.network.kill(first.transport.instance)
        gate.opened.set()
        await until(lambda: bool(all_of.prefill.reads))
        assert all_of.prefill.reads == [NOTHING]
        assert (await second.serve(MORE))["transfer"] == 61
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await all_of.reader.wait_settled()
        all_of.reader.check()
        assert all_of.core()["host_owned"] == all_of.core()["peer_pages_in_flight"] == 0
        assert all_of.prefill.wrong == []


async def test_a_decode_worker_that_evicts_in_mid_read_spares_the_pages_that_it_sends() -> None:
    others = [[1000 + 50 * number + at for at in range(40)] for number in range(8)]
    async with talk(host_pages=24, options=sharing(read_share=1.0)) as all_of:
        (decode,) = all_of.workers
        gate, serving = await begin_read(all_of, decode)
        # These fill its host memory several times over. Prefill's own writes are not held.
        for tokens in others:
            await decode.serve(tokens)
            await until(lambda: decode.core()["backups"] == 0)
        assert decode.core()["shared_pages"] == 10
        gate.opened.set()
        assert (await serving)["transfer"] == 21
        assert Read(had=0, read=40, prompt=61, decode_had=40) in all_of.prefill.reads
        await all_of.settle()


@pytest.mark.parametrize("lies", [True, False])
async def test_wrong_bytes_are_refused_by_their_checksum_and_decode_is_named(
    lies: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = LoopbackTransport.write

    async def write(self: LoopbackTransport, peer: LoopbackPeer, ours: PageIds, theirs: PageIds) -> int:
        written = await whole(self, peer, ours, theirs)
        if lies and self.name == "decode-0":
            segment = peer.exchange.theirs.segments[0]
            at = segment.address + theirs[4] * segment.stride_bytes
            ctypes.c_uint8.from_address(at).value ^= 4
        return written

    async with talk(page_checksums=True) as all_of:
        (decode,) = all_of.workers
        await warm(all_of)
        monkeypatch.setattr(LoopbackTransport, "write", write)
        assert (await decode.serve(MORE))["transfer"] == 21
        assert all_of.prefill.reads == [NOTHING if lies else Read(had=0, read=40, prompt=61, decode_had=40)]
        assert ("pages damaged" in caplog.text and decode.address in caplog.text) == lies
        await all_of.settle()


async def test_a_room_that_is_aborted_in_mid_read_gets_its_pages_back(caplog: pytest.LogCaptureFixture) -> None:
    async with talk() as all_of:
        (decode,) = all_of.workers
        gate, serving = await begin_read(all_of, decode)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        gate.opened.set()
        await until(lambda: len(all_of.prefill.free) == 256)
        await all_of.settle()


async def test_prefill_that_closes_in_mid_read_waits_for_its_pages() -> None:
    async with talk(reads={"cache_peers": sharing(listen=None, wait_s=0.3)}) as all_of:
        (decode,) = all_of.workers
        gate, serving = await begin_read(all_of, decode)
        closing = asyncio.ensure_future(all_of.peer.__aexit__(None, None, None))
        await until(lambda: bool(all_of.prefill.errors))
        gate.opened.set()
        await closing
        with pytest.raises(Exception, match=r"prefill"):
            await serving
        assert isinstance(all_of.prefill.errors[0], asyncio.CancelledError)
        assert sorted(all_of.prefill.free) == list(range(256))


async def test_a_reader_that_has_broken_down_costs_prefill_nothing_but_the_reads() -> None:
    async with talk() as all_of:
        (decode,) = all_of.workers
        await warm(all_of)
        await all_of.reader.__aexit__(None, None, None)
        assert (await decode.serve(MORE))["transfer"] == 21
        assert all_of.prefill.reads == [NOTHING]


async def test_a_decode_worker_that_may_not_be_dialled_is_not_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with talk() as all_of:
        (decode,) = all_of.workers
        await warm(all_of)

        def refuse(address: str) -> None:
            raise InvalidRequest(f"{address} is not in `dials`")

        monkeypatch.setattr(all_of.reader._runtime.transport, "check_address", refuse)
        assert (await decode.serve(MORE))["transfer"] == 21
        assert all_of.prefill.reads == [NOTHING]
        assert all_of.peer.statistics()["prefix_reads_failed"] == 1


# --- What is left of a read ---


async def test_a_read_is_explained_by_its_journal_and_replayed(tmp_path: Path) -> None:
    path = tmp_path / "reader.journal"
    async with talk(reads={"journal": JournalOptions(path=str(path))}) as all_of:
        (decode,) = all_of.workers
        await warm(all_of)
        await decode.serve(MORE)
        address = decode.address
    Replayer(path).run()
    traces = read_request_traces(Replayer(path))
    (words,) = (explain(trace, now_s=traces.last_at_s) for trace in traces.named("decode-0-2"))
    assert address in words and "40 from another decode worker" in words


# --- Arguments ---


def _reader(pool: DevicePool, **fields: object) -> DecodeEngine:
    config = {"device": "lent", "cache_peers": CachePeerOptions(enabled=True), **fields}
    host = HostPool.allocate(pool.layout, 8)
    return DecodeEngine(
        EngineConfig(**config),  # type: ignore[arg-type]
        device=pool,
        host=host,
        transport=LoopbackTransport("reader", LoopbackNetwork()),
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"device": "owned"}, 'device="lent"'),
        ({"cache_peers": CachePeerOptions()}, "enabled=True"),
        ({"model": "other"}, "has the model 'other'"),
        ({"bigram_keys": True}, "has bigram_keys=True, unlike the peer"),
        ({}, "another device pool"),
    ],
)
def test_an_engine_that_cannot_read_for_a_peer_is_refused_by_name(fields: dict[str, object], said: str) -> None:
    pool = DevicePool.allocate(LAYOUT, 8)
    reader = _reader(DevicePool.allocate(LAYOUT, 8) if not fields else pool, **fields)
    peer = PrefillPeer(PrefillConfig(), device=pool, transport=LoopbackTransport("p", LoopbackNetwork()))
    with pytest.raises(InvalidConfig, match=said):
        peer.read_with(reader)


def test_what_is_no_engine_is_refused_as_a_reader() -> None:
    peer = PrefillPeer(device=DevicePool.allocate(LAYOUT, 8), transport=LoopbackTransport("p", LoopbackNetwork()))
    with pytest.raises(InvalidConfig, match="reader must be a DecodeEngine, not 3"):
        peer.read_with(3)  # type: ignore[arg-type]


async def test_a_reader_is_given_before_the_peer_is_entered() -> None:
    async with talk() as all_of:
        with pytest.raises(EngineClosed, match="before the peer is entered"):
            all_of.peer.read_with(all_of.reader)


async def test_reading_needs_a_reader_and_the_tokens_of_the_prompt() -> None:
    async with talk() as all_of:
        (decode,) = all_of.workers
        await warm(all_of)
        said: list[str] = []

        async def serve(room: object) -> None:
            for call in (all_of.peer.read_prefix, PrefillPeer.read_prefix.__get__(without)):
                try:
                    await call(room, [])
                except InvalidRequest as error:
                    said.append(str(error))

        without = PrefillPeer(
            device=DevicePool.allocate(LAYOUT, 4), transport=LoopbackTransport("w", all_of.network), on_room=None
        )
        serve_rooms(all_of.peer, serve)
        with pytest.raises(Exception, match="prefill"):
            await decode.engine.restore(
                DecodeRequest(request_id="routed", tokens=MORE, prefill=decode.prefill, deadline_s=20.0)
            )
        assert "brought no tokens" in said[0] and "needs PrefillPeer.read_with(" in said[1]


@pytest.mark.parametrize("seed", [b"short", b"x" * 33])
def test_a_seed_of_another_length_is_refused(seed: bytes) -> None:
    with pytest.raises(InvalidRequest, match="key_seed must have 32 bytes, or none"):
        DecodeRequest(request_id="r", tokens=[1], prefill="one:1", key_seed=seed)


async def test_pages_of_a_reader_that_closes_in_mid_read_are_not_given_back() -> None:
    async with talk(reads={"cache_peers": sharing(listen=None, wait_s=30.0), "close_deadline_s": 0.2}) as all_of:
        (decode,) = all_of.workers
        gate, serving = await begin_read(all_of, decode)
        closing = asyncio.ensure_future(all_of.reader.__aexit__(None, None, None))
        await until(lambda: bool(all_of.prefill.errors))
        assert isinstance(all_of.prefill.errors[0], EngineClosed)
        gate.opened.set()
        await closing
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
