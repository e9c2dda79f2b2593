"""A worker's side of the storage role, whose workers share the storage tier of tidekv's decode engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any  # vLLM's objects are not typed here: tests and type checks go without vLLM.

from tidekv.backends.copies.block_order import PagedBlocks
from tidekv.backends.storage.uri import open_storage
from tidekv.engine.integrations.vllm.jobs import StorageJobs
from tidekv.engine.integrations.vllm.pages import WorkerPages
from tidekv.engine.integrations.vllm.settings import CPU_BACKEND, Shared, backends_of, check_backends, in_order
from tidekv.engine.integrations.vllm.start_report import report_tiers
from tidekv.states.errors import InvalidRequest


class StorageWorker:
    """`WorkerRole`: opens the storage when vLLM registers its tensors."""

    def __init__(self, shared: Shared, vllm_config: Any) -> None:
        self._shared = shared
        self._vllm_config = vllm_config
        self.pages: WorkerPages | None = None
        self._invalid: set[int] = set()
        self._read_out: set[str] = set()

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Take the worker's tensors, and open its storage. Raises InvalidConfig for unsupported tensors."""
        shared = self._shared
        names = backends_of(self._vllm_config, shared.layer_names)
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
        self.pages = WorkerPages(storage, blocks=blocks, shared=shared)
        if self._vllm_config.parallel_config.rank == 0:
            report_tiers(
                self._vllm_config,
                model=shared.model,
                l2_tokens=self.pages.host_pages * shared.layout.page_size,
                uri=shared.settings.uri,
                no_loads="" if shared.loads else "kv_role kv_producer saves and loads nothing",
            )

    def before_forward(self, jobs: StorageJobs) -> None:
        """Do nothing: saves have read their blocks when `after_forward` returns."""

    def start_loads(self, jobs: StorageJobs) -> None:
        """Start this step's loads, which run concurrently with the model."""
        for job in jobs.loads:
            self._registered().load(job)

    def after_forward(self, jobs: StorageJobs) -> None:
        """Read the blocks that this step filled, in the model's stream. Storing them continues in the background."""
        for job in jobs.saves:
            if self._shared.is_writer:
                self._registered().save(job)
            if job.is_last:
                self._read_out.add(job.request_id)

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Return the requests whose blocks were read for the last time, and those whose loads ended."""
        read_out, self._read_out = self._read_out, set()
        ended = self._registered().take_ended()
        for load in ended:
            self._invalid.update(load.failed_blocks)
        return read_out, {load.request_id for load in ended}

    def is_transferring(self) -> bool:
        """Whether a load is under way, or something is unreported. Nothing waits for saves that have their bytes."""
        return bool(self._read_out) or self._registered().is_loading()

    def take_invalid_blocks(self) -> set[int]:
        """Return the blocks that the last ended loads could not fill."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_failed(self) -> set[str]:
        """Return nothing: there is one group, whose blocks vLLM takes."""
        return set()

    def take_counts(self) -> dict[str, int]:
        """Return the counts since the last call."""
        return self.pages.take_counts() if self.pages is not None else {}

    def close(self) -> None:
        """Finish running jobs, and close the storage. Idempotent."""
        if self.pages is not None:
            self.pages.close()

    def _registered(self) -> WorkerPages:
        if self.pages is None:
            raise InvalidRequest("register_kv_caches must precede every other call of a worker")
        return self.pages
