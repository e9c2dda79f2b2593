"""A decode engine and a prefill peer in one process, joined by loopback, with KV that shows every wrong byte."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from random import Random

import pytest
import torch

from tests.support import limits, thorough, warm_python
from tests.support.configs import engine_config
from tests.support.inside import calls_of, core_of, runtime_of
from tests.support.waits import LEASE_S, PATIENT, PATIENT_STORE
from tidekv import (
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    HostPool,
    LoopbackTransport,
    RequestFailed,
)
from tidekv.backends.storage.base import Storage
from tidekv.engine.decode.values import ReadyRequest
from tidekv.engine.prefill.prefill_config import PrefillConfig, PromptStoreSettings
from tidekv.states.commands import ReportReady
from tidekv.states.events import AbortRequested
from tidekv.states.handover.rooms import Rooms
from tidekv.states.records.request import RoomRecord
from tidekv.testing import LAYOUT, LoopbackPair, loopback_pair
from tidekv.transports.loopback import LoopbackNetwork

ROOT = Path(__file__).resolve().parent.parent
# Processes that tests start find tests.support as the tests do. A fork server reads its path from the environment.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

# On small tensors torch's threads wait for each other longer than they compute: half of the time of a test. Children
# read it from the environment.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    limits.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(limits.TimeLimits(config), "tidekv-limits")
    thorough.load_profile(config.getoption("markexpr"))
    if config.getoption("numprocesses", None):
        # While the workers collect, so that no test waits for its imports.
        threading.Thread(target=warm_python.executable, daemon=True).start()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector off what imports and collected tests allocate: it stays until the process ends.

    Otherwise each full collection of each test visits it, which takes a tenth of the suite's time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


PAGE_SIZE = LAYOUT.page_size


class Pair(LoopbackPair):
    """The pair that users test with, and what needs the inside of the engine."""

    async def finish(self, ready: ReadyRequest, tokens: Sequence[int], output: Sequence[int]) -> None:
        """Generate `output`: grow, write its KV, and give everything back."""
        await self.generate(ready, output)

    @asynccontextmanager
    async def another_decode(
        self,
        name: str = "decode-1",
        *,
        storage: Storage | None = None,
        device_pages: int = 64,
        host_pages: int = 128,
        **config: object,
    ):  # type: ignore[no-untyped-def]  # As make_pair's.
        """One more decode worker, with pools of its own, of the same prefill worker."""
        device = DevicePool.allocate(LAYOUT, device_pages)
        host = HostPool.allocate(LAYOUT, host_pages) if host_pages else None
        config.setdefault("prefetch_threshold_tokens", 0)
        async with DecodeEngine(
            engine_config(**{**PATIENT, **config}),
            device=device,
            host=host,
            storage=storage,
            transport=LoopbackTransport(name, self.network),
        ) as engine:
            yield Pair(engine, self.peer, self.prefill, device, host, self.network, self.faults)

    def abort_when_ready(self, monkeypatch: pytest.MonkeyPatch, *, before_its_caller: bool) -> None:
        """Have each request aborted when it has become READY: before its caller runs, or right behind it."""
        calls, driver = calls_of(self.engine), runtime_of(self.engine).driver
        tell = calls.tell

        def tell_and_abort(command: object) -> None:
            if isinstance(command, ReportReady):
                abort = AbortRequested(at_s=driver.clock(), request_id=command.request_id)
                if before_its_caller:
                    # `tell` wakes the caller up, which is for a later callback.
                    asyncio.get_running_loop().call_soon(driver.take_now, abort)
                else:
                    driver.post(abort)
            tell(command)

        monkeypatch.setattr(calls, "tell", tell_and_abort)

    def core(self) -> dict[str, int]:
        statistics = self.engine.statistics()["core"]
        assert isinstance(statistics, dict)
        return statistics

    async def assert_nothing_held(self) -> None:
        await self.engine.wait_settled()
        core = self.core()
        for pool in ("device", "host"):
            assert core[f"{pool}_free"] + core[f"{pool}_cached"] == core[f"{pool}_total"], core
            assert core[f"{pool}_protected"] == 0, core
        core_of(self.engine).check()


MakePair = Callable[..., AbstractAsyncContextManager[Pair]]


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    @asynccontextmanager
    async def make(
        *,
        device_pages: int = 64,
        host_pages: int = 128,
        host_path: Path | None = None,
        prefill_pages: int = 256,
        storage: Storage | None = None,
        prefill_storage: Storage | None = None,
        prefill_host: HostPool | None = None,
        prefill_store: PromptStoreSettings | None = None,
        prefill_namespace: str = "",
        **config: object,
    ):  # type: ignore[no-untyped-def]  # Typed by the fixture.
        config.setdefault("prefetch_threshold_tokens", 0)
        async with loopback_pair(
            config=engine_config(**{**PATIENT, **config}),
            device_pages=device_pages,
            host_pages=host_pages,
            host_path=host_path,
            prefill_pages=prefill_pages,
            storage=storage,
            prefill_namespace=prefill_namespace,
            prefill_config=PrefillConfig(lease_s=LEASE_S, store=prefill_store or PromptStoreSettings(**PATIENT_STORE)),
            prefill_parts={"storage": prefill_storage, "host": prefill_host},
        ) as pair:
            yield Pair(pair.engine, pair.peer, pair.prefill, pair.device, pair.host, pair.network, pair.faults)

    yield make


async def some_turns(source: Random, waiting: asyncio.Task[ReadyRequest]) -> None:
    """Let a random number of turns of the loop go by."""
    for _ in range(source.randrange(40)):
        await asyncio.sleep(0)


async def end_at_random(
    engine: DecodeEngine,
    request: DecodeRequest,
    source: Random,
    give_back: Callable[[ReadyRequest], Awaitable[None]],
    *,
    pause: Callable[[Random, asyncio.Task[ReadyRequest]], Awaitable[None]] = some_turns,
    aborted: float = 0.45,
    cancelled: float = 0.45,
) -> str:
    """Run one request that is aborted, cancelled or served, from a random point of its life; return how it ended.

    `aborted` and `cancelled` are shares of all requests; `give_back` releases a request that is served.
    """
    waiting = asyncio.create_task(engine.restore(request))
    await pause(source, waiting)
    way = source.random()
    if way < aborted:
        await engine.abort(request.request_id)
    elif way < aborted + cancelled:
        waiting.cancel()
    try:
        ready = await waiting
    except RequestFailed as failed:
        assert failed.cause == "aborted"
        return "aborted"
    except asyncio.CancelledError:
        return "cancelled"
    if not calls_of(engine).is_live(request.request_id):
        return "aborted when ready"
    await give_back(ready)
    return "served"


EndAtRandom = Callable[..., Awaitable[str]]


@pytest.fixture
def abort_at_random() -> EndAtRandom:
    return end_at_random


@pytest.fixture
def resident_bytes() -> Callable[[], int]:
    """How much memory this process has now."""
    return lambda: int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.fixture
def pages_of() -> Callable[[DecodeEngine, str], list[int]]:
    """The device pages of a request that is being restored, in prompt order, before the engine hands them out."""

    def pages_before_ready(engine: DecodeEngine, request_id: str) -> list[int]:
        core = core_of(engine)
        request = core.request(request_id)
        assert request is not None and request.held.lock is not None
        # What is shared while it is on its way belongs to the tree, the rest to the request.
        return [*core.state.index.device_path(request.held.lock.node), *request.held.own]

    return pages_before_ready


Leaves = Callable[[DecodeEngine, LoopbackNetwork, asyncio.Task[ReadyRequest], str], Awaitable[None]]


@pytest.fixture
def leave() -> Leaves:
    """End the request "first" in one of the ways that tests name, "deadline" by waiting for it."""

    async def leave_by(
        engine: DecodeEngine, network: LoopbackNetwork, waiting: asyncio.Task[ReadyRequest], way: str
    ) -> None:
        if way == "aborted":
            await engine.abort("first")
        elif way == "cancelled":
            waiting.cancel()
        elif way == "link lost":
            network.cut(runtime_of(engine).transport.instance)
        with pytest.raises((RequestFailed, asyncio.CancelledError)):
            await waiting

    return leave_by


@pytest.fixture
def without_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of a room that is left are free at once, even if a peer may still write to them."""
    leave_room = Rooms.leave

    def leave_and_free(self: Rooms, room: RoomRecord, **options: object) -> None:
        leave_room(self, room, **options)
        if room.key in self._draining:
            self._settle(room.key)

    monkeypatch.setattr(Rooms, "leave", leave_and_free)


@pytest.fixture
def warm_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the code under test starts by `sys.executable` has torch when it starts; see `warm_python`."""
    monkeypatch.setattr(sys, "executable", warm_python.executable())


PrefillCommand = Callable[[dict[str, str]], AbstractContextManager[tuple[subprocess.Popen[str], str]]]


@pytest.fixture
def prefill_command() -> PrefillCommand:
    """Start `tidekv prefill` with these variables added to the environment; gives its process and its address."""

    @contextmanager
    def start(environment: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
        process = subprocess.Popen(
            [warm_python.executable(), "-m", "tidekv", "prefill", "--listen", "127.0.0.1:0"],
            env={**os.environ, **environment, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            listening = re.search(r"prefill worker at (\S+),", process.stdout.readline())
            assert listening is not None
            yield process, listening[1]
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()

    return start
