"""An engine on a thread of its own, and a prefill peer on the same loop; every restore verifies every byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import pytest

from tests.support.configs import engine_config
from tests.support.inside import core_of
from tests.support.waits import LIMIT_S
from tidekv import (
    DecodeRequest,
    DevicePool,
    EngineThread,
    HostPool,
    KVLayout,
    LoopbackTransport,
    PrefillConfig,
    PrefillPeer,
    ReadyRequest,
    Restored,
)
from tidekv.backends.keys.chain import pack_tokens
from tidekv.engine.decode.decode_engine import DecodeEngine
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.engine.synthetic.prefill import SyntheticPrefill
from tidekv.engine.thread.server_streams import ServerStreams
from tidekv.transports.loopback import LoopbackNetwork
from tidekv.transports.prefill.prefill_room import Room

PAGE_SIZE = 4
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=PAGE_SIZE)
PROMPT = list(range(100, 122))  # Five pages of four tokens and a tail of two.
WAIT_S = LIMIT_S


@dataclass
class Rig:
    """An engine's thread, with a prefill peer on the same loop."""

    thread: EngineThread
    device: DevicePool
    peer: PrefillPeer

    def request(self, request_id: str, tokens: Sequence[int] = PROMPT, **options: object) -> DecodeRequest:
        return DecodeRequest(request_id=request_id, tokens=tokens, prefill="prefill", send_prompt=True, **options)

    def outcome(self) -> object:
        """The next outcome, alone."""
        (outcome,) = self.thread.poll(WAIT_S)
        return outcome

    def restore(self, request_id: str, tokens: Sequence[int] = PROMPT, **options: object) -> ReadyRequest:
        ticket = self.thread.submit(self.request(request_id, tokens, **options))
        outcome = self.outcome()
        assert isinstance(outcome, Restored)
        assert (outcome.ticket, outcome.request_id) == (ticket, request_id)
        digests = prompt_digests(pack_tokens(tokens), PAGE_SIZE)
        assert SyntheticKV(self.device).verify(outcome.ready.pages.tolist(), digests) == []
        return outcome.ready

    def tables_of_core(self) -> dict[str, list[int]]:
        """Page tables as the core knows them."""

        async def tables(engine: object) -> dict[str, list[int]]:
            await engine.wait_settled()  # type: ignore[attr-defined]  # Until it has taken all growth.
            requests = core_of(engine).state.requests  # type: ignore[attr-defined]  # The core is what we compare with.
            return {request_id: list(request.held.table) for request_id, request in requests.items()}

        return self.thread.call(tables)

    def assert_nothing_held(self) -> None:
        self.thread.wait_settled()
        core = self.thread.statistics()["core"]
        assert isinstance(core, dict)
        for pool in ("device", "host"):
            assert core[f"{pool}_free"] + core[f"{pool}_cached"] == core[f"{pool}_total"], core
            assert core[f"{pool}_protected"] == 0, core

    def calls(self) -> list[Callable[[], object]]:
        """Every call that there is, on a request that never was."""
        nobody = object.__new__(ReadyRequest)
        nobody.request_id = "nobody"
        thread = self.thread
        return [
            thread.poll,
            lambda: thread.poll(WAIT_S),
            lambda: thread.submit(self.request("late")),
            lambda: thread.grow(nobody),
            lambda: thread.grow_many([nobody]),
            lambda: thread.finish(nobody),
            lambda: thread.retract(nobody),
            lambda: thread.abort("r1"),
            thread.flush,
            thread.drain,
            thread.statistics,
            thread.wait_settled,
        ]


async def ignore_room(room: Room) -> None:
    """A prefill that never answers."""
    await room.received()


@contextmanager
def running_rig(
    *,
    device_pages: int = 64,
    host_pages: int = 128,
    prefill_pages: int = 256,
    answers: bool = True,
    server: ServerStreams | None = None,
    **config: object,
) -> Iterator[Rig]:
    network = LoopbackNetwork()
    device = DevicePool.allocate(LAYOUT, device_pages)
    pool = DevicePool.allocate(LAYOUT, prefill_pages)
    peer = PrefillPeer(
        PrefillConfig(listen="prefill"),
        device=pool,
        transport=LoopbackTransport("prefill-0", network),
        on_room=SyntheticPrefill(pool, chunk_pages=3).serve if answers else ignore_room,
    )
    thread = EngineThread(
        DecodeEngine(
            engine_config(**{"prefetch_threshold_tokens": 0, "close_deadline_s": 2.0, **config}),
            device=device,
            host=HostPool.allocate(LAYOUT, host_pages) if host_pages else None,
            transport=LoopbackTransport("decode-0", network),
        )
    )
    if server is not None:
        thread.follow(server)
    with thread:

        async def start(_: object) -> None:
            await peer.__aenter__()

        async def stop(_: object) -> None:
            await peer.__aexit__(None, None, None)

        thread.call(start)
        try:
            yield Rig(thread, device, peer)
        finally:
            if thread._loop.is_up:
                thread.call(stop)


Running = Callable[..., AbstractContextManager[Rig]]


@pytest.fixture
def running() -> Running:
    """Make rigs: `with running(device_pages=…, answers=…, EngineConfig's fields) as rig`."""
    return running_rig
