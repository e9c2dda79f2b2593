"""Models with sliding windows and recurrent state: from every tier the tokens are those of `generate()` in one process.

The prompts that count end with a page: then all of a window and the whole record come from the tier, none from prefill.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from benchmarks.ports import free_address
from demo.model import generate_in_one_process
from tests.support.component_model import ComponentModel, Held, ModelLayouts, layouts_of
from tests.support.configs import engine_config
from tests.support.group_model import CausalModel, choices, filled
from tests.support.model_pools import ModelPools, Places
from tests.support.prompts import drawn_prompt
from tests.support.thorough import mark_rest, pairs
from tests.support.waits import LEASE_S, PATIENT, PATIENT_GROUP, together
from tidekv import (
    ComponentPools,
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    HostPool,
    LoopbackTransport,
    NixlTransport,
    PrefillConfig,
    PrefillPeer,
    RankGroup,
    ReadyRequest,
    open_storage,
)
from tidekv.engine.config.engine_config import DeviceMode
from tidekv.engine.decode.component_pages import ReadyComponent, WindowPages
from tidekv.states.handover.rank_place import RankPlace
from tidekv.transports.loopback import LoopbackNetwork
from tidekv.transports.prefill.prefill_room import Room

SIZE = 4
PAGES = 96
VOCABULARY = 64
# With what is generated, ten pages of tokens that have KV.
PROMPT_TOKENS = 28
OUTPUT = 13
SLIDING_WINDOW = 10
# What is to be forgotten so that a prompt that was asked before comes from this tier.
FLUSHES: dict[str, tuple[str, ...]] = {"l1": (), "l2": ("l1",), "l3": ("l1", "l2")}
NO_SPECIALS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    **NO_SPECIALS,
}


@cache
def model_of(name: str) -> CausalModel:
    """A tiny model; equal names give the same one."""
    from transformers import (
        BambaConfig,
        BambaForCausalLM,
        FalconH1Config,
        FalconH1ForCausalLM,
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        Mamba2Config,
        Mamba2ForCausalLM,
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
    )

    torch.manual_seed(0)
    match name:
        case "gemma3" | "gemma3_windows":
            layers = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
            if name == "gemma3_windows":
                layers[2] = "sliding_attention"
            config = Gemma3TextConfig(
                **SIZES, head_dim=16, num_hidden_layers=4, sliding_window=SLIDING_WINDOW, layer_types=layers
            )
            return filled(Gemma3ForCausalLM(config), embedding_std=0.05)
        case "bamba":
            return filled(
                BambaForCausalLM(
                    BambaConfig(
                        **SIZES,
                        num_hidden_layers=4,
                        attn_layer_indices=[1],
                        mamba_n_heads=8,
                        mamba_d_head=16,
                        mamba_d_state=8,
                        mamba_chunk_size=16,
                    )
                )
            )
        case "mamba2":
            of_attention = (
                "intermediate_size",
                "num_attention_heads",
                "num_key_value_heads",
                "max_position_embeddings",
            )
            sizes = {size: value for size, value in SIZES.items() if size not in of_attention}
            config = Mamba2Config(
                **sizes, num_hidden_layers=3, num_heads=8, head_dim=16, state_size=8, n_groups=1, chunk_size=16
            )
            return filled(Mamba2ForCausalLM(config))
        case "falcon_h1":
            return filled(
                FalconH1ForCausalLM(
                    FalconH1Config(
                        **SIZES,
                        head_dim=16,
                        num_hidden_layers=2,
                        mamba_d_ssm=64,
                        mamba_n_heads=4,
                        mamba_d_head=16,
                        mamba_d_state=8,
                        mamba_chunk_size=16,
                    )
                )
            )
        case _:
            return filled(
                Qwen3NextForCausalLM(
                    Qwen3NextConfig(
                        **SIZES,
                        head_dim=16,
                        num_hidden_layers=4,
                        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
                        linear_key_head_dim=8,
                        linear_value_head_dim=8,
                        linear_num_key_heads=2,
                        linear_num_value_heads=4,
                        num_experts=0,
                    )
                ),
                embedding_std=0.2,
            )


def pools_of(layouts: ModelLayouts, *, host: bool) -> tuple[ComponentPools, ...]:
    """Pools for what the model has beside its full KV."""
    made = []
    if layouts.window is not None:
        made.append(("window", layouts.window, layouts.window_tokens))
    if layouts.state is not None:
        made.append(("state", layouts.state, 0))
    return tuple(
        ComponentPools(
            name=kind,
            kind=kind,
            window_tokens=tokens,
            device=DevicePool.allocate(layout, PAGES),
            host=HostPool.allocate(layout, PAGES) if host else None,
        )
        for kind, layout, tokens in made
    )


def on_pools(model: CausalModel, ends: Mapping[int, RankEnd], places: Places) -> ComponentModel:
    """The model on the pools of one rank, or of all."""
    names = next(iter(ends.values())).components
    pools = {name: ModelPools({rank: end.device_of(name) for rank, end in ends.items()}, places) for name in names}
    return ComponentModel(model, full=ModelPools({r: end.device for r, end in ends.items()}, places), **pools)


@dataclass
class RankEnd:
    """The pools of one rank of an instance."""

    device: DevicePool
    components: dict[str, ComponentPools]

    def device_of(self, name: str) -> DevicePool:
        return self.components[name].device


@dataclass
class Filled:
    """A prompt in pages of the host engines, with further pages for what it generates."""

    request_id: str
    pages: npt.NDArray[np.int32]
    component_pages: dict[str, ReadyComponent]
    first_token: int | None
    sources: Mapping[str, int]


@dataclass
class Blocks:
    """The pages of a host engine: those that no request uses, and the tokens and pages of its prefix cache, which
    keeps the last answer only.
    """

    free: dict[str, list[int]]
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    left: dict[str, tuple[int, list[int]]] = field(default_factory=dict)

    def take(self, group: str, count: int) -> list[int]:
        taken, self.free[group] = self.free[group][:count], self.free[group][count:]
        return taken

    def give_back(self, filled: Filled) -> None:
        self.free["full"] += filled.pages.tolist()
        for name, held in filled.component_pages.items():
            self.free[name] += held.own.tolist()

    def keep(self, filled: Filled, tokens: list[int], left: dict[str, tuple[int, list[int]]]) -> None:
        """Keep the full pages of an answer, and what it has left at their end."""
        full = len(tokens) // SIZE
        self.forget()
        self.tokens, self.pages, self.left = tokens[: full * SIZE], filled.pages[:full].tolist(), left
        self.free["full"] += filled.pages[full:].tolist()
        for name, held in filled.component_pages.items():
            kept = left[name][1] if name in left else []
            self.free[name] += [page for page in held.own.tolist() if page not in kept]

    def forget(self) -> None:
        """Drop the prefix cache."""
        self.free["full"] += self.pages
        for name, (_, pages) in self.left.items():
            self.free[name] += pages
        self.tokens, self.pages, self.left = [], [], {}

    def hit(self, prompt: list[int]) -> dict[str, dict[int, int]] | None:
        """By group, the pages by position of a prompt's cached prefix, which are used up; None without one."""
        if not self.tokens or prompt[: len(self.tokens)] != self.tokens:
            return None
        found = {"full": dict(enumerate(self.pages))}
        found |= {name: dict(enumerate(pages, first)) for name, (first, pages) in self.left.items()}
        self.tokens, self.pages, self.left = [], [], {}
        return found


@dataclass
class Decode:
    """A decode worker of one rank or several, and the model on their pools. With `blocks` the pages are those of host
    engines, which lend them.
    """

    engines: list[DecodeEngine]
    address: str
    model: ComponentModel
    components: dict[str, ModelPools]
    window_tokens: int
    places: Places
    blocks: Blocks | None = None
    numbers: Iterator[int] = field(default_factory=itertools.count)

    async def forget(self, tiers: tuple[str, ...]) -> None:
        """Drop what these tiers hold; the host engine's prefix cache is the first one of lent pages."""
        if self.blocks is not None and "l1" in tiers:
            self.blocks.forget()
            tiers = tuple(tier for tier in tiers if tier != "l1")
        await self.engines[0].flush(tiers)

    async def settle(self) -> None:
        await asyncio.gather(*(engine.wait_settled() for engine in self.engines))

    async def ask(
        self, prompt: list[int], output: int = OUTPUT, *, zero: str = "", leaves: tuple[str, ...] = ("window", "state")
    ) -> tuple[dict[str, int], list[int]]:
        """Answer a prompt; returns the sources and the tokens. `zero`: what was restored of that component is lost
        before the model sees it. `leaves`: the components of which something is kept.
        """
        if self.blocks is not None:
            return await self.ask_in_blocks(self.blocks, prompt, output, zero=zero, leaves=leaves)
        readies = await self.restore(prompt)
        return await self.go_on(readies, prompt, output, zero=zero, leaves=leaves)

    async def ask_in_blocks(
        self, blocks: Blocks, prompt: list[int], output: int, *, zero: str, leaves: tuple[str, ...]
    ) -> tuple[dict[str, int], list[int]]:
        """The same in pages of the host engines, which offer what they keep."""
        hit = blocks.hit(prompt) or {}
        have, count = len(hit.get("full", ())) * SIZE, -(-len(prompt) // SIZE)
        held = list(hit.get("full", {}).values())
        pages = held + blocks.take("full", -(-(len(prompt) + output) // SIZE) - len(held))
        lent, ready_components = {}, {}
        for name in self.components:
            tokens = self.window_tokens if name == "window" else 1
            first, cached = max(0, len(prompt) - tokens) // SIZE, hit.get(name, {})
            lent[name] = [cached.pop(at, -1) for at in range(first, count)]
            fresh = iter(blocks.take(name, lent[name].count(-1)))
            lent[name] = [next(fresh) if page == -1 else page for page in lent[name]]
            # A window has further pages to advance to.
            spare = [*cached.values(), *blocks.take(name, 2 if name == "window" else 0)]
            ready_components[name] = ReadyComponent(first, np.array(lent[name]), np.array([*lent[name], *spare]))
        request = self._request(prompt)
        every = await asyncio.gather(
            *(
                engine.restore_into(
                    request,
                    self.model.full_pools.pages_of(rank, pages[:count]),
                    have,
                    component_pages={name: self.components[name].pages_of(rank, lent[name]) for name in lent},
                )
                for rank, engine in enumerate(self.engines)
            )
        )
        restored = every[0]
        assert all(one.is_complete and one.sources == restored.sources for one in every)
        filled = Filled("", np.array(pages), ready_components, restored.first_token, restored.sources)
        if zero:
            self.components[zero].zero(lent[zero])
        answer, left = await asyncio.to_thread(self._answer, filled, len(prompt), output)
        if zero:
            await self.settle()
            blocks.give_back(filled)
        else:
            await self._offer(
                blocks, filled, [*prompt, *answer[:-1]], {name: left[name] for name in leaves if name in left}
            )
        return {tier: tokens for tier, tokens in restored.sources.items() if tokens}, answer

    async def _offer(
        self, blocks: Blocks, filled: Filled, kept: list[int], left: dict[str, tuple[int, list[int]]]
    ) -> None:
        pages = filled.pages[: -(-len(kept) // SIZE)].tolist()
        every = await asyncio.gather(
            *(
                engine.offer(
                    kept,
                    self.model.full_pools.pages_of(rank, pages),
                    component_pages={
                        name: self.components[name].pages_of(rank, ids) for name, (_, ids) in left.items()
                    },
                )
                for rank, engine in enumerate(self.engines)
            )
        )
        assert not any(offered.declined or offered.components_declined for offered in every)
        await self.settle()
        blocks.keep(filled, kept, left)

    async def restore(self, prompt: list[int]) -> list[ReadyRequest]:
        """Restore on every rank; all have the same page tables."""
        request = self._request(prompt)
        readies = await asyncio.gather(*(engine.restore(request) for engine in self.engines))
        for ready in readies[1:]:
            assert ready.pages.tolist() == readies[0].pages.tolist() and ready.sources == readies[0].sources
        return list(readies)

    def _request(self, prompt: list[int]) -> DecodeRequest:
        request_id = f"r{next(self.numbers)}"
        return DecodeRequest(request_id=request_id, tokens=prompt, prefill=self.address, send_prompt=True)

    async def go_on(
        self,
        readies: list[ReadyRequest],
        prompt: list[int],
        output: int,
        *,
        zero: str = "",
        leaves: tuple[str, ...] = (),
    ) -> tuple[dict[str, int], list[int]]:
        ready, pairs = readies[0], list(zip(self.engines, readies, strict=True))
        if zero:
            self.components[zero].zero(ready.component_pages[zero].pages.tolist())
        await asyncio.gather(*(engine.wait_grown(each, output) for engine, each in pairs))
        answer, left = await asyncio.to_thread(self._answer, ready, len(prompt), output)
        if zero:
            await asyncio.gather(*(engine.abort(ready.request_id) for engine in self.engines))
        else:
            kept = {name: left[name] for name in left if name in leaves}
            await asyncio.gather(*(engine.finish(each, answer, component_pages=kept) for engine, each in pairs))
        await self.settle()
        return {tier: tokens for tier, tokens in ready.sources.items() if tokens}, answer

    def _answer(
        self, ready: ReadyRequest | Filled, start: int, count: int
    ) -> tuple[list[int], dict[str, tuple[int, list[int]]]]:
        """Go on from what was restored; returns the tokens, and what can be left."""
        window = record = None
        held = Held(ready.pages.tolist())
        if "window" in ready.component_pages:
            window = WindowPages(ready.component_pages["window"], window_tokens=self.window_tokens, page_size=SIZE)
        if "state" in ready.component_pages:
            record = held.record = ready.component_pages["state"].record
        snapshots = {}
        answer = [ready.first_token]
        for position in range(start, start + count):
            if record is not None and position % SIZE == 0:
                snapshots = {position // SIZE - 1: self.components["state"].read_pages([record])}
            if len(answer) == count:
                break
            if window is not None:
                window.grow(position + 1)
                held.window_first, held.window = window.first, window.pages
            answer += choices(self.model.forward(answer[-1:], position, held))
        left: dict[str, tuple[int, list[int]]] = {}
        if window is not None:
            left["window"] = window.left(start + count - 1)
        for position, snapshot in snapshots.items():
            # The model went on in place: what is left is the record as it was at the end of the last full page.
            self.components["state"].write_pages([record], snapshot)
            left["state"] = (position, [record])
        return answer, left


@asynccontextmanager
async def worker(
    name: str, folder: Path, *, nixl: bool = False, device_mode: DeviceMode = "owned", ranks: int = 1
) -> AsyncIterator[Decode]:
    """A decode worker with storage, and its prefill, which has pools of its own and computes every prompt in full.

    With several ranks each has its heads of the KV and its share of each record, and a prefill rank of its own.
    """
    model = model_of(name)
    layouts = layouts_of(model, SIZE, ranks)
    network = LoopbackNetwork()

    def transport(end: str) -> NixlTransport | LoopbackTransport:
        return NixlTransport(end, dials=["127.0.0.1:*"]) if nixl else LoopbackTransport(end, network)

    places = Places(ranks, differ=device_mode == "lent")
    group = free_address() if ranks > 1 else ""
    peers, engines, ends = [], [], {}
    for rank in range(ranks):
        theirs, ours = pools_of(layouts, host=False), pools_of(layouts, host=True)
        prefill_pool, device = DevicePool.allocate(layouts.full, PAGES), DevicePool.allocate(layouts.full, PAGES)
        end = RankEnd(prefill_pool, {pools.name: pools for pools in theirs})
        peers.append(
            PrefillPeer(
                PrefillConfig(
                    listen="127.0.0.1:0" if nixl else f"prefill-{rank}",
                    lease_s=LEASE_S,
                    place=RankPlace(rank=rank, ranks=ranks),
                ),
                device=prefill_pool,
                transport=transport(f"prefill-{rank}"),
                components=theirs,
                on_room=Serving(on_pools(model, {rank: end}, Places(ranks)), layouts.window_tokens).serve,
            )
        )
        engines.append(
            DecodeEngine(
                # The first answer of storage on a busy machine may take longer than other policies wait for it.
                engine_config(**PATIENT, prefetch_threshold_tokens=0, device=device_mode),
                device=device,
                host=HostPool.allocate(layouts.full, PAGES),
                components=ours,
                storage=open_storage(f"file:{folder}?capacity=64MB"),
                transport=transport(f"decode-{rank}"),
                ranks=RankGroup(rank=rank, ranks=ranks, address=group, **PATIENT_GROUP) if ranks > 1 else None,
            )
        )
        ends[rank] = RankEnd(device, {pools.name: pools for pools in ours})
    names = ends[0].components
    async with together(*peers), together(*engines):
        blocks = Blocks({each: list(range(PAGES)) for each in ("full", *names)})
        yield Decode(
            engines,
            ",".join(peer.address for peer in peers),
            on_pools(model, ends, places),
            {each: ModelPools({rank: end.device_of(each) for rank, end in ends.items()}, places) for each in names},
            layouts.window_tokens,
            places,
            blocks if device_mode == "lent" else None,
        )


class Serving:
    """A prefill rank, which computes all of the model and has its part of the cache."""

    def __init__(self, model: ComponentModel, window_tokens: int) -> None:
        self._model = model
        self._window_tokens = window_tokens
        # Every room uses the same pages.
        self._turn = asyncio.Lock()

    async def serve(self, room: Room) -> None:
        async with self._turn:
            await self._serve(room)

    async def _serve(self, room: Room) -> None:
        prompt = memoryview(room.tokens).cast("I").tolist()
        pages = list(range(-(-len(prompt) // SIZE)))
        window = room.component_pages.get("window")
        held = Held(pages)
        if window is not None:
            # It computes all of the window, whatever decode asks for: the layers need it.
            first = max(0, len(prompt) - self._window_tokens) // SIZE
            held.window_first, held.window = first, range(len(pages) - first)
        logits = await asyncio.to_thread(self._model.forward, prompt, 0, held)
        await room.send(pages, start_token=0)
        for name, asked in room.component_pages.items():
            tail = held.window[asked.first - held.window_first :] if name == "window" else [held.record]
            await room.send_component_pages(name, list(tail)[: asked.page_count])
        await room.finish(first_token=choices(logits[-1:])[0])
        await room.received()


def in_one_process(name: str, prompt: list[int], output: int = OUTPUT) -> list[int]:
    return [*generated(name, tuple(prompt), output)]


@cache
def generated(name: str, prompt: tuple[int, ...], output: int) -> tuple[int, ...]:
    """What tests of all ranks, modes and transports compare with."""
    return tuple(generate_in_one_process(model_of(name), [*prompt], output))


async def check_every_tier(
    name: str, folder: Path, *, nixl: bool = False, device_mode: DeviceMode = "owned", ranks: int = 1
) -> None:
    prompt = drawn_prompt(PROMPT_TOKENS, seed=1)
    wanted = in_one_process(name, prompt)
    # The output is not one token repeated, which any prompt would match.
    assert len(set(wanted)) > 3
    whole = [*prompt, *wanted[:-1]]
    longer = [*whole, *drawn_prompt(3, seed=2)]
    second, third = in_one_process(name, whole), in_one_process(name, longer)
    async with worker(name, folder, nixl=nixl, device_mode=device_mode, ranks=ranks) as decode:
        assert await decode.ask(prompt) == ({"transfer": len(prompt)}, wanted)

        async def forget_above(tier: str) -> None:
            if decode.blocks is not None and tier == "l1":
                # The host engine keeps the last answer only.
                await decode.forget(("l1",))
                await decode.ask(prompt)
            await decode.forget(FLUSHES[tier])

        for tier in FLUSHES:
            await forget_above(tier)
            assert await decode.ask(whole) == ({tier: len(whole)}, second)
            await forget_above(tier)
            assert await decode.ask(longer) == ({tier: len(whole), "transfer": 3}, third)
            # The check can fail: without what was restored the output differs.
            for component in decode.components:
                await forget_above(tier)
                sources, answer = await decode.ask(whole, zero=component)
                assert sources == {tier: len(whole)}
                assert answer != second, component
    # Both modes read what either has stored.
    for mode in ("owned", "lent") if device_mode == "lent" else ("owned",):
        async with worker(name, folder, nixl=nixl, device_mode=mode, ranks=ranks) as restarted:
            assert await restarted.ask(whole) == ({"l3": len(whole)}, second)


KINDS = {
    "gemma3": "window",
    "bamba": "state",
    "falcon_h1": "state",
    "qwen3_next": "state",
    "gemma3_windows": "window",
    "mamba2": "state",
}
"""What models have; "gemma3_windows" and "mamba2" without full KV."""
MODELS = [*KINDS]
MODES: list[DeviceMode] = ["owned", "lent"]


@pytest.mark.parametrize(
    ("name", "device_mode", "ranks"),
    mark_rest(
        itertools.product(MODELS, MODES, [1, 2]),
        lambda name, *engine: {name, *pairs(*engine), *pairs(KINDS[name], *engine)},
    ),
)
async def test_windows_and_states_from_every_tier_lead_to_the_tokens_of_one_process(
    name: str, device_mode: DeviceMode, ranks: int, tmp_path: Path
) -> None:
    await check_every_tier(name, tmp_path, device_mode=device_mode, ranks=ranks)


@pytest.mark.nixl
@pytest.mark.parametrize("name", mark_rest(MODELS, lambda name: {KINDS[name]}))
async def test_windows_and_states_over_nixl_lead_to_the_tokens_of_one_process(name: str, tmp_path: Path) -> None:
    await check_every_tier(name, tmp_path, nixl=True)


@pytest.mark.parametrize("name", mark_rest(MODELS, lambda name: {KINDS[name]}))
async def test_users_of_one_system_prompt_share_its_transfer_and_get_the_tokens_of_one_process(
    name: str, tmp_path: Path
) -> None:
    system = drawn_prompt(6 * SIZE, seed=5)
    prompts = [[*system, *drawn_prompt(3, seed=10 + user)] for user in range(4)]
    wanted = [in_one_process(name, prompt) for prompt in prompts]
    async with worker(name, tmp_path) as decode:
        # Three at once, the fourth one afterwards: the system prompt is transferred once.
        readies = await asyncio.gather(*(decode.restore(prompt) for prompt in prompts[:3]))
        for ready, prompt, answer in zip(readies, prompts, wanted, strict=False):
            assert (await decode.go_on(ready, prompt, OUTPUT))[1] == answer
        assert sum(ready.sources["transfer"] for (ready,) in readies) == len(system) + 3 * 3
        assert await decode.ask(prompts[3]) == ({"l1": len(system), "transfer": 3}, wanted[3])


async def test_forty_pages_whose_last_snapshot_is_behind_the_thirty_second_are_restored(tmp_path: Path) -> None:
    prompt = drawn_prompt(20 * SIZE, seed=4)
    wanted = in_one_process("bamba", prompt, 12 * SIZE + 1)
    to_32 = [*prompt, *wanted[:-1]]
    to_40 = [*to_32, *in_one_process("bamba", to_32, 8 * SIZE + 1)]
    async with worker("bamba", tmp_path) as decode:
        await decode.ask(prompt, 12 * SIZE + 1)
        sources, answer = await decode.ask(to_32, 8 * SIZE + 1, leaves=())
        assert sources == {"l1": 32 * SIZE} and [*to_32, *answer] == to_40
        forty = to_40[:-1]
        assert len(forty) == 40 * SIZE
        wanted = in_one_process("bamba", forty)
        for tier, flushed in FLUSHES.items():
            await decode.forget(flushed)
            assert await decode.ask(forty, leaves=()) == ({tier: 40 * SIZE}, wanted)
