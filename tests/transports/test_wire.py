"""The codec: its bytes stay as they are, and nothing that a peer sends does more than raise RemoteProtocolError."""

from __future__ import annotations

import struct
import tracemalloc
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.thorough import examples
from tidekv.states.errors import InvalidRequest, LocalProtocolError, RemoteProtocolError
from tidekv.states.types import ComponentIdentity, GroupIdentity, Identity, PoolMemory, Segment
from tidekv.transports import frames, wire
from tidekv.transports.aux_values import encode_aux

DIGEST = bytes(range(32))
ROOM = wire.RoomId(instance="d", epoch="e", request_id="r", generation=3)


def promise(**fields: Any) -> wire.Promise:
    return wire.Promise(**({"room": ROOM, "prompt_digest": DIGEST} | fields))


PROMPT = " c420" + DIGEST.hex() + " "
GOLDEN = {
    "promise": (
        wire.Promise(
            prompt_digest=DIGEST, room=ROOM, prompt_tokens=2, decode_prefix_len=0, pages=b"\x07\0\0\0", tokens=None
        ),
        "a770726f6d697365 94a164a165a17203 02 00 c40407000000" + PROMPT + "c0 c0 c0 00 01 a0 c400",
    ),
    "promise of a rank": (
        promise(
            prompt_tokens=2,
            decode_prefix_len=0,
            pages=None,
            rank=1,
            ranks=2,
            group="g",
        ),
        "a770726f6d697365 94a164a165a17203 02 00 c0" + PROMPT + "c0 c0 c0 01 02 a167 c400",
    ),
    "promise of components": (
        promise(
            prompt_tokens=2,
            decode_prefix_len=0,
            pages=b"\x07\0\0\0",
            component_pages=(
                wire.ComponentRequest(component="s", first=0, pages=b"\x01\0\0\0"),
                wire.ComponentRequest(component="w", first=1, pages=b""),
            ),
        ),
        "a770726f6d697365 94a164a165a17203 02 00 c40407000000"
        + PROMPT
        + "c0 9293a17300c4040100000093a17701c400 c0 00 01 a0 c400",
    ),
    "promise that only compares components": (
        promise(
            prompt_tokens=2,
            decode_prefix_len=0,
            pages=None,
            component_pages=(wire.ComponentRequest(component="s", first=0, pages=None),),
            rank=1,
            ranks=2,
            group="g",
        ),
        "a770726f6d697365 94a164a165a17203 02 00 c0" + PROMPT + "c0 9193a17300c0 c0 01 02 a167 c400",
    ),
    "promise of no component": (
        wire.Promise(
            prompt_digest=DIGEST, room=ROOM, prompt_tokens=2, decode_prefix_len=0, pages=b"", component_pages=()
        ),
        "a770726f6d697365 94a164a165a17203 02 00 c400" + PROMPT + "c0 90 c0 00 01 a0 c400",
    ),
    "promise of cached pages, of which the last one is named by the token behind it": (
        wire.Promise(
            prompt_digest=DIGEST,
            room=ROOM,
            prompt_tokens=2,
            decode_prefix_len=0,
            pages=b"\x07\0\0\0",
            token_behind=b"\x05\0\0\0",
        ),
        "a770726f6d697365 94a164a165a17203 02 00 c40407000000" + PROMPT + "c0 c0 c0 00 01 a0 c40405000000",
    ),
    "extend": (
        wire.Extend(room=ROOM, span=1, first=2, pages=b""),
        "a6657874656e64 94a164a165a17203 01 02 c400 a466756c6c",
    ),
    "extend of a component": (
        wire.Extend(room=ROOM, span=1, first=2, pages=b"", component="w"),
        "a6657874656e64 94a164a165a17203 01 02 c400 a177",
    ),
    "chunk": (
        wire.Chunk(room=ROOM, rank=0, span=1, first=2, count=300, last=True),
        "a56368756e6b 94a164a165a17203 00 01 02 cd012c c3 c400 a466756c6c",
    ),
    "chunk of a component": (
        wire.Chunk(room=ROOM, rank=0, span=0, first=2, count=1, last=True, component="w"),
        "a56368756e6b 94a164a165a17203 00 00 02 01 c3 c400 a177",
    ),
    "aux": (
        wire.Aux(room=ROOM, rank=0, first_token=5, aux=encode_aux({"p": 0.5}), cached={"l1": 4}),
        "a3617578 94a164a165a17203 00 05 c40c81a170cb3fe0000000000000 81a26c3104",
    ),
    "refused": (wire.Refused(room=ROOM, span=0, cause="no"), "a772656675736564 94a164a165a17203 00 a26e6f"),
    "failed": (wire.FailedRoom(room=ROOM, cause="no"), "a66661696c6564 94a164a165a17203 a26e6f"),
    "abort": (wire.Abort(room=ROOM), "a561626f7274 94a164a165a17203"),
    "drained": (wire.Drained(room=ROOM, rank=1), "a7647261696e6564 94a164a165a17203 01"),
    "declined": (
        wire.Declined(room=ROOM, prompt_digest=DIGEST),
        "a86465636c696e6564 94a164a165a17203 c420" + DIGEST.hex(),
    ),
    "received": (wire.Received(room=ROOM), "a87265636569766564 94a164a165a17203"),
    "offer_prompt": (
        wire.OfferPrompt(number=7, namespace="a", tokens=b"\1\0\0\0\2\0\0\0", heat=(1, 2, 3, -1), within_s=2.0),
        "ac6f666665725f70726f6d7074 07 a161 c4080100000002000000 94010203ff cb4000000000000000",
    ),
    "prompt_taken": (
        wire.PromptTaken(number=7, there=2, brought=1, cause="no", refuses=True),
        "ac70726f6d70745f74616b656e 07 02 01 a26e6f c3",
    ),
    "ping": (wire.Ping(sent_at=1.0), "a470696e67 cb3ff0000000000000 90"),
    "ping with rooms": (
        wire.Ping(sent_at=1.0, rooms=(("r", 3), ("s", 0))),
        "a470696e67 cb3ff0000000000000 92 92a17203 92a17300",
    ),
    "bye": (wire.Bye(cause="x"), "a3627965 a178"),
}
HELLO = wire.Hello(
    version=1,
    instance="d-e",
    identity=Identity("m", "mha", "float32", 16, 2, 2, 8, 4096, (2048, 2048)),
    rank=0,
    ranks=1,
    metadata=b"blob",
    memory=PoolMemory(segments=(Segment(4096, 2048, 2048, 4),), page_count=4),
    process=wire.ProcessMark(host="h", pid=1, started=2),
    lease_s=10.0,
)


def body(message: wire.Message) -> bytes:
    frame = wire.encode_frame(message)
    assert frames.body_length(frame[:4], frame_bytes_max=wire.FRAME_BYTES_MAX) == len(frame) - 4
    return frame[4:]


@pytest.mark.parametrize("name", GOLDEN)
def test_frames_keep_their_bytes(name: str) -> None:
    message, golden = GOLDEN[name]
    fields = bytes.fromhex(golden)
    count = len(msgspec.structs.fields(type(message))) + 1
    expected = bytes([0x90 + count]) + fields
    assert body(message).hex() == expected.hex()
    assert wire.encode_frame(message)[:4] == struct.pack("<I", len(expected))
    assert wire.decode_body(expected) == message


def test_hello_keeps_its_fields_in_order() -> None:
    assert msgspec.msgpack.decode(body(HELLO)) == [
        "hello",
        1,
        "d-e",
        {
            "model": "m",
            "kind": "mha",
            "dtype": "float32",
            "page_size": 16,
            "layers": 2,
            "kv_heads": 2,
            "head_dim": 8,
            "page_bytes": 4096,
            "piece_bytes": [2048, 2048],
        },
        0,
        1,
        b"blob",
        {
            "segments": [{"address": 4096, "piece_bytes": 2048, "stride_bytes": 2048, "page_count": 4}],
            "page_count": 4,
            "kind": "DRAM",
            "device": 0,
        },
        ["h", 1, 2],
        10.0,
        0,
        1,
        {},
        0.0,
        "none",
        None,
        1,
        0,
        b"",
        "computed",
        "",
        {"rank": 0, "ranks": 1, "stages": 1, "kv_heads_total": 0, "contexts": 1, "stripe_pages": 0},
    ]
    assert wire.decode_body(body(HELLO)) == HELLO


COMPONENT = ComponentIdentity("w", "window", 64, 16, (8, 8), (GroupIdentity("full", "mha", "uint8", 1, 1, 8),))


def test_a_hello_tells_each_component_and_where_its_pages_lie() -> None:
    of_component = {"name": "w", "kind": "window", "window_tokens": 64, "page_size": 16, "piece_bytes": [8, 8]}
    group = {"name": "full", "kind": "mha", "dtype": "uint8", "layers": 1, "kv_heads": 1, "head_dim": 8}
    identity = msgspec.structs.replace(HELLO.identity, components=(COMPONENT,))
    hello = msgspec.structs.replace(HELLO, identity=identity, components={"w": HELLO.memory})
    fields = msgspec.msgpack.decode(body(hello))
    assert fields[3]["components"] == [of_component | {"groups": [group]}]
    assert fields[12] == {"w": msgspec.msgpack.decode(body(HELLO))[7]}
    assert wire.decode_body(body(hello)) == hello


@pytest.mark.parametrize(
    ("components", "memory"),
    [
        ((), {"w": HELLO.memory}),
        ((COMPONENT,), {}),
        ((COMPONENT, msgspec.structs.replace(COMPONENT, name="a")), {"a": HELLO.memory, "w": HELLO.memory}),
        ((msgspec.structs.replace(COMPONENT, groups=()),), {"w": HELLO.memory}),
        ((COMPONENT, COMPONENT), {"w": HELLO.memory}),
    ],
    ids=["memory alone", "identity alone", "in another order", "without layers", "twice"],
)
def test_a_hello_of_components_that_do_not_go_together_is_refused(components: tuple, memory: dict) -> None:
    fields = msgspec.msgpack.decode(body(HELLO))
    fields[3]["components"] = msgspec.to_builtins(components)
    fields[12] = msgspec.to_builtins(memory)
    with pytest.raises(RemoteProtocolError):
        wire.decode_body(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize(("pages", "component"), [(b"", None), (None, b"")])
def test_a_promise_gives_pages_of_everything_or_of_nothing(pages: bytes | None, component: bytes | None) -> None:
    with pytest.raises(ValueError, match="or for neither"):
        promise(
            prompt_tokens=2,
            decode_prefix_len=0,
            pages=pages,
            component_pages=(wire.ComponentRequest(component="w", first=0, pages=component),),
        )


NAMES = st.text(min_size=1, max_size=20).filter(str.isprintable)
COUNTS = st.integers(0, 2**31 - 1)
PAGES = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20).map(lambda ids: wire.pack_pages(array("i", ids)))
ROOMS = st.builds(wire.RoomId, instance=NAMES, epoch=NAMES, request_id=NAMES, generation=COUNTS)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
PROMISES = st.builds(
    lambda room, tokens, prefix, pages, packed, component_pages: wire.Promise(
        prompt_digest=DIGEST,
        room=room,
        prompt_tokens=tokens,
        decode_prefix_len=prefix,
        pages=pages,
        tokens=bytes(4 * tokens) if packed else None,
        component_pages=component_pages,
    ),
    ROOMS,
    st.integers(1, 50),
    COUNTS,
    PAGES,
    st.booleans(),
    st.none()
    | st.lists(st.builds(wire.ComponentRequest, component=NAMES, first=COUNTS, pages=PAGES), max_size=2).map(tuple),
)
MESSAGES = st.one_of(
    PROMISES,
    st.builds(wire.Extend, room=ROOMS, span=st.integers(1, 2**31 - 1), first=COUNTS, pages=PAGES, component=NAMES),
    st.builds(
        wire.Chunk,
        room=ROOMS,
        rank=COUNTS,
        span=COUNTS,
        first=COUNTS,
        count=COUNTS,
        last=st.booleans(),
        component=NAMES,
    ),
    st.builds(
        wire.Aux,
        room=ROOMS,
        rank=COUNTS,
        first_token=st.integers(0, 2**32 - 1),
        aux=st.dictionaries(st.text(), VALUES, max_size=3).map(encode_aux),
        cached=st.dictionaries(NAMES, COUNTS, max_size=3),
    ),
    st.builds(wire.Refused, room=ROOMS, span=COUNTS, cause=st.text(max_size=50)),
    st.builds(wire.FailedRoom, room=ROOMS, cause=st.text(max_size=50)),
    st.builds(wire.Abort, room=ROOMS),
    st.builds(wire.Drained, room=ROOMS, rank=COUNTS),
    st.builds(wire.Declined, room=ROOMS, prompt_digest=st.binary(min_size=32, max_size=32)),
    st.builds(wire.Received, room=ROOMS),
    st.builds(
        wire.OfferPrompt,
        number=COUNTS,
        namespace=st.text(max_size=20),
        tokens=st.binary(min_size=1, max_size=5).map(lambda part: part * 4),
        heat=st.tuples(COUNTS, COUNTS, COUNTS, st.integers(-(2**31), 2**31 - 1)),
        within_s=st.floats(0, 1e9),
    ),
    st.builds(
        wire.PromptTaken,
        number=COUNTS,
        there=COUNTS,
        brought=COUNTS,
        cause=st.text(max_size=50),
        refuses=st.booleans(),
    ),
    st.builds(wire.Ping, sent_at=st.floats(0, 1e12)),
    st.just(HELLO),
)


@given(MESSAGES)
def test_every_message_survives_the_wire(message: wire.Message) -> None:
    assert wire.decode_body(body(message)) == message


@pytest.mark.parametrize("kind", [wire.Refused, wire.FailedRoom, wire.Bye])
@pytest.mark.parametrize(
    ("said", "logged"),
    [
        ("disk full", "disk full"),
        ("a\nERROR forged", "a\\nERROR forged"),
        ("\x1b[2J\x07", "\\x1b[2J\\x07"),
        ("right\u202eleft", "right\\u202eleft"),
        ("back\\n", "back\\n"),
    ],
)
def test_words_of_a_peer_are_one_printable_line(kind: type[wire.AnyMessage], said: str, logged: str) -> None:
    fields = {"room": ROOM, "span": 0, "cause": said}
    names = kind.__struct_fields__
    # What a hostile peer sends is not what our own constructor makes.
    raw = msgspec.msgpack.encode([kind.__struct_config__.tag, *(fields[name] for name in names)])
    assert wire.decode_body(raw).cause == logged
    assert kind(**{name: fields[name] for name in names}).cause == logged


def test_escaped_words_of_a_peer_are_still_bounded() -> None:
    said = "\n" * wire.CAUSE_CHARACTERS_MAX
    found = wire.decode_body(msgspec.msgpack.encode(["bye", said]))
    assert len(found.cause) == wire.CAUSE_CHARACTERS_MAX
    assert found.cause.isprintable()


@pytest.mark.parametrize("field", ["instance", "epoch", "request_id"])
def test_names_that_are_not_printable_are_refused(field: str) -> None:
    room = msgspec.structs.replace(ROOM, **{field: "r\n1"})
    with pytest.raises(RemoteProtocolError, match=r"not printable: 'r\\n1'"):
        wire.decode_body(body(wire.Abort(room=room)))
    with pytest.raises(RemoteProtocolError, match="not printable"):
        wire.decode_body(body(msgspec.structs.replace(HELLO, instance="d\x1b-e")))


def test_an_error_about_a_frame_quotes_the_peer_on_one_bounded_line() -> None:
    raw = msgspec.msgpack.encode(["x\ny" * 1000, 1])
    with pytest.raises(RemoteProtocolError) as refused:
        wire.decode_body(raw)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 500


def judged(raw: bytes) -> wire.Message | None:
    """What a link does with bytes; anything but a message or RemoteProtocolError fails the test."""
    try:
        return wire.decode_body(raw)
    except RemoteProtocolError:
        return None


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_a_message(raw: bytes) -> None:
    judged(raw)


@examples(400)
@given(MESSAGES, st.data())
def test_mutated_frames_are_refused_or_a_message(message: wire.Message, data: st.DataObject) -> None:
    raw = bytearray(body(message))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "insert"])):
            case "flip":
                raw[at] ^= data.draw(st.integers(1, 255))
            case "cut":
                del raw[at : at + data.draw(st.integers(1, 8))]
            case "insert":
                raw[at:at] = data.draw(st.binary(max_size=8))
        if not raw:
            break
    found = judged(bytes(raw))
    if found is not None:
        assert judged(body(found)) == found or found != found, "what was taken can be said again"


@pytest.mark.parametrize(
    "raw",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\x95\xa3aux" + bytes.fromhex("94a164a165a17203") + b"\x00\x05\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x96\xa3aux" + bytes.fromhex("94a164a165a17203") + b"\x00\x05\x81\xa1p\x01\x80",
    ],
    ids=["array", "map", "bytes", "text", "extension", "bytes in aux", "deep", "a map as aux"],
)
def test_announced_sizes_set_nothing_aside(raw: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            wire.decode_body(raw)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"pages": b"abc"}, "whole 4-byte ids"),
        ({"tokens": b""}, "4 bytes each"),
        ({"decode_prefix_len": -1}, ">= 0"),
        ({"prompt_tokens": 0}, ">= 1"),
        ({"prompt_tokens": 2**40}, "<="),
        ({"prompt_tokens": "2"}, "Expected `int`"),
        ({"room": ["d", "e", "r"]}, "length"),
        ({"room": ["d", "e", "r", 1, 1]}, "length"),
        ({"room": ["d", "e", "", 1]}, "length"),
        ({"prompt_digest": DIGEST[1:]}, "length"),
        ({"prompt_digest": b""}, "length"),
    ],
)
def test_a_wrong_field_is_refused_in_words(change: dict[str, object], what: str) -> None:
    fields = {
        "room": ["d", "e", "r", 1],
        "prompt_tokens": 2,
        "decode_prefix_len": 0,
        "pages": b"",
        "prompt_digest": DIGEST,
        "tokens": None,
    }
    good = ["promise", *fields.values(), None]
    assert isinstance(wire.decode_body(msgspec.msgpack.encode(good)), wire.Promise)
    with pytest.raises(RemoteProtocolError, match=what):
        wire.decode_body(msgspec.msgpack.encode(["promise", *(fields | change).values(), None]))
    with pytest.raises(RemoteProtocolError):
        wire.decode_body(msgspec.msgpack.encode([*good, "one more"]))


@pytest.mark.parametrize("place", [(1, 1), (2, 1), (0, 0)])
def test_a_rank_beyond_its_ranks_is_refused(place: tuple[int, int]) -> None:
    promise = ["promise", ["d", "e", "r", 1], 2, 0, b"", DIGEST, None, None, None, *place, "g"]
    with pytest.raises(RemoteProtocolError):
        wire.decode_body(msgspec.msgpack.encode(promise))


def test_absent_and_empty_pages_are_different() -> None:
    found = [
        wire.decode_body(body(promise(prompt_tokens=1, decode_prefix_len=1, pages=pages))) for pages in (None, b"")
    ]
    assert [promise.pages for promise in found] == [None, b""]  # type: ignore[union-attr]  # Promises.


def test_absent_and_empty_tokens_are_different() -> None:
    absent = promise(prompt_tokens=1, decode_prefix_len=0, pages=b"", tokens=None)
    assert wire.decode_body(body(absent)).tokens is None  # type: ignore[union-attr]  # A Promise.
    with pytest.raises(ValueError, match="4 bytes each"):
        promise(prompt_tokens=1, decode_prefix_len=0, pages=b"", tokens=b"")


@pytest.mark.parametrize("prefix", [b"\0\0\0\0", b"\x01\0\x80\0", b"\xff\xff\xff\xff", b"\x01\0"])
def test_a_length_out_of_bounds_is_refused_before_it_is_read(prefix: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        frames.body_length(prefix, frame_bytes_max=wire.FRAME_BYTES_MAX)
    longest = struct.pack("<I", wire.FRAME_BYTES_MAX)
    assert frames.body_length(longest, frame_bytes_max=wire.FRAME_BYTES_MAX) == wire.FRAME_BYTES_MAX


def test_our_own_frames_keep_the_limit_and_the_types() -> None:
    with pytest.raises(LocalProtocolError, match="at most"):
        wire.encode_frame(wire.Bye(cause="x" * 100), frame_bytes_max=50)
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        wire.encode_frame(wire.Aux(room=ROOM, rank=0, first_token=1, aux=object()))
    with pytest.raises(InvalidRequest, match="no name"):
        wire.check_name("")
    assert len(wire.brief("x" * 5000)) == wire.CAUSE_CHARACTERS_MAX


def test_page_ids_travel_as_little_endian_i32() -> None:
    assert wire.pack_pages(array("i", [1, -2])) == b"\x01\0\0\0\xfe\xff\xff\xff"
    assert wire.unpack_pages(b"\x01\0\0\0\xfe\xff\xff\xff") == array("i", [1, -2])


@pytest.mark.parametrize("sender", ["decode", "prefill"])
def test_an_end_takes_only_what_the_other_end_sends_and_first_only_its_hello(sender: str) -> None:
    of_decode = {"failed", "abort", "declined", "received", "offer_prompt", "ping", "ping with rooms", "bye"}
    of_prefill = {"aux", "refused", "failed", "drained", "prompt_taken", "ping", "ping with rooms", "bye"}
    inbound, later, first = {
        "decode": (wire.FROM_DECODE, of_decode, {"declined", "bye", "hello"}),
        "prefill": (wire.FROM_PREFILL, of_prefill, {"bye", "hello"}),
    }[sender]
    kinds = ("promise", "extend") if sender == "decode" else ("chunk",)
    later |= {name for name in GOLDEN if name.startswith(kinds)}
    messages: dict[str, wire.Message] = {name: message for name, (message, _) in GOLDEN.items()} | {"hello": HELLO}

    def taken(decoder: msgspec.msgpack.Decoder) -> set[str]:
        names = set()
        for name, message in messages.items():
            try:
                assert wire.decode_body(body(message), decoder) == message
                names.add(name)
            except RemoteProtocolError:
                continue
        return names

    assert taken(inbound.first) == first
    assert taken(inbound.later) == later
