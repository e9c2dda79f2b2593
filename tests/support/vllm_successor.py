"""A drain to a successor between real vLLM servers: run by a Python that has vLLM for CPUs.

    python -m tests.support.vllm_successor FOLDER

Logs are in the folder. Prints the line of `Replacement.serve`, in which every token is compared with a single server.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.servers.comparison import right_answers
from benchmarks.servers.model import ModelShape, make_model
from benchmarks.vllm_pair.client import Client
from benchmarks.vllm_pair.cluster import running
from benchmarks.vllm_pair.routes import PrefillThenDecode
from benchmarks.vllm_pair.server import ROOT, Server, ServerOptions
from benchmarks.vllm_pair.variants import VARIANTS
from tests.support.successor import LOAD, Replacement, Sharing


async def main(folder: Path) -> None:
    """Serve the load by a single server, then by a pair whose decode server is replaced."""
    shape = ModelShape()
    options = ServerOptions(
        model=make_model(ROOT / "build" / "vllm_pair", shape),
        kv_bytes=2 * LOAD.conversations * LOAD.conversation_tokens * shape.kv_bytes_per_token,
        max_model_len=LOAD.conversation_tokens + 64,
    )
    single, pair = VARIANTS["single"], VARIANTS["tidekv"]
    right, _ = await right_answers(
        LOAD, file=None, model=shape.name, start=lambda: running(single, options, folder / single.name)
    )

    def decode(number: int, sharing: Sharing) -> Server:
        # Without storage, so that nothing but memory has what was served before.
        own = replace(options, handover={"uri": None, "engine": sharing.engine})
        return pair.server("decode", number, options=own, folder=folder, storage="")

    prefill = pair.server("prefill", 0, options=options, folder=folder, storage="")
    sharing, client = [Sharing(), Sharing()], Client()
    old, new = (decode(number, each) for number, each in enumerate(sharing))
    replacement = Replacement(
        prefill, old, new, sharing, client, lambda decodes: PrefillThenDecode(client, [prefill], decodes)
    )
    print(await replacement.serve(right))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
