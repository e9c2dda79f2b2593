"""A drain to a successor: the cache of a worker that goes away is served by the one that takes its place."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_status_server import ask
from tests.support.inside import core_of, runtime_of
from tests.support.neighbours import LAYOUT, PAGE, PATIENT, PROMPT, Worker, lie, neighbours, sharing
from tests.support.waits import LIMIT_S, expected, until
from tidekv import (
    CachePeerOptions,
    DecodeEngine,
    DevicePool,
    DrainOutcome,
    EngineClosed,
    EngineConfig,
    EngineThread,
    HostPool,
    InvalidRequest,
    JournalOptions,
    LoopbackNetwork,
    LoopbackTransport,
    Replayer,
    StatusOptions,
    StorageOptions,
)
from tidekv.backends.keys.chain import pack_tokens
from tidekv.engine.synthetic.kv import prompt_digests
from tidekv.transports.prefill.sender import Sender

OTHERS = [[1000 + 50 * number + at for at in range(40)] for number in range(12)]
"""Further prompts of ten pages."""
ALLOWED = sharing(allow=("peers:*",))


def numbers(outcome: DrainOutcome) -> tuple[int, int, int, int]:
    return outcome.handed, outcome.present, outcome.left, outcome.failed


async def warm(worker: Worker, tokens: list[int] = PROMPT, **fields: str) -> None:
    """Bring a prompt into the host memory of a worker."""
    await worker.serve(tokens, (), **fields)
    await worker.engine.wait_settled()


async def drained(old: Worker, new: Worker, **fields: Any) -> DrainOutcome:
    """Drain a worker to another one, which must hold nothing afterwards but its cache."""
    outcome = await old.engine.drain(to=new.address, hand_s=LIMIT_S, **fields)
    for worker in (old, new):
        await worker.engine.wait_settled()
        worker.engine.check()
        assert worker.core()["host_owned"] == worker.core()["host_protected"] == 0
    return outcome


def in_host_memory(worker: Worker, tokens: list[int], **fields: str) -> int:
    return worker.engine.probe_prefix(tokens, **fields)["l2"]


@pytest.mark.parametrize("namespace", ["", "tenant é"])
@pytest.mark.parametrize("page_checksums", [False, True])
async def test_a_successor_serves_from_its_host_memory_what_the_drained_worker_had(
    namespace: str, page_checksums: bool, caplog: pytest.LogCaptureFixture
) -> None:
    forked = [*PROMPT[:22], *OTHERS[0][:20]]
    async with neighbours(options=ALLOWED, namespace=namespace, page_checksums=page_checksums) as all_of:
        old, new = all_of.workers
        await warm(old, namespace=namespace)
        await warm(old, forked, namespace=namespace)
        caplog.clear()
        with caplog.at_level("INFO"):
            outcome = await drained(old, new)
        assert numbers(outcome) == (15, 0, 0, 0) and outcome.cause == "" and outcome.seconds > 0
        assert len([line for line in caplog.messages if "handed the cache over" in line]) == 1
        assert old.core()["pages_handed"] == new.core()["pages_taken"] == 15
        # `serve` verifies every byte.
        assert await new.serve(PROMPT, namespace=namespace) == {"l1": 0, "l2": 40, "l3": 0, "transfer": 2}
        assert await new.serve(forked, namespace=namespace) == {"l1": 20, "l2": 20, "l3": 0, "transfer": 2}
        assert new.engine.probe_prefix(PROMPT, namespace="other") == {"l1": 0, "l2": 0}


async def test_what_only_the_device_has_comes_by_way_of_host_memory(tmp_path: Path) -> None:
    storage = StorageOptions(write="back", prefetch_threshold_tokens=1)
    configs = [{"storage": storage, "journal": JournalOptions(path=str(tmp_path / name))} for name in ("old", "new")]
    async with neighbours(options=ALLOWED, configs=configs) as all_of:
        old, new = all_of.workers
        await warm(old)
        assert in_host_memory(old, PROMPT) == 0 and old.engine.probe_prefix(PROMPT)["l1"] == 40
        assert numbers(await drained(old, new)) == (10, 0, 0, 0)
        assert (await new.serve(PROMPT))["l2"] == 40
    for name in ("old", "new"):
        assert Replayer(tmp_path / name).run().complete


async def test_a_prompt_that_is_longer_than_all_shares_of_memory_is_handed_over_in_parts() -> None:
    prompt = list(range(200))
    options = sharing(allow=("peers:*",), host_share=0.1, read_share=0.1, reads_max=1)
    async with neighbours(options=options) as all_of:
        old, new = all_of.workers
        await warm(old, prompt)
        assert numbers(await drained(old, new)) == (50, 0, 0, 0)
        assert new.core()["peer_fetches"] >= 9
        assert (await new.serve(prompt))["l2"] == 200


async def test_lent_pages_of_an_embedder_are_handed_over_and_taken() -> None:
    configs = [{"device": "lent"}, {"device": "lent"}]
    async with neighbours(options=ALLOWED, configs=configs) as all_of:
        old, new = all_of.workers
        request = old.request(PROMPT)
        assert (await old.engine.restore_into(request, list(range(11)))).is_complete
        await old.engine.offer(PROMPT[:40], list(range(10)))
        assert numbers(await drained(old, new)) == (10, 0, 0, 0)
        restored = await new.engine.restore_into(new.request(PROMPT), list(range(11)))
        assert restored.sources["l2"] == 40


async def test_what_the_last_live_request_leaves_is_handed_over_as_well() -> None:
    async with neighbours(options=ALLOWED) as all_of:
        old, new = all_of.workers
        await warm(old)
        ready = await old.ready(OTHERS[0])
        draining = asyncio.ensure_future(drained(old, new))
        # What is there is handed over while the request is live.
        await until(lambda: old.core()["pages_handed"] == 10)
        with pytest.raises(EngineClosed, match="drains"):
            await old.serve(PROMPT)
        await old.engine.finish(ready, [])
        assert numbers(await draining) == (20, 0, 0, 0)
        assert in_host_memory(new, OTHERS[0]) == 40


async def test_a_second_drain_finds_what_the_first_one_has_handed_over() -> None:
    async with neighbours(options=ALLOWED) as all_of:
        old, new = all_of.workers
        await warm(old)
        assert numbers(await drained(old, new)) == (10, 0, 0, 0)
        assert numbers(await drained(old, new)) == (0, 10, 0, 0)


async def test_a_successor_keeps_what_it_uses_more_and_says_so() -> None:
    async with neighbours(options=ALLOWED, host_pages=24) as all_of:
        old, new = all_of.workers
        await warm(old, OTHERS[0])
        for _ in range(8):
            await warm(old, OTHERS[1])
        # Two prompts of ten pages, used by the successor more recently than the first one by the old worker.
        await warm(new, OTHERS[2])
        await warm(new, OTHERS[3])
        outcome = await drained(old, new)
        assert outcome.handed + outcome.left == 20 and outcome.handed >= 10 and "uses more" in outcome.cause
        assert in_host_memory(new, OTHERS[1]) == 40 and new.engine.probe_prefix(OTHERS[3])["l1"] == 40
        assert in_host_memory(new, OTHERS[0]) < 40


async def test_the_time_limit_ends_a_drain() -> None:
    async with neighbours(options=ALLOWED) as all_of:
        old, new = all_of.workers
        await warm(old)
        gate = all_of.hold(old)
        outcome = await old.engine.drain(to=new.address, hand_s=0.2)
        assert (outcome.handed, outcome.left) == (0, 10)
        assert numbers(await old.engine.drain(to=new.address, hand_s=0)) == (0, 0, 0, 0)
        gate.opened.set()
        for worker in all_of.workers:
            await worker.engine.wait_settled()
            worker.engine.check()
            assert worker.core()["host_owned"] == worker.core()["host_protected"] == 0


# --- Successors that fail ---


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("not allowed", "not in its cache_peers.allow"),
        ("no listener", "nowhere"),
        ("another model", "model"),
        ("a prefill", "what is sent"),
        ("draining", "it drains"),
        ("itself", "itself"),
    ],
)
async def test_a_successor_that_refuses_costs_an_answer_and_is_named(how: str, said: str) -> None:
    options = sharing() if how == "not allowed" else ALLOWED
    model = {"model": "other"} if how == "another model" else {}
    async with neighbours(options=options, configs=[{}, model]) as all_of:
        old, new = all_of.workers
        for tokens in OTHERS[:6]:
            await warm(old, tokens)
        if how == "draining":
            await new.engine.drain()
        addresses = {"no listener": "nowhere:1", "a prefill": old.prefill, "itself": old.address}
        outcome = await old.engine.drain(to=addresses.get(how, new.address), hand_s=LIMIT_S)
        assert outcome.handed == outcome.present == 0 and outcome.left == 60, outcome
        assert said in outcome.cause
        assert outcome.seconds < LIMIT_S / 2
        await old.engine.wait_settled()
        assert old.core()["host_protected"] == 0 and new.core()["pages_taken"] == 0
        # Both serve on: what is live, and what comes.
        assert (await old.engine.drain()).live == []


async def test_a_silent_successor_costs_no_more_than_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async with neighbours(options=ALLOWED) as all_of:
        old, new = all_of.workers
        await warm(old)
        forever = asyncio.Event()

        async def never(*_: object) -> None:
            await forever.wait()

        monkeypatch.setattr(Sender, "_take_offer", never)
        outcome = await old.engine.drain(to=new.address, hand_s=0.2)
        assert numbers(outcome) == (0, 0, 10, 0)
        await old.engine.wait_settled()
        assert old.core()["host_protected"] == 0


async def test_a_successor_that_dies_in_the_middle_ends_the_drain() -> None:
    async with neighbours(options=ALLOWED) as all_of:
        old, new = all_of.workers
        for tokens in OTHERS[:6]:
            await warm(old, tokens)
        gate = all_of.hold(old)
        draining = asyncio.ensure_future(old.engine.drain(to=new.address, hand_s=LIMIT_S))
        async with expected("a write to the successor"):
            await gate.reached.wait()
        all_of.network.kill(new.transport.instance)
        gate.opened.set()
        outcome = await draining
        assert outcome.handed == 0 and outcome.left == 60 and outcome.cause
        await old.engine.wait_settled()
        old.engine.check()
        assert old.core()["host_protected"] == old.core()["shared_pages"] == 0


async def test_a_drained_worker_that_dies_in_the_middle_leaves_what_it_has_handed_over() -> None:
    async with neighbours(options=ALLOWED) as all_of:
        old, new = all_of.workers
        await warm(old, OTHERS[0])
        assert numbers(await drained(old, new)) == (10, 0, 0, 0)
        # It is drained already, so this one comes from elsewhere: another worker that dies.
        async with neighbours(network=all_of.network, first=2, options=ALLOWED, count=1) as others:
            third = others[0]
            await warm(third, OTHERS[1])
            gate = others.hold(third)
            draining = asyncio.ensure_future(third.engine.drain(to=new.address, hand_s=LIMIT_S))
            async with expected("a write to the successor"):
                await gate.reached.wait()
            all_of.network.kill(third.transport.instance)
            gate.opened.set()
            await draining
            await new.engine.wait_settled()
            new.engine.check()
        assert new.core()["host_owned"] == new.core()["peer_pages_in_flight"] == 0
        assert (await new.serve(OTHERS[0]))["l2"] == 40
        assert (await new.serve(OTHERS[1]))["transfer"] == 40


async def test_a_damaged_page_is_not_handed_over_and_neither_is_what_follows_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with neighbours(options=ALLOWED, page_checksums=True) as all_of:
        old, new = all_of.workers
        await warm(old)
        await warm(old, OTHERS[0])
        index = core_of(old.engine).state.index
        old.host.array[index.host_end("", pack_tokens(PROMPT[:40])).host[6], 77] ^= 16
        outcome = await drained(old, new)
        assert numbers(outcome) == (16, 0, 4, 4) and "damaged" in caplog.text
        assert (await new.serve(PROMPT))["l2"] == 24


async def test_bytes_that_are_damaged_on_the_way_are_refused_by_their_checksum(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with neighbours(options=ALLOWED, page_checksums=True) as all_of:
        old, new = all_of.workers
        await warm(old)
        flipped = lie(monkeypatch, old)
        # What is asked for once more is right.
        outcome = await drained(old, new)
        assert len(flipped) == 1 and "pages damaged" in caplog.text and old.address in caplog.text
        assert numbers(outcome) in ((10, 0, 0, 0), (0, 0, 10, 10))
        # `serve` verifies every byte.
        await new.serve(PROMPT)


# --- Calls ---


async def test_what_cannot_be_drained_to_is_refused_and_changes_nothing() -> None:
    async with neighbours(options=CachePeerOptions(enabled=True)) as all_of:
        with pytest.raises(InvalidRequest, match=r"set cache_peers\.listen"):
            await all_of[0].engine.drain(to="peers:1")
        assert await all_of[0].serve(PROMPT)
    async with neighbours(options=ALLOWED) as all_of:
        engine = all_of[0].engine
        for fields, said in (
            ({"to": ""}, "to must be host:port"),
            ({"to": "here"}, "to must be host:port"),
            ({"to": 7}, "to must be"),
            ({"to": "peers:1", "hand_s": -1}, "hand_s must be"),
            ({"to": "peers:1", "store_s": 1}, "give one"),
        ):
            with pytest.raises(InvalidRequest, match=said):
                await engine.drain(**fields)
        assert await all_of[0].serve(PROMPT)


async def test_a_drain_that_is_cancelled_offers_nothing_further() -> None:
    async with neighbours(options=ALLOWED) as all_of:
        old, new = all_of.workers
        await warm(old)
        gate = all_of.hold(old)
        draining = asyncio.ensure_future(old.engine.drain(to=new.address, hand_s=1e6))
        async with expected("a write to the successor"):
            await gate.reached.wait()
        draining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await draining
        await until(lambda: core_of(old.engine).store_all.run is None)
        gate.opened.set()
        for worker in all_of.workers:
            await worker.engine.wait_settled()
            assert worker.core()["host_protected"] == 0


async def test_closing_hands_the_cache_to_the_worker_that_the_options_name() -> None:
    async with neighbours(options=ALLOWED, count=1) as all_of:
        new = all_of[0]
        options = sharing(close_to=new.address, close_s=LIMIT_S)
        async with neighbours(network=all_of.network, first=1, count=1, options=options) as others:
            await warm(others[0])
            await others[0].ready(OTHERS[0])
        await new.engine.wait_settled()
        assert in_host_memory(new, PROMPT) == in_host_memory(new, OTHERS[0]) == 40


async def test_the_status_server_hands_over_for_a_server_that_goes_on_serving() -> None:
    status = StatusOptions(listen="127.0.0.1:0")
    async with neighbours(options=ALLOWED, configs=[{"status": status}]) as all_of:
        old, new = all_of.workers
        await warm(old)
        address = old.engine.status_address
        assert address is not None
        code, told = await ask(address, "POST", "/hand_over", {"to": new.address, "within_s": LIMIT_S})
        assert code == 200 and (told["handed"], told["left"], told["live"]) == (10, 0, [])
        assert (await ask(address, "GET", "/ready"))[0] == 200
        assert (await old.serve(PROMPT))["l1"] == 40
        for body in ({}, {"to": new.address}, {"to": "", "within_s": 1}, {"to": "x", "within_s": 1}):
            assert (await ask(address, "POST", "/hand_over", body))[0] == 400


# --- Requests that move ---


async def test_a_live_request_is_retracted_and_resumes_at_the_successor_with_its_output() -> None:
    """The pages of its prompt and of what it has generated come from the old worker, also while that one drains."""
    async with neighbours(options=ALLOWED) as all_of:
        old, new = all_of.workers
        ready = await old.ready(PROMPT)
        output = list(range(700, 711))
        # Eleven tokens of output, of which the last has no KV: 52 tokens, 13 pages.
        old.engine.grow(ready, len(output) - 1)
        written = [*PROMPT, *output[:-1]]
        digests = prompt_digests(pack_tokens(written), PAGE)
        old.kv.fill(list(ready.pages[10 : len(digests)]), digests[10:])
        draining = asyncio.ensure_future(old.engine.drain(to=new.address, hand_s=LIMIT_S))
        await until(lambda: runtime_of(old.engine).is_draining)
        retracted = await old.engine.retract(ready, output)
        assert retracted.held_tokens == 52
        # The last token of the output has no KV yet: prefill computes that, and the next token.
        request = replace(retracted.request, tokens=retracted.packed_tokens, peers=[old.address])
        moved = await new.engine.restore(request)
        assert new.kv.verify(list(moved.pages[:13]), prompt_digests(pack_tokens(written), PAGE)) == []
        assert moved.sources["transfer"] == 1 and moved.sources.get("l2", 0) + moved.sources.get("peer", 0) == 52
        old.engine.drop(retracted)
        await new.engine.finish(moved, [])
        assert (await draining).live == []
        await old.engine.wait_settled()
        assert old.core()["host_protected"] == 0


async def test_an_engine_on_a_thread_drains_to_a_successor_and_a_wrong_one_is_refused_without_an_effect() -> None:
    async with neighbours(options=ALLOWED, count=1) as all_of:
        (new,) = all_of.workers
        device, host = DevicePool.allocate(LAYOUT, 64), HostPool.allocate(LAYOUT, 64)
        config = EngineConfig(peer=PATIENT, cache_peers=ALLOWED)
        transport = LoopbackTransport("threaded", LoopbackNetwork())
        with EngineThread(DecodeEngine(config, device=device, host=host, transport=transport)) as thread:

            def drain(**fields: Any) -> DrainOutcome:
                return thread.drain(0, **fields)

            with pytest.raises(InvalidRequest, match="to must be host:port"):
                await asyncio.to_thread(drain, to="nowhere")
            assert not thread._is_draining
            # Its network has no such worker.
            outcome = await asyncio.to_thread(drain, to=new.address, hand_s=LIMIT_S)
            assert numbers(outcome) == (0, 0, 0, 0)
            with pytest.raises(EngineClosed, match="drains"):
                thread.submit(new.request(PROMPT))


@pytest.mark.parametrize("namespace", ["\0abc", "\0=zz", "\0=ab", "\0", "\0\0", "\0\0x:y", "\0999:a", "a\0b"])
async def test_a_prompt_whose_namespace_is_none_is_not_taken(namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end the thread that makes KV events of what host memory has."""
    async with neighbours(options=ALLOWED) as all_of:
        old, new = all_of.workers
        await warm(old)
        peers = runtime_of(old.engine).peers
        assert peers is not None
        hand = peers.hand
        monkeypatch.setattr(peers, "hand", lambda command, _, keys: hand(command, namespace, keys))
        monkeypatch.setattr(peers, "_namespace_of", lambda seed: "")
        outcome = await drained(old, new)
        assert numbers(outcome)[:2] == (0, 0) and "namespace is not known here" in outcome.cause
        assert not core_of(new.engine).state.index.tree.roots
