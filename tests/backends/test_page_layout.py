"""Pages of several groups: the arithmetic, what is refused, and pools with groups that share page ids."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tidekv.backends.device.pool import DevicePool
from tidekv.backends.host.pool import HostPool
from tidekv.backends.layout import KVLayout, LayerGroup
from tidekv.backends.page_layout import PageLayout, group_offsets, same_pages
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.states.errors import InvalidConfig

FULL = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, dtype="float8_e4m3fn", page_size=4)
SCALES = KVLayout(num_layers=3, num_kv_heads=2, head_dim=1, dtype="float32", page_size=4)
DRAFT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=5, dtype="bfloat16", page_size=4)
INDEXER = KVLayout(num_layers=2, num_kv_heads=1, head_dim=3, dtype="uint8", page_size=4, kind="mla")
LAYOUT = PageLayout.of(full=FULL, scales=SCALES, draft=DRAFT, indexer=INDEXER)


def random_pages(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, 256, (count, LAYOUT.page_bytes), dtype=torch.uint8, generator=generator)


def wrapped(layout: KVLayout, num_pages: int = 8) -> DevicePool:
    k, v = (
        [torch.zeros(num_pages, *layout.piece_shape, dtype=layout.torch_dtype) for _ in range(layout.num_layers)]
        for _ in range(2)
    )
    return DevicePool.wrap(k, None if layout.kind == "mla" else v, layout)


def joined() -> DevicePool:
    return DevicePool.join(**{name: wrapped(layout) for name, layout in LAYOUT.groups})


def test_a_page_is_the_sum_of_its_groups() -> None:
    assert LAYOUT.pieces == FULL.pieces + SCALES.pieces + DRAFT.pieces + INDEXER.pieces
    assert LAYOUT.page_bytes == sum(LAYOUT.pieces) == sum(layout.page_bytes for _, layout in LAYOUT.groups)
    assert LAYOUT.piece_count == len(LAYOUT.pieces) == 6 + 6 + 2 + 2
    assert LAYOUT.page_size == 4
    starts = {group.name: start for group, start in group_offsets(LAYOUT)}
    assert starts == {
        "full": 0,
        "scales": FULL.page_bytes,
        "draft": FULL.page_bytes + SCALES.page_bytes,
        "indexer": LAYOUT.page_bytes - INDEXER.page_bytes,
    }


def test_one_group_is_the_same_as_its_layout() -> None:
    alone = PageLayout.of(full=FULL)
    assert same_pages(alone, FULL)
    assert alone.identity("m") == FULL.identity("m")
    assert not same_pages(alone, PageLayout.of(full=FULL, draft=DRAFT))


def test_identity_differs_by_every_group_name_and_order() -> None:
    identities = [
        PageLayout.of(full=FULL).identity("m"),
        PageLayout.of(full=FULL, draft=DRAFT).identity("m"),
        PageLayout.of(full=FULL, draft_2=DRAFT).identity("m"),
        PageLayout.of(full=FULL, draft=DRAFT, scales=SCALES).identity("m"),
        PageLayout.of(full=FULL, scales=SCALES, draft=DRAFT).identity("m"),
    ]
    assert len(set(identities)) == len(identities)
    assert [group.name for group in identities[4].groups] == ["scales", "draft"]
    assert identities[4].page_bytes == FULL.page_bytes + SCALES.page_bytes + DRAFT.page_bytes


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ((), "first group of a page must be 'full', not none"),
        ((("draft", DRAFT), ("full", FULL)), "first group of a page must be 'full', not draft, full"),
        ((("full", FULL), ("full", DRAFT)), "'full' must be an identifier, and the name of one group only"),
        ((("full", FULL), ("a b", DRAFT)), "'a b' must be an identifier"),
        ((("full", FULL), ("draft", None)), "group 'draft' must be a KVLayout, not NoneType"),
        (
            (("full", FULL), ("draft", KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="uint8", page_size=8))),
            "group 'draft' has pages of 8 tokens, 'full' has 4",
        ),
        (tuple((f"g{n}" if n else "full", DRAFT) for n in range(65)), "at most 64 groups, not 65"),
    ],
)
def test_wrong_groups_are_named(groups: tuple[tuple[str, KVLayout], ...], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        PageLayout(tuple(LayerGroup(*group) for group in groups))


@pytest.mark.parametrize("make", [lambda: DevicePool.allocate(LAYOUT, 8), joined], ids=["allocated", "joined"])
def test_groups_are_views_of_the_same_pages(make) -> None:  # type: ignore[no-untyped-def]  # A lambda has no types.
    pool = make()
    assert pool.layout == LAYOUT
    written = random_pages(8)
    pool.write_pages(range(8), written)
    assert torch.equal(pool.read_pages(range(8)), written)
    assert pool.memory.page_bytes == LAYOUT.page_bytes
    by_address = b"".join(
        ctypes.string_at(segment.address + 5 * segment.stride_bytes, segment.piece_bytes)
        for segment in pool.memory.segments
    )
    assert by_address == written[5].numpy().tobytes()
    host = HostPool.allocate(LAYOUT, 8)
    host.write_pages(range(8), written)
    for group, start in group_offsets(LAYOUT):
        part = written[:, start : start + group.layout.page_bytes]
        views = pool.group(group.name)
        assert views.layout == group.layout
        assert len(views.tensors) == group.layout.piece_count
        assert len(views.k) == group.layout.num_layers
        assert torch.cat(views.rows, dim=1).equal(part)
        assert views.tensors[0].dtype == group.layout.torch_dtype
        assert host.group(group.name).equal(part)
        assert host.group(group.name).data_ptr() == host.buffer.data_ptr() + start
    assert pool.k[0].data_ptr() == pool.group("full").k[0].data_ptr()
    pool.group("draft").k[0][3].fill_(1.5)
    changed = pool.read_pages([3])[0] != written[3]
    assert not changed[: FULL.page_bytes + SCALES.page_bytes].any()
    assert changed[FULL.page_bytes + SCALES.page_bytes :].any()
    for place in (pool, host):
        with pytest.raises(InvalidConfig, match="no group 'windows'; allowed: full, scales, draft, indexer"):
            place.group("windows")


def test_pools_that_do_not_fit_are_not_joined() -> None:
    full = wrapped(FULL)
    with pytest.raises(InvalidConfig, match="group 'draft' has 9 pages on cpu, 'full' has 8"):
        DevicePool.join(full, draft=wrapped(DRAFT, 9))
    with pytest.raises(InvalidConfig, match=r"full\[(\d)\] and copy\[\1\] lie in the same memory"):
        DevicePool.join(full, copy=full)
    with pytest.raises(InvalidConfig, match="'draft' has 4 groups itself"):
        DevicePool.join(full, draft=joined())
    with pytest.raises(InvalidConfig, match="wrap each group, and join"):
        DevicePool.wrap([], [], LAYOUT)  # type: ignore[arg-type]  # That it is refused is the point.


def test_synthetic_kv_shows_a_wrong_byte_in_any_group() -> None:
    pool = DevicePool.allocate(LAYOUT, 8)
    kv = SyntheticKV(pool)
    digests = prompt_digests(bytes(range(96)), 4)
    kv.fill(range(6), digests)
    assert kv.verify(range(6), digests) == []
    pool.group("draft").rows[1][2, 3] += 1
    pool.group("indexer").rows[0][4, -1] += 1
    assert kv.verify(range(6), digests) == [2, 4]
