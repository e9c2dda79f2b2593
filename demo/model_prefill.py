"""Prefill worker with the small real model: computes prompts in chunks and sends each chunk when it is computed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import numpy as np

from demo.compute import ComputeThread
from demo.model import PagedModel, TokenChoice, greedy
from demo.prefix_pages import PrefixPages, PromptPages
from tidekv.states.errors import EngineClosed, InvalidRequest
from tidekv.transports.prefill.prefill_room import Room


class ModelPrefill:
    """Serves rooms whose promise included the tokens: `PrefillPeer(on_room=ModelPrefill(…).serve)`.

    Known beginnings of a prompt are sent without computing them again, and with `read_prefix` what decode has is read.
    A prompt without free pages waits for some.
    """

    def __init__(self, model: PagedModel, pages: PrefixPages, compute: ComputeThread, *, chunk_tokens: int) -> None:
        if chunk_tokens < 1 or chunk_tokens % model.page_size:
            raise InvalidRequest(f"chunk_tokens must be a multiple of the page size, {model.page_size}: {chunk_tokens}")
        self._model = model
        self._pages = pages
        self._compute = compute
        self._chunk_tokens = chunk_tokens
        self.freed = asyncio.Condition()
        """Notified when pages are free again."""
        self.read_prefix: Callable[[Room, Sequence[int], int], Awaitable[int]] | None = None
        """`PrefillPeer.read_prefix`, if the peer has a reader."""
        self.tokens_computed = 0

    async def serve(self, room: Room) -> None:
        """Serve one room from its promise to its end.

        Raises InvalidRequest if the promise included no usable tokens.
        """
        if not room.tokens:
            raise InvalidRequest("this prefill receives no tokens: send the request with send_prompt=True")
        packed = bytes(room.tokens)
        async with self.freed:
            while (held := self._pages.take(packed)) is None:
                await self.freed.wait()
        computed, is_free = 0, True
        try:
            computed = await self._send_all(room, np.frombuffer(packed, dtype="<u4").tolist(), held)
        except BaseException as error:
            # The reader has broken down: it may still write to these pages, so they are not used again.
            is_free = not isinstance(error, EngineClosed)
            # On cancellation, too: otherwise the room would never end, and `received` below would wait for it.
            room.fail(f"prefill gave up: {type(error).__name__}: {error}")
            raise
        finally:
            # The last write out of these pages has ended only now.
            await room.received()
            if is_free:
                async with self.freed:
                    self._pages.give_back(held, computed=computed)
                    self.freed.notify_all()

    async def _send_all(self, room: Room, tokens: list[int], held: PromptPages) -> int:
        """Send known pages and those that decode has, compute and send the rest, and finish; returns the number of
        pages that are in place.
        """
        page_size = self._model.page_size
        known = held.known * page_size
        position = known if self.read_prefix is None else await self.read_prefix(room, held.pages, known)
        await room.send(held.pages[: position // page_size], start_token=0, end_token=position)
        cached = {"l1": known, "peer": position - known}
        choice = None
        while position < len(tokens) and not room.aborted.is_set():
            chunk = tokens[position : position + self._chunk_tokens]
            choice = await self._compute.run(partial(self._compute_chunk, chunk, position, held.pages))
            end = position + len(chunk)
            pages = held.pages[position // page_size : -(-end // page_size)]
            await room.send(pages, start_token=position, end_token=end)
            position = end
        if choice is not None and position == len(tokens):
            await room.finish(first_token=choice.token, aux={"margin": choice.margin}, cached=cached)
        return position // page_size

    def _compute_chunk(self, tokens: list[int], start: int, pages: Sequence[int]) -> TokenChoice:
        self.tokens_computed += len(tokens)
        return greedy(self._model.prefill_chunk(tokens, start, pages))
