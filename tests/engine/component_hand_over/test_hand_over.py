"""Windows and states come with the prompt: right in every byte, asked for once, and given back however it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.inside import calls_of, core_of
from tests.support.waits import LIMIT_S
from tidekv import ComponentPools, DevicePool, InvalidConfig, KVLayout, LoopbackTransport, PrefillPeer, RequestFailed
from tidekv.engine.synthetic.components import SyntheticComponents
from tidekv.transports import wire
from tidekv.transports.loopback import LoopbackNetwork

SIZE = 4
WHOLE = list(range(100, 100 + 6 * SIZE))
"""A prompt that ends on a page boundary, so that its tails can be kept."""

nixl = pytest.param(True, marks=pytest.mark.nixl, id="nixl")
loopback = pytest.param(False, id="loopback")


@pytest.mark.parametrize("over", [loopback, nixl])
@pytest.mark.parametrize("names", [("state", "window"), ("window",), ("state",), ()], ids="+".join)
async def test_prompts_of_all_lengths_come_with_their_tails(
    make_worker: Any, pools: Any, over: bool, names: tuple[str, ...]
) -> None:
    async with (
        asyncio.timeout(LIMIT_S),
        make_worker(components=lambda: [pools[name]() for name in names], nixl=over) as worker,
    ):
        for count in (1, 3, SIZE, 2 * SIZE, 2 * SIZE + 1, 5 * SIZE - 1, 6 * SIZE):
            prompt = [1000 * count + number for number in range(count)]
            ready = await worker.restore(f"r{count}", prompt)
            await worker.finish(ready, prompt)
        await worker.assert_nothing_held()


def watch_promises(worker: Any) -> list[wire.Promise]:
    seen: list[wire.Promise] = []

    def loses(sender: str, message: wire.Message) -> bool:
        if isinstance(message, wire.Promise):
            seen.append(message)
        return False

    worker.network.loses = loses
    return seen


def asked(promise: wire.Promise) -> dict[str, tuple[int, int]]:
    return {tail.component: (tail.first, len(tail.pages or b"") // 4) for tail in promise.component_pages or ()}


async def test_what_is_kept_is_not_asked_for_again(make_worker: Any) -> None:
    async with asyncio.timeout(LIMIT_S), make_worker() as worker:
        promises = watch_promises(worker)
        ready = await worker.restore("first", WHOLE)
        await worker.finish(ready, WHOLE)
        # The same again: everything is here, and prefill is asked for its word alone.
        again = await worker.restore("again", WHOLE)
        await worker.finish(again, WHOLE)
        # It goes on: of the window what lies behind the pages that are here, and the record of the new end.
        longer = [*WHOLE, *range(500, 500 + SIZE + 1)]
        ready = await worker.restore("longer", longer)
        await worker.finish(ready, longer)
        assert [promise.decode_prefix_len for promise in promises] == [0, 24, 24]
        assert [asked(promise) for promise in promises] == [
            {"ssm": (5, 1), "swa": (3, 3)},
            {"ssm": (6, 0), "swa": (6, 0)},
            {"ssm": (7, 1), "swa": (6, 2)},
        ]
        assert longer[: 6 * SIZE] == WHOLE and len(ready.component_pages["swa"].pages) == 4
        await worker.assert_nothing_held()


async def test_without_components_nothing_is_said_of_any(make_worker: Any) -> None:
    async with asyncio.timeout(LIMIT_S), make_worker(components=list) as worker:
        promises = watch_promises(worker)
        await worker.engine.finish(await worker.restore("r", WHOLE))
        assert [promise.component_pages for promise in promises] == [None]


class HeldComponents:
    """Holds the first write of a tail until it is let go."""

    def __init__(self, worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started = asyncio.Event()
        self.let_go = asyncio.Event()
        worker.network.before_write = self._before
        self._is_closed = False
        fill = SyntheticComponents.fill

        def fill_and_hold(component_pages: SyntheticComponents, *arguments: Any) -> None:
            fill(component_pages, *arguments)
            self._is_closed = not self.started.is_set()

        monkeypatch.setattr(SyntheticComponents, "fill", fill_and_hold)

    async def _before(self, writer: str, target: str, pages: int) -> None:
        if self._is_closed:
            self._is_closed = False
            self.started.set()
            await self.let_go.wait()


def targets(worker: Any, request_id: str) -> dict[str, set[int]]:
    """The pages that the request's prefill may write, by component."""
    return {
        name: set(pages) for name, pages in core_of(worker.engine).request(request_id).component_pages.remote.items()
    }


@pytest.mark.parametrize("way", ["aborted", "cancelled", "deadline", "link lost"])
async def test_a_tail_that_lands_late_hits_nobody_but_the_quarantine(
    make_worker: Any, pools: Any, leave: Any, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    # The pools have room for one request, and for a small one beside it.
    small = [9, 8, 7]
    components = lambda: [pools["state"](2), pools["window"](8)]  # noqa: E731  # Kept next to its only use.
    async with asyncio.timeout(LIMIT_S), make_worker(components=components, heartbeat_s=0.05) as worker:
        held = HeldComponents(worker, monkeypatch)
        options = {"deadline_s": 0.3} if way == "deadline" else {}
        waiting = asyncio.create_task(worker.engine.restore(worker.request("first", WHOLE, **options)))
        await held.started.wait()
        theirs = targets(worker, "first")
        assert {name: len(pages) for name, pages in theirs.items()} == {"ssm": 1, "swa": 3}
        await leave(worker.engine, worker.network, waiting, way)
        assert {name: worker.core()[f"{name}_device_draining"] for name in theirs} == {"ssm": 1, "swa": 3}
        ready = await worker.restore("small", small)
        assert not any(set(ready.component_pages[name].own.tolist()) & pages for name, pages in theirs.items())
        held.let_go.set()
        await worker.engine.wait_settled()
        worker.verify(ready, small)
        assert not any(worker.core()[f"{name}_device_draining"] for name in theirs)
        await worker.finish(ready, small)
        ready = await worker.restore("next", WHOLE)
        await worker.finish(ready, WHOLE)
        await worker.assert_nothing_held()


async def test_without_the_quarantine_a_late_tail_overwrites_its_next_owner(
    make_worker: Any, pools: Any, leave: Any, without_quarantine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above looks for can be seen."""
    there = lambda: [pools["state"]()]  # noqa: E731  # Kept next to its only use.
    async with (
        asyncio.timeout(LIMIT_S),
        make_worker(components=lambda: [pools["state"](1)], prefill_components=there) as worker,
    ):
        held = HeldComponents(worker, monkeypatch)
        waiting = asyncio.create_task(worker.engine.restore(worker.request("first", WHOLE)))
        await held.started.wait()
        await leave(worker.engine, worker.network, waiting, "aborted")
        other = [number + 1 for number in WHOLE]
        try:
            ready = await worker.restore("next", other)
        finally:
            held.let_go.set()
        await calls_of(worker.engine).wait_until(lambda: worker.core().get("frames_late", 0) > 0)
        with pytest.raises(AssertionError):
            worker.verify(ready, other)
        await worker.engine.finish(ready)


async def test_a_prefill_that_forgets_a_tail_fails_the_request_by_name(
    make_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(LIMIT_S), make_worker() as worker:

        async def forgets(*_: object) -> None:
            """Sends no tail at all."""

        monkeypatch.setattr(worker.prefill, "_send_components", forgets)
        with pytest.raises(RequestFailed, match="the pages of component 'ssm' were never sent"):
            await worker.engine.restore(worker.request("r", WHOLE))
        await worker.assert_nothing_held()


async def test_wrong_bytes_of_a_tail_would_be_seen(make_worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fills_another(component_pages: SyntheticComponents, asked: Any, pages: Any, digests: Any) -> None:
        component_pages._kv[asked.component].fill(pages, [bytes(32)] * len(pages))

    async with asyncio.timeout(LIMIT_S), make_worker() as worker:
        monkeypatch.setattr(SyntheticComponents, "fill", fills_another)
        with pytest.raises(AssertionError, match="ssm"):
            await worker.restore("r", WHOLE)


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (lambda pools: [pools["state"]()], "component 'swa': ours is 'a window of 10 tokens, .*', theirs is 'absent'"),
        (lambda pools: [], "component 's.*theirs is 'absent'"),
        (
            lambda pools: [pools["state"](), pools["window"](tokens=12)],
            "window_tokens of component 'swa': ours is 10, theirs is 12",
        ),
        (
            lambda pools: [
                pools["state"](),
                pools["window"](
                    layout=KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32", page_size=SIZE)
                ),
            ],
            "dtype of component 'swa': ours is 'bfloat16', theirs is 'float32'",
        ),
    ],
    ids=["no window", "none", "another window", "another layout"],
)
async def test_unlike_components_are_refused_by_name(make_worker: Any, pools: Any, there: Any, words: str) -> None:
    async with asyncio.timeout(LIMIT_S), make_worker(prefill_components=lambda: there(pools)) as worker:
        with pytest.raises(RequestFailed, match=words):
            await worker.engine.restore(worker.request("r", WHOLE))
        await worker.assert_nothing_held()


def test_a_peer_names_components_that_make_no_sense(pools: Any) -> None:
    full = DevicePool.allocate(KVLayout(num_layers=1, num_kv_heads=2, head_dim=8, dtype="float32", page_size=8), 4)

    def peer(*components: ComponentPools, device: Any = full) -> PrefillPeer:
        return PrefillPeer(
            device=device, components=components, transport=LoopbackTransport("prefill-0", LoopbackNetwork())
        )

    with pytest.raises(InvalidConfig, match="component 'swa' has pages of 4 tokens, the full pool of 8"):
        peer(pools["window"]())
    with pytest.raises(InvalidConfig, match="component 'ssm' is given 2 times"):
        peer(pools["state"](), pools["state"]())
    with pytest.raises(InvalidConfig, match="components go with a DevicePool, not with object"):
        peer(pools["state"](), device=object())
