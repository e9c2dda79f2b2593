"""Messages of the hand-over: every message that crosses the control connection, and its encoding.

A frame is a little-endian u32 length and one msgpack array `[tag, field, …]`. Decoding is strict: a wrong type, a
number out of range, an extra field, or an incomplete page list raises `RemoteProtocolError`, and nothing of the frame
is used. Nothing is ever unpickled or evaluated, and a length is checked before any buffer is allocated for it.

This module does no I/O. A change of a field's meaning requires a new `VERSION`.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec

from tidekv.states.errors import InvalidRequest, LocalProtocolError, RemoteProtocolError
from tidekv.states.handover.prompt_digest import DIGEST_BYTES
from tidekv.states.handover.rank_place import SOLE, RankPlace
from tidekv.states.types import FULL, Identity, PageIds, PoolMemory
from tidekv.transports import frames
from tidekv.transports.aux_values import AUX_BYTES_MAX

VERSION = 1
FRAME_BYTES_MAX = 8 * 1024 * 1024
HELLO_BYTES_MAX = 1024 * 1024
"""Maximum size of a frame before the Hello is accepted: a Hello of 10,000 registered regions fits."""
CAUSE_CHARACTERS_MAX = 2048
NAMESPACE_CHARACTERS_MAX = 16384
"""Maximum characters of a joined namespace."""
NAME_CHARACTERS_MAX = 512
LENGTH = frames.LENGTH

Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Generation = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # Grows with every request that decode accepts.
Uses = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_CHARACTERS_MAX)]
Cause = Annotated[str, msgspec.Meta(max_length=CAUSE_CHARACTERS_MAX)]
SECONDS_MAX = 1e9
Seconds = Annotated[float, msgspec.Meta(ge=0, le=SECONDS_MAX)]
ROOMS_NAMED_MAX = 2048
"""Maximum number of rooms in one Ping: with the longest ids they fill half a frame."""
CHECKSUM_BYTES = 16
"""Bytes of one page's checksum in a message: XXH3-128 over the bytes of the page that the sender writes."""
PromptBytes = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
TOKEN_MAX = 2**32 - 1
PROMISE_BYTES_MAX = 64 * 1024
"""Maximum bytes of a promise beside its tokens and its list of full pages: names, and the pages of components."""
Checksums = Annotated[bytes, msgspec.Meta(max_length=FRAME_BYTES_MAX)]
PackedPages = Annotated[bytes, msgspec.Meta(max_length=FRAME_BYTES_MAX)]
AuxBytes = Annotated[bytes, msgspec.Meta(max_length=AUX_BYTES_MAX)]
Sends = Literal["computed", "cached"]
CACHE_SOURCES_MAX = 16
"""Maximum number of sources in the counts of cached tokens."""


class Message(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """One frame of the hand-over."""


class RoomId(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Key of one hand-over, in every message that belongs to it.

    `instance` is the decode worker's name and `epoch` is unique to this start of its process; joined by a dash they are
    the `instance` of its transport and of its Hello. A retried request has a higher generation.
    """

    instance: Name
    epoch: Name
    request_id: Name
    generation: Generation


class ProcessMark(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Identity of one process, so that another process on the same host can prove its death.

    `host` names the boot of the machine and the process namespace. `started` is the start time in kernel ticks: the
    kernel reuses pids.
    """

    host: Annotated[str, msgspec.Meta(max_length=512)]
    pid: Count
    started: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class ComponentRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Pages of one component that decode requests: positions from `first` to the prompt's end.

    `pages` are their destinations in decode's pool of this component. Empty: decode has all that it needs of it. None:
    this prefill rank writes nothing to that decode rank, and only compares the promise.
    """

    component: Name
    first: Count
    pages: PackedPages | None

    def __post_init__(self) -> None:
        _check_packed(self.pages or b"")


class Hello(Message, frozen=True, tag="hello"):
    """The sender's identity, page layout and memory. Each side sends one, before anything else.

    `kv_heads_total` is the number of KV heads of the model; 0: as many as all ranks hold together. The identity has the
    number that this rank holds. Ranks are counted stage by stage: with 2 `stages` of 4 ranks, the second has ranks 4 to
    7. `components` holds the memory of each component of the identity, by name. `lease_s` is the time in seconds for
    which prefill keeps a room that decode does not name; the shorter one of both ends applies, and decode must ping
    more often. `heartbeat_s` is the sender's ping interval in seconds; 0: it only answers pings. `checksums` is what
    the sender does about checksums of pages: decode requires them or not, prefill offers them or cannot compute them.
    `staging` is decode's staging ring, one segment of one page; None: it has none. With more than one `contexts`, the
    ranks of prefill are counted context by context, each with all stages, and hold parts of every prompt's pages: see
    `tidekv.states.handover.context_parts`, also for `stripe_pages`.
    `liveness_key` is the key of questions for signs of life of prefill; see `tidekv.transports.control.liveness`.
    `sends` is what the links of this listener are for: pages that prefill computes, or those in the host memory of a
    decode worker. The dialling end names what it wants. `shares_at` is the address at which a decode worker's host
    memory can be read; empty: it shares none. `cached_place` is the place of the rank whose host memory a link is
    about, if cached pages are sent: these links pair ranks of the same place, so `rank` and `ranks` are those of a
    single one.
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
    checksums: Literal["none", "required", "offered"] = "none"
    staging: PoolMemory | None = None
    contexts: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] = 1
    stripe_pages: Count = 0
    liveness_key: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    sends: Sends = "computed"
    shares_at: Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)] = ""
    cached_place: RankPlace = SOLE

    @property
    def place(self) -> RankPlace:
        """Place of the sender's rank."""
        return RankPlace(
            rank=self.rank,
            ranks=self.ranks,
            stages=self.stages,
            kv_heads_total=self.kv_heads_total,
            contexts=self.contexts,
            stripe_pages=self.stripe_pages,
        )

    @property
    def context(self) -> int:
        """The context of the rank."""
        return self.rank * self.contexts // self.ranks

    def __post_init__(self) -> None:
        given, named = sorted(self.components), [component.name for component in self.identity.components]
        if given != named:
            raise ValueError(f"memory is given for the components {given}, the identity has {named}")
        if not all(component.groups for component in self.identity.components):
            raise ValueError("a component has at least one group of layers")


class Promise(Message, frozen=True, tag="promise"):
    """Decode holds `decode_prefix_len` tokens and requests the rest of the prompt into `pages`: this is span 0.

    Every rank of a decode instance promises the room to every prefill rank, with the name of their `group`; the room
    opens once all have promised the same. `prompt_digest` is that of the prompt in its namespace (see
    `tidekv.states.handover.prompt_digest`): prefill sends pages of this very prompt or none. `pages` is None if this
    prefill rank writes nothing to that decode rank and only compares; empty, it is a full hit. `component_pages` names
    every component once, with the pages requested of it, which are span 0 of that component: it ends before the last
    chunk of span 0 of the full pages. None: the worker has no components. `tokens` is None if prefill has the prompt
    from elsewhere; empty bytes are invalid. `token_behind` is the one behind the prompt in a read of cached pages that
    are named by pairs of tokens, of which the last page has one; empty without. `key_seed` starts the storage keys of
    the prompt's pages: empty, or the 32 bytes of its namespace; None: the prompt must not be stored.
    """

    room: RoomId
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    decode_prefix_len: Count
    pages: PackedPages | None
    prompt_digest: PromptBytes
    tokens: Annotated[bytes, msgspec.Meta(max_length=FRAME_BYTES_MAX)] | None = None
    component_pages: tuple[ComponentRequest, ...] | None = None
    key_seed: Annotated[bytes, msgspec.Meta(max_length=32)] | None = None
    rank: Count = 0
    ranks: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] = 1
    group: Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)] = ""
    token_behind: Annotated[bytes, msgspec.Meta(max_length=4)] = b""

    def __post_init__(self) -> None:
        _check_packed(self.pages or b"")
        if len(self.token_behind) not in (0, 4):
            raise ValueError(f"token_behind has {len(self.token_behind)} bytes, a token has 4")
        if not self.rank < self.ranks:
            raise ValueError(f"there is no rank {self.rank} of {self.ranks}")
        for request in self.component_pages or ():
            if (request.pages is None) != (self.pages is None):
                raise ValueError(
                    f"pages must be given for both the prompt and component {request.component!r}, or for neither"
                )
        if self.tokens is not None and len(self.tokens) != 4 * self.prompt_tokens:
            raise ValueError(f"tokens are {len(self.tokens)} bytes, {self.prompt_tokens} tokens have 4 bytes each")
        if self.key_seed is not None and len(self.key_seed) not in (0, 32):
            raise ValueError(f"key_seed has {len(self.key_seed)} bytes, not 0 or 32")


class Extend(Message, frozen=True, tag="extend"):
    """Request for further pages of a component, into `pages`: positions [first, first + len(pages) / 4) of the prompt.

    Of the full KV they are pages that were promised; of a component, pages that the prompt's end needs.
    """

    room: RoomId
    span: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    first: Count
    pages: PackedPages
    component: Name = FULL

    def __post_init__(self) -> None:
        _check_packed(self.pages)


class Chunk(Message, frozen=True, tag="chunk"):
    """Pages [first, first + count) of the prompt are in place for this span of a component; `last` ends the span.

    `checksums` has those of the pages, as far as this rank writes them; empty unless decode requires them.
    """

    room: RoomId
    rank: Count
    span: Count
    first: Count
    count: Count
    last: bool
    checksums: Checksums = b""
    component: Name = FULL


class StagingRequest(Message, frozen=True, tag="staging_request"):
    """Prefill asks for `count` slots of decode's staging ring, for pages of `component` ("full": the full KV).

    `ticket` is a number that is not used twice in a room. Prefill returns slots that it does not report by Staged.
    """

    room: RoomId
    rank: Count
    ticket: Count
    component: Name
    count: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class StagingGranted(Message, frozen=True, tag="staging_granted"):
    """Slots [first, first + count) of the ring are those of this ticket."""

    room: RoomId
    ticket: Count
    first: Count


class StagingReturned(Message, frozen=True, tag="staging_returned"):
    """Prefill does not write to the slots of this ticket any more, and reports nothing in them; or no longer waits."""

    room: RoomId
    rank: Count
    ticket: Count


class Staged(Message, frozen=True, tag="staged"):
    """The slots of this ticket have the slices of pages from position `first` of the prompt on, requested by `span` of
    the component.

    Decode copies them to the pages before it takes the next message of the room.
    """

    room: RoomId
    rank: Count
    ticket: Count
    component: Name
    span: Count
    first: Count


class Aux(Message, frozen=True, tag="aux"):
    """The first token and its data. `cached` is the number of tokens that prefill had cached, by source.

    `aux` has the bytes of a map: see `aux_values`.
    """

    room: RoomId
    rank: Count
    first_token: Annotated[int, msgspec.Meta(ge=0, le=TOKEN_MAX)]
    aux: AuxBytes = b"\x80"
    cached: Annotated[dict[Name, Count], msgspec.Meta(max_length=CACHE_SOURCES_MAX)] = {}


class Refused(Message, frozen=True, tag="refused"):
    """Prefill can no longer serve this span: nothing of it was or will be written."""

    room: RoomId
    span: Count
    cause: Cause

    def __post_init__(self) -> None:
        _clean_cause(self)


class FailedRoom(Message, frozen=True, tag="failed"):
    """The sender ended the room. Prefill sends it at once, and Drained when no write is in flight."""

    room: RoomId
    cause: Cause

    def __post_init__(self) -> None:
        _clean_cause(self)


class Abort(Message, frozen=True, tag="abort"):
    """Stop writing to this room, and send Drained when no write of it is in flight."""

    room: RoomId


class Drained(Message, frozen=True, tag="drained"):
    """No write of this room is in flight, and none will be started."""

    room: RoomId
    rank: Count


class Declined(Message, frozen=True, tag="declined"):
    """Decode will not promise a room for this prompt: prefill may free its pages. The generation has no meaning.

    It may take the place of decode's Hello, since also a worker whose layout does not match must be able to decline.
    Prefill then closes the link, which confirms it.
    """

    room: RoomId
    prompt_digest: PromptBytes


class Received(Message, frozen=True, tag="received"):
    """Decode has all that it needs: prefill may free the pages of this room."""

    room: RoomId


class OfferPrompt(Message, frozen=True, tag="offer_prompt"):
    """A decode worker that goes away asks another one to take a prompt, whose pages that one then reads as a peer.

    It reads them at the `shares_at` of the Hello, within `within_s` seconds, and answers with PromptTaken of the same
    `number`. `namespace` is the joined name. `heat` is what the order of eviction knows of it: the uses of the cache
    since the prompt was used and since it was inserted, its hits and its priority.
    """

    number: Count
    namespace: Annotated[str, msgspec.Meta(max_length=NAMESPACE_CHARACTERS_MAX)]
    tokens: Annotated[bytes, msgspec.Meta(max_length=FRAME_BYTES_MAX)]
    heat: tuple[Uses, Uses, Count, Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]]
    within_s: Seconds

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) % 4:
            raise ValueError(f"tokens are {len(self.tokens)} bytes: each has 4, and a prompt has one at least")


class PromptTaken(Message, frozen=True, tag="prompt_taken"):
    """The answer to OfferPrompt: host memory has the first `there` pages of the prompt now, `brought` of them by it.

    `cause` is why it has not all of them. `refuses`: it takes no further prompt of this worker either.
    """

    number: Count
    there: Count = 0
    brought: Count = 0
    cause: Cause = ""
    refuses: bool = False

    def __post_init__(self) -> None:
        _clean_cause(self)


class Ping(Message, frozen=True, tag="ping"):
    """Sign of life; `sent_at` is the sender's own clock.

    Decode names its live rooms at the other end by request id and generation, in several pings if there are many:
    prefill renews the leases of these rooms and of no others.
    """

    sent_at: Annotated[float, msgspec.Meta(ge=0)]
    rooms: Annotated[tuple[tuple[Name, Generation], ...], msgspec.Meta(max_length=ROOMS_NAMED_MAX)] = ()


class Bye(Message, frozen=True, tag="bye"):
    """The sender closes the link, for this cause. Links send and consume it themselves; their users never see it."""

    cause: Cause

    def __post_init__(self) -> None:
        _clean_cause(self)


AnyMessage = (
    Hello
    | Promise
    | Extend
    | Chunk
    | StagingRequest
    | StagingGranted
    | StagingReturned
    | Staged
    | Aux
    | Refused
    | FailedRoom
    | Abort
    | Drained
    | Declined
    | Received
    | OfferPrompt
    | PromptTaken
    | Ping
    | Bye
)

AT_THE_TAG: Final = "at `$[0]`"
"""End of the decoder's error about the kind of a message."""
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


@dataclass(frozen=True, slots=True)
class Inbound:
    """Decoders of what one end may send: `first` until its Hello is accepted, `later` after that.

    A frame of any other kind is refused by its tag, before its fields are looked at.
    """

    first: msgspec.msgpack.Decoder[Any]  # Any: each decoder has a union of its own.
    later: msgspec.msgpack.Decoder[Any]


FROM_DECODE: Final = Inbound(
    first=msgspec.msgpack.Decoder(Hello | Declined | Bye),
    later=msgspec.msgpack.Decoder(
        Promise | Extend | StagingGranted | FailedRoom | Abort | Declined | Received | OfferPrompt | Ping | Bye,
    ),
)
FROM_PREFILL: Final = Inbound(
    first=msgspec.msgpack.Decoder(Hello | Bye),
    later=msgspec.msgpack.Decoder(
        Chunk
        | StagingRequest
        | StagingReturned
        | Staged
        | Aux
        | Refused
        | FailedRoom
        | Drained
        | PromptTaken
        | Ping
        | Bye
    ),
)


def pack_pages(pages: PageIds) -> bytes:
    """Return page ids in their wire form: little-endian i32."""
    if sys.byteorder == "little":
        return pages.tobytes()
    swapped = array("i", pages)
    swapped.byteswap()
    return swapped.tobytes()


def unpack_pages(packed: bytes) -> PageIds:
    """Return the page ids of a message. The caller owns the array."""
    pages = array("i")
    pages.frombytes(packed)
    if sys.byteorder != "little":
        pages.byteswap()
    return pages


def brief(cause: str) -> str:
    """Return a cause on one line, cut to what a message may hold."""
    return frames.one_line(cause, characters_max=CAUSE_CHARACTERS_MAX)


def check_name(name: str) -> None:
    """Raise InvalidRequest for a request id that the other end would refuse."""
    if not 1 <= len(name) <= NAME_CHARACTERS_MAX or not name.isprintable():
        raise InvalidRequest(f"{name[:40]!r} is no name: a name has 1 to {NAME_CHARACTERS_MAX} printable characters")


def check_promise(request_id: str, *, prompt_tokens: int, pages: int) -> None:
    """Raise InvalidRequest for a prompt whose promise no frame can hold, with `prompt_tokens` sent and `pages`
    requested of prefill.
    """
    size = 4 * prompt_tokens + 4 * pages + PROMISE_BYTES_MAX
    if size > FRAME_BYTES_MAX:
        raise InvalidRequest(
            f"request {request_id!r}: its promise would have {size} bytes ({prompt_tokens} tokens sent with it, {pages}"
            f" pages), a frame has {FRAME_BYTES_MAX} at most: let a router send the prompt to prefill instead of"
            " `send_prompt`, or use larger pages"
        )


def encode_frame(message: Message, *, frame_bytes_max: int = FRAME_BYTES_MAX) -> bytes:
    """Return the frame of a message, length first.

    Raises LocalProtocolError over the limit, InvalidRequest for values that msgpack cannot encode.
    """
    try:
        body = _encoder.encode(message)
    except (TypeError, OverflowError, RecursionError, ValueError) as error:
        raise InvalidRequest(f"{type(message).__name__} holds a value that cannot be sent: {error}") from error
    if len(body) > frame_bytes_max:
        raise LocalProtocolError(
            f"{type(message).__name__} has {len(body)} bytes, a frame has {frame_bytes_max} at most"
        )
    return LENGTH.pack(len(body)) + body


def decode_body(body: bytes, decoder: msgspec.msgpack.Decoder[Any] = _decoder) -> AnyMessage:
    """Return the message of one frame's body. Raises RemoteProtocolError for any other bytes, and for a message that is
    not one of the decoder's; without a decoder, messages of both ends are taken.
    """
    try:
        message: AnyMessage = decoder.decode(body)
    except frames.NO_MESSAGE as error:
        refusal = frames.refusal_of(body, error)
        if str(error).endswith(AT_THE_TAG):
            refusal = RemoteProtocolError(f"peer sent a message that it may not send now: {refusal}")
        raise refusal from error
    _check_names(message)
    return message


def _check_names(message: AnyMessage) -> None:
    """Raise RemoteProtocolError for a name that would forge lines in a log. Our own names are checked when made."""
    match message:
        case Ping() | Bye() | OfferPrompt() | PromptTaken():
            return
        case Hello():
            names = (message.instance, *message.components)
        case _:
            room = message.room
            names = (room.instance, room.epoch, room.request_id)
    if not "".join(names).isprintable():
        name = next(name for name in names if not name.isprintable())
        raise RemoteProtocolError(f"peer sent {type(message).__name__} with a name that is not printable: {name!r}")


def _clean_cause(message: Refused | FailedRoom | PromptTaken | Bye) -> None:
    """Replace the cause by its one-line form, at both ends: it may quote anything, and the other end may be hostile."""
    if (clean := brief(message.cause)) != message.cause:
        msgspec.structs.force_setattr(message, "cause", clean)


def _check_packed(packed: bytes) -> None:
    if len(packed) % 4:
        raise ValueError(f"page list of {len(packed)} bytes is not whole 4-byte ids")
