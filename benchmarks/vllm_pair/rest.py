"""Time to the first token of a later turn, by the side that computes the rest of its prompt and its length.

    turn 1    a prompt through prefill and decode
    turn 2    the same prompt, the answer, and the rest: as many further tokens
        prefill first   prefill computes the rest, then decode is asked, and gets it
        both at once    decode is asked at the same time, and gets each block as prefill computes it
        decode alone    decode is asked alone, and computes it

All ways use the same two servers by turns, each in a conversation of its own, so that other load meets all of them.
Meanwhile decode may serve streams of other clients, whose longest pause during the turn is noted, too.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final
from uuid import uuid4

from rich.table import Table

from benchmarks.servers.answers import Answer
from benchmarks.servers.conversations import FIRST_WORD
from benchmarks.servers.routes import OneServer, Route
from benchmarks.vllm_pair.client import Client
from benchmarks.vllm_pair.cluster import running
from benchmarks.vllm_pair.routes import PrefillAndDecode, PrefillThenDecode
from benchmarks.vllm_pair.server import Server, ServerOptions
from benchmarks.vllm_pair.variants import VARIANTS

ALONE: Final = "decode alone"
ASKED: Final = ("prefill first", "both at once")
WAYS: Final = (ALONE, *ASKED)
OUTPUT: Final = 8
STREAM_PROMPT: Final = 100
"""Tokens of the prompts of other clients."""


@dataclass(frozen=True, slots=True)
class Turns:
    """Second turns that went one way: seconds to the first token, and the longest pause of the streams in each."""

    way: str
    rest: int
    streams: int
    first_s: Sequence[float]
    pause_s: Sequence[float]

    @property
    def median_s(self) -> float:
        """Median seconds to the first token."""
        return statistics.median(self.first_s)


@dataclass
class Stream:
    """A client that decodes all the time: requests of `tokens` tokens, one after the other."""

    client: Client
    server: Server
    tokens: int
    running: asyncio.Event = field(default_factory=asyncio.Event)
    _last_s: float | None = None
    _pause_s: float = 0.0

    async def run(self) -> None:
        """Decode until cancelled."""
        while True:
            prompt = [random.randrange(FIRST_WORD, 2048) for _ in range(STREAM_PROMPT)]
            name = f"stream-{uuid4().hex[:8]}"
            # Before the first token of a request no stream pauses.
            self._last_s = None
            async with aclosing(
                self.client.tokens(self.server.url, prompt, count=self.tokens, request_id=name)
            ) as found:
                async for _ in found:
                    self._pause_s = max(self._pause_s, self._since_last_s())
                    self._last_s = time.perf_counter()
                    self.running.set()

    def take_pause(self) -> float:
        """Return the longest seconds without a token since the last call."""
        pause_s = max(self._pause_s, self._since_last_s())
        self._pause_s = 0.0
        return pause_s

    def _since_last_s(self) -> float:
        return 0.0 if self._last_s is None else time.perf_counter() - self._last_s


async def measure_rest(
    options: ServerOptions,
    folder: Path,
    *,
    first: int,
    lengths: Sequence[int],
    streams: Sequence[int],
    repeats: int,
    progress: Callable[[list[Turns]], None],
) -> None:
    """Measure `repeats` second turns of each way and length, beside each number of streams.

    `first`: tokens of the first prompts. `progress` gets all turns so far after each number of streams.
    """
    # Decode asks for each rest, however short; nothing is written to storage meanwhile.
    own = replace(options, handover={**options.handover, "recompute_threshold": 0, "uri": None})
    found: list[Turns] = []
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(running(VARIANTS["tidekv"], own, folder))
        _, first_route = cluster.connect()
        assert isinstance(first_route, PrefillThenDecode)
        client, prefills, (decode,) = first_route.client, first_route.prefills, first_route.decodes
        stack.push_async_callback(client.close)
        routes: dict[str, Route] = {
            ALONE: OneServer(client, decode),
            ASKED[0]: first_route,
            ASKED[1]: PrefillAndDecode(client, prefills, [decode]),
        }
        for count in streams:
            others = [Stream(client, decode, options.max_model_len - STREAM_PROMPT - 1) for _ in range(count)]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(other.run()) for other in others]
                for other in others:
                    await other.running.wait()
                found += await _measured(routes, others, first=first, lengths=lengths, repeats=repeats)
                for task in tasks:
                    task.cancel()
            progress(found)


async def _measured(
    routes: Mapping[str, Route], others: Sequence[Stream], *, first: int, lengths: Sequence[int], repeats: int
) -> list[Turns]:
    words = random.Random(f"rest beside {len(others)}")
    cases = [(way, rest) for way in WAYS for rest in lengths]
    times: dict[tuple[str, int], list[tuple[float, float]]] = {case: [] for case in cases}
    for repeat in range(repeats + 1):
        for way, rest in words.sample(cases, len(cases)):
            first_s, pause_s = await _second_turn(routes, way, others, words=words, first=first, rest=rest)
            if repeat:  # Before the first round connections are not there yet.
                times[way, rest].append((first_s, pause_s))
    return [
        Turns(way, rest, len(others), [first_s for first_s, _ in each], [pause_s for _, pause_s in each])
        for (way, rest), each in times.items()
    ]


async def _second_turn(
    routes: Mapping[str, Route],
    way: str,
    others: Sequence[Stream],
    *,
    words: random.Random,
    first: int,
    rest: int,
) -> tuple[float, float]:
    """Serve two turns of a new conversation; return seconds to the second one's first token, and the longest pause."""
    prompt = [words.randrange(FIRST_WORD, 2048) for _ in range(first)]
    begun = await _answer(routes[ASKED[0]], prompt)
    prompt += [*begun.tokens, *(words.randrange(FIRST_WORD, 2048) for _ in range(rest))]
    for other in others:
        other.take_pause()
    answer = await _answer(routes[way], prompt)
    return answer.first_s, max((other.take_pause() for other in others), default=0.0)


async def _answer(route: Route, prompt: list[int]) -> Answer:
    return await route.complete(prompt, count=OUTPUT, conversation=0, name=f"rest-{uuid4().hex[:8]}")


def meeting(turns: Sequence[Turns], streams: int, way: str) -> int | None:
    """Return the shortest rest from which on decode alone takes as long as `way` or longer; None if there is none."""
    median_s = {(one.way, one.rest): one.median_s for one in turns if one.streams == streams}
    found = None
    for rest in sorted({rest for _, rest in median_s}, reverse=True):
        if median_s[ALONE, rest] < median_s[way, rest]:
            break
        found = rest
    return found


def rest_table(turns: Sequence[Turns]) -> Table:
    """Median milliseconds to the first token by length of the rest, those of decode alone as a share of the others'."""
    table = Table(title="Second turns: median ms to the first token, longest pause of other clients' streams")
    table.add_column("streams", justify="right")
    table.add_column("rest", justify="right")
    for way in WAYS:
        table.add_column(way, justify="right")
    for way in ASKED:
        table.add_column(f"alone : {way}", justify="right")
    by_case = {(one.streams, one.rest, one.way): one for one in turns}
    for streams, rest in sorted({(one.streams, one.rest) for one in turns}):
        each = {way: by_case[streams, rest, way] for way in WAYS}
        table.add_row(
            str(streams),
            str(rest),
            *(f"{1e3 * one.median_s:,.0f}, {1e3 * statistics.median(one.pause_s):,.0f}" for one in each.values()),
            *(f"{each[ALONE].median_s / each[way].median_s:.2f}" for way in ASKED),
        )
    return table
