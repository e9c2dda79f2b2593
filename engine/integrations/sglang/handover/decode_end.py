"""The decode end of a rank: an `EngineThread` beside SGLang's scheduler, whose pages it restores into.

    send_metadata ──▶ restore ──▶ EngineThread: L2, storage, prefill ──▶ SGLang's pages, in place
    poll          ◀── its state                                          a failure that may pass is tried again
    tree insert   ──▶ offer   ──▶ EngineThread: L2, storage              the tree's node is locked until it is copied

SGLang's thread calls everything here; the engine's thread reports ends by `on_done`, which only sets a field. SGLang's
decode computes no prompt, so a restore goes on until its deadline unless prefill has given the prompt up.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec

from tidekv.backends.host.pool import HostPool
from tidekv.engine.config.engine_config import EngineConfig
from tidekv.engine.decode.decode_engine import DecodeEngine
from tidekv.engine.decode.lent_pages import LentComponents, Pages
from tidekv.engine.decode.values import DecodeRequest, RestoredPages
from tidekv.engine.integrations.sglang.handover.pools import Pools
from tidekv.engine.integrations.sglang.handover.ranks import Ranks
from tidekv.engine.integrations.sglang.handover.settings import BackendSettings
from tidekv.engine.integrations.step_pacing import StepPacing
from tidekv.engine.log import engine_log
from tidekv.engine.thread.engine_thread import EngineThread, Failed, Offered, Outcome, RestoredInto
from tidekv.engine.thread.server_streams import ServerStreams
from tidekv.states.errors import EngineClosed, PrefillCause, TidekvError
from tidekv.states.handover.prompt_digest import PromptDigest

LOG = engine_log("tidekv.sglang")
PASSING: Final = frozenset(
    {
        PrefillCause.SILENT,
        PrefillCause.LEASE_ENDED,
        PrefillCause.LOST,
        PrefillCause.TRANSFER_FAILED,
        PrefillCause.DAMAGED,
    }
)
"""Causes after which the same prefill may still have the prompt and send it."""
GONE: Final = frozenset(
    {
        PrefillCause.PROCESS_GONE,
        PrefillCause.CONNECTION_REFUSED,
        PrefillCause.UNREACHABLE,
        PrefillCause.CLOSING,
    }
)
"""Causes after which a prefill does not have the prompt any more."""
REST_S: Final = 0.002
"""Maximum seconds for which a loop without work waits for its engine. It delays a request that arrives meanwhile."""
PAUSES_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Seconds before the tries after a failure; the last one for all further tries."""


class RestoreState(enum.Enum):
    """State of a restore, as its receiver reports it."""

    RUNNING = "running"
    READY = "ready"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class PromptRestore:
    """One prompt on its way into SGLang's pages."""

    room: int
    packed: bytes = field(repr=False)
    prompt: PromptDigest
    prefill: str
    namespace: str
    pages: Pages = field(repr=False)
    component_pages: LentComponents = field(repr=False)
    have_tokens: int
    """Leading tokens whose KV is in place."""
    deadline_at_s: float
    kv_hints: Mapping[str, object] | None = None
    """An envelope with the peers that the request names."""
    state: RestoreState = RestoreState.RUNNING
    cause: str = ""
    """Why it failed."""
    row: bytes = b""
    """The row of metadata, once it is ready."""
    sources: Counter[str] = field(default_factory=Counter)
    """Tokens by source: l1, l2, l3, transfer, peer."""
    is_in_flight: bool = False
    """The pages may be written to."""
    prefill_is_gone: bool = False
    """It failed because prefill does not have the prompt any more; another one may compute it."""
    outcome: Outcome | None = None
    """Set on the engine's thread, and taken by `poll`."""
    tries: int = 0
    retry_at_s: float = 0.0

    @property
    def request_id(self) -> str:
        """The name of the room at both ends."""
        return str(self.room)


@dataclass(slots=True, eq=False)
class _Offer:
    """KV that is written through."""

    release: Callable[[], None]
    has_ended: bool = False
    """Nothing reads the pages any more. Set on the engine's thread."""


class DecodeEnd:
    """Restores prompts into SGLang's pages, and keeps what its tree takes in. One for each rank."""

    def __init__(
        self,
        pools: Pools,
        settings: BackendSettings,
        *,
        config: EngineConfig,
        row_bytes: int,
        ranks: Ranks,
        server: ServerStreams | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start. `settings`, `config`: those of this rank. `server`: SGLang's streams, if its KV is in GPU memory.

        Raises what `DecodeEngine` raises as it starts.
        """
        layout = pools.full.layout
        self._settings = settings
        self._row_bytes = row_bytes
        self._clock = clock
        config = msgspec.structs.replace(config, device="lent")
        self._settle_s = config.copy_deadline_s + config.close_deadline_s
        host_pages = max(1, settings.host_bytes // layout.page_bytes)
        self._host = HostPool.allocate(layout, host_pages, path=settings.host_path)
        self._engine = EngineThread(
            DecodeEngine(
                config,
                device=pools.full,
                components=pools.components,
                host=self._host,
                storage=settings.open_storage(),
                transport=settings.decode_transport(
                    f"sglang-decode-{ranks.rank}", config.cache_peers, rank=ranks.rank, ranks=ranks.ranks
                ),
                ranks=ranks.engines,
            )
        )
        if server is not None:
            self._engine.follow(server)
        self._in_flight: set[PromptRestore] = set()
        self._is_closed = False
        self._pacing = StepPacing()
        self._ranks = ranks
        self._offers: list[_Offer] = []
        """Those that were not released, in the order of the calls; for SGLang's thread."""
        self._offer_ended = threading.Condition()
        self._woken = threading.Event()
        self._engine.start()

    # --- Restores ---

    def begin(
        self,
        *,
        room: int,
        packed: bytes,
        prompt: PromptDigest,
        prefill: str,
        namespace: str,
        pages: Pages,
        have_tokens: int,
        component_pages: LentComponents,
        kv_hints: Mapping[str, object] | None = None,
    ) -> PromptRestore:
        """Start a restore into the pages of the whole prompt, of which the first `have_tokens` tokens are in place.

        `component_pages`: by component, the pages at the prompt's end, none of which is in place.
        `kv_hints`: the hints of the request, see `DecodeRequest`.
        A prompt that cannot be restored has failed on return; nothing is raised.
        """
        restore = PromptRestore(
            room=room,
            packed=packed,
            prompt=prompt,
            prefill=prefill,
            namespace=namespace,
            pages=pages,
            component_pages=component_pages,
            have_tokens=have_tokens,
            deadline_at_s=self._clock() + self._settings.restore_timeout_s,
            kv_hints=kv_hints,
        )
        restore.sources["l1"] = have_tokens
        self._start(restore)
        return restore

    def poll(self, restore: PromptRestore) -> RestoreState:
        """Take what has become of a restore. Never waits, unless the engine has ended."""
        outcome = restore.outcome
        if outcome is not None:
            restore.outcome = None
            self._take(restore, outcome)
        elif restore.state is RestoreState.RUNNING and not restore.is_in_flight and self._clock() >= restore.retry_at_s:
            self._start(restore)
        return restore.state

    def redirect(self, restore: PromptRestore, prefill: str) -> None:
        """Go on with a failed restore at another prefill; what is in place stays."""
        restore.prefill, restore.prefill_is_gone, restore.state = prefill, False, RestoreState.RUNNING
        self._start(restore)

    def abort(self, restore: PromptRestore, cause: str) -> None:
        """Fail a restore. Its pages are SGLang's again once `is_in_flight` is false."""
        if restore.state is not RestoreState.RUNNING:
            return
        self._fail(restore, cause)
        if restore.is_in_flight:
            with suppress(EngineClosed):  # The engine's end is the outcome of every restore.
                self._engine.abort(restore.request_id)

    def is_quiet(self, room: int) -> bool:
        """Whether nothing writes to pages of a room any more."""
        for restore in self._in_flight:
            if restore.outcome is not None:
                self.poll(restore)
                return self.is_quiet(room)
        return all(restore.room != room for restore in self._in_flight)

    def rest(self) -> None:
        """Wait for the end of a restore or an offer, at most REST_S: SGLang has nothing to compute meanwhile."""
        self._woken.wait(REST_S)
        self._woken.clear()

    # --- Offers ---

    def offer(
        self, packed: bytes, pages: Pages, *, start_token: int, namespace: str, release: Callable[[], None]
    ) -> None:
        """Write KV through to host memory and storage. `reap` calls `release` once nothing reads the pages."""

        offer = _Offer(release)
        self._offers.append(offer)

        def ended(outcome: Outcome) -> None:
            if isinstance(outcome, Failed):
                LOG.warning("KV that SGLang's tree took in is not kept", cause=str(outcome.error))
            else:
                assert isinstance(outcome, Offered)
            with self._offer_ended:
                offer.has_ended = True
                self._offer_ended.notify()
            self._woken.set()

        try:
            self._engine.offer(packed, pages, start_token=start_token, namespace=namespace, on_done=ended)
        except TidekvError as error:
            LOG.warning("KV that SGLang's tree took in is not kept", cause=str(error))
            offer.has_ended = True

    def reap(self) -> None:
        """Release what the offers that ended have read, on all ranks in the same call: their trees stay equal.

        To be called in each pass of SGLang's loop.
        """
        self._pacing.after_step(is_empty=False, is_transferring=bool(self._in_flight or self._offers))
        ended = self._ranks.all_of([offer.has_ended for offer in self._offers])
        released = [offer for offer, has_ended in zip(self._offers, ended, strict=True) if has_ended]
        if released:
            self._offers = [offer for offer, has_ended in zip(self._offers, ended, strict=True) if not has_ended]
        for offer in released:
            offer.release()

    def flush(self) -> None:
        """Empty the host memory, after the offers under way. Storage keeps its pages."""
        with self._offer_ended:
            self._offer_ended.wait_for(lambda: all(offer.has_ended for offer in self._offers), self._settle_s)
        self.reap()
        if not self._ranks.is_first:
            return  # The first rank flushes all of them.
        try:
            self._engine.flush(("l2",))
        except TidekvError as error:
            LOG.error("host memory was not flushed", cause=str(error))

    def close(self) -> None:
        """Stop. Idempotent."""
        self._pacing.close()
        self._engine.close()
        # Unless that raised: then something may still write to the pages.
        self._host.close()

    # --- Inside ---

    def _start(self, restore: PromptRestore) -> None:
        remaining_s = restore.deadline_at_s - self._clock()
        if remaining_s <= 0:
            self._fail(restore, restore.cause or "deadline")
            return
        restore.tries += 1
        restore.is_in_flight = True
        try:
            self._engine.restore_into(
                DecodeRequest(
                    request_id=restore.request_id,
                    tokens=restore.packed,
                    prefill=restore.prefill,
                    namespace=restore.namespace,
                    prompt_digest=restore.prompt,
                    deadline_s=remaining_s,
                    kv_hints=restore.kv_hints,
                ),
                restore.pages,
                restore.have_tokens,
                component_pages=restore.component_pages,
                on_done=partial(self._end, restore),
            )
        except TidekvError as error:
            restore.is_in_flight = False
            self._fail(restore, str(error))
        else:
            self._in_flight.add(restore)

    def _end(self, restore: PromptRestore, outcome: Outcome) -> None:
        """Let SGLang's thread take an outcome. Runs on the engine's thread."""
        restore.outcome = outcome
        self._woken.set()

    def _take(self, restore: PromptRestore, outcome: Outcome) -> None:
        if isinstance(outcome, Failed) and outcome.ends_engine:
            self._give_up(outcome.error)
        restore.is_in_flight = False
        self._in_flight.discard(restore)
        if restore.state is RestoreState.FAILED:
            return
        if isinstance(outcome, RestoredInto):
            self._take_restored(restore, outcome.restored)
        else:
            assert isinstance(outcome, Failed)
            self._fail(restore, str(outcome.error))

    def _take_restored(self, restore: PromptRestore, restored: RestoredPages) -> None:
        for source, tokens in restored.sources.items():
            if source != "l1":
                restore.sources[source] += tokens
        if restored.is_complete:
            row = restored.aux.get("row")
            if not isinstance(row, bytes) or len(row) != self._row_bytes:
                self._fail(
                    restore, f"prefill sent no row of metadata of {self._row_bytes} bytes: is its SGLang another?"
                )
                return
            restore.row, restore.state = row, RestoreState.READY
            return
        restore.cause = f"{restored.cause}: {restored.detail}"
        restore.prefill_is_gone = restored.cause in GONE
        restore.have_tokens = max(restore.have_tokens, restored.restored_tokens)
        if restored.cause not in PASSING:
            self._fail(restore, restore.cause)
            return
        pause_s = PAUSES_S[min(restore.tries, len(PAUSES_S)) - 1]
        restore.retry_at_s = self._clock() + pause_s
        LOG.warning("a restore is tried again", request_id=restore.request_id, tries=restore.tries, cause=restore.cause)

    def _fail(self, restore: PromptRestore, cause: str) -> None:
        restore.state, restore.cause = RestoreState.FAILED, cause

    def _give_up(self, error: Exception) -> None:
        """Wait for the engine's end, which ends the last writes to pages."""
        if self._is_closed:
            return
        self._is_closed = True
        LOG.error("the decode engine has ended; requests fail from now on", cause=str(error))
        try:
            self._engine.close()
        except Exception:
            LOG.exception("the decode engine ended by this error")
