"""Windows and states that only storage has any more: the next turn goes on from them, byte for byte."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.inside import calls_of, runtime_of
from tests.support.placing_storage import PlainStorage
from tests.support.waits import LIMIT_S, PATIENT
from tidekv import InvalidConfig, Replayer, open_storage
from tidekv.backends.keys.page_keys import PageKeys
from tidekv.backends.storage.base import Storage
from tidekv.states.errors import StorageFailed

SIZE = 4
PROMPT = list(range(100, 100 + 6 * SIZE))
OUTPUT = list(range(500, 500 + 2 * SIZE + 1))
KEPT = PROMPT + OUTPUT[:-1]
FETCHES = {**PATIENT, "prefetch_threshold_tokens": SIZE}


@pytest.mark.parametrize("uri", ["memory:", "file:"])
@pytest.mark.parametrize("kinds", [("window",), ("state",), ("window", "state")])
async def test_a_turn_goes_on_from_storage_alone(worker, tmp_path: Path, uri: str, kinds: tuple[str, ...]) -> None:
    place = uri if uri == "memory:" else f"file:{tmp_path}/l3?capacity=64MiB"
    async with worker(*kinds, storage=place, **FETCHES) as made:
        assert await made.answer("r1", PROMPT, OUTPUT) == {"transfer": len(PROMPT)}
        await made.engine.flush(("l1", "l2"))
        assert all(made.pages(kind)["cached"] == 0 == made.pages(kind, "host")["cached"] for kind in kinds)
        assert await made.answer("r2", [*KEPT, 1], OUTPUT) == {"l3": len(KEPT), "transfer": 1}
        made.expect_nothing_held()


async def test_a_prompt_that_is_all_in_storage_takes_its_record_from_there(worker) -> None:
    async with worker(storage="memory:", **FETCHES) as made:
        await made.answer("r1", PROMPT, OUTPUT)
        await made.engine.flush(("l1", "l2"))
        assert await made.answer("r2", KEPT, OUTPUT) == {"l3": len(KEPT)}
        counts = made.core()
        # The three pages of the window at the end of each turn, of which they have one in common, and two records.
        assert counts["component_pages_stored"] == 2 * (3 + 1) - 1
        made.expect_nothing_held()


async def test_a_prompt_that_waits_for_memory_has_its_window_and_record_read_ahead(worker, tmp_path: Path) -> None:
    journal = tmp_path / "run.journal"
    async with worker(storage="memory:", journal=journal, lookahead_pages_max=64, **FETCHES) as made:
        await made.answer("r1", PROMPT, OUTPUT)
        await made.engine.flush(("l1", "l2"))
        await made.restore("big", [7] * 44 * SIZE)
        waiting = asyncio.create_task(made.restore("r2", KEPT))
        # Three pages of the window, and the record.
        await calls_of(made.engine).wait_until(lambda: made.core()["component_pages_fetched_ahead"] == 4)
        assert not waiting.done()
        await made.engine.abort("big")
        ready = await waiting
        assert ready.sources["l3"] == len(KEPT)
        assert made.engine.statistics()["snapshots"]["state"]["hits_storage"] == 1
        await made.engine.finish(ready)
        await made.engine.wait_settled()
        made.expect_nothing_held()
    assert Replayer(journal).run().complete


async def test_another_engine_on_the_same_directory_goes_on_where_the_first_one_ended(worker, tmp_path: Path) -> None:
    place = f"file:{tmp_path}/l3?capacity=64MiB"
    async with worker(storage=place, **FETCHES) as made:
        await made.answer("r1", PROMPT, OUTPUT)
    async with worker(storage=place, **FETCHES) as made:
        assert await made.answer("r2", KEPT, OUTPUT) == {"l3": len(KEPT)}
        made.expect_nothing_held()
    # With other components nothing of it means anything.
    async with worker("window", storage=place, **FETCHES) as made:
        assert await made.answer("r3", KEPT, OUTPUT) == {"transfer": len(KEPT)}


@pytest.mark.parametrize("kinds", [("window",), ("state",), ("window", "state")])
async def test_a_drain_stores_windows_and_records_of_each_end(worker, tmp_path: Path, kinds: tuple[str, ...]) -> None:
    place = f"file:{tmp_path}/l3?capacity=64MiB"
    async with worker(*kinds, storage=place, write="back", **FETCHES) as made:
        # The first prompt ends within the second one.
        await made.answer("r1", PROMPT, OUTPUT)
        await made.answer("r2", [*KEPT, *range(900, 900 + 3 * SIZE)], OUTPUT)
        assert made.core()["pages_stored"] == made.core()["component_pages_stored"] == 0
        outcome = await made.engine.drain(store_s=LIMIT_S)
        assert outcome.stored == 13 and outcome.component_pages > 0 and (outcome.left, outcome.failed) == (0, 0)
        made.expect_nothing_held()
    for prompt in (KEPT, [*KEPT, *range(900, 900 + 3 * SIZE), *OUTPUT[:-1]]):
        async with worker(*kinds, storage=place, **FETCHES) as made:
            assert await made.answer("r1", [*prompt, 1], OUTPUT) == {"l3": len(prompt), "transfer": 1}
            made.expect_nothing_held()


async def test_records_that_storage_has_lost_come_from_prefill(worker) -> None:
    async with worker(storage="memory:", **FETCHES) as made:
        await made.answer("r1", PROMPT[: 3 * SIZE], [7, 7])
        await made.answer("r2", PROMPT, OUTPUT)
        component_pages = runtime_of(made.engine).storage_in_use.component_pages
        await component_pages["state"].clear()
        await made.engine.flush(("l1", "l2"))
        assert await made.answer("r3", [*KEPT, 1], OUTPUT) == {"l3": len(KEPT), "transfer": 1}
        assert made.core().get("sent_back", 0) == 0
        made.expect_nothing_held()


@pytest.mark.parametrize("what", ["raises", "lies"])
async def test_records_that_cannot_be_read_are_asked_of_prefill(worker, monkeypatch, what: str) -> None:
    async with worker(storage="memory:", **FETCHES) as made:
        await made.answer("r1", PROMPT, OUTPUT)
        await made.engine.flush(("l1", "l2"))
        component_pages = runtime_of(made.engine).storage_in_use.component_pages

        async def get_nothing(keys: list[bytes], *_: object, **__: object) -> list[bool]:
            if what == "raises":
                raise StorageFailed("the shelf is gone")
            return [False for _ in keys]

        monkeypatch.setattr(component_pages["window"], "get_into", get_nothing)
        assert "transfer" not in await made.answer("r2", KEPT, OUTPUT)
        assert (made.core()["extends"], made.core()["sent_back"]) == (1, 0)
        made.expect_nothing_held()


async def test_storage_that_fails_when_it_is_asked_or_written_costs_nothing_but_itself(worker, monkeypatch) -> None:
    async with worker(storage="memory:", **FETCHES) as made:
        component_pages = runtime_of(made.engine).storage_in_use.component_pages

        async def fail(*_: object, **__: object) -> list[bool]:
            raise StorageFailed("the shelf is gone")

        monkeypatch.setattr(component_pages["state"], "put_from", fail)
        await made.answer("r1", PROMPT, OUTPUT)
        monkeypatch.setattr(component_pages["state"], "exists", fail)
        await made.engine.flush(("l1", "l2"))
        assert await made.answer("r2", KEPT, OUTPUT) == {"transfer": len(KEPT)}
        assert made.core()["l3_queries_failed"] == 1
        monkeypatch.setattr(component_pages["window"], "probe", fail)
        made.expect_nothing_held()


async def test_storage_is_exchanged_and_cleared_with_its_components(worker, tmp_path: Path) -> None:
    first = open_storage("memory:")
    async with worker(storage=first, **FETCHES) as made:
        await made.answer("r1", PROMPT, OUTPUT)
        in_use = runtime_of(made.engine).storage_in_use
        left = dict(in_use.component_pages)
        assert sum(engine.statistics().pages for engine in left.values()) == 4
        await made.engine.attach_storage(f"file:{tmp_path}/l3?capacity=64MiB")
        assert set(in_use.component_pages) == {"window", "state"} and not in_use.retired
        assert in_use.component_pages["window"] is not left["window"]
        assert await made.answer("r2", [*KEPT, 1], OUTPUT) == {"l1": len(KEPT), "transfer": 1}
        assert (await made.engine.flush(("l1", "l2", "l3")))["dropped"]["l3"] > 0
        assert all(engine.statistics().pages == 0 for engine in in_use.component_pages.values())
        await made.engine.detach_storage()
        assert not in_use.component_pages
        assert await made.answer("r3", KEPT, OUTPUT) == {"transfer": len(KEPT)}


async def test_an_engine_for_one_size_of_pages_is_refused(worker) -> None:
    plain: Storage = PlainStorage()  # type: ignore[assignment]  # Its methods are set one by one.
    async with worker(**FETCHES) as made:
        with pytest.raises(InvalidConfig, match="plain: cannot hold component 'window'"):
            await made.engine.attach_storage(plain)
        assert await made.answer("r1", PROMPT, OUTPUT) == {"transfer": len(PROMPT)}


async def test_a_component_without_host_pages_is_not_stored_and_the_others_are(worker) -> None:
    async with worker(storage="memory:", without_host=("window",), **FETCHES) as made:
        await made.answer("r1", PROMPT, OUTPUT)
        (in_storage,) = runtime_of(made.engine).storage_in_use.component_pages.items()
        assert in_storage[0] == "state" and in_storage[1].statistics().pages == 1
        await made.engine.flush(("l1", "l2"))
        # The window comes from prefill.
        assert await made.answer("r2", KEPT, OUTPUT) == {"l3": len(KEPT)}
        copies = made.engine.statistics()["component_copies"]
        assert copies["state"]["to_device_bytes"] > 0
        made.expect_nothing_held()


async def test_keys_of_pages_that_were_stored_are_not_hashed_again_for_their_tails(worker, monkeypatch) -> None:
    hashed: list[int] = []

    def digests(self: PageKeys, packed: bytes, **part: object) -> list[bytes]:
        found: list[bytes] = original(self, packed, **part)
        hashed.append(len(found))
        return found

    original = PageKeys.digests
    monkeypatch.setattr(PageKeys, "digests", digests)
    async with worker(storage="memory:", **FETCHES) as made:
        await made.answer("r1", PROMPT, OUTPUT)
        assert made.core()["component_pages_stored"] == 4
    assert sum(hashed) == len(KEPT) // SIZE


async def test_a_run_with_tails_from_storage_replays(worker, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    async with worker(storage="memory:", journal=path, **FETCHES) as made:
        await made.answer("r1", PROMPT, OUTPUT)
        await made.engine.flush(("l1", "l2"))
        await made.answer("r2", KEPT, OUTPUT)
    assert Replayer(path).run().complete
