"""A drain to a successor between real SGLang servers: run by a Python that has SGLang for CPUs.

    python -m tests.support.sglang_successor FOLDER RANKS

Each server of the pair has so many tensor-parallel ranks. Logs are in the folder. Prints the line of
`Replacement.serve`, in which every token is compared with a single server.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.ports import HOST
from benchmarks.servers.comparison import right_answers
from benchmarks.servers.file_storage import FILES
from benchmarks.servers.model import make_model
from benchmarks.sglang_pair.client import Client, PrefillAndDecode
from benchmarks.sglang_pair.cluster import running
from benchmarks.sglang_pair.server import LLAMA, ROOT, Server, ServerOptions
from benchmarks.sglang_pair.storage import StorageFolder
from benchmarks.sglang_pair.variants import SINGLE, VARIANTS, Place
from tests.support.successor import LOAD, Replacement, Sharing

PAGE = 16


async def main(folder: Path, ranks: int) -> None:
    """Serve the load by a single server, then by a pair whose decode server is replaced."""
    tokens = 2 * LOAD.conversations * (LOAD.conversation_tokens // PAGE * PAGE)
    model = make_model(ROOT / "build" / "sglang_pair", LLAMA)
    options = ServerOptions(model=model, tokens=tokens, page_size=PAGE, ranks=ranks)
    right, _ = await right_answers(
        LOAD, file=None, model=LLAMA.name, start=lambda: running(SINGLE, options, folder / SINGLE.name)
    )
    # Without storage, so that nothing but memory has what was served before.
    pair = VARIANTS["tidekv-l2"]
    place = Place(StorageFolder(folder / FILES), tokens, tokens, PAGE, LLAMA.kv_bytes_per_token)
    prefill = pair.server("prefill", 0, options=options, folder=folder, place=place)
    place = replace(place, prefills=[f"{HOST}:{prefill.bootstrap_port}"])

    def decode(number: int, sharing: Sharing) -> Server:
        def settings(role: str, place: Place, metrics_port: int) -> Mapping[str, object]:
            assert pair.settings is not None
            given = pair.settings(role, place, metrics_port)
            return {**given, "engine": {"metrics": {"listen": f"{HOST}:{metrics_port}"}, **sharing.engine}}

        variant = replace(pair, settings=settings)
        return variant.server("decode", number, options=options, folder=folder, place=place)

    sharing, client = [Sharing(ranks), Sharing(ranks)], Client()
    old, new = (decode(number, each) for number, each in enumerate(sharing))
    replacement = Replacement(
        prefill, old, new, sharing, client, lambda decodes: PrefillAndDecode(client, [prefill], decodes)
    )
    print(await replacement.serve(right))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
