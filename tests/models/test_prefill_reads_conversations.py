"""Conversations whose prefill reads from decode: it computes what no worker has, with one process's tokens."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial

import pytest

from demo.compute import ComputeThread
from demo.model import Llama, ModelShape, PagedModel, build_llama, generate_in_one_process, greedy
from demo.model_prefill import ModelPrefill
from demo.prefix_pages import PrefixPages
from tests.support.prompts import drawn_prompt
from tests.support.waits import LEASE_S, LIMIT_S
from tidekv import (
    CachePeerOptions,
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    EngineConfig,
    HostPool,
    KVLayout,
    LoopbackNetwork,
    LoopbackTransport,
    NixlTransport,
    PeerOptions,
    PrefillConfig,
    PrefillPeer,
    StorageOptions,
)

CONVERSATIONS, TURNS = 20, 10
USER, OUTPUT = 5, 6
"""Tokens of each turn."""
SHAPE = ModelShape(
    vocab_size=64,
    hidden_size=32,
    mlp_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    context_tokens=512,
)
PATIENT = PeerOptions(heartbeat_s=0.2, silence_s=60.0, lease_s=LEASE_S)
TOKENS = CONVERSATIONS * TURNS * (USER + OUTPUT)


def config(**fields: object) -> EngineConfig:
    """Options of an engine that waits for its peers on a busy machine, and takes every page from them."""
    peers = CachePeerOptions(
        enabled=True, wait_s=60.0, wait_share=0.9, host_share=1.0, read_share=1.0, reads_max=CONVERSATIONS,
        listen=None if fields.get("device") == "lent" else "127.0.0.1:0",
    )  # fmt: skip
    storage = StorageOptions(prefetch_threshold_tokens=1)
    return EngineConfig(model="m", peer=PATIENT, cache_peers=peers, storage=storage, **fields)  # type: ignore[arg-type]


@dataclass
class Chat:
    """One conversation so far, and what its turns cost."""

    number: int
    tokens: list[int] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)


@dataclass
class Pair:
    """A prefill and a decode worker with one model."""

    llama: Llama
    page_size: int
    is_nixl: bool = False
    network: LoopbackNetwork = field(default_factory=LoopbackNetwork)

    def pool(self) -> DevicePool:
        shape = self.llama.config
        layout = KVLayout(
            num_layers=shape.num_hidden_layers,
            num_kv_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            dtype="float64",
            page_size=self.page_size,
        )
        return DevicePool.allocate(layout, 2 * TOKENS // self.page_size)

    def host(self, device: DevicePool) -> HostPool:
        return HostPool.allocate(device.layout, device.num_pages)

    def transport(self, name: str) -> LoopbackTransport | NixlTransport:
        return NixlTransport(name, dials=["127.0.0.1:*"]) if self.is_nixl else LoopbackTransport(name, self.network)

    async def converse(self) -> tuple[list[Chat], ModelPrefill, dict[str, int | float]]:
        """Answer all turns, the conversations side by side; returns them, prefill, and the counts of its peer."""
        at_prefill, at_decode = self.pool(), self.pool()
        reader = DecodeEngine(
            config(device="lent"), device=at_prefill, host=self.host(at_prefill), transport=self.transport("reader")
        )
        engine = DecodeEngine(config(), device=at_decode, host=self.host(at_decode), transport=self.transport("decode"))
        with ComputeThread("prefill") as computes, ComputeThread("decode") as decodes:
            prefill = ModelPrefill(
                PagedModel(self.llama, at_prefill),
                PrefixPages(at_prefill.num_pages, self.page_size),
                computes,
                chunk_tokens=32 * self.page_size,
            )
            peer = PrefillPeer(
                PrefillConfig(model="m", lease_s=LEASE_S),
                device=at_prefill,
                transport=self.transport("prefill"),
                on_room=prefill.serve,
            )
            peer.read_with(reader)
            prefill.read_prefix = peer.read_prefix
            # A model of its own: a forward pass hooks its layers.
            model = PagedModel(build_llama(SHAPE), at_decode)
            chats = [Chat(number) for number in range(CONVERSATIONS)]
            async with asyncio.timeout(2 * LIMIT_S), peer, engine:
                for turn in range(TURNS):
                    before = prefill.tokens_computed
                    asked = (self.ask(chat, turn, engine, peer.address, model, decodes) for chat in chats)
                    new = sum(await asyncio.gather(*asked))
                    assert prefill.tokens_computed - before == new, f"turn {turn}"
                    # What a turn has left is in host memory before the next one begins, as behind a user who reads.
                    await engine.wait_settled()
                await reader.wait_settled()
                for each in (engine, reader):
                    each.check()
                    assert each.balance()["host"].owned == 0
            return chats, prefill, peer.statistics()

    async def ask(
        self, chat: Chat, turn: int, engine: DecodeEngine, prefill: str, model: PagedModel, decodes: ComputeThread
    ) -> int:
        """Answer one turn; returns how many of its tokens are new: behind the last full page that decode has."""
        # The last token of an answer was sampled, and never computed.
        had = max(len(chat.tokens) - 1, 0) // self.page_size * self.page_size
        said = drawn_prompt(USER, seed=100 * chat.number + turn)
        # No two conversations begin alike: they would share pages, and some would compute fewer tokens.
        chat.tokens += said if turn else [chat.number, *said[1:]]
        prompt = list(chat.tokens)
        ready = await engine.restore(
            DecodeRequest(request_id=f"{chat.number}-{turn}", tokens=prompt, prefill=prefill, send_prompt=True)
        )
        assert ready.sources["l1"] == had
        output = [ready.first_token]
        while len(output) < OUTPUT:
            await engine.wait_grown(ready, 1)
            position = len(prompt) + len(output) - 1
            step = partial(model.decode_step, output[-1], position, ready.pages.tolist())
            output.append(greedy(await decodes.run(step)).token)
        await engine.finish(ready, output)
        chat.tokens += output
        chat.prompts.append(prompt)
        chat.answers.append(output)
        return len(prompt) - had


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page_size", "is_nixl"), [(1, False), (4, False), pytest.param(1, True, marks=pytest.mark.nixl)]
)
async def test_prefill_computes_the_new_tokens_of_each_turn_and_reads_all_others(page_size: int, is_nixl: bool) -> None:
    llama = build_llama(SHAPE)
    chats, prefill, counts = await Pair(llama, page_size, is_nixl).converse()
    if page_size == 1:
        # What the user has said, and the last token of the answer before it, which no worker has computed.
        assert prefill.tokens_computed == CONVERSATIONS * (TURNS * USER + TURNS - 1)
        # Prefill has the prompts before, and decode the answers.
        assert counts["prefix_tokens_read"] == CONVERSATIONS * (TURNS - 1) * (OUTPUT - 1)
    assert counts["prefix_tokens_read"] == counts["prefix_tokens_wanted"] > 0
    assert counts["prefix_reads_failed"] == 0
    for chat in chats:
        for prompt, answer in zip(chat.prompts, chat.answers, strict=True):
            assert answer == generate_in_one_process(llama, prompt, OUTPUT)
