"""vLLM's own scheduler, block manager and worker hooks drive the connector: no wrong byte, and pages shared with us."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from tidekv import KVLayout

PROGRAM = "tests.support.vllm_engine"
VARIABLES = ("TIDEKV_TEST_VLLM", "TIDEKV_TEST_VLLM_PACKAGES")
PAGE = 16
LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, dtype="float32", page_size=PAGE)
needs_wheel = pytest.mark.skipif(
    not all(os.environ.get(name) for name in VARIABLES),
    reason=f"set {' and '.join(VARIABLES)} as tests/support/vllm_engine.py says, to drive vLLM's own scheduler",
)


async def program(*arguments: object) -> None:
    """Run the program to its end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-W",
        "ignore",
        "-m",
        PROGRAM,
        *map(str, arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode(errors="replace")[-3000:]


@pytest.mark.slow
@needs_wheel
@pytest.mark.parametrize("options", [(), ("--async",), ("--page", 24), ("--page", 16, "--async")])
async def test_conversations_with_few_blocks_read_no_wrong_byte(tmp_path: Path, options: tuple[object, ...]) -> None:
    file = tmp_path / "figures"
    await program("churn", f"file:{tmp_path}/store?capacity=64MB", 7, file, *options)
    figures = json.loads(file.read_text())
    # Which of the two serves a page depends on the load of the machine; a count that is zero is not there.
    loaded = sum(figures.get(name, 0) for name in ("restore_tokens_l2", "restore_tokens_l3"))
    assert figures["offer_pages_written"] > 10
    assert loaded > 20 * PAGE
    missed = sum(figures.get(name, 0) for name in ("restores_partial", "restores_failed"))
    assert missed, "bytes in storage were damaged, and none was missed"
    assert figures["computed"] < figures["prompt"]


@pytest.mark.slow
@needs_wheel
async def test_methods_take_what_vllm_gives(tmp_path: Path) -> None:
    file = tmp_path / "contract"
    await program("contract", "none", 0, file)
    found = json.loads(file.read_text())
    assert set(found["abstract"]) <= set(found["declared"])
    assert len(found["declared"]) >= 17


@pytest.mark.nixl
@pytest.mark.slow
@needs_wheel
async def test_vllms_scheduler_and_an_engine_hit_what_the_other_computed(
    tmp_path: Path, engine_on: Callable[..., AbstractAsyncContextManager[Callable[..., Any]]]
) -> None:
    uri = f"file:{tmp_path}/store?capacity=64MB"

    async def vllm(what: str, first_token: int) -> list[bytes]:
        file = tmp_path / what
        await program(what, uri, first_token, file, "--page", PAGE, "--async")
        pages = await asyncio.to_thread(file.read_bytes)
        return [pages[start : start + LAYOUT.page_bytes] for start in range(0, len(pages), LAYOUT.page_bytes)]

    written = await vllm("write", 100)
    assert len(set(written)) == 4
    async with engine_on(uri, LAYOUT) as restored:
        sources, pages = await restored([*range(100, 100 + 4 * PAGE), 1, 2])
        assert sources == {"l1": 0, "l2": 0, "l3": 4 * PAGE, "transfer": 2}
        assert pages == written
        sources, computed = await restored([*range(500, 500 + 4 * PAGE), 1, 2])
        assert sources["l3"] == 0
    assert await vllm("read", 500) == computed
