"""SGLang's own cache controller drives our storage class: what it writes an engine hits, and the reverse."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tidekv import DecodeEngine, DecodeRequest, DevicePool, EngineConfig, HostPool, KVLayout, NixlTransport, PrefillPeer
from tidekv.backends.storage.uri import open_storage
from tidekv.engine.workload.synthetic_prefill import SyntheticPrefill

PROGRAM = Path(__file__).with_name("sglang_controller.py")
LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, dtype="float32", page_size=8)
VARIABLES = ("TIDEKV_TEST_SGLANG", "TIDEKV_TEST_SGLANG_PACKAGES")


async def controller(what: str, uri: str, first_token: int, file: Path) -> list[bytes]:
    """Run the program; returns the bytes of its pages."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-W",
        "ignore",
        str(PROGRAM),
        what,
        uri,
        str(first_token),
        str(file),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode(errors="replace")[-3000:]
    pages = await asyncio.to_thread(file.read_bytes)
    return [pages[start : start + LAYOUT.page_bytes] for start in range(0, len(pages), LAYOUT.page_bytes)]


@pytest.mark.nixl
@pytest.mark.slow
@pytest.mark.skipif(
    not all(os.environ.get(name) for name in VARIABLES),
    reason=f"set {' and '.join(VARIABLES)} as sglang_controller.py says, to drive SGLang's own controller",
)
async def test_sglangs_controller_and_an_engine_hit_what_the_other_wrote(tmp_path: Path) -> None:
    uri = f"file:{tmp_path}/store?capacity=64MB"
    written = await controller("write", uri, 1000, tmp_path / "written")
    assert len(set(written)) == 4
    prefill_pool = DevicePool.allocate(LAYOUT, 32)
    device = DevicePool.allocate(LAYOUT, 64)
    engine = DecodeEngine(
        EngineConfig(model="m", prefetch_threshold_tokens=1),
        device=device,
        host=HostPool.allocate(LAYOUT, 64),
        storage=open_storage(uri),
        transport=NixlTransport(name="decode-0"),
    )
    peer = PrefillPeer(
        device=prefill_pool,
        transport=NixlTransport("prefill-0"),
        model="m",
        on_room=SyntheticPrefill(prefill_pool, vocabulary=1000).serve,
    )
    async with peer, engine:

        async def restored(first_token: int) -> tuple[dict[str, int], list[bytes]]:
            tokens = [*range(first_token, first_token + 32), 1, 2]
            ready = await engine.restore(
                DecodeRequest(request_id=str(first_token), tokens=tokens, prefill=peer.address, prompt="send")
            )
            pages = [page.numpy().tobytes() for page in device.read_pages(ready.pages[:4])]
            await engine.finish(ready, [ready.first_token])
            return dict(ready.sources), pages

        sources, pages = await restored(1000)
        assert sources == {"l1": 0, "l2": 0, "l3": 32, "transfer": 2}
        assert pages == written
        sources, computed = await restored(5000)
        assert sources["l3"] == 0
        await engine.wait_settled()
    assert await controller("read", uri, 5000, tmp_path / "read") == computed
