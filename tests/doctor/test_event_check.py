"""`tidekv doctor --events` finds nothing in the stream of an engine, and each fault that is planted in one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.configs import engine_config
from tests.support.inside import runtime_of
from tests.support.loopback_pair import PAGE, loopback_pair
from tidekv.backends.storage.uri import open_storage
from tidekv.engine.cli.main import app
from tidekv.engine.doctor import event_check
from tidekv.engine.doctor.event_check import EventSource, check_events
from tidekv.engine.doctor.event_stream import FENCE
from tidekv.engine.http_server import HttpRequest, HttpResponse, HttpServer
from tidekv.engine.kv_events.messages import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, Medium, packed
from tidekv.states.errors import InvalidConfig

zmq = pytest.importorskip("zmq")

SIZE = 2
Batch = tuple[int, bytes]


def stored(first: int, count: int, medium: Medium = "GPU", parent: int | None = None) -> BlockStored:
    """Pages first, first + 1, … of one prompt; page n has the tokens 2n and 2n + 1 and the hash 100 + n."""
    names = [100 + first + at for at in range(count)]
    tokens = list(range(SIZE * first, SIZE * (first + count)))
    return BlockStored(names, parent, tokens, SIZE, None, medium, None)


def batch(number: int, *events: KVEvent) -> Batch:
    return number, packed(events, at_s=0.0, rank=0)


RIGHT: tuple[Batch, ...] = (
    batch(0, AllBlocksCleared()),
    batch(1, stored(0, 3)),
    batch(2, stored(0, 3, "CPU")),
    batch(3, BlockRemoved([102], "GPU"), stored(3, 1, "STORAGE", 102)),
    batch(4),
)
"""Pages 0 and 1 on the device, 0 to 2 in host memory, 3 in storage."""
FENCED: tuple[Batch, ...] = (
    batch(FENCE, AllBlocksCleared(), stored(0, 2), stored(0, 3, "CPU"), stored(3, 1, "STORAGE", 102)),
    batch(5),
)
TRUTH = (2, 3, 4)
"""Pages by tier."""


class HandWorker:
    """A worker whose stream is written by hand: live batches for each newcomer, a replay, and a status server."""

    def __init__(
        self, live: Sequence[Batch] = FENCED, kept: Sequence[Batch] = RIGHT, truth: tuple[int, int, int] = TRUTH
    ) -> None:
        self._live, self._kept, self._truth = live, kept, truth
        self._context = zmq.Context()
        self._context.linger = 0
        self._pub, self._router = self._context.socket(zmq.XPUB), self._context.socket(zmq.ROUTER)
        for each in (self._pub, self._router):
            each.bind("tcp://127.0.0.1:*")
        events, replay = (each.getsockopt(zmq.LAST_ENDPOINT).decode() for each in (self._pub, self._router))
        self._status = HttpServer("127.0.0.1:0", self._answer, option="", what="status", body_bytes_max=1 << 20)
        self.source = EventSource(events, replay, self._status.address)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._status.close()
        self._pub.close()
        self._router.close()
        self._context.term()

    async def _answer(self, request: HttpRequest) -> HttpResponse:
        device, memory, all_tiers = (SIZE * pages for pages in self._truth)
        one = {"l1": device, "l2": memory - device, "l3": all_tiers - memory, "transfer": 0}
        answers = [one for _ in json.loads(request.body)["prompts"]]
        return HttpResponse(HTTPStatus.OK, json.dumps(answers).encode())

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._pub, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        while not self._over.is_set():
            ready = dict(poller.poll(20))
            if self._pub in ready and self._pub.recv()[:1] == b"\x01":
                for number, payload in self._live:
                    self._pub.send_multipart([b"", number.to_bytes(8, "big"), payload])
            if self._router in ready:
                client, _, _first = self._router.recv_multipart()
                for number, payload in self._kept:
                    self._router.send_multipart([client, b"", b"", number.to_bytes(8, "big"), payload])
                self._router.send_multipart([client, b"", b"", b"\xff" * 8, b""])


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that is silent for good need not be waited for."""
    monkeypatch.setattr(event_check, "SILENCE_S", 3600.0)
    monkeypatch.setattr(event_check, "SETTLE_S", 0.1)


@contextlib.contextmanager
def worker(**what: object) -> Iterator[HandWorker]:
    opened = HandWorker(**what)  # type: ignore[arg-type]
    try:
        yield opened
    finally:
        opened.close()


def found_in(**what: object) -> dict[str, str]:
    """What the check finds, by its name."""
    with worker(**what) as opened:
        return {each.check: each.level for each in check_events(opened.source, listen_s=0.5)}


def live(*events: KVEvent, number: int = 5) -> tuple[Batch, ...]:
    """The right fence, and one more batch."""
    return FENCED[0], batch(number, *events)


def test_a_stream_without_a_fault_is_right() -> None:
    assert found_in() == {"events": "ok"}


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("signed hash", {"live": live(BlockStored([-7], None, [50, 51], SIZE, None, "GPU", None))}),
        ("orphan", {"live": live(stored(8, 1, parent=107))}),
        ("orphan", {"live": live(stored(3, 1, "GPU", parent=102))}),
        ("stored twice", {"live": live(stored(0, 1, "CPU"))}),
        ("not stored", {"live": live(BlockRemoved([102], "GPU"))}),
        ("gap", {"live": (*FENCED, batch(7))}),
        ("limits", {"live": live(*[AllBlocksCleared() for _ in range(4097)])}),
        ("unreadable", {"live": (*FENCED, (6, b"\xc1"))}),
        ("fields", {"live": live(stored(8, 1), BlockStored([1], None, [1], SIZE, None, "GPU", None))}),
        ("replay", {"kept": RIGHT[1:]}),
        ("replay", {"kept": (*RIGHT[:2], *RIGHT[3:])}),
        ("replay", {"kept": (*RIGHT[:2], batch(2), *RIGHT[3:])}),
        ("probe", {"truth": (1, 3, 4)}),
        ("probe", {"truth": (2, 2, 4)}),
        ("probe", {"truth": (2, 3, 3)}),
        ("probe", {"truth": (4, 4, 4)}),
    ],
)
def test_each_planted_fault_is_found(fault: str, what: dict[str, object]) -> None:
    assert found_in(**what).get(f"events: {fault}") == "bad"


@pytest.mark.parametrize(("fault", "sent", "limit"), [("no fence", RIGHT, "FENCE_S"), ("silence", FENCED, "SILENCE_S")])
def test_a_stream_that_tells_a_newcomer_nothing_or_is_dead_is_found(
    fault: str, sent: tuple[Batch, ...], limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_check, limit, 0.3)
    assert found_in(live=sent).get(f"events: {fault}") == "bad"


def test_a_page_that_storage_had_before_is_no_fault() -> None:
    assert found_in(truth=(2, 3, 9)) == {"events": "ok"}


@pytest.mark.parametrize("options", [{}, {"routers": ("llm-d",)}, {"bigram_keys": True}])
async def test_the_stream_of_an_engine_equals_what_it_has_tier_by_tier(
    tmp_path: Path, options: dict[str, object]
) -> None:
    config = engine_config(
        status_listen="127.0.0.1:0",
        kv_events_endpoint="tcp://127.0.0.1:*",
        kv_events_replay="tcp://127.0.0.1:*",
        kv_events_kept_batches=5,
        namespace="fleet",
        **options,
    )
    storage = open_storage(f"file:{tmp_path}?capacity=64MB")
    bigrams = bool(options.get("bigram_keys"))
    async with loopback_pair(config, device_pages=16, host_pages=24, storage=storage) as pair:
        for number in range(8):
            names = ({}, {"namespace": "tenant"}, {"lora_name": "sql"})[number % 3]
            await pair.serve(range(100 * number, 100 * number + 6 * PAGE + bigrams), **names)
        publisher = runtime_of(pair.engine).kv_events
        assert publisher is not None
        source = EventSource(publisher.address, publisher.replay_address, pair.engine.status_address)
        (finding,) = await asyncio.to_thread(check_events, source, listen_s=0.5)
        assert finding.level == "ok", finding
        assert "prompts compared by tier" in finding.found and "0 prompts" not in finding.found


def test_the_command_prints_the_findings_and_fails_for_bad_ones(tmp_path: Path) -> None:
    def run(opened: HandWorker, *more: str) -> tuple[int, str]:
        source = opened.source
        assert source.replay is not None and source.status is not None
        arguments = ["doctor", "--json", "--events", source.events, *more]
        result = CliRunner().invoke(app, arguments)
        return result.exit_code, result.stdout

    with worker() as opened:
        status = opened.source.status or ""
        code, text = run(opened, "--replay", opened.source.replay or "", "--status", status)
        assert (code, json.loads(text)[0]["level"]) == (0, "ok")
        code, text = run(opened)
        assert (code, json.loads(text)[0]["level"]) == (0, "warn")
    with worker(truth=(0, 0, 0)) as opened:
        code, text = run(opened, "--status", opened.source.status or "")
        assert (code, json.loads(text)[0]["check"]) == (1, "events: probe")


def test_what_does_not_answer_is_named() -> None:
    with worker() as opened, pytest.raises(InvalidConfig, match="does not answer"):
        check_events(EventSource(opened.source.events, status="127.0.0.1:1"), listen_s=0.1)
    with pytest.raises(InvalidConfig, match="is no endpoint"):
        check_events(EventSource("nonsense"))
