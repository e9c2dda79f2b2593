"""Keys of the pages before those of a call, for storage engines that place pages by their prefix."""

from __future__ import annotations

from tests.support.placing_storage import PlacingStorage
from tidekv.backends.keys.chain import pack_tokens, page_digests

PROMPT = list(range(100, 121))  # Five pages of four tokens and one token.


async def test_an_engine_that_takes_prefix_keys_gets_the_whole_prompt_with_each_call(make_pair) -> None:
    storage = PlacingStorage()
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


async def test_a_prompt_that_prefill_stores_is_named_to_the_engine_with_each_call(make_pair) -> None:
    storage = PlacingStorage()
    digests = page_digests(pack_tokens(PROMPT[:20]), 4)
    async with make_pair(prefill_storage=storage) as pair:
        ready = await pair.restore("a", PROMPT[:9])
        await pair.peer.wait_stored()
        await pair.finish(ready, PROMPT[:9], [1])
        storage.calls.clear()
        ready = await pair.restore("b", PROMPT)
        await pair.peer.wait_stored()
        await pair.finish(ready, PROMPT, [1])
        # Two pages are there already: the others are put.
        assert [len(keys) for name, keys in storage.calls if name == "put"] == [5]
        assert all(keys == digests[: len(keys)] for _, keys in storage.calls)
        assert {name for name, _ in storage.calls} == {"touch", "put"}
