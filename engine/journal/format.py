"""Format of the journal: the lines, their encoding, and the checksum that chains them.

A line is one JSON object that ends in `"sum"`: the XXH32 of the line without that field, seeded with the sum of the
line before (0 for the first). A flipped bit, a missing line and two swapped lines are therefore found at that line.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Union, get_args

import msgspec
from xxhash import xxh32_intdigest

from tidekv import states
from tidekv.states.events import (
    NO_DEADLINE,
    AnyEvent,
    ComponentLeft,
    Event,
    FinishRequested,
    FlushRequested,
    FoundComponent,
    FoundRun,
    HintReceived,
    HostPagesFound,
    PagesOffered,
    RequestArrived,
    RetractRequested,
    ShareRequested,
)
from tidekv.states.settings import CoreSettings

if TYPE_CHECKING:
    from collections.abc import Iterable

JOURNAL_VERSION = 1
"""The version of this format. A journal of another version is refused."""
PACKAGES = ("tidekv", "transitions", "msgspec", "torch", "nixl")
CHECKSUM_BYTES = 8
SUFFIX_BYTES = len(b',"sum":"00000000"}')


class Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """One line; `event` names its kind."""


class RunLine(Line, frozen=True, kw_only=True, tag="run"):
    """The first line of a run."""

    version: int
    """JOURNAL_VERSION of the writer."""
    run: str
    """A random name of this run, repeated by its segments."""
    schema: str
    """A checksum of the event types and their fields."""
    code: str
    """A checksum of the source of the core. A replay by other code may correctly diverge."""
    packages: dict[str, str]
    """Versions of Python and of the packages that the run used."""
    page_keys: str
    """"digests": each key is a keyed digest of a page's tokens, the secret is not written; "tokens": packed tokens."""
    key_bytes: int
    """Width of a page's key in the run itself; `core.key_bytes` is the width in this journal."""
    core: CoreSettings
    """Settings of the core, pool sizes included."""
    config: dict[str, object]
    """Configuration of the engine, as given."""
    layout: dict[str, object]
    """Identity and bytes of a page. Informational: no decision reads it."""
    instance: str
    started_unix_s: float
    started_at_s: float = 0.0
    """Time of the start on the monotonic clock of the events."""


class SegmentLine(Line, frozen=True, kw_only=True, tag="segment"):
    """The first line of every further file of a run. Its checksum continues from the last line of the file before."""

    version: int
    run: str
    number: int
    """Counted from 1; the file with the `run` line is number 0."""
    first_event: int
    """Number of the first event in this file."""
    previous_sum: str


# --- Events ---


class ArrivalRecord(msgspec.Struct, frozen=True, array_like=True, tag="RequestArrived"):
    """A `RequestArrived`. `keys`, `rest`, `namespace` are the journal's: digests, or clear. A null deadline is none."""

    at_s: float
    request_id: str
    request_number: int
    keys: bytes
    prompt_tokens: int
    namespace: str
    prefills: tuple[str, ...]
    deadline_at_s: float | None
    priority: int
    cache: bool
    generation: int
    can_recompute: bool
    lent_pages: tuple[int, ...]
    held_pages: int
    early: bool
    rest: bytes
    tokens_max: int
    lent_components: dict[str, tuple[int, ...]]
    peers: tuple[str, ...]
    peers_refused: tuple[str, ...]

    @classmethod
    def of(cls, event: RequestArrived, keys: bytes, rest: bytes, namespace: str) -> ArrivalRecord:
        """Make the record of an arrival, with keys, rest and namespace as they are written."""
        return cls(
            event.at_s,
            event.request_id,
            event.request_number,
            keys,
            event.prompt_tokens,
            namespace,
            event.prefills,
            None if event.deadline_at_s == NO_DEADLINE else event.deadline_at_s,
            event.priority,
            event.cache,
            event.generation,
            event.can_recompute,
            event.lent_pages,
            event.held_pages,
            event.early,
            rest,
            event.tokens_max,
            event.lent_components,
            event.peers,
            event.peers_refused,
        )

    def event(self) -> RequestArrived:
        """Return the event."""
        fields = msgspec.structs.asdict(self)
        if self.deadline_at_s is None:
            fields["deadline_at_s"] = NO_DEADLINE
        return RequestArrived(**fields)


class KeptRecord(msgspec.Struct, frozen=True, array_like=True):
    """Fields of `FinishRequested` and `RetractRequested`; the first `same_pages` keys, the arrival's, are left out."""

    at_s: float
    request_id: str
    keys: bytes
    tokens: int
    component_pages: tuple[ComponentLeft, ...]
    same_pages: int

    def fields(self, known: bytes) -> dict[str, Any]:  # Any: the fields of an event have several types.
        """Return the fields of the event; `known` are the keys that were left out."""
        fields = msgspec.structs.asdict(self)
        del fields["same_pages"]
        return {**fields, "keys": known + self.keys}


class FinishRecord(KeptRecord, frozen=True, array_like=True, tag="FinishRequested"):
    """A `FinishRequested`."""

    def event(self, known: bytes) -> FinishRequested:
        """Return the event; `known` are the keys that were left out."""
        return FinishRequested(**self.fields(known))


class RetractRecord(KeptRecord, frozen=True, array_like=True, tag="RetractRequested"):
    """A `RetractRequested`."""

    def event(self, known: bytes) -> RetractRequested:
        """Return the event; `known` are the keys that were left out."""
        return RetractRequested(**self.fields(known))


class OfferRecord(msgspec.Struct, frozen=True, array_like=True, tag="PagesOffered"):
    """A `PagesOffered`. `keys` and `namespace` are those of the journal."""

    at_s: float
    offer: int
    keys: bytes
    pages: tuple[int, ...]
    namespace: str
    offered_components: dict[str, tuple[int, ...]]
    hold_s: float

    def event(self) -> PagesOffered:
        """Return the event."""
        return PagesOffered(**msgspec.structs.asdict(self))


class FlushRecord(msgspec.Struct, frozen=True, array_like=True, tag="FlushRequested"):
    """A `FlushRequested`. `namespace` is that of the journal."""

    at_s: float
    call: int
    tiers: tuple[str, ...]
    namespace: str | None

    def event(self) -> FlushRequested:
        """Return the event."""
        return FlushRequested(**msgspec.structs.asdict(self))


class HintRecord(msgspec.Struct, frozen=True, array_like=True, tag="HintReceived"):
    """A `HintReceived`. `keys` and `namespace` are those of the journal."""

    at_s: float
    call: int
    action: str
    namespace: str
    keys: bytes
    tier: str
    ttl_s: float
    pages_max: int
    peer: str
    heat: tuple[int, int, int, int]

    def event(self) -> HintReceived:
        """Return the event."""
        return HintReceived(**msgspec.structs.asdict(self))


class ShareRecord(msgspec.Struct, frozen=True, array_like=True, tag="ShareRequested"):
    """A `ShareRequested`. `keys` and `namespace` are those of the journal."""

    at_s: float
    call: int
    read: str
    namespace: str
    keys: bytes
    pages_max: int

    def event(self) -> ShareRequested:
        """Return the event."""
        return ShareRequested(**msgspec.structs.asdict(self))


class FoundRecord(msgspec.Struct, frozen=True, array_like=True, tag="HostPagesFound"):
    """A `HostPagesFound`. Keys and namespaces are those of the journal."""

    at_s: float
    runs: tuple[FoundRun, ...]
    component_pages: tuple[FoundComponent, ...]

    def event(self) -> HostPagesFound:
        """Return the event."""
        return HostPagesFound(**msgspec.structs.asdict(self))


WITH_KEYS = (
    HostPagesFound,
    RequestArrived,
    FinishRequested,
    RetractRequested,
    PagesOffered,
    FlushRequested,
    HintReceived,
    ShareRequested,
)
"""Events with page keys or a namespace. The journal has records of its own for them."""


def event_types() -> tuple[type[Event], ...]:
    """Every event that a journal can hold, in the order of `tidekv.states.events`."""
    return get_args(AnyEvent)


if TYPE_CHECKING:
    EventRecord: TypeAlias = (
        Event
        | FoundRecord
        | ArrivalRecord
        | FinishRecord
        | RetractRecord
        | OfferRecord
        | FlushRecord
        | HintRecord
        | ShareRecord
    )
else:
    EventRecord = Union[  # The members are computed.
        (
            FoundRecord,
            ArrivalRecord,
            FinishRecord,
            RetractRecord,
            OfferRecord,
            FlushRecord,
            HintRecord,
            ShareRecord,
            *(kind for kind in event_types() if kind not in WITH_KEYS),
        )
    ]


class FrameRecord(msgspec.Struct, frozen=True, array_like=True):
    """One frame of the core's stack at a raise."""

    function: str
    """Qualified name."""
    offset: int
    """Bytecode offset of the instruction that raised, or that called the next frame."""
    line: int
    locals: dict[str, int | str]
    """Its local numbers and strings, and the ids of local objects, which distinguish the iterations of a loop."""


class RaiseRecord(msgspec.Struct, frozen=True):
    """A rule that raised within the core and was handled there."""

    at: int
    """The event, counted from 0 within the turn."""
    rule: str
    """Qualified name of the rule."""
    error: str
    """Qualified name of the exception's class."""
    text: str
    """The exception's text."""
    traceback: str
    stack: list[FrameRecord]
    """Where it raised: frames of the core, outermost first. A replay raises at the same instruction."""
    request_id: str = ""
    """The request affected by the raise; "" for a rule without a request."""


class ErrorRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """An exception that left `Core.step`: the event was refused, or the core broke."""

    at: int
    """The event, counted from 0 within the turn."""
    error: str
    """Name of the exception's class."""
    text: str = ""
    traceback: str = ""
    """Empty for a refused event."""


class StallRecord(msgspec.Struct, frozen=True, array_like=True):
    """A stall of the event loop of this process: nothing ran on it, neither this engine nor its callers."""

    at_s: float
    """When it ended."""
    seconds: float
    where: str
    """`file:line function` that blocked it; "" if the process was not scheduled, or nothing was seen."""


class TurnLine(Line, frozen=True, kw_only=True, omit_defaults=True, tag="turn"):
    """The events that one turn of the loop took, in order, and digests of their effects."""

    turn: int
    """Counted from 0, without gaps."""
    at_s: float
    """Time of the core after the last event, in monotonic seconds."""
    took: list[EventRecord]
    """The events, each as `[type, field, …]`."""
    checks: list[int] = []
    """By event: 16 bits of the digest after its effects, which are moves, commands and evictions; 0 if it has none, or
    is not covered. Absent like the next two if the turn is not covered (`tidekv.engine.journal.digest.COVERED_TURNS`).
    """
    parts: list[int] = []
    """16 bits of a digest of each part of the state after the turn."""
    digest: str = ""
    """64 bits, rolling: the moves, commands, evictions and parts of the state that were covered since the start."""
    raises: list[RaiseRecord] = []
    """Rules that raised."""
    errors: list[ErrorRecord] = []
    """Exceptions that left `Core.step`."""
    stalls: list[StallRecord] = []
    """Stalls of the event loop that were noted since the turn before. No decision reads them."""


class GapLine(Line, frozen=True, kw_only=True, tag="gap"):
    """Turns are missing here because the disk was too slow. A replay ends before this line."""

    turns: int
    events: int


class EndLine(Line, frozen=True, kw_only=True, tag="end"):
    """The last line of a run that was closed. A run that was killed has none."""

    turns: int
    events: int
    """Events that the core took."""
    final: dict[str, int]
    """Checksums of the index, pools and requests, and every number of `Core.statistics`, at the end."""


AnyLine: TypeAlias = RunLine | SegmentLine | TurnLine | GapLine | EndLine


# --- Encoding ---

_encode = msgspec.json.Encoder().encode


def encode_line(line: Line) -> bytes:
    """Encode a line without its checksum. A lone surrogate, which JSON cannot hold, becomes a question mark."""
    try:
        return _encode(line)
    except UnicodeEncodeError:
        return _encode(whole_text(msgspec.to_builtins(line)))


def whole_text(value: Any) -> Any:  # Any: whatever JSON can hold.
    """Return plain data with a question mark for each lone surrogate in its texts."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {whole_text(name): whole_text(field) for name, field in value.items()}
    if isinstance(value, list | tuple):
        return [whole_text(entry) for entry in value]
    return value


def seal(body: bytes, before: int) -> tuple[bytes, int]:
    """Close an encoded line with its checksum, given that of the line before; returns it with its newline, and its
    checksum.
    """
    # Not zlib.crc32: it lets other threads run during a long line, and the writer would wait for the loop each time.
    checksum = xxh32_intdigest(body, before)
    return b'%b,"sum":"%08x"}\n' % (body[:-1], checksum), checksum


def unseal(line: bytes, before: int) -> tuple[bytes, int] | None:
    """Return the body and the checksum of a line without its newline; None if it does not continue the chain."""
    body = line[:-SUFFIX_BYTES] + b"}"
    checksum = xxh32_intdigest(body, before)
    return (body, checksum) if line[-SUFFIX_BYTES:] == b',"sum":"%08x"}' % checksum else None


def write_lines(path: str | Path, lines: Iterable[bytes]) -> None:
    """Write a whole journal of encoded lines to one file."""
    checksum, sealed = 0, []
    for line in lines:
        done, checksum = seal(line, checksum)
        sealed.append(done)
    Path(path).write_bytes(b"".join(sealed))


# --- What a journal depends on ---


@lru_cache(maxsize=1)
def schema_checksum() -> str:
    """Return a checksum of every event type and field, and of every line."""
    kinds = (
        *event_types(),
        *get_args(EventRecord),
        *get_args(AnyLine),
        RaiseRecord,
        FrameRecord,
        ErrorRecord,
        StallRecord,
    )
    words = [(kind.__name__, tuple(field_types(kind).items())) for kind in kinds]
    return _checksum(repr(words).encode())


@lru_cache(maxsize=1)
def code_checksum() -> str:
    """Return a checksum of every source file of the core."""
    folder = Path(states.__path__[0])
    return _checksum(b"".join(path.read_bytes() for path in sorted(folder.rglob("*.py"))))


@lru_cache(maxsize=1)
def package_versions() -> dict[str, str]:
    """Return versions of Python and of the packages that affect a run."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def field_types(kind: type) -> dict[str, str]:
    """Return the fields of a struct with their types as written in the source, inherited ones first."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        found.update({name: str(words) for name, words in vars(base).get("__annotations__", {}).items()})
    return {name: words for name, words in found.items() if not name.startswith("__")}


def _checksum(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=CHECKSUM_BYTES).hexdigest()
