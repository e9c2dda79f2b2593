"""Names that a server with an event stream of its own gives to its blocks, for the pages that consist of them.

Routers chain the blocks that the server publishes of its device to those that tidekv publishes of host memory and
storage, so both need the same hashes. tidekv cannot compute these: the server names the pages of a prompt with each
call, before they can be in any tier.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from tidekv.engine.kv_events.messages import BlockHash


class PromptWords(NamedTuple):
    """What the events say of the pages of one prompt, in the server's words."""

    lora_id: int | None = None
    lora_name: str | None = None
    salt: str | None = None

    def extra_keys(self, blocks: int, *, is_first: bool) -> list[tuple[str, ...] | None] | None:
        """Return the extra keys of consecutive blocks: the adapter in each, the salt in a prompt's first one."""
        adapter = (self.lora_name,) if self.lora_name is not None else ()
        keys = [adapter] * blocks
        if is_first and self.salt is not None:
            keys[0] = (*adapter, self.salt)
        return [each or None for each in keys] if any(keys) else None


class ServerName(NamedTuple):
    """Name of one page: the hashes of its blocks, in order, and the words of its prompt."""

    hashes: tuple[BlockHash, ...]
    words: PromptWords


class ServerNames:
    """Names of pages that are not in any tier yet, by digest; those named first go first.

    `block_size` is that of the server in tokens, `kind` its name of what its only group of layers keeps.
    """

    def __init__(self, *, block_size: int, kind: str, names_max: int) -> None:
        self.block_size = block_size
        self.kind = kind
        self._names_max = names_max
        self._names: OrderedDict[bytes, ServerName] = OrderedDict()

    def put(self, digest: bytes, name: ServerName) -> None:
        """Name a page."""
        self._names[digest] = name
        self._names.move_to_end(digest)
        if len(self._names) > self._names_max:
            self._names.popitem(last=False)

    def find(self, digest: bytes) -> ServerName | None:
        """Return the name of a page; it stays, since the page may come and go while its prompt is served."""
        return self._names.get(digest)

    def clear(self) -> None:
        """Forget all names."""
        self._names.clear()
