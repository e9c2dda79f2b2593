"""Models with windows and states read full pages from peers; component pages of the prompt's end come from prefill."""

from __future__ import annotations

import pytest

from tests.engine.components.conftest import component
from tests.support.neighbours import PROMPT, neighbours, sharing
from tests.support.waits import until
from tidekv import ComponentPools
from tidekv.states.component_specs import ComponentKind

KINDS: list[tuple[ComponentKind, ...]] = [("window",), ("state",), ("window", "state")]
FROM_PEER = {"l1": 0, "l2": 0, "l3": 0, "transfer": 2, "peer": 40}


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
@pytest.mark.parametrize("page_checksums", [False, True], ids=["", "checksums"])
async def test_full_pages_come_from_a_peer_and_component_pages_from_prefill(
    kinds: tuple[ComponentKind, ...], page_checksums: bool
) -> None:
    def pools() -> list[ComponentPools]:
        return [component(kind, 16, 16) for kind in kinds]

    async with neighbours(3, components=pools, page_checksums=page_checksums) as all_of:
        first, second, third = all_of.workers
        # `serve` verifies every byte of pages, windows and records.
        await first.serve(PROMPT)
        await first.engine.wait_settled()
        assert await second.serve(PROMPT, [first.address]) == FROM_PEER
        await second.engine.wait_settled()
        longer = [*PROMPT, *range(7, 16)]
        assert await third.serve(longer, [second.address]) == {**FROM_PEER, "transfer": 11}
        for worker in all_of.workers:
            await worker.engine.wait_settled()
            worker.engine.check()
            assert worker.core()["host_protected"] == worker.core()["host_owned"] == 0
        assert first.core()["pages_shared"] == 10


async def test_a_peer_that_dies_in_a_read_costs_a_model_with_components_a_part_of_the_time() -> None:
    def pools() -> list[ComponentPools]:
        return [component("window", 16, 16), component("state", 16, 16)]

    async with neighbours(components=pools, options=sharing(wait_s=0.3)) as all_of:
        first, second = all_of.workers
        await first.serve(PROMPT)
        await first.engine.wait_settled()
        gate = all_of.hold(first)
        # All of it from prefill; every byte is verified.
        assert (await second.serve(PROMPT, [first.address]))["transfer"] == 42
        assert gate.reached.is_set()
        all_of.network.kill(first.transport.instance)
        gate.opened.set()
        await second.engine.wait_settled()
        await until(lambda: second.core()["host_owned"] == 0)
        second.engine.check()


async def test_lent_pages_of_a_model_with_components_are_filled_from_a_peer() -> None:
    def pools() -> list[ComponentPools]:
        return [component("window", 16, 16)]

    async with neighbours(components=pools, configs=[{}, {"device": "lent"}]) as all_of:
        first, second = all_of.workers
        await first.serve(PROMPT)
        await first.engine.wait_settled()
        request = second.request(PROMPT, [first.address])
        restored = await second.engine.restore_into(request, list(range(11)), component_pages={"window": [5, 6, 7]})
        assert (restored.restored_tokens, dict(restored.sources)) == (42, FROM_PEER)
