"""Accounts of a modeled run: every byte that is said to have been saved or sent was asked for once, and served once."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tidekv.engine.published.setups import PAGE_TOKENS
from tidekv.states.errors import TidekvError

if TYPE_CHECKING:
    from tidekv.states.commands import SendExtend, SendPromise, TellReady


class Unbalanced(TidekvError):
    """What a run says of itself does not add up: none of its figures can be used."""


class Ledger:
    """What was asked of prefill and storage, and what requests say that they got."""

    def __init__(self) -> None:
        self.asked_pages = 0
        """Pages that promises and extends have asked prefill for."""
        self.fetched_pages = 0
        """Pages that fetches have asked storage for."""
        self.sources: Counter[str] = Counter()
        """Tokens of prompts that became READY, by where they came from."""
        self.prompt_tokens = 0
        self._sent_pages = 0

    def asked(self, command: SendPromise | SendExtend) -> None:
        """Prefill is asked for pages."""
        self.asked_pages += len(command.pages)

    def ready(self, command: TellReady, prompt_tokens: int) -> None:
        """A prompt is READY. Raises Unbalanced where its tokens do not come from somewhere each."""
        if sum(command.sources.values()) != prompt_tokens or min(command.sources.values()) < 0:
            raise Unbalanced(f"{command.request_id} says {command.sources} of a prompt of {prompt_tokens} tokens")
        self.sources.update(command.sources)
        self.prompt_tokens += prompt_tokens
        self._sent_pages += -(-command.sources["transfer"] // PAGE_TOKENS)

    def check(self, *, link_bytes: float, read_bytes: float, page_bytes: float) -> None:
        """Compare at the end, when nothing is under way, with what link and storage have served. Raises Unbalanced."""
        link_pages, read_pages = link_bytes / page_bytes, read_bytes / page_bytes
        if abs(link_pages - self.asked_pages) > 0.5:
            raise Unbalanced(
                f"{self.asked_pages} pages were asked of prefill, and the link has served {link_pages:.1f}"
            )
        if self._sent_pages != self.asked_pages:
            raise Unbalanced(
                f"requests got {self._sent_pages} pages from prefill, which was asked for {self.asked_pages}"
            )
        if abs(read_pages - self.fetched_pages) > 0.5:
            raise Unbalanced(f"{self.fetched_pages} pages were asked of storage, which has read {read_pages:.1f}")
        if self.sources["l3"] > self.fetched_pages * PAGE_TOKENS:
            raise Unbalanced(f"{self.sources['l3']} tokens came from storage, of {self.fetched_pages} pages read")
