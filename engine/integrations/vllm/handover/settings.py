"""Settings of the hand-over role, the key "handover" of `kv_connector_extra_config`.

A configuration that cannot hand KV over is refused here, by name, before anything is opened.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final  # vLLM's configuration is not typed here: tests and type checks go without vLLM.

import msgspec

from tidekv.backends.storage.options import parse_size
from tidekv.backends.storage.uri import split_uri
from tidekv.engine.config.engine_config import EngineConfig
from tidekv.engine.config.tls import TlsFiles, dial_context, listen_context
from tidekv.engine.integrations.vllm.settings import HINT, check_shareable
from tidekv.states.errors import InvalidConfig, InvalidRequest, cause_of
from tidekv.states.validation import (
    Count,
    Options,
    PlainText,
    PositiveCount,
    PositiveShare,
    Seconds,
    Text,
    host_and_port,
)
from tidekv.transports.control.addresses import Dials

WHERE: Final = f"{HINT}.handover"
LAST_PORT: Final = 65_535


class HandoverSettings(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of "handover"."""

    listen: PlainText = ""
    """host:port at which a prefill worker listens for decode workers; needed if `kv_role` is kv_producer or kv_both.
    Each worker has a port of its own: rank r of T tensor-parallel ranks in data-parallel engine d listens at
    port + d * T + r. With port 0 the system chooses one, which only prefill's answers name: a router that starts both
    ends at once needs a fixed port.
    """
    dials: tuple[PlainText, ...] = ()
    """Addresses of the prefill workers that a decode worker may dial; it dials no others, whatever a request names. An
    entry is host:port; the host may be a network such as 10.0.0.0/24 or contain *, the port may be a range such as
    7000-7007 or *. Bulk data stays on loopback unless one of them is on another machine. Needed if `kv_role` is
    kv_consumer.
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
    ranks: PositiveCount | None = None
    """Number of ranks in which the KV heads are handed over, the same at both ends: a multiple of
    `--tensor-parallel-size`. None: as many. With other tensor-parallel sizes at both ends, set it to the larger one at
    the end with the smaller one.
    """
    model: Text | None = None
    """Fingerprint of the model, the same at both ends. None: vLLM's name of the model."""
    host: int | str = "1GB"
    """Bytes of host memory (L2) of each decode worker."""
    uri: PlainText | None = None
    """Storage (L3) of decode workers, such as "file:/var/lib/tidekv?capacity=200GB". None: no storage."""
    options: dict[str, object] | str | None = None
    """Further options of the storage engine."""
    engine: EngineConfig = EngineConfig()
    """Further options of the decode engine, such as {"journal": {"path": "/var/log/tidekv"}}; `model` is set here."""
    recompute_threshold: Count = 64
    """Tokens of a prompt that decode computes rather than receives: if vLLM's own blocks lack at most so many,
    prefill's room is declined at once. 0: decode asks prefill for each token but those that it has.
    """
    restore_timeout_s: Seconds = 60.0
    """Maximum seconds in which decode gets a prompt, prefill's computation included; then vLLM computes it."""
    promise_timeout_s: Seconds = 60.0
    """Seconds for which prefill holds the blocks of a computed prompt that no decode worker asks for."""
    unclaimed_share: PositiveShare = 0.5
    """Maximum share of vLLM's blocks that prefill holds for computed prompts that no decode worker asks for. Above it,
    and while a request waits for blocks, the oldest are released; decode then computes them.
    """
    lease_s: Seconds = 10.0
    """Seconds for which prefill holds the blocks of a prompt whose decode worker gives no sign of life."""

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
            raise InvalidConfig("engine.bigram_keys: draft models are not handed over; leave it false")

    @property
    def host_bytes(self) -> int:
        """`host` in bytes."""
        return parse_size(self.host) or 0

    def listen_tls(self) -> ssl.SSLContext | None:
        """Return the TLS context of a prefill worker. Raises InvalidConfig for files that cannot be used."""
        return _of_files(listen_context, self)

    def dial_tls(self) -> ssl.SSLContext | None:
        """Return the TLS context of a decode worker. Raises InvalidConfig for files that cannot be used."""
        return _of_files(dial_context, self)

    def secret(self) -> str:
        """Read the secret. Raises InvalidConfig, which names the file, if it cannot be read or is empty."""
        if self.secret_file is None:
            return ""
        try:
            with open(self.secret_file, encoding="utf-8") as file:
                secret = file.read().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidConfig(f"{WHERE}.secret_file: {self.secret_file} cannot be read: {cause_of(error)}") from error
        if not secret:
            raise InvalidConfig(f"{WHERE}.secret_file: {self.secret_file} is empty")
        return secret


def _of_files(
    context_of: Callable[[TlsFiles], ssl.SSLContext | None], settings: HandoverSettings
) -> ssl.SSLContext | None:
    try:
        return context_of(settings)
    except InvalidConfig as error:
        raise InvalidConfig(f"{WHERE}.{error}") from error


@dataclass(frozen=True, slots=True)
class Handover:
    """The common part of both sides: the settings, the shape of vLLM's blocks, and the ends that this vLLM is.

    `rank`, `ranks`: the rank and the number of ranks; ranks of both ends hand over in pairs. A worker is as many ranks
    as it has `parts`: `of_parts` returns them, and `rank` is the first one of the worker. `replica`: the data-parallel
    engine. `sends`: it computes prompts for others. `receives`: it decodes prompts that others computed.
    """

    settings: HandoverSettings
    model: str
    instance: str
    block_size: int
    num_blocks: int
    layer_names: tuple[str, ...]
    rank: int
    ranks: int
    parts: int
    replica: int
    sends: bool
    receives: bool

    def of_parts(self) -> list[Handover]:
        """Return the ranks of this worker."""
        return [replace(self, rank=self.rank + part) for part in range(self.parts)]

    @property
    def dials(self) -> Dials:
        """The addresses that a decode worker may dial."""
        return Dials.parse(self.settings.dials)

    @property
    def name(self) -> str:
        """Name of this rank's agents: unique among all ranks of all instances."""
        return self.instance if self.ranks == 1 else f"{self.instance}-{self.rank}"

    @property
    def fingerprint(self) -> str:
        """Identity of the model's part that this rank has: each rank holds other heads."""
        return self.model if self.ranks == 1 else f"{self.model}, rank {self.rank} of {self.ranks}"

    @property
    def listen(self) -> str:
        """Address at which this rank listens."""
        host, _, port = self.settings.listen.rpartition(":")
        return f"{host}:{int(port) + self.replica * self.ranks + self.rank}" if int(port) else self.settings.listen

    def own_address(self, addresses: str) -> str:
        """Return the one of prefill's addresses, by rank, that belongs to this rank. Raises InvalidRequest."""
        by_rank = addresses.split(",")
        if len(by_rank) != self.ranks:
            raise InvalidRequest(
                f"prefill hands over in {len(by_rank)} ranks ({addresses}), decode in {self.ranks}: see {WHERE}.ranks"
            )
        return by_rank[self.rank]


def read_handover(vllm_config: Any, kv_cache_config: Any) -> Handover:
    """Derive the common part from vLLM's configuration. Raises InvalidConfig for what cannot be handed over."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    settings = _read_settings(transfer.kv_connector_extra_config)
    check_shareable(vllm_config, kv_cache_config)
    tensor_parallel = int(parallel.tensor_parallel_size)
    ranks = settings.ranks or tensor_parallel
    if ranks % tensor_parallel:
        raise InvalidConfig(
            f"{WHERE}.ranks must be a multiple of the tensor-parallel size {tensor_parallel}, not {ranks}: if prefill "
            "and decode have other sizes, set it to the larger one at the end with the smaller one"
        )
    parts = ranks // tensor_parallel
    workers = ranks * int(parallel.data_parallel_size)
    journal = settings.engine.journal.path
    if workers > 1 and journal is not None and not Path(journal).is_dir():
        raise InvalidConfig(
            f"{WHERE}.engine.journal.path: {journal} must be a directory that exists: each of {workers} ranks writes "
            "a file of its own"
        )
    sends, receives = bool(transfer.is_kv_producer), bool(transfer.is_kv_consumer)
    if sends and not settings.listen:
        raise InvalidConfig(f'{WHERE} needs "listen", such as "127.0.0.1:7000": kv_role {transfer.kv_role} sends KV')
    if receives and not sends and not settings.dials:
        raise InvalidConfig(
            f'{WHERE} needs "dials", the addresses of prefill workers that it may dial, such as ["127.0.0.1:7000"]: '
            f"kv_role {transfer.kv_role} receives KV"
        )
    if settings.listen:
        last = host_and_port(settings.listen, "listen", InvalidConfig, any_port=True)[1] + workers - 1
        if last > LAST_PORT:
            raise InvalidConfig(
                f"{WHERE}.listen: the last of {workers} ranks would listen at port {last}; lower the port"
            )
    group = kv_cache_config.kv_cache_groups[0]
    return Handover(
        settings=settings,
        model=settings.model or str(vllm_config.model_config.model),
        instance=str(transfer.engine_id),
        block_size=int(group.kv_cache_spec.block_size),
        num_blocks=int(kv_cache_config.num_blocks),
        layer_names=tuple(group.layer_names),
        rank=int(parallel.rank) % tensor_parallel * parts,
        ranks=ranks,
        parts=parts,
        replica=int(parallel.data_parallel_index),
        sends=sends,
        receives=receives,
    )


def _read_settings(extra_config: dict[str, object]) -> HandoverSettings:
    others = sorted(set(extra_config) - {"handover"})
    if others:
        raise InvalidConfig(
            f'{HINT}: {others[0]!r} belongs to the storage role; with "handover" all options are within it'
        )
    try:
        return msgspec.convert(extra_config["handover"], HandoverSettings)
    except msgspec.ValidationError as error:
        cause = error.__cause__ if isinstance(error.__cause__, InvalidConfig) else error
        raise InvalidConfig(f"{WHERE}: {cause}") from error
