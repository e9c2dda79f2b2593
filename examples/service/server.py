"""The process of the service: the HTTP server and the decode worker, and their end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
from contextlib import suppress
from functools import partial
from types import FrameType

import torch
import uvicorn
import uvloop

from demo.compute import ComputeThread
from demo.model import PagedModel
from examples.service.api import Api
from examples.service.decode import Batch, DecodeWorker, decode_worker, recomputes
from examples.service.model import load
from examples.service.options import PrefillOptions, ServiceOptions
from examples.service.prefill import DistantPrefill, PrefillChild
from tidekv import (
    AdmissionOptions,
    DecodeEngine,
    DevicePool,
    EngineClosed,
    EngineConfig,
    HostPool,
    JournalOptions,
    MetricsOptions,
    NixlTransport,
    open_storage,
    trace_requests,
)


class DrainingServer(uvicorn.Server):
    """Stops once the worker has drained. A second signal stops it at once, as in uvicorn."""

    def __init__(self, config: uvicorn.Config, worker: DecodeWorker, options: ServiceOptions) -> None:
        super().__init__(config)
        self._worker = worker
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._must_stop = asyncio.Event()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start draining; replaces uvicorn's own signal handler."""
        if self._must_stop.is_set():
            self.should_exit = self.force_exit = True
        self._loop.call_soon_threadsafe(self._must_stop.set)

    async def run_until_drained(self, listener: socket.socket) -> None:
        """Serve until a signal arrives and every accepted request is answered."""
        async with asyncio.TaskGroup() as tasks:
            draining = tasks.create_task(self._stop_when_drained(), name="draining")
            await self.serve(sockets=[listener])
            draining.cancel()

    async def _stop_when_drained(self) -> None:
        await self._must_stop.wait()
        options, engine = self._options, self._worker.engine
        await self._worker.drain(options.drain_timeout_s)
        with suppress(EngineClosed):  # Then the worker's own end says why.
            if options.drain_to:
                await engine.drain(0, to=options.drain_to, hand_s=options.drain_to_s)
            await engine.drain(0, store_s=options.drain_store_s)
        self.should_exit = True


async def serve(options: ServiceOptions, listener: socket.socket) -> None:
    """Run the service until a signal arrives and the worker has drained. Closes the listener."""
    with ComputeThread("decode") as compute:
        await _serve(options, listener, compute)


async def _serve(options: ServiceOptions, listener: socket.socket, compute: ComputeThread) -> None:
    of_prefill = PrefillOptions(
        model=options.model,
        page_size=options.page_size,
        num_pages=4 * options.device_pages,
        storage=options.prefill_storage,
        read_pages=options.host_pages if options.prefill_reads else 0,
    )
    prefill_worker = DistantPrefill(options.prefill) if options.prefill else PrefillChild(of_prefill)
    async with asyncio.TaskGroup() as tasks:
        # The child loads its copy of the model while this process loads its own.
        keeping = tasks.create_task(prefill_worker.run(), name="prefill")
        served = await asyncio.to_thread(partial(load, options.model, page_size=options.page_size))
        device = DevicePool.allocate(served.layout, options.device_pages)
        pool = PagedModel(served.llama, device)
        engine = DecodeEngine(
            EngineConfig(
                model=served.fingerprint,
                vocabulary=served.vocabulary,
                admission=AdmissionOptions(queue_max=options.queue_max),
                metrics=MetricsOptions(listen="127.0.0.1:0"),
                journal=JournalOptions(path=options.journal or None),
                kv_events=options.events(),
                cache_peers=options.peers(),
                recompute_threshold=options.recompute_threshold,
            ),
            device=device,
            host=HostPool.allocate(served.layout, options.host_pages, path=options.host_path or None),
            storage=open_storage(options.storage) if options.storage else None,
            transport=NixlTransport(
                name=options.name,
                secret=os.environ.get("TIDEKV_SECRET", ""),
                # A child's address comes from this program.
                dials=[*options.prefill, *options.dials()] if options.prefill else None,
            ),
        )
        if options.recompute_threshold:
            engine.recompute_with(recomputes(pool, compute))
        batch = Batch(pool, compute, batch_max=options.batch_max)
        async with decode_worker(
            engine,
            batch,
            served,
            prefill_worker,
            name=options.name,
            device_pages=options.device_pages,
            layer_by_layer=options.layer_by_layer,
        ) as worker:
            if provider := options.tracer_provider():
                trace_requests(engine, provider)
            config = uvicorn.Config(
                Api(worker, storage=options.storage).app(), lifespan="off", log_level="warning", access_log=False
            )
            server = DrainingServer(config, worker, options)
            await prefill_worker.is_up.wait()
            # A full collection would visit all that torch imports, and stop the loop for some tenths of a second.
            gc.collect()
            gc.freeze()
            # uvicorn sets these when it serves; a supervisor may stop the service as soon as it has read the address.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, server.handle_exit)
            address, bound = listener.getsockname()[:2]
            print(f"serving {served.name} at http://{address}:{bound}", flush=True)
            await server.run_until_drained(listener)
        keeping.cancel()


def run(options: ServiceOptions, listener: socket.socket) -> None:
    """Run the service on an event loop of its own."""
    torch.set_num_threads(1)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(options, listener))
