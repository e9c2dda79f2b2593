"""Replays a recording against a decode engine, with synthetic KV that is verified after every restore."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from demo.blocks import TraceRequest
from demo.compute import ComputeThread
from demo.phase import Pass
from tidekv.backends.device.pool import DevicePool
from tidekv.engine.decode.values import DecodeRequest, ReadyRequest
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.engine.synthetic.prefill import synthetic_first_token


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One request with its tokens, packed as little-endian u32, and the digests of the prompt's pages."""

    request: TraceRequest
    packed: bytes
    output: bytes
    digests: Sequence[bytes]


@dataclass(slots=True)
class Verdicts:
    """Result of the verification: number of pages compared, and descriptions of the differences."""

    pages: int = 0
    wrong: list[str] = field(default_factory=list)


class TraceRun:
    """One pass over a recording.

    Requests start in the recording's order, not before their time and at most `in_flight_max` at once; those of one
    session run one after the other. The pages of one request in `verify_every` are verified. `compute_ahead` is awaited
    with each prompt's packed tokens before its restore, so its duration is not part of the time to ready.
    """

    def __init__(
        self,
        served: Pass,
        device: DevicePool,
        compute: ComputeThread,
        *,
        vocabulary: int,
        verify_every: int = 1,
        compute_ahead: Callable[[bytes], Awaitable[None]] | None = None,
    ) -> None:
        self._served = served
        self._kv = SyntheticKV(device)
        self._page_size = device.layout.page_size
        self._compute = compute
        self._vocabulary = vocabulary
        self._verify_every = verify_every
        self._compute_ahead = compute_ahead
        self._slots = asyncio.Semaphore(served.in_flight_max)
        self._last_of: dict[str, asyncio.Event] = {}
        self.verdicts = Verdicts()

    async def run(self, requests: Iterator[TraceRequest]) -> None:
        """Replay all requests. Raises errors of a request or the recording, with the other requests cancelled."""
        start_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            while True:
                await self._slots.acquire()
                # On the compute thread: reading, unpacking and hashing a long prompt takes milliseconds.
                prompt = await self._compute.run(partial(self._next_prompt, requests))
                if prompt is None:
                    break
                await asyncio.sleep(start_s + prompt.request.at_s - time.monotonic())
                ended = asyncio.Event()
                before = self._last_of.get(prompt.request.session)
                if prompt.request.session:
                    self._last_of[prompt.request.session] = ended
                group.create_task(self._replay(prompt, before, ended), name=f"replay {prompt.request.request_id}")

    def _next_prompt(self, requests: Iterator[TraceRequest]) -> _Prompt | None:
        request = next(requests, None)
        if request is None:
            return None
        packed = request.prompt.packed(self._vocabulary)
        return _Prompt(request, packed, request.output(self._vocabulary), prompt_digests(packed, self._page_size))

    async def _replay(self, prompt: _Prompt, before: asyncio.Event | None, ended: asyncio.Event) -> None:
        try:
            if before is not None:
                await before.wait()
            await self._serve(prompt)
        finally:
            ended.set()
            self._slots.release()
        self._served.advance()

    async def _serve(self, prompt: _Prompt) -> None:
        """Restore a prompt, verify it, write the output's KV, and finish."""
        request_id = prompt.request.request_id
        if self._compute_ahead is not None:
            await self._compute_ahead(prompt.packed)
        started_s = time.perf_counter()
        ready = await self._served.engine.restore(
            DecodeRequest(
                request_id=request_id,
                tokens=prompt.packed,
                prefill=self._served.prefill,
                max_new_tokens=prompt.request.output_length,
                cache=self._served.cache,
                send_prompt=True,
            )
        )
        self._served.phase.note(ready, time.perf_counter() - started_s, page_size=self._page_size)
        if self._served.phase.requests % self._verify_every == 0:
            await self._verify(prompt, ready)
        if ready.first_token != synthetic_first_token(prompt.packed, self._vocabulary):
            self.verdicts.wrong.append(f"{request_id}: the first token is that of another prompt")
        # The whole output at once: the replay reproduces its memory, not the time of each token.
        self._served.engine.grow(ready, prompt.request.output_length - 1)
        written = prompt.packed + prompt.output[:-4]
        first = len(prompt.packed) // 4 // self._page_size
        digests = await self._compute.run(partial(prompt_digests, written, self._page_size))
        fresh = ready.pages[first : len(digests)].tolist()
        await self._compute.run(partial(self._kv.fill, fresh, digests[first:]))
        await self._served.engine.finish(ready, prompt.output)

    async def _verify(self, prompt: _Prompt, ready: ReadyRequest) -> None:
        """Compare every page of the prompt byte for byte with its expected content."""
        pages = ready.pages[: len(prompt.digests)].tolist()
        wrong = await self._compute.run(partial(self._kv.verify, pages, prompt.digests))
        self.verdicts.pages += len(pages)
        if wrong:
            self.verdicts.wrong.append(
                f"{prompt.request.request_id}: {len(wrong)} of {len(pages)} pages differ, the first is page {wrong[0]} "
                f"of the prompt; tokens by source: {dict(ready.sources)}"
            )
