"""The chat of the example service: OpenAI's client, the phrases of the random model, and the page in a real browser."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch

from demo.model import ModelShape, build_llama
from examples.service.model import ByteTokenizer
from examples.service.phrases import ANSWER, Phrases
from tests.support.page_looks import PHONE_WIDTH, check_looks
from tools.browser import find_browser, opened_page

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.nixl
needs_browser = pytest.mark.skipif(find_browser() is None, reason="no Chromium here: apt-get install chromium")
Messages = list[dict[str, str]]


@pytest.fixture(scope="module")
def reply() -> Callable[[Messages], str]:
    """`reply(messages)`: the answer by transformers' own generate() in this process, restricted to the phrases."""
    llama = build_llama(ModelShape(vocab_size=256))

    def run(messages: Messages) -> str:
        prompt = ByteTokenizer().encode_chat([(message["role"], message["content"]) for message in messages])
        prompt.append(Phrases.opening)

        def allowed(_: int, tokens: torch.Tensor) -> list[int]:
            phrases = Phrases()
            for token in tokens[len(prompt) :].tolist():
                phrases.advance(token)
            return phrases.allowed() or [0]

        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = llama.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=400,
                pad_token_id=0,
                eos_token_id=0,
                prefix_allowed_tokens_fn=allowed,
            )
        return bytes(out[0, len(prompt) :].tolist()).rstrip(b"\0").decode()

    return run


def ask(service: Any, messages: Messages, **options: object) -> Any:
    return service.openai.chat.completions.create(model=service.model, messages=messages, **options)


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_phrases_end_and_no_phrase_is_the_beginning_of_another() -> None:
    for slot in ANSWER:
        assert len(set(slot)) == len(slot)
        assert not [pair for pair in itertools.permutations(slot, 2) if pair[0].startswith(pair[1])]
    for choose in (min, max):
        phrases, text = Phrases(), ""
        while allowed := phrases.allowed():
            text += chr(choose(allowed))
            phrases.advance(ord(text[-1]))
        assert text.endswith(".")
        used = [phrase for phrase in set(itertools.chain(*ANSWER)) if phrase in text]
        assert all(text.count(phrase) == 1 for phrase in used)


def test_a_chat_is_readable_cached_and_equal_to_one_process(service, reply) -> None:
    messages = [said("system", "Be brief."), said("user", "Who keeps the lighthouse?")]
    known = 0
    for turn in range(2):
        if turn:
            stream = ask(service, messages, max_tokens=60, stream=True, stream_options={"include_usage": True})
            (*chunks, last) = list(stream)
            assert chunks[0].object == "chat.completion.chunk"
            assert [choice.delta.role for chunk in chunks for choice in chunk.choices][:2] == ["assistant", None]
            text = "".join(choice.delta.content for chunk in chunks for choice in chunk.choices)
            reason, usage = chunks[-1].choices[0].finish_reason, last.usage
        else:
            answer = ask(service, messages)
            assert answer.object == "chat.completion"
            (choice,) = answer.choices
            text, reason, usage = choice.message.content, choice.finish_reason, answer.usage
        # The template's space is a token, too.
        assert (text, reason) == ((reply(messages)[:59], "length") if turn else (reply(messages), "stop"))
        assert usage.sources["l1"] == known
        assert sum(usage.sources.values()) == usage.prompt_tokens
        assert 0 < usage.first_token_s < 60
        known = (usage.total_tokens - 1) // 16 * 16  # The last token has no KV.
        messages += [said("assistant", text), said("user", "Why?")]


def test_chats_that_outgrow_memory_are_resumed_with_equal_text(service, reply) -> None:
    """Prefill chooses the token after a restore without the phrases; it must not appear in the text."""
    conversations = [[said("user", f"{number} times what?")] for number in range(4)]
    before = service.counts().get("retractions", 0)
    with ThreadPoolExecutor(len(conversations)) as pool:
        answers = list(pool.map(lambda messages: ask(service, messages), conversations))
    assert [answer.choices[0].message.content for answer in answers] == [reply(each) for each in conversations]
    assert service.counts()["retractions"] > before
    service.wait_idle()


@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        ([], {}, "must end in a message to answer"),
        ([said("user", "a"), said("assistant", "b")], {}, "must end in a message to answer"),
        ([said("narrator", "a")], {}, "narrator"),
        ([said("user", "a")], {"temperature": 1.0}, "temperature"),
        ([said("user", "a")], {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ([said("user", "a" * 900)], {}, "more than this worker can hold"),
    ],
)
def test_a_chat_that_cannot_be_answered_is_refused_in_words(service, openai, messages, options, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        ask(service, messages, **options)


def test_parts_of_a_message_are_joined_and_the_output_is_bounded(service, reply) -> None:
    whole = [said("user", "one two")]
    parts = [{"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}]
    answer = ask(service, parts, max_completion_tokens=20)  # type: ignore[arg-type]  # Content as parts.
    assert answer.choices[0].message.content == reply(whole)[:19]  # The first token is the template's space.
    assert answer.choices[0].finish_reason == "length"


def test_a_tier_that_is_emptied_hands_over_to_the_next(service) -> None:
    messages = [said("user", "Where does the tide go?")]
    first = ask(service, messages)
    service.wait_idle()
    assert httpx.post(f"{service.url}/flush", json={"tiers": ["l1"]}).json()["dropped"]["l1"] > 0
    again = ask(service, messages)
    assert again.choices[0].message.content == first.choices[0].message.content
    assert (again.usage.sources["l1"], again.usage.sources["l2"]) == (0, (first.usage.prompt_tokens - 1) // 16 * 16)
    refused = httpx.post(f"{service.url}/flush", json={"tiers": ["l9"]})
    assert (refused.status_code, "l9" in refused.text) == (400, True)


def test_the_commands_of_the_readme_are_answered(service) -> None:
    readme = (Path(__file__).resolve().parents[2] / "examples" / "service" / "README.md").read_text()
    calls = re.findall(r"^curl localhost:8000(/\S+) -d '(.*)'$", readme, re.MULTILINE)
    assert [path for path, _ in calls] == ["/v1/chat/completions", "/v1/completions"]
    for path, body in calls:
        answer = httpx.post(service.url + path, content=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert "choices" in answer.text


@needs_browser
def test_the_page_shows_each_answer_with_its_sources_and_first_token_light_and_dark(serving, tmp_path: Path) -> None:
    with serving(tmp_path / "log") as service:
        for is_dark in (False, True):
            with opened_page(service.url, is_dark=is_dark) as page:
                check_page(page, service.url)
            service.wait_idle()
            # The other one begins with the same prompt, of which nothing is cached.
            assert httpx.post(f"{service.url}/flush", json={"tiers": ["l1", "l2"]}).status_code == 200


def check_page(page: Page, url: str) -> None:
    page.wait_for_selector("#random:not([hidden])")
    assert "learned nothing" in page.inner_text("#random")
    check_looks(page)
    for number in range(2):
        page.fill("#prompt", "What is a KV cache?")
        page.press("#prompt", "Enter")
        # The page takes the next message once the stream has ended, which is after the facts.
        whole = ".assistant:not(.live) .facts"
        page.wait_for_function(f"document.querySelectorAll('{whole}').length === {number + 1}")
    (first, second) = page.query_selector_all(".assistant")
    assert len(first.query_selector(".text").inner_text().split()) > 10
    tokens = [
        {
            name: int(answer.query_selector(f"[data-source={name}] b").inner_text().replace(",", ""))
            for name in ("device", "host", "storage", "prefill")
        }
        for answer in (first, second)
    ]
    assert tokens[0]["device"] == 0 < tokens[0]["prefill"]
    assert tokens[1]["device"] > tokens[1]["prefill"]
    assert "ms" in first.query_selector("[data-fact=first-token]").inner_text() or "s" in first.inner_text()
    check_looks(page)
    page.set_viewport_size({"width": PHONE_WIDTH, "height": 800})
    check_looks(page)
    page.goto(f"{url}/status")
    page.wait_for_selector("#pools .bar")
    check_looks(page)
    assert page.is_hidden("th.wide")
