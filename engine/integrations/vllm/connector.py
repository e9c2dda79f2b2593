"""`KVConnectorBase_V1` for vLLM on the storage tier that tidekv's decode engines use.

    --kv-transfer-config '{"kv_connector": "TidekvConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "tidekv.engine.integrations.vllm.connector", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"uri": "file:/var/lib/tidekv?capacity=200GB", "model": "my-model"}}'

The model's name must equal that of the engines' `EngineConfig(model=…)`, and page size, dtype and heads must be the
same: both sides compute the same chain of hashes as keys, and pages are stored in tidekv's order. vLLM owns the device
memory: its block manager assigns blocks, and the connector reports which of them were loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final  # vLLM's objects are not typed here: type checks go without vLLM.

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVConnectorKVEvents
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tidekv.backends.storage.uri import split_uri
from tidekv.engine.integrations.step_pacing import StepPacing
from tidekv.engine.integrations.vllm.handover.jobs import HANDOVER_COUNTS
from tidekv.engine.integrations.vllm.handover.scheduler import HandoverScheduler
from tidekv.engine.integrations.vllm.handover.settings import read_handover
from tidekv.engine.integrations.vllm.handover.worker import HandoverWorker
from tidekv.engine.integrations.vllm.jobs import COUNTS
from tidekv.engine.integrations.vllm.kv_events import BlockNaming, PublishedBlocks, RankReport
from tidekv.engine.integrations.vllm.log import log_with_vllm
from tidekv.engine.integrations.vllm.lookup import lookup_of
from tidekv.engine.integrations.vllm.roles import SchedulerRole, WorkerRole
from tidekv.engine.integrations.vllm.scheduler import StorageScheduler
from tidekv.engine.integrations.vllm.settings import read_shared
from tidekv.engine.integrations.vllm.storage_role import StorageWorker
from tidekv.engine.kv_events import messages
from tidekv.states.errors import InvalidRequest

ALL_COUNTS = {**COUNTS, **HANDOVER_COUNTS}
"""Counters of both roles, by name, with their meaning."""


@dataclass
class TidekvMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM has no types here.
    """The jobs of one step, from the scheduler to every worker, in the form of the connector's role; None without any.

    `is_empty`: the step computes nothing.
    """

    jobs: object | None
    is_empty: bool = False


NO_STEP: Final = TidekvMetadata(None)
"""Metadata of a worker between two steps: no jobs."""


@dataclass
class TidekvFound(KVConnectorWorkerMetadata):  # type: ignore[misc]  # As above.
    """What look-ups have found: by request, the tokens that each rank has. vLLM joins those of all workers."""

    found: dict[str, list[int]]

    def aggregate(self, other: TidekvFound) -> TidekvFound:
        """Return the answers of both."""
        names = {**self.found, **other.found}
        return TidekvFound({name: self.found.get(name, []) + other.found.get(name, []) for name in names})


@dataclass
class TidekvAddress(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # As above.
    """The address at which a prefill worker listens, from the worker to the scheduler."""

    address: str


class TidekvKVEvents(KVConnectorKVEvents):  # type: ignore[misc]  # As above.
    """What ranks have gained and lost in a step. vLLM joins those of all workers."""

    def __init__(self, reports: list[RankReport]) -> None:
        self._reports = reports

    def add_events(self, events: list[RankReport]) -> None:
        """Add the reports of another worker."""
        self._reports += events

    def aggregate(self) -> TidekvKVEvents:
        """Return all: the scheduler's side counts by rank, over all steps, since ranks report at different times."""
        return self

    def increment_workers(self, count: int = 1) -> None:
        """Do nothing: each report names its rank."""

    def get_all_events(self) -> list[RankReport]:
        """Return the reports."""
        return self._reports

    def get_number_of_workers(self) -> int:
        """Return the number of ranks that report."""
        return len({report.rank for report in self._reports})

    def clear_events(self) -> None:
        """Remove all reports."""
        self._reports = []


@dataclass
class TidekvStats(KVConnectorStats):  # type: ignore[misc]  # As above.
    """Counts since the last report, by the names of `ALL_COUNTS`; summed over workers and steps."""

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
        return {name: self.data[name] for name in ALL_COUNTS if self.data.get(name)}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())


class TidekvPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # As above.
    """Counters of `ALL_COUNTS` in vLLM's own /metrics, as `vllm:tidekv_<name>_total` with vLLM's labels."""

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
        for name, meaning in ALL_COUNTS.items():
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


class TidekvConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM has no types here.
    """One side of the connector: vLLM creates one for its scheduler, and one in each worker.

    `kv_connector_extra_config` selects its role: with "handover" the two ends of prefill/decode disaggregation,
    otherwise the storage that tidekv's decode engines share. A failure of storage or of a peer is never a failed
    request; vLLM recomputes what could not be loaded.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Read the configuration. The scheduler's side opens storage here, a worker's in `register_kv_caches`.

        Raises InvalidConfig, naming the option, for a configuration that cannot be shared, and errors of the storage.
        """
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        log_with_vllm()
        self.connector_scheduler: SchedulerRole | None = None
        """The scheduler's side, under the name that vLLM's own connectors give it; None in a worker."""
        self.connector_worker: WorkerRole | None = None
        """A worker's side; None in the scheduler."""
        self._pacing = StepPacing()
        self._step = NO_STEP
        """Metadata of the worker's step that runs."""
        self._was_transferring = False
        """Whether anything was under way when the last step asked what has ended."""
        self._handover_scheduler: HandoverScheduler | None = None
        self._handover_worker: HandoverWorker | None = None
        self._published: PublishedBlocks | None = None
        """On the scheduler's side, if vLLM publishes KV events."""
        self._reports: list[RankReport] = []
        self._block_pool: Any = None
        self._must_publish_again = False
        is_scheduler = role == KVConnectorRole.SCHEDULER
        if "handover" in vllm_config.kv_transfer_config.kv_connector_extra_config:
            handover = read_handover(vllm_config, kv_cache_config)
            self._must_deliver = handover.sends
            if is_scheduler:
                naming = None
                if handover.events is not None:
                    self._published = PublishedBlocks(handover.ranks)
                    naming = BlockNaming(maybe_convert_block_hash, hashes_per_block=handover.events.hashes_per_block)
                self.connector_scheduler = self._handover_scheduler = HandoverScheduler(handover, naming)
            else:
                self.connector_worker = self._handover_worker = HandoverWorker(handover, vllm_config)
            return
        shared = read_shared(vllm_config, kv_cache_config)
        self._must_deliver = False
        if split_uri(shared.settings.uri).scheme == "file":
            self._cache_hit_source = CacheHitSource.DISK
        if is_scheduler:
            self.connector_scheduler = StorageScheduler(shared, lookup_of(shared))
        else:
            self.connector_worker = StorageWorker(shared, vllm_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether a prefill hands KV over. In the storage role a page that is not saved is only a later miss."""
        return self._must_deliver

    # --- The scheduler's side ---

    def on_new_request(self, request: Any) -> None:
        """Take note of a request; the storage role starts its look-up."""
        self._scheduler_side().arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded, and whether asynchronously; None until that is known."""
        tokens = self._scheduler_side().matched(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load into the blocks that vLLM allocated."""
        self._scheduler_side().allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> TidekvMetadata:
        """Return this step's jobs."""
        return TidekvMetadata(
            self._scheduler_side().step_jobs(scheduler_output), is_empty=not scheduler_output.num_scheduled_tokens
        )

    def update_connector_output(self, connector_output: Any) -> None:
        """Process the loads that ended, the blocks that failed, and what workers report for KV events."""
        self._scheduler_side().heard(connector_output)
        if self._published is not None and connector_output.kv_cache_events is not None:
            self._reports += connector_output.kv_cache_events.get_all_events()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request. True if vLLM must hold its blocks, those of all groups, until a worker reports that they are
        free.
        """
        return self._scheduler_side().finished(request, block_ids)

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, TidekvAddress]) -> None:
        """Take the addresses of the prefill workers, by rank."""
        if self._handover_scheduler is not None:
            self._handover_scheduler.listening({rank: one.address for rank, one in metadata.items()})

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take vLLM's own blocks, whose events are published before those of the connector."""
        self._block_pool = gpu_block_pool

    def take_events(self) -> Iterable[Any]:
        """Return what host memory and storage of all workers have gained and lost, for vLLM's own publisher."""
        if self._published is None:
            return ()
        if self._must_publish_again:
            self._must_publish_again = False
            self._published.clear()
        reports, self._reports = self._reports, []
        return [_vllms(event) for event in self._published.take(reports)]

    def reset_cache(self) -> bool:
        """Make pages saved so far unfindable for this instance. They stay in storage for others."""
        self._scheduler_side().reset()
        return True

    # --- A worker's side ---

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Take the worker's tensors and start. Raises InvalidConfig for unsupported tensors."""
        self._worker_side().register(kv_caches)

    def get_handshake_metadata(self) -> TidekvAddress | None:
        """Return the address of a prefill worker, for the scheduler."""
        address = "" if self._handover_worker is None else self._handover_worker.address
        return TidekvAddress(address) if address else None

    def handle_preemptions(self, kv_connector_metadata: TidekvMetadata) -> None:
        """Act before the step overwrites blocks: vLLM calls this at the start of each step."""
        if kv_connector_metadata.jobs is not None:
            self._worker_side().before_forward(kv_connector_metadata.jobs)

    def bind_connector_metadata(self, connector_metadata: TidekvMetadata) -> None:
        """Take the jobs of a step.

        `has_connector_metadata` stays false: vLLM asks it before it runs a layer, and then leaves out the two calls per
        layer, which do nothing here.
        """
        self._step = connector_metadata

    def clear_connector_metadata(self) -> None:
        """End a step."""
        self._step = NO_STEP

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start this step's loads, which run concurrently with the model."""
        if (jobs := self._step.jobs) is not None:
            self._worker_side().start_loads(jobs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: no request runs before its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: pages are taken whole, after the last layer."""

    def wait_for_save(self) -> None:
        """Take the blocks that this step filled. What follows continues in the background."""
        if (jobs := self._step.jobs) is not None:
            self._worker_side().after_forward(jobs)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose held blocks are free again, and those whose loads ended."""
        worker = self._worker_side()
        self._was_transferring = worker.is_transferring()
        if not self._was_transferring:
            return None, None
        freed, loaded = worker.take_finished()
        # What ended now is reported before the next step; only what is still under way gets a turn.
        self._pacing.after_step(
            is_empty=self._step.is_empty and not (freed or loaded),
            is_transferring=worker.is_transferring(),
        )
        return freed or None, loaded or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return what `get_finished` does, and the requests whose load failed as a whole."""
        freed, loaded = self.get_finished(finished_req_ids)
        failed = self._worker_side().take_failed() if self._was_transferring else set()
        return KVConnectorTransferResults(
            finished_sending=freed or set(), finished_recving=loaded or set(), failed_recving=failed
        )

    def get_kv_connector_kv_cache_events(self) -> TidekvKVEvents | None:
        """Return what this worker's host memory and storage have gained and lost; None if nothing."""
        reports = [] if self._handover_worker is None else self._handover_worker.take_events()
        return TidekvKVEvents(reports) if reports else None

    def build_connector_worker_meta(self) -> TidekvFound | None:
        """Return what look-ups have found since the last call; None if none has ended."""
        found = self._handover_worker.take_answers() if self._handover_worker is not None else {}
        return TidekvFound(found) if found else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks with garbage, of the loads that `get_finished` returned last, for vLLM to recompute."""
        worker = self._worker_side()
        return worker.take_invalid_blocks() if self._was_transferring else set()

    # --- Both ---

    def get_kv_connector_stats(self) -> TidekvStats | None:
        """Return the counts since the last call."""
        side = self.connector_scheduler or self.connector_worker
        self._look_for_clearing()
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
        """Finish running jobs, and close everything. Idempotent."""
        side = self.connector_scheduler or self.connector_worker
        try:
            if side is not None:
                side.close()
        finally:
            self._pacing.close()

    def _look_for_clearing(self) -> None:
        """Notice that vLLM is about to tell listeners that nothing is left, as after a reset of its own cache alone.

        Then the connector lists again what it has. The block pool's events are asked for when vLLM collects statistics:
        that is in each step just before it takes these events.
        """
        if self._published is None or self._block_pool is None or self._handover_scheduler is None:
            return
        if any(isinstance(event, AllBlocksCleared) for event in self._block_pool.kv_event_queue):
            self._must_publish_again = True
            self._handover_scheduler.publish_again()

    def _scheduler_side(self) -> SchedulerRole:
        if self.connector_scheduler is None:
            raise InvalidRequest("this connector belongs to a worker; only the scheduler's has this call")
        return self.connector_scheduler

    def _worker_side(self) -> WorkerRole:
        if self.connector_worker is None:
            raise InvalidRequest("this connector belongs to the scheduler; only a worker's has this call")
        return self.connector_worker


def _vllms(event: messages.KVEvent) -> Any:
    """Return vLLM's own message."""
    assert not isinstance(event, messages.AllBlocksCleared), "only vLLM says that"
    if isinstance(event, messages.BlockRemoved):
        return BlockRemoved(block_hashes=event.block_hashes, medium=event.medium, group_idx=event.group_idx)
    return BlockStored(
        block_hashes=event.block_hashes,
        parent_block_hash=event.parent_block_hash,
        token_ids=event.token_ids,
        block_size=event.block_size,
        lora_id=event.lora_id,
        medium=event.medium,
        lora_name=event.lora_name,
        extra_keys=event.extra_keys,
        group_idx=event.group_idx,
        kv_cache_spec_kind=event.kv_cache_spec_kind,
    )
