"""Components under failures and wrong calls: no wrong byte is handed out, and no page is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.inside import runtime_of
from tidekv import InvalidRequest, Replayer
from tidekv.engine.synthetic.components import component_digest
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.engine.trace.explain import explain
from tidekv.engine.trace.request_traces import read_request_traces
from tidekv.states.errors import CopyFailed

SIZE = 4
PROMPT = list(range(100, 100 + 6 * SIZE))
OUTPUT = list(range(500, 500 + 2 * SIZE + 1))
KEPT = PROMPT + OUTPUT[:-1]


def failing(*_: object) -> asyncio.Future[None]:
    copied: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    copied.set_exception(CopyFailed("the bus is gone"))
    return copied


def refusing(*_: object) -> asyncio.Future[None]:
    raise OSError("no copy engine")


@pytest.mark.parametrize("fault", [failing, refusing])
async def test_a_window_that_cannot_be_loaded_is_asked_of_prefill(worker, monkeypatch, fault) -> None:
    async with worker() as made:
        await made.answer("r1", PROMPT, OUTPUT)
        await made.engine.flush(("l1",))
        monkeypatch.setattr(runtime_of(made.engine).component_copiers["window"], "to_device", fault)
        sources = await made.answer("r2", [*KEPT, 1], [])
        # Only the window: the full pages are copied, and the request does not start over.
        assert sources["transfer"] == 1 and (made.core()["extends"], made.core()["sent_back"]) == (1, 0)
        monkeypatch.undo()
        assert made.core()["copies_failed"] == 1
        made.expect_nothing_held()


@pytest.mark.parametrize(("damaged", "prompt"), [("window", [*KEPT, 1]), ("state", KEPT)])
async def test_a_bit_flipped_in_host_memory_of_a_component_is_found(worker, damaged: str, prompt: list[int]) -> None:
    async with worker(page_checksums=True) as made:
        await made.answer("r1", PROMPT, OUTPUT)
        await made.engine.flush(("l1",))
        assert made.pages(damaged, "host")["cached"]
        next(pools for pools in made.components if pools.name == damaged).host.array[:, 3] ^= 8
        sources = await made.answer("r2", prompt, [], leaves=False)
        assert sources.get("transfer", 0) == len(prompt) - len(KEPT) and (
            made.core()["extends"],
            made.core()["sent_back"],
        ) == (1, 0)
        assert made.core()["l2_damaged"] == 1
        # The damaged pages have left host memory. Those of the window that prefill brought have joined the cache, and
        # were backed up.
        assert made.pages(damaged, "host")["cached"] == (3 if damaged == "window" else 0)
        made.expect_nothing_held()


@pytest.mark.parametrize("fault", [failing, refusing])
async def test_a_record_that_cannot_be_cloned_is_asked_of_prefill(worker, monkeypatch, fault) -> None:
    async with worker() as made:
        await made.answer("r1", PROMPT, OUTPUT)
        monkeypatch.setattr(runtime_of(made.engine).component_copiers["state"], "clone", fault)
        ready = await made.restore("r2", KEPT)
        assert ready.sources["l1"] == len(KEPT) and (made.core()["extends"], made.core()["sent_back"]) == (1, 0)
        await made.engine.finish(ready)
        monkeypatch.undo()
        await made.engine.wait_settled()
        made.expect_nothing_held()
        assert (await made.answer("r3", KEPT, []))["l1"] == len(KEPT)


async def test_what_cannot_be_backed_up_is_there_on_the_device_alone(worker, monkeypatch) -> None:
    async with worker() as made:
        monkeypatch.setattr(runtime_of(made.engine).component_copiers["state"], "to_host", failing)
        await made.answer("r1", PROMPT, OUTPUT)
        assert made.pages("state", "host")["cached"] == 0 < made.pages("window", "host")["cached"]
        assert (await made.answer("r2", [*KEPT, 1], []))["l1"] == len(KEPT)
        await made.engine.flush(("l1",))
        assert await made.answer("r3", [*KEPT, 1], []) == {"l2": len(KEPT), "transfer": 1}
        made.expect_nothing_held()


async def test_pages_that_are_not_the_requests_are_refused_and_change_nothing(worker) -> None:
    async with worker() as made:
        ready = await made.restore("r1", PROMPT)
        left = made.generate(ready, PROMPT, OUTPUT)
        own = set(ready.component_pages["window"].own.tolist())
        strange = next(page for page in range(16) if page not in own)
        wrong: list[tuple[Mapping[str, object], str]] = [
            ({"draft": (0, [1])}, "leaves component 'draft'; there are window, state"),
            ({**left, "window": (5, [strange])}, f"page {strange} at position 5"),
            ({**left, "state": (8, [ready.component_pages["state"].record])}, r"positions \[8, 9\)"),
            ({**left, "window": (7, [1.5])}, "no position with page ids"),
        ]
        before = made.core()
        for component_pages, words in wrong:
            with pytest.raises(InvalidRequest, match=words):
                await made.engine.finish(ready, OUTPUT, component_pages=component_pages)
            with pytest.raises(InvalidRequest, match=words):
                await made.engine.retract(ready, OUTPUT, component_pages=component_pages)
        assert made.core() == before and made.engine.holds(ready)
        await made.engine.finish(ready, OUTPUT, component_pages=left)
        await made.engine.wait_settled()
        assert (await made.answer("r2", [*KEPT, 1], []))["l1"] == len(KEPT)


async def test_what_is_left_where_outputs_are_not_kept_goes_no_further_than_the_prompt(worker) -> None:
    async with worker(keep_output=False) as made:
        ready = await made.restore("r1", PROMPT)
        left = made.generate(ready, PROMPT, OUTPUT)
        await made.engine.finish(ready, OUTPUT, component_pages=left)
        await made.engine.wait_settled()
        made.expect_nothing_held()
        assert made.pages("window")["cached"] == 1 and made.pages("state")["cached"] == 0
        sources = await made.answer("r2", [*KEPT, 1], [])
        assert sources == {"l1": len(PROMPT), "transfer": len(KEPT) + 1 - len(PROMPT)}


async def test_a_request_that_is_not_cached_leaves_nothing(worker) -> None:
    async with worker() as made:
        await made.answer("r1", PROMPT, OUTPUT, cache=False)
        assert made.pages("window")["cached"] == made.pages("state")["cached"] == 0
        made.expect_nothing_held()


def computing(workers, starts):
    """The last resort of a worker: checks what it continues from, and writes the rest."""

    async def compute(job):
        made = workers[0]
        digests, first = prompt_digests(job.packed_tokens, SIZE), job.start_token // SIZE
        starts.append(job.start_token)
        assert SyntheticKV(made.device).verify(job.pages[:first].tolist(), digests[:first]) == []
        SyntheticKV(made.device).fill(job.pages[first:].tolist(), digests[first:])
        for pools in made.components:
            kv, before, tail = SyntheticKV(pools.device), job.resume_from[pools.name], job.component_pages[pools.name]
            expected = [component_digest(pools.name, digest) for digest in digests]
            assert before.first + len(before.pages) == first and not len(before.own)
            assert kv.verify(before.pages.tolist(), expected[before.first : first]) == []
            parts = dict(zip(tail.pages.tolist(), expected[tail.first :], strict=True))
            written = [page for page in parts if page in tail.own]
            kv.fill(written, [parts[page] for page in written])
        return 7, {}

    return compute


async def test_a_caller_that_computes_continues_from_the_last_window_and_record(worker) -> None:
    workers, starts = [], []
    async with worker(recompute=computing(workers, starts)) as made:
        workers.append(made)
        await made.answer("r1", PROMPT, OUTPUT)
        assert (await made.answer("r2", [*KEPT, *range(9)], [], leaves=False, prefill="prefill"))["l1"] == len(KEPT)
        ready = await made.restore("r3", [*KEPT, *range(9)], prefill="nobody")
        assert starts == [len(KEPT)] and ready.sources["recompute"] == 9 and ready.first_token == 7
        await made.engine.finish(ready)
        await made.engine.wait_settled()
        made.expect_nothing_held()


async def test_a_caller_that_computes_writes_windows_and_records_too(worker) -> None:
    workers, starts = [], []
    compute = computing(workers, starts)

    async with worker(recompute=compute) as made:
        workers.append(made)
        ready = await made.restore("r1", [*PROMPT, 1], prefill="nobody")
        assert ready.sources["recompute"] == len(PROMPT) + 1 and ready.first_token == 7 and starts == [0]
        await made.engine.finish(
            ready, [7, 8, 9, 10, 11], component_pages=made.generate(ready, [*PROMPT, 1], [7, 8, 9, 10, 11])
        )
        await made.engine.wait_settled()
        made.expect_nothing_held()
        assert made.engine.probe_prefix([*PROMPT, 1, 7, 8, 9, 0])["l1"] == 7 * SIZE


async def test_the_journal_of_a_run_with_components_replays_and_is_told(worker, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "run.journal"
    async with worker(journal=path) as made:
        await made.answer("r1", PROMPT, OUTPUT)
        await made.answer("r2", KEPT, OUTPUT)
        await made.engine.flush(("l1",))
        await made.answer("r3", KEPT, [])
        await made.engine.flush(("l1",))
        monkeypatch.setattr(runtime_of(made.engine).component_copiers["window"], "to_device", failing)
        await made.answer("r4", [*KEPT, 1], [])
    replayed = Replayer(path).run()
    assert replayed.complete
    header = Replayer(path).header
    assert [each.name for each in header.core.components] == ["window", "state"]
    assert [each["name"] for each in header.layout["components"]] == ["state", "window"]
    request_traces = read_request_traces(Replayer(path))
    told = {
        request_trace.request_id: explain(request_trace, now_s=request_traces.last_at_s)
        for request_trace in request_traces.all
    }
    assert "asked prefill for 6 pages, 3 pages of window, 1 pages of state." in told["r1"]
    assert "Copied pages [7, 8) of state of the cache to a page of its own, in" in told["r2"]
    assert "of window from host to device, in" in told["r3"] and "of state from host to device, in" in told["r3"]
    assert (
        "the copy of a component failed: CopyFailed: the bus is gone; the pages were asked of prefill by an extend"
        in told["r4"]
    )
