"""Hand-overs between all layouts of both ends: every byte is right, or the pair is refused by name.

docs/ranks.md says what is tested here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from tests.support.parallel_instances import Group, Model, Place, RankPools, State
from tests.support.prompts import DIGEST, PROMPT
from tests.support.thorough import mark_rest, pairs
from tests.support.waits import LIMIT_S
from tidekv.backends.checksums import ChecksumThread
from tidekv.backends.component_pools import with_components
from tidekv.backends.copies.slice_moves import SliceCopier
from tidekv.states import events
from tidekv.states.component_specs import ComponentPages
from tidekv.states.handover.rank_place import RankPlace
from tidekv.states.types import PoolMemory, Segment, page_ids
from tidekv.transports.decode.receiver import Receiver
from tidekv.transports.local_rank import LocalRank
from tidekv.transports.loopback import LoopbackNetwork, LoopbackTransport
from tidekv.transports.prefill.sender import Sender
from tidekv.transports.staging import Staging, StagingRing

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ranks.md"
LATENT = Group(kind="mla", head_dim=16)
MODELS = {
    "MHA": Model({"full": Group()}),
    "MHA with copies": Model({"full": Group(heads=2)}, kv_heads_total=2),
    "MLA": Model({"full": LATENT}),
    "layer groups": Model(
        {
            "full": Group(),
            "scales": Group(dtype="float32", head_dim=1),
            "indexer": Group(layers=2, kind="mla", dtype="uint8"),
            "draft": Group(heads=8, layers=2),
        }
    ),
    "latent pages, draft with heads": Model({"full": LATENT, "draft": Group(layers=2)}),
    "latent pages, window with heads": Model({"full": LATENT}, window={"full": Group()}, state=State()),
    "window": Model({"full": Group()}, window={"full": Group(heads=8, layers=2)}),
    "state with channels": Model({"full": Group()}, state=State()),
    "state without channels": Model({"full": Group()}, state=State(named=False)),
}
INDIVISIBLE = "ranks (it cannot be divided without channels) of component 'state'"
PAIRS = list(itertools.product(itertools.product((1, 2, 4), (1, 2)), repeat=2))
PROMPT_TOKENS = 18
DIGESTS = [bytes([page]) * 32 for page in range(5)]
TAILS = {"window": 3, "state": 4}
OURS = list(range(7, 12))
THEIRS = [20, 3, 11, 5, 30]


def relation(prefill: tuple[int, int], decode: tuple[int, int]) -> str:
    """How the ranks of the two ends differ, each as (TP, PP)."""
    equal = [one == other for one, other in zip(prefill, decode, strict=True)]
    return {
        (True, True): "same TP, same PP",
        (False, True): "other TP, same PP",
        (True, False): "same TP, other PP",
        (False, False): "other TP, other PP",
    }[equal[0], equal[1]]


REFUSED = {(row, "state without channels"): INDIVISIBLE for row in ("other TP, same PP", "other TP, other PP")}
"""The field that the error names, by relation and model; all other pairs are handed over."""


@dataclass
class Rank:
    """One rank of either end, and what its receiver has delivered."""

    pools: RankPools
    end: Receiver | Sender
    staging: object = None
    extends: int = 0
    staged: int = 0
    """Pages that prefill has sent through its staging rings."""
    events: list[events.AnyEvent] = field(default_factory=list)
    has_news: asyncio.Event = field(default_factory=asyncio.Event)

    def deliver(self, event: events.AnyEvent) -> None:
        self.events.append(event)
        self.has_news.set()

    def failure(self) -> str:
        return next((each.cause for each in self.events if isinstance(each, events.RoomFailed)), "")

    def is_done(self) -> bool:
        sent = [each for each in self.events if isinstance(each, events.PromiseSent)]
        ended = [each for each in self.events if isinstance(each, events.ChunkReceived) and each.last]
        aux = [each for each in self.events if isinstance(each, events.AuxReceived)]
        return bool(sent) and len(ended) == sent[0].ranks * (1 + self.extends) and len(aux) == sent[0].ranks

    async def ended(self) -> None:
        while not (self.is_done() or self.failure()):
            self.has_news.clear()
            await self.has_news.wait()


async def hand_over(
    model: Model,
    prefill: tuple[int, int],
    decode: tuple[int, int],
    *,
    of_decode: Model | None = None,
    named: int | None = None,
    staging_bytes: int = 8 * 1024,
    contexts: int = 1,
    stripe_pages: int = 0,
    extend: bool = False,
) -> list[Rank]:
    """Hand one prompt over; returns the decode ranks. The last page of the prompt is not full.

    `named` is the number of prefill ranks that the request names, if not all. Rings are small: writes wait for them.
    With more than one of `contexts`, prefill has so many times the ranks. With `extend`, decode also asks for its first
    page, which it had promised, and for the first position of each component, of which the promise asks for the rest.
    """
    network = LoopbackNetwork()
    async with AsyncExitStack() as stack, asyncio.timeout(LIMIT_S):
        hashing = ChecksumThread()
        stack.push_async_callback(hashing.close)
        copier = SliceCopier()
        stack.push_async_callback(copier.close)

        async def start(end: str, place: Place) -> Rank:
            number, count = place.rank, place.tp * place.pp
            place = dataclasses.replace(place, rank=number % count)
            pools = RankPools(of_decode or model if end == "decode" else model, place)
            transport = LoopbackTransport(f"{end}-{number}", network)
            await transport.start(poller=None)  # type: ignore[arg-type]  # Loopback polls nothing.
            stack.push_async_callback(transport.close)
            memory = {of.name: of.device.memory for of in pools.components}
            rank = Rank(pools, None)  # type: ignore[arg-type]  # Made below, with its `deliver`.
            region = np.zeros(max(staging_bytes, 1), np.uint8)
            segment = Segment(region.ctypes.data, len(region), len(region), 1)
            ring = StagingRing(PoolMemory(segments=(segment,), page_count=1))
            rank.staging = region
            local = LocalRank(
                memory=pools.device.memory,
                component_memory=memory,
                identity=with_components(pools.device.layout.identity("m"), pools.components),
                place=RankPlace(
                    rank=number,
                    ranks=count * contexts if end == "prefill" else count,
                    stages=place.pp,
                    kv_heads_total=model.kv_heads_total,
                    contexts=contexts if end == "prefill" else 1,
                    stripe_pages=stripe_pages if end == "prefill" else 0,
                ),
                hashing=hashing,
                staging=Staging(ring, copier) if staging_bytes else None,
            )
            if end == "prefill":
                rank.end = Sender(transport, local, clock=time.monotonic)
                await rank.end.start("prefill:0")
            else:
                rank.end = Receiver(
                    transport,
                    local,
                    deliver=rank.deliver,
                    deliver_aux=lambda *_: None,
                    clock=time.monotonic,
                    group=lambda: "group",
                )
                await transport.register(pools.device.memory, *memory.values(), ring.memory)
                await rank.end.start()
            stack.push_async_callback(rank.end.close)
            return rank

        prefills = [await start("prefill", Place(*prefill, rank)) for rank in range(prefill[0] * prefill[1] * contexts)]
        decodes = [await start("decode", Place(*decode, rank)) for rank in range(decode[0] * decode[1])]
        tails = {
            name: first for name, first in TAILS.items() if decodes[0].pools.pool(name) is not decodes[0].pools.device
        }
        for rank in decodes:
            rank.end.promise(
                ",".join(each.end.address for each in prefills[:named]),
                "r1",
                0,
                prompt_tokens=PROMPT_TOKENS,
                promised_tokens=4,
                pages=page_ids(THEIRS[1:]),
                prompt_digest=DIGEST,
                component_pages=[
                    ComponentPages(name, at + extend, page_ids(THEIRS[at + extend :])) for name, at in tails.items()
                ]
                or None,
            )
            for name, at in {"full": 0, **tails}.items() if extend else ():
                rank.extends += 1
                rank.end.extend("r1", 0, rank.extends, at, page_ids(THEIRS[at : at + 1]), name)
        serving = [asyncio.ensure_future(_serve(rank, list(tails))) for rank in prefills]
        await asyncio.gather(*(rank.ended() for rank in decodes))
        if not any(rank.failure() for rank in decodes):
            await asyncio.gather(*serving)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        for rank in decodes:
            rank.staged = sum(each.end.statistics()["pages_staged"] for each in prefills)
        # Slots that were granted as the room ended are freed with its last messages.
        assert all(each.end.statistics()["staging_used_bytes"] == 0 for each in (*prefills, *decodes))
        return decodes


async def _serve(rank: Rank, tails: list[str]) -> None:
    room = await rank.end.room("r1", PROMPT)
    # What another context holds is not in this rank's pool: a page of it would be seen as wrong.
    held = room.held(range(len(OURS)))
    for name in ("full", *tails) if held else ():
        rank.pools.fill(name, [OURS[at] for at in held], [DIGESTS[at] for at in held])
    await room.send([OURS[at] for at in held if at < 3], start_token=0, end_token=12)
    await room.send([OURS[at] for at in held if at >= 3], start_token=12, end_token=PROMPT_TOKENS)
    for name, request in room.component_pages.items():
        await room.send_component_pages(name, [OURS[at] for at in held if at >= request.first])
    await room.finish(first_token=1)


@pytest.mark.parametrize(
    ("prefill", "decode", "name"),
    mark_rest(
        ((*pair, name) for pair in PAIRS for name in MODELS),
        lambda prefill, decode, name: pairs(prefill, decode, relation(prefill, decode), name),
    ),
    ids=lambda layout: layout if isinstance(layout, str) else f"tp{layout[0]}pp{layout[1]}",
)
async def test_every_byte_is_handed_over_or_the_pair_is_refused_by_name(
    prefill: tuple[int, int], decode: tuple[int, int], name: str
) -> None:
    model = MODELS[name]
    ranks = await hand_over(model, prefill, decode, extend=True)
    refusal = REFUSED.get((relation(prefill, decode), name))
    for rank in ranks:
        if refusal is not None:
            assert refusal in rank.failure()
            continue
        assert rank.failure() == ""
        assert rank.pools.wrong("full", THEIRS, DIGESTS) == []
        for pools in rank.pools.components:
            first = TAILS[pools.name]
            assert rank.pools.wrong(pools.name, THEIRS[first:], DIGESTS[first:]) == []
        assert rank.end.statistics()["pages_damaged"] == 0
    if refusal is None and name == "MHA":
        # The end with more heads copies.
        assert bool(ranks[0].staged) == (decode[0] != prefill[0])


CONTEXTS = [(2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (7, 0)]
"""Numbers of context-parallel prefill parts, and pages of their stripes."""


@pytest.mark.parametrize(
    ("ends", "context", "name"),
    mark_rest(
        itertools.product(
            [((1, 1), (1, 1)), ((2, 1), (1, 2)), ((1, 2), (2, 1)), ((2, 1), (2, 1))],
            CONTEXTS,
            ["MHA", "MLA", "layer groups", "window", "state with channels"],
        )
    ),
)
async def test_context_parallel_prefill_ranks_hand_over_every_byte(
    ends: tuple[tuple[int, int], tuple[int, int]], context: tuple[int, int], name: str
) -> None:
    (prefill, decode), (contexts, stripe_pages) = ends, context
    ranks = await hand_over(
        MODELS[name], prefill, decode, contexts=contexts, stripe_pages=stripe_pages, extend=contexts == 2
    )
    for rank in ranks:
        assert rank.failure() == ""
        first = 0 if contexts == 2 else 1
        assert rank.pools.wrong("full", THEIRS[first:], DIGESTS[first:]) == []
        for pools in rank.pools.components:
            first = TAILS[pools.name]
            assert rank.pools.wrong(pools.name, THEIRS[first:], DIGESTS[first:]) == []
        assert rank.end.statistics()["pages_damaged"] == 0
    if name == "MHA" and prefill[0] != decode[0]:
        assert ranks[0].staged


def test_the_page_says_what_is_refused() -> None:
    assert all(f"`{field}`" in PAGE.read_text() for field in REFUSED.values())


UNEVEN = Model({"full": Group(layers=3)})
"""Two stages of one and of two layers."""


async def test_uneven_stages_are_paired_one_to_one_and_refused_by_name_otherwise() -> None:
    for rank in await hand_over(UNEVEN, (2, 2), (1, 2)):
        assert rank.failure() == ""
        assert rank.pools.wrong("full", THEIRS[1:], DIGESTS[1:]) == []
    for rank in await hand_over(UNEVEN, (1, 1), (1, 2)):
        assert "layers of all stages, which must be as many in each" in rank.failure()


async def test_parts_whose_channels_do_not_add_up_are_refused_by_name() -> None:
    model = Model({"full": Group()}, state=State(divided=12, copied=4))
    for prefill in ((1, 1), (4, 1)):
        (rank,) = await hand_over(model, prefill, (1, 1))
        assert rank.failure() == ""
    ranks = await hand_over(model, (4, 1), (2, 1), of_decode=Model(model.groups, state=State(divided=16, copied=4)))
    assert "channels of part 0 over all ranks of component 'state': ours is 16, theirs is 12" in ranks[0].failure()


async def test_prefill_ranks_that_do_not_hold_all_layers_are_refused_by_name() -> None:
    """The request names one of the two stages of prefill."""
    ranks = await hand_over(MODELS["MHA"], (1, 2), (1, 1), named=1)
    assert "rank (at prefill:1): ours is 0 of 1, theirs is 0 of 2" in ranks[0].failure().replace("'", "")


@pytest.mark.parametrize("name", ["MHA", "layer groups", "window"])
async def test_without_a_ring_slices_are_sent_as_stretches(name: str) -> None:
    for pair in (((1, 1), (2, 2)), ((4, 1), (2, 1))):
        for rank in await hand_over(MODELS[name], *pair, staging_bytes=0):
            assert (rank.failure(), rank.staged) == ("", 0)
            assert rank.pools.wrong("full", THEIRS[1:], DIGESTS[1:]) == []
