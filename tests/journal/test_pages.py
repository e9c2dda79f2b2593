"""Digests in place of page keys: equal for equal pages, and of no use to a reader with only the journal."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidekv.engine.journal import pages as pages_module
from tidekv.engine.journal.pages import DIGEST_BYTES, PageDigests

WIDTH = 4
PROMPTS = st.lists(st.lists(st.sampled_from([b"aaaa", b"bbbb", b"cccc"]), max_size=9), min_size=1, max_size=12)


@given(prompts=PROMPTS, is_secret=st.booleans())
def test_digests_are_equal_just_where_pages_are(prompts: list[list[bytes]], is_secret: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages_module, "IS_SECRET", is_secret)
        patch.setattr(pages_module, "CONVERSATIONS_MAX", 3)
        patch.setattr(pages_module, "REMEMBERED_BYTES_MAX", 100)
        patch.setattr(pages_module, "BLOCK_PAGES", 2)
        digests = PageDigests(WIDTH)
        seen: dict[bytes, bytes] = {}
        for prompt in prompts:
            found = digests.of(b"".join(prompt))
            assert len(found) == DIGEST_BYTES * len(prompt)
            for at, page in enumerate(prompt):
                digest = found[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
                assert seen.setdefault(page, digest) == digest
        assert len(set(seen.values())) == len(seen)


@pytest.mark.parametrize("is_secret", [False, True])
def test_the_tokens_behind_the_last_full_page_have_a_digest_too(
    is_secret: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_module, "IS_SECRET", is_secret)
    digests = PageDigests(WIDTH)
    assert digests.of_rest(b"") == b""
    assert len(digests.of_rest(b"aa")) == DIGEST_BYTES
    assert digests.of_rest(b"aa") == digests.of_rest(b"aa") != digests.of_rest(b"ab")
    assert PageDigests(WIDTH).of_rest(b"aa") == digests.of_rest(b"aa") or not is_secret


def test_pages_that_were_hashed_before_are_not_hashed_again() -> None:
    digests = PageDigests(WIDTH)
    first = digests.of(b"aaaabbbb")
    assert digests.of(b"aaaabbbbccccdddd").startswith(first)
    assert digests.hashed == 4


def test_long_prompts_leave_the_interpreter_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "BLOCK_PAGES", 2)
    breaths: list[None] = []
    PageDigests(WIDTH, lambda: breaths.append(None)).of(b"aaaabbbbccccdddd")
    assert len(breaths) == 2


@pytest.mark.parametrize("seed", ["random", "7"])
def test_digests_of_two_processes_have_nothing_in_common(seed: str) -> None:
    script = "from tidekv.engine.journal.pages import PageDigests; print(PageDigests(4).of(b'aaaabbbb').hex())"
    found = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for _ in range(2)
    ]
    assert len(found[0]) == len(found[1]) == 2 * 2 * DIGEST_BYTES
    assert not {found[0][:16], found[0][16:]} & {found[1][:16], found[1][16:]}
