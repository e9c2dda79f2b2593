"""Serves generated conversations from a decode engine with the small real model, several at once.

Each conversation is a task: restore the prompt, generate greedily, keep the output in the cache, think, repeat. The
decode steps of all requests that are READY at a time are computed as one batch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from demo.compute import ComputeThread
from demo.conversations import SOURCES, Conversation, ConversationTurn, Transcripts, Workload
from demo.model import DecodeStep, PagedModel, TokenChoice, greedy
from demo.phase import Pass
from tidekv.engine.decode.values import DecodeRequest, ReadyRequest
from tidekv.states.errors import InvalidRequest, OutOfPages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@dataclass(frozen=True, slots=True)
class Answer:
    """One answered turn: prompt, output, and the smallest margin of a choice in this output."""

    turn: ConversationTurn
    prompt: Sequence[int]
    output: Sequence[int]
    margin: float
    sources: Mapping[str, int]


class StepBatcher:
    """Computes waiting steps in batches while `running` is entered."""

    def __init__(self, model: PagedModel, compute: ComputeThread, *, batch_max: int = 16) -> None:
        self._model = model
        self._compute = compute
        self._batch_max = batch_max
        self._waiting: list[tuple[DecodeStep, asyncio.Future[TokenChoice]]] = []
        self._wanted = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run for the duration of the block. No step may be waiting when it ends."""
        async with asyncio.TaskGroup() as group:
            loop = group.create_task(self._run(), name="decode steps")
            try:
                yield
            finally:
                loop.cancel()

    async def step(self, step: DecodeStep) -> TokenChoice:
        """Compute one token of a request; its KV is written when this returns."""
        done: asyncio.Future[TokenChoice] = asyncio.get_running_loop().create_future()
        self._waiting.append((step, done))
        self._wanted.set()
        return await done

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            batch, self._waiting = self._waiting[: self._batch_max], self._waiting[self._batch_max :]
            if not self._waiting:
                self._wanted.clear()
            choices = await self._compute.run(partial(self._choose, [step for step, _ in batch]))
            for (_, done), choice in zip(batch, choices, strict=True):
                if not done.done():
                    done.set_result(choice)

    def _choose(self, steps: list[DecodeStep]) -> list[TokenChoice]:
        return [greedy(logits) for logits in self._model.decode_batch(steps)]


class ConversationRun:
    """One pass over generated conversations.

    `damage` names a source: one page that came from it is overwritten after its restore, once, to show that the
    comparison of tokens can fail.
    """

    def __init__(
        self,
        served: Pass,
        model: PagedModel,
        compute: ComputeThread,
        *,
        workload: Workload,
        damage: str = "",
    ) -> None:
        if damage and damage not in SOURCES:
            raise InvalidRequest(f"damage must be one of {', '.join(SOURCES)}, not {damage!r}")
        self._served = served
        self._model = model
        self._batcher = StepBatcher(model, compute)
        self._workload = workload
        self._damage = damage
        self._slots = asyncio.Semaphore(served.in_flight_max)
        self._transcripts = Transcripts(workload)
        self._answered: dict[tuple[int, int], asyncio.Event] = {
            (turn.conversation, turn.round): asyncio.Event()
            for conversation in workload.conversations
            for turn in conversation.turns
        }
        self.answers: list[Answer] = []

    async def run(self) -> None:
        """Serve all conversations. Raises the error of a request, with the other requests cancelled."""
        async with self._batcher.running(), asyncio.TaskGroup() as group:
            for conversation in self._workload.conversations:
                group.create_task(self._converse(conversation), name=f"conversation {conversation.number}")

    async def _converse(self, conversation: Conversation) -> None:
        if conversation.after is not None:
            await self._answered[conversation.after].wait()
        for turn in conversation.turns:
            await asyncio.sleep(turn.think_s)
            async with self._slots:
                answer = await self._answer(turn)
            self._transcripts.answer(turn, answer.output)
            self.answers.append(answer)
            self._answered[turn.conversation, turn.round].set()
            self._served.advance()

    async def _answer(self, turn: ConversationTurn) -> Answer:
        prompt = self._transcripts.prompt(turn)
        request = DecodeRequest(
            request_id=f"{self._served.phase.name}/{turn.request_id}",
            tokens=prompt,
            prefill=self._served.prefill,
            max_new_tokens=turn.output_tokens,
            cache=self._served.cache,
            send_prompt=True,
        )
        started_s = time.perf_counter()
        ready = await self._served.engine.restore(request)
        self._served.phase.note(ready, time.perf_counter() - started_s, page_size=self._model.page_size)
        sources = dict(ready.sources)
        self._damage_once(ready)
        ready, output, since, margin = await self._generate(ready, turn.output_tokens)
        await self._served.engine.finish(ready, since)
        return Answer(turn, prompt, output, margin, sources)

    async def _generate(self, ready: ReadyRequest, count: int) -> tuple[ReadyRequest, list[int], list[int], float]:
        """Generate `count` tokens.

        Returns the request that holds the pages at the end, the output, the part of it since that request was READY,
        and the smallest margin. If memory runs out, the request is retracted with what it has, so that others can end.
        """
        output = [ready.first_token]
        since = [ready.first_token]
        margin = float(str(ready.aux.get("margin", "inf")))
        while len(output) < count:
            try:
                self._served.engine.grow(ready, 1)
            except OutOfPages:
                self._served.phase.retractions += 1
                ready = await self._served.engine.resume(await self._served.engine.retract(ready, since))
                since = [ready.first_token]
                output.append(ready.first_token)
                continue
            position = ready.prompt_tokens + len(since) - 1
            choice = await self._batcher.step(DecodeStep(since[-1], position, ready.pages.tolist()))
            margin = min(margin, choice.margin)
            since.append(choice.token)
            output.append(choice.token)
        return ready, output, since, margin

    def _damage_once(self, ready: ReadyRequest) -> None:
        """Overwrite the first page that came from the chosen source, after every checksum was verified."""
        if not self._damage or ready.sources[self._damage] < self._model.page_size:
            return
        before = sum(ready.sources[source] for source in SOURCES[: SOURCES.index(self._damage)])
        page = int(ready.pages[before // self._model.page_size])
        for keys in self._model.pool.k:
            keys[page] = keys[page].flip(0)
        self._damage = ""
