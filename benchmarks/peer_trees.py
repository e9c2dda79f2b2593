"""Adapters for each prefix index: SGLang's Rust tree core, vLLM's KV cache manager, and tidekv's.

All serve a request in the same steps: match its prompt, lock the match, make room, take pages, insert the prompt, and
hold it locked. `check_tree` and `check_vllm` verify the documented behavior of each before it is measured.
"""

from __future__ import annotations

from array import array
from hashlib import sha256
from typing import Any  # Peers' objects have no types here.

import numpy as np
import numpy.typing as npt

from benchmarks.peers import PeerMissing
from tidekv.backends.keys.chain import pack_tokens
from tidekv.states.pages.page_pool import PagePool
from tidekv.states.prefix.index import PrefixIndex

Ids = npt.NDArray[np.int64]
TOKEN_BYTES = 4


class OurTree:
    """tidekv's index with accounts for device and host memory. Tokens are an int64 array, or packed in advance."""

    def __init__(self, page_size: int, capacity: int, *, packed: bool) -> None:
        self.page_size = page_size
        self.device = PagePool("device", capacity // page_size)
        host = PagePool("host", capacity // page_size)
        self.index = PrefixIndex(key_bytes=page_size * TOKEN_BYTES, device=self.device, host=host)
        self._packed = packed
        self._key_bytes = page_size * TOKEN_BYTES
        self.lock = self.index.lock
        """Locks a node; its result unlocks it."""
        self.unlock = self.index.unlock

    def prompt(self, tokens: Ids) -> Any:
        """Return the prompt in the form that a caller has, prepared in advance as for each peer."""
        return tokens.astype("<u4").tobytes() if self._packed else tokens.copy()

    def match(self, prompt: Any) -> tuple[int, Any, Any]:
        """Return the tokens found, the node where they end, and the keys."""
        packed = prompt if self._packed else pack_tokens(prompt)
        keys = packed[: len(packed) // self._key_bytes * self._key_bytes]
        found = self.index.match("", keys)
        return found.device_pages * self.page_size, found.device_node, keys

    def free(self) -> int:
        """Return the number of tokens that can be taken."""
        return self.device.free * self.page_size

    def evict(self, tokens: int) -> None:
        """Make room for this many tokens."""
        self.index.evict_device(-(-tokens // self.page_size))

    def take(self, tokens: int) -> Any:
        """Take pages for this many tokens."""
        return self.device.take(tokens // self.page_size)

    def insert(self, keys: Any, node: Any, taken: Any) -> Any:
        """Insert the prompt; returns the node where it ends."""
        return self.index.insert("", keys, self.index.device_path(node) + taken).node

    def held(self) -> int:
        """Return the number of tokens in the index."""
        return self.device.cached * self.page_size


class SglangTree:
    """SGLang's unified radix cache on its Rust core, with the paged allocator into which it frees."""

    def __init__(self, page_size: int, capacity: int) -> None:
        import torch
        from sglang.srt.mem_cache import base_prefix_cache as base
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        self.page_size = page_size
        self._torch, self._base, self._key = torch, base, RadixKey
        self._allocator = PagedTokenToKVPoolAllocator(capacity, page_size, torch.int64, "cpu", None, False)
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=self._allocator,
                page_size=page_size,
                tree_components=(ComponentType.FULL,),
                tree_core_backend="rust",
            )
        )
        core = type(self.tree.tree_core).__name__
        if core != "RustUnifiedTreeCore":
            raise PeerMissing(f"sglang uses {core} and not its Rust core")

    def prompt(self, tokens: Ids) -> Any:
        """Return the prompt as array("q")."""
        ids = array("q")
        ids.frombytes(np.ascontiguousarray(tokens, dtype=np.int64).tobytes())
        return ids

    def match(self, prompt: Any) -> tuple[int, Any, Any]:
        """See OurTree."""
        key = self._key(prompt).page_aligned(self.page_size)
        found = self.tree.match_prefix(self._base.MatchPrefixParams(key=key))
        return found.device_prefix_len, found.last_device_node, key

    def lock(self, node: Any) -> Any:
        """See OurTree."""
        return node, self.tree.inc_lock_ref(node).to_dec_params()

    def unlock(self, locked: Any) -> None:
        """See OurTree."""
        self.tree.dec_lock_ref(*locked)

    def free(self) -> int:
        """See OurTree."""
        return int(self._allocator.available_size())

    def evict(self, tokens: int) -> None:
        """See OurTree."""
        self.tree.evict(self._base.EvictParams(num_tokens=tokens))

    def take(self, tokens: int) -> Any:
        """See OurTree."""
        return self._allocator.alloc(tokens)

    def insert(self, keys: Any, node: Any, taken: Any) -> Any:
        """See OurTree. Passes the number of tokens found, so that they do not count as duplicates."""
        before = self.tree.path_device_indices(node)
        value = self._torch.cat([before, taken]) if len(before) else taken
        params = self._base.InsertParams(key=keys, value=value, prev_prefix_len=len(before))
        return self.tree.insert(params).last_device_node

    def held(self) -> int:
        """See OurTree."""
        return int(self.tree.evictable_size() + self.tree.protected_size())


class VllmPool:
    """vLLM's KV cache manager with SHA-256 block hashes. A request is hashed when it is created."""

    def __init__(self, page_size: int, capacity: int) -> None:
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request

        self.page_size = page_size
        hashes = get_hash_fn_by_name("sha256")
        kv_cache_utils.init_none_hash(hashes)
        self._hasher = kv_cache_utils.get_request_block_hasher(page_size, hashes)
        self._request = Request
        self._sampling = SamplingParams(max_tokens=1)
        self._sampling.update_from_generation_config({}, 0)
        spec = FullAttentionSpec(block_size=page_size, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
        config = KVCacheConfig(
            num_blocks=capacity // page_size + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self.manager = KVCacheManager(
            config,
            max_model_len=1_000_000,
            scheduler_block_size=page_size,
            hash_block_size=page_size,
            enable_caching=True,
        )
        self._names = 0

    def prompt(self, tokens: Ids) -> list[int]:
        """Return the prompt as a list of ints."""
        return tokens.tolist()

    def begin(self, prompt: list[int]) -> Any:
        """Create a request, which hashes it."""
        self._names += 1
        return self._request(f"r{self._names}", prompt, self._sampling, None, block_hasher=self._hasher)

    def match(self, request: Any) -> tuple[int, Any]:
        """Return the tokens found, and their blocks."""
        blocks, found, *_ = self.manager.get_computed_blocks(request)
        return found, blocks

    def enter(self, request: Any, tokens: int, found: int, blocks: Any) -> bool:
        """Lock the match, evict, take and insert; False if there is no room."""
        return self.manager.allocate_slots(request, tokens - found, found, blocks) is not None

    def end(self, request: Any) -> None:
        """Unlock the request."""
        self.manager.free(request)


def numbers(count: int, seed: int) -> Ids:
    """Return random tokens."""
    return np.random.default_rng(seed).integers(0, 128_000, size=count, dtype=np.int64)


def enter(tree: OurTree | SglangTree, tokens: Ids) -> Any:
    """Serve one request and unlock it; returns the node where it ends."""
    found, node, keys = tree.match(tree.prompt(tokens))
    locked = tree.lock(node)
    leaf = tree.insert(keys, node, tree.take(len(tokens) // tree.page_size * tree.page_size - found))
    tree.unlock(locked)
    return leaf


def check_tree(tree: OurTree | SglangTree) -> None:
    """Check the behavior of a paged radix cache. Raises PeerMissing if this one differs."""
    size = tree.page_size
    base, other = numbers(8 * size, 1), numbers(8 * size, 2)
    branch = np.concatenate([base[: 4 * size], other[: 4 * size]])
    total = tree.free()
    leaf = enter(tree, base)
    _expect(tree.match(tree.prompt(base))[0] == 8 * size, "a cached prompt is found whole")
    _expect(tree.match(tree.prompt(base[: 4 * size + 3]))[0] == 4 * size, "a prefix is found in whole pages")
    _expect(tree.match(tree.prompt(other))[0] == 0, "another prompt is not found")
    enter(tree, branch)
    _expect(tree.match(tree.prompt(branch))[0] == 8 * size, "a branch is found, over the split")
    _expect(tree.held() == 12 * size and tree.free() == total - 12 * size, "a shared prefix is held once")
    found, leaf, _ = tree.match(tree.prompt(base))
    locked = tree.lock(leaf)
    tree.evict(12 * size)
    _expect(tree.held() == 8 * size, "what is locked is not evicted, what is not is")
    tree.unlock(locked)
    tree.evict(12 * size)
    _expect(found == 8 * size and tree.held() == 0 and tree.free() == total, "what is unlocked is evicted")


def check_vllm(pool: VllmPool) -> None:
    """Check vLLM's documented behavior: full blocks are reused, but the last token is always computed."""
    size = pool.page_size
    tokens = pool.prompt(numbers(8 * size, 1))
    first = pool.begin(tokens)
    _expect(pool.match(first)[0] == 0, "an empty cache has nothing")
    _expect(pool.enter(first, 8 * size, *pool.match(first)), "there is room for a first request")
    _expect(pool.match(pool.begin(tokens))[0] == 7 * size, "all but the block of the last token is found")
    _expect(pool.match(pool.begin(tokens[: 4 * size + 3]))[0] == 4 * size, "a prefix is found in whole blocks")
    _expect(pool.match(pool.begin([1, *tokens[1:]]))[0] == 0, "another first token is another prefix")
    pool.end(first)
    _expect(pool.match(pool.begin(tokens))[0] == 7 * size, "freed blocks stay cached")


def chain(packed: bytes, page_size: int) -> list[str]:
    """Return the page hashes as documented by SGLang: SHA-256 over the previous hash and the page's tokens as u32."""
    previous, found = b"", []
    width = page_size * TOKEN_BYTES
    for at in range(0, len(packed) - width + 1, width):
        previous = sha256(previous + packed[at : at + width]).digest()
        found.append(previous.hex())
    return found


def _expect(holds: object, what: str) -> None:
    if not holds:
        raise PeerMissing(f"it does not behave as its project documents ({what}), so it is not measured")
