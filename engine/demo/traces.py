"""Reader of recorded workloads: Mooncake's request logs and sessions of coding agents, plain or gzip.

Recordings hold lengths and prefix structure but no text. The format is detected from the content. Reading streams: the
block ids of a request live until the next one is read.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from tidekv.engine.demo.agent_sessions import WANTED as SESSION_WANTED
from tidekv.engine.demo.agent_sessions import agent_requests
from tidekv.engine.demo.blocks import PROMPT_TOKENS_MAX, PromptBlocks, TraceOptions, TraceRequest, salted, text_seed
from tidekv.engine.demo.trace_lines import LINE_BYTES_MAX, decode_line, numbered_lines, trace_error

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
        raise trace_error(path, 0, f"is empty; expected {MOONCAKE_WANTED}, or {SESSION_WANTED}")
    wanted = f"{MOONCAKE_WANTED}, or {SESSION_WANTED}"
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
                tail_seed=text_seed(f"tail of {request_id}"),
                options=options,
            ),
            output_length=options.scaled_output(record.output_length),
        )
