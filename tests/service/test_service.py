"""Conversations with the example service: every token equals that of one process, whatever happens around it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest

from examples.service.__main__ import app
from tests.service.conftest import ROOT, run_service
from tests.support.waits import LIMIT_S

pytestmark = pytest.mark.nixl

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
STORY = "It was the best of times, it was the worst of times, it was the age of wisdom. "


def prompt_of(number: int, length: int = 64) -> list[int]:
    """Tokens that no other test has in front."""
    return [(number * 37 + position * position * 11 + position) % 256 for position in range(length)]


def test_a_conversation_is_streamed_cached_and_equal_to_one_process(service, generate) -> None:
    prompt = list(STORY.encode())
    for turn in range(3):
        chunks = list(
            service.complete(prompt, 20, stream=True, stream_options={"include_usage": True})
            if turn
            else service.complete(STORY, 20, stream=True, stream_options={"include_usage": True})
        )
        choices = [choice for chunk in chunks for choice in chunk.choices]
        output = [token for choice in choices for token in choice.token_ids]
        assert output == generate(prompt, 20)
        assert bytes(output).decode(errors="replace") == "".join(choice.text for choice in choices)
        assert [choice.finish_reason for choice in choices] == [None] * 19 + ["length"]
        usage = chunks[-1].usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 20)
        # The turn before, all but its last token, is in device memory, as far as it fills pages.
        known = (len(prompt) - 5 - 1) // 16 * 16 if turn else 0
        assert usage.prompt_tokens_details.cached_tokens == known
        prompt += [*output, *b"Go on"]
    assert service.tokens(prompt, 7) == generate(prompt, 7)


def test_tokens_are_equal_without_caches_cold_and_warm(service, generate) -> None:
    prompt = prompt_of(1, 90)
    expected = generate(prompt, 24)
    off = {"cache": False, "cache_salt": "nobody else"}
    for options, cached in ((off, 0), (off, 0), ({}, 0), ({}, 80)):
        answer = service.complete(prompt, 24, extra_body=options)
        assert answer.choices[0].token_ids == expected
        assert answer.usage.prompt_tokens_details.cached_tokens == cached


async def test_parallel_requests_of_all_kinds_are_batched_and_equal(service, openai, generate) -> None:
    prompts = [prompt_of(100 + number, 20 + 7 * number) for number in range(6)]
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:

        async def whole(prompt: list[int]) -> list[int]:
            answer = await client.completions.create(model=service.model, prompt=prompt, max_tokens=30)
            return answer.choices[0].token_ids

        async def streamed(prompt: list[int]) -> list[int]:
            stream = await client.completions.create(model=service.model, prompt=prompt, max_tokens=30, stream=True)
            return [token async for chunk in stream for token in chunk.choices[0].token_ids]

        calls = [(whole, streamed)[number % 2](prompt) for number, prompt in enumerate(prompts)]
        outputs = await asyncio.gather(*calls)
        assert outputs == [generate(prompt, 30) for prompt in prompts]
        several = await client.completions.create(model=service.model, prompt=prompts[:3], max_tokens=30)
        assert [choice.token_ids for choice in several.choices] == outputs[:3]
        texts = await client.completions.create(model=service.model, prompt=["one", "two"], max_tokens=4)
        assert [choice.token_ids for choice in texts.choices] == [generate("one", 4), generate("two", 4)]


@pytest.mark.parametrize("how", ["streaming", "waiting for the whole"])
def test_a_client_that_goes_away_gives_its_pages_back(service, how: str) -> None:
    before = service.counts().get("cancelled", 0)
    if how == "streaming":
        stream = service.complete(prompt_of(2), 250, stream=True)
        assert len(next(iter(stream)).choices[0].token_ids) == 1
        (live,) = service.get("/requests")["requests"]
        assert (live["phase"], live["state"]) == ("decoding", "READY")
        stream.close()
    else:
        connection = HTTPConnection(service.url.removeprefix("http://"))
        connection.request("POST", "/v1/completions", json.dumps({"prompt": prompt_of(2), "max_tokens": 250}))
        service.wait_for("/requests", lambda answer: [live["phase"] for live in answer["requests"]] == ["decoding"])
        connection.close()
    service.wait_idle()
    assert service.counts()["cancelled"] == before + 1


def test_requests_survive_the_death_of_the_prefill_worker(service, generate) -> None:
    """Killed while one request is generated and others arrive: the next worker serves them, at the same address."""
    _, before = service.health()
    stream = service.complete(prompt_of(3), 40, stream=True)
    tokens = list(next(iter(stream)).choices[0].token_ids)
    os.kill(before["prefill"]["pid"], signal.SIGKILL)
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(service.tokens, prompt_of(30 + number, 60), 4) for number in range(3)]
        tokens += [token for chunk in stream for token in chunk.choices[0].token_ids]
        assert tokens == generate(prompt_of(3), 40)
        assert [call.result() for call in waiting] == [generate(prompt_of(30 + number, 60), 4) for number in range(3)]
    status, after = service.health()
    assert (status, after["prefill"]["starts"]) == (200, before["prefill"]["starts"] + 1)
    assert after["prefill"]["pid"] != before["prefill"]["pid"]
    service.wait_idle()


def test_requests_that_outgrow_memory_are_retracted_and_resumed_with_equal_tokens(service, generate) -> None:
    before = service.counts().get("retractions", 0)
    retractions = 0
    # On a busy machine five may come one after the other, and then all of them fit.
    for first in range(200, 250, 5):
        prompts = [prompt_of(number, 20) for number in range(first, first + 5)]
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda prompt: service.complete(prompt, 60), prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.choices[0].token_ids == generate(prompt, 60)
        retractions += sum(answer.usage.retractions for answer in answers)
        if retractions:
            break
    assert retractions > 0
    assert service.counts()["retractions"] == before + retractions
    service.wait_idle()


def test_more_than_the_queue_holds_is_told_to_come_again(service, openai, generate) -> None:
    prompts = [prompt_of(300 + number, 180) for number in range(16)]

    def ask(prompt: list[int]) -> Exception | list[int]:
        try:
            return service.tokens(prompt, 8)
        except openai.RateLimitError as error:
            return error

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(ask, prompts))
        refused = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
        assert 0 < len(refused) < len(prompts)
        assert {error.response.headers["retry-after"] for error in refused} == {"1"}
        served = next(number for number, answer in enumerate(answers) if isinstance(answer, list))
        assert answers[served] == generate(prompts[served], 8)
        # A refused client that retries, as the OpenAI client does by itself, is served.
        patient = service.openai.with_options(max_retries=20)
        again = pool.map(
            lambda prompt: patient.completions.create(model=service.model, prompt=prompt, max_tokens=1), prompts[:12]
        )
        assert all(answer.choices[0].finish_reason == "length" for answer in again)
    service.wait_idle()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [256]}, "from 0 to 255"),
        ({"prompt": [1, [2]]}, "mixture"),
        ({"max_tokens": 0}, "at least one token"),
        ({"max_tokens": 900}, "more than this worker can hold"),
        ({"temperature": 0.7}, "temperature"),
        ({"n": 2, "stop": "."}, "stop, n"),
        ({"model": "another"}, "does not exist"),
        ({"prompt": [[1], [2]], "stream": True}, "one prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_words(service, openai, options: dict[str, object], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        service.openai.completions.create(**{"model": service.model, "prompt": "a", **options})


def test_operators_see_the_model_the_metrics_and_the_machine(service) -> None:
    assert [model.id for model in service.openai.models.list()] == ["tidekv-random-llama"]
    service.tokens("count me")
    metrics = httpx.get(f"{service.url}/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    names = {line.split("{")[0].split()[0] for line in metrics.text.splitlines() if not line.startswith("#")}
    assert {"tidekv_requests_arrived_total", "tidekv_pool_pages", "service_finished_total"} <= names
    status, health = service.health()
    assert (status, health["status"]) == (200, "ok")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")
def test_the_status_page_shows_the_machine_of_each_live_request(service, tmp_path: Path) -> None:
    assert BROWSER is not None
    is_over = threading.Event()

    def keep_asking(number: int) -> None:
        while not is_over.is_set():
            service.tokens(prompt_of(400 + number), 50)

    common = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1100,640"]
    picture = tmp_path / "status.png"
    command = [
        BROWSER,
        *common,
        f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=400",
        f"--screenshot={picture}",
        "--dump-dom",
        f"{service.url}/status",
    ]
    with ThreadPoolExecutor() as pool:
        asking = [pool.submit(keep_asking, number) for number in range(3)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        finally:
            is_over.set()
    for call in asking:
        call.result()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert '<span class="now ' in done.stdout, done.stdout
    assert "tidekv-random-llama, ok" in done.stdout
    assert re.search(r"device: \d+ in use, \d+ pinned, \d+ evictable, \d+ draining, \d+ free", done.stdout)
    service.wait_idle()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--port", "PORT"], "cannot listen as --host and --port say: Address already in use"),
        (["--model", "/nowhere"], "/nowhere is not a model directory: it has no config.json"),
        (["--page-size", "0"], "--page-size must be a whole number from 1 to 65,536, not 0"),
        (["--host-pages", "0"], "--host-pages must be a whole number, 1 or more, not 0"),
        (["--storage", "tape:"], "there is no storage engine 'tape'; allowed: file, memory, "),
        (["--drain-store-s", "-1"], "--drain-store-s must be a number from 0 to 31,536,000, not -1"),
        (["--drain-to", "here"], "--drain-to must be host:port"),
        (["--drain-to", "127.0.0.1:1"], "--drain-to needs --peer-listen, where the other service reads"),
        (["--journal", "/nowhere/j"], "--journal: /nowhere is not a directory that this process can write to"),
    ],
)
def test_a_wrong_option_is_one_line(options: list[str], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "examples.service.server", None)  # No service is started.
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit) as ended:
        port = str(taken.getsockname()[1])
        app(["--port", "0", *(option.replace("PORT", port) for option in options)], standalone_mode=False)
    said = str(ended.value)
    assert said.startswith(f"examples.service: {text.replace('PORT', port)}") and "\n" not in said, said


def test_a_wrong_option_is_found_before_anything_large_is_imported() -> None:
    """All checks have passed when the port is taken."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-X", "importtime", "-m", "examples.service", "--port", port]
        command += ["--storage", "memory:?capacity=1MB"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 1
    imported = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert len(said) == 1 and said[0].startswith("examples.service: cannot listen as --host and --port say"), said
    assert len(imported) > 100
    assert not {line.rpartition("|")[2].strip() for line in imported} & {"torch", "transformers", "uvicorn", "nixl"}


def test_a_short_rest_is_computed_by_the_decode_worker_with_equal_tokens(generate, tmp_path: Path) -> None:
    prompt = prompt_of(900, 70)
    with run_service(tmp_path / "log", "--recompute-threshold", "64") as service:
        output = service.tokens(prompt, 12)
        assert output == generate(prompt, 12)
        longer = [*prompt, *output, *prompt_of(901, 20)]
        answer = service.complete(longer, 12)
    assert answer.choices[0].token_ids == generate(longer, 12)
    # All full pages of the first turn are on the device, and no prefill was asked.
    assert answer.usage.sources["l1"] == 80
    assert answer.usage.sources["recompute"] == len(longer) - 80


@pytest.mark.slow
def test_sigterm_stores_for_the_next_service_what_only_this_one_has(generate, tmp_path: Path) -> None:
    options = ["--storage", f"file:{tmp_path}/pages?io=threads&capacity=256MiB", "--drain-store-s", "60"]
    prompt = prompt_of(77, 400)
    with run_service(tmp_path / "first", *options) as service:
        assert httpx.post(f"{service.url}/policy", json={"write": "back"}, timeout=LIMIT_S).status_code == 200
        service.tokens(prompt, 12)
    with run_service(tmp_path / "second", *options) as service:
        answer = service.complete(prompt, 12)
        # All full pages but that of the last token, which has to be computed.
        assert answer.usage.sources["l3"] >= 384
        assert answer.choices[0].token_ids == generate(prompt, 12)


def test_sigterm_answers_what_was_accepted_and_refuses_what_comes(service, openai, generate) -> None:
    """The service ends with it: the next test has another one."""
    stream = service.complete(prompt_of(500), 250, stream=True)
    tokens = list(next(iter(stream)).choices[0].token_ids)
    _, health = service.health()
    service.process.send_signal(signal.SIGTERM)
    while (answer := service.health())[0] == 200:
        pass
    assert answer[1]["status"] == "draining"
    with pytest.raises(openai.InternalServerError, match="shutting down") as refused:
        service.tokens("too late")
    assert refused.value.status_code == 503
    assert refused.value.response.headers["retry-after"] == "1"
    choices = [choice for chunk in stream for choice in chunk.choices]
    tokens += [token for choice in choices for token in choice.token_ids]
    assert len(tokens) == 250
    assert tokens[:16] == generate(prompt_of(500), 16)
    assert choices[-1].finish_reason == "length"
    assert service.process.wait(60) == 0
    deadline = time.monotonic() + 30
    while is_alive(health["prefill"]["pid"]):
        assert time.monotonic() < deadline


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
