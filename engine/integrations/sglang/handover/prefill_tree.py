"""SGLang's tree of a prefill server, into which prefill reads what decode has of a prompt before SGLang looks there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any  # SGLang's tree and requests have no types.

import torch

from tidekv.engine.integrations.sglang.handover.tree import FLUSH

if TYPE_CHECKING:
    from tidekv.engine.integrations.sglang.handover.prefill_end import PrefillEnd
    from tidekv.engine.integrations.sglang.handover.prefix_reads import PrefixPlace
    from tidekv.engine.integrations.sglang.handover.requests import PageNamespaces


class PrefillTree:
    """Makes the places of requests, and has the host memory behind the tree emptied with it."""

    def __init__(self, prefill: PrefillEnd, scheduler: Any, names: PageNamespaces) -> None:
        self.tree, self.allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
        self.resets = 0
        self._prefill = prefill
        self._names = names
        setattr(self.tree, FLUSH, self.flush)

    def place_of(self, request: Any) -> PrefixPlace | None:
        """Return where the prefix of a request's prompt goes; None for one that SGLang does not look for in its tree,
        or whose pages decode has by another name.
        """
        # A session has its pages in its own row. The name of an adapter's pages has a number that each server draws.
        if request.session is not None or request.skip_radix_cache_insert or request.lora_id:
            return None
        return _Place(self, request, self._names.of(request))

    def flush(self) -> None:
        """Empty the host memory before SGLang forgets its tree, and with it all locks."""
        self.resets += 1
        self._prefill.flush()


@dataclass(slots=True)
class _Reserved:
    """Pages that are read into."""

    resets: int
    have_tokens: int
    node: Any
    lock: Any
    slots: torch.Tensor
    """Of the tokens behind those that the tree has."""


class _Place:
    """See PrefixPlace."""

    def __init__(self, owner: PrefillTree, request: Any, namespace: str) -> None:
        self.namespace = namespace
        self._owner = owner
        self._request = request
        self._reserved: _Reserved | None = None

    def missing_tokens(self) -> int:
        have_tokens, end = self._match()
        return end - have_tokens

    def reserve(self, end: int, least: int) -> tuple[int, list[int]] | None:
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        tree, allocator = self._owner.tree, self._owner.allocator
        have_tokens, most = self._match()
        end = min(end, most)
        if end - have_tokens < max(least, 1):
            return None
        node, size = self._request.last_node, tree.page_size
        lock = tree.lock(node)
        slots = None
        # Nothing is evicted for a prefix that would not fit.
        if allocator.available_size() + tree.evictable_size() >= end - have_tokens:
            evict_from_tree_cache(tree, end - have_tokens)
            slots = allocator.alloc(end - have_tokens)
        if slots is None:
            tree.unlock(lock)
            return None
        self._reserved = _Reserved(self._owner.resets, have_tokens, node, lock, slots)
        held = torch.cat((tree.path_device_indices(node), slots))
        return have_tokens, (held[::size] // size).tolist()

    def keep(self, tokens: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        reserved = self._take()
        if reserved is None:
            return
        request, tree = self._request, self._owner.tree
        read = tokens - reserved.have_tokens
        if read:
            key = RadixKey(request.full_untruncated_fill_ids[:tokens], request.extra_key, cache_salt=request.cache_salt)
            value = torch.cat((tree.path_device_indices(reserved.node), reserved.slots[:read])).to(torch.int64)
            # What others have put there meanwhile stays, and the tree frees the pages that came behind it.
            tree.insert(
                InsertParams(key=key, value=value, prev_prefix_len=reserved.have_tokens, priority=request.priority or 0)
            )
        self._owner.allocator.free(reserved.slots[read:])
        tree.unlock(reserved.lock)

    def abandon(self) -> None:
        reserved = self._take()
        if reserved is not None:
            self._owner.tree.unlock(reserved.lock)

    def _take(self) -> _Reserved | None:
        reserved, self._reserved = self._reserved, None
        # With the tree SGLang has forgotten the lock, and given the pages to others.
        return None if reserved is None or reserved.resets != self._owner.resets else reserved

    def _match(self) -> tuple[int, int]:
        """Return the leading tokens that the tree has, as SGLang matches them again before it computes, and those that
        it takes of any tree, in full pages.
        """
        request, size = self._request, int(self._owner.tree.page_size)
        request.init_next_round_input(self._owner.tree, cow_mamba=False)
        most = int(request._compute_max_prefix_len(len(request.full_untruncated_fill_ids)))
        return int(request.prefix_len), most // size * size
