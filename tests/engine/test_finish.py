"""What `finish` keeps: prompt and output, or the prompt alone."""

from __future__ import annotations

import pytest

from tests.support.inside import assert_no_call_waits, driver_of
from tidekv import InvalidRequest

PROMPT = list(range(100, 122))  # Five pages of four tokens and a tail of two.
OUTPUT = list(range(200, 211))


@pytest.mark.parametrize(("keep", "kept"), [(True, 32), (False, 20)])
async def test_an_output_that_is_not_kept_is_never_found_again(make_pair, keep: bool, kept: int) -> None:
    async with make_pair(device_pages=32, host_pages=32) as pair:
        ready = await pair.restore("first", PROMPT)
        pair.engine.grow(ready, len(OUTPUT))
        await pair.engine.finish(ready, OUTPUT, keep=keep)
        await pair.engine.wait_settled()
        assert pair.engine.probe_prefix([*PROMPT, *OUTPUT])["l1"] == kept
        again = await pair.engine.restore(pair.request("second", [*PROMPT, *OUTPUT]))
        assert again.sources == {"l1": kept, "l2": 0, "l3": 0, "transfer": 33 - kept}
        await pair.engine.finish(again)
        await pair.assert_nothing_held()


async def test_output_that_is_not_kept_is_checked_all_the_same(make_pair) -> None:
    async with make_pair(device_pages=32) as pair:
        ready = await pair.restore("first", PROMPT)
        with pytest.raises(InvalidRequest, match="token -1 at position 0"):
            await pair.engine.finish(ready, [-1], keep=False)
        with pytest.raises(InvalidRequest, match="keep"):
            await pair.engine.finish(ready, keep="no")
        await pair.engine.finish(ready, keep=False)
        await pair.assert_nothing_held()


@pytest.mark.parametrize("call", ["finish", "retract"])
async def test_a_call_whose_event_could_not_be_posted_leaves_no_tokens(
    make_pair, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    async with make_pair(device_pages=32) as pair:
        ready = await pair.restore("first", PROMPT)

        def fail(event: object) -> None:
            raise RuntimeError("no room in the queue")

        with monkeypatch.context() as patch:
            patch.setattr(driver_of(pair.engine), "post", fail)
            with pytest.raises(RuntimeError, match="no room"):
                await (pair.engine.finish(ready) if call == "finish" else pair.engine.retract(ready))
        assert_no_call_waits(pair.engine)
        # It is the caller's as before.
        await pair.engine.finish(ready)
        await pair.assert_nothing_held()
