"""Prefill worker, a process of its own, and its supervision.

On another machine: `python -m examples.service.prefill '{"listen": "0.0.0.0:7000"}'`, with the options of
`PrefillOptions`; and `python -m examples.service --prefill HOST:7000`. Both need the same TIDEKV_SECRET in their
environment.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections import deque
from collections.abc import Sequence

import msgspec
import torch
import uvloop

from demo.compute import ComputeThread
from demo.model import PagedModel
from demo.model_prefill import ModelPrefill
from demo.prefix_pages import PrefixPages
from examples.service.model import load
from examples.service.options import PrefillOptions
from tidekv import (
    CachePeerOptions,
    DecodeEngine,
    DevicePool,
    EngineConfig,
    HostPool,
    InvalidConfig,
    NixlTransport,
    PrefillConfig,
    PrefillPeer,
    StorageOptions,
    open_storage,
)

RESTART_PAUSE_S = 0.5
CHUNK_PAGES = 4


async def serve(options: PrefillOptions) -> None:
    """Compute prompts and send their KV until SIGTERM."""
    model = load(options.model, page_size=options.page_size)
    pool = DevicePool.allocate(model.layout, options.num_pages)
    secret = os.environ.get("TIDEKV_SECRET", "")
    prefixes = PrefixPages(options.num_pages, options.page_size)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    if options.ends_with_stdin:
        loop.add_reader(sys.stdin, ended.set)
    with ComputeThread("prefill") as compute:
        worker = ModelPrefill(
            PagedModel(model.llama, pool), prefixes, compute, chunk_tokens=CHUNK_PAGES * options.page_size
        )
        # `on_room` runs for each prompt that decode requests; see ModelPrefill.serve for the use of a room.
        peer = PrefillPeer(
            PrefillConfig(listen=options.listen, model=model.fingerprint),
            device=pool,
            transport=NixlTransport(name=options.name, secret=secret),
            on_room=worker.serve,
            storage=open_storage(options.storage) if options.storage else None,
        )
        if options.read_pages:
            peer.read_with(
                DecodeEngine(
                    EngineConfig(
                        model=model.fingerprint,
                        device="lent",
                        cache_peers=CachePeerOptions(enabled=True),
                        storage=StorageOptions(prefetch_threshold_tokens=options.page_size),
                    ),
                    device=pool,
                    host=HostPool.allocate(model.layout, options.read_pages),
                    transport=NixlTransport(name=f"{options.name}-reader", secret=secret, dials=options.read_dials),
                )
            )
            worker.read_prefix = peer.read_prefix
        async with peer:
            # A full collection would visit all that torch imports, and stop the loop for some tenths of a second.
            gc.collect()
            gc.freeze()
            print(peer.address, flush=True)
            await ended.wait()


class PrefillChild:
    """Keeps one prefill worker running: if it dies, another one is started on the same address."""

    def __init__(self, options: PrefillOptions) -> None:
        self.address = ""
        self.pid = 0
        self.starts = 0
        self.is_up = asyncio.Event()
        self._options = options

    def take_addresses(self) -> tuple[str, ...]:
        """Return the one address; see `DistantPrefill`."""
        return (self.address,)

    async def run(self) -> None:
        """Start workers one after the other until cancelled, and then stop the last one."""
        while True:
            listen = self.address or self._options.listen
            options = msgspec.structs.replace(self._options, listen=listen, ends_with_stdin=True)
            command = (sys.executable, "-m", __name__, msgspec.json.encode(options).decode())
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                if line := await process.stdout.readline():
                    self.address, self.pid = line.decode().strip(), process.pid
                    self.starts += 1
                    self.is_up.set()
                code = await process.wait()
                print(f"prefill worker exited with {code}; starting another one", file=sys.stderr, flush=True)
            finally:
                self.is_up.clear()
                # Closing stdin makes the worker exit.
                process.stdin.close()
                await process.wait()
            await asyncio.sleep(RESTART_PAUSE_S)


class DistantPrefill:
    """One or several prefill workers that are started and supervised elsewhere."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.address = ", ".join(addresses)
        self.pid = self.starts = 0
        self._order = deque(addresses)
        self.is_up = asyncio.Event()
        self.is_up.set()

    def take_addresses(self) -> tuple[str, ...]:
        """Return the addresses in the order in which a request tries them; each request begins with another one."""
        self._order.rotate(-1)
        return tuple(self._order)

    async def run(self) -> None:
        """Return at once: there is nothing to supervise."""


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(msgspec.json.decode(sys.argv[1], type=PrefillOptions)))
    except (InvalidConfig, msgspec.MsgspecError) as error:
        sys.exit(f"examples.service.prefill: {error}")
