"""Settings of the hand-over role, the key "handover" of `kv_connector_extra_config`.

A configuration that cannot hand KV over is refused here, by name, before anything is opened.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import (  # vLLM's configuration is not typed here: tests and type checks go without vLLM.
    Any,
    ClassVar,
    Final,
)

import msgspec

from tidekv.engine.config.engine_config import CachePeerOptions
from tidekv.engine.integrations.link_settings import LinkSettings
from tidekv.engine.integrations.vllm.drafts import model_of
from tidekv.engine.integrations.vllm.handover.groups import BlockGroups, read_groups
from tidekv.engine.integrations.vllm.settings import HINT, check_shareable, kinds_of
from tidekv.states.errors import InvalidConfig, InvalidRequest
from tidekv.states.validation import Count, PositiveCount, SecondsOrZero, host_and_port
from tidekv.transports.control.addresses import Dials, address_of_rank, dialable

WHERE: Final = f"{HINT}.handover"
LAST_PORT: Final = 65_535
EVENT_KINDS: Final = {"FullAttentionSpec": "full_attention", "MLAAttentionSpec": "mla_attention"}
"""vLLM's name, in its KV events, of what a group of layers keeps."""


class HandoverSettings(LinkSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of "handover". `listen` is needed if `kv_role` is kv_producer or kv_both, `dials` if it is kv_consumer.

    After `restore_timeout_s` vLLM computes a prompt itself. Above `unclaimed_share`, and while a request waits for
    blocks, the oldest prompts that no decode worker asks for are released.
    """

    where: ClassVar[str] = WHERE
    ranks: PositiveCount | None = None
    """Number of ranks in which the KV heads are handed over, the same at both ends: a multiple of
    `--tensor-parallel-size`. None: as many. With other tensor-parallel sizes at both ends, set it to the larger one at
    the end with the smaller one.
    """
    recompute_threshold: Count = 64
    """Tokens of a prompt that decode computes rather than receives: if vLLM's own blocks lack at most so many,
    prefill's room is declined at once. 0: decode asks prefill for each token but those that it has.
    """
    lookup_timeout_s: SecondsOrZero = 0.5
    """Maximum seconds for which a request of decode that names no prefill waits for its look-up in host memory and
    storage. 0: such requests are not looked up, and vLLM computes them.
    """


@dataclass(frozen=True, slots=True)
class BlockEvents:
    """vLLM's KV events: its name of what the group of layers keeps, and hashes of a request for each block."""

    kind: str
    hashes_per_block: int


@dataclass(frozen=True, slots=True)
class Handover:
    """The common part of both sides: the settings, the shape of vLLM's blocks, and the ends that this vLLM is.

    `block_size`, `layer_names`: those of the full KV. `rank`, `ranks`: the rank and the number of ranks; ranks of both
    ends hand over in pairs. A worker is as many ranks as it has `parts`: `of_parts` returns them, and `rank` is the
    first one of the worker. `replica`: the data-parallel engine. `sends`: it computes prompts for others. `receives`:
    it decodes prompts that others computed. `events`: None unless vLLM publishes KV events.
    """

    settings: HandoverSettings
    model: str
    instance: str
    block_size: int
    num_blocks: int
    layer_names: tuple[str, ...]
    groups: BlockGroups
    rank: int
    ranks: int
    parts: int
    replica: int
    sends: bool
    receives: bool
    events: BlockEvents | None

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
    def pool_path(self) -> str | None:
        """File of this rank's host memory. None: it ends with the process."""
        return self.settings.pool_path(self.replica * self.ranks + self.rank)

    @property
    def fingerprint(self) -> str:
        """Identity of the model's part that this rank has: each rank holds other heads."""
        return self.model if self.ranks == 1 else f"{self.model}, rank {self.rank} of {self.ranks}"

    @property
    def listen(self) -> str:
        """Address at which this rank listens."""
        return self._own_port(self.settings.listen)

    @property
    def cache_peers(self) -> CachePeerOptions:
        """The options of host memory that is shared with peers, with the addresses of this rank at both ends."""
        options = self.settings.engine.cache_peers
        return msgspec.structs.replace(
            options,
            listen=None if options.listen is None else self._own_port(options.listen),
            ask=tuple(address_of_rank(peer, self.rank, self.ranks) for peer in options.ask),
        )

    @property
    def shares_at(self) -> str:
        """Where others read the host memory of this worker, if it is known before it listens; otherwise empty."""
        return dialable(self.cache_peers.listen or "")

    def _own_port(self, address: str) -> str:
        host, _, port = address.rpartition(":")
        return f"{host}:{int(port) + self.replica * self.ranks + self.rank}" if int(port) else address

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
    check_shareable(vllm_config)
    groups = read_groups(kv_cache_config.kv_cache_groups, vllm_config.speculative_config)
    tensor_parallel = int(parallel.tensor_parallel_size)
    ranks = settings.ranks or tensor_parallel
    if ranks % tensor_parallel:
        raise InvalidConfig(
            f"{WHERE}.ranks must be a multiple of the tensor-parallel size {tensor_parallel}, not {ranks}: if prefill "
            "and decode have other sizes, set it to the larger one at the end with the smaller one"
        )
    parts = ranks // tensor_parallel
    if parts > 1 and groups.has_states:
        raise InvalidConfig(
            f"{WHERE}.ranks: states cannot be divided among {parts} ranks of one worker; give prefill and decode the "
            "same tensor-parallel size"
        )
    workers = ranks * int(parallel.data_parallel_size)
    journal = settings.engine.journal.path
    if workers > 1 and journal is not None and not Path(journal).is_dir():
        raise InvalidConfig(
            f"{WHERE}.engine.journal.path: {journal} must be a directory that exists: each of {workers} ranks writes "
            "a file of its own"
        )
    try:
        settings.engine.cache_peers.dials_of(0, ranks)
    except InvalidConfig as error:
        raise InvalidConfig(f"{WHERE}.engine.{error}") from error
    sends, receives = bool(transfer.is_kv_producer), bool(transfer.is_kv_consumer)
    if sends and not settings.listen:
        raise InvalidConfig(f'{WHERE} needs "listen", such as "127.0.0.1:7000": kv_role {transfer.kv_role} sends KV')
    if receives and not sends and not settings.dials:
        raise InvalidConfig(
            f'{WHERE} needs "dials", the addresses of prefill workers that it may dial, such as ["127.0.0.1:7000"]: '
            f"kv_role {transfer.kv_role} receives KV"
        )
    peers_at = settings.engine.cache_peers.listen
    for name, address in (("listen", settings.listen), ("engine.cache_peers.listen", peers_at)):
        last = host_and_port(address, name, InvalidConfig, any_port=True)[1] + workers - 1 if address else 0
        if last > LAST_PORT:
            raise InvalidConfig(
                f"{WHERE}.{name}: the last of {workers} ranks would listen at port {last}; lower the port"
            )
    group = kv_cache_config.kv_cache_groups[groups.full]
    return Handover(
        settings=settings,
        model=settings.model or model_of(vllm_config),
        instance=str(transfer.engine_id),
        block_size=int(group.kv_cache_spec.block_size),
        num_blocks=int(kv_cache_config.num_blocks),
        layer_names=tuple(group.layer_names),
        groups=groups,
        rank=int(parallel.rank) % tensor_parallel * parts,
        ranks=ranks,
        parts=parts,
        replica=int(parallel.data_parallel_index),
        sends=sends,
        receives=receives,
        events=_read_events(settings, vllm_config, kv_cache_config, groups.full) if receives else None,
    )


def _read_events(settings: HandoverSettings, vllm_config: Any, kv_cache_config: Any, full: int) -> BlockEvents | None:
    events = vllm_config.kv_events_config
    if events is None or not events.enable_kv_cache_events:
        return None
    if settings.engine.kv_events.endpoint is not None:
        raise InvalidConfig(
            f"{WHERE}.engine.kv_events.endpoint would publish beside vLLM's own KV events (--kv-events-config), and "
            "routers would count two workers: leave one of them out"
        )
    spec = kv_cache_config.kv_cache_groups[full].kv_cache_spec
    block_size = int(spec.block_size)
    hashed = getattr(kv_cache_config, "hash_block_size", None) or block_size
    kinds = {EVENT_KINDS[name] for name in kinds_of(spec)}
    # As vLLM's events have it.
    return BlockEvents(kinds.pop() if len(kinds) == 1 else "full_attention", block_size // int(hashed))


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
