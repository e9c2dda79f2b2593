"""The prefill end of a rank: a `PrefillThread` beside SGLang's scheduler, which sends computed pages in place.

create_sender ──▶ open                          the prompt is computed before or after decode asks for it
              ──▶ read                          before that, what decode has of it, if it is to be read
send          ──▶ pages of a chunk              what decode does not need is remembered, and sent if it asks later
poll          ◀── state of the hand-over        pages are held until decode has them
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from tidekv.backends.host.pool import HostPool
from tidekv.engine.decode.decode_engine import DecodeEngine
from tidekv.engine.integrations.sglang.handover.decode_end import REST_S
from tidekv.engine.integrations.sglang.handover.pools import Pools
from tidekv.engine.integrations.sglang.handover.prefix_reads import PrefixPlace, PrefixReads, Reading
from tidekv.engine.integrations.sglang.handover.settings import BackendSettings
from tidekv.engine.integrations.step_pacing import StepPacing
from tidekv.engine.log import engine_log
from tidekv.engine.prefill.prefill_config import PrefillConfig
from tidekv.engine.prefill.prefill_peer import PrefillPeer
from tidekv.engine.thread.prefill_thread import HandedOver, PrefillThread
from tidekv.engine.thread.server_streams import ServerStreams
from tidekv.states.errors import EngineClosed, TidekvError
from tidekv.states.handover.prompt_digest import PromptDigest
from tidekv.states.handover.rank_place import SOLE, RankPlace
from tidekv.transports.prefill.prefill_room import RoomOutcome

LOG = engine_log("tidekv.sglang")
SHARE_AGE_S: Final = 0.005
"""Seconds for which the number of unclaimed pages is taken as current."""


@dataclass(slots=True, eq=False)
class Sending:
    """One prompt that is handed over."""

    name: str
    prompt: PromptDigest
    packed: bytes = field(repr=False)
    """Its tokens, by which storage names its pages."""
    pages: int = 0
    """Pages handed over so far."""
    is_sent: bool = False
    """All pages and the first token were handed over."""
    may_compute: bool = False
    reading: Reading | None = None
    """Its prefix, which is read from decode."""
    ended: HandedOver | None = None
    cause: str = ""
    """Why it failed on this side."""

    @property
    def failure(self) -> str:
        """Why it failed; empty if it has not."""
        if self.cause:
            return self.cause
        if self.ended is None or self.ended.outcome is RoomOutcome.RECEIVED:
            return ""
        return self.ended.cause or "decode has not asked for it"

    @property
    def is_received(self) -> bool:
        """Whether decode has everything."""
        return not self.cause and self.ended is not None and self.ended.outcome is RoomOutcome.RECEIVED

    @property
    def bytes_sent(self) -> int:
        """Bytes of pages sent, once it has ended."""
        return 0 if self.ended is None else self.ended.bytes_sent


class PrefillEnd:
    """Hands SGLang's pages to decode workers. One for each rank."""

    def __init__(
        self,
        pools: Pools,
        settings: BackendSettings,
        *,
        listen: str,
        model: str,
        place: RankPlace = SOLE,
        server: ServerStreams | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start, and listen. `place`: this rank among those of the server. `server`: SGLang's streams, if its KV is in
        GPU memory.

        Raises what `PrefillPeer` raises as it is entered.
        """
        peer = PrefillPeer(
            PrefillConfig(listen=listen, model=model, lease_s=settings.lease_s, place=place),
            device=pools.full,
            components=pools.components,
            transport=settings.prefill_transport(f"sglang-prefill-{place.rank}"),
            storage=settings.open_storage(),
        )
        self._thread = PrefillThread(peer, promise_timeout_s=settings.promise_timeout_s, server=server)
        self._host: HostPool | None = None
        """What is read passes through it."""
        self._reads: PrefixReads | None = None
        if settings.engine.cache_peers.enabled:
            config = msgspec.structs.replace(settings.engine_of(place.rank, place.ranks), model=model, device="lent")
            layout = pools.full.layout
            self._host = HostPool.allocate(layout, max(1, settings.host_bytes // layout.page_bytes))
            transport = settings.decode_transport(f"sglang-prefill-{place.rank}-reads", config.cache_peers)
            storage = settings.open_storage()
            peer.read_with(
                DecodeEngine(config, device=pools.full, host=self._host, storage=storage, transport=transport)
            )
            self._reads = PrefixReads(self._thread, config, clock)
        self._page_size = pools.full.layout.page_size
        self._unclaimed_max = int(settings.unclaimed_share * pools.full.num_pages)
        self._clock = clock
        self._names = 0
        self._live: dict[str, Sending] = {}
        self._unclaimed: frozenset[str] = frozenset()
        self._unclaimed_pages = 0
        self._counted_at_s = 0.0
        self._pacing = StepPacing()
        self._thread.start()

    @property
    def address(self) -> str:
        """The address that decode workers connect to."""
        return self._thread.address

    def open(self, room: int, prompt: PromptDigest, packed: bytes, place: PrefixPlace | None = None) -> Sending:
        """Begin a hand-over. One that cannot begin has failed on return. `place`: where the prompt's prefix goes, if it
        is to be read from decode.
        """
        self._names += 1
        sending = Sending(f"{room}#{self._names}", prompt, packed)
        try:
            self._thread.open(sending.name, prompt, room=str(room))
        except TidekvError as error:
            sending.cause = str(error)
        else:
            self._live[sending.name] = sending
            if self._reads is not None and place is not None:
                sending.reading = self._reads.begin(sending.name, packed, place)
        return sending

    def send(self, sending: Sending, pages: Sequence[int], *, is_last: bool) -> None:
        """Hand over the next pages of a prompt. Does nothing if it has failed.

        In GPU memory they are read once the streams of SGLang have reached this call, which does not wait for that.
        """
        start = sending.pages * self._page_size
        sending.pages += len(pages)
        if sending.failure:
            return
        end = sending.prompt.prompt_tokens if is_last else None
        self._do(sending, lambda: self._thread.send(sending.name, list(pages), start_token=start, end_token=end))

    def finish(
        self,
        sending: Sending,
        *,
        first_token: int,
        row: bytes,
        namespace: str,
        component_pages: Mapping[str, Sequence[int]],
    ) -> None:
        """Hand over what goes with the first token, and the pages of components at the prompt's end; all others were.

        `namespace`: that of its pages in storage.
        """
        sending.is_sent = True
        if sending.failure:
            return

        def finish() -> None:
            for component, pages in component_pages.items():
                self._thread.send_component_pages(sending.name, component, pages)
            self._thread.finish(
                sending.name,
                first_token=first_token,
                aux={"row": row},
                tokens=sending.packed,
                namespace=namespace,
            )

        self._do(sending, finish)

    def poll(self, sending: Sending) -> None:
        """Take what has ended, for all hand-overs, and whether this one may be computed."""
        self._pacing.after_step(is_empty=False, is_transferring=bool(self._live))
        if self._live:
            self._take()
        if not sending.may_compute:
            sending.may_compute = self._has_read(sending) and self._may_compute(sending)

    def rest(self) -> None:
        """Wait for the end of a hand-over, at most REST_S: SGLang has nothing to compute meanwhile."""
        self._take(REST_S)

    def stop(self, sending: Sending, cause: str) -> None:
        """End a hand-over whose pages are about to change. Waits for one turn of the peer's loop, and for a copy into
        what is read. Raises TidekvError if the turn does not come in time, which ends the scheduler: if it went on,
        decode could be sent KV of another prompt.
        """
        reading, sending.reading = sending.reading, None
        if self._reads is not None and reading is not None:
            self._reads.end(reading)
        if sending.is_received or sending.ended is not None or sending.name not in self._live:
            return
        sending.cause = sending.cause or cause
        try:
            self._thread.stop(sending.name, cause)
        except EngineClosed as error:
            # A peer that is closed writes nothing.
            LOG.warning("a hand-over was not stopped", request_id=sending.name, cause=str(error))

    def flush(self) -> None:
        """Empty the host memory of what was read."""
        self._thread.flush_reader()

    def statistics(self) -> dict[str, int | float]:
        """Return the counts of the hand-overs and of storage. Waits for a turn of the peer's loop."""
        return self._thread.statistics()

    def close(self) -> None:
        """End all hand-overs and stop. Idempotent."""
        self._pacing.close()
        self._thread.close()
        # Unless that raised: then something may still write to the pages.
        if self._host is not None:
            self._host.close()

    def _take(self, timeout_s: float = 0.0) -> None:
        for ended in self._thread.poll(timeout_s):
            other = self._live.pop(ended.request_id, None)
            if other is not None:
                other.ended = ended

    def _do(self, sending: Sending, call: Callable[[], None]) -> None:
        try:
            call()
        except TidekvError as error:
            self.stop(sending, str(error))
            sending.cause = sending.cause or str(error)

    def _has_read(self, sending: Sending) -> bool:
        if self._reads is None or sending.reading is None:
            return True
        if not self._reads.poll(sending.reading):
            return False
        sending.reading = None
        return True

    def _may_compute(self, sending: Sending) -> bool:
        """Whether prefill may compute a prompt now: decode has asked for it, or prompts that it has not asked for hold
        less than their share of the pages.
        """
        now_s = self._clock()
        if now_s - self._counted_at_s > SHARE_AGE_S:
            self._counted_at_s = now_s
            self._unclaimed = frozenset(self._thread.unclaimed())
            self._unclaimed_pages = sum(
                -(-live.prompt.prompt_tokens // self._page_size)
                for name in self._unclaimed
                if (live := self._live.get(name)) is not None and live.may_compute
            )
        pages = -(-sending.prompt.prompt_tokens // self._page_size)
        if sending.name not in self._unclaimed:
            return True
        if self._unclaimed_pages and self._unclaimed_pages + pages > self._unclaimed_max:
            return False
        self._unclaimed_pages += pages
        return True
