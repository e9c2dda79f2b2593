"""A prefill peer and a decode engine, each on a thread of its own, over NIXL; every restored byte is compared."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from tests.support.configs import engine_config
from tests.support.waits import LIMIT_S
from tidekv import (
    DecodeRequest,
    DevicePool,
    EngineClosed,
    EngineThread,
    Failed,
    HandedOver,
    InvalidRequest,
    KVLayout,
    NixlTransport,
    PeerOptions,
    PrefillPeer,
    PrefillThread,
    Restored,
)
from tidekv.engine.thread.engine_thread import Outcome
from tidekv.states.errors import RequestFailed
from tidekv.transports.prefill.prefill_room import RoomOutcome

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

    def submit(self, name: str = "r", tokens: list[int] = PROMPT) -> None:
        self.decode.submit(DecodeRequest(request_id=name, tokens=tokens, prefill=self.prefill.address))

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
        EngineThread(config, device=target, transport=NixlTransport("decode", dials=["127.0.0.1:*"])) as decode,
    ):
        yield Pair(prefill, source, decode, target)


def test_pages_arrive_whether_they_are_handed_over_before_or_after_the_promise(pair: Pair) -> None:
    pair.prefill.open("r", prompt_tokens=len(PROMPT))
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
    pair.prefill.open("r", prompt_tokens=len(PROMPT))


def test_after_a_restart_only_later_pages_are_sent(pair: Pair) -> None:
    pair.prefill.open("r", prompt_tokens=len(PROMPT))
    pair.submit()
    pair.send(0, 6)
    pair.prefill.restart("r", "preempted")
    pair.source.write_pages(PAGES, torch.randint(0, 255, (6, LAYOUT.page_bytes)).to(torch.uint8))
    pair.send(0, 6)
    pair.prefill.finish("r", first_token=7)
    assert torch.equal(pair.restored(), pair.source.read_pages(PAGES[:-1]))
    assert pair.ended().outcome is RoomOutcome.RECEIVED


def test_a_stopped_hand_over_ends_and_refuses_decode_at_once(pair: Pair) -> None:
    pair.prefill.open("r", prompt_tokens=len(PROMPT))
    pair.send(0, 2)
    pair.prefill.stop("r", "aborted at prefill")
    assert pair.ended() == HandedOver("r", None, "aborted at prefill")
    pair.submit()
    (outcome,) = pair.outcomes()
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.error, RequestFailed)
    assert "aborted at prefill" in str(outcome.error)
    # Opened again, it is served.
    pair.prefill.open("r", prompt_tokens=len(PROMPT))
    pair.send(0, 6)
    pair.prefill.finish("r", first_token=7)
    pair.submit()
    pair.restored()


def test_a_hand_over_that_decode_declines_ends_at_once(pair: Pair) -> None:
    pair.prefill.open("r", prompt_tokens=len(PROMPT))
    pair.send(0, 6)
    pair.decode.decline("r", pair.prefill.address)
    assert pair.ended() == HandedOver("r", None, "decode declined it")
    # What was declined is refused to others, which then compute. A second decline has no effect on that.
    pair.decode.decline("r", pair.prefill.address)
    pair.submit()
    (outcome,) = pair.outcomes()
    assert isinstance(outcome, Failed)
    assert "decode declined it" in str(outcome.error)


def test_a_decline_is_checked_on_the_engines_thread_and_logged(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    for name, prefill, words in (("", "127.0.0.1:9", "request_id"), ("r", "127.0.0.1:9,", ""), ("a\nb", "x:1", "name")):
        caplog.clear()
        pair.decode.decline(name, prefill)
        pair.decode.statistics()
        assert "a room could not be declined" in caplog.text
        assert words in caplog.text
    pair.decode.close()
    with pytest.raises(EngineClosed):
        pair.decode.decline("r", pair.prefill.address)


def test_a_different_prompt_and_wrong_pages_fail_by_name(pair: Pair) -> None:
    pair.prefill.open("r", prompt_tokens=len(PROMPT))
    pair.submit(tokens=PROMPT[:-1])
    (outcome,) = pair.outcomes()
    assert isinstance(outcome, Failed)
    assert "promised room for 21 tokens, but the prompt has 22" in str(outcome.error)
    pair.prefill.stop("r", "enough")
    assert pair.ended().outcome is RoomOutcome.FAILED
    pair.prefill.open("s", prompt_tokens=len(PROMPT))
    pair.prefill.send("s", [99], start_token=0)
    pair.submit("s")
    (outcome,) = pair.outcomes()
    assert isinstance(outcome, Failed)
    assert "99" in str(outcome.error)


def test_calls_are_checked_and_an_end_ends_everything(pair: Pair) -> None:
    pair.prefill.open("r", prompt_tokens=len(PROMPT))
    with pytest.raises(InvalidRequest, match="'r' is being handed over already"):
        pair.prefill.open("r", prompt_tokens=3)
    with pytest.raises(InvalidRequest, match="prompt_tokens"):
        pair.prefill.open("s", prompt_tokens=0)
    with pytest.raises(InvalidRequest, match="start_token"):
        pair.prefill.send("r", [1], start_token=-1)
    pair.prefill.close()
    pair.prefill.close()
    assert pair.ended() == HandedOver("r", None, "the worker was closed")
    with pytest.raises(EngineClosed):
        pair.prefill.open("s", prompt_tokens=1)
    with pytest.raises(EngineClosed, match="it lives once"):
        pair.prefill.start()
    assert "tidekv-prefill" not in {thread.name for thread in threading.enumerate()}


def test_a_promise_that_never_comes_ends_the_hand_over() -> None:
    peer = PrefillPeer(device=DevicePool.allocate(LAYOUT, 16), transport=NixlTransport("prefill"))
    thread = PrefillThread(peer, promise_timeout_s=0.05)
    with pytest.raises(EngineClosed, match="was not started"):
        thread.open("r", prompt_tokens=5)
    with thread:
        thread.open("r", prompt_tokens=5)
        (ended,) = thread.poll(LIMIT_S)
        assert (ended.outcome, ended.cause) == (None, "decode did not ask for it within 0.05 s")


def test_a_start_that_fails_leaves_no_thread() -> None:
    peer = PrefillPeer(device=DevicePool.allocate(LAYOUT, 16), transport=NixlTransport("p"), listen="203.0.113.9:1")
    with pytest.raises(Exception, match=r"203\.0\.113\.9|secret"):
        PrefillThread(peer).start()
    assert "tidekv-prefill" not in {thread.name for thread in threading.enumerate()}
