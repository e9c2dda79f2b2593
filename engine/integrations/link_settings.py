"""Settings that the hand-over of every serving engine has: links, host memory, storage and limits."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import ClassVar

from tidekv.backends.storage.base import Storage
from tidekv.backends.storage.options import parse_size
from tidekv.backends.storage.uri import open_storage, split_uri
from tidekv.engine.config.engine_config import CachePeerOptions, EngineConfig
from tidekv.engine.config.tls import TlsFiles, dial_context, listen_context
from tidekv.states.errors import InvalidConfig, cause_of
from tidekv.states.validation import Options, PlainText, PositiveShare, Seconds, Text, host_and_port
from tidekv.transports.control.addresses import Dials
from tidekv.transports.nixl.transport import ListenOptions, NixlTransport


class LinkSettings(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of both ends of a hand-over; each serving engine adds its own."""

    where: ClassVar[str] = ""
    """Name of the settings, which begins the text of errors about their files."""

    listen: PlainText = ""
    """host:port at which a prefill worker listens for decode workers. Each worker has a port of its own: rank r of T
    tensor-parallel ranks in data-parallel engine d listens at port + d * T + r. With port 0 the system chooses one.
    """
    dials: tuple[PlainText, ...] = ()
    """Addresses of the prefill workers that a decode worker may dial; it dials no others, whatever a request names. An
    entry is host:port; the host may be a network such as 10.0.0.0/24 or contain *, the port may be a range such as
    7000-7007 or *. Bulk data stays on loopback unless one of them is on another machine.
    """
    announces: tuple[PlainText, ...] = ()
    """Addresses under which decode workers dial this prefill worker, if connections to it are forwarded."""
    secret_file: PlainText | None = None
    """File with the secret of the control links, the same at both ends. Needed beyond loopback."""
    tls_certificate: PlainText = ""
    """PEM file with this worker's certificate, and its key unless `tls_key` has it. A prefill worker listens under TLS
    if it is given; a decode worker presents it.
    """
    tls_key: PlainText = ""
    """PEM file with the certificate's key, without a password."""
    tls_authority: PlainText = ""
    """PEM file with the certificates that must sign a peer's certificate. A decode worker dials under TLS if it is
    given; a prefill worker then refuses peers without a certificate. Bulk data is not under TLS.
    """
    model: Text | None = None
    """Fingerprint of the model, the same at both ends. None: the server's name of the model."""
    host: int | str = "1GB"
    """Bytes of host memory (L2) of each decode worker."""
    host_path: PlainText | None = None
    """File of the host memory, such as "/dev/shm/tidekv-decode": its pages outlive a restart of the decode worker. It
    may be on a tmpfs, hugetlbfs or a local disk. Each worker has a file of its own: the n-th one after the first, of
    all tensor-parallel ranks of all data-parallel engines, adds `.n`. None: host memory ends with the worker.
    """
    uri: PlainText | None = None
    """Storage (L3) of decode workers, such as "file:/var/lib/tidekv?capacity=200GB". None: no storage."""
    options: dict[str, object] | str | None = None
    """Further options of the storage engine."""
    engine: EngineConfig = EngineConfig()
    """Further options of the decode engine, such as {"journal": {"path": "/var/log/tidekv"}}; `model` is set here."""
    restore_timeout_s: Seconds = 60.0
    """Maximum seconds in which decode gets a prompt, prefill's computation included."""
    promise_timeout_s: Seconds = 60.0
    """Seconds for which prefill holds the pages of a computed prompt that no decode worker asks for."""
    unclaimed_share: PositiveShare = 0.5
    """Maximum share of prefill's pages that are held for computed prompts that no decode worker asks for.
    """
    lease_s: Seconds = 10.0
    """Seconds for which prefill holds the pages of a prompt whose decode worker gives no sign of life."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.listen:
            host_and_port(self.listen, "listen", InvalidConfig, any_port=True)
        Dials.parse(self.dials)
        if self.tls_key and not self.tls_certificate:
            raise InvalidConfig("tls_key is given without tls_certificate")
        if (parse_size(self.host) or 0) <= 0:
            raise InvalidConfig(f"host must be a size such as 4GB or 512MiB, not {self.host!r}")
        if self.uri is not None and split_uri(self.uri).scheme == "memory":
            raise InvalidConfig("uri: memory: is local to one process and ends with it; use host for memory")
        if self.engine.bigram_keys:
            raise InvalidConfig("engine.bigram_keys: it follows from the server's draft model; leave it false")

    @property
    def host_bytes(self) -> int:
        """`host` in bytes."""
        return parse_size(self.host) or 0

    def pool_path(self, worker: int) -> str | None:
        """Return the file of a decode worker's host memory; workers of all ranks and replicas are counted from 0."""
        return self.host_path if self.host_path is None or not worker else f"{self.host_path}.{worker}"

    def open_storage(self) -> Storage | None:
        """Make the storage engine; the caller owns it. Raises InvalidConfig."""
        return None if self.uri is None else open_storage(self.uri, self.options)

    def prefill_transport(self, name: str) -> NixlTransport:
        """Make the transport of a prefill worker. Raises InvalidConfig for files that cannot be used."""
        return NixlTransport(
            name=name,
            secret=self.secret(),
            listen_tls=_of_files(listen_context, self),
            listening=ListenOptions(announces=self.announces),
        )

    def decode_transport(self, name: str, peers: CachePeerOptions, *, rank: int = 0, ranks: int = 1) -> NixlTransport:
        """Make the transport of a decode worker, or of one of its ranks, which may share its host memory with peers.
        Raises InvalidConfig for files that cannot be used.
        """
        return NixlTransport(
            name=name,
            secret=self.secret(),
            dial_tls=_of_files(dial_context, self),
            listen_tls=None if peers.listen is None else _of_files(listen_context, self),
            dials=(*self.dials, *peers.dials_of(rank, ranks)),
        )

    def secret(self) -> str:
        """Read the secret. Raises InvalidConfig, which names the file, if it cannot be read or is empty."""
        if self.secret_file is None:
            return ""
        try:
            with open(self.secret_file, encoding="utf-8") as file:
                secret = file.read().strip()
        except (OSError, UnicodeDecodeError) as error:
            where = f"{self.where}.secret_file"
            raise InvalidConfig(f"{where}: {self.secret_file} cannot be read: {cause_of(error)}") from error
        if not secret:
            raise InvalidConfig(f"{self.where}.secret_file: {self.secret_file} is empty")
        return secret


def _of_files(context_of: Callable[[TlsFiles], ssl.SSLContext | None], settings: LinkSettings) -> ssl.SSLContext | None:
    try:
        return context_of(settings)
    except InvalidConfig as error:
        raise InvalidConfig(f"{settings.where}.{error}") from error
