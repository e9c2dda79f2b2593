"""A chat and completion service whose decode worker embeds tidekv: `python -m examples.service`.

    curl localhost:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Who are you?"}]}'
    curl localhost:8000/v1/completions -d '{"prompt": "Once upon a time", "max_tokens": 32, "stream": true}'

This process is the HTTP server and the decode worker. The prefill worker is a child of it, or runs elsewhere
(`--prefill HOST:PORT`). SIGTERM drains: accepted requests are answered, new ones are refused with status 503.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from functools import partial
from types import FrameType
from typing import Annotated

import torch
import typer
import uvicorn
import uvloop

from examples.service.api import Api
from examples.service.decode import DecodeWorker, decode_worker
from examples.service.model import load
from examples.service.prefill import DistantPrefill, PrefillChild, PrefillOptions
from tidekv import (
    AdmissionOptions,
    DecodeEngine,
    DevicePool,
    EngineConfig,
    HostPool,
    InvalidConfig,
    JournalOptions,
    MetricsOptions,
    NixlTransport,
    StorageFailed,
    open_storage,
)
from tidekv.engine.demo.model import PagedModel


class DrainingServer(uvicorn.Server):
    """Stops once the worker has drained. A second signal stops it at once, as in uvicorn."""

    def __init__(self, config: uvicorn.Config, worker: DecodeWorker, *, drain_timeout_s: float) -> None:
        super().__init__(config)
        self._worker = worker
        self._drain_timeout_s = drain_timeout_s
        self._loop = asyncio.get_running_loop()
        self._is_told = asyncio.Event()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start draining; replaces uvicorn's own signal handler."""
        if self._is_told.is_set():
            self.should_exit = self.force_exit = True
        self._loop.call_soon_threadsafe(self._is_told.set)

    async def run_until_drained(self, listener: socket.socket) -> None:
        """Serve until a signal arrives and every accepted request is answered."""
        async with asyncio.TaskGroup() as tasks:
            draining = tasks.create_task(self._stop_when_drained(), name="draining")
            await self.serve(sockets=[listener])
            draining.cancel()

    async def _stop_when_drained(self) -> None:
        await self._is_told.wait()
        await self._worker.drain(self._drain_timeout_s)
        self.should_exit = True


async def serve(
    *,
    host: str,
    port: int,
    model: str,
    prefill: str,
    page_size: int,
    device_pages: int,
    host_pages: int,
    storage: str,
    batch_max: int,
    queue_max: int,
    drain_timeout_s: float,
    journal: str,
) -> None:
    """Run the service until a signal arrives and the worker has drained."""
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise InvalidConfig(f"cannot listen as --host and --port say: {error.strerror}") from error
    options = PrefillOptions(model=model, page_size=page_size, num_pages=4 * device_pages)
    prefill_worker = DistantPrefill(prefill) if prefill else PrefillChild(options)
    async with asyncio.TaskGroup() as tasks:
        # The child loads its copy of the model while this process loads its own.
        keeping = tasks.create_task(prefill_worker.run(), name="prefill")
        served = await asyncio.to_thread(partial(load, model, page_size=page_size))
        device = DevicePool.allocate(served.layout, device_pages)
        engine = DecodeEngine(
            EngineConfig(
                model=served.fingerprint,
                vocabulary=served.vocabulary,
                admission=AdmissionOptions(queue_max=queue_max),
                metrics=MetricsOptions(listen="127.0.0.1:0"),
                journal=JournalOptions(path=journal or None),
            ),
            device=device,
            host=HostPool.allocate(served.layout, host_pages),
            storage=open_storage(storage) if storage else None,
            transport=NixlTransport(
                name="decode-0", secret=os.environ.get("TIDEKV_SECRET", ""), dials=[prefill] if prefill else []
            ),
        )
        pool = PagedModel(served.llama, device)
        async with decode_worker(
            engine, pool, served, prefill_worker, device_pages=device_pages, batch_max=batch_max
        ) as worker:
            config = uvicorn.Config(Api(worker).app(), lifespan="off", log_level="warning", access_log=False)
            server = DrainingServer(config, worker, drain_timeout_s=drain_timeout_s)
            await prefill_worker.is_up.wait()
            # uvicorn sets these when it serves; a supervisor may stop the service as soon as it has read the address.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, server.handle_exit)
            address, bound = listener.getsockname()[:2]
            print(f"serving {served.name} at http://{address}:{bound}", flush=True)
            await server.run_until_drained(listener)
        keeping.cancel()


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on. 0 uses any free port.")] = 8000,
    model: Annotated[str, typer.Option(help="Model directory. Empty uses a tiny Llama with random weights.")] = "",
    prefill: Annotated[str, typer.Option(help="Address of a running prefill worker. Empty starts one.")] = "",
    page_size: Annotated[int, typer.Option(help="Tokens per page, the same in both workers.")] = 16,
    device_pages: Annotated[int, typer.Option(help="Pages of device memory (L1).")] = 512,
    host_pages: Annotated[int, typer.Option(help="Pages of host memory (L2).")] = 1024,
    storage: Annotated[str, typer.Option(help="URI of storage (L3), such as file:/var/lib/tidekv?capacity=20GB.")] = "",
    batch_max: Annotated[int, typer.Option(help="Maximum requests computed in one step.")] = 16,
    queue_max: Annotated[int, typer.Option(help="Maximum requests that wait for admission; others get 429.")] = 64,
    drain_timeout_s: Annotated[float, typer.Option(help="Seconds that SIGTERM waits for accepted requests.")] = 30.0,
    journal: Annotated[str, typer.Option(help="Write every event of the engine to this file.")] = "",
) -> None:
    """Serve completions until SIGTERM or Ctrl-C."""
    options = dict(locals())
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(**options))
    except* (InvalidConfig, StorageFailed) as group:
        # A wrong option is one line; everything else keeps its traceback.
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise SystemExit(f"examples.service: {error}") from None


if __name__ == "__main__":
    app()
