"""Device pages of a host engine that calls are lent, or read: the check that a page is not used twice.

A page is lent to one restore at a time, and not while an offer reads it. Several offers may read the same page:
requests of the host engine share prefixes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tidekv.states.errors import InvalidRequest
from tidekv.states.types import PageIds, page_ids
from tidekv.states.validation import short

if TYPE_CHECKING:
    from tidekv.engine.decode.values import OfferedPages

Pages = Sequence[int] | npt.NDArray[np.integer]
"""Page numbers of the device pool, in the order of the tokens."""


def checked_pages(pages: Pages, *, pool_pages: int, where: str) -> PageIds:
    """Return page ids. Raises InvalidRequest for anything else than different pages of the pool."""
    try:
        # A numpy array would be taken as bytes.
        ids = page_ids(pages.tolist() if isinstance(pages, np.ndarray) else pages)
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequest(f"{where}: pages must be a sequence of page numbers, not {short(pages)}") from None
    if ids and not 0 <= min(ids) <= max(ids) < pool_pages:
        wrong = next(page for page in ids if not 0 <= page < pool_pages)
        raise InvalidRequest(f"{where}: page {wrong} is not in the device pool, which has pages 0 to {pool_pages - 1}")
    if len(set(ids)) < len(ids):
        twice = next(page for page, count in Counter(ids).items() if count > 1)
        raise InvalidRequest(f"{where}: page {twice} is named twice; each page holds one part of the prompt")
    return ids


class LentPages:
    """The pages in use by live calls of one engine."""

    def __init__(self) -> None:
        self._lent: dict[int, str] = {}
        """By page, the request that it is lent to."""
        self._of: dict[str, PageIds] = {}
        self._read: Counter[int] = Counter()
        """By page, the number of offers that read it."""
        self._offers: dict[int, tuple[asyncio.Future[OfferedPages], PageIds]] = {}

    def lend(self, request_id: str, pages: PageIds) -> None:
        """Note that pages are lent to a request. Raises InvalidRequest, having changed nothing, if one is in use."""
        self._check_not_lent(pages, f"request {request_id!r}")
        if self._read and (read := [page for page in pages if page in self._read]):
            raise InvalidRequest(
                f"request {request_id!r}: page {read[0]} is read by an offer that has not ended; lend it after that"
            )
        self._lent.update(dict.fromkeys(pages, request_id))
        self._of[request_id] = pages

    def release(self, request_id: str) -> None:
        """Note that the pages of a request are the caller's again. Does nothing if it has none."""
        for page in self._of.pop(request_id, ()):
            del self._lent[page]

    def offer(self, offer: int, pages: PageIds) -> asyncio.Future[OfferedPages]:
        """Note that an offer reads pages. Raises InvalidRequest, having changed nothing, if one is lent."""
        self._check_not_lent(pages, "offer")
        done: asyncio.Future[OfferedPages] = asyncio.get_running_loop().create_future()
        self._read.update(pages)
        self._offers[offer] = done, pages
        return done

    def end_offer(self, offer: int) -> asyncio.Future[OfferedPages] | None:
        """Note that an offer has ended; returns its future. None if it has ended before."""
        done, pages = self._offers.pop(offer, (None, page_ids()))
        for page in pages:
            self._read[page] -= 1
            if not self._read[page]:
                del self._read[page]
        return done

    def end_all(self) -> list[asyncio.Future[OfferedPages]]:
        """Forget everything, since the engine ends; returns the futures of offers."""
        left = [done for done, _ in self._offers.values()]
        for kept in (self._lent, self._of, self._read, self._offers):
            kept.clear()
        return left

    def _check_not_lent(self, pages: PageIds, where: str) -> None:
        for page in pages if self._lent else ():
            if page in self._lent:
                raise InvalidRequest(
                    f"{where}: page {page} is lent to request {self._lent[page]!r}; it is yours again when the "
                    "outcome of its restore_into has arrived"
                )
