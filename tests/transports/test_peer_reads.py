"""Offers of prompts to other decode workers: answers that were not asked for, and what is left of a link."""

from __future__ import annotations

import pytest

from tidekv.states.errors import RemoteProtocolError
from tidekv.transports import wire
from tidekv.transports.decode.prompt_offers import PromptOffers


class Link:
    """A link that keeps what is sent on it."""

    address = "other:7100"
    is_open = True

    def __init__(self) -> None:
        self.sent: list[wire.OfferPrompt] = []

    def send_or_raise(self, message: wire.OfferPrompt) -> None:
        self.sent.append(message)


def offer(number: int) -> wire.OfferPrompt:
    return wire.OfferPrompt(number=number, namespace="", tokens=b"\0" * 4, heat=(0, 0, 0, 0), within_s=1.0)


async def test_an_answer_that_was_not_asked_for_breaks_the_link_and_changes_nothing() -> None:
    offers, link = PromptOffers(), Link()
    answer = offers.offer(link, offer(1))  # type: ignore[arg-type]  # The part of a link that it uses.
    for number in (0, 2):
        with pytest.raises(RemoteProtocolError, match=f"taken prompt {number}, which was not offered"):
            offers.take(link, wire.PromptTaken(number=number))  # type: ignore[arg-type]  # As above.
    offers.take(link, wire.PromptTaken(number=1, there=3))  # type: ignore[arg-type]  # As above.
    assert (await answer).there == 3
    with pytest.raises(RemoteProtocolError):
        offers.take(link, wire.PromptTaken(number=1))  # type: ignore[arg-type]  # As above.


async def test_nothing_is_kept_of_a_link_that_has_ended() -> None:
    offers, link = PromptOffers(), Link()
    answers = [offers.offer(link, offer(number)) for number in (1, 2)]  # type: ignore[arg-type]  # As above.
    answers[0].cancel()
    offers.ended(link, "lost")  # type: ignore[arg-type]  # As above.
    assert (await answers[1]).refuses and (await answers[1]).cause == "lost"
    assert offers._waiting == {}
