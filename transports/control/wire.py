"""The words of the hand-over: every message that crosses the control connection, and how it becomes bytes.

A frame is a little-endian u32 length and one msgpack array `[tag, field, …]`. Decoding is strict: a wrong type, a
number out of range, a field too many, a page list that is not whole, all are a `RemoteProtocolError`, and nothing of
the frame is used. Nothing is ever unpickled or evaluated, and a length is judged before a byte is set aside for it.

This file must never do I/O, and must never change the meaning of a field without a new `VERSION`.
"""

from __future__ import annotations

import sys
from array import array
from typing import Annotated, Any, TypeAlias

import msgspec

from tidekv.states.errors import InvalidRequest, LocalProtocolError, RemoteProtocolError
from tidekv.states.types import Identity, PageIds, PoolMemory
from tidekv.transports.control import frames

VERSION = 4
FRAME_BYTES_MAX = 8 * 1024 * 1024
HELLO_BYTES_MAX = 1024 * 1024
"""Maximum size of a frame before the Hello is accepted: a Hello of 10,000 registered regions fits."""
CAUSE_CHARACTERS_MAX = 2048
NAME_CHARACTERS_MAX = 512
LENGTH = frames.LENGTH

Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Generation = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # It grows with every request that decode takes.
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_CHARACTERS_MAX)]
Cause = Annotated[str, msgspec.Meta(max_length=CAUSE_CHARACTERS_MAX)]
SECONDS_MAX = 1e9
Seconds = Annotated[float, msgspec.Meta(ge=0, le=SECONDS_MAX)]
ROOMS_NAMED_MAX = 2048
"""Maximum number of rooms in one Ping: with the longest ids it is half a frame."""
PackedPages = Annotated[bytes, msgspec.Meta(max_length=FRAME_BYTES_MAX)]
AuxFields: TypeAlias = dict[str, Any]  # The embedder's own msgpack values: logprobs, seeds; we only carry them.


class Message(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """One frame of the hand-over."""


class Room(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """The key of one hand-over, in every frame that belongs to it.

    `instance` is the decode worker's name and `epoch` what makes this start of its process unique; joined by a dash
    they are the `instance` of its transport and of its Hello. A request that is tried again has a higher generation.
    """

    instance: Name
    epoch: Name
    request_id: Name
    generation: Generation


class ProcessMark(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """What tells one process from every other, so that its death can be proven by whoever runs on the same host.

    `host` names the boot of the machine and the process namespace, `started` is the start time in kernel ticks: a pid
    alone may have been given away again.
    """

    host: Annotated[str, msgspec.Meta(max_length=512)]
    pid: Count
    started: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class ComponentRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """What decode asks for of one component: pages at positions from `first` on, up to the prompt's end.

    `pages` are their destinations, in decode's pool of this component. Empty: decode has all that it needs of it. None:
    this prefill rank writes nothing to that decode rank, and only compares.
    """

    component: Name
    first: Count
    pages: PackedPages | None

    def __post_init__(self) -> None:
        _check_packed(self.pages or b"")


class Hello(Message, frozen=True, tag="hello"):
    """Who speaks, what its pages look like and where they lie. Both sides send one, before anything else.

    `kv_heads_total` is how many KV heads the model has; 0: as many as all ranks hold together. The identity says how
    many this rank holds. Ranks are counted stage by stage: with 2 `stages` of 4 ranks, the second has ranks 4 to 7.
    `components` says where the pages of each component of the identity lie, by its name. `lease_s` is how long prefill
    keeps a room that decode does not name; the shorter one of both ends counts, and decode must ping more often.
    """

    version: Count
    instance: Name
    identity: Identity
    rank: Count
    ranks: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    metadata: Annotated[bytes, msgspec.Meta(max_length=FRAME_BYTES_MAX)]
    memory: PoolMemory
    process: ProcessMark
    lease_s: Seconds
    kv_heads_total: Count = 0
    stages: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] = 1
    components: dict[Name, PoolMemory] = {}
    heartbeat_s: Seconds = 0.0

    def __post_init__(self) -> None:
        if (told := sorted(self.components)) != (named := [component.name for component in self.identity.components]):
            raise ValueError(f"memory is told of the components {told}, the identity has {named}")
        if not all(component.groups for component in self.identity.components):
            raise ValueError("a component has at least one group of layers")


class Promise(Message, frozen=True, tag="promise"):
    """Decode has `decode_prefix_len` tokens; the rest of the prompt goes to `pages`: this is span 0.

    Every rank of a decode instance promises the room to every prefill rank, under the name of their `group`; the room
    opens when all have promised the same. `pages` is None where this prefill rank writes nothing to that decode rank,
    and only compares; empty, it is a full hit. `component_pages` names every component once, of each what is asked for
    beside the pages, to be in place before the last chunk of span 0. None: the worker has no components.
    `tokens` is None where prefill has them from elsewhere; empty bytes are a different thing, and wrong here.
    `key_seed` is what the storage keys of the prompt's pages begin with: empty, or 32 bytes of its namespace; None: the
    prompt must be kept nowhere.
    """

    room: Room
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    decode_prefix_len: Count
    pages: PackedPages | None
    tokens: Annotated[bytes, msgspec.Meta(max_length=FRAME_BYTES_MAX)] | None = None
    component_pages: tuple[ComponentRequest, ...] | None = None
    key_seed: Annotated[bytes, msgspec.Meta(max_length=32)] | None = None
    rank: Count = 0
    ranks: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] = 1
    group: Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)] = ""

    def __post_init__(self) -> None:
        _check_packed(self.pages or b"")
        if not self.rank < self.ranks:
            raise ValueError(f"there is no rank {self.rank} of {self.ranks}")
        for tail in self.component_pages or ():
            if (tail.pages is None) != (self.pages is None):
                raise ValueError(f"pages are given of the prompt, or of component {tail.component!r}, and not of both")
        if self.tokens is not None and len(self.tokens) != 4 * self.prompt_tokens:
            raise ValueError(f"tokens are {len(self.tokens)} bytes, {self.prompt_tokens} tokens have 4 bytes each")
        if self.key_seed is not None and len(self.key_seed) not in (0, 32):
            raise ValueError(f"key_seed has {len(self.key_seed)} bytes, not 0 or 32")


class Extend(Message, frozen=True, tag="extend"):
    """Pages [first, first + len(pages) / 4) of the prompt are wanted as well, into `pages`."""

    room: Room
    span: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    first: Count
    pages: PackedPages

    def __post_init__(self) -> None:
        _check_packed(self.pages)


class Chunk(Message, frozen=True, tag="chunk"):
    """Pages [first, first + count) of the prompt are in place, for this span; `last` ends the span."""

    room: Room
    rank: Count
    span: Count
    first: Count
    count: Count
    last: bool


class ComponentSent(Message, frozen=True, tag="component_sent"):
    """The tail of this component that was asked for is in place, as far as this rank writes it."""

    room: Room
    rank: Count
    component: Name


class Aux(Message, frozen=True, tag="aux"):
    """The first token and what belongs to it; `cached` says how many tokens prefill itself had, by source."""

    room: Room
    rank: Count
    first_token: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**32 - 1)]
    aux: AuxFields = {}
    cached: dict[str, Count] = {}


class Refused(Message, frozen=True, tag="refused"):
    """Prefill cannot serve this span any more: nothing of it was or will be written."""

    room: Room
    span: Count
    cause: Cause

    def __post_init__(self) -> None:
        _clean_cause(self)


class Failed(Message, frozen=True, tag="failed"):
    """This side gave the room up. Prefill says it at once, and Drained when no write is in flight any more."""

    room: Room
    cause: Cause

    def __post_init__(self) -> None:
        _clean_cause(self)


class Abort(Message, frozen=True, tag="abort"):
    """Stop writing to this room, and say Drained when no write of it is in flight."""

    room: Room


class Drained(Message, frozen=True, tag="drained"):
    """No write of this room is in flight, and none will be started."""

    room: Room
    rank: Count


class Received(Message, frozen=True, tag="received"):
    """Decode has all that it needs: prefill may free the pages of this room."""

    room: Room


class Ping(Message, frozen=True, tag="ping"):
    """The sender lives; `sent_at` is its own clock. Decode names its live rooms at the other end by request id and
    generation, in several pings if there are many: prefill renews their leases, and those of no others.
    """

    sent_at: Annotated[float, msgspec.Meta(ge=0)]
    rooms: Annotated[tuple[tuple[Name, Generation], ...], msgspec.Meta(max_length=ROOMS_NAMED_MAX)] = ()


class Bye(Message, frozen=True, tag="bye"):
    """The speaker closes the link, and why. Links use it themselves; their users never see it."""

    cause: Cause

    def __post_init__(self) -> None:
        _clean_cause(self)


AnyMessage = (
    Hello | Promise | Extend | Chunk | ComponentSent | Aux | Refused | Failed | Abort | Drained | Received | Ping | Bye
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def pack_pages(pages: PageIds) -> bytes:
    """Page ids as they travel: little-endian i32."""
    if sys.byteorder == "little":
        return pages.tobytes()
    swapped = array("i", pages)
    swapped.byteswap()
    return swapped.tobytes()


def unpack_pages(packed: bytes) -> PageIds:
    """The page ids of a message, owned by the caller."""
    pages = array("i")
    pages.frombytes(packed)
    if sys.byteorder != "little":
        pages.byteswap()
    return pages


def brief(cause: str) -> str:
    """A cause that fits into a message, on one line."""
    return frames.one_line(cause, characters_max=CAUSE_CHARACTERS_MAX)


def check_name(name: str) -> None:
    """Raise InvalidRequest for a request id that the other end would not take."""
    if not 1 <= len(name) <= NAME_CHARACTERS_MAX or not name.isprintable():
        raise InvalidRequest(f"{name[:40]!r} is no name: 1 to {NAME_CHARACTERS_MAX} printable characters are")


def encode_frame(message: Message, *, frame_bytes_max: int = FRAME_BYTES_MAX) -> bytes:
    """The frame of a message, length first. Raises LocalProtocolError over the limit, InvalidRequest for values that
    msgpack has no form for.
    """
    try:
        body = _encoder.encode(message)
    except (TypeError, OverflowError, RecursionError, ValueError) as error:
        raise InvalidRequest(f"{type(message).__name__} holds a value that cannot be sent: {error}") from error
    if len(body) > frame_bytes_max:
        raise LocalProtocolError(
            f"{type(message).__name__} has {len(body)} bytes, a frame has {frame_bytes_max} at most"
        )
    return frames.frame(body)


def body_length(prefix: bytes, *, frame_bytes_max: int = FRAME_BYTES_MAX) -> int:
    """The length that a frame's first four bytes announce, judged before anything is read or set aside for it."""
    return frames.body_length(prefix, frame_bytes_max=frame_bytes_max)


def decode_body(body: bytes) -> AnyMessage:
    """The message of one frame's body. Raises RemoteProtocolError, whatever the bytes are."""
    message = frames.decode(_decoder, body)
    _check_names(message)
    return message


def _check_names(message: AnyMessage) -> None:
    """Raise RemoteProtocolError for a name that would forge lines in a log. Our own are checked where they are made."""
    match message:
        case Ping() | Bye():
            return
        case Hello():
            names = (message.instance, *message.components)
        case _:
            room = message.room
            names = (room.instance, room.epoch, room.request_id)
    for name in names:
        if not name.isprintable():
            raise RemoteProtocolError(f"peer sent {type(message).__name__} with a name that is not printable: {name!r}")


def _clean_cause(message: Refused | Failed | Bye) -> None:
    """Make the cause fit for logs, at both ends: it may quote anything, and the other end may be hostile."""
    if (clean := brief(message.cause)) != message.cause:
        msgspec.structs.force_setattr(message, "cause", clean)


def _check_packed(packed: bytes) -> None:
    if len(packed) % 4:
        raise ValueError(f"page list of {len(packed)} bytes is not whole 4-byte ids")
