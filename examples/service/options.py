"""Options of both processes, checked before the imports that take seconds."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from tidekv import CachePeerOptions, InvalidConfig, KVEventsOptions, open_storage
from tidekv.states.validation import SecondsOrZero, checked, host_and_port

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

PAGE_TOKENS_MAX = 1 << 16


class ServiceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the service; see the help of `python -m examples.service`."""

    host: str
    port: int
    model: str
    prefill: list[str]
    name: str
    page_size: int
    device_pages: int
    host_pages: int
    host_path: str
    peer: list[str]
    peer_allow: list[str]
    peer_listen: str
    storage: str
    prefill_storage: str
    prefill_reads: bool
    batch_max: int
    queue_max: int
    drain_timeout_s: float
    drain_store_s: float
    drain_to: str
    drain_to_s: float
    recompute_threshold: int
    layer_by_layer: bool
    journal: str
    traces: bool
    kv_events: str
    kv_events_replay: str
    routers: list[str]

    def events(self) -> KVEventsOptions:
        """Return the options of KV events. Raises InvalidConfig."""
        try:
            return msgspec.convert(
                {
                    "endpoint": self.kv_events or None,
                    "replay": self.kv_events_replay or None,
                    "routers": self.routers,
                },
                KVEventsOptions,
            )
        except msgspec.ValidationError as error:
            raise InvalidConfig(f"--kv-events, --kv-events-replay, --router: {error}") from None

    def peers(self) -> CachePeerOptions:
        """Return the options of host memory that is shared with other services. Raises InvalidConfig."""
        try:
            return CachePeerOptions(
                enabled=bool(self.peer or self.peer_allow or self.peer_listen or self.prefill_reads),
                # The prefill worker that reads is on this machine, and is told the port.
                listen=self.peer_listen or ("127.0.0.1:0" if self.prefill_reads else None),
                ask=tuple(self.peer),
                allow=tuple(self.peer_allow),
            )
        except InvalidConfig as error:
            raise InvalidConfig(f"--peer (ask), --peer-allow, --peer-listen: {error}") from None

    def dials(self) -> list[str]:
        """Return the addresses of other services that this one may dial."""
        return [*self.peers().dials_of(0, 1), *([self.drain_to] if self.drain_to else [])]

    def check(self) -> None:
        """Raise InvalidConfig for an option that the service could not start with."""
        check_model_directory(self.model)
        checked(self.page_size, Annotated[int, Meta(ge=1, le=PAGE_TOKENS_MAX)], "--page-size", InvalidConfig)
        for name in ("device_pages", "host_pages", "batch_max", "queue_max"):
            option = f"--{name.replace('_', '-')}"
            checked(getattr(self, name), Annotated[int, Meta(ge=1)], option, InvalidConfig)
        for name in ("drain_timeout_s", "drain_store_s", "drain_to_s"):
            checked(getattr(self, name), SecondsOrZero, f"--{name.replace('_', '-')}", InvalidConfig)
        checked(self.recompute_threshold, Annotated[int, Meta(ge=0)], "--recompute-threshold", InvalidConfig)
        self.events()
        self.peers()
        if self.drain_to:
            host_and_port(self.drain_to, "--drain-to", InvalidConfig)
            if not self.peer_listen:
                raise InvalidConfig("--drain-to needs --peer-listen, where the other service reads")
        if self.storage:
            open_storage(self.storage)  # Reads the URI; nothing is opened before the engine starts.
        if self.prefill_storage:
            if self.prefill:
                raise InvalidConfig(
                    "--prefill-storage is of the worker started here; give others theirs: see prefill.py"
                )
            open_storage(self.prefill_storage)
        if self.prefill_reads and self.prefill:
            raise InvalidConfig(
                "--prefill-reads is of the worker started here; others have `read_pages`: see prefill.py"
            )
        if self.traces:
            self.tracer_provider()
        directory = Path(self.journal).parent
        if self.journal and not (directory.is_dir() and os.access(directory, os.W_OK)):
            raise InvalidConfig(f"--journal: {directory} is not a directory that this process can write to")

    def tracer_provider(self) -> TracerProvider | None:
        """Return the provider of spans that this process was started with; None without `--traces`."""
        if not self.traces:
            return None
        try:
            from opentelemetry.trace import ProxyTracerProvider, get_tracer_provider
        except ModuleNotFoundError:
            raise InvalidConfig("--traces needs OpenTelemetry: pip install 'tidekv[otel]'") from None
        provider = get_tracer_provider()
        if isinstance(provider, ProxyTracerProvider):
            raise InvalidConfig(
                "--traces: no exporter of spans is set up in this process; start it by opentelemetry-instrument"
            )
        return provider

    def listen(self) -> socket.socket:
        """Return the listening socket. Raises InvalidConfig."""
        try:
            return socket.create_server((self.host, self.port))
        except OSError as error:
            raise InvalidConfig(f"cannot listen as --host and --port say: {error.strerror}") from error


class PrefillOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a prefill worker, passed as one JSON argument."""

    model: str = ""
    listen: str = "127.0.0.1:0"
    name: str = "prefill-0"
    """Unique among the workers that decode workers know."""
    num_pages: int = 1024
    page_size: int = 16
    storage: str = ""
    """URI of storage that computed prompts are written through to; decode workers that share it hit them."""
    read_pages: int = 0
    """Host pages through which the worker reads what decode workers have of a prompt; 0: it computes that."""
    read_dials: list[str] | None = None
    """Addresses of decode workers that it may read from, if they are on other machines (`NixlTransport(dials=…)`)."""
    ends_with_stdin: bool = False
    """Stop when stdin is closed. This also happens if the parent process is killed by SIGKILL."""


def check_model_directory(directory: str) -> None:
    """Raise InvalidConfig if a model directory is given and has no model."""
    if directory and not (Path(directory) / "config.json").is_file():
        raise InvalidConfig(f"{directory} is not a model directory: it has no config.json")
