"""A prefix from the host memory of another decode worker: every byte checked, and what each failure of a peer costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support.inside import core_of, runtime_of
from tests.support.neighbours import PROMPT, Gate, Neighbours, Worker, lie, neighbours, sharing
from tests.support.waits import expected, until
from tidekv import (
    CachePeerOptions,
    DecodeRequest,
    InvalidConfig,
    InvalidRequest,
    JournalOptions,
    Replayer,
)
from tidekv.backends.keys.chain import pack_tokens
from tidekv.engine.decode.values import HintedPeers
from tidekv.states import events
from tidekv.states.errors import LocalProtocolError

FROM_PEER = {"l1": 0, "l2": 0, "l3": 0, "transfer": 2, "peer": 40}
FROM_PREFILL = {"l1": 0, "l2": 0, "l3": 0, "transfer": 42}
OTHERS = [[1000 + 50 * number + at for at in range(40)] for number in range(12)]
"""Further prompts of ten pages."""


async def warm(worker: Worker, tokens: list[int] = PROMPT, **fields: str) -> None:
    """Bring a prompt into the host memory of a worker."""
    await worker.serve(tokens, (), **fields)
    await worker.engine.wait_settled()


async def held(all_of: Neighbours, source: Worker, target: Worker) -> tuple[Gate, asyncio.Future[dict[str, int]]]:
    """Let a worker ask a peer for PROMPT; returns once a write of the peer waits at the gate."""
    gate = all_of.hold(source)
    serving = asyncio.ensure_future(target.serve(PROMPT, [source.address]))
    async with expected("a write of the peer"):
        await gate.reached.wait()
    return gate, serving


async def test_a_prefix_is_read_from_the_host_memory_of_a_peer_and_then_shared_on() -> None:
    async with neighbours(3) as all_of:
        first, second, third = all_of.workers
        assert await first.serve(PROMPT) == FROM_PREFILL
        await first.engine.wait_settled()
        assert await second.serve(PROMPT, [first.address]) == FROM_PEER
        await second.engine.wait_settled()
        assert await third.serve([*PROMPT, 7, 8, 9], [second.address]) == {**FROM_PEER, "transfer": 5}
        for worker in all_of.workers:
            await worker.engine.wait_settled()
            worker.engine.check()
            assert worker.core()["host_protected"] == worker.core()["host_owned"] == 0
        assert first.core()["pages_shared"] == 10 and second.core()["peer_fetches"] == 1


async def test_a_peer_with_less_sends_what_it_has_and_prefill_the_rest() -> None:
    async with neighbours() as all_of:
        first, second = all_of.workers
        await warm(first, PROMPT[:20])
        assert await second.serve(PROMPT, [first.address]) == {**FROM_PREFILL, "transfer": 22, "peer": 20}
        assert second.core()["peer_pages_short"] == 5
        # It has answered, so it is asked again.
        await warm(first, PROMPT)
        await second.engine.wait_settled()
        assert await second.serve([*PROMPT[:30], *OTHERS[0]], [first.address]) == {
            "l1": 28, "l2": 0, "l3": 0, "transfer": 42,
        }  # fmt: skip
        assert second.core()["peer_fetches"] == 2


@pytest.mark.parametrize("namespace", ["", "tenant é"])
async def test_a_peer_shares_a_prompt_in_its_namespace_only(namespace: str) -> None:
    async with neighbours(namespace=namespace) as all_of:
        first, second = all_of.workers
        await warm(first, namespace=namespace)
        if namespace:
            assert (await second.serve(PROMPT, [first.address], namespace=namespace)) == FROM_PEER
        else:
            assert (await second.serve(PROMPT, [first.address])) == FROM_PEER
            assert first.engine.probe_prefix(PROMPT, namespace="other") == {"l1": 0, "l2": 0}
        await second.engine.wait_settled()


async def test_a_device_that_has_a_part_asks_a_peer_for_the_rest_only() -> None:
    async with neighbours() as all_of:
        first, second = all_of.workers
        await warm(first)
        await warm(second, PROMPT[:16])
        assert await second.serve(PROMPT, [first.address]) == {**FROM_PEER, "l1": 16, "peer": 24}
        assert first.core()["pages_shared"] == 10


async def test_lent_pages_are_filled_from_a_peer() -> None:
    async with neighbours(configs=[{}, {"device": "lent"}]) as all_of:
        first, second = all_of.workers
        await warm(first)
        request = DecodeRequest(
            request_id="r", tokens=PROMPT, prefill=first.prefill, send_prompt=True, peers=[first.address]
        )
        restored = await second.engine.restore_into(request, list(range(11)))
        assert (restored.restored_tokens, dict(restored.sources)) == (42, FROM_PEER)
        assert second.engine.probe_prefix(PROMPT) == {"l1": 0, "l2": 40}
        await second.engine.wait_settled()


# --- How a peer is named ---


def fetch_hint(*endpoints: str, **payload: object) -> dict[str, object]:
    """An envelope of hints with a `kv.fetch` for each endpoint, as Dynamo's router attaches one."""
    hashes = {"block_hashes": [1, 2**64 - 1], **payload}
    return {
        "protocol_version": "0.1",
        "message_id": "m",
        "actions": [
            {
                "action_id": f"a{number}",
                "action_type": "kv.fetch",
                "action_version": "1.0",
                "payload": {"source_control_endpoint": endpoint, **hashes},
            }
            for number, endpoint in enumerate(endpoints)
        ],
    }


@pytest.mark.parametrize("scheme", ["tcp://", ""])
async def test_a_hint_names_a_peer_that_the_options_allow(scheme: str) -> None:
    async with neighbours(options=sharing(allow=("peers:*",))) as all_of:
        first, second = all_of.workers
        await warm(first)
        assert await second.serve(PROMPT, kv_hints=fetch_hint(scheme + first.address)) == FROM_PEER
        assert second.engine._hints.counts == {("kv.fetch", "accepted"): 1}


@pytest.mark.parametrize(
    ("endpoint", "payload", "said"),
    [
        ("tcp://{address}", {}, r"is not in cache_peers.allow"),
        ("http://{address}", {}, "source_control_endpoint must be host:port"),
        ("", {}, "source_control_endpoint must be host:port"),
        ("tcp://allowed:7", {"mode": "no_retain"}, "mode"),
        ("tcp://allowed:7", {"mode": 3}, "mode"),
    ],
)
async def test_a_hint_names_no_other_peer(endpoint: str, payload: dict[str, object], said: str) -> None:
    async with neighbours(options=sharing(allow=("allowed:7",))) as all_of:
        first, second = all_of.workers
        await warm(first)
        hint = fetch_hint(endpoint.format(address=first.address), **payload)
        dialled: list[str] = []
        dial = second.transport.dial
        second.transport.dial = lambda address: dialled.append(address) or dial(address)  # type: ignore[method-assign,func-returns-value]
        assert await second.serve(PROMPT, kv_hints=hint) == FROM_PREFILL
        assert second.engine._hints.counts == {("kv.fetch", "rejected"): 1}
        assert second.core()["peer_fetches"] == 0 and set(dialled) == {second.prefill}
        peers = HintedPeers()
        (outcome,) = await second.engine._hints.take(hint, peers=peers)
        assert said in outcome.cause and peers == HintedPeers(refused=[outcome.cause])


async def test_a_hint_that_comes_without_a_request_names_no_peer() -> None:
    async with neighbours(options=sharing(allow=("peers:*",))) as all_of:
        (outcome,) = await all_of[1].engine.hint(fetch_hint(all_of[0].address))
        assert (outcome.outcome, "comes with a request" in outcome.cause) == ("rejected", True)


async def test_a_hint_to_an_engine_without_peers_is_rejected_and_harmless() -> None:
    async with neighbours(options=CachePeerOptions()) as all_of:
        assert await all_of[0].serve(PROMPT, kv_hints=fetch_hint("peers:1")) == FROM_PREFILL
        assert all_of[0].engine._hints.counts == {("kv.fetch", "rejected"): 1}


async def test_peers_are_asked_in_the_order_hints_request_options() -> None:
    options = sharing(ask=("asked:1", "named:1"), allow=("hinted:*",))
    async with neighbours(options=options) as all_of:
        arrivals = all_of[0].engine._arrivals
        request = DecodeRequest(request_id="r", tokens=[1], prefill="one:1", peers=["named:1", all_of[0].address])
        assert arrivals._peers_of(request, HintedPeers(["hinted:1", "named:1"])) == ("hinted:1", "named:1", "asked:1")
        many = [f"hinted:{port}" for port in range(1, 12)]
        assert arrivals._peers_of(request, HintedPeers(many)) == tuple(many[:8])
        taken = HintedPeers()
        await all_of[0].engine._hints.take(fetch_hint(*many, *many), peers=taken)
        assert taken == HintedPeers(many[:8])


async def test_peers_of_the_options_are_asked_for_every_prompt() -> None:
    async with neighbours() as all_of:
        first = all_of[0]
        await warm(first)
        async with neighbours(network=all_of.network, first=1, options=sharing(ask=(first.address,))) as others:
            assert await others[0].serve(PROMPT) == FROM_PEER


async def test_hints_of_a_request_in_lent_pages_name_peers_too() -> None:
    options = sharing(allow=("peers:*",))
    async with neighbours(options=options, configs=[{}, {"device": "lent"}]) as all_of:
        first, second = all_of.workers
        await warm(first)
        request = DecodeRequest(
            request_id="r", tokens=PROMPT, prefill=first.prefill, send_prompt=True, kv_hints=fetch_hint(first.address)
        )
        restored = await second.engine.restore_into(request, list(range(11)))
        assert (restored.restored_tokens, dict(restored.sources)) == (42, FROM_PEER)


# --- Peers that fail ---


@pytest.mark.parametrize("how", ["no listener", "another model", "prefill itself", "no room for reads"])
async def test_a_peer_that_cannot_be_read_costs_a_request_nothing_but_the_attempt(how: str) -> None:
    options = sharing(read_share=0.01) if how == "no room for reads" else sharing()
    model = {"model": "other"} if how == "another model" else {}
    async with neighbours(options=options, configs=[model, {}]) as all_of:
        first, second = all_of.workers
        if not model:
            await warm(first)
        address = {"no listener": "nowhere:1", "prefill itself": first.prefill}.get(how, first.address)
        assert await second.serve(PROMPT, [address]) == FROM_PREFILL
        await second.engine.wait_settled()
        assert second.core()["host_owned"] == 0
        # A peer that is only busy is asked again; the others are left alone for a while.
        await second.engine.flush()
        assert await second.serve(PROMPT, [address]) == FROM_PREFILL
        assert second.core()["peer_fetches"] == (2 if how == "no room for reads" else 1)


async def test_a_peer_that_drains_is_read_until_it_closes() -> None:
    async with neighbours() as all_of:
        first, second = all_of.workers
        await warm(first)
        assert (await first.engine.drain(0)).live == []
        assert await second.serve(PROMPT, [first.address]) == FROM_PEER


async def test_a_killed_peer_costs_a_part_of_the_time_and_its_death_frees_the_pages(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = sharing(wait_s=0.3)
    async with neighbours(options=options) as all_of:
        first, second = all_of.workers
        await warm(first)
        gate, serving = await held(all_of, first, second)
        address = first.address
        all_of.network.kill(first.transport.instance)
        gate.opened.set()
        assert await serving == FROM_PREFILL
        await second.engine.wait_settled()
        assert second.core()["host_owned"] == second.core()["peer_pages_in_flight"] == 0
        assert address in caplog.text and "peer" in caplog.text


async def test_a_stopped_peer_costs_a_part_of_the_time_and_keeps_only_its_pages() -> None:
    async with neighbours(options=sharing(wait_s=0.1)) as all_of:
        first, second = all_of.workers
        await warm(first)
        gate = all_of.hold(first)
        assert await second.serve(PROMPT, [first.address]) == FROM_PREFILL
        assert gate.reached.is_set()
        # It may still write to host pages of this worker: nothing else gets them.
        assert second.core()["peer_pages_in_flight"] == 10 <= second.core()["host_owned"]
        for tokens in OTHERS:
            await second.serve(tokens, [first.address])
        assert second.core()["peer_fetches"] == 1  # Not asked again so soon.
        gate.opened.set()
        await second.engine.wait_settled()
        second.engine.check()
        assert second.core()["host_owned"] == 0
        await first.engine.wait_settled()
        assert first.core()["shared_pages"] == 0


async def test_a_peer_that_evicts_in_the_middle_of_a_read_spares_the_pages_that_it_sends() -> None:
    async with neighbours(host_pages=24, options=sharing(read_share=1.0, host_share=1.0)) as all_of:
        first, second = all_of.workers
        await warm(first)
        gate, serving = await held(all_of, first, second)
        # These fill its host memory several times over.
        for tokens in OTHERS:
            await first.serve(tokens)
            await until(lambda: first.core()["backups"] == 0)
        assert first.core()["shared_pages"] == 10 and first.core()["host_evictable"] <= 14
        gate.opened.set()
        assert await serving == FROM_PEER
        # Once it has ended they are evicted as any other.
        for tokens in OTHERS:
            await warm(first, tokens)
        await first.engine.wait_settled()
        assert await second.serve([*PROMPT[:39], 1, 2, 3], [first.address]) == {**FROM_PREFILL, "l1": 36, "transfer": 6}


async def test_sharing_evicts_nothing_of_the_peer() -> None:
    async with neighbours(host_pages=24, options=sharing(read_share=1.0, host_share=1.0)) as all_of:
        first, second = all_of.workers
        await warm(first, OTHERS[0])
        await warm(first, OTHERS[1])
        before = {name: first.core()[name] for name in ("host_cached", "device_cached", "host_free")}
        assert (await second.serve(OTHERS[0], [first.address]))["peer"] == 40
        await first.engine.wait_settled()
        assert before == {name: first.core()[name] for name in before}


@pytest.fixture
def lies(monkeypatch: pytest.MonkeyPatch) -> Callable[[Worker], list[int]]:
    """Flip a bit of the fifth page of what a worker writes to others, behind its checksum; returns the pages."""

    return partial(lie, monkeypatch)


async def test_wrong_bytes_are_refused_by_their_checksum_and_the_peer_is_named(
    lies: Callable[[Worker], list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    async with neighbours(page_checksums=True) as all_of:
        first, second = all_of.workers
        await warm(first)
        flipped = lies(first)
        # `serve` verifies every byte.
        assert await second.serve(PROMPT, [first.address]) == FROM_PREFILL
        assert len(flipped) == 1 and "pages damaged" in caplog.text and first.address in caplog.text
        peers = second.engine.statistics()["peers"]
        assert peers is not None and peers["reads"]["pages_damaged"] == 1
        assert second.core()["peer_pages_short"] == 10


async def test_a_page_that_is_damaged_in_the_host_memory_of_a_peer_is_not_sent() -> None:
    async with neighbours(page_checksums=True) as all_of:
        first, second = all_of.workers
        await warm(first)
        index = core_of(first.engine).state.index
        (pages,) = (node.host for node in index.nodes() if node.host is not None)
        first.host.array[pages[6], 77] ^= 16
        assert await second.serve(PROMPT, [first.address]) == {**FROM_PREFILL, "transfer": 18, "peer": 24}
        await first.engine.wait_settled()
        assert first.core()["l2_damaged"] == 1
        assert first.core()["host_cached"] == 0


async def test_a_request_that_is_aborted_leaves_a_read_to_itself() -> None:
    async with neighbours() as all_of:
        first, second = all_of.workers
        await warm(first)
        gate, serving = await held(all_of, first, second)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        gate.opened.set()
        await second.engine.wait_settled()
        second.engine.check()
        assert second.core()["host_owned"] == 0
        # What it has brought serves the next request.
        assert (await second.serve(PROMPT))["l2"] == 40


async def test_a_peer_that_closes_ends_the_reads_and_what_it_has_sent_counts(caplog: pytest.LogCaptureFixture) -> None:
    async with neighbours() as all_of:
        first, second = all_of.workers
        await warm(first)
        gate, serving = await held(all_of, first, second)
        assert runtime_of(first.engine).peers is not None
        closing = asyncio.ensure_future(runtime_of(first.engine).peers.stop_sharing())
        await until(lambda: "shutting down" in caplog.text)
        gate.opened.set()
        await closing
        assert await serving in (FROM_PREFILL, FROM_PEER)
        await second.engine.wait_settled()
        await first.engine.wait_settled()
        assert first.core()["shared_pages"] == second.core()["host_owned"] == 0


# --- Bounds and arguments ---


async def test_more_reads_than_may_be_are_refused() -> None:
    async with neighbours(3, options=sharing(reads_max=1)) as all_of:
        first, second, third = all_of.workers
        await warm(first)
        gate, serving = await held(all_of, first, second)
        assert await third.serve(PROMPT, [first.address]) == FROM_PREFILL
        gate.opened.set()
        assert await serving == FROM_PEER


async def test_a_write_that_raises_gives_up_the_pages_that_were_held_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def raise_it(*args: object, **named: object) -> None:
        raise RuntimeError("by a test")

    async with neighbours() as all_of:
        first, second = all_of.workers
        await warm(first)
        with monkeypatch.context() as patch:
            patch.setattr(runtime_of(first.engine).peers, "_write", raise_it)
            assert await second.serve(PROMPT, [first.address]) == FROM_PREFILL
        await first.engine.wait_settled()
        assert core_of(first.engine).hints.shares == {}
        assert first.core()["host_protected"] == 0
        assert "a read by a peer raised" in caplog.text


async def test_a_read_that_cannot_begin_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_it(*args: object, **named: object) -> None:
        raise LocalProtocolError("by a test")

    async with neighbours() as all_of:
        first, second = all_of.workers
        await warm(first)
        peers = runtime_of(second.engine).peers
        assert peers is not None
        with monkeypatch.context() as patch:
            patch.setattr(peers._reads._receiver, "promise", raise_it)
            assert await second.serve(PROMPT, [first.address]) == FROM_PREFILL
        assert peers._reads._reads == {}
        await second.engine.wait_settled()


async def test_pages_that_are_held_for_a_read_that_is_gone_are_given_up() -> None:
    """As when a rank is lost while the core decides what the peer gets."""
    async with neighbours() as all_of:
        (first, _) = all_of.workers
        await warm(first)
        runtime = runtime_of(first.engine)
        answered = runtime.calls.expect_hint(-7)
        runtime.front.post(
            events.ShareRequested(
                at_s=runtime.front.clock(),
                call=-7,
                read="gone",
                namespace="",
                keys=runtime.prompt_keys.page_keys.of(pack_tokens(PROMPT)),
                pages_max=64,
            )
        )
        assert (await answered).page_count == 10
        await first.engine.wait_settled()
        assert core_of(first.engine).hints.shares == {}
        assert first.core()["host_protected"] == 0


@pytest.mark.parametrize(
    ("peers", "said"),
    [
        ("one:1", "peers must be a list of text"),
        ([f"one:{port}" for port in range(9)], "must be at most 8 addresses"),
        ([""], "must be at most 8 addresses"),
        ([3], "peers"),
    ],
)
def test_peers_are_a_list_of_a_few_addresses(peers: object, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        DecodeRequest(request_id="r", tokens=[1], prefill="one:1", peers=peers)  # type: ignore[arg-type]


async def test_an_engine_that_reads_from_no_peers_refuses_a_request_with_some() -> None:
    async with neighbours(options=CachePeerOptions()) as all_of:
        with pytest.raises(InvalidRequest, match=r"peers are named.*cache_peers.enabled"):
            await all_of[0].serve(PROMPT, ["one:1"])
        assert all_of[0].engine.peer_address is None


def test_options_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(InvalidConfig, match=r"cache_peers.listen needs cache_peers.enabled"):
        CachePeerOptions(listen="127.0.0.1:0")
    for wrong, said in (
        ({"ask": ("nowhere",)}, "ask must be host:port"),
        ({"ask": tuple(f"one:{port}" for port in range(1, 10))}, "8 peers at most, not 9"),
        ({"allow": ("nowhere",)}, "allow: 'nowhere' is no address"),
        ({"allow": ("one:1",), "enabled": False}, "cache_peers.allow needs cache_peers.enabled"),
    ):
        with pytest.raises(InvalidConfig, match=said):
            CachePeerOptions(**{"enabled": True, **wrong})  # type: ignore[arg-type]


async def test_a_worker_does_not_read_from_itself() -> None:
    async with neighbours() as all_of:
        first = all_of[0]
        await warm(first, PROMPT[:20])
        assert await first.serve(PROMPT, [first.address]) == {**FROM_PREFILL, "l1": 20, "transfer": 22}
        assert first.core()["peer_fetches"] == 0


async def test_both_ends_of_a_read_are_replayed_from_their_journals(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.journal" for number in range(2)]
    configs = [{"journal": JournalOptions(path=str(path))} for path in paths]
    async with neighbours(configs=configs) as all_of:
        first, second = all_of.workers
        await warm(first)
        assert await second.serve(PROMPT, [first.address]) == FROM_PEER
    for path in paths:
        Replayer(path).run()
