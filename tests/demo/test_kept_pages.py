"""What the synthetic prefill worker keeps of earlier prompts: any mix of prompts, and the books always add up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidekv.backends.keys.chain import pack_tokens
from tidekv.engine.synthetic.kept_pages import HeldPages, KeptPages
from tidekv.engine.synthetic.kv import prompt_digests

SIZE, PAGES = 2, 12
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
STEPS = st.lists(st.tuples(PROMPTS, st.integers(0, 3), st.floats(0, 1)), max_size=40)


@given(STEPS, st.booleans())
def test_pages_are_given_to_one_prompt_at_a_time_and_hold_what_is_said(steps: list[object], keep: bool) -> None:
    kept = KeptPages(PAGES, SIZE, namespace="tenant", keep=keep)
    content: dict[int, bytes] = {}
    held: list[HeldPages] = []

    def end(place: int, share: float) -> None:
        prompt = held.pop(place % len(held))
        kept.give_back(prompt, computed=round(share * len(prompt.pages)))

    for tokens, place, share in steps:  # type: ignore[misc]  # Of the strategy above.
        packed = pack_tokens(tokens)
        prompt = kept.take(packed)
        if prompt is None:
            assert held, "an idle pool has room for every prompt that it can hold"
            end(place, share)
            continue
        every = prompt_digests(packed, SIZE, namespace="tenant")
        assert list(prompt.digests) == every[prompt.known :]
        assert [content[page] for page in prompt.pages[: prompt.known]] == every[: prompt.known]
        assert prompt.known <= (len(tokens) - 1) // SIZE
        assert not (prompt.known and not keep)
        ours = set(prompt.pages[prompt.known :])
        assert len(ours) == len(prompt.pages) - prompt.known
        assert not ours & {page for other in held for page in other.pages}, "a page has two writers"
        # All of it is filled at once; pages beyond `computed` at `give_back` are not kept.
        content.update(zip(prompt.pages[prompt.known :], prompt.digests, strict=True))
        held.append(prompt)
        if len(held) > 1 + place:
            end(place, share)
    while held:
        end(0, 1.0)
    counts = kept.counts()
    assert counts["in_use"] == 0
    assert counts["free"] + counts["kept"] == PAGES
    kept.forget()
    assert kept.counts() == {"free": PAGES, "kept": 0, "in_use": 0}


def test_a_prompt_that_was_served_is_known_but_for_its_last_page() -> None:
    kept = KeptPages(PAGES, SIZE)
    first = kept.take(pack_tokens([1, 2, 3, 4, 5]))
    assert first is not None
    assert (first.known, len(first.pages), len(first.digests)) == (0, 3, 3)
    kept.give_back(first, computed=3)
    again = kept.take(pack_tokens([1, 2, 3, 4]))
    assert again is not None
    assert again.known == 1
    assert again.pages[0] == first.pages[0]
    kept.give_back(again, computed=2)
    assert kept.counts() == {"free": PAGES - 2, "kept": 2, "in_use": 0}
