"""A decode worker that starts again finds in storage what it had: each next turn, byte for byte and to the page."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from pathlib import Path

import pytest

from tests.support import warm_python
from tidekv import open_storage

PAGE_SIZE = 4


class Dialog:
    """A conversation that is a function of its seed, so that any process can reproduce it."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.name = f"dialog {seed}"
        self.tokens = self._some(5, 40)
        self.stored_tokens = 0
        self.turn = 0

    def answer(self) -> list[int]:
        """What decode generates now."""
        return self._some(1, 12)

    def next_turn(self, answer: list[int]) -> None:
        """Append the answer and a new user turn. All that has KV, in whole pages, is stored."""
        self.turn += 1
        self.stored_tokens = (len(self.tokens) + len(answer) - 1) // PAGE_SIZE * PAGE_SIZE
        self.tokens = [*self.tokens, *answer, *self._some(1, 20)]

    def _some(self, least: int, most: int) -> list[int]:
        return [self._random.randrange(1000) for _ in range(self._random.randint(least, most))]


async def speak(pair, dialog: Dialog) -> dict[str, int]:  # type: ignore[no-untyped-def]  # A Pair of conftest.py.
    ready = await pair.restore(f"{dialog.name} turn {dialog.turn}", dialog.tokens)
    answer = dialog.answer()
    await pair.finish(ready, dialog.tokens, answer)
    dialog.next_turn(answer)
    return ready.sources


@pytest.mark.parametrize("restart", ["flush", "new engine"])
async def test_next_turns_come_from_storage_with_the_length_that_the_dialog_predicts(
    make_pair, tmp_path: Path, restart: str
) -> None:
    uri = f"file:{tmp_path}/pages?io=threads&capacity=16MiB"
    dialogs = [Dialog(seed) for seed in range(6)]
    for generation in range(4):
        async with make_pair(device_pages=256, host_pages=256, storage=open_storage(uri)) as pair:
            for _ in range(2 if restart == "flush" else 1):
                for dialog in dialogs:
                    expected = dialog.stored_tokens
                    tokens = len(dialog.tokens)
                    sources = await speak(pair, dialog)
                    assert sources == {"l1": 0, "l2": 0, "l3": expected, "transfer": tokens - expected}, generation
                await pair.engine.wait_settled()
                await pair.engine.flush()
            await pair.assert_nothing_held()


# One decode worker in a process of its own, which is killed when it has stored what it had.
SCRIPT = """
import asyncio, json, sys
from tidekv import DecodeEngine, DecodeRequest, DevicePool, EngineConfig, HostPool, KVLayout, LoopbackTransport
from tidekv import PrefillConfig, PrefillPeer, open_storage
from tidekv.backends.keys.chain import pack_tokens
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.engine.synthetic.prefill import SyntheticPrefill
from tidekv.transports.loopback import LoopbackNetwork

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=4)

async def main(uri, prompts):
    network = LoopbackNetwork()
    device, pool = DevicePool.allocate(LAYOUT, 256), DevicePool.allocate(LAYOUT, 256)
    async with (
        PrefillPeer(PrefillConfig(listen="prefill"), device=pool, transport=LoopbackTransport("prefill-0", network),
                    on_room=SyntheticPrefill(pool).serve),
        DecodeEngine(EngineConfig(), device=device, host=HostPool.allocate(LAYOUT, 256), storage=open_storage(uri),
                     transport=LoopbackTransport("decode-0", network)) as engine,
    ):
        for number, (prompt, answer) in enumerate(prompts):
            request = DecodeRequest(request_id=f"r{number}", tokens=prompt, prefill="prefill", send_prompt=True)
            ready = await engine.restore(request)
            engine.grow(ready, len(answer) - 1)
            digests = prompt_digests(pack_tokens([*prompt, *answer[:-1]]), 4) if answer[:-1] else []
            first = len(prompt) // 4
            SyntheticKV(device).fill(ready.pages[first:len(digests)].tolist(), digests[first:])
            await engine.finish(ready, answer)
        await engine.wait_settled()
        print("stored", flush=True)
        await asyncio.Event().wait()

asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
"""


@pytest.mark.slow
async def test_a_killed_worker_is_followed_by_one_that_serves_the_next_turns_from_storage(
    make_pair, tmp_path: Path
) -> None:
    uri = f"file:{tmp_path}/pages?io=threads&capacity=16MiB"
    dialogs = [Dialog(seed) for seed in range(6)]
    said = []
    for dialog in dialogs:
        said.append((dialog.tokens, dialog.answer()))
        dialog.next_turn(said[-1][1])
    child = await asyncio.create_subprocess_exec(
        warm_python.executable(), "-c", SCRIPT, uri, json.dumps(said), stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    assert await child.stdout.readline() == b"stored\n"
    child.send_signal(signal.SIGKILL)
    await child.wait()
    async with make_pair(device_pages=256, host_pages=256, storage=open_storage(uri)) as pair:
        for dialog in dialogs:
            expected, tokens = dialog.stored_tokens, len(dialog.tokens)
            assert (await speak(pair, dialog)) == {
                "l1": 0,
                "l2": 0,
                "l3": expected,
                "transfer": tokens - expected,
            }
        await pair.assert_nothing_held()
