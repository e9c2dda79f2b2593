"""Reads of pages that instances of other numbers of ranks stored, against a naive model: holes, damage, closing."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.parallel_instances import Group, Model, Place, RankPools, State
from tests.support.placing_storage import PlacingStorage
from tests.support.thorough import examples
from tests.support.waits import LIMIT_S
from tests.transports.test_layout_pairs import MODELS
from tidekv import EngineClosed, HostPool, StorageFailed
from tidekv.backends.component_pools import with_components
from tidekv.backends.storage.base import Storage
from tidekv.backends.storage.calls import Call
from tidekv.backends.storage.memory import MemoryStorage
from tidekv.engine.converted_storage import ConvertedStorage, OpenLayout
from tidekv.engine.poller import PollerThread
from tidekv.engine.stored_layouts import RankLayout, other_layouts
from tidekv.states.types import PageIds, page_ids

PAGES = 5
KEYS = [hashlib.sha256(bytes([page])).digest() for page in range(PAGES)]
WIDTHS = (1, 2, 4)


class StoredRank:
    """The pages of one rank in host memory, and its own storage of one place."""

    def __init__(self, model: Model, width: int, rank: int, storage: Storage, name: str = "full") -> None:
        self.pools = RankPools(model, Place(width, 1, rank))
        self.name = name
        self.host = HostPool.allocate(self.pools.pool(name).layout, PAGES)
        identity = with_components(self.pools.device.layout.identity("m"), self.pools.components)
        self.layout = RankLayout(identity, rank, width, 1, model.kv_heads_total)
        self.component = "" if name == "full" else name
        self.storage = storage

    async def open(self, poller: PollerThread) -> None:
        namespace = self.layout.namespace(self.component)
        await self.storage.register(self.host.memory, self.host.page, namespace=namespace, poller=poller)

    async def put(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.host.page(page)[:] = self.pools.content(self.name, KEYS[page])
        stored = await self.storage.put_from([KEYS[page] for page in pages], page_ids(pages), timeout_s=LIMIT_S)
        assert all(stored)

    def has(self, page: int) -> bool:
        return np.array_equal(np.frombuffer(self.host.page(page), np.uint8), self.pools.content(self.name, KEYS[page]))

    def converted(self, poller: PollerThread) -> ConvertedStorage:
        layouts = other_layouts(self.layout, self.component)
        return ConvertedStorage(self.storage, host=self.host, layouts=layouts, copies=1, poller=poller)


@asynccontextmanager
async def polling() -> AsyncIterator[PollerThread]:
    poller = PollerThread()
    poller.start()
    try:
        yield poller
    finally:
        await poller.close()


def needed(model: Model, name: str, reader: Place, width: int) -> list[int]:
    """The ranks of an instance of `width` whose pages have a part of what the reader holds: the naive model."""
    groups = (model.window if name == "window" else model.groups).values()
    if width == reader.tp:
        return [reader.rank]
    # Each rank holds latent vectors, so they are read from one of those that are read anyway.
    return [
        rank
        for rank in range(width)
        if any(
            set(Place(width, 1, rank).heads(group)) & set(reader.heads(group))
            for group in groups
            if group.kind != "mla"
        )
    ]


holes = st.fixed_dictionaries({
    (width, rank): st.dictionaries(st.integers(0, PAGES - 1), st.booleans())
    for width in WIDTHS
    for rank in range(width)
})  # fmt: skip
"""Pages that each rank stored, and whether each is damaged afterwards."""


@examples(30)
@given(
    stored=holes,
    width=st.sampled_from(WIDTHS),
    data=st.data(),
    name=st.sampled_from(["MHA", "layer groups", "window"]),
)
def test_a_page_is_read_if_one_layout_has_all_its_parts_whole(
    stored: dict[tuple[int, int], dict[int, bool]], width: int, data: st.DataObject, name: str
) -> None:
    model, component = MODELS[name], "window" if name == "window" else "full"
    rank = data.draw(st.integers(0, width - 1))
    place = Place(width, 1, rank)

    async def run() -> tuple[list[bool], list[bool], list[bool], int]:
        root = MemoryStorage(capacity_bytes=64 << 20)
        async with polling() as poller:
            writers = {}
            for (ranks, number), pages in stored.items():
                writer = writers[ranks, number] = StoredRank(model, ranks, number, root.sibling(), component)
                await writer.open(poller)
                await writer.put(sorted(pages))
                for page in (page for page, is_damaged in pages.items() if is_damaged):
                    writer.storage._pages[KEYS[page]].page[3] ^= 8
            reader = StoredRank(model, width, rank, root.sibling(), component)
            await reader.open(poller)
            storage = reader.converted(poller)
            await storage.look()
            found = await storage.exists(KEYS, timeout_s=LIMIT_S)
            valid = await storage.get_into(KEYS, page_ids(range(PAGES)), timeout_s=LIMIT_S)
            right = [reader.has(page) for page in range(PAGES)]
            converted = storage.statistics().converted
            await storage.close()
            for writer in writers.values():
                await writer.storage.close()
        return found, valid, right, converted

    found, valid, right, converted = asyncio.run(run())
    own = [stored[width, rank].get(page) is False for page in range(PAGES)]
    for page in range(PAGES):
        sources = [
            [stored[ranks, number].get(page) for number in needed(model, component, place, ranks)] for ranks in WIDTHS
        ]
        assert found[page] == any(None not in parts for parts in sources)
        assert valid[page] == any(all(part is False for part in parts) for parts in sources)
        assert right[page] or not valid[page]
    assert converted == sum(valid) - sum(own)


async def stored_by_two(poller: PollerThread, root: MemoryStorage) -> StoredRank:
    """Pages stored by two ranks, and the one rank that is to read them."""
    for rank in range(2):
        writer = StoredRank(MODELS["MHA"], 2, rank, root.sibling())
        await writer.open(poller)
        await writer.put(range(PAGES))
    reader = StoredRank(MODELS["MHA"], 1, 0, root.sibling())
    await reader.open(poller)
    return reader


async def test_reads_in_several_batches_at_once_keep_their_staging_pages_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidekv.engine.converted_storage.STAGING_BYTES", 1)
    in_use: list[int] = []
    get_batch = OpenLayout._get_batch

    async def watched(
        layout: OpenLayout,
        call: Call,
        keys: Sequence[bytes],
        pages: PageIds,
        staged: PageIds,
        prefix_keys: Sequence[bytes],
    ) -> list[bool]:
        assert not set(in_use) & set(staged)
        in_use.extend(staged)
        valid = await get_batch(layout, call, keys, pages, staged, prefix_keys)
        for page in staged:
            in_use.remove(page)
        return valid

    monkeypatch.setattr(OpenLayout, "_get_batch", watched)
    async with polling() as poller:
        root = MemoryStorage(capacity_bytes=64 << 20)
        reader = await stored_by_two(poller, root)
        storage = reader.converted(poller)
        await storage.look()
        order = [3, 0, 4, 1, 2]
        halves = [order[:3], order[3:]]
        reads = await asyncio.gather(
            *(storage.get_into([KEYS[at] for at in half], page_ids(half), timeout_s=LIMIT_S) for half in halves)
        )
        assert reads == [[True] * 3, [True] * 2]
        assert all(reader.has(page) for page in order)
        await storage.close()
        await root.close()


@pytest.mark.parametrize("width", [1, 2])
async def test_engines_of_other_layouts_are_told_the_prompt_s_pages_before_a_call(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr("tidekv.engine.converted_storage.STAGING_BYTES", 1)
    async with polling() as poller:
        root = MemoryStorage(capacity_bytes=64 << 20)
        await stored_by_two(poller, root)
        placing = PlacingStorage(root.sibling())
        reader = StoredRank(MODELS["MHA"], width, 0, placing)
        await reader.open(poller)
        storage = reader.converted(poller)
        await storage.look()
        assert all(await storage.exists(KEYS[1:], timeout_s=LIMIT_S, prefix_keys=KEYS[:1]))
        assert all(await storage.touch(KEYS[1:], timeout_s=LIMIT_S, prefix_keys=KEYS[:1]))
        pages = page_ids(range(1, PAGES))
        assert all(await storage.get_into(KEYS[1:], pages, timeout_s=LIMIT_S, prefix_keys=KEYS[:1]))
        # One more call of each for every source and batch, where the rank's own namespace has nothing.
        assert len(placing.calls) > 3 if width == 1 else len(placing.calls) == 3
        assert all(keys == KEYS[: len(keys)] for _, keys in placing.calls)
        await storage.close()
        await root.close()


async def test_a_read_after_its_deadline_starts_nothing() -> None:
    async with polling() as poller:
        root = MemoryStorage(capacity_bytes=64 << 20)
        reader = await stored_by_two(poller, root)
        storage = reader.converted(poller)
        await storage.look()
        assert await storage.get_into(KEYS, page_ids(range(PAGES)), timeout_s=0.0) == [False] * PAGES
        assert storage.statistics().converted == 0
        await storage.close()
        await root.close()


class Failing(MemoryStorage):
    """A place that cannot say what it has."""

    async def have_namespaces(self, namespaces: Sequence[bytes]) -> list[bool]:
        raise StorageFailed("memory: planted failure")


async def test_a_place_that_cannot_say_what_it_has_serves_the_rank_s_own_pages(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with polling() as poller:
        reader = StoredRank(MODELS["MHA"], 1, 0, Failing(capacity_bytes=64 << 20))
        await reader.open(poller)
        await reader.put([0])
        storage = reader.converted(poller)
        await storage.look()
        assert "cannot be looked for" in caplog.text
        assert await storage.get_into(KEYS[:2], page_ids([0, 1]), timeout_s=LIMIT_S) == [True, False]
        await storage.close()


async def test_closing_waits_for_reads_and_closes_every_engine() -> None:
    async with polling() as poller:
        root = MemoryStorage(capacity_bytes=64 << 20)
        reader = await stored_by_two(poller, root)
        storage = reader.converted(poller)
        await storage.look()
        read = asyncio.create_task(storage.get_into(KEYS, page_ids(range(PAGES)), timeout_s=LIMIT_S))
        look = asyncio.create_task(storage.exists([*KEYS, b"x" * 32], timeout_s=LIMIT_S))
        await asyncio.sleep(0)
        await storage.close()
        assert len(await look) == PAGES + 1
        # Cut short or whole: what it says is there is right.
        for page, is_valid in enumerate(await read):
            assert reader.has(page) or not is_valid
        with pytest.raises(EngineClosed):
            await storage.get_into(KEYS, page_ids(range(PAGES)), timeout_s=LIMIT_S)
        await root.close()


async def test_a_cancelled_look_leaves_no_engine_without_an_owner() -> None:
    async with polling() as poller:
        root = MemoryStorage(capacity_bytes=64 << 20)
        reader = await stored_by_two(poller, root)
        storage = reader.converted(poller)
        engines_before = root._place.engines
        looking = asyncio.create_task(storage.look())
        await asyncio.sleep(0)
        looking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await looking
        await storage.close()
        assert root._place.engines == engines_before - 1
        await root.close()


def test_ranks_that_hold_the_same_bytes_share_a_namespace() -> None:
    latent = [StoredRank(MODELS["MLA"], 4, rank, MemoryStorage(capacity_bytes=1 << 20)) for rank in range(4)]
    assert len({rank.layout.namespace() for rank in latent}) == 1
    assert other_layouts(latent[0].layout) == []
    copies = [
        StoredRank(MODELS["MHA with copies"], 4, rank, MemoryStorage(capacity_bytes=1 << 20)) for rank in range(4)
    ]
    assert [copies[0].layout.namespace() == rank.layout.namespace() for rank in copies] == [True, True, False, False]


def test_records_that_each_rank_has_a_copy_of_are_found_at_each_width() -> None:
    # What says how the ranks hold the model is the same at all widths, and not where they store.
    model = Model(MODELS["MLA"].groups, state=State())
    reader = StoredRank(model, 1, 0, MemoryStorage(capacity_bytes=1 << 20), "state")
    copies = {msgspec.structs.replace(reader.layout, ranks=width).namespace("state") for width in (2, 4)}
    assert copies <= {each.namespace for layout in other_layouts(reader.layout, "state") for each in layout.sources}


def test_a_width_at_which_heads_of_a_window_would_be_copies_is_no_other_layout() -> None:
    # Of 4 ranks each would hold one of two heads, and which of them is not known.
    model = Model({"full": Group(heads=4)}, window={"full": Group(heads=2)})
    reader = StoredRank(model, 2, 0, MemoryStorage(capacity_bytes=1 << 20), "window")
    assert [layout.width for name in ("", "window") for layout in other_layouts(reader.layout, name)] == [1, 1]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", MODELS)
def test_every_other_layout_has_each_byte_of_a_page_exactly_once(name: str, width: int) -> None:
    for rank in range(width):
        reader = StoredRank(MODELS[name], width, rank, MemoryStorage(capacity_bytes=1 << 20))
        for component in ("", *(pools.name for pools in reader.pools.components)):
            pages = reader.layout.pages(component)
            for layout in other_layouts(reader.layout, component):
                places = [
                    (cut.theirs, cut.their_start + row * cut.their_step + at)
                    for source in layout.sources
                    for cut in source.cuts
                    for row in range(cut.rows)
                    for at in range(cut.row_bytes)
                ]
                wanted = [(piece, at) for piece, size in enumerate(pages.piece_bytes) for at in range(size)]
                assert sorted(places) == wanted


def test_the_layout_that_needs_the_fewest_bytes_comes_first() -> None:
    reader = StoredRank(MODELS["MHA"], 2, 1, MemoryStorage(capacity_bytes=1 << 20))
    assert [layout.width for layout in other_layouts(reader.layout)] == [4, 1]
