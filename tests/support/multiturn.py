"""Conversations with hit rates that are known exactly in advance.

The page size is 64, and the first prompt has 64 tokens. Each later round appends the 129 tokens generated in the
previous round, the last of which has no KV yet, and 63 user tokens: prompts of 64, 256, 448, … tokens. If decode keeps
its output, a round finds everything but the last page: 192/256, 384/448, …; if only prompts are kept, it finds the
prompt of the previous round: 64/256, 256/448, …
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from tidekv.backends.device.pool import DevicePool
from tidekv.backends.host.pool import HostPool
from tidekv.backends.keys.chain import pack_tokens
from tidekv.backends.layout import KVLayout
from tidekv.backends.storage.uri import open_storage
from tidekv.engine.config.engine_config import EngineConfig, StorageOptions
from tidekv.engine.decode.decode_engine import DecodeEngine
from tidekv.engine.decode.values import DecodeRequest, ReadyRequest
from tidekv.engine.prefill.prefill_config import PrefillConfig
from tidekv.engine.prefill.prefill_peer import PrefillPeer
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.engine.synthetic.prefill import SyntheticPrefill
from tidekv.states.errors import TransferFailed
from tidekv.transports.loopback import LoopbackNetwork, LoopbackTransport

PAGE_SIZE = 64
OUTPUT_TOKENS = 129
USER_TOKENS = 63
ROUNDS = 6
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=PAGE_SIZE)


@dataclass(slots=True)
class RoundHits:
    """One round over all clients: prompt tokens in total and by source."""

    prompt_tokens: int
    sources: dict[str, int]

    @property
    def hit_rate(self) -> float:
        """The share of the prompt tokens that prefill did not send."""
        return 1 - self.sources["transfer"] / self.prompt_tokens


def made_up_tokens(label: str, count: int) -> list[int]:
    """Return tokens that depend on the label only."""
    return [zlib.crc32(f"{label} {position}".encode()) % 50_000 for position in range(count)]


async def run_multiturn(
    *, keep_output: bool, clients: int = 4, device_pages: int = 40, host_pages: int = 40
) -> list[RoundHits]:
    """Serve the conversations over loopback, verify every restored byte, and return the hits by round.

    The pools are smaller than the KV of all conversations at the end, so that all tiers are used. Raises TransferFailed
    if a restored page has a wrong byte.
    """
    network = LoopbackNetwork()
    device = DevicePool.allocate(LAYOUT, device_pages)
    prefill_pool = DevicePool.allocate(LAYOUT, 64)
    prefill = SyntheticPrefill(prefill_pool)
    kv = SyntheticKV(device)
    rounds = [RoundHits(0, {"l1": 0, "l2": 0, "l3": 0, "transfer": 0}) for _ in range(ROUNDS)]
    async with (
        PrefillPeer(
            PrefillConfig(listen="prefill"),
            device=prefill_pool,
            transport=LoopbackTransport("prefill", network),
            on_room=prefill.serve,
        ),
        DecodeEngine(
            EngineConfig(
                # Every hit is used: with the default policy, rates would depend on the speed of this machine.
                storage=StorageOptions(prefetch="wait_complete", prefetch_threshold_tokens=0),
                keep_output=keep_output,
            ),
            device=device,
            host=HostPool.allocate(LAYOUT, host_pages),
            storage=open_storage("memory:?capacity=256MiB"),
            transport=LoopbackTransport("decode", network),
        ) as engine,
    ):
        prompts = [made_up_tokens(f"client {client}", PAGE_SIZE) for client in range(clients)]
        for number, hits in enumerate(rounds):
            for client, prompt in enumerate(prompts):
                ready = await engine.restore(
                    DecodeRequest(
                        request_id=f"client {client} round {number}", tokens=prompt, prefill="prefill", send_prompt=True
                    )
                )
                _verify(kv, ready, prompt)
                hits.prompt_tokens += len(prompt)
                for source, tokens in ready.sources.items():
                    hits.sources[source] += tokens
                output = [ready.first_token, *made_up_tokens(f"output {client} {number}", OUTPUT_TOKENS - 1)]
                _generate(engine, kv, ready, prompt, output)
                await engine.finish(ready, output)
                # Wait until every write has reached its tier, because the rates must be exact.
                await engine.wait_settled()
                prompts[client] = [*prompt, *output, *made_up_tokens(f"user {client} {number}", USER_TOKENS)]
    return rounds


def _verify(kv: SyntheticKV, ready: ReadyRequest, prompt: list[int]) -> None:
    wrong = kv.verify(ready.pages.tolist(), prompt_digests(pack_tokens(prompt), PAGE_SIZE))
    if wrong:
        raise TransferFailed(f"request {ready.request_id!r}: pages {wrong} of its prompt hold wrong bytes")


def _generate(engine: DecodeEngine, kv: SyntheticKV, ready: ReadyRequest, prompt: list[int], output: list[int]) -> None:
    """Write the KV of every output token but the last."""
    engine.grow(ready, len(output) - 1)
    first = len(prompt) // PAGE_SIZE
    digests = prompt_digests(pack_tokens([*prompt, *output[:-1]]), PAGE_SIZE)
    kv.fill(ready.pages[first : len(digests)].tolist(), digests[first:])


def total_hit_rate(rounds: list[RoundHits]) -> float:
    """Return the hit rate over all rounds."""
    return 1 - sum(hits.sources["transfer"] for hits in rounds) / sum(hits.prompt_tokens for hits in rounds)
