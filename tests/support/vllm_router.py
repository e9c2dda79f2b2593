"""A router that is too simple to be wrong: it believes the KV events of vLLM workers, and no inconsistent one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any  # vLLM's events are not typed here.

from tests.support.vllm_contract import BLOCK, AllBlocksCleared, BlockStored, maybe_convert_block_hash
from tests.support.vllm_handover import hashes_of

MEDIA = ("CPU", "STORAGE")


class Listener:
    """What one worker has, by its events."""

    def __init__(self) -> None:
        self.held: dict[str, set[int]] = defaultdict(set)
        """Hashes by medium."""
        self.prompt_of: dict[int, tuple[object, ...]] = {}
        """All that determines a block, by hash: salt, adapter, and the tokens up to its end."""

    def take(self, batches: Iterable[Sequence[Any]]) -> None:
        for event in (event for batch in batches for event in batch):
            if isinstance(event, AllBlocksCleared):
                self.held.clear()
            elif isinstance(event, BlockStored):
                self._store(event)
            else:
                assert set(event.block_hashes) <= self.held[event.medium], "what was never stored is removed"
                assert (event.group_idx, event.locality, event.ownership) == (0, None, None)
                self.held[event.medium] -= set(event.block_hashes)

    def _store(self, event: Any) -> None:
        hashes, keys = event.block_hashes, event.extra_keys or [None] * len(event.block_hashes)
        assert event.medium in MEDIA
        assert (event.group_idx, event.kv_cache_spec_kind) == (0, "full_attention")
        assert (event.locality, event.ownership, event.block_size) == (None, None, BLOCK)
        assert len(event.token_ids) == len(hashes) * BLOCK
        assert len(keys) == len(hashes)
        assert not set(hashes) & self.held[event.medium], "stored twice"
        parent = event.parent_block_hash
        assert parent is None or any(parent in self.held[medium] for medium in MEDIA), "before its parent"
        for at, (one, extra) in enumerate(zip(hashes, keys, strict=True)):
            tokens = event.token_ids[at * BLOCK : (at + 1) * BLOCK]
            before: tuple[object, ...] = () if parent is None else self.prompt_of[parent]
            self.prompt_of[one] = (*before, extra, *tokens)
            self.held[event.medium].add(one)
            parent = one

    def of(self, tokens: Sequence[int], salt: str | None = None) -> list[set[str]]:
        """The media of each full block of a prompt, found by its content."""
        known = {prompt: one for one, prompt in self.prompt_of.items()}
        prompt: tuple[object, ...] = ()
        found = []
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            extra = None if start or salt is None else (salt,)
            prompt = (*prompt, extra, *tokens[start : start + BLOCK])
            one = known.get(prompt)
            found.append({medium for medium in MEDIA if one in self.held[medium]})
        return found

    def reach(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """Blocks of a prompt that are somewhere, from the first one on."""
        media = self.of(tokens, salt)
        return next((at for at, one in enumerate(media) if not one), len(media))


def external_hashes(tokens: Sequence[int], salt: str | None = None) -> list[int]:
    """What vLLM's events call the blocks of a prompt."""
    return [maybe_convert_block_hash(one) for one in hashes_of(tokens, None, salt)]
