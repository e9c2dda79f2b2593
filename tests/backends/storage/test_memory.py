"""The memory engine against memory that does not keep what was stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# The rig of conftest.py, which test modules cannot import.
Rig = Any


async def test_a_page_whose_bytes_changed_in_memory_is_a_miss_and_is_removed(rig_on: Callable[..., Rig]) -> None:
    rig = rig_on("memory", "")
    engine = await rig.open()
    assert all(await rig.put(engine, range(3)))
    key = rig.keys([1])[0]
    engine._pages[key].page[77] ^= 4
    verdicts = {verdict.key: verdict.cause async for verdict in engine.verify()}
    assert verdicts == dict(zip(rig.keys(range(3)), ["", "corrupt", ""], strict=True))
    assert await rig.get(engine, range(3)) == [True, False, True]
    assert engine.statistics().misses == {"corrupt": 1}
    assert await engine.exists([key], timeout_s=60) == [False]
    assert await rig.put(engine, [1]) == [True]
    assert await rig.get(engine, [1]) == [True]
