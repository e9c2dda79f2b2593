"""Reader of recorded workloads: Mooncake's request logs and sessions of coding agents, plain or gzip.

Recordings hold lengths and prefix structure but no text. The format is detected from the content. Reading streams: the
block ids of a request live until the next one is read, and the maximum length of a line bounds the memory, also for a
small gzip file that unpacks to a huge one.
"""

from __future__ import annotations

import gzip
import heapq
import itertools
import zlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, BinaryIO, Final, Literal, TypeAlias, TypeVar, cast

import msgspec
import numpy as np
from msgspec import Meta

from demo.blocks import (
    PROMPT_TOKENS_MAX,
    PromptBlocks,
    TraceOptions,
    TraceRequest,
    salted,
    text_seed,
)
from tidekv.engine.synthetic.words import Words
from tidekv.states.errors import InvalidRequest, cause_of

GZIP_MAGIC: Final = b"\x1f\x8b"
LINE_BYTES_MAX: Final = 1 << 28

Record = TypeVar("Record")


def trace_error(path: Path, line: int, what: str) -> InvalidRequest:
    """Return the error for one line of a recording; line 0 stands for the whole file."""
    return InvalidRequest(f"trace {path}, line {line}: {what}" if line else f"trace {path} {what}")


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield each line that is not blank with its number, from 1. The file is open until the iterator ends or is closed.

    Raises InvalidRequest if the file cannot be opened, read or unpacked, or if a line exceeds LINE_BYTES_MAX.
    """
    number = 0
    try:
        with _opened(path) as file:
            while line := file.readline(LINE_BYTES_MAX + 1):
                number += 1
                if len(line) > LINE_BYTES_MAX:
                    raise trace_error(path, number, f"the line is longer than {LINE_BYTES_MAX} bytes")
                if not line.isspace():
                    yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise trace_error(path, number + 1, f"the gzip stream is damaged or cut off ({error})") from error
    except OSError as error:
        raise trace_error(path, number and number + 1, f"cannot be read: {cause_of(error)}") from error


def decode_line(decoder: msgspec.json.Decoder[Record], line: bytes, *, path: Path, number: int, wanted: str) -> Record:
    """Decode one line. Raises InvalidRequest, which names the wrong or missing field and the expected format."""
    try:
        return decoder.decode(line)
    except msgspec.ValidationError as error:
        raise trace_error(path, number, f"{error}; expected {wanted}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise trace_error(path, number, f"not valid JSON ({error}); expected {wanted}") from error


def _opened(path: Path) -> BinaryIO:
    """Open a recording, and unpack it if its first bytes are those of gzip, regardless of its name."""
    with path.open("rb") as file:
        packed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
    return cast(BinaryIO, gzip.open(path, "rb")) if packed else path.open("rb")


Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
TokenCount = Annotated[int, Meta(ge=0, le=PROMPT_TOKENS_MAX)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]

WANTED: Final = (
    "an agent session: an object with id, block_size and requests, each with t, type, in, out and h or hash_ids"
)


class AgentStep(msgspec.Struct, kw_only=True, tag_field="type", tag="n"):
    """One request to a model.

    Its blocks have one of two forms: `hash_ids`, one id per full block, as published; or `h = [kept, start, length,
    start, length, …]`: the first `kept` ids of the previous request of the list, then runs of consecutive ids. Ids are
    local to their session. Tokens after the last full block have no id.
    """

    t: Seconds
    prompt_tokens: Annotated[int, Meta(ge=1, le=PROMPT_TOKENS_MAX)] = msgspec.field(name="in")
    output_tokens: TokenCount = msgspec.field(name="out")
    model: str = ""
    h: list[Count] | None = None
    hash_ids: list[Count] | None = None


class StreamingStep(AgentStep, kw_only=True, tag_field="type", tag="s"):
    """One request with a streamed answer."""


class SubAgent(msgspec.Struct, kw_only=True, tag_field="type", tag="subagent"):
    """Another agent started by a session; its times count from its own start."""

    t: Seconds
    requests: list[AgentStep | StreamingStep | SubAgent]
    tool_tokens: TokenCount = 0
    system_tokens: TokenCount = 0


class Session(msgspec.Struct, kw_only=True):
    """One recorded session: a list of requests, with sub-agents as nested lists."""

    id: str
    requests: list[AgentStep | StreamingStep | SubAgent]
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
    steps: Sequence[AgentStep]
    beginning_tokens: int
    beginning: str


def _lists(session: Session) -> Iterator[_AgentList]:
    """Yield the list of the session and those of all its sub-agents, outer before inner."""
    waiting: list[tuple[float, Session | SubAgent]] = [(0.0, session)]
    for start_s, agent in waiting:
        steps = [entry for entry in agent.requests if isinstance(entry, AgentStep)]
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
                    component_seed=text_seed(f"tail of {request_id}"),
                    options=options,
                ),
                output_length=options.scaled_output(step.output_tokens),
            )
    except InvalidRequest as error:
        raise trace_error(path, number, f"session {session.id!r}: {error}") from error


def _timed_steps(agent: _AgentList, order: int, block_size: int) -> Iterator[tuple[float, int, AgentStep, Words]]:
    """Yield a list's requests with the time since the session's start, and the ids of their blocks."""
    before = np.zeros(0, dtype=np.uint64)
    last_s = 0.0
    for position, step in enumerate(agent.steps):
        if step.t < last_s:
            raise InvalidRequest(f"request {position} at {step.t} s is earlier than the previous one at {last_s} s")
        last_s = step.t
        before = _block_ids(step, before, block_size, position)
        yield agent.start_s + step.t, order, step, before


def _block_ids(step: AgentStep, before: Words, block_size: int, position: int) -> Words:
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


def _check_count(found: int, step: AgentStep, block_size: int, position: int) -> None:
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


MOONCAKE_BLOCK_TOKENS: Final = 512
MOONCAKE_WANTED: Final = "a Mooncake request: an object with timestamp, input_length, output_length and hash_ids"

TraceFormat: TypeAlias = Literal["mooncake", "agent sessions"]


class MooncakeLine(msgspec.Struct):
    """One request as recorded by Mooncake: milliseconds, tokens, and one global id per block of 512 tokens."""

    timestamp: Annotated[float, Meta(ge=0, le=1e15)]
    input_length: Annotated[int, Meta(ge=1, le=PROMPT_TOKENS_MAX)]
    output_length: Annotated[int, Meta(ge=0, le=PROMPT_TOKENS_MAX)]
    hash_ids: list[Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]]


_MOONCAKE: Final = msgspec.json.Decoder(MooncakeLine)
_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def trace_format(path: str | Path) -> TraceFormat:
    """Detect the format of a recording from its first line. Raises InvalidRequest for an unknown one."""
    path = Path(path)
    lines = _sessions_or_lines(path)
    try:
        number, line = next(lines, (0, b""))
    finally:
        lines.close()
    if not number:
        raise trace_error(path, 0, f"is empty; expected {MOONCAKE_WANTED}, or {WANTED}")
    wanted = f"{MOONCAKE_WANTED}, or {WANTED}"
    keys = decode_line(_OBJECT, line, path=path, number=number, wanted=wanted).keys()
    if "requests" in keys:
        return "agent sessions"
    if "hash_ids" in keys or "timestamp" in keys:
        return "mooncake"
    raise trace_error(path, number, f"has the fields {', '.join(keys) or '(none)'}; expected {wanted}")


def read_trace(path: str | Path, options: TraceOptions | None = None) -> Iterator[TraceRequest]:
    """Yield the requests of a recording in order of time.

    Raises InvalidRequest with file, line and expected format: at the call for a file that cannot be read or is not a
    recording, and during the iteration for a wrong line.
    """
    path, options = Path(path), options or TraceOptions()
    found = trace_format(path)
    lines = _sessions_or_lines(path)
    if found == "mooncake":
        requests = _mooncake_requests(lines, path, options)
    else:
        requests = agent_requests(lines, path, options)
    return itertools.islice(_short_enough(requests, options), options.requests_max or None)


def _short_enough(requests: Iterator[TraceRequest], options: TraceOptions) -> Iterator[TraceRequest]:
    limit = options.prompt_tokens_max or PROMPT_TOKENS_MAX
    return (request for request in requests if request.prompt.token_count <= limit)


def _sessions_or_lines(path: Path) -> Generator[tuple[int, bytes], None, None]:
    """Yield the lines of a recording. A file that is one JSON object over many lines gives one long line."""
    lines = numbered_lines(path)
    first = next(lines, None)
    if first is None:
        return
    number, line = first
    if line.strip() != b"{":
        yield first
        yield from lines
        return
    parts, size = [line], len(line)
    for _, more in lines:
        parts.append(more)
        size += len(more)
        if size > LINE_BYTES_MAX:
            raise trace_error(path, number, f"the object that begins here is longer than {LINE_BYTES_MAX} bytes")
    yield number, b"".join(parts)


def _mooncake_requests(lines: Iterator[tuple[int, bytes]], path: Path, options: TraceOptions) -> Iterator[TraceRequest]:
    before_ms = 0.0
    for number, line in lines:
        record = decode_line(_MOONCAKE, line, path=path, number=number, wanted=MOONCAKE_WANTED)
        full, least = -(-record.input_length // MOONCAKE_BLOCK_TOKENS), record.input_length // MOONCAKE_BLOCK_TOKENS
        if not least <= len(record.hash_ids) <= full:
            raise trace_error(
                path,
                number,
                f"hash_ids has {len(record.hash_ids)} ids, but {record.input_length} tokens have {full} blocks of "
                f"{MOONCAKE_BLOCK_TOKENS}",
            )
        if record.timestamp < before_ms:
            raise trace_error(
                path,
                number,
                f"timestamp {record.timestamp:g} ms is earlier than that of the previous request, {before_ms:g} ms",
            )
        before_ms = record.timestamp
        request_id = f"request-{number}"
        yield TraceRequest(
            request_id=request_id,
            at_s=record.timestamp / 1000 * options.time_scale,
            session="",
            prompt=PromptBlocks.scaled(
                salted(np.array(record.hash_ids, dtype=np.uint64), salt=0),
                block_tokens=MOONCAKE_BLOCK_TOKENS,
                token_count=record.input_length,
                component_seed=text_seed(f"tail of {request_id}"),
                options=options,
            ),
            output_length=options.scaled_output(record.output_length),
        )
