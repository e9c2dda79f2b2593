"""Names of pages: which pages have one, for the core and for storage, with and without the token behind the page."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidekv.backends.keys.chain import namespace_seed, pack_tokens, page_digests
from tidekv.backends.keys.page_keys import PageKeys

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=24)
SIZES = st.integers(1, 5)


def names_by_hand(tokens: list[int], page_size: int, *, bigrams: bool, kept: int | None = None) -> list[bytes]:
    more = 1 if bigrams else 0
    return [
        pack_tokens(tokens[start : start + page_size + more])
        for start in range(0, len(tokens), page_size)
        if start + page_size + more <= len(tokens) and (kept is None or start + page_size <= kept)
    ]


@given(TOKENS, SIZES, st.booleans(), st.none() | st.integers(0, 24))
def test_keys_are_the_pages_tokens_and_the_next_one(
    tokens: list[int], page_size: int, bigrams: bool, kept: int | None
) -> None:
    keys = PageKeys(page_size, bigrams=bigrams)
    wanted = names_by_hand(tokens, page_size, bigrams=bigrams, kept=kept)
    made = keys.of(pack_tokens(tokens), kept)
    assert made == b"".join(wanted)
    assert keys.count(len(tokens), kept) == len(wanted) == len(made) // keys.key_bytes
    if wanted:
        known = len(wanted) * page_size + (1 if bigrams else 0)
        assert keys.tokens_of(made) == pack_tokens(tokens[:known])


@given(TOKENS, SIZES, st.booleans(), st.data())
def test_storage_keys_of_a_part_are_those_of_the_whole(
    tokens: list[int], page_size: int, bigrams: bool, data: st.DataObject
) -> None:
    keys, packed, seed = PageKeys(page_size, bigrams=bigrams), pack_tokens(tokens), namespace_seed("lora")
    whole = keys.digests(packed, prefix=seed)
    assert whole == page_digests(packed, page_size, namespace="lora", bigrams=bigrams)
    assert len(whole) == keys.count(len(tokens))
    first = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(first, len(whole)))
    prefix = whole[first - 1] if first else seed
    assert keys.digests(packed, first=first, end=end, prefix=prefix) == whole[first:end]


@given(TOKENS, TOKENS, SIZES)
def test_pages_with_another_next_token_have_another_name(ours: list[int], theirs: list[int], page_size: int) -> None:
    """Both kinds of name agree exactly where the tokens up to and with the next one do."""
    keys = PageKeys(page_size, bigrams=True)
    width = keys.key_bytes
    first, second = keys.of(pack_tokens(ours)), keys.of(pack_tokens(theirs))
    digests = [keys.digests(pack_tokens(tokens)) for tokens in (ours, theirs)]
    for page in range(min(len(first), len(second)) // width):
        reach = (page + 1) * page_size + 1
        same = ours[:reach] == theirs[:reach]
        assert (first[: (page + 1) * width] == second[: (page + 1) * width]) == same
        assert (digests[0][page] == digests[1][page]) == same


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_the_last_token_ends_no_page_of_pairs(tokens: int, pages: int) -> None:
    assert PageKeys(4, bigrams=True).count(tokens) == pages
    assert PageKeys(4).count(tokens) == tokens // 4
