"""Batches over real sockets, decoded by the types that routers have: frames, numbers, gaps, replay."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any  # Types of others, which are not there when this is checked.

import msgspec
import pytest

from tidekv.engine.config.engine_config import KVEventsOptions
from tidekv.engine.kv_events import publisher as publishing
from tidekv.engine.kv_events.messages import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, packed, packed_parts
from tidekv.engine.kv_events.publisher import END, KVEventPublisher
from tidekv.states.errors import InvalidConfig

zmq = pytest.importorskip("zmq")
pytest.importorskip("zmq.auth")

STORED = BlockStored(
    block_hashes=[1, 2**64 - 2],
    parent_block_hash=None,
    token_ids=[5, 6, 7, 8],
    block_size=2,
    lora_id=None,
    medium="GPU",
    lora_name=None,
    extra_keys=[("tenant",), ("tenant",)],
)
EVENTS: list[KVEvent] = [AllBlocksCleared(), STORED, BlockRemoved([1], "CPU")]


class Contract:
    """The messages as their documentation has them, with fields in order: what stands in where no wheel is."""

    class BlockStored(msgspec.Struct, array_like=True, omit_defaults=True, tag="BlockStored"):
        block_hashes: list[int]
        parent_block_hash: int | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None
        medium: str | None
        lora_name: str | None
        extra_keys: list[tuple[Any, ...] | None] | None = None

    class BlockRemoved(msgspec.Struct, array_like=True, omit_defaults=True, tag="BlockRemoved"):
        block_hashes: list[int]
        medium: str | None

    class AllBlocksCleared(msgspec.Struct, array_like=True, omit_defaults=True, tag="AllBlocksCleared"):
        pass

    class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
        ts: float
        events: list[Any]
        data_parallel_rank: int | None = None


def published(package: str, module: str, stubs: dict[str, dict[str, object]]) -> Any:  # A third-party module.
    """Load one module of an unpacked wheel that TIDEKV_TEST_VLLM or TIDEKV_TEST_SGLANG names, else skip.

    What it imports of its own package is replaced: its message types need none of it.
    """
    place = os.environ.get(f"TIDEKV_TEST_{package.upper()}")
    if place is None:
        pytest.skip(f"set TIDEKV_TEST_{package.upper()} to an unpacked wheel of {package} to decode with its types")
    for name, members in stubs.items():
        stub = types.ModuleType(name)
        vars(stub).update(members)
        sys.modules[name] = stub
    file = Path(place, *module.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(f"tidekv_test_{package}_events", file)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found


@pytest.fixture
def modules() -> Iterator[None]:
    """Leave sys.modules as it was."""
    before = dict(sys.modules)
    yield
    sys.modules.clear()
    sys.modules.update(before)


def nothing(*_: object, **__: object) -> types.SimpleNamespace:
    """Whatever is asked of a logger."""
    return types.SimpleNamespace()


def same(events: list[Any], kinds: Any) -> None:
    """Decoded events equal the published ones, by the names of their fields."""
    cleared, stored, removed = events
    assert isinstance(cleared, kinds.AllBlocksCleared)
    assert isinstance(stored, kinds.BlockStored)
    for name in ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"):
        assert getattr(stored, name) == getattr(STORED, name), name
    assert isinstance(removed, kinds.BlockRemoved)
    assert (removed.block_hashes, removed.medium) == ([1], "CPU")


def test_maps_are_tagged_and_leave_out_what_says_nothing() -> None:
    at_s, events, rank = msgspec.msgpack.decode(packed(EVENTS, at_s=1.5, rank=0))
    assert (at_s, rank) == (1.5, 0)
    assert [event["type"] for event in events] == ["AllBlocksCleared", "BlockStored", "BlockRemoved"]
    assert events[1]["extra_keys"] == [["tenant"], ["tenant"]]
    (plain,) = msgspec.msgpack.decode(packed([msgspec.structs.replace(STORED, extra_keys=None)], at_s=0.0, rank=0))[1]
    assert "extra_keys" not in plain


def test_the_published_types_of_vllm_decode_it(modules: None) -> None:
    peer = published(
        "vllm",
        "vllm.distributed.kv_events",
        {
            "vllm": {},
            "vllm.config": {},
            "vllm.config.kv_events": {"KVEventsConfig": object},
            "vllm.logger": {"init_logger": nothing},
            "vllm.utils": {},
            "vllm.utils.network_utils": dict.fromkeys(
                ("get_ip", "get_tcp_uri", "is_valid_ipv6_address", "split_zmq_path"), nothing
            ),
            "vllm.v1": {},
            "vllm.v1.core": {},
            "vllm.v1.core.kv_cache_utils": {"ExternalBlockHash": bytes | int},
        },
    )
    batch = msgspec.msgpack.decode(packed(EVENTS, at_s=1.5, rank=3), type=peer.KVEventBatch)
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 3)
    same(batch.events, peer)
    assert batch.events[1].extra_keys == [("tenant",), ("tenant",)]
    assert peer.ZmqEventPublisher.END_SEQ == END
    assert {peer.MEDIUM_GPU, peer.MEDIUM_CPU, peer.MEDIUM_STORAGE} == {"GPU", "CPU", "STORAGE"}


def test_the_published_types_of_sglang_decode_it(modules: None) -> None:
    pytest.importorskip("pydantic")
    peer = published(
        "sglang",
        "sglang.srt.disaggregation.kv_events",
        {
            "sglang": {},
            "sglang.srt": {},
            "sglang.srt.runtime_context": {"get_parallel": nothing},
            "sglang.srt.utils": {},
            "sglang.srt.utils.network": {"NetworkAddress": object},
        },
    )
    batch = msgspec.msgpack.decode(packed(EVENTS, at_s=1.5, rank=3), type=peer.KVEventBatch)
    assert (batch.ts, batch.attn_dp_rank) == (1.5, 3)
    same(batch.events, peer)


class Listener:
    """A router's two sockets."""

    def __init__(self, publisher: KVEventPublisher, topic: bytes = b"") -> None:
        self.context = zmq.Context()
        self.context.linger = 0
        self.sub = self.context.socket(zmq.SUB)
        self.sub.rcvtimeo = 10_000
        self.sub.subscribe(topic)
        self.sub.connect(publisher.address)
        self.asker = self.context.socket(zmq.DEALER)
        self.asker.rcvtimeo = 10_000
        if publisher.replay_address is not None:
            self.asker.connect(publisher.replay_address)

    def next(self) -> tuple[bytes, int, bytes]:
        topic, number, payload = self.sub.recv_multipart()
        return topic, int.from_bytes(number, "big"), payload

    def missed(self, first: int) -> list[tuple[int, bytes]]:
        self.asker.send_multipart([b"", first.to_bytes(8, "big")])
        found = []
        while (frames := self.asker.recv_multipart())[2] != END:
            empty, _topic, number, payload = frames
            assert empty == b""
            found.append((int.from_bytes(number, "big"), payload))
        return found

    def wait_connected(self, publisher: KVEventPublisher) -> tuple[bytes, int, bytes]:
        """Publish until the first batch arrives: messages sent before the subscription is in place are lost."""
        self.sub.rcvtimeo = 50
        while True:
            publisher.publish(lambda: [AllBlocksCleared()])
            try:
                first = self.next()
            except zmq.Again:
                continue
            self.sub.rcvtimeo = 10_000
            return first

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def publisher() -> Iterator[KVEventPublisher]:
    opened = KVEventPublisher(
        KVEventsOptions(endpoint="tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*", topic="kv@decode-0", kept_batches=5)
    )
    yield opened
    opened.close()
    assert not opened._thread.is_alive()


@pytest.fixture
def listener(publisher: KVEventPublisher) -> Iterator[Listener]:
    opened = Listener(publisher, b"kv@")
    yield opened
    opened.close()


def test_batches_come_with_topic_number_and_payload(publisher: KVEventPublisher, listener: Listener) -> None:
    topic, number, _ = listener.wait_connected(publisher)
    assert topic == b"kv@decode-0"
    publisher.publish(lambda: EVENTS)
    while not (events := events_of((batch := listener.next())[2])) or events[-1]["type"] != "BlockRemoved":
        # A fence has no number, and may stand anywhere.
        number = number if batch[1] == 2**64 - 1 else batch[1]
    assert batch[1] == (0 if number == 2**64 - 1 else number + 1)


def events_of(payload: bytes) -> list[dict[str, Any]]:
    """The events of a batch, as maps."""
    found: list[dict[str, Any]] = msgspec.msgpack.decode(payload)[1]
    return found


@pytest.fixture
def no_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """No empty batches between those of a test."""
    monkeypatch.setattr(publishing, "HEARTBEAT_S", 3600.0)


def test_what_was_missed_can_be_asked_for(no_heartbeat: None, publisher: KVEventPublisher, listener: Listener) -> None:
    for count in range(8):
        publisher.publish(lambda count=count: [BlockRemoved([count], "GPU")])
        publisher.publish(list)  # No events are no batch.
    # The first answer shows when all were sent: requests are not ordered with publishing.
    while not (kept := listener.missed(5)) or kept[-1][0] != 7:
        pass
    assert [number for number, _ in kept] == [5, 6, 7]
    assert [number for number, _ in listener.missed(6)] == [6, 7]
    assert listener.missed(99) == []
    assert events_of(kept[0][1]) == [{"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU"}]


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_replay_from_a_batch_that_is_gone_is_the_whole_content_and_empty_batches_behind_it(
    no_heartbeat: None, publisher: KVEventPublisher, listener: Listener, first: int
) -> None:
    whole: list[KVEvent] = [AllBlocksCleared(), STORED]
    for count in range(8):
        publisher.publish(lambda count=count: [BlockRemoved([count], "GPU")], lambda: whole)
    while not (kept := listener.missed(first)) or kept[-1][0] != 7:
        pass
    assert [number for number, _ in kept] == list(range(first, 8)), "vllm-router and llm-d refuse a gap"
    assert [len(events_of(payload)) for _, payload in kept] == [2] + [0] * (7 - first)
    assert [event["type"] for event in events_of(kept[0][1])] == ["AllBlocksCleared", "BlockStored"]


def test_a_snapshot_with_more_parts_than_missing_numbers_makes_room_with_empty_batches(
    no_heartbeat: None, publisher: KVEventPublisher, listener: Listener
) -> None:
    whole: list[KVEvent] = [AllBlocksCleared(), *[BlockRemoved([number], "CPU") for number in range(30_000)]]
    for _ in range(7):
        publisher.publish(lambda: EVENTS, lambda: whole)
    while not (kept := listener.missed(1)) or kept[-1][0] < 6:
        pass
    assert [number for number, _ in kept] == list(range(1, kept[-1][0] + 1))
    sizes = [len(events_of(payload)) for _, payload in kept]
    assert max(sizes) <= 4096 and sum(sizes) == len(whole)
    # What follows goes on behind the last of them.
    publisher.publish(lambda: EVENTS, lambda: whole)
    while not (later := listener.missed(kept[-1][0] + 1)):
        pass
    assert events_of(later[0][1])[0]["type"] == "AllBlocksCleared"


def test_a_batch_with_too_much_for_the_consumers_is_sent_as_several() -> None:
    many = [BlockRemoved([number], "GPU") for number in range(5000)]
    parts = [events_of(payload) for payload in packed_parts(many, at_s=0.0, rank=0)]
    assert [len(part) for part in parts] == [4096, 904]
    assert [event["block_hashes"][0] for part in parts for event in part] == list(range(5000))
    large = [BlockRemoved([2**63] * 100_000, "GPU") for _ in range(40)]
    sizes = [len(payload) for payload in packed_parts(large, at_s=0.0, rank=0)]
    assert max(sizes) <= 256 * 1024 < 256 * 100_000 < sum(sizes)
    assert list(packed_parts([], at_s=0.0, rank=0)) == []


def test_an_event_too_long_for_a_batch_is_sent_as_several_that_continue_one_another() -> None:
    long = BlockStored(
        block_hashes=list(range(2**62, 2**62 + 30_000)),
        parent_block_hash=7,
        token_ids=list(range(100_000, 160_000)),
        block_size=2,
        lora_id=None,
        medium="CPU",
        lora_name="adapter",
        extra_keys=[("salt",), *[None] * 29_999],
        group_idx=1,
    )
    payloads = list(packed_parts([AllBlocksCleared(), long, EVENTS[2]], at_s=0.0, rank=0))
    assert len(payloads) > 2 and max(map(len, payloads)) <= 256 * 1024
    cleared, *stored, removed = [event for payload in payloads for event in events_of(payload)]
    assert (cleared["type"], removed["type"]) == ("AllBlocksCleared", "BlockRemoved")
    parent, hashes, tokens, keys = 7, [], [], []
    for event in stored:
        assert event["parent_block_hash"] == parent
        assert len(event["token_ids"]) == 2 * len(event["block_hashes"]) == 2 * len(event["extra_keys"])
        assert (event["medium"], event["lora_name"], event["group_idx"]) == ("CPU", "adapter", 1)
        parent = event["block_hashes"][-1]
        hashes += event["block_hashes"]
        tokens += event["token_ids"]
        keys += event["extra_keys"]
    assert (hashes, tokens) == (long.block_hashes, long.token_ids)
    assert keys == [["salt"], *[None] * 29_999]
    removed_pages = BlockRemoved(list(range(2**62, 2**62 + 30_000)), "GPU")
    parts = [event for payload in packed_parts([removed_pages], at_s=0.0, rank=0) for event in events_of(payload)]
    assert [each for event in parts for each in event["block_hashes"]] == removed_pages.block_hashes


def test_a_subscriber_that_does_not_read_is_bounded_in_bytes(
    no_heartbeat: None, monkeypatch: pytest.MonkeyPatch, resident_bytes: Callable[[], int]
) -> None:
    monkeypatch.setattr(publishing, "QUEUED_BATCHES_MAX", 16)
    opened = KVEventPublisher(
        KVEventsOptions(endpoint="tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*", kept_bytes=1 << 20)
    )
    listener = Listener(opened)
    try:
        listener.sub.close()
        listener.sub = listener.context.socket(zmq.SUB)
        listener.sub.set_hwm(1)
        listener.sub.subscribe(b"")
        listener.sub.connect(opened.address)
        listener.wait_connected(opened)
        before = resident_bytes()
        pages = [2**62] * 400_000
        for _ in range(30):
            opened.publish(lambda: [BlockRemoved(pages, "GPU")])
        # 3.6 MB each, and 14 batches. The last one is kept, when all others were made.
        while not (kept := listener.missed(0)) or kept[-1][0] < 420:
            pass
        assert resident_bytes() - before < 40 << 20, "4 MiB wait, 1 MiB is kept"
    finally:
        listener.close()
        opened.close()


def test_each_new_subscriber_is_sent_the_whole_content_under_a_number_that_is_none(
    no_heartbeat: None, publisher: KVEventPublisher, listener: Listener
) -> None:
    _, number, payload = listener.next()
    assert number == 2**64 - 1, "Dynamo keeps that number as none seen, so that an earlier engine's are forgotten"
    assert [event["type"] for event in events_of(payload)] == ["AllBlocksCleared"]
    publisher.publish(lambda: EVENTS, lambda: [AllBlocksCleared(), STORED])
    assert listener.next()[1] == 0
    newcomer = Listener(publisher, b"kv@")
    try:
        # All subscribers get it: the socket sends to all.
        for each in (newcomer, listener):
            _, number, payload = each.next()
            assert (number, [event["type"] for event in events_of(payload)]) == (
                2**64 - 1,
                ["AllBlocksCleared", "BlockStored"],
            )
        assert [number for number, _ in listener.missed(0)] == [0], "it is not kept for replay"
    finally:
        newcomer.close()


def test_an_empty_batch_with_a_number_shows_the_loss_of_the_one_before(
    publisher: KVEventPublisher, listener: Listener
) -> None:
    numbers = []
    while len(numbers) < 2:
        _, number, payload = listener.next()
        if not events_of(payload):
            numbers.append(number)
    assert numbers[1] == numbers[0] + 1


def test_a_question_that_is_none_ends_nothing(publisher: KVEventPublisher, listener: Listener) -> None:
    listener.asker.send_multipart([b"", b"short"])
    listener.asker.send_multipart([b"x"])
    publisher.publish(lambda: EVENTS)
    while not listener.missed(0):
        pass


def test_there_is_no_room_while_too_many_wait(publisher: KVEventPublisher, monkeypatch: pytest.MonkeyPatch) -> None:
    assert publisher.has_room
    monkeypatch.setattr(publishing, "BATCHES_WAITING_MAX", 0)
    assert not publisher.has_room


def test_an_endpoint_that_cannot_be_bound_is_named() -> None:
    with pytest.raises(InvalidConfig, match="cannot be served at 'nonsense'"):
        KVEventPublisher(KVEventsOptions(endpoint="nonsense"))
    with pytest.raises(InvalidConfig, match=r"cannot be served at 'tcp://127.0.0.1:bad'"):
        KVEventPublisher(KVEventsOptions(endpoint="tcp://127.0.0.1:*", replay="tcp://127.0.0.1:bad"))


def test_without_pyzmq_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(InvalidConfig, match=r"tidekv\[events\]"):
        KVEventPublisher(KVEventsOptions(endpoint="tcp://127.0.0.1:*"))


@pytest.mark.parametrize("endpoint", ["tcp://*:*", "tcp://0.0.0.0:*", "tcp://[::]:*", "tcp://name.invalid:5557"])
def test_the_network_is_served_by_permission_or_under_curve_only(endpoint: str) -> None:
    for endpoints in ({"endpoint": endpoint}, {"endpoint": "tcp://127.0.0.1:*", "replay": endpoint}):
        with pytest.raises(InvalidConfig, match="to every program that reaches it"):
            KVEventPublisher(KVEventsOptions(**endpoints))
    if "invalid" not in endpoint and "[" not in endpoint:
        KVEventPublisher(KVEventsOptions(endpoint=endpoint, allow_network=True)).close()


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:*", "tcp://localhost:5557", "tcp://[::1]:*", "ipc:///run/kv"])
def test_endpoints_of_this_machine_need_no_permission(endpoint: str) -> None:
    assert not publishing.is_on_network(endpoint)


@pytest.mark.skipif(not zmq.has("curve"), reason="this pyzmq has no CURVE")
def test_under_curve_only_listeners_with_a_known_key_are_served(tmp_path: Path) -> None:
    public, secret = zmq.curve_keypair()
    (tmp_path / "server").write_text(f"{secret.decode()}\n")
    (tmp_path / "clients").mkdir()
    _, known = zmq.auth.create_certificates(tmp_path / "clients", "known")
    zmq.auth.create_certificates(tmp_path, "stranger")
    opened = KVEventPublisher(
        KVEventsOptions(
            endpoint="tcp://127.0.0.1:*",
            replay="tcp://127.0.0.1:*",
            curve_secret_file=str(tmp_path / "server"),
            curve_clients=str(tmp_path / "clients"),
        )
    )
    context = zmq.Context()
    try:
        opened.publish(lambda: EVENTS)
        answers = {}
        for name, certificate in (("known", known), ("stranger", str(tmp_path / "stranger.key_secret")), ("plain", "")):
            asker = context.socket(zmq.DEALER)
            asker.linger = 0
            if certificate:
                asker.curve_publickey, asker.curve_secretkey = zmq.auth.load_certificate(certificate)
                asker.curve_serverkey = public
            asker.connect(opened.replay_address)
            # The key's check of the known one comes first: a refusal sends nothing, so the others have the time of it.
            asker.rcvtimeo = 10_000 if name == "known" else 500
            asker.send_multipart([b"", bytes(8)])
            with contextlib.suppress(zmq.Again):
                answers[name] = asker.recv_multipart()
            asker.close()
        assert set(answers) == {"known"}
    finally:
        context.destroy(linger=0)
        opened.close()


@pytest.mark.parametrize(("text", "words"), [("short", "has 5 characters"), (None, "cannot be read")])
def test_a_key_that_is_none_is_named(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "key").write_text(text)
    with pytest.raises(InvalidConfig, match=words):
        KVEventPublisher(KVEventsOptions(endpoint="tcp://127.0.0.1:*", curve_secret_file=str(tmp_path / "key")))


def test_what_is_kept_is_bounded_in_bytes(no_heartbeat: None) -> None:
    opened = KVEventPublisher(
        KVEventsOptions(endpoint="tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*", kept_bytes=10_000)
    )
    asking = Listener(opened)
    try:
        for number in range(50):
            opened.publish(lambda number=number: [BlockRemoved([2**62] * 100, "GPU")])
        while not (kept := asking.missed(45)) or kept[-1][0] != 49:
            pass
        kept = list(opened._kept)
        assert sum(len(payload) for _, payload in kept) <= 10_000 < 12 * len(kept[0][1])
        assert opened._kept_bytes == sum(len(payload) for _, payload in opened._kept)
    finally:
        asking.close()
        opened.close()


def test_replays_that_are_not_read_take_no_memory_and_the_newest_request_counts(no_heartbeat: None) -> None:
    opened = KVEventPublisher(KVEventsOptions(endpoint="tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*"))
    asking, other = Listener(opened), Listener(opened)
    asking.asker.close()
    asking.asker = asking.context.socket(zmq.DEALER)
    asking.asker.set_hwm(4)
    asking.asker.rcvtimeo = 10_000
    asking.asker.connect(opened.replay_address)
    try:
        for number in range(2000):
            opened.publish(lambda number=number: [BlockRemoved([number] * 1000, "GPU")])
        while not (kept := other.missed(0)) or kept[-1][0] != 1999:
            pass
        for _ in range(20):
            asking.asker.send_multipart([b"", bytes(8)])
        # Others are served meanwhile, and what waits for this one is one replay, not twenty.
        for _ in range(3):
            assert len(other.missed(0)) == 2000
        # One of each client at most: the other's last one may not be put away yet.
        assert len(opened._replays) <= 2
        read = 0
        while asking.asker.recv_multipart()[2] != END:
            read += 1
        assert read < 2 * 2000
    finally:
        asking.close()
        other.close()
        opened.close()
