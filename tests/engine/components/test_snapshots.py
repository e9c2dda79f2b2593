"""Snapshots through an engine: a computation takes them where prompts part, and the next one continues from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidekv import Replayer, SnapshotOptions, StateRecords
from tidekv.backends.keys.chain import pack_tokens
from tidekv.engine.synthetic.components import component_digest
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests

SIZE = 4
SYSTEM = list(range(100, 100 + 6 * SIZE))


def computing(workers, jobs):
    """The last resort of a worker: checks the record that it continues from, writes the rest and the snapshots."""

    async def compute(job):
        made = workers[0]
        digests, first = prompt_digests(job.packed_tokens, SIZE), job.start_token // SIZE
        jobs.append(job)
        SyntheticKV(made.device).fill(job.pages[first:].tolist(), digests[first:])
        (pools,) = made.components
        kv, expected = SyntheticKV(pools.device), [component_digest("state", digest) for digest in digests]
        before = job.resume_from["state"]
        assert kv.verify(before.pages.tolist(), expected[first - 1 : first] if first else []) == []
        kv.fill([job.component_pages["state"].record], expected[-1:])
        for tokens, page in job.snapshots["state"].items():
            assert tokens % SIZE == 0 and page in job.component_pages["state"].own
            kv.fill([page], [expected[tokens // SIZE - 1]])
        return 7, {}

    return compute


def bytes_kept(made):
    statistics = made.engine.statistics()["snapshots"]["state"]
    assert statistics["device_bytes"] == statistics["record_bytes"] * made.pages("state")["cached"]
    return statistics


async def test_prompts_that_part_are_computed_from_there_and_the_run_replays(worker, tmp_path: Path) -> None:
    workers, jobs = [], []
    path = tmp_path / "run.jsonl"
    options = {"snapshots": SnapshotOptions(per_request=2), "journal": path}
    async with worker("state", recompute=computing(workers, jobs), **options) as made:
        workers.append(made)
        for number in range(4):
            ready = await made.restore(f"r{number}", [*SYSTEM, *[number] * 5], prefill="nobody")
            assert ready.sources["recompute"] == 29 - jobs[-1].start_token
            await made.engine.finish(ready)
        await made.engine.wait_settled()
        made.expect_nothing_held()
        # The first one knew nothing of the others; the second one found where they part.
        assert [job.start_token for job in jobs] == [0, 0, len(SYSTEM), len(SYSTEM)]
        assert list(jobs[1].snapshots["state"]) == [len(SYSTEM), len(SYSTEM) + SIZE]
        statistics = bytes_kept(made)
        assert (statistics["kept_branch"], statistics["kept_prompt_end"]) == (1, 4)
        assert (statistics["resumed"], statistics["resumed_tokens"]) == (2, 2 * len(SYSTEM))
    assert Replayer(path).run().complete


async def test_a_bound_in_bytes_is_kept(worker) -> None:
    workers, jobs = [], []
    async with worker("state") as made:
        record_bytes = made.engine.statistics()["snapshots"]["state"]["record_bytes"]
    options = SnapshotOptions(per_request=2, device_bytes=2 * record_bytes + 1)
    async with worker("state", recompute=computing(workers, jobs), snapshots=options) as made:
        workers.append(made)
        for number in range(6):
            ready = await made.restore(f"r{number}", [number] * (5 * SIZE), prefill="nobody")
            await made.engine.finish(ready)
            assert bytes_kept(made)["device_bytes"] <= 2 * record_bytes
        statistics = bytes_kept(made)
        assert statistics["kept_prompt_end"] == 6 and statistics["evicted_device"] == 4


@pytest.mark.parametrize("spare", [0, 1])
async def test_the_record_of_the_last_full_page_is_left_from_a_spare_one(worker, spare: int) -> None:
    options = SnapshotOptions(per_request=spare)
    async with worker("state", snapshots=options) as made:
        ready = await made.restore("r1", SYSTEM)
        kv, given = SyntheticKV(made.components[0].device), ready.component_pages["state"]
        assert len(given.spare) == spare
        records = StateRecords(given, policy=options, prompt_tokens=len(SYSTEM), page_size=SIZE)
        output = list(range(500, 500 + 2 * SIZE + 3))
        tokens = SYSTEM + output[:-1]
        made.engine.grow(ready, len(output))
        for end in range(len(SYSTEM), len(tokens) + 1):
            digest = prompt_digests(pack_tokens(tokens[:end]), SIZE)[-1]
            if end > len(SYSTEM):
                SyntheticKV(made.device).fill([int(ready.pages[(end - 1) // SIZE])], [digest])
                kv.fill([given.record], [component_digest("state", digest)])
            if (page := records.due(end)) is not None:
                kv.fill([page], [component_digest("state", digest)])
        # Two tokens after the last full page: the live record is of no use.
        await made.engine.finish(ready, output, component_pages={"state": records.left(len(tokens))})
        await made.engine.wait_settled()
        whole = tokens[: len(tokens) // SIZE * SIZE]
        assert made.pages("state")["cached"] == spare
        again = await made.restore("r2", whole)
        assert again.sources["l1"] == len(whole)
        assert bytes_kept(made)["hits_device"] == spare
        await made.engine.finish(again)
        await made.engine.wait_settled()
        made.expect_nothing_held()
