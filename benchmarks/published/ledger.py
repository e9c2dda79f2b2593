"""Accounts of a modeled run: every byte reported as saved or sent was requested once and served once."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from benchmarks.published.setups import PAGE_TOKENS
from tidekv.states.errors import TidekvError

if TYPE_CHECKING:
    from tidekv.states.commands import ReportReady, SendExtend, SendPromise


class Unbalanced(TidekvError):
    """The reports of a run do not add up, so none of its figures can be used."""


class Ledger:
    """Pages requested from prefill and storage, and the sources that requests report."""

    def __init__(self) -> None:
        self.asked_pages = 0
        """Pages requested from prefill by promises and extends."""
        self.fetched_pages = 0
        """Pages requested from storage by fetches."""
        self.sources: Counter[str] = Counter()
        """Tokens of prompts that became READY, by source."""
        self.prompt_tokens = 0
        self._sent_pages = 0

    def asked(self, command: SendPromise | SendExtend) -> None:
        """Add the pages that a command requests from prefill."""
        self.asked_pages += len(command.pages)

    def ready(self, command: ReportReady, prompt_tokens: int) -> None:
        """Add a prompt that became READY. Raises Unbalanced unless each of its tokens has one source."""
        if sum(command.sources.values()) != prompt_tokens or min(command.sources.values()) < 0:
            raise Unbalanced(f"{command.request_id} reports {command.sources} for a prompt of {prompt_tokens} tokens")
        self.sources.update(command.sources)
        self.prompt_tokens += prompt_tokens
        self._sent_pages += -(-command.sources["transfer"] // PAGE_TOKENS)

    def check(self, *, link_bytes: float, read_bytes: float, page_bytes: float) -> None:
        """Compare with what link and storage have served, once nothing is under way. Raises Unbalanced."""
        link_pages, read_pages = link_bytes / page_bytes, read_bytes / page_bytes
        if abs(link_pages - self.asked_pages) > 0.5:
            raise Unbalanced(
                f"{self.asked_pages} pages were requested from prefill, and the link has served {link_pages:.1f}"
            )
        if self._sent_pages != self.asked_pages:
            raise Unbalanced(
                f"requests report {self._sent_pages} pages from prefill, of which {self.asked_pages} were requested"
            )
        if abs(read_pages - self.fetched_pages) > 0.5:
            raise Unbalanced(f"{self.fetched_pages} pages were requested from storage, which has read {read_pages:.1f}")
        if self.sources["l3"] > self.fetched_pages * PAGE_TOKENS:
            raise Unbalanced(f"{self.sources['l3']} tokens came from storage, of {self.fetched_pages} pages read")
