"""Device pages of a host engine that calls are lent, or read: the check that a page is not used twice.

A page is lent to one restore at a time, and not while an offer reads it. Several offers may read the same page:
requests of the host engine share prefixes. Each group (the full KV, each component) has page numbers of its own.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tidekv.states.errors import InvalidRequest
from tidekv.states.types import FULL, PageIds, page_ids
from tidekv.states.validation import short

if TYPE_CHECKING:
    from tidekv.engine.decode.values import OfferedPages
    from tidekv.states.component_specs import Component

Pages = Sequence[int] | npt.NDArray[np.integer]
"""Page numbers of the device pool, in the order of the tokens."""
LentComponents = Mapping[str, Pages]
"""Page numbers of the device pools of components, by name: the pages that the end of a prompt needs, in order."""


PagesByGroup = Mapping[str, PageIds]
"""Page numbers by group: `FULL`, and components by name."""


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


def copied_components(component_pages: object, pool_pages: Mapping[str, int], *, where: str) -> dict[str, PageIds]:
    """Return page ids by component. Raises InvalidRequest for a component that is not in `pool_pages`, the sizes of
    their device pools, and as `checked_pages` does.
    """
    given = {} if component_pages is None else component_pages
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"{where}: component_pages must be a mapping of component to pages, not {short(given)}")
    copied = {}
    for name, pages in given.items():
        if name not in pool_pages:
            known = ", ".join(pool_pages) or "none"
            raise InvalidRequest(f"{where}: there is no component {short(name)}; there are {known}")
        copied[name] = checked_pages(pages, pool_pages=pool_pages[name], where=f"{where}, component {name!r}")
    return copied


def checked_components(
    component_pages: object, components: Sequence[Component], needed: Mapping[str, int], *, all_of: bool, where: str
) -> dict[str, PageIds]:
    """Return page ids by component, in the order of `components`. Raises InvalidRequest as `copied_components`, and for
    another number of pages than `needed`, or without `all_of` for more. With it, every component must be there.
    """
    sizes = {component.name: component.device_pages for component in components}
    given = copied_components(component_pages, sizes, where=where)
    for name in sizes:
        if name not in given and all_of:
            raise InvalidRequest(f"{where}: component_pages lacks component {name!r}, {needed[name]} pages")
        if name in given and not (needed[name] if all_of else 0) <= len(given[name]) <= needed[name]:
            raise InvalidRequest(
                f"{where}, component {name!r}: the end needs {needed[name]} pages, not {len(given[name])}"
            )
    return {name: given[name] for name in sizes if name in given}


class LentPages:
    """Device pages of a host engine that calls of one engine use: lent to a request, or read by offers, by group.

    A page is lent to one request only, and not while an offer reads it.
    """

    def __init__(self) -> None:
        self._lent: dict[str, dict[int, str]] = {}
        """By group and page, the request that it is lent to."""
        self._of: dict[str, PagesByGroup] = {}
        self._read: dict[str, Counter[int]] = {}
        """By group and page, the number of offers that read it."""
        self._offers: dict[int, tuple[asyncio.Future[OfferedPages], PagesByGroup]] = {}

    def lend(self, request_id: str, pages: PagesByGroup) -> None:
        """Note that pages are lent to a request. Raises InvalidRequest, having changed nothing, if one is in use."""
        self._check_not_lent(pages, f"request {request_id!r}")
        for group, ids in pages.items():
            read = self._read.get(group)
            if read and (used := [page for page in ids if page in read]):
                raise InvalidRequest(
                    f"request {request_id!r}: {_name(used[0], group)} is read by an offer that has not ended; lend it "
                    "after that"
                )
        for group, ids in pages.items():
            self._lent.setdefault(group, {}).update(dict.fromkeys(ids, request_id))
        self._of[request_id] = pages

    def release(self, request_id: str) -> None:
        """Note that the pages of a request are the caller's again. Does nothing if it has none."""
        for group, ids in self._of.pop(request_id, {}).items():
            for page in ids:
                del self._lent[group][page]

    def offer(self, offer: int, pages: PagesByGroup) -> asyncio.Future[OfferedPages]:
        """Note that an offer reads pages. Raises InvalidRequest, having changed nothing, if one is lent."""
        self._check_not_lent(pages, "offer")
        done: asyncio.Future[OfferedPages] = asyncio.get_running_loop().create_future()
        for group, ids in pages.items():
            self._read.setdefault(group, Counter()).update(ids)
        self._offers[offer] = done, pages
        return done

    def end_offer(self, offer: int) -> asyncio.Future[OfferedPages] | None:
        """Note that an offer has ended; returns its future. None if it has ended before."""
        done, pages = self._offers.pop(offer, (None, {}))
        for group, ids in pages.items():
            read = self._read[group]
            for page in ids:
                read[page] -= 1
                if not read[page]:
                    del read[page]
        return done

    def end_all(self) -> list[asyncio.Future[OfferedPages]]:
        """Forget everything, since the engine ends; returns the futures of offers."""
        left = [done for done, _ in self._offers.values()]
        for kept in (self._lent, self._of, self._read, self._offers):
            kept.clear()
        return left

    def _check_not_lent(self, pages: PagesByGroup, where: str) -> None:
        for group, ids in pages.items():
            lent = self._lent.get(group)
            for page in ids if lent else ():
                if lent and page in lent:
                    raise InvalidRequest(
                        f"{where}: {_name(page, group)} is lent to request {lent[page]!r}; it is yours again when the "
                        "outcome of its restore_into has arrived"
                    )


def _name(page: int, group: str) -> str:
    return f"page {page}" if group == FULL else f"page {page} of component {group!r}"
