"""The example service under an operator: storage exchanged while it serves, prefill that stores, spans."""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path

import httpx
import pytest

from tests.support.waits import LIMIT_S

pytestmark = [pytest.mark.nixl, pytest.mark.slow]

PROMPT = [(7 * position + 3) % 256 for position in range(96)]
PROVIDER = """
import os
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

if os.environ.get("SPANS"):
    provider = TracerProvider()
    out = open(os.environ["SPANS"], "a")
    exporter = ConsoleSpanExporter(out=out, formatter=lambda span: span.to_json(None) + "\\n")
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
"""
"""What opentelemetry-instrument does to a process, in short."""


def test_prompts_that_prefill_has_stored_hit_once_storage_is_attached_again(
    serving, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(PROVIDER)
    spans = tmp_path / "spans"
    monkeypatch.setenv("SPANS", str(spans))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]))
    stored = f"file:{tmp_path / 'pages'}?capacity=64MB"
    with serving(tmp_path / "log", "--storage", stored, "--prefill-storage", stored, "--traces") as service:
        assert httpx.post(f"{service.url}/storage", json={"attached": False}).json() == {"attached": False}
        expected = service.tokens(PROMPT, 4)
        assert httpx.post(f"{service.url}/flush", json={"tiers": ["l3"]}).status_code == 400  # No storage is attached.
        assert httpx.post(f"{service.url}/storage", json={"attached": True}).json() == {"attached": True}
        assert httpx.post(f"{service.url}/flush", json={"tiers": ["l1", "l2"]}).json()["dropped"]["l1"] > 0

        deadline = time.monotonic() + LIMIT_S
        # Prefill stores in the background.
        while httpx.post(f"{service.url}/look_up", json={"prompt": [PROMPT]}).json()[0]["l3"] < len(PROMPT):
            assert time.monotonic() < deadline
        changed = httpx.post(
            f"{service.url}/policy", json={"prefetch": "wait_complete", "prefetch_threshold_tokens": 0}
        )
        assert changed.json()["prefetch"] == "wait_complete"
        answer = service.complete(PROMPT, 4)
        assert answer.choices[0].token_ids == expected
        assert answer.usage.sources["l3"] > 0
        service.wait_idle()
    names = [json.loads(line)["name"] for line in spans.read_text().splitlines()]
    assert names.count("tidekv.restore") == 2


@pytest.mark.parametrize("named_by", ["--peer", "kv_hints"])
def test_a_prompt_is_read_from_the_host_memory_of_another_service(serving, tmp_path: Path, named_by: str) -> None:
    policy = {"prefetch": "wait_complete", "prefetch_threshold_tokens": 0}
    with serving(tmp_path / "first", "--peer-listen", "127.0.0.1:0") as first:
        expected = first.tokens(PROMPT, 4)
        first.wait_for("/requests", lambda answer: answer["pools"]["host"]["cached"] >= len(PROMPT) // 16)
        address = first.get("/health")["peer_address"]
        named = ("--peer", address) if named_by == "--peer" else ("--peer-allow", "127.0.0.1:*")
        payload = {"source_control_endpoint": f"tcp://{address}"}
        action = {"action_id": "a", "action_type": "kv.fetch", "action_version": "1.0", "payload": payload}
        hints = {"protocol_version": "0.1", "message_id": "m", "actions": [action]}
        body = {"extra_body": {"kv_hints": hints}} if named_by == "kv_hints" else {}
        with serving(tmp_path / "second", "--name", "decode-1", *named) as second:
            assert httpx.post(f"{second.url}/policy", json=policy).json()["prefetch_threshold_tokens"] == 0
            deadline = time.monotonic() + LIMIT_S
            while True:
                answer = second.complete(PROMPT, 4, **body)
                assert answer.choices[0].token_ids == expected
                if answer.usage.sources.get("peer"):
                    break
                # On a busy machine the peer may be late, and is left alone for a while.
                assert time.monotonic() < deadline, answer.usage.sources
                httpx.post(f"{second.url}/flush", json={"tiers": ["l1", "l2"]})
            assert answer.usage.sources["peer"] == len(PROMPT) // 16 * 16
            assert second.get("/health")["peer_address"] is None


def test_sigterm_hands_the_cache_to_the_service_that_takes_its_place(serving, generate, tmp_path: Path) -> None:
    listens, allows = ("--peer-listen", "127.0.0.1:0"), ("--peer-allow", "127.0.0.1:*")
    with serving(tmp_path / "new", "--name", "decode-1", *listens, *allows) as new:
        to = new.get("/health")["peer_address"]
        with serving(tmp_path / "old", *listens, "--drain-to", to, "--drain-to-s", f"{LIMIT_S}") as old:
            output = old.tokens(PROMPT, 40)
        longer = [*PROMPT, *output]
        answer = new.complete(longer, 8)
        assert answer.choices[0].token_ids == generate(longer, 8)
        # All full pages of the prompt and of the output that have KV.
        assert answer.usage.sources["l2"] >= (len(longer) - 1) // 16 * 16 - 16


def test_prefill_reads_the_answer_before_from_the_service(serving, generate, tmp_path: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    with serving(tmp_path / "log", "--prefill-reads") as service:
        # On a busy machine a read may be late, and prefill computes what it was to bring.
        for number in itertools.count():
            prompt = [number, *PROMPT[1:]]
            first = service.complete(prompt, 40)
            assert first.usage.prefill_cached == {"l1": 0, "peer": 0}
            # All that has KV, on full pages, once it is in host memory.
            had = (len(prompt) + 39) // 16 * 16
            pages = (number + 1) * had // 16
            service.wait_for("/requests", lambda answer, pages=pages: answer["pools"]["host"]["cached"] >= pages)
            turn = [*prompt, *first.choices[0].token_ids, 5, 6, 7]
            second = service.complete(turn, 4)
            assert second.choices[0].token_ids == generate(turn, 4)
            assert second.usage.sources["l1"] == had
            if second.usage.prefill_cached == {"l1": len(prompt), "peer": had - len(prompt)}:
                break
            assert second.usage.prefill_cached == {"l1": len(prompt), "peer": 0}
            assert time.monotonic() < deadline, second.usage


def test_peers_of_a_service_that_cannot_be_dialled_are_refused_in_one_line(serving, tmp_path: Path) -> None:
    for options, said in (
        (("--peer", "nowhere"), "--peer"),
        (tuple(word for port in range(1, 10) for word in ("--peer", f"10.0.0.1:{port}")), "8 peers at most"),
    ):
        with pytest.raises(pytest.fail.Exception, match=said), serving(tmp_path / "log", *options):
            pass
