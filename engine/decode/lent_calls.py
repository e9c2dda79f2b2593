"""Calls of a host engine that lends device pages: their checks, offers, and the wait for the pages' return."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.backends.keys.chain import TOKEN_BYTES
from tidekv.engine.decode.lent_pages import checked_components, checked_pages
from tidekv.engine.decode.values import RestoredPages
from tidekv.states import events
from tidekv.states.errors import InvalidRequest
from tidekv.states.types import FULL
from tidekv.states.validation import Count, checked
from tidekv.transports.blocking import settled

if TYPE_CHECKING:
    import asyncio

    from tidekv.engine.decode.arrivals import Arrivals
    from tidekv.engine.decode.lent_pages import LentComponents, Pages
    from tidekv.engine.decode.runtime import Runtime
    from tidekv.engine.decode.values import DecodeRequest, OfferedPages, ReadyRequest
    from tidekv.states.types import PageIds


class LentCalls:
    """`restore_into` and `offer` of one engine."""

    def __init__(self, runtime: Runtime, arrivals: Arrivals) -> None:
        self._runtime = runtime
        self._arrivals = arrivals

    def check(
        self,
        request: DecodeRequest,
        packed: bytes,
        pages: Pages,
        have_tokens: int,
        component_pages: LentComponents | None,
    ) -> tuple[dict[str, PageIds], int]:
        """Return the pages of a prompt by group, and how many positions hold it already. Raises InvalidRequest."""
        tokens, where = len(packed) // TOKEN_BYTES, f"request {request.request_id!r}"
        if request.early:
            raise InvalidRequest(
                f"{where}: restore_into takes no early=True: a step of a batch would wait for the layers of one request"
            )
        self._arrivals.check_reachable(request, packed)
        settings = self._runtime.core.settings
        lent = checked_pages(pages, pool_pages=settings.device_pages, where=where)
        needed = settings.pages_of(tokens)
        if len(lent) != needed:
            raise InvalidRequest(
                f"{where}: its prompt of {tokens} tokens needs {needed} pages of {settings.page_size} tokens, "
                f"not {len(lent)}"
            )
        checked(have_tokens, Count, "have_tokens")
        if have_tokens > tokens:
            raise InvalidRequest(f"{where}: have_tokens must be at most its {tokens} tokens, not {have_tokens}")
        ends = {each.name: needed - each.needed_from(tokens, settings.page_size) for each in settings.components}
        components = checked_components(component_pages, settings.components, ends, all_of=True, where=where)
        return {FULL: lent, **components}, have_tokens // settings.page_size

    async def settled(
        self, request_id: str, request_number: int, outcome: asyncio.Future[ReadyRequest | RestoredPages]
    ) -> RestoredPages:
        """Wait for the outcome. A cancellation aborts the request, and is raised when the pages are back."""
        restored = await settled(outcome, on_cancel=lambda: self._arrivals.cancel(request_id, request_number))
        assert isinstance(restored, RestoredPages), "a request in lent pages ends with them"
        return restored

    def offer(
        self,
        packed: bytes,
        pages: Pages,
        start_token: int,
        namespace: str,
        component_pages: LentComponents | None = None,
        *,
        hold_s: float,
    ) -> asyncio.Future[OfferedPages]:
        """Post an offer; returns the future of its end. Raises InvalidRequest, having changed nothing."""
        runtime, settings = self._runtime, self._runtime.core.settings
        checked(start_token, Count, "start_token")
        page_size, count = settings.page_size, len(packed) // TOKEN_BYTES
        offered = checked_pages(pages, pool_pages=settings.device_pages, where="offer")
        if start_token % page_size or start_token > count:
            raise InvalidRequest(
                f"offer: start_token must be a multiple of {page_size}, at most the {count} tokens, not {start_token}"
            )
        first, keys = start_token // page_size, runtime.prompt_keys.page_keys.of(packed)
        # With keys of pairs the last full page may have no key yet.
        full = max(len(keys) // settings.key_bytes - first, 0)
        if not full <= len(offered) <= settings.pages_of(count) - first:
            raise InvalidRequest(
                f"offer: tokens [{start_token}, {count}) fill {full} pages of {page_size} tokens; {len(offered)} pages "
                "were given"
            )
        offered, number, end = offered[:full], self._arrivals.next_number(), first + full
        ends = {each.name: min(each.trailing_pages(page_size), end) for each in settings.components}
        components = checked_components(component_pages, settings.components, ends, all_of=False, where="offer")
        event = events.PagesOffered(
            at_s=runtime.front.clock(),
            offer=number,
            keys=keys,
            pages=tuple(offered),
            namespace=namespace,
            offered_components={name: tuple(ids) for name, ids in components.items() if ids},
            hold_s=hold_s,
        )
        done = runtime.calls.expect_offer(number, {FULL: offered, **components})
        try:
            runtime.front.post(event)
        except BaseException:
            runtime.calls.unexpect_offer(number)
            raise
        return done
