"""Users of a fleet, as OpenAI's client asks for them, and the check of every token that they got.

Each user has one conversation after the other: a system prompt that several users share, then question and answer in
turn. Its prompt is all of the conversation so far, so a worker that has its last turn needs only the new question.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import httpx
import torch
from openai import APIConnectionError, APIError, APITimeoutError, AsyncOpenAI, InternalServerError

from examples.fleet.processes import MODEL
from examples.fleet.routes import Route, Routes
from examples.service.model import ServedModel

VOCABULARY = 256
SYSTEM_TOKENS = 64
SYSTEMS = 3
QUESTION_TOKENS = (48, 96)
ANSWER_TOKENS = 12
TURNS = 12
THINK_S = 6.0
"""Seconds between an answer and the next question on average: long beside an answer, so that both policies get the same
load.
"""
ANSWER_S = 60.0
RETRIES = 4
"""Of a request that is refused, as by a worker that drains: by OpenAI's client itself, at the same address."""
TRIES = 10
"""Workers that a user asks in turn, where no router is in the path."""
PAUSE_S = 0.2


@dataclass(slots=True)
class Turn:
    """One request and its outcome. Times are seconds of the monotonic clock."""

    asked_at_s: float
    prompt: list[int]
    answer: list[int] = field(default_factory=list)
    worker: str = ""
    sources: dict[str, int] = field(default_factory=dict)
    first_token_s: float = 0.0
    """Seconds from the question to the first token, as the user sees it."""
    in_worker_s: float = 0.0
    """Seconds from the arrival at the worker to the first token, as the worker sees it."""
    ended_at_s: float = 0.0
    error: str = ""


class Load:
    """Users of a fleet, until `stop`."""

    def __init__(self, routes: Routes, users: int, *, seed: int) -> None:
        self.conversations: list[list[Turn]] = []
        self._routes = routes
        self._clients: dict[str, AsyncOpenAI] = {}
        self._users = users
        self._seed = seed
        self._ends = asyncio.Event()

    @property
    def turns(self) -> list[Turn]:
        """All turns so far."""
        return [turn for conversation in self.conversations for turn in conversation]

    async def run(self) -> None:
        """Let all users talk until `stop`; then each ends its turn."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for user in range(self._users):
                    tasks.create_task(self._talk(user))
        finally:
            for client in self._clients.values():
                await client.close()
            await self._routes.close()

    def stop(self) -> None:
        """Ask no more questions."""
        self._ends.set()

    async def _talk(self, user: int) -> None:
        number = 0
        while not self._ends.is_set():
            dice = random.Random(f"{self._seed} {user} {number}")
            system = random.Random(f"{self._seed} system {user % SYSTEMS}")
            tokens = [system.randrange(VOCABULARY) for _ in range(SYSTEM_TOKENS)]
            conversation: list[Turn] = []
            self.conversations.append(conversation)
            for _ in range(TURNS):
                tokens += [dice.randrange(VOCABULARY) for _ in range(dice.randint(*QUESTION_TOKENS))]
                conversation.append(turn := Turn(time.monotonic(), list(tokens)))
                await self._ask(turn)
                if turn.error or self._ends.is_set():
                    break
                tokens += turn.answer
                if await self._ends_within(THINK_S * dice.random() * 2):
                    break
            number += 1

    async def _ends_within(self, limit_s: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._ends.wait()
        return self._ends.is_set()

    async def _ask(self, turn: Turn) -> None:
        try:
            for tries_left in reversed(range(TRIES)):
                async with self._routes.of(turn.prompt) as route:
                    try:
                        await self._stream(route, turn)
                        break
                    except (APIConnectionError, InternalServerError) as error:
                        if route.is_only or not tries_left or turn.answer or isinstance(error, APITimeoutError):
                            raise
                        route.is_refused = True
                await asyncio.sleep(PAUSE_S)
            if len(turn.answer) != ANSWER_TOKENS:
                turn.error = f"the stream ended after {len(turn.answer)} of {ANSWER_TOKENS} tokens"
        except (APIError, httpx.HTTPError) as error:  # The second is raised if a stream breaks off.
            turn.error = f"{type(error).__name__}: {error}"
        turn.ended_at_s = time.monotonic()

    async def _stream(self, route: Route, turn: Turn) -> None:
        stream = await self._client(route).completions.create(
            model=MODEL,
            prompt=turn.prompt,
            max_tokens=ANSWER_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for part in stream:
            if not turn.first_token_s:
                turn.first_token_s = time.monotonic() - turn.asked_at_s
                await route.has_first_token()
            for choice in part.choices:
                turn.answer += getattr(choice, "token_ids", [])
            if part.usage is not None:
                turn.sources = getattr(part.usage, "sources", {})
                turn.worker = getattr(part.usage, "worker", "")
                turn.in_worker_s = getattr(part.usage, "first_token_s", 0.0)

    def _client(self, route: Route) -> AsyncOpenAI:
        if route.url not in self._clients:
            self._clients[route.url] = AsyncOpenAI(
                base_url=f"{route.url}/v1", api_key="none", timeout=ANSWER_S, max_retries=RETRIES * route.is_only
            )
        return self._clients[route.url]


@torch.inference_mode()
def wrong_answers(model: ServedModel, conversation: Sequence[Turn]) -> int:
    """Return how many answers differ from what the model says in this process, from an empty cache."""
    answered = [turn for turn in conversation if turn.answer]
    if not answered:
        return 0
    # The last prompt begins with all earlier ones and their answers.
    text = answered[-1].prompt + answered[-1].answer
    best = model.llama(torch.tensor([text])).logits[0].argmax(-1).tolist()
    firsts = [len(turn.prompt) - 1 for turn in answered]
    return sum(
        best[first : first + len(turn.answer)] != turn.answer for first, turn in zip(firsts, answered, strict=True)
    )
