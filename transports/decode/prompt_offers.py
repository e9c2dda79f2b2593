"""Prompts that this worker offers to others before it goes away, until each has its answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tidekv.states.errors import LinkClosed, LocalProtocolError, RemoteProtocolError
from tidekv.transports import wire

if TYPE_CHECKING:
    from tidekv.transports.decode.decode_room import RankLink
    from tidekv.transports.decode.prefill_link import PrefillLink


class PromptOffers:
    """Offers at the links of one receiver. The caller bounds their number and their time."""

    def __init__(self) -> None:
        self._waiting: dict[PrefillLink[RankLink], dict[int, tuple[wire.OfferPrompt, asyncio.Future[wire.PromptTaken]]]]
        self._waiting = {}
        """By link and number, offers without an answer."""

    def offer(self, link: PrefillLink[RankLink], offer: wire.OfferPrompt) -> asyncio.Future[wire.PromptTaken]:
        """Offer a prompt, once the link is open. The future has the answer: a refusal if the link cannot be opened, or
        is lost. After a cancellation the offer may be forgotten.
        """
        answer: asyncio.Future[wire.PromptTaken] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(link, {})[offer.number] = offer, answer
        if link.is_open:
            self._send(link, offer)
        return answer

    def opened(self, link: PrefillLink[RankLink]) -> None:
        """Send the offers that waited for a link."""
        for offer, answer in list(self._waiting.get(link, {}).values()):
            if not answer.done():
                self._send(link, offer)

    def ended(self, link: PrefillLink[RankLink], cause: str) -> None:
        """Refuse the offers of a link that could not be opened, or is lost."""
        for number in list(self._waiting.get(link, ())):
            self._answer(link, wire.PromptTaken(number=number, cause=cause, refuses=True))
        self._waiting.pop(link, None)

    def take(self, link: PrefillLink[RankLink], taken: wire.PromptTaken) -> None:
        """Take an answer. Raises RemoteProtocolError for one that was not asked for."""
        if taken.number not in self._waiting.get(link, ()):
            raise RemoteProtocolError(f"{link.address} has taken prompt {taken.number}, which was not offered")
        self._answer(link, taken)

    def _answer(self, link: PrefillLink[RankLink], taken: wire.PromptTaken) -> None:
        _, answer = self._waiting[link].pop(taken.number)
        if not answer.done():
            answer.set_result(taken)

    def _send(self, link: PrefillLink[RankLink], offer: wire.OfferPrompt) -> None:
        try:
            link.send_or_raise(offer)
        except LocalProtocolError as error:
            # No frame can hold this prompt; the next one may be shorter.
            self._answer(link, wire.PromptTaken(number=offer.number, cause=wire.brief(str(error))))
        except LinkClosed:
            return  # Its end follows, which refuses the offer.
