"""Reads of a prompt's prefix from the decode worker that asks for the prompt, into pages of prefill.

A decode worker that opens a room has a part of the prompt: of a conversation all that it has answered, with output that
prefill never had. An engine in prefill's own device pages, without a prefill of its own, restores that part
(`DecodeEngine.restore_into`): from its host memory, from storage, and from the decode worker as a peer. So a read has
the checks, deadlines, quarantine, journal and metrics of every restore, and pages of prefill are written only by copies
from host memory, never by another process.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING

from tidekv.engine.decode.decode_engine import DecodeEngine
from tidekv.engine.decode.values import DecodeRequest
from tidekv.engine.log import engine_log
from tidekv.states.errors import CapacityError, EngineClosed, InvalidConfig, InvalidRequest, RequestFailed
from tidekv.states.validation import short
from tidekv.transports.wire import NAME_CHARACTERS_MAX

if TYPE_CHECKING:
    from tidekv.engine.decode.lent_pages import Pages
    from tidekv.engine.decode.values import RestoredPages
    from tidekv.engine.prefill.prefill_config import PrefillConfig
    from tidekv.transports.prefill.prefill_room import Room

LOG = engine_log("tidekv.engine")
COUNTS = ("prefix_reads", "prefix_reads_failed", "prefix_tokens_wanted", "prefix_tokens_read")
"""Names of the counts, so that statistics have all of them from the start."""


class PrefixReader:
    """The reads of one prefill peer. Every method runs on its loop."""

    def __init__(self, engine: DecodeEngine, config: PrefillConfig, device: object) -> None:
        """Raises InvalidConfig for an engine that cannot read into the pages of this peer."""
        if not isinstance(engine, DecodeEngine):
            raise InvalidConfig(f"reader must be a DecodeEngine, not {short(engine)}")
        theirs = engine.config
        for is_wrong, why in (
            (theirs.device != "lent", f'needs EngineConfig(device="lent"), not {theirs.device!r}'),
            (not theirs.cache_peers.enabled, "needs EngineConfig(cache_peers=CachePeerOptions(enabled=True))"),
            (theirs.model != config.model, f"has the model {theirs.model!r}, and the peer {config.model!r}"),
            (theirs.bigram_keys != config.bigram_keys, f"has bigram_keys={theirs.bigram_keys}, unlike the peer"),
            (engine.device is not device, "has another device pool than the peer"),
            (config.place.ranks > 1, f"is not possible on one of {config.place.ranks} ranks: each would have to read"),
        ):
            if is_wrong:
                raise InvalidConfig(f"reader {why}")
        self.engine = engine
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self._numbers = itertools.count()
        self._live: set[str] = set()

    async def read(
        self, room: Room, pages: Pages, have_tokens: int, *, tokens: bytes | None, namespace: str | None
    ) -> int:
        """See `PrefillPeer.read_prefix`."""
        packed = room.tokens if tokens is None else tokens
        if packed is None:
            raise InvalidRequest(
                f"the promise of request {room.request_id!r} brought no tokens: give those of the prompt"
            )
        size = self.engine.layout.page_size
        # The page of the last token is computed in any case: its computation gives the first token of the answer.
        end = min(room.decode_prefix_len, room.prompt_tokens - 1, len(pages) * size) // size * size
        has_names = namespace is not None or room._key_seed is not None
        is_possible = self.engine.is_running and room.peer_addresses and has_names and not room.aborted.is_set()
        if end <= have_tokens or not is_possible:
            return have_tokens
        self.counts["prefix_reads"] += 1
        self.counts["prefix_tokens_wanted"] += end - have_tokens
        request = DecodeRequest(
            request_id=self._name_of(room.request_id),
            tokens=packed[: 4 * end],
            # With pairs of tokens it names the last page.
            next_token=int.from_bytes(packed[4 * end : 4 * end + 4], "little"),
            prefill=(),
            peers=room.peer_addresses,
            namespace=namespace or "",
            key_seed=room._key_seed if namespace is None else None,
        )
        cause, read = "", have_tokens
        self._live.add(request.request_id)
        try:
            restored = await self._restore(request, pages[: end // size], have_tokens)
            read = max(read, restored.restored_tokens)
            cause = "" if restored.is_complete else f"{restored.cause}: {restored.detail}"
        except (RequestFailed, CapacityError) as error:
            if isinstance(error, RequestFailed) and error.cause == "engine closed":
                raise EngineClosed("the reader has closed: pages may be written to until the peer is left") from error
            cause = str(error)
        finally:
            self._live.discard(request.request_id)
        self.counts["prefix_tokens_read"] += read - have_tokens
        self.counts["prefix_reads_failed"] += bool(cause)
        LOG.info(
            "a prefix was read from decode",
            request_id=room.request_id,
            peer=request.peers[0],
            read_as=request.request_id,
            tokens=read - have_tokens,
            wanted=end - have_tokens,
            cause=cause or None,
        )
        return read

    def _name_of(self, request_id: str) -> str:
        """Return the id of a room for its read; another one if several decode workers have rooms of that id."""
        if request_id not in self._live:
            return request_id
        return f"{next(self._numbers)}:{request_id}"[:NAME_CHARACTERS_MAX]

    async def _restore(self, request: DecodeRequest, pages: Pages, have_tokens: int) -> RestoredPages:
        """Restore what tiers and the decode worker have; an address that may not be dialled is left out."""
        try:
            for address in request.peers:
                self.engine._runtime.transport.check_address(address)
        except InvalidRequest as error:
            raise RequestFailed(request.request_id, "decode may not be dialled", str(error)) from None
        return await self.engine.restore_into(request, pages, have_tokens)
