"""The main job: a prefill and a decode worker in two processes, joined by NIXL, serve a workload end to end.

The decode worker is this process; the prefill worker is a child. Two workloads: conversations with a small real model,
whose tokens are compared with those of one process, and recordings with synthetic KV, whose every page is verified.
Each is run twice, with and without decode cache, on new pools and with an empty cache of the prefill worker.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from demo.blocks import VOCABULARY, TraceOptions
from demo.compute import ComputeThread
from demo.conversation_run import Answer, ConversationRun
from demo.conversations import SOURCES, Workload, WorkloadOptions, make_workload
from demo.link import Deployment
from demo.model import Llama, ModelShape, PagedModel, build_llama, generate_in_one_process
from demo.phase import Pass, Phase, Progress, held_by, reusable_tokens
from demo.prefill_process import Counts, DistantPrefill, PrefillOrder, PrefillProcess
from demo.trace_run import TraceRun
from demo.traces import read_trace
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.host.pool import HostPool
from tidekv.backends.layout import KVLayout
from tidekv.backends.storage.uri import open_storage
from tidekv.engine.config.engine_config import EngineConfig, StorageOptions
from tidekv.engine.decode.decode_engine import DecodeEngine
from tidekv.states.errors import InvalidConfig
from tidekv.transports.nixl.transport import NixlTransport

CACHED, UNCACHED, COMPARED = "decode cache on", "decode cache off", "one process"
ROOMS_END_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """Sizes of the decode worker. 0 chooses a size from the workload, small enough that L2 and L3 are used.

    `storage` is a URI; empty uses files in a temporary directory, which is deleted at the end. `compare` runs the
    workload a second time without decode cache. `engine` and `transport` replace the defaults of the job; the model
    and the journal of `engine` are overwritten. Raises InvalidConfig, which names the wrong field.
    """

    page_size: int = 16
    l1_pages: int = 0
    l2_pages: int = 0
    l2_path: str = ""
    storage: str = ""
    in_flight_max: int = 0
    compare: bool = True
    journal: str | None = None
    device: str = "cpu"
    storage_options: Mapping[str, object] | None = None
    trace_layout: KVLayout | None = None
    """Page layout of a recording's synthetic KV; its page size overrides `page_size`. None uses little KV per token."""
    verify_every: int = 1
    """With a recording: the pages of one request in this many are verified."""
    computed_ahead: bool = False
    """With a recording: prefill computes each prompt before decode requests it, with and without decode cache. The time
    to ready is then that of the hand-over only, without the computation.
    """
    engine: EngineConfig | None = None
    transport: Callable[[], NixlTransport] | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("page_size", 1),
            ("l1_pages", 0),
            ("l2_pages", 0),
            ("in_flight_max", 0),
            ("verify_every", 1),
        ):
            if getattr(self, name) < least:
                raise InvalidConfig(f"{name} must be at least {least}, not {getattr(self, name)}")


@dataclass(slots=True)
class JobResult:
    """Result of the main job. It has passed if `failures` is empty."""

    layout: KVLayout
    l1_pages: int
    l2_pages: int
    in_flight_max: int
    phases: list[Phase] = field(default_factory=list)
    compared: int = 0
    """Tokens that were compared with those of one process, or pages that were verified."""
    smallest_margin: float = float("inf")
    reusable_tokens: int = 0
    """Prompt tokens that an unlimited cache could have served if requests had arrived one after the other."""
    failures: list[str] = field(default_factory=list)
    wall_s: float = 0.0


async def run_conversations(
    options: WorkloadOptions,
    tiers: TierOptions,
    *,
    shape: ModelShape | None = None,
    damage: str = "",
    prefill_address: str | Sequence[str] = "",
    deployment: Deployment | None = None,
    progress: Progress | None = None,
) -> JobResult:
    """Serve generated conversations with the small model, and compare every token with one process's generate().

    `damage` names a source of which one restored page is overwritten, so tokens must differ. With an address, a
    running prefill worker is used (`tidekv prefill`); the bytes that it sent are then counted at decode. With a
    deployment, the link from prefill is as slow for the small model as the stated one is for its model.
    """
    started_s = time.perf_counter()
    shape = shape or ModelShape(vocab_size=options.vocabulary)
    workload = make_workload(options)
    result = _sized_for(workload, shape, tiers)
    order = model_order(shape, result.layout, num_pages=4 * max(result.l1_pages, result.l2_pages))
    order = msgspec.structs.replace(order, device=tiers.device)
    if deployment is not None:
        order = msgspec.structs.replace(order, link_bytes_per_s=deployment.bytes_per_s(result.layout))
    with ComputeThread("decode") as compute:
        async with DistantPrefill(prefill_address) if prefill_address else PrefillProcess(order) as prefill:
            llama = await compute.run(partial(build_llama, shape, tiers.device))
            passes = []
            for cache in (True, False) if tiers.compare else (True,):
                phase = Phase(CACHED if cache else UNCACHED)
                async with _decode_worker(
                    phase, result, prefill, tiers, model=shape.fingerprint, cache=cache
                ) as worker:
                    run = ConversationRun(
                        _begun(worker, prefill, phase, result.in_flight_max, cache=cache, progress=progress),
                        PagedModel(llama, worker.device),
                        compute,
                        workload=workload,
                        damage=damage if cache else "",
                    )
                    await run.run()
                passes.append(run.answers)
        await _compare_tokens(passes, llama, compute, result, progress)
    result.wall_s = time.perf_counter() - started_s
    return result


def model_order(shape: ModelShape, layout: KVLayout, *, num_pages: int) -> PrefillOrder:
    """Return the options of a prefill worker that serves conversations with this model."""
    return PrefillOrder(
        name="prefill-0",
        fingerprint=shape.fingerprint,
        layout=layout,
        num_pages=num_pages,
        chunk_tokens=4 * layout.page_size,
        vocabulary=shape.vocab_size,
        model=shape,
    )


def model_layout(shape: ModelShape, page_size: int) -> KVLayout:
    """Return the page layout of this model's KV."""
    return KVLayout(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=shape.dtype,
        page_size=page_size,
    )


async def run_trace(
    path: str | Path, options: TraceOptions, tiers: TierOptions, *, progress: Progress | None = None
) -> JobResult:
    """Replay a recording with synthetic KV, and verify every byte of every restored page.

    Raises InvalidRequest for a recording that cannot be read, with file and line.
    """
    started_s = time.perf_counter()
    # Little KV per token, because a recording's prompts are long and the checks do not depend on its amount.
    layout = tiers.trace_layout or KVLayout(
        num_layers=2, num_kv_heads=1, head_dim=16, dtype="bfloat16", page_size=tiers.page_size
    )
    result = JobResult(
        layout=layout,
        l1_pages=tiers.l1_pages or (1 << 17) // layout.page_size,
        l2_pages=tiers.l2_pages or (1 << 19) // layout.page_size,
        in_flight_max=tiers.in_flight_max or 16,
    )
    first = read_trace(path, options)
    order = PrefillOrder(
        name="prefill-0",
        fingerprint="synthetic",
        layout=layout,
        num_pages=result.l1_pages,
        chunk_tokens=256 * layout.page_size,
        vocabulary=VOCABULARY,
    )
    with ComputeThread("decode") as compute:
        async with PrefillProcess(order) as prefill:
            for cache in (True, False) if tiers.compare else (True,):
                phase = Phase(CACHED if cache else UNCACHED)
                async with _decode_worker(phase, result, prefill, tiers, model="synthetic", cache=cache) as worker:
                    run = TraceRun(
                        _begun(worker, prefill, phase, result.in_flight_max, cache=cache, progress=progress),
                        worker.device,
                        compute,
                        vocabulary=VOCABULARY,
                        verify_every=tiers.verify_every,
                        compute_ahead=prefill.compute if tiers.computed_ahead else None,
                    )
                    await run.run(first if cache else read_trace(path, options))
                result.compared += run.verdicts.pages
                result.failures += run.verdicts.wrong
        result.reusable_tokens = await compute.run(partial(_reusable, path, options, layout.page_size))
    result.wall_s = time.perf_counter() - started_s
    return result


@dataclass(frozen=True, slots=True)
class _Worker:
    engine: DecodeEngine
    device: DevicePool


@asynccontextmanager
async def _decode_worker(
    phase: Phase,
    result: JobResult,
    prefill: PrefillProcess | DistantPrefill,
    tiers: TierOptions,
    *,
    model: str,
    cache: bool,
) -> AsyncIterator[_Worker]:
    """Run a decode worker with new pools for the duration of the block; then the phase's figures are complete."""
    before = await prefill.counts(forget=True)
    device = DevicePool.allocate(result.layout, result.l1_pages, device=tiers.device)
    host = HostPool.allocate(result.layout, result.l2_pages, path=tiers.l2_path or None) if cache else None
    # Small workloads have short prefixes and loopback is fast; the job shows that L3 works, not from when on it pays.
    shown = EngineConfig(
        storage=StorageOptions(prefetch_threshold_tokens=result.layout.page_size, prefetch="timeout"),
        default_deadline_s=300.0,
    )
    config = tiers.engine or shown
    journal = msgspec.structs.replace(config.journal, path=tiers.journal if cache else None)
    config = msgspec.structs.replace(config, model=model, journal=journal)
    # Create the directory in both passes, so that they differ only in the cache.
    with tempfile.TemporaryDirectory(prefix="tidekv-", ignore_cleanup_errors=True) as folder:
        storage = open_storage(tiers.storage or f"file:{folder}?capacity=4GB", tiers.storage_options) if cache else None
        transport = tiers.transport() if tiers.transport else NixlTransport(name="decode-0", dials=["127.0.0.1:*"])
        async with DecodeEngine(config, device=device, host=host, storage=storage, transport=transport) as engine:
            # As docs/operating.md advises: a full collection visits all that torch imports, for a quarter of a second.
            gc.freeze()
            started_s = time.perf_counter()
            yield _Worker(engine, device)
            phase.wall_s = time.perf_counter() - started_s
            await engine.wait_settled()
            phase.held = held_by(engine)
    after = await _ended_rooms(prefill, phase)
    if before is None or after is None:
        phase.pages_sent = phase.delta_pages
        phase.bytes_sent = phase.delta_pages * result.layout.page_bytes
    else:
        phase.pages_sent = int(after["pages_sent"] - before["pages_sent"])
        phase.bytes_sent = int(after["bytes_sent"] - before["bytes_sent"])
    result.phases.append(phase)
    result.failures += _contradictions(phase, result.layout)


def _begun(
    worker: _Worker,
    prefill: PrefillProcess | DistantPrefill,
    phase: Phase,
    in_flight_max: int,
    *,
    cache: bool,
    progress: Progress | None,
) -> Pass:
    """Report the start of a phase, and return the pass of it."""
    if progress is not None:
        progress(phase.name, 0)
    return Pass(
        engine=worker.engine,
        prefill=prefill.address,
        phase=phase,
        in_flight_max=in_flight_max,
        cache=cache,
        progress=progress,
    )


async def _ended_rooms(prefill: PrefillProcess | DistantPrefill, phase: Phase) -> Counts | None:
    """Wait until prefill has ended its rooms; rooms that are open after the timeout count as held."""
    deadline_s = time.monotonic() + ROOMS_END_TIMEOUT_S
    while True:
        counts = await prefill.counts()
        if counts is None:
            return None
        names = ("rooms_sending", "rooms_finished", "rooms_draining", "writes_in_flight", "pages_in_use")
        held = {f"prefill_{name}": counts[name] for name in names if counts.get(name)}
        if not held or time.monotonic() > deadline_s:
            phase.held |= held
            return counts
        # Prefill learns of a room's end over another connection than the one queried here, so poll.
        await asyncio.sleep(0.02)


def _contradictions(phase: Phase, layout: KVLayout) -> list[str]:
    """Return descriptions of the contradictions within a phase's figures."""
    found = []
    if phase.held:
        found.append(f"{phase.name}: not given back at the end: {phase.held}")
    if phase.bytes_sent != phase.pages_sent * layout.page_bytes:
        found.append(f"{phase.name}: {phase.bytes_sent} bytes were sent for {phase.pages_sent} pages")
    if not phase.retractions and phase.pages_sent != phase.delta_pages:
        found.append(f"{phase.name}: {phase.pages_sent} pages were sent; the deltas have {phase.delta_pages}")
    return found


def _sized_for(workload: Workload, shape: ModelShape, tiers: TierOptions) -> JobResult:
    """Choose pools so small that the conversations go through L2 to L3, but a few requests fit at any time."""
    said = sum(
        sum(len(turn.new_user_tokens) + turn.output_tokens for turn in conversation.turns)
        for conversation in workload.conversations
    )
    in_flight_max = tiers.in_flight_max or 3
    context_pages = -(-workload.context_tokens_max // tiers.page_size) + 1
    said_pages = -(-said // tiers.page_size)
    return JobResult(
        layout=model_layout(shape, tiers.page_size),
        l1_pages=tiers.l1_pages or max(in_flight_max * context_pages, said_pages * 3 // 10),
        l2_pages=tiers.l2_pages or max(context_pages, said_pages * 5 // 10),
        in_flight_max=in_flight_max,
    )


async def _compare_tokens(
    passes: list[list[Answer]], llama: Llama, compute: ComputeThread, result: JobResult, progress: Progress | None
) -> None:
    """Generate each answer of the first pass again in one process; the other passes must have the same answers."""
    wanted = {}
    for answer in passes[0]:
        generate = partial(generate_in_one_process, llama, answer.prompt, len(answer.output))
        wanted[answer.turn.request_id] = await compute.run(generate)
        if progress is not None:
            progress(COMPARED, 1)
    for phase, answers in zip(result.phases, passes, strict=True):
        for answer in answers:
            result.compared += len(answer.output)
            result.smallest_margin = min(result.smallest_margin, answer.margin)
            expected = wanted[answer.turn.request_id]
            if list(answer.output) != expected:
                place = next(
                    n for n, pair in enumerate(zip(answer.output, expected, strict=True)) if pair[0] != pair[1]
                )
                result.failures.append(
                    f"{phase.name}: {answer.turn.request_id} has another token than one process at position {place} of "
                    f"its output; prompt tokens by source: {dict(answer.sources)}"
                )


def _reusable(path: str | Path, options: TraceOptions, page_size: int) -> int:
    pairs = ((request.prompt.packed(), request.output()) for request in read_trace(path, options))
    return sum(reusable_tokens(pairs, page_size))


def sources_used(phase: Phase) -> list[str]:
    """Name the sources that some token of the phase came from."""
    return [source for source in SOURCES if phase.tokens[source]]
