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

from tests.support.component_model import ComponentModel, Held, ModelLayouts, layouts_of
from tests.support.configs import engine_config
from tests.support.group_model import CausalModel, choices
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
    ReadyRequest,
    open_storage,
)
from tidekv.engine.config.engine_config import DeviceMode
from tidekv.engine.decode.component_pages import ReadyComponent, WindowPages
from tidekv.engine.demo.model import generate_in_one_process
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


def filled(model: CausalModel, *, embedding_std: float = 1.0) -> CausalModel:
    """Random weights, wide enough that the next token depends on all of the prompt."""
    source = torch.Generator().manual_seed(7)
    for name, weight in sorted(model.named_parameters()):
        if weight.dim() > 1:
            std = embedding_std if "embed_tokens" in name else 0.2
            weight.data.copy_(torch.randn(weight.shape, generator=source, dtype=torch.float64) * std)
    return model.double().eval().requires_grad_(False)


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


def prompt_of(length: int, seed: int) -> list[int]:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (length,), generator=source).tolist()


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


def on_pools(model: CausalModel, full: DevicePool, components: tuple[ComponentPools, ...]) -> ComponentModel:
    return ComponentModel(model, full=full, **{pools.name: pools.device for pools in components})


@dataclass
class Filled:
    """A prompt in pages of the host engine, with further pages for what it generates."""

    request_id: str
    pages: npt.NDArray[np.int32]
    component_pages: dict[str, ReadyComponent]
    first_token: int | None
    sources: Mapping[str, int]


@dataclass
class Blocks:
    """The pages of a host engine that no request uses."""

    free: dict[str, list[int]]

    def take(self, group: str, count: int) -> list[int]:
        taken, self.free[group] = self.free[group][:count], self.free[group][count:]
        return taken

    def give_back(self, filled: Filled) -> None:
        self.free["full"] += filled.pages.tolist()
        for name, held in filled.component_pages.items():
            self.free[name] += held.own.tolist()


@dataclass
class Decode:
    """A decode worker, and the model on its pools. With `blocks` the pages are the host engine's, which lends them."""

    engine: DecodeEngine
    address: str
    model: ComponentModel
    components: dict[str, ComponentPools]
    blocks: Blocks | None = None
    numbers: Iterator[int] = field(default_factory=itertools.count)

    async def ask(
        self, prompt: list[int], output: int = OUTPUT, *, zero: str = "", leaves: tuple[str, ...] = ("window", "state")
    ) -> tuple[dict[str, int], list[int]]:
        """Answer a prompt; returns the sources and the tokens. `zero`: what was restored of that component is lost
        before the model sees it. `leaves`: the components of which something is kept.
        """
        if self.blocks is not None:
            return await self.ask_in_blocks(self.blocks, prompt, output, zero=zero, leaves=leaves)
        ready = await self.restore(prompt)
        return await self.go_on(ready, prompt, output, zero=zero, leaves=leaves)

    async def ask_in_blocks(
        self, blocks: Blocks, prompt: list[int], output: int, *, zero: str, leaves: tuple[str, ...]
    ) -> tuple[dict[str, int], list[int]]:
        """The same in pages of the host engine, which offers what it keeps."""
        pages, taken = blocks.take("full", -(-(len(prompt) + output) // SIZE)), {}
        count, lent, ready_components = -(-len(prompt) // SIZE), {}, {}
        for name, pools in self.components.items():
            first = max(0, len(prompt) - (pools.window_tokens or 1)) // SIZE
            # A window has further pages to advance to.
            own = taken[name] = blocks.take(name, count - first + (2 if pools.window_tokens else 0))
            lent[name] = own[: count - first]
            ready_components[name] = ReadyComponent(first, np.array(lent[name]), np.array(own))
        restored = await self.engine.restore_into(self._request(prompt), pages[:count], component_pages=lent)
        assert restored.is_complete
        filled = Filled("", np.array(pages), ready_components, restored.first_token, restored.sources)
        for row in self.components[zero].device.rows if zero else ():
            row[lent[zero]] = 0
        answer, left = await asyncio.to_thread(self._answer, filled, len(prompt), output)
        if not zero:
            kept = [*prompt, *answer[:-1]]
            offered = await self.engine.offer(
                kept,
                pages[: -(-len(kept) // SIZE)],
                component_pages={name: ids for name, (_, ids) in left.items() if name in leaves},
            )
            assert not offered.declined and not offered.components_declined
        await self.engine.wait_settled()
        blocks.give_back(filled)
        return {tier: tokens for tier, tokens in restored.sources.items() if tokens}, answer

    async def restore(self, prompt: list[int]) -> ReadyRequest:
        return await self.engine.restore(self._request(prompt))

    def _request(self, prompt: list[int]) -> DecodeRequest:
        request_id = f"r{next(self.numbers)}"
        return DecodeRequest(request_id=request_id, tokens=prompt, prefill=self.address, send_prompt=True)

    async def go_on(
        self, ready: ReadyRequest, prompt: list[int], output: int, *, zero: str = "", leaves: tuple[str, ...] = ()
    ) -> tuple[dict[str, int], list[int]]:
        if zero:
            for row in self.components[zero].device.rows:
                row[ready.component_pages[zero].pages.tolist()] = 0
        self.engine.grow(ready, output)
        answer, left = await asyncio.to_thread(self._answer, ready, len(prompt), output)
        if zero:
            await self.engine.abort(ready.request_id)
        else:
            await self.engine.finish(
                ready, answer, component_pages={name: left[name] for name in left if name in leaves}
            )
        await self.engine.wait_settled()
        return {tier: tokens for tier, tokens in ready.sources.items() if tokens}, answer

    def _answer(
        self, ready: ReadyRequest | Filled, start: int, count: int
    ) -> tuple[list[int], dict[str, tuple[int, list[int]]]]:
        """Go on from what was restored; returns the tokens, and what can be left."""
        window = record = None
        held = Held(ready.pages.tolist())
        if "window" in ready.component_pages:
            tokens = self.components["window"].window_tokens
            window = WindowPages(ready.component_pages["window"], window_tokens=tokens, page_size=SIZE)
        if "state" in ready.component_pages:
            record = held.record = ready.component_pages["state"].record
        snapshots = {}
        answer = [ready.first_token]
        for position in range(start, start + count):
            if record is not None and position % SIZE == 0:
                snapshots = {position // SIZE - 1: self.components["state"].device.read_pages([record])}
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
            self.components["state"].device.write_pages([record], snapshot)
            left["state"] = (position, [record])
        return answer, left


@asynccontextmanager
async def worker(
    name: str, folder: Path, *, nixl: bool = False, device_mode: DeviceMode = "owned"
) -> AsyncIterator[Decode]:
    """A decode worker with storage, and its prefill, which has pools of its own and computes every prompt in full."""
    model = model_of(name)
    layouts = layouts_of(model, SIZE)
    network = LoopbackNetwork()
    ends = [
        NixlTransport(end, dials=["127.0.0.1:*"]) if nixl else LoopbackTransport(end, network)
        for end in ("prefill-0", "decode-0")
    ]
    prefill_pool, device = DevicePool.allocate(layouts.full, PAGES), DevicePool.allocate(layouts.full, PAGES)
    theirs, ours = pools_of(layouts, host=False), pools_of(layouts, host=True)
    prefill_model = on_pools(model, prefill_pool, theirs)
    # Every room uses the same pages.
    pages_of_prefill = asyncio.Lock()

    async def serve(room: Room) -> None:
        async with pages_of_prefill:
            await compute(room)

    async def compute(room: Room) -> None:
        prompt = memoryview(room.tokens).cast("I").tolist()
        pages = list(range(-(-len(prompt) // SIZE)))
        window = room.component_pages.get("window")
        held = Held(pages)
        if window is not None:
            # It computes all of the window, whatever decode asks for: the layers need it.
            first = max(0, len(prompt) - layouts.window_tokens) // SIZE
            held.window_first, held.window = first, range(len(pages) - first)
        logits = await asyncio.to_thread(prefill_model.forward, prompt, 0, held)
        await room.send(pages, start_token=0)
        for name, asked in room.component_pages.items():
            tail = held.window[asked.first - held.window_first :] if name == "window" else [held.record]
            await room.send_component_pages(name, list(tail)[: asked.page_count])
        await room.finish(first_token=choices(logits[-1:])[0])
        await room.received()

    async with (
        PrefillPeer(
            PrefillConfig(listen="127.0.0.1:0" if nixl else "prefill"),
            device=prefill_pool,
            transport=ends[0],
            components=theirs,
            on_room=serve,
        ) as peer,
        DecodeEngine(
            # The first answer of storage on a busy machine may take longer than other policies wait for it.
            engine_config(prefetch_threshold_tokens=0, prefetch="wait_complete", device=device_mode),
            device=device,
            host=HostPool.allocate(layouts.full, PAGES),
            components=ours,
            storage=open_storage(f"file:{folder}?capacity=64MB"),
            transport=ends[1],
        ) as engine,
    ):
        components = {pools.name: pools for pools in ours}
        blocks = Blocks({name: list(range(PAGES)) for name in ("full", *components)})
        yield Decode(
            engine,
            peer.address,
            on_pools(model, device, ours),
            components,
            blocks if device_mode == "lent" else None,
        )


def in_one_process(name: str, prompt: list[int], output: int = OUTPUT) -> list[int]:
    return generate_in_one_process(model_of(name), prompt, output)


async def check_every_tier(name: str, folder: Path, *, nixl: bool = False, device_mode: DeviceMode = "owned") -> None:
    flushes = FLUSHES if device_mode == "owned" else {"l2": (), "l3": ("l2",)}
    prompt = prompt_of(PROMPT_TOKENS, seed=1)
    wanted = in_one_process(name, prompt)
    # The output is not one token repeated, which any prompt would match.
    assert len(set(wanted)) > 3
    whole = [*prompt, *wanted[:-1]]
    longer = [*whole, *prompt_of(3, seed=2)]
    second, third = in_one_process(name, whole), in_one_process(name, longer)
    async with worker(name, folder, nixl=nixl, device_mode=device_mode) as decode:
        assert await decode.ask(prompt) == ({"transfer": len(prompt)}, wanted)
        for tier, flushed in flushes.items():
            await decode.engine.flush(flushed)
            assert await decode.ask(whole) == ({tier: len(whole)}, second)
            await decode.engine.flush(flushed)
            assert await decode.ask(longer) == ({tier: len(whole), "transfer": 3}, third)
            # The check can fail: without what was restored the output differs.
            for component in decode.components:
                await decode.engine.flush(flushed)
                sources, answer = await decode.ask(whole, zero=component)
                assert sources == {tier: len(whole)}
                assert answer != second, component
    # Both modes read what either has stored.
    for mode in ("owned", "lent") if device_mode == "lent" else ("owned",):
        async with worker(name, folder, nixl=nixl, device_mode=mode) as restarted:
            assert await restarted.ask(whole) == ({"l3": len(whole)}, second)


MODELS = ["gemma3", "bamba", "falcon_h1", "qwen3_next", "gemma3_windows", "mamba2"]


@pytest.mark.parametrize("name", MODELS)
async def test_windows_and_states_from_every_tier_lead_to_the_tokens_of_one_process(name: str, tmp_path: Path) -> None:
    await check_every_tier(name, tmp_path)


@pytest.mark.parametrize("name", MODELS)
async def test_windows_and_states_in_lent_pages_lead_to_the_tokens_of_one_process(name: str, tmp_path: Path) -> None:
    await check_every_tier(name, tmp_path, device_mode="lent")


@pytest.mark.nixl
@pytest.mark.parametrize("name", MODELS)
async def test_windows_and_states_over_nixl_lead_to_the_tokens_of_one_process(name: str, tmp_path: Path) -> None:
    await check_every_tier(name, tmp_path, nixl=True)


@pytest.mark.parametrize("name", MODELS)
async def test_users_of_one_system_prompt_share_its_transfer_and_get_the_tokens_of_one_process(
    name: str, tmp_path: Path
) -> None:
    system = prompt_of(6 * SIZE, seed=5)
    prompts = [[*system, *prompt_of(3, seed=10 + user)] for user in range(4)]
    wanted = [in_one_process(name, prompt) for prompt in prompts]
    async with worker(name, tmp_path) as decode:
        # Three at once, the fourth one afterwards: the system prompt is transferred once.
        readies = await asyncio.gather(*(decode.restore(prompt) for prompt in prompts[:3]))
        for ready, prompt, answer in zip(readies, prompts, wanted, strict=False):
            assert (await decode.go_on(ready, prompt, OUTPUT))[1] == answer
        assert sum(ready.sources["transfer"] for ready in readies) == len(system) + 3 * 3
        assert await decode.ask(prompts[3]) == ({"l1": len(system), "transfer": 3}, wanted[3])


async def test_forty_pages_whose_last_snapshot_is_behind_the_thirty_second_are_restored(tmp_path: Path) -> None:
    prompt = prompt_of(20 * SIZE, seed=4)
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
            await decode.engine.flush(flushed)
            assert await decode.ask(forty, leaves=()) == ({tier: 40 * SIZE}, wanted)
