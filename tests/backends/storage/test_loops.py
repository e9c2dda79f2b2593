"""Engines that speak to servers, on one event loop after the other: nothing of a loop that has ended is kept."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import uvloop

# The rig of conftest.py, which test modules cannot import.
Rig = Any


@pytest.mark.parametrize(
    ("kind", "server"), [("redis", "redis_server"), ("s3", "s3_server"), ("mooncake", "mooncake_servers")]
)
def test_one_loop_after_the_other_serves_uvloop_too(
    rig_type: type[Rig], kind: str, server: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    address = request.getfixturevalue(server).address

    async def use() -> None:
        rig = rig_type(kind, tmp_path, None, server=address)
        engine = await rig.open()
        assert all(await rig.put(engine, range(20)))
        assert all(await rig.get(engine, range(20)))
        assert await engine.clear() == 20
        await rig.close()

    for run in (asyncio.run, uvloop.run, uvloop.run):
        run(use())
