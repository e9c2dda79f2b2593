"""Recorded sessions of coding agents: one JSON object per session, with sub-agents as nested lists.

The blocks of a request have one of two forms: `hash_ids`, one id per full block, as published; or
`h = [kept, start, length, start, length, …]`: the first `kept` ids of the previous request of the list, then runs of
consecutive ids. Ids are local to their session. Tokens after the last full block have no id.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta

from tidekv.engine.demo.blocks import PROMPT_TOKENS_MAX, PromptBlocks, TraceOptions, TraceRequest, salted, text_seed
from tidekv.engine.demo.mixing import Words
from tidekv.engine.demo.trace_lines import decode_line, trace_error
from tidekv.states.errors import InvalidRequest

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
TokenCount = Annotated[int, Meta(ge=0, le=PROMPT_TOKENS_MAX)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]

WANTED: Final = (
    "an agent session: an object with id, block_size and requests, each with t, type, in, out and h or hash_ids"
)


class Step(msgspec.Struct, kw_only=True, tag_field="type", tag="n"):
    """One request to a model."""

    t: Seconds
    prompt_tokens: Annotated[int, Meta(ge=1, le=PROMPT_TOKENS_MAX)] = msgspec.field(name="in")
    output_tokens: TokenCount = msgspec.field(name="out")
    model: str = ""
    h: list[Count] | None = None
    hash_ids: list[Count] | None = None


class StreamingStep(Step, kw_only=True, tag_field="type", tag="s"):
    """One request with a streamed answer."""


class SubAgent(msgspec.Struct, kw_only=True, tag_field="type", tag="subagent"):
    """Another agent started by a session; its times count from its own start."""

    t: Seconds
    requests: list[Step | StreamingStep | SubAgent]
    tool_tokens: TokenCount = 0
    system_tokens: TokenCount = 0


class Session(msgspec.Struct, kw_only=True):
    """One recorded session."""

    id: str
    requests: list[Step | StreamingStep | SubAgent]
    block_size: Annotated[int, Meta(ge=1, le=1 << 16)] = 64
    tool_tokens: TokenCount = 0
    system_tokens: TokenCount = 0


_DECODER: Final = msgspec.json.Decoder(Session)


def agent_requests(lines: Iterator[tuple[int, bytes]], path: Path, options: TraceOptions) -> Iterator[TraceRequest]:
    """Yield the requests of all sessions in order of time, with `sessions_at_once` sessions in memory."""
    seen: set[str] = set()
    turns = count()
    # Each entry: time, number that breaks ties, start of the session, its next request, iterator over the rest.
    heap: list[tuple[float, int, float, TraceRequest, Iterator[TraceRequest]]] = []

    def open_next(start_s: float) -> bool:
        """Open another session. False if there is none or the limit is reached."""
        if options.sessions_max and len(seen) >= options.sessions_max:
            return False
        for number, line in lines:
            session = decode_line(_DECODER, line, path=path, number=number, wanted=WANTED)
            if session.id in seen:
                raise trace_error(path, number, f"session {session.id!r} occurs twice in the file; ids must be unique")
            seen.add(session.id)
            requests = _session_requests(session, path, number, start_s, options)
            first = next(requests, None)
            if first is not None:
                heapq.heappush(heap, (first.at_s, next(turns), start_s, first, requests))
                return True
            if options.sessions_max and len(seen) >= options.sessions_max:
                return False
        return False

    while len(heap) < options.sessions_at_once and open_next(0.0):
        pass
    while heap:
        at_s, _, start_s, request, rest = heapq.heappop(heap)
        yield request
        following = next(rest, None)
        if following is not None:
            heapq.heappush(heap, (following.at_s, next(turns), start_s, following, rest))
        else:
            open_next(at_s)


@dataclass(frozen=True, slots=True)
class _AgentList:
    """The requests of one agent, with its start time and its beginning, which may be shared with other agents."""

    start_s: float
    steps: Sequence[Step]
    beginning_tokens: int
    beginning: str


def _lists(session: Session) -> Iterator[_AgentList]:
    """Yield the list of the session and those of all its sub-agents, outer before inner."""
    waiting: list[tuple[float, Session | SubAgent]] = [(0.0, session)]
    for start_s, agent in waiting:
        steps = [entry for entry in agent.requests if isinstance(entry, Step)]
        waiting.extend((start_s + entry.t, entry) for entry in agent.requests if isinstance(entry, SubAgent))
        if steps:
            yield _AgentList(
                start_s=start_s,
                steps=steps,
                beginning_tokens=agent.tool_tokens + agent.system_tokens,
                beginning=f"{steps[0].model}/{agent.tool_tokens}/{agent.system_tokens}/{session.block_size}",
            )


def _session_requests(
    session: Session, path: Path, number: int, start_s: float, options: TraceOptions
) -> Iterator[TraceRequest]:
    """Yield the requests of a session and its sub-agents in order of time; ids are computed per request."""
    salt = text_seed(f"session {session.id}")
    try:
        lists = list(_lists(session))
        shared = _SharedBeginnings(lists if options.shared_beginnings else [], session.block_size)
        streams = [_timed_steps(agent, order, session.block_size) for order, agent in enumerate(lists)]
        for position, (at_s, _, step, ids) in enumerate(heapq.merge(*streams, key=lambda item: item[:2])):
            request_id = f"{session.id}/{position}"
            yield TraceRequest(
                request_id=request_id,
                at_s=start_s + at_s * options.time_scale,
                session=session.id,
                prompt=PromptBlocks.scaled(
                    shared.put_into(salted(ids, salt), ids),
                    block_tokens=session.block_size,
                    token_count=step.prompt_tokens,
                    tail_seed=text_seed(f"tail of {request_id}"),
                    options=options,
                ),
                output_length=options.scaled_output(step.output_tokens),
            )
    except InvalidRequest as error:
        raise trace_error(path, number, f"session {session.id!r}: {error}") from error


def _timed_steps(agent: _AgentList, order: int, block_size: int) -> Iterator[tuple[float, int, Step, Words]]:
    """Yield a list's requests with the time since the session's start, and the ids of their blocks."""
    before = np.zeros(0, dtype=np.uint64)
    last_s = 0.0
    for position, step in enumerate(agent.steps):
        if step.t < last_s:
            raise InvalidRequest(f"request {position} at {step.t} s is earlier than the previous one at {last_s} s")
        last_s = step.t
        before = _block_ids(step, before, block_size, position)
        yield agent.start_s + step.t, order, step, before


def _block_ids(step: Step, before: Words, block_size: int, position: int) -> Words:
    """Return the block ids of a request. Lengths are checked before an array of that length is allocated."""
    if (step.h is None) == (step.hash_ids is None):
        raise InvalidRequest(f"request {position} must have either h or hash_ids")
    if step.hash_ids is not None:
        _check_count(len(step.hash_ids), step, block_size, position)
        return np.array(step.hash_ids, dtype=np.uint64)
    runs = step.h or []
    if len(runs) % 2 == 0:
        raise InvalidRequest(f"request {position}: h must be [kept, start, length, …], not {len(runs)} numbers")
    kept, starts, lengths = runs[0], runs[1::2], runs[2::2]
    if kept > len(before):
        raise InvalidRequest(f"request {position} keeps {kept} blocks of the previous one, which has {len(before)}")
    _check_count(kept + sum(lengths), step, block_size, position)
    made = [np.arange(start, start + length, dtype=np.uint64) for start, length in zip(starts, lengths, strict=True)]
    return np.concatenate([before[:kept], *made])


def _check_count(found: int, step: Step, block_size: int, position: int) -> None:
    """Check the number of ids. They stand for full blocks; one for a partial last block is accepted."""
    least, most = step.prompt_tokens // block_size, -(-step.prompt_tokens // block_size)
    if not least <= found <= most:
        raise InvalidRequest(
            f"request {position} has ids of {found} blocks, but {step.prompt_tokens} tokens have {least} full blocks "
            f"of {block_size}"
        )


class _SharedBeginnings:
    """Blocks of a session that stand for tools and system prompt, and that are shared with other sessions.

    Recorded ids do not express this sharing. The first request of each list determines which ids are shared; each of
    them is replaced by an id that depends only on the model, both lengths and its position. Within the session equal
    ids stay equal and different ones different, because each id and each replacement is used once.
    """

    def __init__(self, lists: Sequence[_AgentList], block_size: int) -> None:
        common: dict[int, int] = {}
        taken: set[tuple[str, int]] = set()
        for agent in lists:
            ids = _block_ids(agent.steps[0], np.zeros(0, dtype=np.uint64), block_size, 0)
            beginning = ids[: agent.beginning_tokens // block_size]
            made = salted(np.arange(len(beginning), dtype=np.uint64), text_seed(f"beginning {agent.beginning}"))
            for index, (own, shared) in enumerate(zip(beginning.tolist(), made.tolist(), strict=True)):
                if own not in common and (agent.beginning, index) not in taken:
                    common[own] = shared
                    taken.add((agent.beginning, index))
        self._own = np.array(sorted(common), dtype=np.uint64)
        self._common = np.array([common[own] for own in sorted(common)], dtype=np.uint64)

    def put_into(self, unique: Words, ids: Words) -> Words:
        """Replace those of `unique` whose recorded id, at the same index of `ids`, is shared."""
        if not len(self._own):
            return unique
        place = np.minimum(np.searchsorted(self._own, ids), len(self._own) - 1)
        return np.where(self._own[place] == ids, self._common[place], unique)
