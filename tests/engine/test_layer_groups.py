"""Pages of several groups through a whole engine: all groups of a page are there, or the page is not.

Full KV of 8 bits with its scales, an indexer's keys and a draft: four shapes and types, one page id.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.support.configs import engine_config
from tests.support.waits import LEASE_S
from tidekv import (
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    EngineConfig,
    HostPool,
    InvalidConfig,
    KVLayout,
    LoopbackTransport,
    NixlTransport,
    PageLayout,
    PrefillConfig,
    PrefillPeer,
    Replayer,
    RequestFailed,
    open_storage,
)
from tidekv.backends.keys.chain import pack_tokens
from tidekv.backends.page_layout import Layout, group_offsets
from tidekv.engine.ranks.group import settings_digest
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.engine.synthetic.prefill import SyntheticPrefill
from tidekv.states.settings import CoreSettings
from tidekv.transports.loopback import LoopbackNetwork

SIZE = 4
FULL = KVLayout(num_layers=3, num_kv_heads=2, head_dim=16, dtype="float8_e4m3fn", page_size=SIZE)
SCALES = KVLayout(num_layers=3, num_kv_heads=2, head_dim=1, dtype="float32", page_size=SIZE)
INDEXER = KVLayout(num_layers=3, num_kv_heads=1, head_dim=8, dtype="uint8", page_size=SIZE, kind="mla")
DRAFT = KVLayout(num_layers=1, num_kv_heads=4, head_dim=8, dtype="bfloat16", page_size=SIZE)
PLAIN = PageLayout.of(full=FULL, scales=SCALES, indexer=INDEXER)
LAYOUT = PageLayout.of(full=FULL, scales=SCALES, indexer=INDEXER, draft=DRAFT)
PROMPT = list(range(100, 100 + 6 * SIZE + 1))


@dataclass
class Worker:
    """A decode worker, and its prefill."""

    engine: DecodeEngine
    device: DevicePool
    host: HostPool
    prefill: str = "prefill"

    async def ask(self, request_id: str, prompt: list[int] = PROMPT) -> dict[str, int]:
        """Restore, verify every byte of every group, give back."""
        ready = await self.engine.restore(
            DecodeRequest(request_id=request_id, tokens=prompt, prefill=self.prefill, send_prompt=True)
        )
        digests = prompt_digests(pack_tokens(prompt), SIZE)
        assert SyntheticKV(self.device).verify(ready.pages[: len(digests)].tolist(), digests) == []
        await self.engine.finish(ready)
        await self.engine.wait_settled()
        return ready.sources


def wrapped(layout: Layout, num_pages: int) -> DevicePool:
    """A pool of tensors that lie wherever torch put them, as an embedder has them."""
    pools = {}
    for name, shape in layout.groups:
        size = (num_pages, *shape.piece_shape)
        k, v = ([torch.zeros(size, dtype=shape.torch_dtype) for _ in range(shape.num_layers)] for _ in range(2))
        pools[name] = DevicePool.wrap(k, None if shape.kind == "mla" else v, shape)
    return DevicePool.join(**pools)


@asynccontextmanager
async def worker(
    folder: Path | None = None,
    *,
    layout: Layout = LAYOUT,
    prefill_layout: Layout | None = None,
    nixl: bool = False,
    journal: Path | None = None,
) -> AsyncIterator[Worker]:
    network = LoopbackNetwork()
    make_pool = wrapped if nixl else DevicePool.allocate
    prefill_pool = make_pool(prefill_layout or layout, 64)
    device, host = make_pool(layout, 32), HostPool.allocate(layout, 32)
    ends = [
        NixlTransport(name, dials=["127.0.0.1:*"]) if nixl else LoopbackTransport(name, network)
        for name in ("prefill-0", "decode-0")
    ]
    async with (
        PrefillPeer(
            PrefillConfig(listen="127.0.0.1:0" if nixl else "prefill", lease_s=LEASE_S),
            device=prefill_pool,
            transport=ends[0],
            on_room=SyntheticPrefill(prefill_pool, chunk_pages=3).serve,
        ) as peer,
        DecodeEngine(
            engine_config(prefetch_threshold_tokens=0, journal_path=None if journal is None else str(journal)),
            device=device,
            host=host,
            storage=None if folder is None else open_storage(f"file:{folder}?capacity=64MB"),
            transport=ends[1],
        ) as engine,
    ):
        yield Worker(engine, device, host, peer.address)


def find_in(folder: Path, content: bytes) -> tuple[Path, int]:
    """The file of storage that has these bytes, and where."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and (at := path.read_bytes().find(content)) >= 0:
            return path, at
    raise AssertionError("storage has no such bytes")


def draft_part(made: Worker, page: int, digests: list[bytes]) -> bytes:
    """What the draft group of one page of the prompt holds."""
    pool = DevicePool.allocate(LAYOUT, 1)
    SyntheticKV(pool).fill([0], digests[page : page + 1])
    start = next(start for group, start in group_offsets(LAYOUT) if group.name == "draft")
    content = bytes(pool.read_pages([0])[0, start:].tolist())
    assert len(content) == DRAFT.page_bytes
    assert any(bytes(row) == content for row in made.host.group("draft").numpy())
    return content


async def check_every_tier(folder: Path, *, nixl: bool = False, journal: Path | None = None) -> None:
    async with worker(folder, nixl=nixl, journal=journal) as made:
        assert (await made.ask("r1"))["transfer"] == len(PROMPT)
        assert (await made.ask("r2"))["l1"] == 24
        await made.engine.flush(("l1",))
        assert (await made.ask("r3"))["l2"] == 24
        await made.engine.flush(("l1", "l2"))
        assert (await made.ask("r4"))["l3"] == 24
    async with worker(folder, nixl=nixl) as made:
        assert (await made.ask("r5"))["l3"] == 24


async def test_all_groups_travel_through_every_tier_and_the_journal_names_them(tmp_path: Path) -> None:
    await check_every_tier(tmp_path / "storage", journal=tmp_path / "journal")
    replayer = Replayer(tmp_path / "journal")
    replayer.run()
    assert [group["name"] for group in replayer.header.layout["groups"]] == ["scales", "indexer", "draft"]


@pytest.mark.nixl
async def test_all_groups_travel_over_nixl_from_tensors_of_the_caller(tmp_path: Path) -> None:
    await check_every_tier(tmp_path, nixl=True)


async def test_pages_with_and_without_a_draft_never_meet(tmp_path: Path) -> None:
    async with worker(tmp_path) as made:
        await made.ask("r1")
    async with worker(tmp_path, layout=PLAIN) as made:
        assert (await made.ask("r2"))["l3"] == 0
    async with worker(tmp_path, layout=PageLayout.of(**{**dict(LAYOUT.groups), "draft": FULL})) as made:
        assert (await made.ask("r3"))["l3"] == 0
    async with worker(tmp_path) as made:
        assert (await made.ask("r4"))["l3"] == 24


@pytest.mark.parametrize("page", [0, 3, 5])
async def test_a_damaged_draft_part_cuts_the_hit_at_its_page(tmp_path: Path, page: int) -> None:
    digests = prompt_digests(pack_tokens(PROMPT), SIZE)
    async with worker(tmp_path) as made:
        await made.ask("r1")
        content = draft_part(made, page, digests)
    path, at = find_in(tmp_path, content)
    with path.open("r+b") as file:
        file.seek(at + len(content) - 1)
        file.write(bytes([content[-1] ^ 1]))
    async with worker(tmp_path) as made:
        sources = await made.ask("r2")
        assert (sources["l3"], sources["transfer"]) == (page * SIZE, len(PROMPT) - page * SIZE)


async def test_a_record_that_ends_within_the_draft_part_is_a_miss(tmp_path: Path) -> None:
    digests = prompt_digests(pack_tokens(PROMPT), SIZE)
    async with worker(tmp_path) as made:
        await made.ask("r1")
        # The last of the file: what is before it in the record is whole, the other groups are all there.
        last = max(range(6), key=lambda page: find_in(tmp_path, draft_part(made, page, digests))[1])
        content = draft_part(made, last, digests)
    path, at = find_in(tmp_path, content)
    with path.open("r+b") as file:
        file.truncate(at + len(content) // 2)
    async with worker(tmp_path) as made:
        assert (await made.ask("r2"))["l3"] == last * SIZE


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (LAYOUT, PLAIN, "layer group 'draft' of a page: ours is GroupIdentity(.*), theirs is 'absent'"),
        (PLAIN, LAYOUT, "layer group 'draft' of a page: ours is 'absent', theirs is GroupIdentity"),
        (FULL, PLAIN, "layer group 'scales' of a page: ours is 'absent'"),
    ],
)
async def test_a_prefill_worker_with_other_groups_is_refused_by_the_groups_name(
    ours: Layout, theirs: Layout, words: str
) -> None:
    async with worker(layout=ours, prefill_layout=theirs) as made:
        with pytest.raises(RequestFailed, match=words):
            await made.ask("r1")


async def test_one_group_is_the_plain_layout_at_the_other_end() -> None:
    async with worker(layout=FULL, prefill_layout=PageLayout.of(full=FULL)) as made:
        assert (await made.ask("r1"))["transfer"] == len(PROMPT)


def test_a_host_pool_with_other_groups_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="host pool has layout"):
        DecodeEngine(
            EngineConfig(),
            device=DevicePool.allocate(LAYOUT, 4),
            host=HostPool.allocate(PLAIN, 4),
            transport=LoopbackTransport("decode-0", LoopbackNetwork()),
        )


def test_ranks_with_other_groups_are_no_group() -> None:
    settings = CoreSettings(page_size=SIZE, key_bytes=16, device_pages=4)
    digests = {settings_digest(settings, layout.identity("m")) for layout in (FULL, PLAIN, LAYOUT)}
    assert len(digests) == 3
