"""SGLang's own cache controller drives our storage class: what it writes an engine hits, and the reverse."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from tidekv import KVLayout

PROGRAM = "tests.support.sglang_controller"
LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, dtype="float32", page_size=8)
VARIABLES = ("TIDEKV_TEST_SGLANG", "TIDEKV_TEST_SGLANG_PACKAGES")


async def controller(what: str, uri: str, first_token: int, file: Path) -> list[bytes]:
    """Run the program; returns the bytes of its pages."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-W",
        "ignore",
        "-m",
        PROGRAM,
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
    reason=f"set {' and '.join(VARIABLES)} as tests/support/sglang_controller.py says, to drive SGLang's controller",
)
async def test_sglangs_controller_and_an_engine_hit_what_the_other_wrote(
    tmp_path: Path, engine_on: Callable[..., AbstractAsyncContextManager[Callable[..., Any]]]
) -> None:
    uri = f"file:{tmp_path}/store?capacity=64MB"
    written = await controller("write", uri, 1000, tmp_path / "written")
    assert len(set(written)) == 4
    async with engine_on(uri, LAYOUT) as restored:
        sources, pages = await restored([*range(1000, 1032), 1, 2])
        assert sources == {"l1": 0, "l2": 0, "l3": 32, "transfer": 2}
        assert pages == written
        sources, computed = await restored([*range(5000, 5032), 1, 2])
        assert sources["l3"] == 0
    assert await controller("read", uri, 5000, tmp_path / "read") == computed
