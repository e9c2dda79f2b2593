"""A prefill peer and a decode engine, each on a thread of its own, over NIXL; every restored byte is compared."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from tests.support.configs import engine_config
from tests.support.waits import LIMIT_S
from tidekv import (
    ComponentPools,
    DecodeRequest,
    DevicePool,
    EngineClosed,
    EngineConfig,
    EngineThread,
    Failed,
    HandedOver,
    InvalidRequest,
    KVLayout,
    NixlTransport,
    PeerOptions,
    PrefillConfig,
    PrefillPeer,
    PrefillThread,
    Restored,
    prompt_digest,
)
from tidekv.engine.decode.decode_engine import DecodeEngine
from tidekv.engine.thread.engine_thread import Outcome, RestoredInto
from tidekv.states.errors import RequestFailed
from tidekv.transports.prefill.prefill_room import Room, RoomOutcome

pytestmark = pytest.mark.nixl
PAGE = 4
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=PAGE)
PROMPT = list(range(100, 122))  # Five pages of four tokens and a tail of two.
PAGES = [9, 2, 7, 4, 5, 0]


@dataclass
class Pair:
    """Both ends."""

    prefill: PrefillThread
    source: DevicePool
    decode: EngineThread
    target: DevicePool

    def request(self, name: str = "r", tokens: list[int] = PROMPT) -> DecodeRequest:
        return DecodeRequest(request_id=name, tokens=tokens, prefill=self.prefill.address)

    def submit(self, name: str = "r", tokens: list[int] = PROMPT) -> None:
        self.decode.submit(self.request(name, tokens))

    def send(self, first: int, end: int, name: str = "r") -> None:
        tail = len(PROMPT) if end == len(PAGES) else None
        self.prefill.send(name, PAGES[first:end], start_token=first * PAGE, end_token=tail)

    def restored(self) -> torch.Tensor:
        """The tokens' bytes of the next request that becomes READY: [page, bytes], of full pages."""
        (outcome,) = self.outcomes()
        assert isinstance(outcome, Restored), outcome
        return self.target.read_pages(outcome.ready.pages[:-1])

    def outcomes(self) -> list[Outcome]:
        return self.decode.poll(LIMIT_S)

    def ended(self) -> HandedOver:
        (ended,) = self.prefill.poll(LIMIT_S)
        return ended


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    # UCX's transport within a process aborts if one of its agents ends while another connects to it.
    monkeypatch.setenv("UCX_TLS", "tcp")
    source, target = DevicePool.allocate(LAYOUT, 16), DevicePool.allocate(LAYOUT, 16)
    source.write_pages(range(16), torch.randint(0, 255, (16, LAYOUT.page_bytes)).to(torch.uint8))
    peer = PrefillPeer(device=source, transport=NixlTransport("prefill"))
    config = engine_config(peer=PeerOptions(attempts=2, silence_s=10.0))
    with (
        PrefillThread(peer, promise_timeout_s=LIMIT_S) as prefill,
        EngineThread(
            DecodeEngine(config, device=target, transport=NixlTransport("decode", dials=["127.0.0.1:*"]))
        ) as decode,
    ):
        yield Pair(prefill, source, decode, target)


def test_what_finish_names_beside_the_first_token_reaches_decode_and_the_bytes_are_counted(pair: Pair) -> None:
    pair.submit()
    pair.prefill.open("r", prompt_digest(PROMPT))
    pair.send(0, len(PAGES))
    pair.prefill.finish("r", first_token=7, aux={"row": b"\x01\x02"})
    (outcome,) = pair.outcomes()
    assert isinstance(outcome, Restored), outcome
    assert (outcome.ready.first_token, outcome.ready.aux) == (7, {"row": b"\x01\x02"})
    assert pair.ended().bytes_sent == len(PAGES) * LAYOUT.page_bytes


def test_windows_at_the_end_of_a_prompt_go_with_its_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    source, target = DevicePool.allocate(LAYOUT, 16), DevicePool.allocate(LAYOUT, 16)
    theirs, ours = (
        ComponentPools(name="w", kind="window", window_tokens=9, device=DevicePool.allocate(LAYOUT, 8)) for _ in "ab"
    )
    for pool in (source, theirs.device):
        pages = pool.num_pages
        pool.write_pages(range(pages), torch.randint(0, 255, (pages, LAYOUT.page_bytes)).to(torch.uint8))
    peer = PrefillPeer(device=source, components=[theirs], transport=NixlTransport("prefill"))
    engine = DecodeEngine(
        engine_config(device="lent", peer=PeerOptions(silence_s=10.0)),
        device=target,
        components=[ours],
        transport=NixlTransport("decode", dials=["127.0.0.1:*"]),
    )
    with PrefillThread(peer, promise_timeout_s=LIMIT_S) as prefill, EngineThread(engine) as decode:
        pair = Pair(prefill, source, decode, target)
        # Of 22 tokens the windows of the last 9 lie in three pages.
        for name, windows in (("r", [3, 1, 2]), ("s", [3, 1])):
            prefill.open(name, prompt_digest(PROMPT))
            pair.send(0, len(PAGES), name)
            prefill.send_component_pages(name, "w", windows)
            prefill.finish(name, first_token=7)
            decode.restore_into(pair.request(name), PAGES, component_pages={"w": [6, 7, 0]})
            (outcome,) = pair.outcomes()
            if name == "r":
                assert isinstance(outcome, RestoredInto), outcome
                assert outcome.restored.is_complete
                assert torch.equal(ours.device.read_pages([6, 7, 0]), theirs.device.read_pages(windows))
            else:
                assert "component 'w'" in str(outcome), "pages of another number are named"


def test_values_that_cannot_be_sent_are_refused_by_finish(pair: Pair) -> None:
    pair.prefill.open("r", prompt_digest(PROMPT))
    with pytest.raises(InvalidRequest, match="aux"):
        pair.prefill.finish("r", first_token=7, aux={"row": bytes(100_000)})


def test_pages_arrive_whether_they_are_handed_over_before_or_after_the_promise(pair: Pair) -> None:
    pair.prefill.open("r", prompt_digest(PROMPT))
    pair.send(0, 2)
    pair.submit()
    pair.send(2, 5)
    pair.send(5, 6)
    pair.prefill.finish("r", first_token=7)
    assert torch.equal(pair.restored(), pair.source.read_pages(PAGES[:-1]))
    assert pair.ended() == HandedOver("r", RoomOutcome.RECEIVED, "decode has received all")
    assert pair.prefill.poll() == []
    assert pair.prefill.statistics()["handovers"] == 0
    # The id is free again; calls for a hand-over that has ended have no effect.
    pair.send(0, 1)
    pair.prefill.stop("r", "late")
    pair.prefill.open("r", prompt_digest(PROMPT))


def test_after_a_restart_only_later_pages_are_sent(pair: Pair) -> None:
    pair.prefill.open("r", prompt_digest(PROMPT))
    pair.submit()
    pair.send(0, 6)
    pair.prefill.restart("r", "preempted")
    pair.source.write_pages(PAGES, torch.randint(0, 255, (6, LAYOUT.page_bytes)).to(torch.uint8))
    pair.send(0, 6)
    pair.prefill.finish("r", first_token=7)
    assert torch.equal(pair.restored(), pair.source.read_pages(PAGES[:-1]))
    assert pair.ended().outcome is RoomOutcome.RECEIVED


def test_a_stopped_hand_over_ends_and_refuses_decode_at_once(pair: Pair) -> None:
    pair.prefill.open("r", prompt_digest(PROMPT))
    pair.send(0, 2)
    pair.prefill.stop("r", "aborted at prefill")
    assert pair.ended() == HandedOver("r", None, "aborted at prefill")
    pair.submit()
    (outcome,) = pair.outcomes()
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.error, RequestFailed)
    assert "aborted at prefill" in str(outcome.error)
    # Opened again, it is served.
    pair.prefill.open("r", prompt_digest(PROMPT))
    pair.send(0, 6)
    pair.prefill.finish("r", first_token=7)
    pair.submit()
    pair.restored()


def test_a_hand_over_that_decode_declines_ends_at_once(pair: Pair) -> None:
    pair.prefill.open("r", prompt_digest(PROMPT))
    pair.send(0, 6)
    pair.decode.decline(pair.request())
    assert pair.ended() == HandedOver("r", None, "decode declined it")
    # What was declined is refused to others, which then compute. A second decline has no effect on that.
    pair.decode.decline(pair.request())
    pair.submit()
    (outcome,) = pair.outcomes()
    assert isinstance(outcome, Failed)
    assert "decode declined it" in str(outcome.error)


def test_a_decline_is_checked_on_the_engines_thread_and_logged(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    for request, words in (
        (replace(pair.request(), prefill="nowhere"), "nowhere"),
        (replace(pair.request(), tokens=[-1]), "token -1"),
    ):
        caplog.clear()
        pair.decode.decline(request)
        pair.decode.statistics()
        assert "a room could not be declined" in caplog.text
        assert words in caplog.text
    with pytest.raises(InvalidRequest, match="request must be"):
        pair.decode.decline("r")
    pair.decode.close()
    with pytest.raises(EngineClosed):
        pair.decode.decline(pair.request())


def test_wrong_pages_are_named_at_both_ends(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.prefill.open("s", prompt_digest(PROMPT))
    pair.prefill.send("s", [99], start_token=0)
    pair.submit("s")
    (outcome,) = pair.outcomes()
    assert isinstance(outcome, Failed)
    assert "99" in str(outcome.error)
    # The time runs from the last call on.
    monkeypatch.setattr(pair.prefill, "_promise_timeout_s", 0.05)
    pair.prefill.send("s", PAGES, start_token=0)
    ended = pair.ended()
    assert ended.outcome is RoomOutcome.FAILED
    # That no further promise came follows from the failure: it must not take its place.
    assert re.fullmatch(r"prefill raised: pages 99 to 99 .*; then decode did not ask for it within .* s", ended.cause)


def test_a_stop_does_not_hide_why_the_last_room_failed(pair: Pair) -> None:
    pair.prefill.open("s", prompt_digest(PROMPT))
    pair.prefill.send("s", [99], start_token=0)
    pair.submit("s")
    pair.outcomes()
    pair.prefill.stop("s", "enough")
    assert re.fullmatch(r"prefill raised: pages 99 to 99 .*; then enough", pair.ended().cause)


def test_a_stop_that_fails_a_room_is_named_once_at_both_ends(pair: Pair) -> None:
    pair.prefill.open("r", prompt_digest(PROMPT))
    pair.send(0, 6)
    pair.submit()
    while pair.prefill.unclaimed():
        time.sleep(0.002)  # The limit of the test ends it.
    pair.prefill.stop("r", "enough")
    assert pair.ended().cause == "prefill failed: enough"
    # So it is to what asks later.
    for again in (True, False):
        (outcome,) = pair.outcomes()
        assert isinstance(outcome, Failed)
        assert str(outcome.error).count("enough") == str(outcome.error).count("prefill failed") == 1
        if again:
            pair.submit()


def test_two_prompts_under_one_id_get_their_own_pages(pair: Pair) -> None:
    """Two requests of a router that numbers them by decode worker, here at one worker, one after the other."""
    other = [token + 1000 for token in PROMPT]
    pair.prefill.open("mine", prompt_digest(PROMPT), room="r")
    pair.prefill.open("yours", prompt_digest(other), room="r")
    pair.submit(tokens=other)
    for name, pages in (("mine", PAGES), ("yours", range(10, 16))):
        pair.prefill.send(name, pages, start_token=0, end_token=len(PROMPT))
        pair.prefill.finish(name, first_token=7)
    (outcome,) = pair.outcomes()
    assert isinstance(outcome, Restored), outcome
    found = pair.target.read_pages(outcome.ready.pages[:-1])
    assert torch.equal(found, pair.source.read_pages(range(10, 15)))
    assert pair.ended().request_id == "yours"
    pair.decode.finish(outcome.ready, [])
    pair.outcomes()
    pair.submit()
    assert torch.equal(pair.restored(), pair.source.read_pages(PAGES[:-1]))
    assert pair.ended().request_id == "mine"


def test_calls_are_checked_and_an_end_ends_everything(pair: Pair) -> None:
    pair.prefill.open("r", prompt_digest(PROMPT))
    with pytest.raises(InvalidRequest, match="'r' is being handed over already: wait for its end"):
        pair.prefill.open("r", prompt_digest(PROMPT))
    with pytest.raises(InvalidRequest, match="'r' is being handed over already, for another prompt"):
        pair.prefill.open("r", prompt_digest([1]))
    with pytest.raises(InvalidRequest, match="prompt must be"):
        pair.prefill.open("s", PROMPT)
    with pytest.raises(InvalidRequest, match="start_token"):
        pair.prefill.send("r", [1], start_token=-1)
    for token in (-1, 1.5, None, 2**40, "7", True):
        with pytest.raises(InvalidRequest, match="first_token must be an int from 0 to"):
            pair.prefill.finish("r", first_token=token)
    pair.prefill.close()
    pair.prefill.close()
    assert pair.ended() == HandedOver("r", None, "the worker was closed")
    with pytest.raises(EngineClosed):
        pair.prefill.open("s", prompt_digest([1]))
    with pytest.raises(EngineClosed, match="it lives once"):
        pair.prefill.start()
    assert "tidekv-prefill" not in {thread.name for thread in threading.enumerate()}


def test_a_promise_that_never_comes_ends_the_hand_over() -> None:
    peer = PrefillPeer(device=DevicePool.allocate(LAYOUT, 16), transport=NixlTransport("prefill"))
    thread = PrefillThread(peer, promise_timeout_s=0.05)
    with pytest.raises(EngineClosed, match="was not started"):
        thread.open("r", prompt_digest(PROMPT))
    with thread:
        thread.open("r", prompt_digest(PROMPT))
        (ended,) = thread.poll(LIMIT_S)
        assert (ended.outcome, ended.cause) == (None, "decode did not ask for it within 0.05 s")


def test_a_prompt_that_waits_longer_does_not_keep_those_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM #58222: leases that had ended were looked for in order of arrival, up to the first that was renewed."""
    peer = PrefillPeer(device=DevicePool.allocate(LAYOUT, 16), transport=NixlTransport("prefill"))
    with PrefillThread(peer, promise_timeout_s=LIMIT_S) as thread:
        for name in ("first", "second", "third"):
            thread.open(name, prompt_digest([*PROMPT, len(name)]))
            assert thread.statistics()["handovers"], "it waits for its promise by now"
            monkeypatch.setattr(thread, "_promise_timeout_s", 0.05)
        ended = []
        while len(ended) < 2:
            ended += thread.poll(LIMIT_S)
        assert sorted(end.request_id for end in ended) == ["second", "third"]
        assert thread.unclaimed() == ["first"]


def test_a_start_that_fails_leaves_no_thread() -> None:
    peer = PrefillPeer(
        PrefillConfig(listen="203.0.113.9:1"), device=DevicePool.allocate(LAYOUT, 16), transport=NixlTransport("p")
    )
    with pytest.raises(Exception, match=r"203\.0\.113\.9|secret"):
        PrefillThread(peer).start()
    assert "tidekv-prefill" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.slow
def test_a_prefill_whose_loop_is_late_for_longer_than_the_silence_fails_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    source, target = DevicePool.allocate(LAYOUT, 16), DevicePool.allocate(LAYOUT, 16)
    blocked: list[str] = []

    def compute() -> None:
        end_s = time.monotonic() + LIMIT_S
        while not late_retries() and time.monotonic() < end_s:
            time.sleep(0.01)  # Stands for a model that computes on the loop.

    async def serve(room: Room) -> None:
        if not blocked:
            blocked.append(room.request_id)
            compute()
        await room.send(PAGES, start_token=0, end_token=room.prompt_tokens)
        await room.finish(first_token=1)

    def late_retries() -> int:
        core = decode.statistics()["core"]
        assert isinstance(core, dict)
        return int(core["late_retries"])

    peer = PrefillPeer(device=source, transport=NixlTransport("prefill"), on_room=serve)
    config = EngineConfig(peer=PeerOptions(silence_s=0.6, heartbeat_s=0.2))
    with (
        PrefillThread(peer) as prefill,
        EngineThread(
            DecodeEngine(config, device=target, transport=NixlTransport("decode", dials=["127.0.0.1:*"]))
        ) as decode,
    ):
        request = DecodeRequest(
            request_id="r", tokens=PROMPT, prefill=prefill.address, deadline_s=LIMIT_S, send_prompt=True
        )
        decode.submit(request)
        (outcome,) = decode.poll(LIMIT_S)
        assert isinstance(outcome, Restored), outcome
        assert late_retries() >= 1
