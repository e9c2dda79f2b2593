"""SGLang's tree of a decode server as the first tier: what it takes in is written through to tidekv's tiers."""

from __future__ import annotations

from functools import partial
from typing import Any  # SGLang's tree and requests have no types.
from uuid import uuid4

from tidekv.engine.integrations.sglang.handover.decode_end import DecodeEnd
from tidekv.engine.integrations.sglang.handover.requests import namespace_of, packed_tokens
from tidekv.engine.log import engine_log

LOG = engine_log("tidekv.sglang")
OFFERED = "tidekv_offered_tokens"
"""Attribute of SGLang's requests: leading tokens that were offered."""


class KeptTree:
    """Offers the pages that enter the tree, and locks their nodes until they are copied."""

    def __init__(self, decode: DecodeEnd, tree: Any) -> None:
        self.salt = ""
        """What the names of pages have besides the request's own namespace."""
        self._resets = 0
        self._decode = decode
        self._tree = tree
        tree.tidekv = self

    def offer(self, request: Any) -> None:
        """Write through what the tree has of a request, prompt or output, that was not offered before."""
        end = int(request.kv.cache_protected_len)
        start, page_size = int(getattr(request, OFFERED, 0)), self._tree.page_size
        if end - start < page_size:
            return
        setattr(request, OFFERED, end)
        table = self._tree.req_to_token_pool.req_to_token[request.kv.req_pool_idx]
        packed, pages = packed_tokens(request, end), table[start:end:page_size].cpu().numpy() // page_size
        release = partial(self._release, self._tree.lock(request.last_node), self._resets)
        try:
            self._decode.offer(
                packed, pages, start_token=start, namespace=namespace_of(request, self.salt), release=release
            )
        except BaseException:
            release()
            raise

    def reap(self, *, is_empty: bool) -> None:
        """Unlock the nodes whose pages are copied, and leave the engine its turns. `is_empty`: nothing is computed."""
        self._decode.reap()
        self._decode.pace(is_empty=is_empty)

    def rename(self, weight_version: str | None) -> None:
        """Name pages otherwise from now on: other weights give other KV for the same tokens."""
        self.salt = uuid4().hex if weight_version is None else f"weights {weight_version}"

    def flush(self) -> None:
        """Empty the host memory before SGLang forgets its tree, and with it all locks."""
        self._decode.flush()
        self._resets += 1

    def _release(self, lock: Any, resets: int) -> None:
        # A copy that hangs is not waited for without end: its node may be gone with the tree.
        if resets == self._resets:
            self._tree.unlock(lock)


def offer_checkpoint(result: None, tree: Any, request: Any, **more: Any) -> None:
    """Offer what a request has put in the tree. Runs after SGLang's `UnifiedRadixCache.checkpoint_into_tree`."""
    kept = getattr(tree, "tidekv", None)
    if kept is not None:
        try:
            kept.offer(request)
        except Exception:
            LOG.exception("KV that SGLang's tree took in is not kept")


def flush_before_reset(tree: Any) -> None:
    """Flush the host memory. Runs before SGLang's `UnifiedRadixCache.reset`."""
    kept = getattr(tree, "tidekv", None)
    if kept is not None:
        try:
            kept.flush()
        except Exception:
            LOG.exception("host memory was not flushed")


def rename_before_flush(updater: Any, received: Any, *more: Any, **named: Any) -> None:
    """Name pages otherwise. Runs before SGLang's `flush_cache_after_weight_update`, unless that keeps the cache."""
    kept = getattr(getattr(updater.scheduler, "tree_cache", None), "tidekv", None)
    if kept is not None and received.flush_cache:
        kept.rename(received.weight_version)
