"""A request's pages and its token budget: a prompt of the pool's size, its retraction, and `max_new_tokens`."""

from __future__ import annotations

import pytest

from tests.support.inside import reserve_of
from tidekv import AdmissionOptions, InvalidRequest, OutOfPages

PAGE = 4


async def test_a_prompt_of_the_pools_size_is_served_and_cannot_grow(make_pair) -> None:
    async with make_pair(device_pages=8) as pair:
        prompt = list(range(100, 132))
        ready = await pair.restore("whole", prompt)
        with pytest.raises(OutOfPages):
            pair.engine.grow(ready)
        await pair.finish(ready, prompt, [1])
        with pytest.raises(InvalidRequest, match="needs 9 device pages; the pool has 8"):
            await pair.engine.restore(pair.request("more", list(range(33))))


async def test_a_request_in_all_pages_is_retracted_and_resumed(make_pair) -> None:
    async with make_pair(device_pages=8) as pair:
        prompt = list(range(100, 120))
        ready = await pair.restore("r", prompt)
        pair.engine.grow(ready, 9)
        output = list(range(10))
        retracted = await pair.engine.retract(ready, output)
        assert (await pair.restore("other", list(range(500, 532)))).prompt_tokens == 32
        await pair.engine.abort("other")
        ready = await pair.engine.resume(retracted)
        assert ready.prompt_tokens == len(prompt) + len(output)
        pair.engine.grow(ready, 2)
        with pytest.raises(OutOfPages):
            pair.engine.grow(ready)
        await pair.engine.finish(ready)


async def test_max_new_tokens_bounds_the_reserve_and_what_is_left_of_it_counts_after_a_retraction(make_pair) -> None:
    async with make_pair(growth_reserve_pages=3) as pair:
        reserves = {}
        for tokens in (0, 1, 3, 4, 7, 8, 1000):
            # Six tokens fill a page and a half: KV of three more needs another page. The last token has none.
            ready = await pair.restore(f"r{tokens}", [tokens, 1, 2, 3, 4, 5], max_new_tokens=tokens)
            reserves[tokens] = len(reserve_of(ready))
            await pair.engine.finish(ready)
        assert reserves == {0: 3, 1: 0, 3: 0, 4: 1, 7: 1, 8: 2, 1000: 3}
        ready = await pair.restore("budget", [9, 1, 2, 3, 4, 5], max_new_tokens=8)
        pair.engine.grow(ready, 5)
        retracted = await pair.engine.retract(ready, [1] * 6)
        assert retracted.request.max_new_tokens == 2
        ready = await pair.engine.resume(retracted)
        # Twelve tokens fill their pages; the next token is known, and the last one has no KV: one page more.
        assert len(reserve_of(ready)) == 1
        assert len(pair.engine.grow(ready, 9)) == 3, "growth beyond the budget is possible"
        await pair.engine.finish(ready)


async def test_running_requests_are_bounded_by_the_option(make_pair) -> None:
    assert AdmissionOptions().running_max == 0
    async with make_pair(running_max=1) as pair:
        ready = await pair.restore("r0", [1, 2, 3])
        # A bounded wait: it ends with the deadline, in the queue.
        with pytest.raises(Exception, match="deadline"):
            await pair.engine.restore(pair.request("r1", [4, 5, 6], deadline_s=0.05))
        await pair.engine.finish(ready)
        await pair.engine.finish(await pair.restore("r2", [4, 5, 6]))
        assert pair.core()["running_waits"] == 1
