"""Early READY with a window and a state, at the engine: what is in place with the first layer, and faults behind it."""

from __future__ import annotations

import asyncio

import pytest

from tests.engine.components.conftest import MakeWorker, Worker
from tests.support.fault_hooks import LayerGate
from tests.support.inside import copy_on_streams_only
from tidekv import DecodeRequest, LayersLost, ReadyRequest
from tidekv.backends.keys.chain import pack_tokens
from tidekv.engine.synthetic.components import wrong_components
from tidekv.engine.synthetic.kv import prompt_digests

PROMPT = list(range(100, 124))  # Six pages of four tokens.


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> LayerGate:
    return LayerGate(2, patch=monkeypatch.setattr)


async def begin(made: Worker, gate: LayerGate) -> ReadyRequest:
    """Leave the prompt in host memory only, and restore it up to the first layer."""
    gate.open()
    # Every copy goes to the thread: one on the event loop could not be held.
    copy_on_streams_only(made.engine)
    await made.answer("warm", PROMPT, [1])
    await made.engine.flush(("l1",))
    for pools in made.components:
        for row in pools.device.rows:
            row.zero_()
    gate.close()
    request = DecodeRequest(request_id="early", tokens=PROMPT, prefill="prefill", send_prompt=True, early=True)
    return await made.engine.restore(request)


def wrong(made: Worker, ready: ReadyRequest) -> object:
    return wrong_components(made.components, ready.component_pages, prompt_digests(pack_tokens(PROMPT), 4))


async def test_window_and_record_are_there_with_the_first_layer(worker: MakeWorker, gate: LayerGate) -> None:
    async with worker() as made:
        ready = await begin(made, gate)
        await ready.wait_layer(0)
        assert ready.layers_in_place == 1
        assert set(ready.component_pages) == {"window", "state"} and wrong(made, ready) == {}
        tables = {name: table.pages.tolist() for name, table in ready.component_pages.items()}
        waiting = asyncio.create_task(ready.wait_layer(1))
        await asyncio.sleep(0)
        assert not waiting.done()
        gate.open()
        await waiting
        made.verify(ready, PROMPT)
        assert {name: table.pages.tolist() for name, table in ready.component_pages.items()} == tables
        assert ready.sources["l2"] == len(PROMPT)
        await made.engine.finish(ready, [1, 2, 3], component_pages=made.generate(ready, PROMPT, [1, 2, 3]))
        await made.engine.wait_settled()
        made.expect_nothing_held()


async def test_a_record_that_was_updated_before_a_loss_is_not_used_again(worker: MakeWorker, gate: LayerGate) -> None:
    async with worker() as made:
        ready = await begin(made, gate)
        await ready.wait_layer(0)
        old = ready.component_pages["state"].record
        # The first layers of the model update the record in place.
        (states,) = (pools for pools in made.components if pools.name == "state")
        waiting = asyncio.create_task(ready.wait_layer(1))
        await asyncio.sleep(0)
        gate.open(fails=True)
        with pytest.raises(LayersLost, match="the copy from host to device failed"):
            await waiting
        for row in states.device.rows:
            row[old].fill_(7.0)
        gate.open()
        for layer in range(2):
            await ready.wait_layer(layer)
        made.verify(ready, PROMPT)
        await made.engine.finish(ready, [1])
        await made.engine.wait_settled()
        made.expect_nothing_held()
        # The full pages, and the record.
        assert (made.core()["extends"], made.core()["sent_back"]) == (2, 0)


async def test_an_abort_between_layers_gives_window_and_record_back(worker: MakeWorker, gate: LayerGate) -> None:
    async with worker() as made:
        ready = await begin(made, gate)
        await ready.wait_layer(0)
        await made.engine.abort("early")
        gate.open()
        await made.engine.wait_settled()
        made.expect_nothing_held()
        await made.restore("after", PROMPT)
