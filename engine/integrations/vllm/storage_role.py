"""A worker's side of the storage role, whose workers share the storage tier of tidekv's decode engines.

    load   EngineThread: host memory (L2), storage (L3) ──▶ vLLM's blocks     reported once, with the blocks left out
    save   a step fills pages ──▶ EngineThread: L2, storage                   read before vLLM uses the blocks again

It is a decode engine in vLLM's blocks without a prefill. vLLM's thread calls everything here once a step and waits for
nothing but copies of preempted requests, for a bounded time. No failure fails a request: vLLM recomputes what is not
loaded.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any  # vLLM's objects are not typed here: tests and type checks go without vLLM.

from tidekv.backends.copies.block_order import ABSENT, BlockPool, PagedBlocks
from tidekv.backends.host.pool import HostPool
from tidekv.backends.storage.base import Storage
from tidekv.backends.storage.uri import open_storage
from tidekv.engine.config.engine_config import EngineConfig, StorageOptions
from tidekv.engine.decode.decode_engine import DecodeEngine
from tidekv.engine.decode.values import DecodeRequest
from tidekv.engine.integrations.vllm.jobs import LoadJob, SaveJob, StorageJobs
from tidekv.engine.integrations.vllm.settings import CPU_BACKEND, Shared, backends_of, check_backends, in_order
from tidekv.engine.integrations.vllm.start_report import report_tiers
from tidekv.engine.log import engine_log
from tidekv.engine.thread.engine_thread import EngineThread, Failed, Offered, RestoredInto
from tidekv.states.errors import EngineClosed, InvalidRequest, TidekvError
from tidekv.states.handover.rank_place import RankPlace
from tidekv.transports.loopback import LoopbackNetwork, LoopbackTransport

LOG = engine_log("tidekv.vllm")
POLL_S = 1.0
RELEASE_S = 60.0
"""Maximum time that vLLM waits for copies of a preempted request, twice that after which the engine calls them late."""


class WorkerEngine:
    """Owns host memory, storage and the engine of one worker until `close`."""

    def __init__(self, storage: Storage, *, blocks: PagedBlocks, shared: Shared) -> None:
        """Start. Raises OutOfMemory, and what the engine raises as it starts, with everything stopped again."""
        layout, settings = shared.layout, shared.settings
        self._shared = shared
        self._pool = BlockPool(blocks)
        self.host_pages = max(2, settings.host_bytes // layout.page_bytes)
        self._host = HostPool.allocate(layout, self.host_pages, pin=blocks.device.type == "cuda")
        config = EngineConfig(
            model=shared.model,
            device="lent",
            bigram_keys=shared.bigram_keys,
            default_deadline_s=settings.load_timeout_s,
            close_deadline_s=settings.save_timeout_s,
            storage=StorageOptions(
                # What is worth a load is decided by the scheduler's side, and a load has its whole time for it.
                prefetch="timeout",
                prefetch_base_s=settings.load_timeout_s,
                prefetch_threshold_tokens=0,
                fetch_deadline_share=0.0,
                query_deadline_s=settings.load_timeout_s,
                store_timeout_s=settings.save_timeout_s,
            ),
        )
        engine = DecodeEngine(
            config,
            device=self._pool,
            host=self._host,
            storage=storage,
            transport=LoopbackTransport("vllm-storage", LoopbackNetwork()),
        )
        engine.place_in_storage(RankPlace(rank=shared.rank, ranks=shared.ranks))
        self.engine = EngineThread(engine, name="tidekv-vllm-storage")
        self._counts: Counter[str] = Counter()
        self._jobs: dict[int, tuple[LoadJob | SaveJob, list[int]]] = {}
        """Calls of the engine that have no outcome yet, by ticket, each with the pages that are entered for it."""
        self._tokens: dict[str, bytearray] = {}
        """Tokens of the requests whose pages are saved, as far as their jobs have named them."""
        self._reading: Counter[str] = Counter()
        """By request, the saves that read its blocks."""
        self._held: set[str] = set()
        """Finished requests whose blocks vLLM holds, unreported."""
        self._loading: set[str] = set()
        self._loaded: set[str] = set()
        self._invalid: set[int] = set()
        self.engine.start()

    def load(self, job: LoadJob) -> None:
        """Start a load. Its end is returned by `take_finished` exactly once."""
        size, per_page = self._shared.block_size, self._shared.blocks_per_page
        have = job.have_tokens // size
        held = have // per_page
        written = [ABSENT] * (have - held * per_page) + list(job.blocks[have:])
        written += [ABSENT] * (-len(written) % per_page)
        self._loading.add(job.request_id)
        entered: list[int] = []
        try:
            entered = self._pool.enter(written)
            # Pages that vLLM has are not touched: they are named only.
            pages = [*job.blocks[per_page - 1 : held * per_page : per_page], *entered]
            request = DecodeRequest(
                request_id=job.request_id,
                tokens=job.tokens,
                prefill=(),
                key_seed=job.seed,
                next_token=job.next_token,
            )
            self._jobs[self.engine.restore_into(request, pages, job.have_tokens)] = job, entered
        except TidekvError as error:
            self._pool.leave(entered)
            self._end_load(job, job.have_tokens, str(error))

    def save(self, job: SaveJob) -> None:
        """Start copying the pages that blocks form to host memory. `release` and `take_finished` wait for its end."""
        tokens = self._tokens.setdefault(job.request_id, bytearray())
        tokens += job.tokens
        if not job.blocks:
            return
        entered: list[int] = []
        try:
            entered = self._pool.enter(job.blocks)
            start = job.first_page * self._shared.layout.page_size
            ticket = self.engine.offer(bytes(tokens), entered, start_token=start, key_seed=job.seed)
        except TidekvError as error:
            self._pool.leave(entered)
            self._end_save(job, str(error))
        else:
            self._jobs[ticket] = job, entered
            self._reading[job.request_id] += 1

    def hold(self, request_id: str) -> None:
        """Return a finished request by `take_finished` as soon as no save reads its blocks."""
        self._held.add(request_id)
        self._tokens.pop(request_id, None)

    def release(self, request_id: str) -> None:
        """Wait until no save reads the blocks of a preempted request: they are used again in this step.

        Raises TidekvError after `RELEASE_S`, which ends vLLM's engine: if it went on, KV of another prompt would be
        stored under the keys of this one.
        """
        self._tokens.pop(request_id, None)
        until_s = time.monotonic() + RELEASE_S
        while self._reading[request_id]:
            if time.monotonic() > until_s:
                raise TidekvError(
                    f"copies of the preempted request {request_id!r} to host memory did not end within {RELEASE_S:g} s,"
                    " and vLLM is about to overwrite the blocks that they read; see the log for late copies"
                )
            self._poll(min(POLL_S, RELEASE_S))
        self._reading.pop(request_id, None)

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Return the finished requests whose blocks nothing reads, and those whose loads ended, each once."""
        self._poll()
        freed = {request_id for request_id in self._held if not self._reading[request_id]}
        self._held -= freed
        for request_id in freed:
            self._reading.pop(request_id, None)
        loaded, self._loaded = self._loaded, set()
        return freed, loaded

    def is_transferring(self) -> bool:
        """Whether a load is under way, or something is unreported. vLLM does not wait for other saves."""
        return bool(self._held or self._loading or self._loaded)

    def take_invalid_blocks(self) -> set[int]:
        """Return the blocks that the last ended loads did not fill."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_counts(self) -> dict[str, int]:
        """Return the counts since the last call, by the names of `COUNTS`."""
        self._poll()
        counts, self._counts = self._counts, Counter()
        return dict(counts)

    def close(self) -> None:
        """Finish running saves, within their timeout, and close everything. Idempotent."""
        self.engine.close()
        self._poll()
        # Unless that raised: then something may still write to the pages.
        self._host.close()

    def _poll(self, timeout_s: float = 0.0) -> None:
        if not self._jobs:
            return
        try:
            outcomes = self.engine.poll(timeout_s)
        except EngineClosed as error:
            self._give_up(error)
            return
        for outcome in outcomes:
            if isinstance(outcome, Failed) and outcome.ends_engine:
                self._give_up(outcome.error)
                return
            job, entered = self._jobs.pop(outcome.ticket)
            self._pool.leave(entered)
            if isinstance(outcome, RestoredInto) and isinstance(job, LoadJob):
                restored = outcome.restored
                for source in ("l1", "l2", "l3"):
                    self._counts[f"restore_tokens_{source}"] += restored.sources.get(source, 0)
                # Without a prefill, every end before the deadline is that of its tiers.
                cause = "deadline" if restored.cause == "deadline" else "host memory and storage lack the rest"
                cause = "" if restored.is_complete else cause
                self._end_load(job, restored.restored_tokens, cause)
            elif isinstance(outcome, Offered) and isinstance(job, SaveJob):
                for name in ("written", "present", "passed", "declined"):
                    self._counts[f"offer_pages_{name}"] += getattr(outcome.offered, name)
                self._reading[job.request_id] -= 1
            elif isinstance(outcome, Failed):
                self._fail(job, str(outcome.error))

    def _give_up(self, error: Exception) -> None:
        """End all jobs: the engine has ended. Its own end, which is waited for, ends the last copies."""
        LOG.error("the engine has ended; prompts are computed from now on", cause=str(error))
        try:
            self.engine.close()
        except Exception:
            LOG.exception("the engine ended by this error")
        for job, _ in self._jobs.values():
            self._fail(job, str(error))
        self._jobs.clear()

    def _fail(self, job: LoadJob | SaveJob, cause: str) -> None:
        if isinstance(job, LoadJob):
            self._end_load(job, job.have_tokens, cause)
        else:
            self._reading[job.request_id] -= 1
            self._end_save(job, cause)

    def _end_load(self, job: LoadJob, restored_tokens: int, cause: str) -> None:
        """Report a load; after a failure with the blocks from the first one on that is not loaded."""
        self._loading.discard(job.request_id)
        self._loaded.add(job.request_id)
        if cause:
            restored_tokens = max(restored_tokens, job.have_tokens)
            LOG.warning("a prompt was not loaded whole", request_id=job.request_id, tokens=restored_tokens, cause=cause)
            self._counts["restores_partial" if restored_tokens > job.have_tokens else "restores_failed"] += 1
            self._invalid.update(job.blocks[restored_tokens // self._shared.block_size :])

    def _end_save(self, job: SaveJob, cause: str) -> None:
        LOG.warning("pages are not saved", request_id=job.request_id, cause=cause)
        self._counts["offer_pages_declined"] += len(job.blocks) // self._shared.blocks_per_page


class StorageWorker:
    """`WorkerRole`: starts the engine when vLLM registers its tensors."""

    def __init__(self, shared: Shared, vllm_config: Any) -> None:
        self._shared = shared
        self._vllm_config = vllm_config
        self.engine: WorkerEngine | None = None

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
        self.engine = WorkerEngine(storage, blocks=blocks, shared=shared)
        if self._vllm_config.parallel_config.rank == 0:
            report_tiers(
                self._vllm_config,
                model=shared.model,
                l2_tokens=self.engine.host_pages * shared.layout.page_size,
                uri=shared.settings.uri,
                no_loads="" if shared.loads else "kv_role kv_producer saves and loads nothing",
            )

    def before_forward(self, jobs: StorageJobs) -> None:
        """Wait until no save reads the blocks of preempted requests, which this step overwrites."""
        for request_id in jobs.preempted:
            self._registered().release(request_id)

    def start_loads(self, jobs: StorageJobs) -> None:
        """Start this step's loads, which run concurrently with the model."""
        for job in jobs.loads:
            self._registered().load(job)

    def after_forward(self, jobs: StorageJobs) -> None:
        """Save the pages that this step filled, in the background."""
        for job in jobs.saves:
            if self._shared.is_writer:
                self._registered().save(job)
            if job.is_last:
                self._registered().hold(job.request_id)

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Return the requests whose blocks were read for the last time, and those whose loads ended."""
        return self._registered().take_finished()

    def is_transferring(self) -> bool:
        """Whether a load is under way, or something is unreported."""
        return self._registered().is_transferring()

    def take_invalid_blocks(self) -> set[int]:
        """Return the blocks that the last ended loads could not fill."""
        return self._registered().take_invalid_blocks()

    def take_failed(self) -> set[str]:
        """Return nothing: there is one group, whose blocks vLLM takes."""
        return set()

    def take_counts(self) -> dict[str, int]:
        """Return the counts since the last call."""
        return self.engine.take_counts() if self.engine is not None else {}

    def close(self) -> None:
        """Finish running saves, and close the storage. Idempotent."""
        if self.engine is not None:
            self.engine.close()

    def _registered(self) -> WorkerEngine:
        if self.engine is None:
            raise InvalidRequest("register_kv_caches must precede every other call of a worker")
        return self.engine
