"""A prefix from another worker of as many ranks: each rank reads from the one at its place, and all use the same pages.

`Rank.restore` verifies every byte of every rank.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from benchmarks.ports import free_port
from tests.support.inside import core_of, runtime_of
from tests.support.neighbours import PATIENT, Gate, sharing
from tests.support.waits import LIMIT_S, expected, until
from tidekv import (
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    DrainOutcome,
    EngineConfig,
    HostPool,
    InvalidConfig,
    InvalidRequest,
    KVLayout,
    LoopbackNetwork,
    NixlTransport,
    RankGroup,
    RankLost,
    StorageOptions,
)
from tidekv.backends.keys.chain import pack_tokens
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.states.types import PageIds
from tidekv.transports.loopback import LoopbackPeer, LoopbackTransport

FROM_PREFILL = {"l1": 0, "l2": 0, "l3": 0, "transfer": 42}
FROM_PEER = {**FROM_PREFILL, "transfer": 2, "peer": 40}
NUMBERS = itertools.count()


class Worker:
    """The ranks of one worker."""

    def __init__(self, world, members, name: str) -> None:  # type: ignore[no-untyped-def]  # As the fixture gives them.
        self.world, self.members, self.name = world, members, name

    @property
    def address(self) -> str:
        """That of all ranks, as others name it."""
        return ",".join(str(member.engine.peer_address) for member in self.members)

    async def serve(self, tokens: list[int], *peers: str) -> dict[str, int]:
        """Restore a prompt on all ranks, and give it back; returns where its tokens came from."""
        request_id = f"{self.name}-{next(NUMBERS)}"
        readies = await self.world.restore_all(self.members, request_id, tokens, peers=peers)
        await self.world.finish_all(self.members, readies, [])
        return dict(readies[0].sources)

    async def warm(self, tokens: list[int]) -> None:
        """Bring a prompt into host memory."""
        await self.serve(tokens)
        await self.settle()

    async def settle(self) -> None:
        """Wait until nothing is in flight, and check that the ranks have the same books."""
        await self.world.settle(self.members)

    def core(self, rank: int = 0) -> dict[str, int]:
        """Counts of a rank's core."""
        return dict(self.members[rank].engine.statistics()["core"])


@pytest.fixture
def network() -> LoopbackNetwork:
    return LoopbackNetwork()


@pytest.fixture
def workers(world, network: LoopbackNetwork):  # type: ignore[no-untyped-def]
    """Makes running workers of so many ranks each, named by their numbers of ranks."""

    @asynccontextmanager
    async def make(*counts: int, **fields: object) -> AsyncIterator[list[Worker]]:
        options = fields.pop("options", sharing())
        made = []
        for number, ranks in enumerate(counts):
            address = world.free_address()
            members = [
                world.Rank(
                    rank,
                    ranks,
                    address,
                    network=network,
                    peers=type(options)(**{**_fields(options), "listen": f"peers-{number}:{7100 + rank}"}),
                    **fields,
                )
                for rank in range(ranks)
            ]
            made.append(Worker(world, members, f"w{number}"))
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*(member.enter() for worker in made for member in worker.members))
            try:
                yield made
            finally:
                for gate in GATES:
                    gate.opened.set()
                GATES.clear()
                await asyncio.gather(*(member.life.aclose() for worker in made for member in worker.members))

    return make


GATES: list[Gate] = []


def _fields(options: object) -> dict[str, object]:
    return {name: getattr(options, name) for name in options.__struct_fields__}  # type: ignore[attr-defined]


def hold(network: LoopbackNetwork, member) -> Gate:  # type: ignore[no-untyped-def]
    """Hold the writes of one rank until the gate is opened, or the test ends."""
    gate = Gate(member.transport.instance)
    GATES.append(gate)
    network.before_write = gate.hold
    return gate


async def held_drain(network: LoopbackNetwork, old: Worker, new: Worker) -> tuple[Gate, asyncio.Future[DrainOutcome]]:
    """Drain a worker of two ranks to another one, and hold the writes of its second rank."""
    gate = hold(network, old.members[1])
    draining = asyncio.ensure_future(old.members[0].engine.drain(to=new.address, hand_s=LIMIT_S))
    async with expected("a write to the successor"):
        await gate.reached.wait()
    return gate, draining


def lose_first_rank(member) -> None:  # type: ignore[no-untyped-def]
    """Close a rank's channel to the first rank of its group."""
    ranks = runtime_of(member.engine).ranks
    assert ranks is not None
    ranks._channel._peers[0].close()


@pytest.mark.parametrize("ranks", [2, 3])
async def test_each_rank_reads_from_the_rank_at_its_place(world, workers, ranks: int) -> None:
    async with workers(ranks, ranks) as (first, second):
        await first.warm(world.PROMPT)
        assert await second.serve(world.PROMPT, first.address) == FROM_PEER
        for worker in (first, second):
            await worker.settle()
        for rank in range(ranks):
            assert first.core(rank)["pages_shared"] == 10 and second.core(rank)["peer_fetches"] == 1
            assert first.core(rank)["host_protected"] == second.core(rank)["host_owned"] == 0


async def test_a_peer_is_named_by_its_first_rank_if_the_others_are_at_the_ports_behind_it(world, workers) -> None:
    async with workers(2, 2) as (first, second):
        await first.warm(world.PROMPT)
        assert await second.serve(world.PROMPT, "peers-0:7100") == FROM_PEER


async def test_hints_name_a_peer_by_its_first_rank_and_all_its_ports_are_allowed(world, workers) -> None:
    async with workers(2, 2, options=sharing(allow=("peers-0:7100-7101",))) as (first, second):
        await first.warm(world.PROMPT)
        payload = {"source_control_endpoint": "tcp://peers-0:7100"}
        action = {"action_id": "a", "action_type": "kv.fetch", "action_version": "1.0", "payload": payload}
        hint = {"protocol_version": "0.1", "message_id": "m", "actions": [action]}
        readies = await world.restore_all(second.members, "hinted", world.PROMPT, kv_hints=hint)
        assert dict(readies[0].sources) == FROM_PEER
        await world.finish_all(second.members, readies, [])


@pytest.mark.parametrize("is_last", [False, True])
async def test_hints_of_a_request_are_acted_on_by_the_first_rank_and_name_the_peer_on_all(
    world, workers, is_last: bool
) -> None:
    def action(kind: str, **payload: object) -> dict[str, object]:
        return {"action_id": kind, "action_type": kind, "action_version": "1.0", "payload": payload}

    async with workers(2, 2, options=sharing(allow=("peers-0:7100-7101",))) as (first, second):
        await first.warm(world.PROMPT)
        for worker in (first, second):
            actions = [
                action("kv.pin", token_ids=world.PROMPT, tier="host", ttl_ms=60_000),
                action("kv.fetch", source_control_endpoint="tcp://peers-0:7100"),
            ]
            hint = {
                "protocol_version": "0.1",
                "message_id": "m",
                "actions": actions if is_last else actions[::-1],
            }
            readies = await world.restore_all(worker.members, f"{worker.name}-hinted", world.PROMPT, kv_hints=hint)
            await world.finish_all(worker.members, readies, [])
        assert [sum(member.engine._hints.counts.values()) for member in second.members] == [2, 1]
        assert [dict(member.engine._hints.counts) for member in second.members][1] == {("kv.fetch", "accepted"): 1}


async def test_a_hint_names_no_address_for_another_rank_that_is_not_allowed(world, workers) -> None:
    async with workers(2, 2, options=sharing(allow=("peers-0:*",))) as (first, second):
        await first.warm(world.PROMPT)
        dialled: list[str] = []
        for member in second.members:
            dial = member.transport.dial
            member.transport.dial = lambda address, dial=dial: dialled.append(address) or dial(address)
        for named in ("peers-0:7100,elsewhere:1", "elsewhere:1,peers-0:7101", "peers-0:7100,peers-0:7101,elsewhere:1"):
            action = {
                "action_id": "a",
                "action_type": "kv.fetch",
                "action_version": "1.0",
                "payload": {"source_control_endpoint": named},
            }
            hint = {"protocol_version": "0.1", "message_id": "m", "actions": [action]}
            await world.restore_all(second.members, named, world.PROMPT, kv_hints=hint)
        assert second.core()["peer_fetches"] == 0 and not [one for one in dialled if "elsewhere" in one]
        assert [dict(member.engine._hints.counts) for member in second.members] == [{("kv.fetch", "rejected"): 3}] * 2


async def test_a_peer_with_less_on_one_rank_gives_all_ranks_that_much(world, workers) -> None:
    async with workers(2, 2, page_checksums=True) as (first, second):
        await first.warm(world.PROMPT)
        member = first.members[1]
        (pages,) = (node.host for node in core_of(member.engine).state.index.nodes() if node.host is not None)
        member.host.array[pages[6], 77] ^= 16
        assert await second.serve(world.PROMPT, first.address) == {**FROM_PREFILL, "transfer": 18, "peer": 24}
        await first.settle()
        # The damaged page leaves the host memory of both ranks.
        assert [first.core(rank)["host_cached"] for rank in range(2)] == [0, 0]


async def test_a_rank_that_sends_wrong_bytes_gives_all_ranks_nothing_and_is_named(
    world, workers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with workers(2, 2, page_checksums=True) as (first, second):
        await first.warm(world.PROMPT)
        whole, flipped = LoopbackTransport.write, []

        async def write(self: LoopbackTransport, peer: LoopbackPeer, ours: PageIds, theirs: PageIds) -> int:
            written = await whole(self, peer, ours, theirs)
            if self is first.members[1].transport and not flipped:
                segment = peer.exchange.theirs.segments[0]
                ctypes.c_uint8.from_address(segment.address + theirs[4] * segment.stride_bytes).value ^= 4
                flipped.append(theirs[4])
            return written

        monkeypatch.setattr(LoopbackTransport, "write", write)
        assert await second.serve(world.PROMPT, first.address) == FROM_PREFILL
        assert flipped and "pages damaged" in caplog.text and "peers-0:7101" in caplog.text
        await second.settle()
        assert [second.core(rank)["peer_pages_short"] for rank in range(2)] == [10, 10]


@pytest.mark.parametrize("end", ["opens", "dies"])
async def test_a_silent_rank_of_the_peer_costs_a_part_of_the_time_and_keeps_its_pages(
    world, workers, network: LoopbackNetwork, end: str
) -> None:
    async with workers(2, 2, options=sharing(wait_s=0.3)) as (first, second):
        await first.warm(world.PROMPT)
        gate = hold(network, first.members[1])
        assert await second.serve(world.PROMPT, first.address) == FROM_PREFILL
        assert gate.reached.is_set()
        # The silent rank may still write, so no rank gives these host pages to others: they have the same books.
        assert [second.core(rank)["peer_pages_in_flight"] for rank in range(2)] == [10, 10]
        if end == "dies":
            network.kill(first.members[1].transport.instance)
        gate.opened.set()
        await second.settle()
        assert [second.core(rank)["host_owned"] for rank in range(2)] == [0, 0]
        # It is not asked again for a while.
        await second.serve(list(range(500, 542)), first.address)
        assert second.core()["peer_fetches"] == 1


@pytest.mark.parametrize(("counts", "said"), [((1, 2), "ranks of workers"), ((2, 1), "ranks of workers")])
async def test_a_worker_of_another_number_of_ranks_is_refused_by_name(
    world, workers, counts: tuple[int, int], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with workers(*counts) as (first, second):
        await first.warm(world.PROMPT)
        # Named so that each rank has an address, which is that of a rank of another worker.
        address = ",".join(["peers-0:7100"] * counts[1])
        assert await second.serve(world.PROMPT, address) == FROM_PREFILL
        assert f"{said} that share host memory" in caplog.text and "peers-0:7100" in caplog.text


async def test_ranks_that_are_named_in_another_order_are_refused(
    world, workers, caplog: pytest.LogCaptureFixture
) -> None:
    async with workers(2, 2) as (first, second):
        await first.warm(world.PROMPT)
        assert await second.serve(world.PROMPT, "peers-0:7101,peers-0:7100") == FROM_PREFILL
        assert "rank of workers that share host memory" in caplog.text


async def test_a_reader_of_which_one_rank_never_asks_is_refused_on_the_others(
    world, workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with workers(2, 2) as (first, second):
        await first.warm(world.PROMPT)
        peers = runtime_of(second.members[1].engine).peers
        assert peers is not None
        monkeypatch.setattr(peers, "address_of", lambda peer: "nowhere:1")
        assert await second.serve(world.PROMPT, first.address) == FROM_PREFILL
        await first.settle()
        assert first.core()["pages_shared"] == 0 and first.core()["host_protected"] == 0


async def test_a_peer_that_has_lost_a_rank_refuses_and_serves_once_it_is_whole(
    world, workers, network: LoopbackNetwork, caplog: pytest.LogCaptureFixture
) -> None:
    async with workers(2, 2, options=sharing(pause_s=0.001)) as (first, second):
        await first.warm(world.PROMPT)
        gate = hold(network, first.members[0])
        serving = asyncio.ensure_future(second.serve(world.PROMPT, first.address))
        async with expected("a write of the peer"):
            await gate.reached.wait()
        # Its ranks lose each other: what they write they finish, and then they form a new group.
        lose_first_rank(first.members[1])
        await until(lambda: all(runtime_of(member.engine).ranks.lost is not None for member in first.members))  # type: ignore[union-attr]
        refused = asyncio.ensure_future(second.serve(list(range(700, 742)), first.address))
        assert await refused == FROM_PREFILL
        gate.opened.set()
        assert await serving == FROM_PEER
        await asyncio.gather(*(member.engine.wait_formed() for member in first.members))
        await first.warm(list(range(300, 342)))
        await second.settle()
        assert await second.serve(list(range(300, 342)), first.address) == FROM_PEER


async def test_a_peer_for_another_number_of_ranks_is_refused_before_anything_is_asked(world, workers) -> None:
    async with workers(2) as (first,):
        request = DecodeRequest(
            request_id="r", tokens=[1, 2], prefill="p:1,p:2", send_prompt=True, peers=["a:1,a:2,a:3"]
        )
        for member in first.members:
            with pytest.raises(Exception, match="names the addresses of 3 ranks, and this worker has 2"):
                await member.engine.restore(request)


def drained(outcome: DrainOutcome) -> tuple[int, int, int, int]:
    return outcome.handed, outcome.present, outcome.left, outcome.failed


@pytest.mark.parametrize("ranks", [2, 3])
async def test_each_rank_of_a_successor_reads_what_the_rank_at_its_place_had(world, workers, ranks: int) -> None:
    # A share of which a prompt needs many: that of the first rank is that of all, and it drains.
    options = sharing(allow=("peers-0:*", "peers-1:*"), read_share=0.05, host_share=0.05)
    async with workers(ranks, ranks, options=options) as (old, new):
        prompts = [world.PROMPT, list(range(500, 542))]
        for prompt in prompts:
            await old.warm(prompt)
        with pytest.raises(InvalidRequest, match="on rank 0 only"):
            await old.members[1].engine.drain(to=new.address)
        assert drained(await old.members[0].engine.drain(to=new.address, hand_s=LIMIT_S)) == (20, 0, 0, 0)
        for worker, name in ((old, "pages_handed"), (new, "pages_taken")):
            await worker.settle()
            assert [worker.core(rank)[name] for rank in range(ranks)] == [20] * ranks
            assert [worker.core(rank)["host_protected"] for rank in range(ranks)] == [0] * ranks
        for prompt in prompts:
            assert await new.serve(prompt) == {**FROM_PREFILL, "l2": 40, "transfer": 2}


async def test_ranks_drain_to_one_address_again_and_find_what_is_there(world, workers) -> None:
    async with workers(2, 2, options=sharing(allow=("peers-0:7100-7101",))) as (old, _):
        await old.warm(world.PROMPT)
        for found in ((10, 0, 0, 0), (0, 10, 0, 0)):
            assert drained(await old.members[0].engine.drain(to="peers-1:7100", hand_s=LIMIT_S)) == found


async def test_what_a_rank_has_damaged_no_rank_of_the_successor_gets(world, workers) -> None:
    async with workers(2, 2, options=sharing(allow=("peers-0:*",)), page_checksums=True) as (old, new):
        await old.warm(world.PROMPT)
        (pages,) = (node.host for node in core_of(old.members[1].engine).state.index.nodes() if node.host is not None)
        old.members[1].host.array[pages[6], 77] ^= 16
        assert drained(await old.members[0].engine.drain(to=new.address, hand_s=LIMIT_S))[0] == 6
        await new.settle()
        assert [new.core(rank)["pages_taken"] for rank in range(2)] == [6, 6]
        assert await new.serve(world.PROMPT) == {**FROM_PREFILL, "l2": 24, "transfer": 18}


@pytest.mark.parametrize(
    ("counts", "allow", "said"),
    [
        ((2, 2), "peers-0:7100", "peers-0:7101 is not in its cache_peers.allow"),
        ((2, 3), "peers-0:*", "ranks of workers that share host memory"),
        ((2, 1), "peers-0:*", "ranks of workers that share host memory"),
    ],
)
async def test_a_successor_that_cannot_take_for_all_ranks_refuses_by_name(
    world, workers, counts: tuple[int, int], allow: str, said: str
) -> None:
    async with workers(*counts, options=sharing(allow=(allow,))) as (old, _):
        await old.warm(world.PROMPT)
        outcome = await old.members[0].engine.drain(to="peers-1:7100", hand_s=LIMIT_S)
        assert drained(outcome) == (0, 0, 10, 10) and said in outcome.cause
        await old.settle()


async def test_a_successor_that_loses_a_rank_costs_an_answer_and_takes_once_it_is_whole(
    world, workers, network: LoopbackNetwork
) -> None:
    async with workers(2, 2, options=sharing(allow=("peers-0:*",))) as (old, new):
        await old.warm(world.PROMPT)
        gate, draining = await held_drain(network, old, new)
        lose_first_rank(new.members[1])
        outcome = await draining
        assert drained(outcome) == (0, 0, 10, 10) and outcome.cause == "it has lost a rank"
        gate.opened.set()
        await asyncio.gather(*(member.engine.wait_formed() for member in new.members))
        assert drained(await old.members[0].engine.drain(to=new.address, hand_s=LIMIT_S)) == (10, 0, 0, 0)


async def test_a_worker_that_loses_a_rank_as_it_drains_says_so_and_gives_all_pages_back(
    world, workers, network: LoopbackNetwork
) -> None:
    async with workers(2, 2, options=sharing(allow=("peers-0:*",))) as (old, new):
        await old.warm(world.PROMPT)
        gate, draining = await held_drain(network, old, new)
        lose_first_rank(old.members[1])
        with pytest.raises(RankLost):
            await draining
        gate.opened.set()
        await asyncio.gather(*(member.engine.wait_formed() for member in old.members))
        for worker in (old, new):
            await worker.settle()


@pytest.mark.slow
@pytest.mark.nixl
@pytest.mark.parametrize("drains", [False, True])
async def test_ranks_that_are_lent_pages_read_from_ranks_over_nixl(world, drains: bool) -> None:
    layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=world.PAGE_SIZE)
    tokens, pages = world.PROMPT[:40], list(range(10))
    digests = prompt_digests(pack_tokens(tokens), world.PAGE_SIZE)
    workers: list[list[DecodeEngine]] = []
    ports = [free_port(2), free_port(2)]
    async with asyncio.timeout(LIMIT_S), AsyncExitStack() as stack:
        for number in range(2):
            address, members = world.free_address(), []
            for rank in range(2):
                engine = DecodeEngine(
                    EngineConfig(
                        device="lent",
                        storage=StorageOptions(prefetch="timeout", prefetch_threshold_tokens=1),
                        peer=PATIENT,
                        cache_peers=sharing(listen=f"127.0.0.1:{ports[number] + rank}", allow=("127.0.0.1:*",)),
                    ),
                    device=DevicePool.allocate(layout, 16),
                    host=HostPool.allocate(layout, 64),
                    transport=NixlTransport(name=f"w{number}-{rank}", dials=["127.0.0.1:*"]),
                    ranks=RankGroup(
                        rank=rank, ranks=2, address=address, silence_s=30.0, hold_s=60.0, form_timeout_s=LIMIT_S
                    ),
                )
                members.append(engine)
            await asyncio.gather(*(stack.enter_async_context(engine) for engine in members))
            workers.append(members)
        first, second = workers
        for rank, engine in enumerate(first):
            # Each rank has heads of its own, so each has other bytes.
            SyntheticKV(engine.device).fill(pages, digests[rank:] + digests[:rank])
        offered = await asyncio.gather(*(engine.offer(tokens, pages) for engine in first))
        assert [one.written for one in offered] == [10, 10]
        peer = ",".join(str(engine.peer_address) for engine in first)
        request = DecodeRequest(request_id="r", tokens=tokens, prefill=(), peers=() if drains else [peer])
        if drains:
            successor = ",".join(str(engine.peer_address) for engine in second)
            assert drained(await first[0].drain(to=successor, hand_s=LIMIT_S)) == (10, 0, 0, 0)
        restored = await asyncio.gather(*(engine.restore_into(request, pages) for engine in second))
        source = "l2" if drains else "peer"
        assert [dict(one.sources)[source] for one in restored] == [40, 40]
        for rank, engine in enumerate(second):
            assert SyntheticKV(engine.device).verify(pages, digests[rank:] + digests[:rank]) == []


def test_each_rank_may_dial_the_ranks_at_its_place_of_the_peers_that_the_options_name() -> None:
    options = sharing(ask=("a:1", "b:1,c:1", "[::1]:65534"), allow=("d:1-9",))
    assert options.dials_of(1, 2) == ("a:2", "c:1", "[::1]:65535", "d:1-9")
    with pytest.raises(InvalidConfig, match=r"cache_peers.ask: peer names the addresses of 2 ranks, and this worker"):
        options.dials_of(0, 3)
    with pytest.raises(InvalidConfig, match="the last of 3 ranks would be at port 65536"):
        sharing(ask=("[::1]:65534",)).dials_of(0, 3)
