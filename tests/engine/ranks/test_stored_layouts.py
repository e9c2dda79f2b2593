"""Storage between instances of different numbers of ranks: what one wrote the other reads, byte for byte.

docs/ranks.md says what is tested here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.parallel_instances import PAGE_SIZE, Group, Model, State
from tests.support.stored_instances import Open, instances
from tests.support.thorough import mark_rest, pairs
from tests.transports.test_layout_pairs import MODELS, REFUSED, relation
from tests.transports.test_layout_pairs import PAIRS as ALL_PAIRS
from tidekv import open_storage
from tidekv.engine.config.engine_config import DeviceMode
from tidekv.states.types import FULL

TOKENS = list(range(50, 50 + 5 * PAGE_SIZE))
OTHERS = [token + 1000 for token in TOKENS]
PAIRS = [(2, 2), *itertools.permutations((1, 2, 4), 2)]


def opener(kind: str, root: Path) -> Open:
    if kind == "memory":
        return open_storage("memory:?capacity=64MiB").sibling
    return lambda: open_storage(f"file:{root}/l3?capacity=64MiB")


def converted_pages(name: str, writer: int, reader: int) -> dict[str, int]:
    """Pages that the ranks of the reader convert: none if those of the writer hold the same bytes."""
    if writer == reader or name in ("MLA", "state without channels"):
        return {}
    if name == "MHA with copies" and 1 not in (writer, reader):
        return {}
    counts = {"": 5 * reader}
    if "window" in name:
        counts["window"] = 2 * reader
    if MODELS[name].state is not None:
        counts["state"] = reader
    return counts


@pytest.mark.parametrize(
    ("name", "writer", "reader"),
    mark_rest(
        ((name, *pair) for name in MODELS for pair in PAIRS),
        # Each pair of widths is read, and each model by more and by fewer ranks than wrote it.
        lambda name, writer, reader: {(writer, reader), *([(name, writer < reader)] if writer != reader else [])},
    ),
)
async def test_what_prefill_ranks_wrote_decode_ranks_of_another_number_read(
    tmp_path: Path, name: str, writer: int, reader: int
) -> None:
    open_one = opener("memory", tmp_path)
    indivisible = name == "state without channels" and writer != reader
    async with instances(MODELS[name], prefill=(writer, 1), decode=(writer, 1), prefill_storage=open_one) as first:
        assert await first.serve("first", TOKENS) == {"transfer": len(TOKENS)}
    async with instances(MODELS[name], prefill=(reader, 1), decode=(reader, 1), decode_storage=open_one) as second:
        assert await second.serve("stored", TOKENS) == {"transfer" if indivisible else "l3": len(TOKENS)}
        assert second.converted() == converted_pages(name, writer, reader)


@pytest.mark.parametrize(("writer", "reader"), [(1, 2), (2, 1), (4, 1), (2, 4)])
@pytest.mark.parametrize("name", ["MHA", "MLA", "window", "state with channels"])
async def test_what_decode_ranks_wrote_decode_ranks_of_another_number_read(
    tmp_path: Path, name: str, writer: int, reader: int
) -> None:
    open_one = opener("file", tmp_path)
    async with instances(MODELS[name], prefill=(writer, 1), decode=(writer, 1), decode_storage=open_one) as first:
        assert await first.serve("first", TOKENS) == {"transfer": len(TOKENS)}
    async with instances(MODELS[name], prefill=(reader, 1), decode=(reader, 1), decode_storage=open_one) as second:
        assert await second.serve("stored", TOKENS) == {"l3": len(TOKENS)}


EVERY_GROUP = {
    "heads": Model(MODELS["layer groups"].groups, window={"full": Group(heads=8, layers=2)}, state=State()),
    "latent vectors": MODELS["latent pages, window with heads"],
    "copies of heads": Model(
        {"full": Group(heads=2)}, window={"full": Group(heads=2)}, state=State(), kv_heads_total=2
    ),
    "records as a whole": Model({"full": Group()}, window={"full": Group()}, state=State(named=False)),
}
"""Models with a window and a state, whose pages have one group of layers or several."""


def cases() -> Iterator[object]:
    """All pairs of layouts with each model: of each pair half of the models, of each model half of the pairs, in lent
    pages.
    """
    for (at, (prefill, decode)), (number, name) in itertools.product(enumerate(ALL_PAIRS), enumerate(EVERY_GROUP)):
        mode: DeviceMode = "lent" if (at + number) % 2 else "owned"
        if name != "records as a whole" or (relation(prefill, decode), "state without channels") not in REFUSED:
            ends = " to ".join(f"tp{tp}pp{pp}" for tp, pp in (prefill, decode))
            yield pytest.param(prefill, decode, name, mode, id=f"{name}, {mode}: {ends}")


@pytest.mark.parametrize(
    ("prefill", "decode", "name", "mode"),
    mark_rest(cases(), lambda prefill, decode, *rest: pairs(*prefill, *decode, relation(prefill, decode), *rest)),
)
async def test_what_a_tier_of_one_rank_loses_of_a_group_prefill_of_another_layout_sends(
    monkeypatch: pytest.MonkeyPatch, prefill: tuple[int, int], decode: tuple[int, int], name: str, mode: DeviceMode
) -> None:
    """Of each group in turn storage reads nothing, and then its host pages are damaged: no request starts over.

    Every byte of every group is compared, on every rank.
    """

    async def nothing(keys: Sequence[bytes], pages: object, **_: object) -> list[bool]:
        return [False] * len(keys)

    open_one, model = opener("memory", Path()), EVERY_GROUP[name]
    async with instances(model, prefill=prefill, decode=decode, decode_storage=open_one, mode=mode) as made:
        last, l1, faults = len(made.decodes) - 1, () if mode == "lent" else ("l1",), 0
        assert await made.serve_and_leave("first", TOKENS) == {"transfer": len(TOKENS)}
        for group in made.decodes[0].groups:
            for tier in ("l3", "l2"):
                await made.forget(*l1, *(("l2",) if tier == "l3" else ()))
                with monkeypatch.context() as patch:
                    if tier == "l3":
                        patch.setattr(made.storage_of(last, group), "get_into", nothing)
                    else:
                        made.decodes[last].damage(group)
                    source = "transfer" if group == FULL else tier
                    assert await made.serve_and_leave(f"{group} {tier}", TOKENS) == {source: len(TOKENS)}, group
                faults += 1
                for member in made.decodes:
                    counts = member.engine.statistics()["core"]
                    assert (counts["extends"], counts["sent_back"]) == (faults, 0), (group, tier)
        assert made.decodes[last].engine.statistics()["core"]["l2_damaged"] == len(made.decodes[0].groups)


@pytest.mark.parametrize(
    ("writer", "reader", "source"), [((1, 2), (2, 2), "l3"), ((2, 2), (1, 2), "l3"), ((2, 1), (1, 2), "transfer")]
)
async def test_pages_are_converted_between_instances_of_as_many_stages(
    tmp_path: Path, writer: tuple[int, int], reader: tuple[int, int], source: str
) -> None:
    open_one = opener("memory", tmp_path)
    async with instances(MODELS["MHA"], prefill=writer, decode=writer, prefill_storage=open_one) as first:
        assert await first.serve("first", TOKENS) == {"transfer": len(TOKENS)}
    async with instances(MODELS["MHA"], prefill=reader, decode=reader, decode_storage=open_one) as second:
        assert await second.serve("stored", TOKENS) == {source: len(TOKENS)}


async def test_pages_that_other_ranks_write_after_the_start_are_found(tmp_path: Path) -> None:
    open_one = opener("memory", tmp_path)
    model = MODELS["window"]
    async with instances(model, prefill=(1, 1), decode=(1, 1), decode_storage=open_one) as reader:
        assert await reader.serve("own", TOKENS) == {"transfer": len(TOKENS)}
        async with instances(model, prefill=(2, 1), decode=(2, 1), prefill_storage=open_one) as writer:
            assert await writer.serve("theirs", OTHERS) == {"transfer": len(OTHERS)}
        await reader.look()
        assert await reader.serve("stored", OTHERS) == {"l3": len(OTHERS)}
