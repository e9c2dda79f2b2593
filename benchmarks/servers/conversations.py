"""Multi-turn conversations through a route, compared with the answers of one server.

Turns are served in rounds: turn 0 of all conversations, then turn 1 of all. The KV of a conversation is therefore the
oldest in a cache when its next turn arrives. Every prompt continues with the expected answer, so that one wrong token
does not change later prompts.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final
from uuid import uuid4

from benchmarks.servers.answers import Answer, HttpError, RequestLost
from benchmarks.servers.routes import Route, complete_with_retries
from tidekv.states.errors import InvalidConfig

FIRST_WORD: Final = 4
"""Token ids below are special."""
Answers = Mapping[tuple[int, int], tuple[int, ...]]
"""Tokens by conversation and turn."""
Action = Callable[[int, str], Awaitable[None]]
"""Called with a turn and "before" or "amid" it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The conversations. Prompts grow from `first` to `last` tokens; answers have `output` tokens each.

    `copies`: clients that send each prompt at the same time. `aborts`: share of requests that the client aborts within
    `abort_s` seconds and then sends again.
    """

    conversations: int = 20
    turns: int = 10
    first: int = 2000
    last: int = 5000
    output: int = 24
    parallel: int = 1
    copies: int = 1
    aborts: float = 0.0
    abort_s: float = 0.4
    seed: int = 1
    vocabulary: int = 2048

    @property
    def conversation_tokens(self) -> int:
        """Tokens of one conversation at its end."""
        return self.last + self.output

    def prompt_tokens(self, turn: int) -> int:
        """Return the length of the prompts of a turn."""
        return self.first + (self.last - self.first) * turn // max(1, self.turns - 1)

    def prompt(self, conversation: int, turn: int, answers: Answers) -> list[int]:
        """Return a prompt: words of the user, with the answers to the earlier turns between them."""
        words = random.Random(f"{self.seed} {conversation}")
        prompt: list[int] = []
        for number in range(turn + 1):
            prompt += answers[conversation, number - 1] if number else ()
            while len(prompt) < self.prompt_tokens(number):
                prompt.append(words.randrange(FIRST_WORD, self.vocabulary))
        return prompt


def write_answers(file: Path, load: Load, answers: Answers, *, model: str) -> None:
    """Write the answers of the reference, with the load and the model that they belong to."""
    tokens = [[*place, list(answer)] for place, answer in answers.items()]
    file.write_text(json.dumps({"of": _prompts_of(load, model), "answers": tokens}))


def read_answers(file: Path, load: Load, *, model: str) -> Answers | None:
    """Return the answers in a file; None if there is none. Raises InvalidConfig if they belong to other prompts."""
    if not file.exists():
        return None
    read = json.loads(file.read_text())
    if read["of"] != _prompts_of(load, model):
        raise InvalidConfig(f"{file} has answers of {read['of']}, not of {_prompts_of(load, model)}; name another file")
    return {(conversation, turn): tuple(answer) for conversation, turn, answer in read["answers"]}


def _prompts_of(load: Load, model: str) -> dict[str, object]:
    """Return what the right answers depend on."""
    return {"model": model, **asdict(load), "aborts": 0.0, "parallel": 1, "copies": 1}


@dataclass
class Outcome:
    """What became of a load: answers, seconds to the first token by turn, and what did not go as expected."""

    answers: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    first_s: dict[int, list[float]] = field(default_factory=dict)
    wrong: list[tuple[int, int]] = field(default_factory=list)
    lost: dict[tuple[int, int], str] = field(default_factory=dict)
    retries: int = 0
    aborted: int = 0
    seconds: float = 0.0
    http_errors: dict[str, int] = field(default_factory=dict)
    """How often a server answered with an error, by status and reason; those of aborted requests included."""

    def note(self, error: RequestLost) -> None:
        """Count an HTTP error."""
        if isinstance(error, HttpError):
            named = f"{error.status} {error.reason}"
            self.http_errors[named] = self.http_errors.get(named, 0) + 1


async def run_load(
    load: Load,
    route: Route,
    *,
    expected: Answers | None,
    action: Action | None = None,
    alternation: asyncio.Lock | None = None,
    after_turn: Callable[[Outcome], Awaitable[None]] | None = None,
) -> Outcome:
    """Serve all conversations, and compare each answer with `expected` unless it is None.

    `action` is called before each turn, and amid it as soon as half of the conversations have been started. Loads that
    share `alternation` take turns: each serves one of its rounds, then the next load does. `after_turn` gets
    the outcome so far.
    """
    outcome, loop = Outcome(), asyncio.get_running_loop()
    chance = random.Random(f"aborts {load.seed}")
    for turn in range(load.turns):
        # The lock is fair: it goes to the load that has waited longest.
        async with alternation or nullcontext():
            started_s = loop.time()
            await _round(load, route, outcome, turn, expected, action=action, chance=chance)
            outcome.seconds += loop.time() - started_s
            if after_turn is not None:
                await after_turn(outcome)
    return outcome


async def _round(
    load: Load,
    route: Route,
    outcome: Outcome,
    turn: int,
    expected: Answers | None,
    *,
    action: Action | None,
    chance: random.Random,
) -> None:
    """Serve one turn of all conversations."""
    if action is not None:
        await action(turn, "before")
    gate, amid = asyncio.Semaphore(load.parallel), asyncio.Event()

    async def one(conversation: int) -> None:
        async with gate:
            if conversation == load.conversations // 2:
                amid.set()
            abort_s = chance.uniform(0, load.abort_s) if chance.random() < load.aborts else None
            await _turn(load, route, outcome, conversation, turn, expected, abort_s=abort_s)

    async with asyncio.TaskGroup() as group:
        for conversation in range(load.conversations):
            group.create_task(one(conversation))
        if action is not None:
            await amid.wait()
            await action(turn, "amid")


async def _turn(
    load: Load,
    route: Route,
    outcome: Outcome,
    conversation: int,
    turn: int,
    expected: Answers | None,
    *,
    abort_s: float | None,
) -> None:
    place = conversation, turn
    prompt = load.prompt(conversation, turn, outcome.answers if expected is None else expected)

    def serve() -> Awaitable[tuple[Answer, int]]:
        # Unique, since servers that outlive a run keep what belongs to an identifier.
        name = f"c{conversation}-t{turn}-{uuid4().hex[:8]}"
        return complete_with_retries(
            route, prompt, count=load.output, conversation=conversation, name=name, failed=outcome.note
        )

    async def one() -> None:
        try:
            answer, retries = await serve()
        except RequestLost as error:
            outcome.lost[place] = str(error)
            return
        outcome.answers[place] = answer.tokens
        outcome.retries += retries
        if not retries:
            outcome.first_s.setdefault(turn, []).append(answer.first_s)
        if expected is not None and answer.tokens != expected[place]:
            outcome.wrong.append(place)

    if abort_s is not None:
        with suppress(TimeoutError, RequestLost):
            async with asyncio.timeout(abort_s):
                await serve()
        outcome.aborted += 1
    async with asyncio.TaskGroup() as group:
        for _ in range(load.copies):
            group.create_task(one())
