"""Ten users of one system prompt, whatever the model has beside its full KV: the prompt is transferred once at most.

Of components prefill sends what the end of each prompt needs, and no other tier has: the window's page that is the
user's own, and the record after the user's last token. What is restored is verified byte for byte.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmarks.ports import free_address
from tests.support.configs import engine_config
from tests.support.waits import LEASE_S, LIMIT_S, PATIENT, PATIENT_GROUP
from tidekv import (
    ComponentPools,
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    HostPool,
    KVLayout,
    LoopbackTransport,
    NixlTransport,
    PrefillConfig,
    PrefillPeer,
    RankGroup,
    ReadyRequest,
    Room,
    open_storage,
)
from tidekv.backends.keys.chain import pack_tokens
from tidekv.engine.synthetic.components import wrong_components
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.engine.synthetic.prefill import SyntheticPrefill
from tidekv.states.handover.rank_place import RankPlace
from tidekv.transports.loopback import LoopbackNetwork

SIZE = 20
SYSTEM = list(range(1600))
USER_TOKENS, USERS = 20, 10
LATER = 3
"""Users after each loss of tiers; each finds what the ones before have left."""
FULL = KVLayout(num_layers=1, num_kv_heads=2, head_dim=4, dtype="float32", page_size=SIZE)
WINDOW = KVLayout(num_layers=2, num_kv_heads=2, head_dim=4, dtype="float32", page_size=SIZE)
RECORD = KVLayout(num_layers=2, num_kv_heads=1, head_dim=12, dtype="float32", page_size=16, kind="mla")
KINDS = {"none": (), "window": ("window",), "state": ("state",), "both": ("window", "state")}
KINDS |= {"no full layer": ("window", "state"), "records alone": ("state",)}
AT_THE_END = {"window": 4, "state": 1}
"""Pages of each component at the end of a prompt: 64 tokens of a window are its last four pages."""
OF_A_USER = {"window": 1, "state": 1}
"""Those that no other user has."""


def pools_of(kinds: tuple[str, ...], *, host: bool) -> tuple[ComponentPools, ...]:
    made = []
    for kind in kinds:
        layout, window_tokens, pages = (WINDOW, 64, 160) if kind == "window" else (RECORD, 0, 80)
        made.append(
            ComponentPools(
                name=kind,
                kind=kind,  # type: ignore[arg-type]  # One of the two.
                window_tokens=window_tokens,
                device=DevicePool.allocate(layout, pages),
                host=HostPool.allocate(layout, pages) if host else None,
            )
        )
    return tuple(made)


@dataclass
class Rank:
    """One rank of the decode worker, its prefill rank, and what that was asked for."""

    engine: DecodeEngine
    device: DevicePool
    components: tuple[ComponentPools, ...]
    peer: PrefillPeer
    asked: list[dict[str, int]] = field(default_factory=list)
    has_asked: asyncio.Event = field(default_factory=asyncio.Event)

    def verify(self, ready: ReadyRequest, tokens: list[int]) -> None:
        digests = prompt_digests(pack_tokens(tokens), SIZE)
        assert SyntheticKV(self.device).verify(ready.pages.tolist(), digests) == []
        assert wrong_components(self.components, ready.component_pages, digests) == {}


@dataclass
class Instance:
    """All ranks of one decode worker."""

    ranks: list[Rank]
    may_serve: asyncio.Event
    """Whether prefill answers."""
    numbers: Counter[str] = field(default_factory=Counter)

    async def restore(self, user: int, *, tokens: int = USER_TOKENS) -> tuple[list[ReadyRequest], list[int]]:
        """Restore a user's prompt on all ranks: the system prompt, and `tokens` of the user's own."""
        self.numbers["requests"] += 1
        prompt = [*SYSTEM, *([5000 + user] * tokens)]
        prefill = ",".join(rank.peer.address for rank in self.ranks)
        request = DecodeRequest(
            request_id=f"r{self.numbers['requests']}", tokens=prompt, prefill=prefill, send_prompt=True
        )
        return list(await asyncio.gather(*(rank.engine.restore(request) for rank in self.ranks))), prompt

    async def finish(self, readies: list[ReadyRequest], tokens: list[int]) -> dict[str, int]:
        """Verify everything, leave what there is of components, and return the tokens by source."""
        for rank, ready in zip(self.ranks, readies, strict=True):
            rank.verify(ready, tokens)
            assert ready.sources == readies[0].sources
        finishing = []
        for rank, ready in zip(self.ranks, readies, strict=True):
            left = {name: (tail.first, tail.pages) for name, tail in ready.component_pages.items()}
            finishing.append(rank.engine.finish(ready, component_pages=left))
        await asyncio.gather(*finishing)
        await asyncio.gather(*(rank.engine.wait_settled() for rank in self.ranks))
        return {source: tokens for source, tokens in readies[0].sources.items() if tokens}

    async def answer(self, user: int, *, flushed: tuple[str, ...] = ()) -> dict[str, int]:
        if flushed:
            await self.ranks[0].engine.flush(flushed)
        return await self.finish(*await self.restore(user))

    def asked(self) -> list[dict[str, int]]:
        """Pages of components that prefill was asked for since the last call, by request; the same on all ranks."""
        asked = [rank.asked[:] for rank in self.ranks]
        for rank in self.ranks:
            rank.asked.clear()
        assert all(each == asked[0] for each in asked)
        return asked[0]

    async def asked_times(self, count: int) -> list[dict[str, int]]:
        """The same, once so many requests have asked."""
        for rank in self.ranks:
            while len(rank.asked) < count:
                rank.has_asked.clear()
                await rank.has_asked.wait()
        return self.asked()


@asynccontextmanager
async def instance(model: str, over: str, folder: Path) -> AsyncIterator[Instance]:
    """A decode worker with storage in `folder`, and its prefill, of two ranks each if `over` says so."""
    count = 2 if over == "ranks" else 1
    full = KVLayout.empty(page_size=SIZE) if model in ("no full layer", "records alone") else FULL
    address = free_address()
    network = LoopbackNetwork()
    may_serve = asyncio.Event()
    may_serve.set()
    ranks, parts = list[Rank](), []
    for number in range(count):
        names = (f"prefill-{number}", f"decode-{number}")
        ends = [
            NixlTransport(name, dials=["127.0.0.1:*"]) if over == "nixl" else LoopbackTransport(name, network)
            for name in names
        ]
        theirs, ours = pools_of(KINDS[model], host=False), pools_of(KINDS[model], host=True)
        device, pool = DevicePool.allocate(full, 1000), DevicePool.allocate(full, 1000)
        prefill = SyntheticPrefill(pool, components=theirs)

        async def serve(room: Room, prefill: SyntheticPrefill = prefill, number: int = number) -> None:
            ranks[number].asked.append({name: asked.requested for name, asked in room.component_pages.items()})
            ranks[number].has_asked.set()
            await may_serve.wait()
            await prefill.serve(room)

        peer = PrefillPeer(
            PrefillConfig(
                listen="127.0.0.1:0" if over == "nixl" else f"prefill-{number}",
                lease_s=LEASE_S,
                place=RankPlace(rank=number, ranks=count),
            ),
            device=pool,
            transport=ends[0],
            components=theirs,
            on_room=serve,
        )
        group = RankGroup(
            rank=number,
            ranks=count,
            address=address,
            **PATIENT_GROUP,
        )
        engine = DecodeEngine(
            engine_config(**PATIENT, prefetch_threshold_tokens=0),
            device=device,
            host=HostPool.allocate(full, 1000),
            components=ours,
            storage=open_storage(f"file:{folder}?capacity=256MB"),
            transport=ends[1],
            ranks=group if count > 1 else None,
        )
        ranks.append(Rank(engine, device, ours, peer))
        parts += [peer, engine]
    async with asyncio.timeout(LIMIT_S), AsyncExitStack() as stack:
        await asyncio.gather(*(stack.enter_async_context(part) for part in parts))
        yield Instance(ranks, may_serve)


def each_way(*models: str) -> pytest.MarkDecorator:
    """Each model over each way. Ranks decide alike whatever the model has: they are tested with all kinds at once.

    The default tier has over NIXL the models with all kinds, with and without full KV.
    """
    pairs = [(model, over) for over in ("loopback", "nixl") for model in models]
    marks = {model: (pytest.mark.nixl, *([pytest.mark.thorough] if len(KINDS[model]) < 2 else [])) for model in models}
    return pytest.mark.parametrize(
        ("model", "over"),
        [
            *(pytest.param(*pair, marks=marks[pair[0]] if pair[1] == "nixl" else ()) for pair in pairs),
            pytest.param("both", "ranks", marks=pytest.mark.slow),
        ],
    )


WITH_COMPONENTS = [model for model in KINDS if KINDS[model]]


@each_way(*KINDS)
async def test_ten_users_transfer_their_system_prompt_once_and_later_ones_never(
    model: str, over: str, tmp_path: Path
) -> None:
    kinds, whole = KINDS[model], len(SYSTEM) + USER_TOKENS
    at_the_end, of_a_user = ({kind: pages[kind] for kind in kinds} for pages in (AT_THE_END, OF_A_USER))
    async with instance(model, over, tmp_path) as made:
        # One after the other: the first one transfers the system prompt. Without components they do exactly the same.
        sources = [await made.answer(user) for user in range(USERS)]
        assert sources == [{"transfer": whole}, *([{"l1": 1600, "transfer": USER_TOKENS}] * (USERS - 1))]
        assert made.asked() == [at_the_end, *([of_a_user] * (USERS - 1))]
        for first, tier, flushed in ((100, "l2", ("l1",)), (200, "l3", ("l1", "l2"))):
            sources = [await made.answer(first + user, flushed=flushed) for user in range(LATER)]
            assert sources == [{tier: 1600, "transfer": USER_TOKENS}] * LATER
            assert made.asked() == [of_a_user] * LATER
        # A prompt that was there before needs nothing of prefill but its first token.
        assert await made.answer(100, flushed=("l1", "l2")) == {"l3": whole}
        assert made.asked() == [dict.fromkeys(kinds, 0)]
    async with instance(model, over, tmp_path) as restarted:
        sources = [await restarted.answer(300 + user, flushed=("l1", "l2")) for user in range(LATER)]
        assert sources == [{"l3": 1600, "transfer": USER_TOKENS}] * LATER
        assert restarted.asked() == [of_a_user] * LATER


@each_way(*KINDS)
async def test_ten_users_at_once_share_one_transfer_and_each_gets_its_own_end(
    model: str, over: str, tmp_path: Path
) -> None:
    async with instance(model, over, tmp_path) as made:
        restored = await asyncio.gather(*(made.restore(user) for user in range(USERS)))
        transferred = 0
        for readies, tokens in restored:
            transferred += readies[0].sources["transfer"]
            await made.finish(readies, tokens)
        assert transferred == len(SYSTEM) + USERS * USER_TOKENS
        # Windows and states of other ends are not shared before READY.
        assert made.asked() == [{kind: AT_THE_END[kind] for kind in KINDS[model]}] * USERS


@pytest.mark.parametrize("own_tokens", [USER_TOKENS, 7], ids=["full pages", "a partial page"])
@each_way(*WITH_COMPONENTS)
async def test_ten_users_of_the_same_prompt_at_once_are_sent_the_component_pages_of_one(
    model: str, over: str, own_tokens: int, tmp_path: Path
) -> None:
    kinds = KINDS[model]
    async with instance(model, over, tmp_path) as made:
        restored = await asyncio.gather(*(made.restore(1, tokens=own_tokens) for _ in range(USERS)))
        of_one = {kind: AT_THE_END[kind] for kind in kinds}
        assert made.asked() == [of_one, *([dict.fromkeys(kinds, 0)] * (USERS - 1))]
        for number, rank in enumerate(made.ranks):
            core = rank.engine.statistics()["core"]
            assert core["shared_component_pages"] == (USERS - 1) * sum(of_one.values())
            for kind in kinds:
                # Each has pages of its own, which its model writes to.
                own = [page for readies, _ in restored for page in readies[number].component_pages[kind].own]
                assert len(own) == len(set(own))
            for readies, tokens in restored:
                rank.verify(readies[number], tokens)
        for readies, _ in restored:
            await asyncio.gather(*(rank.engine.finish(one) for rank, one in zip(made.ranks, readies, strict=True)))


@each_way(*WITH_COMPONENTS)
async def test_after_an_abort_of_the_first_user_the_next_is_sent_the_component_pages(
    model: str, over: str, tmp_path: Path
) -> None:
    of_one, nothing = {kind: AT_THE_END[kind] for kind in KINDS[model]}, dict.fromkeys(KINDS[model], 0)
    async with instance(model, over, tmp_path) as made:
        made.may_serve.clear()
        users = [asyncio.create_task(made.restore(1)) for _ in range(3)]
        assert await made.asked_times(3) == [of_one, nothing, nothing]
        users[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await users[0]
        made.may_serve.set()
        for user in users[1:]:
            await made.finish(*await user)
        # The next one has asked by an extend of its room, and no request has started over.
        assert made.asked() == []
        for rank in made.ranks:
            core = rank.engine.statistics()["core"]
            assert core["shared_component_pages"] == sum(of_one.values())
            assert {name: count for name, count in core.items() if name.endswith("device_owned") and count} == {}
