"""A decode engine on a storage of a tenth of its working set: what everyone uses stays, as in an ideal store."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

from tests.support.configs import engine_config
from tests.support.waits import LIMIT_S
from tidekv import (
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    HostPool,
    KVLayout,
    LoopbackNetwork,
    LoopbackTransport,
    PrefillConfig,
    PrefillPeer,
)
from tidekv.backends.keys.chain import pack_tokens, page_digests
from tidekv.engine.synthetic.prefill import SyntheticPrefill

# The rig of conftest.py, which test modules cannot import.
Rig = Any

LAYOUT = KVLayout(num_layers=1, num_kv_heads=4, head_dim=32, dtype="float32", page_size=4)
HELD, HEAD, OWN = 40, 8, 6
CONVERSATIONS = 10 * HELD // OWN
SYSTEM = list(range(HEAD * 4))


class IdealStore:
    """Pages by the time of their last use, whichever tier served it; of one prompt the last page goes first."""

    def __init__(self, held: int) -> None:
        self.held = held
        self.keys: OrderedDict[bytes, None] = OrderedDict()

    def use(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self.keys[key] = None
            self.keys.move_to_end(key)
        while len(self.keys) > self.held:
            self.keys.popitem(last=False)


def prompt_of(number: int) -> list[int]:
    return [*SYSTEM, *(1000 + number * 100 + at for at in range(OWN * 4)), 1]


def keys_of(number: int) -> list[bytes]:
    return page_digests(pack_tokens(prompt_of(number)[:-1]), 4)


@asynccontextmanager
async def decode_on(storage: Any) -> AsyncIterator[DecodeEngine]:
    network = LoopbackNetwork()
    pool = DevicePool.allocate(LAYOUT, 128)
    async with (
        PrefillPeer(
            PrefillConfig(listen="prefill"),
            device=pool,
            transport=LoopbackTransport("prefill", network),
            on_room=SyntheticPrefill(pool, chunk_pages=8).serve,
        ),
        DecodeEngine(
            # On a busy machine the files may take longer to close than the engine would wait.
            engine_config(prefetch="wait_complete", prefetch_threshold_tokens=0, close_deadline_s=LIMIT_S),
            device=DevicePool.allocate(LAYOUT, 64),
            host=HostPool.allocate(LAYOUT, 64),
            storage=storage,
            transport=LoopbackTransport("decode", network),
        ) as engine,
    ):
        yield engine


async def serve(engine: DecodeEngine, name: str, tokens: list[int]) -> None:
    await engine.finish(
        await engine.restore(DecodeRequest(request_id=name, tokens=tokens, prefill="prefill", send_prompt=True))
    )
    await engine.wait_settled()


async def test_a_small_storage_keeps_what_an_ideal_one_of_its_size_would_keep(rig: Rig) -> None:
    page_room = LAYOUT.page_bytes + (0 if rig.kind == "memory" else 128)

    def make() -> Any:
        return rig.make(capacity=HELD * page_room, **rig.evicts_one_by_one)

    async with decode_on(make()) as engine:
        # A prompt that is larger than the storage shows how many pages it holds.
        await serve(engine, "large", list(range(5000, 5000 + 60 * 4)))
        held = engine.statistics()["storage"]["pages"]
        await engine.flush(("l3",))
    random, ideal = Random(7), IdealStore(held)
    recent = list(range(3))
    for life in range(2):
        storage = make()
        async with decode_on(storage) as engine:
            if rig.kind == "memory":
                # Its pages end with its last engine: each life begins with nothing.
                ideal = IdealStore(held)
            for number in range(40):
                is_new = random.random() < 0.5
                chosen = random.randrange(CONVERSATIONS) if is_new else random.choice(recent)
                recent = [chosen, *recent[:2]]
                await serve(engine, f"{life}-{number}", prompt_of(chosen))
                ideal.use(keys_of(chosen))
            hits = ideal_hits = 0
            for number in range(CONVERSATIONS):
                keys = keys_of(number)
                found = await storage.exists(keys, timeout_s=5)
                assert all(found[:HEAD]), "what every prompt begins with is there"
                hits += [*found, False].index(False)
                ideal_hits += [*(key in ideal.keys for key in keys), False].index(False)
            assert hits >= 0.95 * ideal_hits, (life, hits, ideal_hits)
