"""Prefill worker in a process of its own, and the line by which its parent starts, queries and stops it.

parent ── PrefillOrder ──▶ child        one JSON object a line, over a socket that the child inherits
parent ◀── PrefillReady ── child
parent ── Ask ──▶ child ── counts ──▶ parent, any number of times
parent closes the socket: the child closes its peer and ends. A child that ends closes the socket.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec
import torch
import uvloop

from demo.compute import ComputeThread
from demo.link import ThrottledTransport
from demo.model import ModelShape, PagedModel, build_llama
from demo.model_prefill import ModelPrefill
from demo.prefix_pages import PrefixPages
from tidekv.backends.component_pools import ComponentPools
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.layout import KVLayout, LayerGroup
from tidekv.backends.page_layout import PageLayout
from tidekv.engine.prefill.prefill_config import PrefillConfig
from tidekv.engine.prefill.prefill_peer import PrefillPeer
from tidekv.engine.synthetic.prefill import SyntheticPrefill
from tidekv.states.component_specs import ComponentKind
from tidekv.states.errors import TransferFailed
from tidekv.transports.nixl.transport import NixlTransport

CHECKOUT = str(Path(__file__).resolve().parents[1])
START_TIMEOUT_S = 180.0
END_TIMEOUT_S = 15.0
LINE_BYTES_MAX = 1 << 26
"""Maximum length of a line, which may hold a prompt."""


class ComponentOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A window or state that a prefill worker is to have."""

    name: str
    kind: ComponentKind
    window_tokens: int = 0
    groups: tuple[LayerGroup, ...]
    num_pages: int

    def pools(self) -> ComponentPools:
        """Allocate its pool."""
        device = DevicePool.allocate(PageLayout(self.groups), self.num_pages)
        return ComponentPools(name=self.name, kind=self.kind, window_tokens=self.window_tokens, device=device)


class PrefillOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a prefill worker. If `model` is None, its KV is synthetic and it may have components."""

    name: str
    fingerprint: str
    layout: KVLayout
    num_pages: int
    chunk_tokens: int
    vocabulary: int
    model: ModelShape | None = None
    device: str = "cpu"
    keep_prefixes: bool = True
    components: tuple[ComponentOrder, ...] = ()
    link_bytes_per_s: float | None = None
    """Speed of the link from this worker; None: as fast as it goes."""


class PrefillReady(msgspec.Struct, frozen=True):
    """The worker is listening."""

    address: str


class Ask(msgspec.Struct, frozen=True):
    """Request counts.

    "forget" first drops kept prefixes; "compute" first computes synthetic KV of the packed tokens.
    """

    what: Literal["counts", "forget", "compute"]
    tokens: bytes = b""


Counts = dict[str, float]


class PrefillProcess:
    """The parent's end, an async context manager. The child runs for the duration of the block."""

    def __init__(self, order: PrefillOrder, *, environment: Mapping[str, str] | None = None) -> None:
        """`environment`: variables of the child beside those of this process."""
        self._order = order
        self._environment = dict(os.environ) | dict(environment or {})
        # The working directory may have another package of this name: the child looks in the checkout only (-P).
        path = self._environment.get("PYTHONPATH")
        self._environment["PYTHONPATH"] = os.pathsep.join(filter(None, [CHECKOUT, path]))
        self.address = ""

    async def __aenter__(self) -> Self:
        """Start the child and wait until it listens. Raises TransferFailed if it does not start."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",
                    "-m",
                    __name__,
                    str(theirs.fileno()),
                    pass_fds=(theirs.fileno(),),
                    env=self._environment,
                )
            except BaseException:
                ours.close()
                raise
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        self._line = asyncio.Lock()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                ready = msgspec.json.decode(await self._call(self._order), type=PrefillReady)
        except BaseException as error:
            await self._end()
            if isinstance(error, TimeoutError):
                raise TransferFailed(
                    f"the prefill worker did not start within {START_TIMEOUT_S:g} s: the machine is too busy, or "
                    "has too little memory"
                ) from error
            raise
        self.address = ready.address
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the line and wait for the child's end; kill it after a timeout."""
        await self._end()

    def signal(self, number: signal.Signals) -> None:
        """Stop, continue or kill the child."""
        self._process.send_signal(number)

    async def counts(self, *, forget: bool = False) -> Counts:
        """Return the child's counts: those of the peer, its pages, and the number of tokens computed."""
        answer = await self._call(Ask("forget" if forget else "counts"))
        return msgspec.json.decode(answer, type=Counts)

    async def compute(self, packed: bytes) -> None:
        """Have the child compute a prompt's synthetic KV, and wait for it."""
        await self._call(Ask("compute", packed))

    async def _call(self, message: msgspec.Struct) -> bytes:
        async with self._line:
            self._writer.write(msgspec.json.encode(message) + b"\n")
            line = await self._reader.readline()
        if not line:
            code = await self._process.wait()
            raise TransferFailed(f"the prefill worker exited with code {code}; see its output above")
        return line

    async def _end(self) -> None:
        self._writer.close()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await self._process.wait()
        except BaseException as error:
            self._process.kill()
            await self._process.wait()
            if not isinstance(error, TimeoutError):
                raise


class DistantPrefill:
    """A prefill worker that is run elsewhere: it has an address but no line for counts."""

    def __init__(self, address: str | Sequence[str]) -> None:
        self.address = address

    async def __aenter__(self) -> Self:
        """Return at once: there is no process to start."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Return at once: there is no process to end."""

    async def counts(self, *, forget: bool = False) -> None:
        """Return None: the counts are unknown."""


@asynccontextmanager
async def prefill_worker(
    order: PrefillOrder,
    *,
    listen: str = "127.0.0.1:0",
    transport: Callable[[], NixlTransport] | None = None,
    lease_s: float = 10.0,
    rooms_max: int = 4096,
    close_deadline_s: float = 5.0,
    bigram_keys: bool = False,
    metrics_listen: str | None = None,
) -> AsyncIterator[tuple[PrefillPeer, ModelPrefill | SyntheticPrefill, PrefixPages]]:
    """Run the prefill worker of an order for the duration of the block."""
    pool = DevicePool.allocate(order.layout, order.num_pages, device=order.device)
    components = [component.pools() for component in order.components]
    with ExitStack() as stack:
        pages = PrefixPages(order.num_pages, order.layout.page_size, keep=order.keep_prefixes)
        worker: ModelPrefill | SyntheticPrefill
        if order.model is not None:
            compute = stack.enter_context(ComputeThread("prefill"))
            build = partial(build_llama, _required(order.model), device=pool.device)
            model = PagedModel(await compute.run(build), pool)
            worker = ModelPrefill(model, pages, compute, chunk_tokens=order.chunk_tokens)
        else:
            chunk_pages = max(1, order.chunk_tokens // order.layout.page_size)
            worker = SyntheticPrefill(
                pool,
                chunk_pages=chunk_pages,
                vocabulary=order.vocabulary,
                keep_prefixes=order.keep_prefixes,
                components=components,
            )
        async with PrefillPeer(
            PrefillConfig(
                listen=listen,
                model=order.fingerprint,
                lease_s=lease_s,
                rooms_max=rooms_max,
                close_deadline_s=close_deadline_s,
                bigram_keys=bigram_keys,
                metrics_listen=metrics_listen,
            ),
            device=pool,
            transport=transport() if transport else _transport(order),
            components=components,
            on_room=worker.serve,
        ) as peer:
            # A full collection visits all that torch imports, for a quarter of a second.
            gc.freeze()
            yield peer, worker, pages


async def serve_line(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Run a prefill worker until the line is closed."""
    order = msgspec.json.decode(await reader.readline(), type=PrefillOrder)
    async with prefill_worker(order) as (peer, worker, pages):
        writer.write(msgspec.json.encode(PrefillReady(peer.address)) + b"\n")
        while line := await reader.readline():
            ask = msgspec.json.decode(line, type=Ask)
            if ask.what == "compute" and isinstance(worker, SyntheticPrefill):
                await worker.compute(ask.tokens)
            elif ask.what == "forget":
                pages.forget()
                if isinstance(worker, SyntheticPrefill):
                    worker.forget()
            counts: Counts = {**peer.statistics()}
            if isinstance(worker, ModelPrefill):
                counts |= {f"pages_{name}": count for name, count in pages.counts().items()}
                counts["tokens_computed"] = worker.tokens_computed
            writer.write(msgspec.json.encode(counts) + b"\n")
    writer.close()


def _transport(order: PrefillOrder) -> NixlTransport:
    if order.link_bytes_per_s is None:
        return NixlTransport(name=order.name)
    return ThrottledTransport(name=order.name, bytes_per_s=order.link_bytes_per_s)


def _required(shape: ModelShape | None) -> ModelShape:
    assert shape is not None
    return shape


async def _main(file_number: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=file_number), limit=LINE_BYTES_MAX)
    await serve_line(reader, writer)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_main(int(sys.argv[1])))
