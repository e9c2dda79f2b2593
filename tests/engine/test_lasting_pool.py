"""A lasting host pool: what one engine left in host memory serves the requests of the next one, byte for byte."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.engine.test_lent_pages import PAGES, restore
from tests.engine.test_restart import Dialog, speak
from tests.support.inside import core_of, runtime_of
from tidekv import DevicePool, HostPool, InvalidConfig, LoopbackTransport, OfferedPages, Replayer, open_storage
from tidekv.engine.config.engine_config import EngineConfig
from tidekv.engine.decode.decode_engine import DecodeEngine
from tidekv.engine.ranks.group import RankGroup
from tidekv.testing import LAYOUT
from tidekv.transports.loopback import LoopbackNetwork

PROMPT = list(range(100, 142))  # Ten pages of four tokens and a partial one of two.
FORKED = PROMPT[:22] + list(range(500, 520))
TRANSFERRED = {"l1": 0, "l2": 0, "l3": 0, "transfer": 42}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pool"


async def served(pair, request_id: str, tokens: list[int], **fields: object) -> dict[str, int]:
    ready = await pair.restore(request_id, tokens, **fields)
    await pair.finish(ready, tokens, [1])
    await pair.engine.wait_settled()
    return dict(ready.sources)


async def test_the_first_request_after_a_restart_is_served_from_host_memory(make_pair, path: Path) -> None:
    async with make_pair(host_path=path) as pair:
        assert await served(pair, "r1", PROMPT) == TRANSFERRED
        assert await served(pair, "r2", FORKED) == {"l1": 20, "l2": 0, "l3": 0, "transfer": 22}
        assert await served(pair, "r3", PROMPT, namespace="tenant é") == TRANSFERRED
    async with make_pair(host_path=path, page_checksums=True) as pair:
        assert pair.core()["l2_pages_found"] == 25
        assert await served(pair, "r1", FORKED) == {"l1": 0, "l2": 40, "l3": 0, "transfer": 2}
        assert await served(pair, "r2", PROMPT) == {"l1": 20, "l2": 20, "l3": 0, "transfer": 2}
        assert await served(pair, "r3", PROMPT, namespace="tenant é") == {"l1": 0, "l2": 40, "l3": 0, "transfer": 2}
        assert await served(pair, "r4", PROMPT, namespace="another") == TRANSFERRED
        await pair.assert_nothing_held()
    async with make_pair(host_path=path) as pair:
        assert await served(pair, "r1", PROMPT, namespace="another") == {"l1": 0, "l2": 40, "l3": 0, "transfer": 2}


async def test_lent_pages_are_filled_from_what_the_last_engine_was_offered(make_pair, path: Path) -> None:
    tokens = PROMPT[:22]
    async with make_pair(device="lent", host_path=path) as pair:
        await restore(pair, tokens=tokens)
        assert await pair.engine.offer(tokens, PAGES) == OfferedPages(written=5, present=0, declined=0)
    async with make_pair(device="lent", host_path=path) as pair:
        assert pair.engine.probe_prefix(tokens) == {"l1": 0, "l2": 20}
        restored = await restore(pair, tokens=tokens)
        assert restored.sources == {"l1": 0, "l2": 20, "l3": 0, "transfer": 2}
        await pair.assert_nothing_held()


async def test_pages_that_storage_brought_are_found_again(make_pair, path: Path, tmp_path: Path) -> None:
    uri = f"file:{tmp_path}/pages?io=threads&capacity=16MiB"
    async with make_pair(storage=open_storage(uri)) as pair:
        await served(pair, "r1", PROMPT)
    async with make_pair(storage=open_storage(uri), host_path=path) as pair:
        assert await served(pair, "r1", PROMPT) == {"l1": 0, "l2": 0, "l3": 40, "transfer": 2}
    async with make_pair(host_path=path) as pair:
        assert await served(pair, "r1", PROMPT) == {"l1": 0, "l2": 40, "l3": 0, "transfer": 2}


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("page_checksums", [False, True])
async def test_a_page_that_changed_meanwhile_is_found_at_its_first_use(
    make_pair, path: Path, page_checksums: bool, early: bool
) -> None:
    async with make_pair(host_path=path) as pair:
        await served(pair, "r1", PROMPT)
    async with make_pair(host_path=path, page_checksums=page_checksums) as pair:
        (node,) = (node for node in core_of(pair.engine).state.index.nodes())
        pair.host.array[node.host[4], 77] ^= 16
        assert await served(pair, "r1", PROMPT, early=early) == TRANSFERRED
        assert pair.core()["l2_damaged"] == 1
    async with make_pair(host_path=path) as pair:
        assert await served(pair, "r1", PROMPT) == {"l1": 0, "l2": 40, "l3": 0, "transfer": 2}


async def test_a_page_that_changed_meanwhile_is_not_stored(make_pair, path: Path) -> None:
    async with make_pair(host_path=path) as pair:
        await served(pair, "r1", PROMPT)
    storage = open_storage("memory:")
    async with make_pair(device="lent", host_path=path, storage=storage) as pair:
        (node,) = (node for node in core_of(pair.engine).state.index.nodes())
        pair.host.array[node.host[4], 77] ^= 16
        # All pages are in host memory, so that nothing but the put reads them.
        assert (await pair.engine.offer(PROMPT[:40], list(range(10)))).present == 10
        await pair.engine.wait_settled()
        assert storage.statistics().pages == 4 and pair.core()["l2_damaged"] == 1


async def test_what_is_flushed_does_not_come_back(make_pair, path: Path) -> None:
    async with make_pair(host_path=path) as pair:
        await served(pair, "r1", PROMPT)
        await served(pair, "r2", PROMPT, namespace="tenant")
        await pair.engine.flush(namespace="tenant")
    async with make_pair(host_path=path) as pair:
        assert await served(pair, "r1", PROMPT, namespace="tenant") == TRANSFERRED
        retracted = await pair.engine.retract(await pair.restore("r2", PROMPT))
        # What a retracted request holds is spared by a flush, and is not of the weights that the next process has.
        await pair.engine.flush()
        assert pair.core()["host_cached"] == 10
        pair.engine.drop(retracted)
    async with make_pair(host_path=path) as pair:
        assert pair.core()["l2_pages_found"] == 0
        assert await served(pair, "r1", PROMPT) == TRANSFERRED


async def test_what_was_on_its_way_at_a_flush_does_not_come_back_either(make_pair, path: Path) -> None:
    tokens = PROMPT[:22]
    async with make_pair(device="lent", host_path=path) as pair:
        await restore(pair, tokens=tokens)
        # The copy of this offer is under way as the flush is taken, and joins the index after it.
        offering = asyncio.ensure_future(pair.engine.offer(tokens, PAGES))
        await asyncio.sleep(0)
        driver, core = runtime_of(pair.engine).driver, core_of(pair.engine)
        assert core.offers or driver._calls
        await pair.engine.flush(("l2",))
        assert (await offering).written == 5 and pair.engine.probe_prefix(tokens)["l2"] == 20
        other = [1, *tokens]
        assert (await pair.engine.offer(other[:20], [40, 41, 42, 43, 44])).written == 5
    async with make_pair(device="lent", host_path=path) as pair:
        assert pair.engine.probe_prefix(tokens)["l2"] == 0 and pair.engine.probe_prefix(other)["l2"] == 20


async def test_a_pool_of_another_model_starts_empty_with_one_line(
    make_pair, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_pair(host_path=path) as pair:
        await served(pair, "r1", PROMPT)
    for fields, cause in (
        ({"bigram_keys": True}, "it has pages of model '', 4 tokens a page"),
        ({"bigram_keys": True, "host_pages": 64}, "it has 128 pages of 1024 bytes, not 64 pages of 1024 bytes"),
    ):
        caplog.clear()
        async with make_pair(host_path=path, **fields) as pair:
            assert pair.core()["l2_pages_found"] == 0
        lines = [line for line in caplog.messages if "starts empty" in line]
        assert len(lines) == 1 and cause in lines[0]


async def test_the_least_recently_written_pages_of_a_found_pool_go_first(make_pair, path: Path) -> None:
    prompts = [[number, *PROMPT] for number in range(4)]
    async with make_pair(host_path=path, host_pages=40) as pair:
        for number, prompt in enumerate(prompts):
            await served(pair, f"r{number}", prompt)
    async with make_pair(host_path=path, host_pages=40) as pair:
        await served(pair, "new", [9, *PROMPT])
        assert [pair.engine.probe_prefix(prompt)["l2"] for prompt in prompts] == [0, 40, 40, 40]
        await pair.assert_nothing_held()
    async with make_pair(host_path=path, host_pages=40) as pair:
        assert [pair.engine.probe_prefix(prompt)["l2"] for prompt in prompts] == [0, 40, 40, 40]
        assert pair.engine.probe_prefix([9, *PROMPT])["l2"] == 40


async def test_a_run_that_began_with_found_pages_is_replayed(make_pair, path: Path, tmp_path: Path) -> None:
    for number in range(2):
        async with make_pair(host_path=path, journal_path=str(tmp_path / f"journal-{number}")) as pair:
            await served(pair, "r1", PROMPT, namespace="tenant")
            await served(pair, "r2", FORKED)
    assert Replayer(tmp_path / "journal-1").run().complete
    written = (tmp_path / "journal-1").read_bytes()
    assert b"HostPagesFound" in written and b"tenant" not in written


@pytest.mark.parametrize("keeps", ["a lasting pool", "storage written through"])
async def test_a_rolling_restart_keeps_the_hit_rate(make_pair, tmp_path: Path, keeps: str) -> None:
    """Two workers serve half of the conversations each, and are restarted one after the other between two turns."""
    dialogs = [Dialog(seed) for seed in range(8)]

    async def hit_rate(pairs: list) -> float:
        tokens, received = 0, 0
        for number, dialog in enumerate(dialogs):
            tokens += len(dialog.tokens)
            received += (await speak(pairs[number % 2], dialog))["transfer"]
        return 1 - received / tokens

    async with AsyncExitStack() as workers:
        stacks = [await workers.enter_async_context(AsyncExitStack()) for _ in range(2)]

        async def start(number: int):  # type: ignore[no-untyped-def]  # A Pair.
            pools: dict[str, object] = {"host_pages": 256, "device_pages": 128}
            if keeps == "a lasting pool":
                pools["host_path"] = tmp_path / f"pool-{number}"
            else:
                pools["storage"] = open_storage(f"file:{tmp_path}/pages?io=threads&capacity=16MiB")
            return await stacks[number].enter_async_context(make_pair(**pools))

        pairs = [await start(0), await start(1)]
        rates = [await hit_rate(pairs) for _ in range(4)]
        for number in range(2):
            await pairs[number].engine.drain()
            await stacks[number].aclose()
            pairs[number] = await start(number)
        after = await hit_rate(pairs)
        # What only prefill can send, the new tokens of a turn, is the same in every turn.
        assert after >= 0.8 * rates[-1] > 0.4, (rates, after)


async def test_a_rank_that_shares_its_index_has_no_lasting_pool(path: Path) -> None:
    host = HostPool.allocate(LAYOUT, 8, path=path)
    with pytest.raises(InvalidConfig, match="leave out the path"):
        DecodeEngine(
            EngineConfig(),
            device=DevicePool.allocate(LAYOUT, 8),
            host=host,
            transport=LoopbackTransport("decode-0", LoopbackNetwork()),
            ranks=RankGroup(rank=0, ranks=2, address="127.0.0.1:7000"),
        )
    host.close()


# --- Killed processes ---

NURSERY = """
import asyncio, json, os, random, sys
from tests.support.configs import engine_config
from tests.support.waits import PATIENT
from tidekv.testing import loopback_pair

PROMPTS = 12

def tell(**fields):
    # In one write: a line of the child must not begin within one of the parent.
    os.write(1, json.dumps(fields).encode() + b"\\n")

def tokens_of(number):
    source = random.Random(number)
    return [source.randrange(1000) for _ in range(source.randint(9, 40))]

async def work(path, seed, is_last):
    # The pool is small: pages are evicted and written again all the time. Each restored byte is compared.
    source = random.Random(seed)
    async with loopback_pair(config=engine_config(**PATIENT), device_pages=32, host_pages=48, host_path=path) as pair:
        found = pair.engine.statistics()["core"]["l2_pages_found"]
        tell(found=found)
        restored = 0
        for turn in range(2 * PROMPTS if is_last else 10**9):
            prompt = tokens_of(turn % PROMPTS if is_last else source.randrange(PROMPTS))
            ready = await pair.restore(f"r{turn}", prompt)
            restored += ready.sources["l2"]
            await pair.generate(ready, [1])
            # A page whose record was not cleared before its bytes changed.
            assert not pair.engine.statistics()["core"]["l2_damaged"], turn
        await pair.check_idle()
        tell(restored=restored)

path = sys.argv[1]
for line in sys.stdin:
    seed, is_last = json.loads(line)
    child = os.fork()
    if not child:
        tell(child=os.getpid())
        try:
            asyncio.run(work(path, seed, is_last))
        except BaseException as error:
            tell(error=repr(error))
            os._exit(1)
        os._exit(0)
    os.waitpid(child, 0)
    tell(ended=child)
"""


@pytest.mark.parametrize("kills", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_a_worker_killed_at_any_moment_leaves_a_pool_that_opens_and_has_no_wrong_byte(path: Path, kills: int) -> None:
    source = random.Random(kills)
    found: list[int] = []
    with subprocess.Popen(
        [sys.executable, "-c", NURSERY, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as nursery:
        assert nursery.stdin is not None and nursery.stdout is not None

        def heard(name: str) -> int:
            assert nursery.stdout is not None
            line = json.loads(nursery.stdout.readline())
            assert name in line, line
            return int(line[name])

        for kill in range(kills + 1):
            print(json.dumps((kill, kill == kills)), file=nursery.stdin, flush=True)
            child = heard("child")
            if kill == kills:
                break
            if source.random() < 0.8:
                found.append(heard("found"))
            time.sleep(source.random() * 0.3)  # Any moment will do: nothing is expected at it.
            os.kill(child, signal.SIGKILL)
            line = json.loads(nursery.stdout.readline())
            if "ended" not in line:
                assert "found" in line, line
                assert heard("ended") == child
        found.append(heard("found"))
        # Pages of a process that is killed between a copy and its record are lost, and all others are served.
        assert heard("restored") > 0 and found[-1] > 0
        nursery.stdin.close()
        assert nursery.wait() == 0
