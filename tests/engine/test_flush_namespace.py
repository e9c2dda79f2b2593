"""The pages of one namespace leave every tier; those of others stay, and so do pages in use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.waits import LIMIT_S
from tidekv import InvalidRequest, Replayer, StorageFailed, open_storage
from tidekv.states.events import FlushRequested

TOKENS = list(range(100, 122))  # Five full pages of four tokens, and two.
SHARED = [*TOKENS[:12], *range(500, 510)]  # Shares three of them.


async def found_in(pair, namespace: str, tokens: list[int] = TOKENS) -> tuple[int, int, int]:
    found = await pair.engine.look_up(tokens, namespace=namespace, timeout_s=LIMIT_S)
    return found.l1, found.l2, found.l3


async def keep(pair, request_id: str, namespace: str, tokens: list[int] = TOKENS) -> None:
    await pair.finish(await pair.restore(request_id, tokens, namespace=namespace), tokens, [1])
    await pair.engine.wait_settled()


@pytest.mark.parametrize("uri", ["memory:", "file:{}"])
async def test_a_namespace_leaves_every_tier_and_the_others_stay(make_pair, tmp_path: Path, uri: str) -> None:
    journal = tmp_path / "journal"
    storage = open_storage(uri.format(tmp_path / "pages"))
    async with make_pair(storage=storage, journal_path=str(journal)) as pair:
        for name in ("old", "new", ""):
            await keep(pair, f"{name}1", name)
            await keep(pair, f"{name}2", name, SHARED)
        counts = await pair.engine.flush(("l1", "l2", "l3"), namespace="old")
        assert counts == {"dropped": {"l1": 7, "l2": 7, "l3": 7}, "spared": {"l1": 0, "l2": 0, "l3": 0}}
        assert await found_in(pair, "old") == await found_in(pair, "old", SHARED) == (0, 0, 0)
        await pair.engine.flush(("l1",), namespace="new")
        assert await found_in(pair, "new") == await found_in(pair, "new", SHARED) == (0, 20, 0)
        await pair.engine.flush(("l2",), namespace="new")
        assert await found_in(pair, "new") == await found_in(pair, "new", SHARED) == (0, 0, 20)
        assert await found_in(pair, "") == (20, 0, 0)
        # It is a namespace like any other one afterwards.
        await keep(pair, "again", "old")
        assert await found_in(pair, "old") == (20, 0, 0)
        await pair.assert_nothing_held()
    replayed = Replayer(journal).run()
    assert replayed.complete
    steps = list(Replayer(journal).steps())
    flushed = [step.event.namespace for step in steps if isinstance(step.event, FlushRequested)]
    assert len(set(flushed)) == 2 and not {"old", "new"} & set(flushed)  # The journal names no tenant.
    assert b'"old"' not in journal.read_bytes()


async def test_the_namespace_without_a_name_is_one_of_them(make_pair) -> None:
    async with make_pair() as pair:
        await keep(pair, "r1", "")
        await keep(pair, "r2", "tenant")
        assert (await pair.engine.flush(namespace=""))["dropped"] == {"l1": 5, "l2": 5}
        assert await found_in(pair, "tenant") == (20, 0, 0)
        assert await pair.engine.flush(namespace="nobody's") == {
            "dropped": {"l1": 0, "l2": 0},
            "spared": {"l1": 0, "l2": 0},
        }


async def test_pages_in_use_are_spared_and_stored_again(make_pair) -> None:
    storage = open_storage("memory:")
    async with make_pair(storage=storage) as pair:
        await keep(pair, "r1", "tenant")
        ready = await pair.restore("r2", TOKENS, namespace="tenant")
        counts = await pair.engine.flush(("l1", "l2", "l3"), namespace="tenant")
        assert (counts["dropped"]["l1"], counts["spared"]["l1"]) == (0, 5)
        assert counts["dropped"]["l3"] == 5
        assert storage.statistics().pages == 0
        await pair.finish(ready, TOKENS, [1])
        await pair.engine.wait_settled()
        assert storage.statistics().pages == 5
        await pair.assert_nothing_held()


async def test_wrong_names_and_a_storage_that_hangs_are_refused(make_pair, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage("memory:")
    async with make_pair(storage=storage) as pair:
        await keep(pair, "r1", "tenant")
        with pytest.raises(InvalidRequest, match="namespace"):
            await pair.engine.flush(namespace=3)
        assert await found_in(pair, "tenant") == (20, 0, 0)

        async def fails(keys: object) -> list[bool]:
            raise StorageFailed("no disk")

        monkeypatch.setattr(storage, "delete", fails)
        with pytest.raises(StorageFailed, match="no disk"):
            await pair.engine.flush(("l1", "l2", "l3"), namespace="tenant")
        pair.engine.check()
