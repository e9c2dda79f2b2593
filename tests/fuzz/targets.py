"""What is fuzzed: each target takes a source of randomness, tries one input, and raises if it does what it must not.

An input may be refused by the errors that its reader documents, and by no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any, get_args

import msgspec

from tests.transports.test_wire import GOLDEN, HELLO, ROOM
from tidekv.backends.keys.namespaces import join_namespaces
from tidekv.engine.config.engine_config import CachePeerOptions
from tidekv.engine.decode.hints import HintCalls
from tidekv.engine.decode.values import HintedPeers
from tidekv.engine.integrations.vllm.handover.jobs import HandoverJobs
from tidekv.engine.integrations.vllm.handover.scheduler import DecodeScheduler, PrefillScheduler
from tidekv.states import events
from tidekv.states.errors import InvalidRequest, RemoteProtocolError, TidekvError
from tidekv.states.ranks.agreement import Opening
from tidekv.transports import frames, wire
from tidekv.transports.aux_values import decode_aux, encode_aux
from tidekv.transports.control import challenge
from tidekv.transports.control.addresses import Dials, address_of_rank
from tidekv.transports.ranks import wire as ranks

Target = Callable[[Random], None]
MESSAGES: tuple[wire.Message, ...] = (
    *(message for message, _ in GOLDEN.values()),
    HELLO,
    wire.StagingRequest(room=ROOM, rank=0, ticket=1, component="full", count=2),
    wire.StagingGranted(room=ROOM, ticket=1, first=0),
    wire.StagingReturned(room=ROOM, rank=0, ticket=1),
    wire.Staged(room=ROOM, rank=0, ticket=1, component="full", span=0, first=0),
)
RANK_MESSAGES: tuple[ranks.RankMessage, ...] = (
    ranks.Challenge(bytes(32)),
    ranks.Join(1, 1, 2, 0, b"settings", bytes(32), bytes(32)),
    ranks.Welcome(bytes(32)),
    ranks.Settled(1),
    ranks.Form(1, 4000, "group"),
    ranks.Formed(1),
    ranks.Wish(1),
    ranks.RankTurn(Opening(1, 1, 0.0, 256)),
    ranks.Beat(1, 2),
    ranks.VoteFailed(1, 2, "late"),
    ranks.Lost(1, 1, "gone"),
    ranks.RankRefused("no"),
)
PEER_HOST = "10.0.0.6"
HINT_KINDS = ("prefetch", "demote", "pin", "unpin", "retain", "fetch")
HINT_S_MAX = 60.0
DECODERS = (
    wire.FROM_DECODE.first,
    wire.FROM_DECODE.later,
    wire.FROM_PREFILL.first,
    wire.FROM_PREFILL.later,
)
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**32, 2**63 - 1, -(2**63), 2**64 - 1, 0.5, float("nan"), float("inf"), "", "a",
    "\n", "\0", "\x1b[2J", "\ud7ff", "é" * 600, "x" * 5000, b"", b"\0", bytes(5), bytes(5000), [], {}, [[]], [None] * 9,
    {"": None}, {"a": {"b": {"c": []}}}, "127.0.0.1:7000", "127.0.0.1:7000," * 300, ":", "[::1]:1", "10.0.0.0/8:*",
)  # fmt: skip


def mutated(raw: bytes, source: Random) -> bytes:
    """Flip, cut, insert and repeat bytes."""
    data = bytearray(raw)
    for _ in range(source.randint(1, 6)):
        at = source.randrange(len(data) + 1)
        match source.randrange(5):
            case 0 if data:
                data[at % len(data)] ^= 1 << source.randrange(8)
            case 1 if data:
                data[at % len(data)] = source.choice((0xC1, 0xDC, 0xDD, 0xDE, 0xDF, 0xC6, 0xDB, 0xFF, 0x80, 0x90))
            case 2:
                del data[at : at + source.randint(1, 16)]
            case 3:
                data[at:at] = source.randbytes(source.randint(1, 16))
            case 4:
                data[at:at] = data[at : at + source.randint(1, 64)]
    return bytes(data)


def changed(value: Any, source: Random) -> Any:
    """Replace, leave out or add parts of a value of lists and maps."""
    if source.random() < 0.15:
        return source.choice(ODD)
    if isinstance(value, list):
        parts = [changed(part, source) if source.random() < 0.3 else part for part in value]
        if source.random() < 0.05:
            parts.insert(source.randint(0, len(parts)), source.choice(ODD))
        if source.random() < 0.05 and parts:
            parts.pop(source.randrange(len(parts)))
        return parts
    if isinstance(value, dict):
        return {key: changed(part, source) if source.random() < 0.3 else part for key, part in value.items()}
    return value


def damaged(body: bytes, source: Random) -> bytes:
    """A body as a hostile peer sends it: other bytes, or other values in the same form."""
    if source.random() < 0.5:
        return mutated(body, source)
    fields = msgspec.msgpack.decode(body)
    parts = [changed(part, source) if source.random() < 0.5 else part for part in fields[1:]]
    if source.random() < 0.1:
        parts = [*parts, source.choice(ODD)] if source.random() < 0.5 else parts[:-1]
    return msgspec.msgpack.encode([fields[0], *parts])


def fuzz_frames(source: Random) -> None:
    """Bodies of every message of the hand-over, taken by each decoder."""
    body = damaged(wire.encode_frame(source.choice(MESSAGES))[wire.LENGTH.size :], source)
    for decoder in DECODERS:
        try:
            message = wire.decode_body(body, decoder)
        except RemoteProtocolError as error:
            assert str(error).isprintable(), error
            assert len(str(error)) < 1000, error
            continue
        # What was taken is passed on, logged and sent: it must be a message of ours, too.
        again = wire.encode_frame(message, frame_bytes_max=2 * wire.FRAME_BYTES_MAX)[wire.LENGTH.size :]
        assert wire.encode_frame(wire.decode_body(again, decoder))[wire.LENGTH.size :] == again
        if isinstance(message, wire.Aux):
            _try(decode_aux, message.aux)


def fuzz_aux(source: Random) -> None:
    """Values of the embedder."""
    values = {"logprobs": [0.5, None], "more": {"a": [1, {"b": b"x"}], "text": "é"}}
    _try(decode_aux, mutated(encode_aux(values), source))
    try:
        raw = encode_aux({"x": changed([values, *ODD], source)})
    except InvalidRequest:
        return
    assert msgspec.msgpack.encode(decode_aux(raw)) == raw


def fuzz_rank_frames(source: Random) -> None:
    """Bodies of every message between ranks."""
    body = damaged(ranks.encode(source.choice(RANK_MESSAGES))[frames.LENGTH.size :], source)
    _try(lambda raw: frames.decode(ranks._decoder, raw), body)


class _Sink:
    """A writer of a connection, which keeps what is written."""

    def __init__(self) -> None:
        self.sent = bytearray()

    def write(self, data: bytes) -> None:
        self.sent += data

    def get_extra_info(self, name: str) -> tuple[str, int]:
        return ("127.0.0.1", 7000)

    def close(self) -> None:
        pass

    async def wait_closed(self) -> None:
        pass


async def _handshake(source: Random) -> None:
    key, other = b"k" * 32, b"o" * 32
    dialler = source.random() < 0.5
    reader, sink = asyncio.StreamReader(), _Sink()
    said = challenge.greeting(source.randbytes(challenge.NONCE_BYTES))
    target = b"127.0.0.1:7000\n127.0.0.1:7000"
    # A proof under another key, and of nonces of its own: what a program without the secret can make.
    if dialler:
        said += source.choice(
            (challenge.REFUSED_PROOF, challenge.REFUSED_FULL, challenge.proof(other, b"listen", said))
        )
    else:
        said += len(target).to_bytes(2, "little") + target + challenge.proof(other, b"dial", said)
    reader.feed_data(mutated(said, source) if source.random() < 0.9 else said)
    reader.feed_eof()
    writer: Any = sink  # As much of a writer as the challenge uses.
    try:
        if dialler:
            await challenge.prove(reader, writer, key=key, dialled="127.0.0.1:7000")
        else:
            await challenge.answer(reader, writer, key=key, announces=(), admit=lambda: True)
    except (TidekvError, asyncio.IncompleteReadError):
        return
    raise AssertionError(f"a stranger passed the challenge as the {'listener' if dialler else 'dialler'}: {said!r}")


def fuzz_handshake(source: Random) -> None:
    """Strangers at either end of the challenge."""
    asyncio.run(_handshake(source))


def fuzz_transfer_params(source: Random) -> None:
    """`kv_transfer_params` of a client: whatever it says, only listed prefills are asked."""
    good = {"do_remote_prefill": True, "prefill": "127.0.0.1:7000", "room": "r", "do_remote_decode": False}
    params = {key: changed(value, source) if source.random() < 0.7 else value for key, value in good.items()}
    if source.random() < 0.3:
        params["prefill"] = mutated(b"127.0.0.1:7000", source).decode("latin-1")
    if source.random() < 0.2:
        params = {key: value for key, value in params.items() if source.random() < 0.7}
    dials = Dials.parse(["127.0.0.1:7000", "10.0.0.0/24:7000-7007"])
    decode, prefill = DecodeScheduler(4, dials), PrefillScheduler(4, "127.0.0.1:7000")
    tokens = list(range(10))
    request = SimpleNamespace(
        request_id="q",
        kv_transfer_params=params,
        prompt_token_ids=tokens,
        all_token_ids=tokens,
        block_hashes=[b"1", b"2"],
        num_tokens=10,
        num_prompt_tokens=10,
        num_computed_tokens=0,
        prompt_embeds=None,
        mm_features=[],
        resumable=False,
        lora_request=None,
        cache_salt=None,
        skip_reading_prefix_cache=source.random() < 0.2,
    )
    claimed = decode.matched(request, 0)
    decode.allocated(request, [[1, 2, 3]], claimed or 0)
    prefill.arrived(request)
    prefill.add_jobs(HandoverJobs(), {"q": 10}, (), lambda _: [[1, 2, 3]])
    prefill.finished("q")
    decode.finished(request, [[1, 2, 3]])
    jobs = decode.take_jobs()
    for job in (*jobs.restores, *jobs.declined):
        assert dials.allows_all(job.prefill), job


def fuzz_dials(source: Random) -> None:
    """Entries of an allow list, and addresses that are compared with it."""
    entry = source.choice(("127.0.0.1:7000", "10.0.0.0/24:7000-7007", "*.svc:*", "[fd00::/16]:1", "[::1]:7000"))
    text = mutated(entry.encode(), source).decode("latin-1")
    try:
        dials = Dials.parse([text])
    except InvalidRequest as error:
        assert str(error).isprintable(), error
        return
    dials.allows_all(mutated(source.choice((entry, text)).encode(), source).decode("latin-1"))


async def _take_hints(envelope: object) -> list[events.HintReceived]:
    """Give an envelope to calls of an engine that answers each fact at once; returns the facts."""
    posted: list[events.HintReceived] = []

    def expect(call: int) -> asyncio.Future[tuple[str, int]]:
        done: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
        done.set_result(("accepted", 1))
        return done

    page_keys = SimpleNamespace(of=lambda packed: packed[: len(packed) // 16 * 16])
    runtime: Any = SimpleNamespace(
        config=SimpleNamespace(
            vocabulary=1000,
            device="owned",
            namespace="",
            hints=SimpleNamespace(pin_share=0.25, ttl_s_max=HINT_S_MAX),
            cache_peers=CachePeerOptions(enabled=True, allow=(f"{PEER_HOST}:7000-7010",)),
        ),
        rank_group=None,
        peers=SimpleNamespace(
            addresses_of=lambda peer: [address_of_rank(peer, 0, 1)], check_peer=lambda peer: address_of_rank(peer, 0, 1)
        ),
        transport=SimpleNamespace(check_address=lambda address: None),
        host=SimpleNamespace(memory=SimpleNamespace(page_bytes=64)),
        core=SimpleNamespace(settings=SimpleNamespace(host_pages=100, key_bytes=16, page_size=4)),
        calls=SimpleNamespace(expect_hint=expect, unexpect_hint=lambda call: None),
        front=SimpleNamespace(post=posted.append, clock=lambda: 1.0),
        prompt_keys=SimpleNamespace(page_keys=page_keys),
        kv_event_watcher=None,
    )
    arrivals: Any = SimpleNamespace(
        next_number=lambda: 1, namespace=lambda name, lora_name="": join_namespaces("", name, lora_name)
    )
    calls = HintCalls(runtime, arrivals)
    calls.sessions.note("s", "", bytes(64))
    peers = HintedPeers()
    try:
        outcomes = await calls.take(envelope, peers=peers)
    except InvalidRequest as error:
        assert str(error).isprintable(), error
        return posted
    assert all(one.cause.isprintable() and len(one.cause) < 1000 for one in outcomes), outcomes
    fetches = calls.counts["kv.fetch", "accepted"]
    assert len(posted) + fetches == sum(one.outcome == "accepted" for one in outcomes)
    assert bool(peers.allowed) == bool(fetches), peers
    assert all(one.startswith(f"{PEER_HOST}:70") for one in peers.allowed), peers
    assert all(one.isprintable() and len(one) < 1000 for one in peers.refused), peers
    return posted


def fuzz_hints(source: Random) -> None:
    """Envelopes of KV hints: what is accepted is a fact that the core can take, within the limits of the engine."""
    prefix = source.choice(({"token_ids": list(range(9))}, {"session": "s", "range": [0, 8]}, {"block_hashes": [1, 2]}))
    payload = (
        prefix
        | {
            "source_control_endpoint": f"tcp://{PEER_HOST}:{source.choice((6999, 7000, 7010, 7011))}",
        }
        | {"namespace": "n", "lora_name": "", "ttl_ms": 1000, "max_bytes": 1 << 20, "priority": 1}
    )
    action = {"action_id": "a", "action_type": f"kv.{source.choice(HINT_KINDS)}", "action_version": "1.0"}
    actions = [changed(action | {"payload": changed(payload, source)}, source) for _ in range(source.randint(1, 3))]
    envelope = changed({"protocol_version": "1.0", "message_id": "m", "actions": actions}, source)
    for fact in asyncio.run(_take_hints(envelope)):
        assert fact.tier in ("host", "storage"), fact
        assert 0 < fact.ttl_s <= HINT_S_MAX, fact
        assert fact.pages_max == 25, fact
        assert fact.keys, fact
        assert len(fact.keys) % 16 == 0, fact
        assert msgspec.json.decode(msgspec.json.encode(fact.namespace)) == fact.namespace


def _try(read: Callable[[bytes], object], raw: bytes) -> None:
    try:
        read(raw)
    except RemoteProtocolError as error:
        assert str(error).isprintable(), error


TARGETS: dict[str, Target] = {
    name.removeprefix("fuzz_"): target for name, target in sorted(globals().items()) if name.startswith("fuzz_")
}


def kinds_without_seed() -> set[str]:
    """Kinds of messages that no seed is mutated from."""
    known = {type(message).__name__ for message in (*MESSAGES, *RANK_MESSAGES)}
    return {kind.__name__ for union in (wire.AnyMessage, ranks.AnyRankMessage) for kind in get_args(union)} - known
