"""Keys of the pages before those of a call, for storage engines that place pages by their prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidekv.backends.keys.chain import pack_tokens, page_digests
from tidekv.backends.storage import open_storage
from tidekv.states.types import PageIds

PROMPT = list(range(100, 121))  # Five pages of four tokens and one token.


class Placing:
    """A storage that notes the prefix of each call."""

    takes_prefix_keys = True

    def __init__(self) -> None:
        self.engine = open_storage("memory:")
        self.uri = self.engine.uri
        self.calls: list[tuple[str, list[bytes]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def _note(self, name: str, prefix_keys: Sequence[bytes], keys: Sequence[bytes]) -> None:
        self.calls.append((name, [*prefix_keys, *keys]))

    async def exists(self, keys: Sequence[bytes], *, timeout_s: float, prefix_keys: Sequence[bytes]) -> list[bool]:
        self._note("exists", prefix_keys, keys)
        return await self.engine.exists(keys, timeout_s=timeout_s)

    async def touch(self, keys: Sequence[bytes], *, timeout_s: float, prefix_keys: Sequence[bytes]) -> list[bool]:
        self._note("touch", prefix_keys, keys)
        return await self.engine.touch(keys, timeout_s=timeout_s)  # type: ignore[attr-defined]  # This one has it.

    async def get_into(
        self, keys: Sequence[bytes], pages: PageIds, *, timeout_s: float, prefix_keys: Sequence[bytes]
    ) -> list[bool]:
        self._note("get", prefix_keys, keys)
        return await self.engine.get_into(keys, pages, timeout_s=timeout_s)

    async def put_from(
        self, keys: Sequence[bytes], pages: PageIds, *, timeout_s: float, prefix_keys: Sequence[bytes]
    ) -> list[bool]:
        self._note("put", prefix_keys, keys)
        return await self.engine.put_from(keys, pages, timeout_s=timeout_s)


async def test_an_engine_that_takes_prefix_keys_gets_the_whole_prompt_with_each_call(make_pair) -> None:
    storage = Placing()
    digests = page_digests(pack_tokens(PROMPT[:20]), 4)
    async with make_pair(storage=storage, prefetch="wait_complete") as pair:
        ready = await pair.restore("a", PROMPT)
        await pair.finish(ready, PROMPT, [1])
        await pair.engine.wait_settled()
        await pair.engine.flush()
        # The device gets the first two pages, so that storage is asked for the others only.
        short = PROMPT[:9]
        ready = await pair.restore("b", short)
        await pair.finish(ready, short, [1])
        await pair.engine.wait_settled()
        storage.calls.clear()
        ready = await pair.restore("c", PROMPT)
        assert ready.sources["l3"] == 12
        assert dict(storage.calls)["exists"] == dict(storage.calls)["get"] == digests
        await pair.finish(ready, PROMPT, [1])
        await pair.engine.wait_settled()
        longer = [*PROMPT[:20], *range(500, 509)]
        ready = await pair.restore("d", longer)
        await pair.finish(ready, longer, [1])
        await pair.engine.wait_settled()
        assert dict(storage.calls)["put"] == page_digests(pack_tokens(longer[:28]), 4)
        await pair.assert_nothing_held()
