"""Early READY at the engine: a forward pass that begins with the first layer, faults between layers, and aborts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.fault_hooks import LayerGate
from tests.support.inside import copy_on_streams_only, replace_report
from tidekv import InvalidRequest, LayersLost, RequestFailed
from tidekv.engine.decode.values import ReadyRequest
from tidekv.states.commands import ReportEarly

PROMPT = list(range(100, 142))  # Ten pages of four tokens and a tail of two.
LAYERS = 2


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> LayerGate:
    return LayerGate(LAYERS, patch=monkeypatch.setattr)


async def on_host(pair: Any) -> None:
    """Leave the full pages of the prompt in host memory only."""
    # Every copy goes to the thread: one on the event loop could not be held.
    copy_on_streams_only(pair.engine)
    ready = await pair.restore("warm", PROMPT)
    await pair.finish(ready, PROMPT, [1])
    await pair.engine.wait_settled()
    await pair.engine.flush(("l1",))


async def begin(pair: Any, request_id: str = "early", **options: object) -> ReadyRequest:
    return await pair.engine.restore(pair.request(request_id, PROMPT, early=True, **options))


def wrong_in_layer(pair: Any, ready: ReadyRequest, layer: int) -> list[int]:
    """Numbers of the prompt's full pages whose piece of a layer is not that of a whole restore."""
    pages = ready.pages[: len(PROMPT) // 4].tolist()
    here, expected = pair.device.rows[2 * layer][pages], pair.whole[2 * layer]
    return [at for at in range(len(pages)) if not bool((here[at] == expected[at]).all())]


async def with_reference(pair: Any) -> None:
    ready = await pair.restore("reference", PROMPT)
    pages = ready.pages[: len(PROMPT) // 4].tolist()
    pair.whole = [row[pages].clone() for row in pair.device.rows]
    await pair.engine.finish(ready, [1])
    await pair.engine.wait_settled()
    await pair.engine.flush(("l1",))
    # Pages in use again must not hold their old bytes by luck.
    for row in pair.device.rows:
        row.zero_()


async def test_the_caller_uses_the_first_layer_while_the_second_is_on_its_way(make_pair, gate: LayerGate) -> None:
    async with make_pair() as pair:
        await on_host(pair)
        gate.open()
        await with_reference(pair)
        gate.close()
        ready = await begin(pair)
        await ready.wait_layer(0)
        assert ready.layers_in_place == 1
        assert wrong_in_layer(pair, ready, 0) == []
        assert wrong_in_layer(pair, ready, 1) != []
        assert pair.engine.states() == {"early": "LOCAL_RESTORE"}
        waiting = asyncio.create_task(ready.wait_layer(1))
        with pytest.raises(InvalidRequest, match="has 1 of 2 layers in place"):
            await pair.engine.finish(ready, [1])
        assert not waiting.done()
        gate.open()
        await waiting
        assert ready.layers_in_place is None
        assert pair.engine.states() == {"early": "READY"}
        assert pair.wrong_pages(ready, PROMPT) == []
        assert ready.sources == {"l1": 0, "l2": 40, "l3": 0, "transfer": 2}
        await pair.finish(ready, PROMPT, [1, 2, 3, 4, 5, 6])
        await pair.assert_nothing_held()


async def test_room_grown_before_ready_is_the_callers_and_counted(make_pair, gate: LayerGate) -> None:
    async with make_pair(growth_reserve_pages=2) as pair:
        await on_host(pair)
        ready = await begin(pair)
        (page,) = pair.engine.grow(ready, 3)
        assert page == ready.pages[-1]
        gate.open()
        await ready.wait_layer(1)
        assert len(ready.pages) == 12
        # Refilled: the core has counted the page.
        await pair.engine.finish(ready, [1, 2, 3])
        await pair.assert_nothing_held()


async def test_a_request_without_the_option_waits_for_all_layers(make_pair, gate: LayerGate) -> None:
    async with make_pair() as pair:
        await on_host(pair)
        ready = await pair.restore("plain", PROMPT)
        await ready.wait_layer(1)
        assert ready.layers_in_place is None
        await pair.finish(ready, PROMPT, [1])


async def test_a_failed_layer_raises_once_and_the_restore_goes_on_by_prefill(make_pair, gate: LayerGate) -> None:
    async with make_pair() as pair:
        await on_host(pair)
        ready = await begin(pair)
        await ready.wait_layer(0)
        waiting = asyncio.create_task(ready.wait_layer(1))
        await asyncio.sleep(0)
        gate.open(fails=True)
        with pytest.raises(LayersLost, match="the copy from host to device failed") as lost:
            await waiting
        assert lost.value.request_id == "early"
        for layer in range(LAYERS):
            await ready.wait_layer(layer)
        assert pair.wrong_pages(ready, PROMPT) == []
        assert ready.sources["transfer"] == len(PROMPT)
        await pair.finish(ready, PROMPT, [1])
        await pair.assert_nothing_held()


async def test_a_deadline_between_layers_is_a_loss_and_then_the_failure(make_pair, gate: LayerGate) -> None:
    async with make_pair() as pair:
        await on_host(pair)
        ready = await begin(pair, deadline_s=0.3)
        with pytest.raises(LayersLost, match="deadline"):
            await ready.wait_layer(1)
        with pytest.raises(InvalidRequest, match="has not stopped using its pages"):
            await begin(pair)
        with pytest.raises(RequestFailed, match="deadline"):
            await ready.wait_layer(0)
        assert not pair.engine.holds(ready)
        gate.open()
        await pair.assert_nothing_held()


async def test_an_abort_after_the_failure_ends_the_use(make_pair, gate: LayerGate) -> None:
    async with make_pair() as pair:
        await on_host(pair)
        ready = await begin(pair, deadline_s=0.3)
        with pytest.raises(LayersLost):
            await ready.wait_layer(1)
        assert not await pair.engine.abort("early")
        gate.open()
        await pair.assert_nothing_held()


@pytest.mark.parametrize("by", ["abort", "cancel"])
async def test_an_abort_between_layers_gives_everything_back(make_pair, gate: LayerGate, by: str) -> None:
    async with make_pair() as pair:
        await on_host(pair)
        restore = asyncio.create_task(begin(pair))
        if by == "cancel":
            # At the moment when the call has its result: the caller never sees it.

            def tell_and_cancel(command: object) -> None:
                tell(command)
                restore.cancel()

            tell = replace_report(pair.engine, ReportEarly, tell_and_cancel)
            with pytest.raises(asyncio.CancelledError):
                await restore
        else:
            ready = await restore
            waiting = asyncio.create_task(ready.wait_layer(1))
            await asyncio.sleep(0)
            assert await pair.engine.abort("early")
            with pytest.raises((LayersLost, RequestFailed)):
                await waiting
        gate.open()
        await pair.assert_nothing_held()


async def test_the_end_of_the_engine_ends_the_wait(make_pair, gate: LayerGate) -> None:
    async with make_pair(close_deadline_s=5.0) as pair:
        await on_host(pair)
        ready = await begin(pair)
        waiting = asyncio.create_task(ready.wait_layer(1))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.1, gate.open)
    with pytest.raises(Exception, match=r"closed|lost"):
        await waiting


async def test_a_layer_that_does_not_exist_is_refused(make_pair, gate: LayerGate) -> None:
    async with make_pair() as pair:
        await on_host(pair)
        plain = await pair.restore("plain", [1, 2, 3])
        ready = await begin(pair)
        for request in (plain, ready):
            for layer in (2, 99, -1, 0.5, True):
                with pytest.raises(InvalidRequest, match="layer"):
                    await request.wait_layer(layer)
        gate.open()
        await ready.wait_layer(1)
        with pytest.raises(InvalidRequest, match="layers are 0 to 1; layer 99 is not one"):
            await ready.wait_layer(99)
        await pair.finish(ready, PROMPT, [1])
        await pair.finish(plain, [1, 2, 3], [1])


async def test_with_checksums_no_layer_is_reported_before_all_are_verified(make_pair, gate: LayerGate) -> None:
    async with make_pair(page_checksums=True) as pair:
        await on_host(pair)
        ready = await begin(pair)
        await ready.wait_layer(1)
        assert pair.wrong_pages(ready, PROMPT) == []
        await pair.finish(ready, PROMPT, [1])
