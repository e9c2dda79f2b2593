"""Early READY with real engines of two ranks: a layer counts once all ranks have it, a fault of one is that of all."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.fault_hooks import LayerGate
from tests.support.inside import copy_on_streams_only, core_of, replace_report, reserve_of, runtime_of
from tests.support.waits import expected
from tidekv import DecodeRequest, LayersLost, OutOfPages, ReadyRequest, RequestFailed
from tidekv.backends.keys.chain import pack_tokens
from tidekv.engine.synthetic.kv import prompt_digests
from tidekv.states import commands, events
from tidekv.states.pages.page_pool import PageState

LAYERS = 2


class Outcomes:
    """Counts what the agreement of a rank receives, by type."""

    def __init__(self, member: Any) -> None:
        self.counts = Counter[type[events.Event]]()
        self._received = asyncio.Event()
        agreement = runtime_of(member.engine).ranks._agreement
        receive: Callable[[events.Event], None] = agreement.receive

        def noted(event: events.Event) -> None:
            receive(event)
            self.counts[type(event)] += 1
            self._received.set()

        agreement.receive = noted

    async def wait(self, kind: type[events.Event], count: int = 1) -> None:
        """Wait until that many have been received."""
        async with expected(f"{count} {kind.__name__}"):
            while self.counts[kind] < count:
                self._received.clear()
                await self._received.wait()


async def on_host(world: SimpleNamespace, members: list[Any]) -> None:
    """Leave the full pages of the prompt in host memory only, on all ranks."""
    for member in members:
        # Every copy goes to the thread: one on the event loop could not be held.
        copy_on_streams_only(member.engine)
    await world.finish_all(members, await world.restore_all(members, "warm"))
    await world.settle(members)
    await members[0].engine.flush(("l1",))
    await served(world, members, "behind the flush")
    for member in members:
        # Pages in use again must not hold their old bytes by luck.
        for row in member.device.rows:
            row.zero_()


async def served(world: SimpleNamespace, members: list[Any], request_id: str) -> None:
    """Serve a short prompt on all ranks. Votes come one after the other, so everything received before it was agreed on
    before it is READY.
    """
    tokens = [7, 8, 9]
    readies = await world.restore_all(members, request_id, tokens)
    for member, ready in zip(members, readies, strict=True):
        await member.engine.abort(ready.request_id)


async def begin(world: SimpleNamespace, member: Any, *, early: bool = True) -> ReadyRequest:
    request = DecodeRequest(
        request_id="early", tokens=world.PROMPT, prefill=",".join(member.prefills), send_prompt=True, early=early
    )
    ready = await member.engine.restore(request)
    assert isinstance(ready, ReadyRequest)
    return ready


async def begin_all(world: SimpleNamespace, members: list[Any]) -> list[ReadyRequest]:
    readies = await asyncio.gather(*(begin(world, member) for member in members))
    await asyncio.gather(*(ready.wait_layer(0) for ready in readies))
    assert readies[0].pages.tolist() == readies[1].pages.tolist()
    return list(readies)


def gates_of(members: list[Any], patch: pytest.MonkeyPatch, *, layers: int = LAYERS) -> list[LayerGate]:
    return [LayerGate(layers, device=member.device, patch=patch.setattr) for member in members]


def assert_whole(world: SimpleNamespace, member: Any, ready: ReadyRequest) -> None:
    digests = prompt_digests(pack_tokens(world.PROMPT), world.PAGE_SIZE)
    assert member.kv.verify(ready.pages[: len(digests)].tolist(), digests) == []


def state_of(member: Any, page: int) -> PageState:
    return core_of(member.engine).state.device.condition(page)


async def test_a_layer_is_reported_when_the_last_rank_has_it(
    world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.instance(2) as members:
        await on_host(world, members)
        gates, outcomes = gates_of(members, monkeypatch), [Outcomes(member) for member in members]
        gates[1].close(first=0)
        restores = [asyncio.create_task(begin(world, member)) for member in members]
        await outcomes[0].wait(events.LayersCopied)
        await served(world, members, "behind the first layer of rank 0")
        assert not any(restore.done() for restore in restores)
        gates[1].close(first=1)
        readies = await asyncio.gather(*restores)
        assert [ready.layers_in_place for ready in readies] == [1, 1]
        last = [asyncio.create_task(ready.wait_layer(1)) for ready in readies]
        gates[0].open()
        await outcomes[0].wait(events.CopyEnded)
        await served(world, members, "behind the copy of rank 0")
        assert not any(wait.done() for wait in last)
        gates[1].open()
        await asyncio.gather(*last)
        for member, ready in zip(members, readies, strict=True):
            assert_whole(world, member, ready)
            assert ready.sources == {"l1": 0, "l2": 40, "l3": 0, "transfer": 2}
        await world.finish_all(members, readies)
        await world.settle(members)
        # READY has closed the vote on the use.
        assert [member.statistics()["slots"] for member in members] == [0, 0]


async def test_a_layer_lost_on_one_rank_is_lost_on_all_and_prefill_sends_it(
    world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.instance(2) as members:
        await on_host(world, members)
        gates, outcomes = gates_of(members, monkeypatch), [Outcomes(member) for member in members]
        readies = await begin_all(world, members)
        gates[0].open()
        gates[1].open(fails=True)
        lost = await asyncio.gather(*(ready.wait_layer(1) for ready in readies), return_exceptions=True)
        assert [type(one) for one in lost] == [LayersLost, LayersLost]
        assert all("the copy from host to device failed" in str(one) for one in lost)
        # Callers begin again at their own pace: that of rank 1 gets all layers before the other has stopped.
        for layer in range(LAYERS):
            await readies[1].wait_layer(layer)
        await served(world, members, "behind READY")
        for layer in range(LAYERS):
            await readies[0].wait_layer(layer)
        # READY has ended the use on all ranks: a report of its end could be taken for that of another operation.
        assert [outcome.counts[events.EarlyUseEnded] for outcome in outcomes] == [0, 1]
        assert readies[0].pages.tolist() == readies[1].pages.tolist()
        for member, ready in zip(members, readies, strict=True):
            assert_whole(world, member, ready)
            assert ready.sources["transfer"] == len(world.PROMPT)
        await world.finish_all(members, readies)
        await world.settle(members)


async def test_an_abort_by_one_rank_between_layers_keeps_the_pages_of_the_others_until_they_have_stopped(
    world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.instance(2) as members:
        await on_host(world, members)
        gates, outcomes = gates_of(members, monkeypatch), [Outcomes(member) for member in members]
        readies = await begin_all(world, members)
        waiting = asyncio.create_task(readies[1].wait_layer(1))
        assert await members[0].engine.abort("early")
        with pytest.raises(LayersLost, match="aborted"):
            await waiting
        for gate in gates:
            gate.open()
        for outcome in outcomes:
            await outcome.wait(events.CopyEnded)
        await served(world, members, "behind the copies")
        # The caller of rank 1 may still write behind the prompt, so the page is kept on both ranks.
        page = int(readies[1].pages[-1])
        assert [state_of(member, page) for member in members] == [PageState.DRAINING] * 2
        with pytest.raises(RequestFailed, match="aborted"):
            await readies[1].wait_layer(0)
        await world.settle(members)
        assert [state_of(member, page) for member in members] == [PageState.FREE] * 2


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_caller_that_leaves_as_soon_as_it_has_the_first_layer_gives_everything_back(
    world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    async with world.instance(2) as members:
        await on_host(world, members)
        gates = gates_of(members, monkeypatch)
        restores = [asyncio.create_task(begin(world, member)) for member in members]

        def tell_and_cancel(command: commands.ReportEarly) -> None:
            # The call has its result, or would have it now, and the caller never sees it.
            if at_once:
                restores[1].cancel()
            tell(command)
            restores[1].cancel()

        tell = replace_report(members[1].engine, commands.ReportEarly, tell_and_cancel)
        with pytest.raises(asyncio.CancelledError):
            await restores[1]
        ready = await restores[0]
        with pytest.raises(LayersLost, match="cancelled by the caller"):
            await ready.wait_layer(1)
        with pytest.raises(RequestFailed):
            await ready.wait_layer(0)
        for gate in gates:
            gate.open()
        async with expected("the end of everything", limit_s=30.0):
            await world.settle(members)
        assert [state_of(member, int(ready.pages[-1])) for member in members] == [PageState.FREE] * 2


async def test_room_grown_before_ready_is_counted_on_all_ranks_and_nothing_beyond_the_reserve_is_requested(
    world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.instance(2) as members:
        await on_host(world, members)
        gates = gates_of(members, monkeypatch)
        readies = await begin_all(world, members)
        for member, ready in zip(members, readies, strict=True):
            before = ready.pages.tolist()
            with pytest.raises(OutOfPages):
                await member.engine.wait_grown(ready, (len(reserve_of(ready)) + 2) * world.PAGE_SIZE)
            assert ready.pages.tolist() == before
            assert await member.engine.wait_grown(ready, world.PAGE_SIZE) == [ready.pages[-1]]
        for gate in gates:
            gate.open()
        await asyncio.gather(*(ready.wait_layer(1) for ready in readies))
        await world.finish_all(members, readies, list(range(world.PAGE_SIZE)))
        await world.settle(members)


async def test_callers_that_differ_on_early_are_refused(world: SimpleNamespace) -> None:
    async with world.instance(2) as members:
        both = await asyncio.gather(
            *(begin(world, member, early=member is members[0]) for member in members), return_exceptions=True
        )
        for refused in both:
            assert isinstance(refused, RequestFailed)
            assert "different contents" in str(refused)
        await world.settle(members)


async def test_stages_with_other_numbers_of_layers_report_what_all_of_them_have(
    world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first stage has two layers, the second one three.
    async with world.instance(2, stages=2) as members:
        await on_host(world, members)
        gates, outcomes = gates_of(members, monkeypatch, layers=3), [Outcomes(member) for member in members]
        readies = await begin_all(world, members)
        gates[0].open()
        await outcomes[0].wait(events.CopyEnded)
        gates[1].close(first=2)
        await readies[1].wait_layer(1)
        # The last layer of the first stage comes with READY only, although its copy has ended.
        assert [ready.layers_in_place for ready in readies] == [1, 2]
        gates[1].open()
        await asyncio.gather(readies[0].wait_layer(1), readies[1].wait_layer(2))
        for member, ready in zip(members, readies, strict=True):
            assert_whole(world, member, ready)
        await world.finish_all(members, readies)
        await world.settle(members)


async def test_the_loss_of_a_rank_between_layers_is_the_error_of_the_waiting_layer_and_the_group_forms_again(
    world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.instance(2) as members:
        await on_host(world, members)
        gates = gates_of(members, monkeypatch)
        readies = await begin_all(world, members)
        waiting = asyncio.create_task(readies[0].wait_layer(1))
        # Rank 1 ends without leaving, as a killed process does.
        await runtime_of(members[1].engine).ranks.close()
        with pytest.raises(LayersLost, match="rank 1 is lost"):
            await waiting
        for gate in gates:
            gate.open()
        await members[1].life.aclose()
        members[1] = world.Rank(1, 2, members[0].prefills[0].removeprefix("prefill-0 of "))
        entering = asyncio.create_task(members[1].enter())
        # The new group waits for the caller.
        with pytest.raises(RequestFailed, match="rank 1 is lost"):
            await readies[0].wait_layer(0)
        async with expected("a new group"):
            await entering
            await asyncio.gather(*(member.engine.wait_formed() for member in members))
        again = await world.restore_all(members, "again")
        assert again[0].sources["transfer"] == len(world.PROMPT)
        await world.finish_all(members, again)
        await world.settle(members)


async def test_the_end_of_all_engines_ends_the_waits(world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world.instance(2) as members:
        await on_host(world, members)
        gates = gates_of(members, monkeypatch)
        readies = await begin_all(world, members)
        waits = [asyncio.create_task(ready.wait_layer(1)) for ready in readies]
        outcomes = [Outcomes(member) for member in members]

        async def open_gates() -> None:
            for outcome in outcomes:
                await outcome.wait(events.AbortRequested)
            for gate in gates:
                gate.open()

        opening = asyncio.create_task(open_gates())
    await opening
    ends = await asyncio.gather(*waits, return_exceptions=True)
    assert all(isinstance(end, Exception) for end in ends), ends
    assert all("closed" in str(end) for end in ends), ends
