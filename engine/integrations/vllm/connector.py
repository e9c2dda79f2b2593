"""`KVConnectorBase_V1` for vLLM on the storage tier that tidekv's decode engines use.

    --kv-transfer-config '{"kv_connector": "TidekvConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "tidekv.engine.integrations.vllm.connector", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"uri": "file:/var/lib/tidekv?capacity=200GB", "model": "my-model"}}'

The model's name must equal that of the engines' `EngineConfig(model=…)`, and page size, dtype and heads must be the
same: both sides compute the same chain of hashes as keys, and pages are stored in tidekv's order. vLLM owns the device
memory: its block manager assigns blocks, and the connector reports which of them were loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any  # vLLM's objects are not typed here: type checks go without vLLM.

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tidekv.backends.storage.uri import open_storage, split_uri
from tidekv.engine.integrations.vllm.blocks import PagedBlocks, in_order
from tidekv.engine.integrations.vllm.jobs import COUNTS, LoadJob, SaveJob
from tidekv.engine.integrations.vllm.lookup import PrefixLookup
from tidekv.engine.integrations.vllm.pages import WorkerPages
from tidekv.engine.integrations.vllm.scheduler import SchedulerSide
from tidekv.engine.integrations.vllm.settings import CPU_BACKEND, check_backends, read_shared
from tidekv.states.errors import InvalidRequest


@dataclass
class TidekvMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM has no types here.
    """The jobs of one step, from the scheduler to every worker."""

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)


@dataclass
class TidekvStats(KVConnectorStats):  # type: ignore[misc]  # As above.
    """Counts since the last report, by the names of `COUNTS`; summed over workers and steps."""

    def reset(self) -> None:
        """Remove all counts."""
        self.data: dict[str, int] = {}

    def aggregate(self, other: TidekvStats) -> TidekvStats:
        """Add the counts of another instance."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts that are not zero, for vLLM's log."""
        return {name: self.data[name] for name in COUNTS if self.data.get(name)}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())


class TidekvPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # As above.
    """Counters of `COUNTS` in vLLM's own /metrics, as `vllm:tidekv_<name>_total` with vLLM's labels."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Register the counters; vLLM calls it once in the process that serves /metrics."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, meaning in COUNTS.items():
            counter = self._counter_cls(
                name=f"vllm:tidekv_{name}", documentation=f"Number of {meaning}.", labelnames=labelnames
            )
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, int], engine_idx: int = 0) -> None:
        """Add the counts of one report."""
        for name, count in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(count)


class TidekvConnector(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM has no types here.
    """One side of the connector: vLLM creates one for its scheduler, and one in each worker.

    A failure of storage causes a miss or a page that is not saved, never a failed request; vLLM recomputes what could
    not be loaded.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Read the configuration. The scheduler's side opens the storage here, a worker's in `register_kv_caches`.

        Raises InvalidConfig, naming the option, for a configuration that cannot be shared, and errors of the storage.
        """
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._shared = read_shared(vllm_config, kv_cache_config)
        settings = self._shared.settings
        if split_uri(settings.uri).scheme == "file":
            self._cache_hit_source = CacheHitSource.DISK
        self._scheduler: SchedulerSide | None = None
        self._lookup: PrefixLookup | None = None
        self._pages: WorkerPages | None = None
        self._invalid: set[int] = set()
        self._read_out: set[str] = set()
        if role == KVConnectorRole.SCHEDULER:
            self._lookup = PrefixLookup(
                partial(open_storage, settings.uri, settings.options),
                layout=self._shared.layout,
                model=self._shared.model,
                ranks=self._shared.ranks,
                timeout_s=settings.lookup_timeout_s,
            )
            self._scheduler = SchedulerSide(self._shared, self._lookup)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a page that is not saved is only a later miss."""
        return False

    # --- The scheduler's side ---

    def on_new_request(self, request: Any) -> None:
        """Start the storage look-up of a request."""
        self._scheduler_side().arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded, and whether asynchronously; None until the look-up has ended."""
        tokens = self._scheduler_side().matched(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load into the blocks that vLLM allocated."""
        self._scheduler_side().allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> TidekvMetadata:
        """Return this step's jobs."""
        state = scheduler_output.kv_connector_block_state
        loads, saves = self._scheduler_side().jobs(
            scheduler_output.num_scheduled_tokens, lambda request_id: state.get_block_ids(request_id)[0]
        )
        return TidekvMetadata(loads=loads, saves=saves)

    def update_connector_output(self, connector_output: Any) -> None:
        """Process the loads that ended, and the blocks that failed."""
        self._scheduler_side().heard(connector_output.finished_recving or (), connector_output.invalid_block_ids)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Save what is not saved yet; True if vLLM must hold the blocks until that save has read them."""
        return self._scheduler_side().finished(request, block_ids), None

    def reset_cache(self) -> bool:
        """Make pages saved so far unfindable for this instance. They stay in storage for others."""
        self._scheduler_side().reset()
        return True

    # --- A worker's side ---

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Take the worker's tensors, and open its storage. Raises InvalidConfig for unsupported tensors."""
        shared = self._shared
        layers = self._vllm_config.compilation_config.static_forward_context
        names = {layers[name].get_attn_backend().get_name() for name in shared.layer_names if name in layers}
        check_backends(names, shared.layout)
        tensors = in_order({name: kv_caches[name] for name in shared.layer_names})
        order = None
        if CPU_BACKEND in names:
            # Only now: it imports vLLM's kernels for CPUs.
            from tidekv.engine.integrations.vllm.cpu_attn import block_order

            order = block_order(tensors[0])
        blocks = PagedBlocks(
            tensors, layout=shared.layout, block_size=shared.block_size, num_blocks=shared.num_blocks, order=order
        )
        storage = open_storage(shared.settings.uri, shared.settings.options)
        self._pages = WorkerPages(storage, blocks=blocks, shared=shared)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start this step's loads, which run concurrently with the model."""
        for job in self._get_connector_metadata().loads:
            self._worker_pages().load(job)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: no request runs before its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: pages are saved whole, after the last layer."""

    def wait_for_save(self) -> None:
        """Read the blocks that this step filled, in the model's stream. Storing them continues in the background."""
        for job in self._get_connector_metadata().saves:
            if self._shared.is_writer:
                self._worker_pages().save(job)
            if job.is_last:
                self._read_out.add(job.request_id)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose blocks were read for the last time, and those whose loads ended."""
        read_out, self._read_out = self._read_out, set()
        ended = self._worker_pages().take_ended()
        for load in ended:
            self._invalid.update(load.failed_blocks)
        return read_out or None, {load.request_id for load in ended} or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks with garbage, of the loads that `get_finished` returned last, for vLLM to recompute."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    # --- Both ---

    def get_kv_connector_stats(self) -> TidekvStats | None:
        """Return the counts since the last call."""
        side = self._scheduler or self._pages
        counts = side.take_counts() if side is not None else {}
        return TidekvStats(data=counts) if any(counts.values()) else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TidekvStats:
        """Build statistics from counts that arrived from another process."""
        return TidekvStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> TidekvPromMetrics:
        """Build the Prometheus counters."""
        return TidekvPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Finish running jobs, and close the storage. Idempotent."""
        for side in (self._lookup, self._pages):
            if side is not None:
                side.close()

    def _scheduler_side(self) -> SchedulerSide:
        if self._scheduler is None:
            raise InvalidRequest("this connector belongs to a worker; only the scheduler's has this call")
        return self._scheduler

    def _worker_pages(self) -> WorkerPages:
        if self._pages is None:
            raise InvalidRequest("register_kv_caches must precede every other call of a worker")
        return self._pages
