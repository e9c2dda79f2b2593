"""Pages of a window and a state that a host engine lends and offers with those of the full KV, byte by byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engine.components.conftest import FULL, SIZE, WINDOW_TOKENS, Worker, component
from tests.support.configs import engine_config
from tests.support.fault_hooks import WriteGate
from tests.support.inside import calls_of, core_of, runtime_of
from tests.support.waits import LEASE_S, PATIENT
from tidekv import (
    ComponentPools,
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    EngineThread,
    HostPool,
    InvalidRequest,
    LoopbackTransport,
    OfferedPages,
    PrefillConfig,
    PrefillPeer,
    Replayer,
    RequestFailed,
    open_storage,
)
from tidekv.backends.keys.chain import pack_tokens
from tidekv.backends.storage.base import Storage
from tidekv.engine.decode.values import RestoredPages
from tidekv.engine.synthetic.components import component_digest
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.engine.synthetic.prefill import SyntheticPrefill
from tidekv.states.component_specs import ComponentKind
from tidekv.transports.loopback import LoopbackNetwork

PROMPT = list(range(100, 100 + 6 * SIZE))
PAGES = [40, 3, 31, 7, 19, 28]
WINDOW = [9, 2, 5]
OTHER = [page + 1 for page in PAGES]
LENT = {"window": WINDOW, "state": [6]}
OTHER_LENT = {"window": [10, 1, 4], "state": [3]}
FETCHES = {**PATIENT, "prefetch_threshold_tokens": SIZE}
BOTH: tuple[ComponentKind, ...] = ("window", "state")


@dataclass
class Lender:
    """A host engine, its decode engine and its prefill."""

    engine: DecodeEngine
    device: DevicePool
    components: dict[str, ComponentPools]
    network: LoopbackNetwork
    peer: PrefillPeer

    def request(self, request_id: str, tokens: Sequence[int] = PROMPT, **fields: object) -> DecodeRequest:
        return DecodeRequest(
            **{"request_id": request_id, "tokens": list(tokens), "prefill": "prefill", "send_prompt": True, **fields}
        )

    def lent(self, pages: dict[str, list[int]]) -> dict[str, list[int]]:
        return {name: pages[name] for name in self.components}

    async def restore(
        self,
        request_id: str,
        tokens: Sequence[int] = PROMPT,
        pages: Sequence[int] = PAGES,
        lent: dict[str, list[int]] = LENT,
        have: int = 0,
        **fields: object,
    ) -> RestoredPages:
        """Restore, and verify every byte of every group."""
        lent = self.lent(lent)
        for name, ids in ((name, ids) for name, ids in lent.items() if not have):
            SyntheticKV(self.components[name].device).fill(ids, [b"\x00" * 32] * len(ids))
        request = self.request(request_id, tokens, **fields)
        restored = await self.engine.restore_into(request, pages, have, component_pages=lent)
        assert sum(restored.sources.values()) == restored.restored_tokens
        in_place = -(-restored.restored_tokens // SIZE)
        digests = prompt_digests(pack_tokens(list(tokens)), SIZE)
        assert SyntheticKV(self.device).verify(list(pages[:in_place]), digests[:in_place]) == []
        if restored.is_complete:
            assert self.wrong(tokens, lent) == {}
        return restored

    def wrong(self, tokens: Sequence[int], lent: dict[str, list[int]]) -> dict[str, list[int]]:
        """By component, pages that do not hold what these tokens lead to."""
        digests = prompt_digests(pack_tokens(list(tokens)), SIZE)
        wrong = {}
        for name, ids in lent.items():
            wanted = [component_digest(name, digest) for digest in digests[len(digests) - len(ids) :]]
            if found := SyntheticKV(self.components[name].device).verify(ids, wanted):
                wrong[name] = found
        return wrong

    def offer(
        self, tokens: Sequence[int] = PROMPT, pages: Sequence[int] = PAGES, lent: dict[str, list[int]] = LENT
    ) -> asyncio.Future[OfferedPages]:
        return self.engine.offer(list(tokens), pages, component_pages=self.lent(lent))

    def core(self) -> dict[str, int]:
        return dict(self.engine.statistics()["core"])

    async def expect_nothing_held(self) -> None:
        await self.engine.wait_settled()
        self.engine.check()
        for name, balance in self.engine.balance().items():
            assert (balance.owned, balance.draining, balance.protected) == (0, 0, 0), name


MakeLender = Callable[..., AbstractAsyncContextManager[Lender]]


@pytest.fixture
def lender() -> MakeLender:
    """Opens a host engine with its prefill."""

    @asynccontextmanager
    async def open_lender(
        *kinds: ComponentKind,
        host_pages: int = 16,
        component_host_pages: int = 16,
        storage: str | Storage | None = None,
        journal: Path | None = None,
        window_tokens: int = WINDOW_TOKENS,
        **settings: object,
    ) -> AsyncIterator[Lender]:
        network, chosen = LoopbackNetwork(), kinds or BOTH
        device, prefill_pool = DevicePool.allocate(FULL, 48), DevicePool.allocate(FULL, 48)
        theirs = tuple(component(kind, 24, 0, window_tokens) for kind in chosen)
        ours = tuple(component(kind, 16, component_host_pages, window_tokens) for kind in chosen)
        async with (
            PrefillPeer(
                PrefillConfig(listen="prefill", lease_s=LEASE_S),
                device=prefill_pool,
                transport=LoopbackTransport("prefill-0", network),
                components=theirs,
                on_room=SyntheticPrefill(prefill_pool, chunk_pages=3, components=theirs).serve,
            ) as peer,
            DecodeEngine(
                engine_config(
                    journal_path=None if journal is None else str(journal), device="lent", **{**FETCHES, **settings}
                ),
                device=device,
                host=HostPool.allocate(FULL, host_pages) if host_pages else None,
                components=ours,
                storage=open_storage(storage) if isinstance(storage, str) else storage,
                transport=LoopbackTransport("decode-0", network),
            ) as engine,
        ):
            yield Lender(engine, device, {pools.name: pools for pools in ours}, network, peer)

    return open_lender


@pytest.mark.parametrize("kinds", [("window",), ("state",), BOTH])
async def test_each_tier_fills_the_lent_pages_of_every_group(lender, tmp_path: Path, kinds) -> None:
    journal = tmp_path / "run.journal"
    async with lender(*kinds, storage="memory:", journal=journal) as made:
        assert (await made.restore("r1")).sources["transfer"] == len(PROMPT)
        assert await made.offer() == OfferedPages(written=6, present=0, declined=0)
        assert await made.offer() == OfferedPages(written=0, present=6, declined=0)
        await made.engine.wait_settled()
        from_host = await made.restore("r2", pages=OTHER, lent=OTHER_LENT)
        assert from_host.sources == {"l1": 0, "l2": len(PROMPT), "l3": 0, "transfer": 0}
        await made.engine.flush(("l2",))
        from_storage = await made.restore("r3", pages=OTHER, lent=OTHER_LENT)
        assert from_storage.sources == {"l1": 0, "l2": 0, "l3": len(PROMPT), "transfer": 0}
        assert from_storage.first_token is not None and from_storage.is_complete
        # Prefill has sent no page but those of the first restore.
        assert made.core()["extends"] == 0
        longer = [*PROMPT, 1, 2]
        more = await made.restore("r4", longer, [*OTHER, 12], {"window": [7, 11, 12], "state": [8]})
        assert more.sources == {"l1": 0, "l2": len(PROMPT), "l3": 0, "transfer": 2}
        await made.expect_nothing_held()
    assert Replayer(journal).run().complete


async def test_pages_of_a_draft_are_a_window_as_long_as_the_longest_prompt(lender) -> None:
    async with lender("window", storage="memory:", window_tokens=10 * SIZE) as made:
        ours, other = {"window": [9, 2, 5, 12, 0, 7]}, {"window": [1, 3, 4, 6, 8, 10]}
        await made.restore("r1", lent=ours)
        await made.offer(lent=ours)
        await made.engine.wait_settled()
        assert (await made.restore("r2", pages=OTHER, lent=other)).sources["l2"] == len(PROMPT)
        await made.engine.flush(("l2",))
        assert (await made.restore("r3", pages=OTHER, lent=other)).sources["l3"] == len(PROMPT)
        assert made.core()["extends"] == 0
        # The hit of the host engine ends anywhere, since the draft has its pages before that as well.
        held = await made.restore("r4", pages=OTHER, lent=other, have=4 * SIZE)
        assert held.sources == {"l1": 4 * SIZE, "l2": 2 * SIZE, "l3": 0, "transfer": 0}
        await made.expect_nothing_held()


async def test_pages_that_the_host_engine_holds_are_not_touched_in_any_group(lender) -> None:
    async with lender() as made:
        await made.restore("r1")
        longer = [*PROMPT, 1, 2, 3, 4]
        # Of the three positions that the longer prompt's window needs, the first two are the hit.
        lent = {"window": [*WINDOW[1:], 11], "state": [7]}
        together = await asyncio.gather(
            made.restore("r2", longer, [*PAGES, 12], lent, have=len(PROMPT)),
            made.restore("r3", longer, [*PAGES, 13], {"window": [*WINDOW[1:], 12], "state": [8]}, have=len(PROMPT)),
        )
        assert [each.sources["l1"] for each in together] == [len(PROMPT)] * 2
        await made.expect_nothing_held()


async def test_both_modes_read_what_the_other_has_stored(lender, worker, tmp_path: Path) -> None:
    place = f"file:{tmp_path}/l3?capacity=64MiB"
    async with lender(storage=place) as made:
        await made.restore("r1")
        await made.offer()
        await made.engine.wait_settled()
    async with worker(storage=place, **FETCHES) as owned:
        assert isinstance(owned, Worker)
        other = [7] * SIZE
        assert await owned.answer("r2", PROMPT, [1, 2, 3, 4, 5]) == {"l3": len(PROMPT)}
        assert owned.engine.statistics()["snapshots"]["state"]["hits_storage"] == 1
        kept = [*other, *range(SIZE)]
        await owned.answer("r3", other, [*range(SIZE), 9])
    async with lender(storage=place) as made:
        back = await made.restore("r4", kept, OTHER[:2], {"window": [4, 5], "state": [3]})
        assert back.sources["l3"] == len(kept)
        assert made.engine.statistics()["snapshots"]["state"]["hits_storage"] == 1
        await made.expect_nothing_held()


@pytest.mark.parametrize("name", BOTH)
async def test_component_pages_that_storage_has_lost_extend_the_transfer(lender, name: str) -> None:
    async with lender(storage="memory:") as made:
        await made.restore("r1")
        await made.offer()
        await made.engine.wait_settled()
        await made.engine.flush(("l2",))
        kept = runtime_of(made.engine).storage_in_use.component_pages[name]

        async def get_into(keys: Sequence[bytes], pages: Sequence[int], **rest: object) -> list[bool]:
            return [False] * len(keys)

        kept.get_into = get_into
        restored = await made.restore("r2", pages=OTHER, lent=OTHER_LENT)
        assert restored.sources["l3"] == len(PROMPT)
        assert made.core()["extends"] == 1
        assert made.core()["sent_back"] == 0
        await made.expect_nothing_held()


async def test_damaged_component_pages_in_host_memory_extend_the_transfer(lender) -> None:
    async with lender(page_checksums=True) as made:
        await made.restore("r1")
        await made.offer()
        index = core_of(made.engine).state.components
        assert index is not None
        (page,) = (page for node in index.host["state"].nodes() for page in index.host["state"].pages_of(node).values())
        host = made.components["state"].host
        assert host is not None
        host.page(page)[0] ^= 1
        restored = await made.restore("r2", pages=OTHER, lent=OTHER_LENT)
        assert restored.sources["l2"] == len(PROMPT)
        assert made.core()["extends"] == 1
        assert made.core()["l2_damaged"] == 1
        await made.expect_nothing_held()


async def test_an_abort_returns_the_pages_of_every_group_when_the_writer_has_stopped(lender) -> None:
    async with lender() as made:
        gate = WriteGate(made.network)
        call = asyncio.create_task(made.restore("r1"))
        await gate.is_reached.wait()
        call.cancel()
        await calls_of(made.engine).wait_until(lambda: not made.engine.states())
        assert not call.done()
        with pytest.raises(InvalidRequest, match="page 2 of component 'window' is lent to request 'r1'"):
            made.engine.offer(PROMPT, OTHER, component_pages={"window": [1, 2, 3]})
        gate.opened.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        await made.expect_nothing_held()
        assert made.core()["window_device_free"] == 16
        assert (await made.restore("r2")).is_complete


async def test_a_passed_deadline_returns_what_the_host_engine_can_continue_from(lender) -> None:
    async with lender() as made:
        await made.restore("r1", PROMPT[: 2 * SIZE], PAGES[:2], {"window": WINDOW[:2], "state": [6]})
        gate = WriteGate(made.network, free=1)
        call = asyncio.create_task(made.restore("r2", have=2 * SIZE, lent={**LENT, "state": [7]}, deadline_s=0.5))
        await gate.is_reached.wait()
        await calls_of(made.engine).wait_until(lambda: not made.engine.states())
        gate.opened.set()
        restored = await call
        # Pages of the full KV have arrived, but the record that belongs to them has not.
        assert (restored.cause, restored.restored_tokens) == ("deadline", 2 * SIZE)
        await made.expect_nothing_held()


async def test_a_component_without_host_room_is_declined_by_name(lender) -> None:
    async with lender(component_host_pages=2) as made:
        await made.restore("r1")
        offered = await made.offer()
        assert offered == OfferedPages(written=6, present=0, declined=0, components_declined=("window",))
        restored = await made.restore("r2", pages=OTHER, lent=OTHER_LENT)
        assert restored.sources["l2"] == len(PROMPT)
        await made.expect_nothing_held()


async def test_component_pages_of_pages_that_are_not_in_host_memory_are_declined(lender) -> None:
    async with lender() as made:
        await made.restore("r1")
        offer = made.engine.offer(PROMPT, PAGES[3:], start_token=3 * SIZE, component_pages=LENT)
        assert await offer == OfferedPages(0, 0, 3, ("window", "state"))
        await made.expect_nothing_held()


async def test_component_pages_join_behind_the_pages_of_an_earlier_offer(lender) -> None:
    async with lender() as made:
        await made.restore("r1")
        first = made.engine.offer(PROMPT[: 4 * SIZE], PAGES[:4])
        second = made.engine.offer(PROMPT, PAGES[4:], start_token=4 * SIZE, component_pages=LENT)
        assert await first == OfferedPages(4, 0, 0)
        assert await second == OfferedPages(2, 0, 0)
        assert (await made.restore("r2", pages=OTHER, lent=OTHER_LENT)).sources["l2"] == len(PROMPT)
        assert made.core()["window_host_cached"] == 3
        await made.expect_nothing_held()


REFUSED = [
    (None, "lacks component 'window', 3 pages"),
    ({"window": WINDOW}, "lacks component 'state', 1 pages"),
    ({**LENT, "draft": [1]}, "no component 'draft'; there are window, state"),
    ({**LENT, "window": WINDOW[:2]}, "component 'window': the end needs 3 pages, not 2"),
    ({**LENT, "window": [9, 9, 5]}, "component 'window': page 9 is named twice"),
    ({**LENT, "state": [16]}, "component 'state': page 16 is not in the device pool, which has pages 0 to 15"),
    ({**LENT, "state": ["x"]}, "component 'state': pages must be a sequence of page numbers"),
    ([1, 2], "component_pages must be a mapping"),
]


@pytest.mark.parametrize(("lent", "words"), REFUSED)
async def test_lent_pages_of_components_are_checked_by_name(lender, lent: object, words: str) -> None:
    async with lender() as made:
        with pytest.raises(InvalidRequest, match=words):
            await made.engine.restore_into(made.request("r1"), PAGES, component_pages=lent)
        assert made.engine.states() == {}
        assert (await made.restore("r1")).is_complete


@pytest.mark.parametrize(
    ("lent", "words"),
    [
        *(each for each in REFUSED if each[0] is not None and "lacks" not in each[1] and "not 2" not in each[1]),
        ({"window": [1, 2, 3, 4]}, "component 'window': the end needs 3 pages, not 4"),
    ],
)
async def test_offered_pages_of_components_are_checked_by_name(lender, lent: object, words: str) -> None:
    async with lender() as made:
        with pytest.raises(InvalidRequest, match=words):
            made.engine.offer(PROMPT, PAGES, component_pages=lent)
        await made.expect_nothing_held()


async def test_a_lost_prefill_returns_the_pages_of_every_group(lender) -> None:
    async with lender() as made:
        gate = WriteGate(made.network, free=1)
        call = asyncio.create_task(made.restore("r1"))
        await gate.is_reached.wait()
        made.network.kill(made.peer._transport.instance)
        gate.opened.set()
        restored = await call
        assert restored.cause.startswith("prefill") and restored.restored_tokens == 0
        await made.expect_nothing_held()
        with pytest.raises(RequestFailed):
            call = asyncio.create_task(made.restore("r2"))
            await asyncio.sleep(0)
            await made.engine.abort("r2")
            await call


def test_the_engine_on_a_thread_lends_pages_of_components(made_parts) -> None:
    parts, start = made_parts
    with EngineThread(DecodeEngine(engine_config(device="lent", **FETCHES), **parts)) as thread:
        stop_prefill = start(thread)
        request = DecodeRequest(request_id="r1", tokens=PROMPT, prefill="prefill", send_prompt=True)
        with pytest.raises(InvalidRequest, match="no component 'draft'"):
            thread.restore_into(request, PAGES, component_pages={**LENT, "draft": [1]})
        thread.restore_into(request, PAGES, component_pages=LENT)
        (restored,) = thread.poll(30.0)
        assert restored.restored.is_complete
        thread.offer(PROMPT, PAGES, component_pages=LENT)
        (offered,) = thread.poll(30.0)
        assert offered.offered == OfferedPages(6, 0, 0)
        stop_prefill()


assert len(WINDOW) == -(-WINDOW_TOKENS // SIZE)
