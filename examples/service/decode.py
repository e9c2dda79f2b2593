"""Decode worker that embeds `DecodeEngine`, and generates for all READY requests in one batch, step by step.

    restore ──▶ grow ──▶ step ──▶ … ──▶ finish          one task per request; a step computes all that wait for one
                 │ OutOfPages
                 └──▶ retract ──▶ resume ──▶ …           its KV goes to host memory, and it waits for admission again

With `layer_by_layer`, the first step of a request that finds no other one begins while its later layers are copied from
host memory. Beside others it would keep the whole batch waiting for its layers.

A request whose client has disconnected is a cancelled task: it aborts, and its pages are given back.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from demo.compute import ComputeThread
from demo.model import DecodeStep, PagedModel
from examples.service.model import ServedModel
from examples.service.phrases import Phrases
from examples.service.prefill import DistantPrefill, PrefillChild
from tidekv import (
    CapacityError,
    DecodeEngine,
    DecodeRequest,
    EngineClosed,
    InvalidRequest,
    LayersLost,
    OutOfPages,
    ReadyRequest,
    Recompute,
    RecomputeJob,
    RequestFailed,
)
from tidekv.transports.blocking import settled

RESTORE_DEADLINE_S = 60.0
PREFILL_TRIES_MAX = 5
FULL_PAUSE_S = 0.05


@dataclass(slots=True, eq=False)
class Generation:
    """One prompt and its output. Iterate over it to get the tokens; `cancel` ends it early."""

    request_id: str
    prompt: Sequence[int]
    max_tokens: int
    cache: bool
    namespace: str
    arrived_at_s: float = field(default_factory=time.monotonic)
    phase: str = "restoring"
    output: list[int] = field(default_factory=list)
    retractions: int = 0
    sources: dict[str, int] = field(default_factory=dict)
    prefill_cached: dict[str, int] = field(default_factory=dict)
    """Tokens of the prompt that prefill did not compute: those that it had, and those that it has read from here."""
    finish_reason: str = ""
    first_token_s: float = 0.0
    """Seconds from the arrival to the first token."""
    phrases: Phrases | None = None
    """Restricts the tokens of the answer; without it each token is the most likely one."""
    kv_hints: Mapping[str, object] | None = None
    """An envelope of KV hints that came with the request."""
    outcomes: asyncio.Queue[int | Exception | None] = field(default_factory=asyncio.Queue)
    task: asyncio.Task[None] | None = None

    async def __aiter__(self) -> AsyncIterator[int]:
        """Yield the tokens as they are generated. Raises the error that ended the request."""
        while (item := await self.outcomes.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    def cancel(self) -> None:
        """Abort the request unless it has ended."""
        if self.task is not None:
            self.task.cancel()

    def say(self, token: int, *, end_tokens: frozenset[int]) -> None:
        """Append a generated token, and set the finish reason if it is the last one."""
        self.first_token_s = self.first_token_s or time.monotonic() - self.arrived_at_s
        if self.phrases is not None and self.output:
            self.phrases.advance(token)
        self.output.append(token)
        self.outcomes.put_nowait(token)
        if token in end_tokens or (self.phrases is not None and not self.phrases.allowed()):
            self.finish_reason = "stop"
        elif len(self.output) == self.max_tokens:
            self.finish_reason = "length"


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one request: what to compute, and the tokens that may follow. None allows every token."""

    compute: DecodeStep
    allowed: list[int] | None


class Batch:
    """Computes waiting steps in batches."""

    def __init__(self, model: PagedModel, compute: ComputeThread, *, batch_max: int) -> None:
        self._model = model
        self._compute = compute
        self._batch_max = batch_max
        self._waiting: list[tuple[Step, asyncio.Future[int]]] = []
        self._wanted = asyncio.Event()

    async def step(self, step: Step) -> int:
        """Compute one token; its KV is written when this returns.

        A cancelled caller waits for that too, because until then the step may write to the caller's pages.
        """
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((step, done))
        self._wanted.set()
        return await settled(done)

    async def step_alone(self, step: Step, wait_layer: Callable[[int], None]) -> int:
        """Compute one token of one request, calling `wait_layer` before each layer is read, on the computing thread.

        As `step`, it waits for the end of the computation if the caller is cancelled.
        """
        its = step.compute
        call = partial(self._model.decode_step, its.token, its.position, its.pages, wait_layer=wait_layer)
        return _best(await self._compute.run(call), step.allowed)

    async def run(self) -> None:
        """Compute until cancelled."""
        while True:
            await self._wanted.wait()
            batch, self._waiting = self._waiting[: self._batch_max], self._waiting[self._batch_max :]
            if not self._waiting:
                self._wanted.clear()
            tokens = await self._compute.run(partial(self._choose, [step for step, _ in batch]))
            for (_, done), token in zip(batch, tokens, strict=True):
                done.set_result(token)

    def _choose(self, steps: list[Step]) -> list[int]:
        logits = self._model.decode_batch([step.compute for step in steps])
        return [_best(row, step.allowed) for row, step in zip(logits, steps, strict=True)]


def _best(logits: torch.Tensor, allowed: list[int] | None) -> int:
    return int(logits.argmax()) if allowed is None else allowed[int(logits[allowed].argmax())]


class DecodeWorker:
    """Serves prompts. Created by `decode_worker`; all calls come from that loop."""

    def __init__(
        self,
        engine: DecodeEngine,
        model: ServedModel,
        batch: Batch,
        prefill: PrefillChild | DistantPrefill,
        tasks: asyncio.TaskGroup,
        *,
        name: str,
        device_pages: int,
        layer_by_layer: bool = False,
    ) -> None:
        self.name = name
        self.engine = engine
        self._layer_by_layer = layer_by_layer
        self.model = model
        self.prefill = prefill
        self.live: dict[str, Generation] = {}
        self.counts: Counter[str] = Counter()
        self.is_draining = False
        self._batch = batch
        self._tasks = tasks
        # A request can have all pages but one, the reserve that the engine keeps for growth.
        self._tokens_max = min(model.context_tokens, (device_pages - 1) * model.layout.page_size)
        self._number = 0

    def start(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        cache: bool = True,
        namespace: str = "",
        phrases: Phrases | None = None,
        kv_hints: Mapping[str, object] | None = None,
    ) -> Generation:
        """Start serving a prompt. Raises InvalidRequest if it can never fit."""
        if max_tokens < 1 or not prompt:
            raise InvalidRequest("a request needs a prompt and at least one token of output")
        if len(prompt) + max_tokens > self._tokens_max:
            raise InvalidRequest(f"{len(prompt)} + {max_tokens} tokens are more than this worker can hold")
        if max(prompt) >= self.model.vocabulary or min(prompt) < 0:
            raise InvalidRequest(f"tokens must be from 0 to {self.model.vocabulary - 1}")
        self._number += 1
        generation = Generation(
            f"cmpl-{self._number}", prompt, max_tokens, cache, namespace, phrases=phrases, kv_hints=kv_hints
        )
        self.live[generation.request_id] = generation
        self.counts["requests"] += 1
        generation.task = self._tasks.create_task(self._serve(generation), name=generation.request_id)
        generation.task.add_done_callback(partial(self._ended, generation))
        return generation

    def output_max(self, prompt: Sequence[int]) -> int:
        """Return how many tokens of output fit behind a prompt; one, which `start` refuses, if none does."""
        return max(1, self._tokens_max - len(prompt))

    async def drain(self, timeout_s: float) -> None:
        """Accept no new requests, and wait until the live ones have ended; those left after the timeout are cancelled.

        `DecodeEngine.drain` does not suffice: a retracted request that waits for `resume` is not live in the engine.
        """
        self.is_draining = True
        tasks = [generation.task for generation in self.live.values() if generation.task is not None]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=timeout_s)
            for task in late:
                task.cancel()

    def _ended(self, generation: Generation, task: asyncio.Task[None]) -> None:
        # In a done callback and not in the task: a task cancelled before its first step runs none of its code.
        del self.live[generation.request_id]
        if task.cancelled():
            self.counts["cancelled"] += 1
            generation.outcomes.put_nowait(EngineClosed("the request was cancelled"))

    async def _serve(self, generation: Generation) -> None:
        """Serve one request from its restore to its end."""
        try:
            await self._generate(generation)
            self.counts["finished"] += 1
            generation.outcomes.put_nowait(None)
        except Exception as error:
            self.counts["refused" if isinstance(error, CapacityError) else "failed"] += 1
            generation.outcomes.put_nowait(error)
        finally:
            # After `finish` or a failure the engine no longer has this id, and `abort` has no effect.
            if self.engine.is_running:
                await self.engine.abort(generation.request_id)

    async def _generate(self, generation: Generation) -> None:
        ready, since = await self._restore(generation)
        generation.sources = dict(ready.sources)
        if isinstance(cached := ready.aux.get("cached_tokens"), Mapping):
            generation.prefill_cached = dict(cached)
        while not generation.finish_reason:
            generation.phase = "decoding"
            try:
                self.engine.grow(ready)
            except OutOfPages:
                ready, since = await self._make_way(generation, ready, since)
            else:
                since.append(await self._batch.step(_step(generation, ready, since)))
                generation.say(since[-1], end_tokens=self.model.end_tokens)
        generation.phase = "finishing"
        await self.engine.finish(ready, since)

    async def _begin(self, generation: Generation, ready: ReadyRequest) -> list[int]:
        """Return the output since the last restore, once all layers are in place; earlier output is in the prompt."""
        since = [self._continue(generation, ready)]
        if ready.layers_in_place is not None:
            await self._step_by_layer(generation, ready, since)
        return since

    async def _step_by_layer(self, generation: Generation, ready: ReadyRequest, since: list[int]) -> None:
        """Compute the step behind a restore whose layers are still arriving, unless the first token ends the answer."""
        loop = asyncio.get_running_loop()

        def wait_layer(layer: int) -> None:
            asyncio.run_coroutine_threadsafe(ready.wait_layer(layer), loop).result()

        while True:
            try:
                await ready.wait_layer(0)
                if generation.finish_reason:
                    await ready.wait_layer(ready.layer_count - 1)
                    return
                generation.phase = "decoding"
                self.engine.grow(ready)  # The reserve has room for one token.
                since.append(await self._batch.step_alone(_step(generation, ready, since), wait_layer))
                break
            except LayersLost:
                continue  # The step has ended, so nothing uses the pages any more.
        self.counts["steps_by_layer"] += 1
        generation.say(since[-1], end_tokens=self.model.end_tokens)

    def _continue(self, generation: Generation, ready: ReadyRequest) -> int:
        """Return the token after those that were restored; append it to the output if it is not there yet."""
        if generation.phrases is None:
            token = ready.first_token
        elif generation.output:
            # Prefill chose its token without the phrases. All but the last token was restored (`_known_output`).
            return generation.output[-1]
        else:
            token = generation.phrases.opening
        generation.say(token, end_tokens=self.model.end_tokens)
        return token

    async def _restore(self, generation: Generation) -> tuple[ReadyRequest, list[int]]:
        """Restore prompt and output so far; returns the output since, too.

        If the prefill worker is lost, it waits for its successor.
        """
        tries = 0
        while True:
            generation.phase = "restoring"
            async with asyncio.timeout(RESTORE_DEADLINE_S):
                await self.prefill.is_up.wait()
            request = DecodeRequest(
                request_id=generation.request_id,
                tokens=[*generation.prompt, *_known_output(generation, generation.output)],
                prefill=self.prefill.take_addresses(),
                max_new_tokens=generation.max_tokens,
                deadline_s=RESTORE_DEADLINE_S,
                namespace=generation.namespace,
                cache=generation.cache,
                send_prompt=True,
                early=self._layer_by_layer and len(self.live) == 1,
                kv_hints=generation.kv_hints,
            )
            try:
                ready = await self.engine.restore(request)
                return ready, await self._begin(generation, ready)
            except CapacityError:
                # A request with output waits and tries again; a new one is refused, so that its client can retry
                # elsewhere.
                if not generation.output:
                    raise
                await asyncio.sleep(FULL_PAUSE_S)
            except RequestFailed as error:
                tries += 1
                if not error.cause.startswith("prefill") or tries == PREFILL_TRIES_MAX:
                    raise
                self.counts["prefill_lost"] += 1
                await asyncio.sleep(FULL_PAUSE_S * 2**tries)

    async def _make_way(
        self, generation: Generation, ready: ReadyRequest, since: list[int]
    ) -> tuple[ReadyRequest, list[int]]:
        """Retract to free the pages for other requests, and resume once there is room: as `_restore`."""
        generation.phase = "retracted"
        generation.retractions += 1
        self.counts["retractions"] += 1
        retracted = await self.engine.retract(ready, _known_output(generation, since))
        while True:
            try:
                ready = await self.engine.resume(retracted)
                return ready, await self._begin(generation, ready)
            except CapacityError:
                # The queue is full of new requests. The KV stays in host memory until the next try.
                try:
                    await asyncio.sleep(FULL_PAUSE_S)
                except asyncio.CancelledError:
                    self.engine.drop(retracted)
                    raise
            except RequestFailed:
                return await self._restore(generation)


def _step(generation: Generation, ready: ReadyRequest, since: list[int]) -> Step:
    """Return the step that computes the token behind `since`."""
    position = ready.prompt_tokens + len(since) - 1
    allowed = None if generation.phrases is None else generation.phrases.allowed()
    return Step(DecodeStep(since[-1], position, ready.pages.tolist()), allowed)


def _known_output(generation: Generation, output: list[int]) -> list[int]:
    """Return the output to restore: with phrases all but the last token, which `_continue` adds."""
    return output if generation.phrases is None else output[:-1]


def recomputes(model: PagedModel, compute: ComputeThread) -> Recompute:
    """Return what computes the rest of a prompt here: a short one, or any if no prefill is left."""

    async def recompute(job: RecomputeJob) -> tuple[int, Mapping[str, object]]:
        tokens = np.frombuffer(job.packed_tokens, dtype="<u4")[job.start_token :].tolist()
        rest = partial(model.prefill_chunk, tokens, job.start_token, job.pages.tolist())
        return int((await compute.run(rest)).argmax()), {}

    return recompute


@asynccontextmanager
async def decode_worker(
    engine: DecodeEngine,
    batch: Batch,
    model: ServedModel,
    prefill: PrefillChild | DistantPrefill,
    *,
    name: str,
    device_pages: int,
    layer_by_layer: bool = False,
) -> AsyncIterator[DecodeWorker]:
    """Run a decode worker for the duration of the block. Requests live at its end are aborted."""
    async with engine, asyncio.TaskGroup() as tasks:
        computing = tasks.create_task(batch.run(), name="batch")
        worker = DecodeWorker(
            engine,
            model,
            batch,
            prefill,
            tasks,
            name=name,
            device_pages=device_pages,
            layer_by_layer=layer_by_layer,
        )
        try:
            yield worker
        finally:
            ending = [generation.task for generation in worker.live.values() if generation.task is not None]
            for task in ending:
                task.cancel()
            if ending:
                # A cancelled task still waits for its running step, so the batch must run until all tasks have ended.
                await asyncio.wait(ending)
            computing.cancel()
