"""A chat and completion service whose decode worker embeds tidekv: `python -m examples.service`.

    curl localhost:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Who are you?"}]}'
    curl localhost:8000/v1/completions -d '{"prompt": "Once upon a time", "max_tokens": 32, "stream": true}'

This process is the HTTP server and the decode worker. The prefill worker is a child of it, or one or several run
elsewhere (`--prefill HOST:PORT`). SIGTERM drains: accepted requests are answered, new ones are refused with status 503.
"""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from examples.service.options import ServiceOptions
from tidekv import InvalidConfig, StorageFailed

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on. 0 uses any free port.")] = 8000,
    model: Annotated[str, typer.Option(help="Model directory. Empty uses a tiny Llama with random weights.")] = "",
    prefill: Annotated[
        list[str], typer.Option(help="Address of a running prefill worker; repeat it for several. None starts one.")
    ] = [],  # noqa: B006  # Typer makes a list of its own.
    name: Annotated[
        str, typer.Option(help="Name of this worker, unique among those of a prefill worker.")
    ] = "decode-0",
    page_size: Annotated[int, typer.Option(help="Tokens per page, the same in both workers.")] = 16,
    device_pages: Annotated[int, typer.Option(help="Pages of device memory (L1).")] = 512,
    host_pages: Annotated[int, typer.Option(help="Pages of host memory (L2).")] = 1024,
    host_path: Annotated[
        str, typer.Option(help="File of L2, such as /dev/shm/tidekv: its pages outlive a restart. Empty: none.")
    ] = "",
    peer: Annotated[
        list[str],
        typer.Option(help="Address at which another service shares its host memory; repeat it for several."),
    ] = [],  # noqa: B006  # As above.
    peer_allow: Annotated[
        list[str],
        typer.Option(help="Address that kv.fetch in a request's kv_hints may name, such as 10.0.0.0/24:7100."),
    ] = [],  # noqa: B006  # As above.
    peer_listen: Annotated[
        str, typer.Option(help="Address at which other services read the host memory of this one. Empty: none.")
    ] = "",
    storage: Annotated[str, typer.Option(help="URI of storage (L3), such as file:/var/lib/tidekv?capacity=20GB.")] = "",
    prefill_storage: Annotated[
        str,
        typer.Option(help="URI of storage to which the prefill worker started here writes each prompt it computes."),
    ] = "",
    prefill_reads: Annotated[
        bool,
        typer.Option(help="The prefill worker started here reads what this service has of a prompt, answers included."),
    ] = False,
    batch_max: Annotated[int, typer.Option(help="Maximum requests computed in one step.")] = 16,
    queue_max: Annotated[int, typer.Option(help="Maximum requests that wait for admission; others get 429.")] = 64,
    drain_timeout_s: Annotated[float, typer.Option(help="Seconds that SIGTERM waits for accepted requests.")] = 30.0,
    drain_store_s: Annotated[
        float, typer.Option(help="Seconds for which SIGTERM then stores what --storage lacks, for a successor.")
    ] = 0.0,
    drain_to: Annotated[
        str,
        typer.Option(help="--peer-listen address of a service that SIGTERM then hands the cache over to. Empty: none."),
    ] = "",
    drain_to_s: Annotated[float, typer.Option(help="Seconds for that.")] = 30.0,
    recompute_threshold: Annotated[
        int, typer.Option(help="Tokens of a prompt that this worker computes itself rather than ask prefill.")
    ] = 0,
    layer_by_layer: Annotated[
        bool, typer.Option(help="Begin the first step of a lone request while its later layers come from host memory.")
    ] = False,
    journal: Annotated[str, typer.Option(help="Write every event of the engine to this file.")] = "",
    traces: Annotated[
        bool, typer.Option(help="Make an OpenTelemetry span of each request; run under opentelemetry-instrument.")
    ] = False,
    kv_events: Annotated[str, typer.Option(help="ZMQ endpoint at which routers hear what is cached here.")] = "",
    kv_events_replay: Annotated[str, typer.Option(help="ZMQ endpoint for batches that a router has missed.")] = "",
    routers: Annotated[
        list[str], typer.Option("--router", help="Router that listens to the events; repeat it for several.")
    ] = ["vllm-router"],  # noqa: B006  # As above.
) -> None:
    """Serve completions until SIGTERM or Ctrl-C."""
    options = ServiceOptions(**locals())
    logging.basicConfig(level=logging.WARNING)
    try:
        options.check()
        listener = options.listen()
        # After the checks: torch and the servers take seconds to import.
        from examples.service.server import run

        run(options, listener)
    except* (InvalidConfig, StorageFailed) as group:
        # A wrong option is one line; everything else keeps its traceback.
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise SystemExit(f"examples.service: {error}") from None


if __name__ == "__main__":
    app()
