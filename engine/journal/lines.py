"""The lines of a journal: what each may hold, and the checksum that chains them.

A line is one JSON object that ends in `"crc"`: the CRC-32 of the line without it, begun with the line before's. So one
changed bit, a line that is gone, or two that changed places show at the very line, and cannot be taken for anything
that the core has done.
"""

from __future__ import annotations

import zlib
from typing import TypeAlias

import msgspec

from tidekv.states.events import AnyEvent
from tidekv.states.settings import CoreSettings

JOURNAL_VERSION = 5
"""The version of this format. A journal of another one is refused."""

SUFFIX_BYTES = len(b',"crc":"00000000"}')


class Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """One line; `event` names its kind."""


class RunLine(Line, frozen=True, kw_only=True, tag="run"):
    """The first line of a run."""

    version: int
    """JOURNAL_VERSION of the writer."""
    run: str
    """A random name of this run, which its segments repeat."""
    schema: str
    """A checksum of the event types, their fields, and the short forms of commands."""
    code: str
    """A checksum of the source of the core: where it is another one, a replay may rightly differ."""
    packages: dict[str, str]
    """Versions of Python and of what the run used."""
    page_keys: str
    """"digests": keys are keyed digests of the pages' tokens, the keys are never written; "tokens": packed tokens."""
    core: CoreSettings
    """The settings of the core; pool sizes are in here. `key_bytes` is that of the keys in this journal."""
    config: dict[str, object]
    """The configuration of the engine, as it was given."""
    layout: dict[str, object]
    """What makes bytes of pages: `page_bytes`, and what else the writer knew. Nothing here decides."""
    instance: str
    started_unix_s: float


class SegmentLine(Line, frozen=True, kw_only=True, tag="segment"):
    """The first line of every further file of a run. Its checksum goes on from the last line of the file before."""

    version: int
    run: str
    number: int
    """Counted from 1; the file with the `run` line would be number 0."""
    first_seq: int
    previous_crc: str


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """One event that the core took, and what followed from it: a list of these fields, in order."""

    seq: int
    """Counted from 0, without gaps."""
    took: AnyEvent
    """The event. Of `keys`, the first `same_pages` pages are left out: they are those of the request's arrival."""
    state: str | None
    """Where the event's request is now; null for events of no request, and where the request is over."""
    gave: msgspec.Raw
    """What followed: an `Answer` of tidekv.states.inspect.step_record."""
    same_pages: int
    """So many pages of the event's keys are left out."""


class StepsLine(Line, frozen=True, kw_only=True, tag="steps"):
    """Events that were taken one after the other."""

    steps: list[StepRecord]


class GapLine(Line, frozen=True, kw_only=True, tag="gap"):
    """Events are missing here: the writer could not keep up, or the disk was full. No replay goes beyond."""

    events: int


class EndLine(Line, frozen=True, kw_only=True, tag="end"):
    """The last line of a run that was closed. A run that was killed has none."""

    events: int
    """Events that the core took, all in all."""
    final: dict[str, int]
    """Checksums of the index, pools and requests, and every number of `Core.statistics`, at the end."""


STEPS_BEGIN = b'{"event":"steps","steps":'
"""What a line of steps begins with; a list of steps and its checksum follow."""
AnyLine: TypeAlias = RunLine | SegmentLine | StepsLine | GapLine | EndLine


def seal(body: bytes, crc: int) -> tuple[bytes, int]:
    """Close a line, given as a JSON object, with its checksum; returns it with its newline, and the checksum."""
    crc = zlib.crc32(body, crc)
    return b'%b,"crc":"%08x"}\n' % (body[:-1], crc), crc


def seal_steps(steps: bytes, crc: int) -> tuple[list[bytes], int]:
    """The same for an encoded list of steps; returns the line in pieces, since to put it together would copy it."""
    crc = zlib.crc32(b"}", zlib.crc32(steps, zlib.crc32(STEPS_BEGIN, crc)))
    return [STEPS_BEGIN, steps, b',"crc":"%08x"}\n' % crc], crc


def unseal(line: bytes, crc: int) -> tuple[bytes, int] | None:
    """Take a line, without its newline, apart again; None where it is not what was written after the line before."""
    body = line[:-SUFFIX_BYTES] + b"}"
    crc = zlib.crc32(body, crc)
    return (body, crc) if line[-SUFFIX_BYTES:] == b',"crc":"%08x"}' % crc else None
