"""Sections of a worker's configuration. The types are the schema; their docstrings are the documentation.

Nothing here inspects the machine: `check` verifies that directories and memory exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from tidekv.engine.config.engine_config import EngineConfig
from tidekv.engine.config.memory import Memory
from tidekv.engine.config.sizes import parse_memory
from tidekv.states.errors import InvalidConfig, cause_of
from tidekv.states.validation import Options, PositiveCount, Seconds, Text, host_and_port


class CacheSection(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pages and pools of this worker."""

    page_size: PositiveCount = 16
    """Tokens that a page holds: the unit of matching, allocating and moving. Prefill and decode must have the same."""
    device: Text = "cpu"
    """Device of L1: cpu, cuda or cuda:N."""
    l1: str | int = "auto"
    """Size of the device pool (L1); every page of a running request is there."""
    l2: str | int = "auto"
    """Size of the host pool (L2). 0: no host pool, and with it no storage."""
    l2_path: Text = ""
    """File of L2, such as /dev/shm/tidekv-decode: its pages outlive a restart of the worker."""

    def __post_init__(self) -> None:
        super().__post_init__()
        kind, _, number = self.device.partition(":")
        if kind not in ("cpu", "cuda") or (":" in self.device and not (kind == "cuda" and number.isdigit())):
            raise InvalidConfig(f"device must be cpu, cuda or cuda:N, not {self.device!r}")
        if parse_memory(self.l1, what="l1").kind == "ratio":
            raise InvalidConfig(f"l1 cannot be a multiple of itself: {self.l1!r}")
        parse_memory(self.l2, what="l2")

    def pool_pages(self, page_bytes: int, *, device: Memory, host: Memory) -> tuple[int, int]:
        """Return the pages of L1 and L2, for pages of that many bytes; 0 for "auto".

        Raises InvalidConfig for more than is free. On the CPU both pools share the same memory: L1 is sized first.
        """
        l1 = parse_memory(self.l1, what="l1").pages(page_bytes=page_bytes, memory=device, what="cache.l1")
        if self.device == "cpu":
            host = msgspec.structs.replace(host, free_bytes=max(host.free_bytes - l1 * page_bytes, 0))
        size = parse_memory(self.l2, what="l2")
        return l1, size.pages(page_bytes=page_bytes, memory=host, l1_pages=l1, what="cache.l2")


class StorageSection(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The storage tier (L3)."""

    uri: Text = ""
    """URI of the storage engine, such as file:/path?capacity=200GB. Empty: none, or the command's choice."""
    options: dict[str, object] = msgspec.field(default_factory=dict)
    """Further options of the engine, beside those in the URI; passwords belong here."""


class TransportSection(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The links and the bulk transfer between workers."""

    name: Text = ""
    """Name of the worker in logs and at its peers; empty: prefill-0 or decode-0."""
    secret: Text = ""
    """Secret of both ends, also read from TIDEKV_SECRET. Without one prefill listens on loopback only."""
    secret_file: Text = ""
    """File that holds the secret, for mounted secrets; used instead of `secret`."""
    tls_certificate: Text = ""
    """PEM file with this worker's certificate, and its key unless `tls_key` has it. Prefill listens under TLS with it;
    decode presents it.
    """
    tls_key: Text = ""
    """PEM file with the certificate's key, without a password."""
    tls_authority: Text = ""
    """PEM file with the certificates that sign peers'. Decode dials under TLS with it; prefill refuses peers without a
    certificate. Bulk data is not under TLS.
    """
    allow_no_secret: bool = False
    """Let prefill listen on the network without a secret or client certificates: every program that reaches the port
    can read and write this worker's memory.
    """
    announces: tuple[Text, ...] = ()
    """Addresses under which decode workers dial this prefill worker, if connections to it are forwarded."""
    data_network: Literal["auto", "loopback", "any"] = "auto"
    """Where UCX opens its unauthenticated ports: on loopback, on any network device, or ("auto") on these if an address
    of a worker is on the network. `UCX_NET_DEVICES` takes precedence.
    """
    backends: dict[str, dict[str, str]] = msgspec.field(default_factory=lambda: {"UCX": {}})
    """NIXL plugins to use, each with its own options."""
    progress_delay_us: PositiveCount = 200_000
    """Interval at which NIXL's progress thread wakes without a cause. A shorter one costs CPU."""
    call_timeout_s: Seconds = 30.0
    """Maximum time of each setup call, such as for a NIXL plugin."""
    close_timeout_s: Seconds = 5.0
    """Maximum time that closing waits for writes in flight."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tls_key and not self.tls_certificate:
            raise InvalidConfig("tls_key is given without tls_certificate")
        if self.secret and self.secret_file:
            raise InvalidConfig("secret and secret_file are both given: give one")

    def read_secret(self) -> str:
        """Return the secret, from its file if there is one. Raises InvalidConfig if that cannot be read. Blocks."""
        if not self.secret_file:
            return self.secret
        try:
            secret = Path(self.secret_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            file = self.secret_file
            raise InvalidConfig(f"transport.secret_file {file} cannot be read: {cause_of(error)}") from error
        if not secret:
            raise InvalidConfig(f"transport.secret_file {self.secret_file} is empty")
        return secret


class PrefillSection(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prefill worker (`tidekv prefill`)."""

    listen: str = "127.0.0.1:7000"
    """host:port at which decode workers reach this one; port 0: any."""
    lease_s: Seconds = 10.0
    """Maximum seconds for which a room's pages are kept without a ping of its decode worker."""
    rooms_max: PositiveCount = 4096
    """Maximum prompts open for decode workers at once; at most three times as many wait, more are refused."""
    close_deadline_s: Seconds = 5.0
    """Maximum time that closing waits for writes in flight."""
    metrics_listen: str | None = None
    """host:port at which Prometheus scrapes the prefill worker."""

    def __post_init__(self) -> None:
        super().__post_init__()
        host_and_port(self.listen, "listen", InvalidConfig, any_port=True)
        if self.metrics_listen is not None:
            host_and_port(self.metrics_listen, "metrics_listen", InvalidConfig, any_port=True)


class DecodeSection(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decode worker (`tidekv decode`)."""

    prefill: Sequence[str] = ("127.0.0.1:7000",)
    """Addresses of prefill workers, in the order in which they are tried."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.prefill:
            raise InvalidConfig("prefill must name at least one host:port")
        for address in self.prefill:
            host_and_port(address, "prefill", InvalidConfig)


class Configuration(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All options of a worker. Each field is a section of the file."""

    cache: CacheSection = CacheSection()
    storage: StorageSection = StorageSection()
    transport: TransportSection = TransportSection()
    prefill: PrefillSection = PrefillSection()
    decode: DecodeSection = DecodeSection()
    engine: EngineConfig = EngineConfig()
