"""SGLang's tree of a decode server as the first tier: what it takes in is written through to tidekv's tiers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any  # SGLang's tree and requests have no types.

from tidekv.engine.integrations.sglang.handover.requests import packed_tokens
from tidekv.engine.log import engine_log

if TYPE_CHECKING:
    # The plugin imports this module in all of SGLang's processes.
    from tidekv.engine.integrations.sglang.handover.decode_end import DecodeEnd
    from tidekv.engine.integrations.sglang.handover.requests import PageNamespaces

LOG = engine_log("tidekv.sglang")
OFFERED = "tidekv_offered_tokens"
"""Attribute of SGLang's requests: leading tokens that were offered."""
FLUSH = "tidekv_flush"
"""Attribute of SGLang's trees: what empties the host memory behind one."""
MATCHED = "tidekv_matched_tokens"
"""Attribute of SGLang's retracted requests: leading tokens whose pages are the tree's again."""


class KeptTree:
    """Offers the pages that enter the tree, and locks their nodes until they are copied."""

    def __init__(self, decode: DecodeEnd, tree: Any, names: PageNamespaces) -> None:
        self._names = names
        self._resets = 0
        self._decode = decode
        self._tree = tree
        tree.tidekv = self
        setattr(tree, FLUSH, self.flush)

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
            self._decode.offer(packed, pages, start_token=start, namespace=self._names.of(request), release=release)
        except BaseException:
            release()
            raise

    def reap(self) -> None:
        """Unlock the nodes whose pages are copied."""
        self._decode.reap()

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
    flush = getattr(tree, FLUSH, None)
    if flush is not None:
        try:
            flush()
        except Exception:
            LOG.exception("host memory was not flushed")


def allocate_behind_match(original: Callable[..., Any], queue: Any, request: Any, *prefix: Any, **named: Any) -> Any:
    """Give a retracted request the pages that the tree still has of it, and allocate the rest.

    Runs around SGLang's `DecodePreallocQueue._pre_alloc`, which gives it pages for all of its tokens.
    """
    backup = request.kv.retraction_backup
    if prefix or named or backup is None or backup.cpu_tensors is None or not hasattr(queue.tree_cache, "tidekv"):
        return original(queue, request, *prefix, **named)
    setattr(request, MATCHED, 0)
    match = queue._match_prefix_and_lock(request)
    if match.l1_prefix_len and queue._uses_swa_tail_prealloc():
        # As SGLang does for a new request: its windows are allocated again, so those of the tree must stay evictable.
        queue.tree_cache.release_swa(request.lock)
    made = original(queue, request, match.prefix_indices, match.l1_prefix_len, match.l1_prefix_len)
    request.kv.cache_protected_len = match.l1_prefix_len
    setattr(request, MATCHED, match.l1_prefix_len)
    LOG.debug("a retracted request goes on", request_id=str(request.rid), l1_tokens=match.l1_prefix_len)
    return made


def load_behind_match(original: Callable[..., Any], request: Any, rows: Any, allocator: Any) -> Any:
    """Copy back the KV of a retracted request that the tree does not have.

    Runs around SGLang's `Req.load_kv_cache`, which writes the KV of all of its tokens: that of tokens whose pages are
    the tree's goes to page 0, which nothing reads.
    """
    matched = int(getattr(request, MATCHED, 0))
    if not matched:
        return original(request, rows, allocator)
    row = rows.req_to_token[request.kv.req_pool_idx]
    shared = row[:matched].clone()
    row[:matched] = 0
    try:
        return original(request, rows, allocator)
    finally:
        row[:matched] = shared
        setattr(request, MATCHED, 0)
