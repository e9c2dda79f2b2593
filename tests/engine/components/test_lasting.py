"""Windows and states in lasting host pools: the next engine restores them beside the full pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.components.conftest import SIZE, component
from tests.support.inside import core_of
from tidekv import DecodeEngine, DevicePool, EngineConfig, HostPool, InvalidConfig, LoopbackTransport, Replayer
from tidekv.testing import LAYOUT
from tidekv.transports.loopback import LoopbackNetwork

PROMPT = list(range(100, 121))  # Five full pages and one token.
OUTPUT = [1, 2, 3, 4, 5, 6, 7, 8]
NEXT = [*PROMPT, *OUTPUT[:7]]  # Seven full pages, of which the last ones hold output.


async def test_a_restart_restores_windows_and_states_with_the_full_pages(worker, tmp_path: Path) -> None:
    async with worker(folder=tmp_path) as made:
        await made.answer("r1", PROMPT, OUTPUT)
        kept = {kind: made.pages(kind, "host")["cached"] for kind in ("window", "state")}
        assert all(kept.values())
    journal = tmp_path / "journal"
    async with worker(folder=tmp_path, journal=journal) as made:
        assert made.core()["l2_pages_found"] == 28 // SIZE
        assert {kind: made.pages(kind, "host")["cached"] for kind in kept} == kept
        # Every byte of every pool is verified.
        assert await made.answer("r1", NEXT, [1]) == {"l2": 28}
        copies = made.engine.statistics()["component_copies"]
        assert copies["window"]["to_device_bytes"] > 0 < copies["state"]["to_device_bytes"]
        made.expect_nothing_held()
        core_of(made.engine).check()
    assert Replayer(journal).run().complete


@pytest.mark.parametrize("damaged", ["window", "state"])
async def test_a_component_page_that_changed_meanwhile_is_asked_of_prefill(
    worker, tmp_path: Path, damaged: str
) -> None:
    async with worker(folder=tmp_path) as made:
        await made.answer("r1", PROMPT, OUTPUT)
    async with worker(folder=tmp_path) as made:
        (pools,) = (pools for pools in made.components if pools.name == damaged)
        assert pools.host is not None
        pools.host.array[:, 11] ^= 32
        assert await made.answer("r1", NEXT, [1]) == {"l2": 28}
        made.expect_nothing_held()


async def test_without_the_file_of_the_full_pages_nothing_is_found(worker, tmp_path: Path) -> None:
    async with worker(folder=tmp_path) as made:
        await made.answer("r1", PROMPT, [1])
    (tmp_path / "full").unlink()
    for _ in range(2):
        async with worker(folder=tmp_path) as made:
            assert made.pages("window", "host")["cached"] == made.pages("state", "host")["cached"] == 0
    async with worker(folder=tmp_path) as made:
        await made.answer("r1", PROMPT, [1])
    (tmp_path / "window").unlink()
    async with worker(folder=tmp_path) as made:
        assert await made.answer("r1", PROMPT, [1]) == {"l2": 20, "transfer": 1}


async def test_what_is_flushed_does_not_come_back(worker, tmp_path: Path) -> None:
    async with worker(folder=tmp_path) as made:
        await made.answer("r1", PROMPT, [1])
        await made.engine.flush()
    async with worker(folder=tmp_path) as made:
        assert made.core()["l2_pages_found"] == 0
        assert made.pages("window", "host")["cached"] == made.pages("state", "host")["cached"] == 0


def test_a_file_for_a_component_alone_is_refused(tmp_path: Path) -> None:
    window = component("window", 8, 8, folder=tmp_path)
    with pytest.raises(InvalidConfig, match="the host pool of 'window' has a path, that of the full pages has none"):
        DecodeEngine(
            EngineConfig(),
            device=DevicePool.allocate(LAYOUT, 8),
            host=HostPool.allocate(LAYOUT, 8),
            components=(window,),
            transport=LoopbackTransport("decode-0", LoopbackNetwork()),
        )
    assert window.host is not None
    window.host.close()
