"""Pages named by pairs of tokens: a page is shared exactly where the token behind it is the same, in every tier.

The KV that prefill makes here is that of an EAGLE draft: what a position holds depends on the next token too, and what
the prompt's last position holds on the first token of the answer. So a page that is served where it must not be has
wrong bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from random import Random

import pytest

from tests.support.configs import engine_config
from tests.support.neighbours import sharing
from tests.support.waits import LEASE_S, PATIENT, PATIENT_STORE
from tidekv import (
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    HostPool,
    KVLayout,
    LoopbackTransport,
    PrefillConfig,
    PrefillPeer,
    PromptStoreSettings,
    Replayer,
    RequestFailed,
    open_storage,
)
from tidekv.backends.keys.chain import pack_tokens, page_digests
from tidekv.backends.page_layout import PageLayout
from tidekv.engine.synthetic.kv import SyntheticKV
from tidekv.transports.loopback import LoopbackNetwork
from tidekv.transports.prefill.prefill_room import Room

SIZE = 4
LAYOUT = PageLayout.of(
    full=KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, dtype="float32", page_size=SIZE),
    draft=KVLayout(num_layers=1, num_kv_heads=2, head_dim=2, dtype="float16", page_size=SIZE),
)
PAGES = 400


def contents(tokens: list[int], next_token: int) -> list[bytes]:
    """What the pages of these tokens hold, the last one maybe in part, where `next_token` comes after them."""
    packed = pack_tokens([*tokens, next_token])
    digests = page_digests(packed, SIZE, bigrams=True)
    rest = packed[len(digests) * SIZE * 4 :]
    return digests if len(tokens) % SIZE == 0 else [*digests, sha256(b"".join([*digests[-1:], rest])).digest()]


@dataclass
class Model:
    """Reference model: every token sequence that ever had KV, as far as its tokens are known."""

    known: list[list[int]] = field(default_factory=list)

    def hit_pages(self, prompt: list[int]) -> int:
        """Number of leading pages for which the tokens and the next token match a known sequence."""
        for pages in range((len(prompt) - 1) // SIZE, 0, -1):
            reach = pages * SIZE + 1
            if any(tokens[:reach] == prompt[:reach] for tokens in self.known):
                return pages
        return 0


class Bench:
    """A decode engine and a prefill worker that answers each request with the first token set for it."""

    def __init__(self) -> None:
        self.network = LoopbackNetwork()
        self.prefill_pool = DevicePool.allocate(LAYOUT, 64)
        self.prefill_kv = SyntheticKV(self.prefill_pool)
        self.device = DevicePool.allocate(LAYOUT, PAGES)
        self.kv = SyntheticKV(self.device)
        self.first_tokens: dict[str, int] = {}
        self.model = Model()
        self.numbers = itertools.count()
        self.peers: list[str] = []
        self.engine: DecodeEngine

    async def serve(self, room: Room) -> None:
        tokens = memoryview(room.tokens).cast("I").tolist()
        first_token = self.first_tokens[room.request_id]
        digests = contents(tokens, first_token)
        pages = list(range(len(digests)))
        self.prefill_kv.fill(pages, digests)
        await room.send(pages, start_token=0)
        await room.finish(first_token=first_token)
        await room.received()

    async def answer(self, prompt: list[int], output: list[int]) -> tuple[dict[str, int], list[int]]:
        """Restore, generate, give back; returns the sources, and the positions of pages with wrong bytes."""
        request_id = f"r{next(self.numbers)}"
        self.first_tokens[request_id] = output[0]
        request = DecodeRequest(
            request_id=request_id, tokens=prompt, prefill="prefill", send_prompt=True, peers=self.peers
        )
        ready = await self.engine.restore(request)
        wrong = self.kv.verify(ready.pages[: -(-len(prompt) // SIZE)].tolist(), contents(prompt, output[0]))
        self.engine.grow(ready, len(output) - 1)
        written = [*prompt, *output[:-1]]
        digests = contents(written, output[-1])
        first = len(prompt) // SIZE
        self.kv.fill(ready.pages[first : len(digests)].tolist(), digests[first:])
        await self.engine.finish(ready, output)
        await self.engine.wait_settled()
        self.model.known += [prompt, [*prompt, *output]]
        return ready.sources, wrong


@asynccontextmanager
async def bench(
    storage: str = "",
    *,
    bigram_keys: bool = True,
    peer_bigram_keys: bool | None = None,
    prefill_storage: str = "",
    **config: object,
) -> AsyncIterator[Bench]:
    made = Bench()
    options = {**PATIENT, "bigram_keys": bigram_keys, "prefetch_threshold_tokens": 0, **config}
    async with (
        PrefillPeer(
            PrefillConfig(
                listen="prefill",
                lease_s=LEASE_S,
                store=PromptStoreSettings(**PATIENT_STORE),
                bigram_keys=bigram_keys if peer_bigram_keys is None else peer_bigram_keys,
            ),
            device=made.prefill_pool,
            transport=LoopbackTransport("prefill-0", made.network),
            on_room=made.serve,
            storage=open_storage(prefill_storage) if prefill_storage else None,
        ) as peer,
        DecodeEngine(
            engine_config(**options),
            device=made.device,
            host=HostPool.allocate(LAYOUT, PAGES),
            storage=open_storage(storage) if storage else None,
            transport=LoopbackTransport("decode-0", made.network),
        ) as engine,
    ):
        made.engine, made.peer = engine, peer
        yield made


@pytest.mark.parametrize("seed", range(4))
async def test_hits_are_those_of_a_naive_model_and_every_byte_is_right(seed: int, tmp_path: Path) -> None:
    random = Random(seed)
    tiers = [(), ("l1",), ("l1", "l2")]
    journal = str(tmp_path / "journal")
    async with bench("memory:?capacity=64MB", journal_path=journal, journal_tokens=seed % 2 == 0) as rig:
        for _ in range(60):
            # Two tokens and short prompts, often a prefix of a known sequence and a little more: they part anywhere.
            base = random.choice(rig.model.known) if rig.model.known and random.random() < 0.7 else []
            prompt = [*base[: random.randint(0, len(base))], *random.choices((0, 1), k=random.randint(1, 9))]
            output = random.choices((0, 1), k=random.randint(1, 6))
            await rig.engine.flush(tiers=random.choice(tiers))
            # Two prompts that part in the token behind a page find different pages.
            hit = rig.model.hit_pages(prompt) * SIZE
            seen = sum(rig.engine.probe_prefix(prompt).values())
            sources, wrong = await rig.answer(prompt, output)
            assert wrong == [], (prompt, output, sources)
            assert len(prompt) - sources["transfer"] == hit >= seen
            assert sources["transfer"] >= 1
    Replayer(journal).run()


async def test_without_them_a_page_is_served_whose_last_position_is_anothers() -> None:
    """The planted fault: it is what the option is for, and the test above would see it."""
    prompt = [0, 1, 2, 3, 4, 5, 6]
    async with bench(bigram_keys=False) as rig:
        await rig.answer(prompt, [7])
        _, wrong = await rig.answer([*prompt[:4], 9, 9], [7])
        assert wrong == [0]
    async with bench() as rig:
        await rig.answer(prompt, [7])
        sources, wrong = await rig.answer([*prompt[:4], 9, 9], [7])
        assert (sources["l1"], wrong) == (0, [])


async def test_a_page_that_ends_with_the_prompt_waits_for_its_answer() -> None:
    """Its draft KV depends on the first token: the same prompt may be answered otherwise the next time."""
    prompt = [0, 1, 2, 3, 4, 5, 6, 7]
    async with bench() as rig:
        await rig.answer(prompt, [8, 9])
        sources, wrong = await rig.answer(prompt, [5])
        assert (sources["l1"], sources["transfer"], wrong) == (4, 4, [])
        # Of the first answer's page it is known how it goes on: the turn after it hits.
        sources, wrong = await rig.answer([*prompt, 8, 9, 9], [1])
        assert (sources["l1"], wrong) == (8, [])


async def test_what_prefill_stores_is_what_decode_looks_for(tmp_path: Path) -> None:
    prompt = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    uri = f"file:{tmp_path}?capacity=64MB"
    async with bench(prefill_storage=uri) as rig:
        await rig.answer(prompt, [1])
        await rig.peer.wait_stored()
        assert rig.peer.statistics()["store_pages_written"] == 2
        await rig.engine.flush()
        await rig.engine.attach_storage(uri)
        sources, wrong = await rig.answer(prompt, [1])
        assert (sources["l3"], wrong) == (8, [])
        sources, wrong = await rig.answer([*prompt[:8], 1], [1])
        assert (sources["l1"], wrong) == (4, [])


@asynccontextmanager
async def peers_of(rig: Bench, **config: object) -> AsyncIterator[DecodeEngine]:
    """Another decode worker, which reads from the host memory of the first one."""
    device = DevicePool.allocate(LAYOUT, PAGES)
    engine = DecodeEngine(
        engine_config(**PATIENT, bigram_keys=True, prefetch_threshold_tokens=0, cache_peers=sharing(), **config),
        device=device,
        host=HostPool.allocate(LAYOUT, PAGES),
        transport=LoopbackTransport("decode-1", rig.network),
    )
    async with engine:
        rig.engine, rig.device, rig.kv = engine, device, SyntheticKV(device)
        yield engine


@pytest.mark.parametrize(("asked", "from_peer"), [(9, 8), (10, 8), (8, 4), (13, 12), (17, 12)])
async def test_a_peer_sends_the_pages_whose_next_token_is_the_same(asked: int, from_peer: int) -> None:
    prompt = list(range(14))
    async with bench(cache_peers=sharing()) as rig:
        await rig.answer(prompt, [20, 21])
        peer = str(rig.engine.peer_address)
        async with peers_of(rig):
            rig.peers = [peer]
            sources, wrong = await rig.answer([*prompt, 30, 31, 32][:asked], [40])
            assert (sources["peer"], sources["transfer"], wrong) == (from_peer, asked - from_peer, [])


async def test_a_page_that_a_peer_has_with_another_next_token_is_not_sent() -> None:
    async with bench(cache_peers=sharing()) as rig:
        await rig.answer(list(range(9)), [20])
        peer = str(rig.engine.peer_address)
        async with peers_of(rig):
            rig.peers = [peer]
            # The second page ends with the same token, and goes on otherwise.
            sources, wrong = await rig.answer([*range(8), 30], [40])
            assert (sources["peer"], wrong) == (4, [])


async def test_ends_that_name_pages_otherwise_are_refused_by_name() -> None:
    async with bench(bigram_keys=True, peer_bigram_keys=False) as rig:
        with pytest.raises(RequestFailed, match="differs in bigram_keys: ours is True, theirs is False"):
            await rig.answer([1, 2, 3, 4, 5], [6])
