"""A drain to a successor between real vLLM servers: run by a Python that has vLLM for CPUs.

    python -m tests.support.vllm_successor FOLDER

Two turns of some conversations are served by one decode server. Its cache is handed over to a second one
(`POST /hand_over`), it is ended, and the last turn goes to the second one. Logs are in the folder. Prints one line of
JSON: the answer to the hand-over, what became of the requests, and the counts of the second decode server.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.ports import HOST, free_address
from benchmarks.servers.cluster import SETTLE_S, start
from benchmarks.servers.comparison import right_answers
from benchmarks.servers.conversations import Answers, Load, Outcome, run_load
from benchmarks.servers.model import ModelShape, make_model
from benchmarks.vllm_pair.client import Client
from benchmarks.vllm_pair.cluster import running
from benchmarks.vllm_pair.routes import PrefillThenDecode
from benchmarks.vllm_pair.server import ROOT, Server, ServerOptions
from benchmarks.vllm_pair.variants import VARIANTS

LOAD: Final = Load(conversations=4, turns=3, first=300, last=800, parallel=2)
WITHIN_S: Final = 60.0


@dataclass(frozen=True)
class Replaced:
    """What the drained server said, the outcome of all requests, and the metrics of its successor."""

    told: dict[str, Any]
    outcome: Outcome
    metrics: dict[str, float]


async def serve(options: ServerOptions, folder: Path, expected: Answers) -> Replaced:
    """Serve the load by a decode server and, in its last turn, by the successor."""
    statuses = [free_address(), free_address()]
    old, new = (_decode(options, folder, number, status) for number, status in enumerate(statuses))
    prefill = VARIANTS["tidekv"].server("prefill", 0, options=options, folder=folder, storage="")
    client, decodes, told = Client(), [old], dict[str, Any]()

    async def act(turn: int, when: str) -> None:
        if (turn, when) == (LOAD.turns - 1, "before"):
            async with asyncio.timeout(SETTLE_S):
                # A prompt's blocks are held until they are in host memory, which may be after its answer.
                while True:
                    if not await old.held():
                        break
                    await asyncio.sleep(0.1)
            body = {"to": new.peer_address, "within_s": WITHIN_S}
            told.update(await client.post(f"http://{statuses[0]}/hand_over", body))
            await old.end()
            decodes[:] = [new]

    async with AsyncExitStack() as stack:
        stack.push_async_callback(client.close)
        await start(stack, prefill, old, new)
        route = PrefillThenDecode(client, [prefill], decodes)
        outcome = await run_load(LOAD, route, expected=expected, action=act)
        return Replaced(told, outcome, await new.metrics())


def _decode(options: ServerOptions, folder: Path, number: int, status: str) -> Server:
    """Return a decode server without storage, so that nothing but memory has what was served before."""
    peers = {"enabled": True, "listen": free_address(), "allow": [f"{HOST}:*"], "wait_s": 20.0}
    engine = {"status": {"listen": status}, "cache_peers": peers}
    own = replace(options, handover={"uri": None, "engine": engine})
    return VARIANTS["tidekv"].server("decode", number, options=own, folder=folder, storage="")


async def main(folder: Path) -> None:
    """Compare every token with a single server, and print what was found."""
    shape = ModelShape()
    options = ServerOptions(
        model=make_model(ROOT / "build" / "vllm_pair", shape),
        kv_bytes=2 * LOAD.conversations * LOAD.conversation_tokens * shape.kv_bytes_per_token,
        max_model_len=LOAD.conversation_tokens + 64,
    )
    single = VARIANTS["single"]
    right, _ = await right_answers(
        LOAD, file=None, model=shape.name, start=lambda: running(single, options, folder / single.name)
    )
    found = await serve(options, folder, right)
    outcome, ours = found.outcome, {name: value for name, value in found.metrics.items() if "tidekv" in name}
    became = {"wrong": outcome.wrong, "lost": list(outcome.lost.values()), "retries": outcome.retries}
    print(json.dumps({"told": found.told, "requests": len(outcome.answers), **became, "metrics": ours}))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
