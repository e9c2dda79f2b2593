"""Scheduler's side of the storage role: decides what is loaded for which request, and which pages are saved.

    arrived ──▶ storage look-up ──▶ matched: None until it has ended, then a number of tokens ──▶ allocated ──▶ load job
    each step: pages that will be full once the step has run ──▶ save jobs
    preempted: the worker waits until nothing reads the blocks
    finished: pages that are full and not saved ──▶ a last save job; vLLM holds the blocks until all were read

It reads vLLM's requests and does not change them. All calls come from the scheduler's thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, Protocol  # vLLM's requests are not typed here: tests and type checks go without vLLM.
from uuid import uuid4

from tidekv.backends.keys.chain import namespace_seed, pack_tokens
from tidekv.engine.integrations.vllm.jobs import LoadJob, SaveJob, StorageJobs
from tidekv.engine.integrations.vllm.settings import Shared

SAVE_SHARE: Final = 64
"""A save names the whole prompt: it waits until the pages that it brings are a 64th of those saved before."""


class Lookup(Protocol):
    """Looks up prefixes; `PrefixLookup` implements it."""

    def ask(self, keys: Sequence[bytes]) -> Future[int]:
        """Return a future: the number of keys, from the first on, that storage probably has."""

    def close(self) -> None:
        """Close the engines. Idempotent."""


@dataclass(slots=True)
class _Known:
    """State of one request of vLLM. `stored`: number of pages, from the first on, that need not be saved. `named`:
    number of tokens that its saves have named since it was last started.
    """

    request: Any  # vLLM's.
    seed: bytes
    keys: list[bytes] = field(default_factory=list)
    answer: Future[int] | None = None
    asked_at_s: float = 0.0
    computed: int = 0
    stored: int = 0
    named: int = 0
    is_running: bool = False
    loading: tuple[int, ...] = ()
    loading_from: int = 0
    has_failed: bool = False


class StorageScheduler:
    """`SchedulerRole`: tracks each request from its arrival to its end."""

    def __init__(self, shared: Shared, lookup: Lookup, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Own the look-up until `close`."""
        self._shared = shared
        self._page = shared.layout.page_size
        self._page_keys = shared.page_keys
        self._lookup = lookup
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self._loads: list[LoadJob] = []
        self._last_saves: list[SaveJob] = []
        self._counts: Counter[str] = Counter()
        self._reset_salt = ""

    def arrived(self, request: Any) -> None:
        """Start the look-up of a request that entered vLLM's queue, so the result is there when it is scheduled."""
        known = self._know(request)
        if known is not None and self._shared.loads and not request.skip_reading_prefix_cache:
            self._ask(known)

    def matched(self, request: Any, computed: int) -> int | None:
        """Return how many tokens beyond `computed`, which ends a block, can be loaded. None until the look-up ends."""
        known = self._know(request)
        if known is None or known.has_failed or not self._shared.loads or request.skip_reading_prefix_cache:
            return 0
        known.is_running = False
        known.computed = computed
        if known.answer is None:
            self._ask(known)
        pages = self._answered(known)
        if pages is None:
            return None
        tokens = min(pages, self._pages_to_ask(request)) * self._page - computed
        return tokens if tokens >= max(1, self._shared.settings.threshold_tokens) else 0

    def allocated(self, request: Any, table: Sequence[Sequence[int]], external_tokens: int) -> None:
        """Plan the load of `external_tokens` tokens after the computed ones into the request's blocks."""
        known = self._known.get(request.request_id)
        if known is None:
            return
        if known.answer is not None:
            # What storage has need not be saved, whether or not it is loaded.
            known.stored = (self._answered(known) or 0) if self._shared.loads else 0
            # A request that returns after a preemption is looked up again.
            known.answer = None
        if not external_tokens:
            return
        size, per_page = self._shared.block_size, self._shared.blocks_per_page
        first_block, end_block = known.computed // size, -(-(known.computed + external_tokens) // size)
        blocks, end = tuple(table[0][:end_block]), -(-end_block // per_page) * self._page
        known.loading, known.loading_from = blocks[first_block:], first_block
        self._loads.append(
            LoadJob(
                request_id=request.request_id,
                seed=known.seed,
                tokens=pack_tokens(request.all_token_ids[:end]),
                blocks=blocks,
                have_tokens=known.computed,
                next_token=int(request.all_token_ids[end]) if self._page_keys.bigrams else None,
            )
        )

    def step_jobs(self, scheduler_output: Any) -> StorageJobs | None:
        """Return this step's loads and saves; None without any. Call it once per step."""
        blocks_of = scheduler_output.kv_connector_block_state.get_block_ids
        loads, self._loads = self._loads, []
        saves, self._last_saves = self._last_saves, []
        # Their blocks may be overwritten by this step; tokens are named again once they run again.
        preempted = [name for name in scheduler_output.preempted_req_ids or () if self._forget_named(name)]
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            known = self._known.get(request_id)
            if known is None:
                continue
            known.is_running = True
            # Tokens that are only drafted, or not sampled yet, may still change, so their pages are not saved.
            full = self._full(known.request, known.request.num_computed_tokens + count)
            if self._shared.saves and full - known.stored > known.stored // SAVE_SHARE:
                saves.append(self._save(known, blocks_of(request_id)[0], full))
        return StorageJobs(loads, saves, preempted) if loads or saves or preempted else None

    def finished(self, request: Any, table: Sequence[Sequence[int]]) -> tuple[bool, None]:
        """End a request. True if its blocks must be held until its last save is reported as read."""
        known = self._known.pop(request.request_id, None)
        if known is None or not known.is_running or not self._shared.saves:
            # Blocks that are still being loaded, or never were, hold nothing to save.
            return False, None
        full = min(self._full(request, request.num_computed_tokens), len(table[0]) // self._shared.blocks_per_page)
        if full <= known.stored and not known.named:
            return False, None
        self._last_saves.append(self._save(known, table[0], full, is_last=True))
        return True, None

    def heard(self, connector_output: Any) -> None:
        """Process ended loads, and blocks that hold garbage; the pages of the latter must be saved again."""
        invalid = set(connector_output.invalid_block_ids)
        for known in self._known.values() if invalid else ():
            bad = next((at for at, block in enumerate(known.loading) if block in invalid), None)
            if bad is not None:
                # Not retried: a page that exists but cannot be read would hold its request for ever.
                known.has_failed = True
                known.stored = min(known.stored, (known.loading_from + bad) // self._shared.blocks_per_page)
        for request_id in connector_output.finished_recving or ():
            if request_id in self._known:
                self._known[request_id].loading = ()

    def reset(self) -> None:
        """Make everything saved so far unfindable, by other keys from now on until this process ends. It stays in
        storage for others.
        """
        self._reset_salt = uuid4().hex
        for known in self._known.values():
            known.seed, known.keys, known.answer, known.stored = self._seed(known.request), [], None, 0

    def take_counts(self) -> dict[str, int]:
        """Return the counts since the last call, by the names of `COUNTS`."""
        counts, self._counts = self._counts, Counter()
        return dict(counts)

    def close(self) -> None:
        """Close the look-up. Idempotent."""
        self._lookup.close()

    def _know(self, request: Any) -> _Known | None:
        """Return the state of a request; None if its KV depends on more than its tokens."""
        known = self._known.get(request.request_id)
        if known is None and is_of_tokens(request):
            known = self._known[request.request_id] = _Known(request, self._seed(request))
        return known

    def _seed(self, request: Any) -> bytes:
        adapter = request.lora_request.lora_name if request.lora_request is not None else ""
        salt = self._reset_salt + (request.cache_salt or "")
        return namespace_seed(adapter, salt=salt or None)

    def _ask(self, known: _Known) -> None:
        known.asked_at_s = self._clock()
        known.answer = self._lookup.ask(self._keys_to(known, self._pages_to_ask(known.request)))
        self._counts["lookups"] += 1

    def _answered(self, known: _Known) -> int | None:
        """Return the pages that storage has; 0 after the timeout, None while there is time left."""
        assert known.answer is not None, "its look-up was started"
        if known.answer.done():
            return known.answer.result()
        if self._clock() - known.asked_at_s < self._shared.settings.lookup_timeout_s:
            return None
        self._counts["lookups_late"] += 1
        known.answer = Future()
        known.answer.set_result(0)
        return 0

    def _pages_to_ask(self, request: Any) -> int:
        """Number of pages to look up. vLLM computes the last token itself to sample from it, so its page is not."""
        return max(0, int(request.num_tokens) - 1) // self._page

    def _full(self, request: Any, computed: int) -> int:
        """Return the number of pages that are full of computed tokens, and whose keys are known."""
        return self._page_keys.count(int(request.num_tokens), computed)

    def _keys_to(self, known: _Known, count: int) -> list[bytes]:
        """Return the keys of the first `count` pages; each is computed once."""
        have = len(known.keys)
        if count > have:
            # With pairs a key names the token after its page, too.
            end = count * self._page + self._page_keys.bigrams
            tokens = pack_tokens(known.request.all_token_ids[have * self._page : end])
            known.keys += self._page_keys.digests(tokens, prefix=known.keys[-1] if known.keys else known.seed)
        return known.keys[:count]

    def _save(self, known: _Known, blocks: Sequence[int], full: int, *, is_last: bool = False) -> SaveJob:
        first, known.stored, per_page = min(known.stored, full), full, self._shared.blocks_per_page
        named, known.named = known.named, full * self._page + self._page_keys.bigrams
        tokens = known.request.all_token_ids[named : known.named]
        return SaveJob(
            request_id=known.request.request_id,
            seed=known.seed,
            tokens=pack_tokens(tokens) if tokens else b"",
            first_page=first,
            blocks=tuple(blocks[first * per_page : full * per_page]),
            is_last=is_last,
        )

    def _forget_named(self, request_id: str) -> bool:
        """Let the next save of a preempted request name its tokens from the first on; False if none was named."""
        known = self._known.get(request_id)
        if known is None or not known.named:
            return False
        known.named = 0
        return True


def is_of_tokens(request: Any) -> bool:
    """Whether the tokens determine a request's KV: no images, no embeddings, and no tokens that change later."""
    return (
        request.prompt_token_ids is not None
        and request.prompt_embeds is None
        and not request.mm_features
        and not request.resumable
    )
