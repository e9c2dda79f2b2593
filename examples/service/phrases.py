"""Phrases that keep the answers of the random model readable.

The random model has learned nothing. In a chat each of its tokens is therefore chosen by its logits among the bytes
that continue one of a few phrases. Which phrase comes next depends on the whole conversation, by way of its KV; that
the result is English is due to the phrases.
"""

from __future__ import annotations

from collections.abc import Iterator

OPENINGS = (
    "Here is one way to see it: ",
    "That depends on the weather, but ",
    "I asked the harbour, and it seems that ",
    "A good question. As far as I know, ",
    "Let me think. Most days ",
    "People say that ",
    "You may be right. Still, ",
    "In short, ",
)
LINKS = (
    "Meanwhile, ",
    "After that, ",
    "By the evening ",
    "Every now and then ",
    "Sooner or later ",
    "On quiet days ",
    "If you listen closely, ",
    "Without a word, ",
)
SUBJECTS = (
    "the tide ",
    "a patient gardener ",
    "the night train ",
    "my neighbour's cat ",
    "the old lighthouse ",
    "an honest clock ",
    "the first snow ",
    "a paper boat ",
    "the baker ",
    "one small lamp ",
    "every river ",
    "the librarian ",
    "a grey heron ",
    "someone upstairs ",
)
VERBS = (
    "remembers ",
    "borrows ",
    "repairs ",
    "looks after ",
    "waits for ",
    "gives back ",
    "carries ",
    "finds ",
    "counts ",
    "keeps ",
    "draws ",
    "hides ",
)
OBJECTS = (
    "the long way home ",
    "a map of the coast ",
    "the last warm day ",
    "an unfinished letter ",
    "two cups of tea ",
    "what the sea left ",
    "a borrowed umbrella ",
    "the quiet hours ",
    "some old songs ",
    "more light than it needs ",
    "half of the bridge ",
    "nothing in particular ",
)
PLACES = (
    "beside the water. ",
    "in a drawer. ",
    "under the bridge. ",
    "before anyone is awake. ",
    "without being asked. ",
    "for the next visitor. ",
    "at the edge of town. ",
    "until the ferry comes. ",
    "and never says why. ",
    "as if it were easy. ",
)
ENDINGS = (
    "That is all I know.",
    "Ask me again tomorrow.",
    "It has always been so.",
    "You would have liked it.",
    "The rest is up to you.",
    "Nobody seems to mind.",
    "Perhaps that is enough.",
)
SENTENCE = (SUBJECTS, VERBS, OBJECTS, PLACES)
ANSWER = (OPENINGS, *SENTENCE, LINKS, *SENTENCE, ENDINGS)


class Phrases:
    """The bytes that may follow in one answer. No phrase occurs twice in it."""

    opening = ord(" ")
    """First token of each answer. It needs no logits: prefill computed those, and knows nothing of phrases."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._slots: Iterator[tuple[str, ...]] = iter(ANSWER)
        self._length = 0
        self._candidates: list[str] = []
        self._next_slot()

    def allowed(self) -> list[int]:
        """Return the tokens that may come next; an empty list if the answer is complete."""
        return sorted({ord(phrase[self._length]) for phrase in self._candidates})

    def advance(self, token: int) -> None:
        """Take note of the chosen token, one of `allowed`."""
        self._candidates = [phrase for phrase in self._candidates if ord(phrase[self._length]) == token]
        self._length += 1
        (phrase, *others) = self._candidates
        # No phrase of a slot is the beginning of another one, so only a single candidate can be complete.
        if not others and len(phrase) == self._length:
            self._used.add(phrase)
            self._next_slot()

    def _next_slot(self) -> None:
        self._candidates = [phrase for phrase in next(self._slots, ()) if phrase not in self._used]
        self._length = 0
