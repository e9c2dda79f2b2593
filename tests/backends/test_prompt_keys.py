"""Remembered keys equal keys that are hashed again, in whatever order they are needed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import tracemalloc
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidekv.backends.keys import page_keys, prompt_keys
from tidekv.backends.keys.chain import namespace_seed, pack_tokens, page_digests
from tidekv.backends.keys.page_keys import PageKeys
from tidekv.backends.keys.prompt_keys import PromptKeys

PAGES = PageKeys(2)
# Few different tokens, so that prompts share prefixes, and odd lengths, so that some end within a page.
PROMPTS = st.lists(st.sampled_from((1, 2)), min_size=1, max_size=15)


@contextlib.contextmanager
def traced_memory() -> Iterator[Callable[[], int]]:
    """Measure the bytes that are allocated within the block and not freed."""
    gc.collect()
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@given(st.lists(st.tuples(PROMPTS, st.sampled_from(("", "tenant"))), max_size=30), st.booleans())
async def test_remembered_keys_are_those_that_hashing_gives(asked: list[tuple[list[int], str]], bigrams: bool) -> None:
    keys = PageKeys(2, bigrams=bigrams)
    owner = PromptKeys(keys)
    for tokens, namespace in asked:
        prompt, seed = pack_tokens(tokens), namespace_seed(namespace)
        plain = keys.digests(prompt, prefix=seed)
        assert plain[: len(owner.known(seed, prompt))] == owner.known(seed, prompt)
        assert await owner.prompt(prompt, seed).digests(0, keys.count(len(tokens))) == plain
        assert owner.known(seed, prompt) == plain


@given(PROMPTS, st.sampled_from((1, 2)), st.booleans())
async def test_a_token_behind_a_prompt_names_a_last_page_that_it_fills(
    tokens: list[int], behind: int, bigrams: bool
) -> None:
    keys, known = PageKeys(2, bigrams=bigrams), pack_tokens([*tokens, behind])
    prompt = PromptKeys(keys).prompt(pack_tokens(tokens), b"", pack_tokens([behind]))
    full = len(tokens) // 2
    assert await prompt.digests(0, full) == page_digests(known, 2, bigrams=bigrams)[:full]
    prompt.extend(known)
    assert prompt.behind == b"", "it is the prompt's"


async def test_a_turn_hashes_only_its_new_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counted(fresh: bytes, page_size: int, *, prefix: bytes, bigrams: bool) -> list[bytes]:
        hashed.append(len(fresh) // PAGES.key_bytes)
        return page_digests(fresh, page_size, prefix=prefix, bigrams=bigrams)

    monkeypatch.setattr(page_keys, "page_digests", counted)
    owner = PromptKeys(PAGES)
    first, second = pack_tokens([1, 2, 3, 4, 5, 6]), pack_tokens([1, 2, 3, 4, 5, 6, 7, 8, 9])
    other = pack_tokens([1, 2, 3, 4, 9, 9])
    turns = owner.prompt(first, b"")
    assert await turns.digests(0, 3) == page_digests(first, 2)
    turns.extend(second)
    assert (await turns.digests(3, 1))[0] == page_digests(second, 2)[3]
    assert await owner.prompt(second, b"").digests(0, 4) == page_digests(second, 2)
    assert await owner.prompt(other, b"").digests(0, 3) == page_digests(other, 2)
    assert hashed == [3, 1, 1]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_keys, "REMEMBERED_BYTES_MAX", 3000)
    owner = PromptKeys(PAGES)
    for number in range(100):
        prompt = pack_tokens([number // 20, 0, number, 0])
        owner.remember(b"", prompt, page_digests(prompt, 2))
        assert len(owner) <= 8
        assert owner.known(b"", prompt) == page_digests(prompt, 2)
    assert owner.known(b"", pack_tokens([0, 0, 0, 0])) == []
    assert owner.memory_bytes <= 3000


@pytest.mark.parametrize("pages", [1, 2, 10, 100])
@pytest.mark.parametrize("distinct_first_pages", [True, False])
def test_what_is_remembered_is_counted_with_what_its_objects_cost(pages: int, distinct_first_pages: bool) -> None:
    owner = PromptKeys(PageKeys(16))
    with traced_memory() as taken_bytes:
        for number in range(4000 // pages):
            first = (number if distinct_first_pages else number // 4).to_bytes(8, "little") + bytes(56)
            rest = number.to_bytes(8, "little") * (8 * (pages - 1))
            owner.remember(b"", first + rest, [bytes(32 - 8) + at.to_bytes(8, "little") for at in range(pages)])
        actual_bytes = taken_bytes()
    assert actual_bytes <= owner.memory_bytes <= 2 * actual_bytes


async def test_many_pages_are_hashed_in_a_thread_and_few_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []

    def noted(fresh: bytes, page_size: int, *, prefix: bytes, bigrams: bool) -> list[bytes]:
        threads.append(threading.current_thread() is threading.main_thread())
        return page_digests(fresh, page_size, prefix=prefix, bigrams=bigrams)

    monkeypatch.setattr(page_keys, "page_digests", noted)
    monkeypatch.setattr(prompt_keys, "HASH_INLINE_BYTES", 2 * PAGES.key_bytes)
    tokens = pack_tokens(list(range(14)))
    prompt = PromptKeys(PAGES).prompt(tokens, b"")
    assert await prompt.digests(0, 2) == page_digests(tokens, 2)[:2]
    assert await prompt.digests(4, 3) == page_digests(tokens, 2)[4:]
    assert threads == [True, False]


async def test_two_calls_that_hash_the_same_pages_at_once_give_the_same_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_keys, "HASH_INLINE_BYTES", 0)
    tokens = pack_tokens(list(range(14)))
    prompt = PromptKeys(PAGES).prompt(tokens, b"")
    assert await asyncio.gather(prompt.digests(0, 7), prompt.digests(0, 7)) == [page_digests(tokens, 2)] * 2
