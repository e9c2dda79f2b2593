"""The snippet of the quick start that tries again, run against prefill workers that fail."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.snippets import snippet
from tidekv import RequestFailed
from tidekv.testing import LoopbackPair, loopback_pair

TOKENS = list(range(10))


@pytest.fixture
def names() -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(snippet("docs/quickstart.md", "import asyncio\nimport time\n"), found)
    return found


@pytest.fixture
def pauses(names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that the snippet makes, which take no time here."""
    made: list[float] = []

    class Asyncio:
        @staticmethod
        async def sleep(seconds: float) -> None:
            made.append(seconds)
            await asyncio.sleep(0)

    names["asyncio"] = Asyncio
    return made


async def served(pair: LoopbackPair, ready: Any) -> None:
    assert pair.wrong_pages(ready, TOKENS) == []
    await pair.engine.finish(ready)
    await pair.check_idle()


async def test_the_second_prefill_of_the_list_serves_if_the_first_is_not_there(
    names: dict[str, Any], pauses: list[float]
) -> None:
    async with loopback_pair() as pair:
        await served(pair, await names["restore_patiently"](pair.engine, "r1", TOKENS, ["nobody:1", "prefill"]))
        assert pauses == []


async def test_what_may_pass_is_tried_again_with_growing_pauses(names: dict[str, Any], pauses: list[float]) -> None:
    async with loopback_pair() as pair:
        restore, asked = pair.engine.restore, 0

        async def fails_twice(request: Any) -> Any:
            nonlocal asked
            asked += 1
            if asked <= 2:
                raise RequestFailed(request.request_id, "connection refused", "test")
            return await restore(request)

        pair.engine.restore = fails_twice  # type: ignore[method-assign]
        await served(pair, await names["restore_patiently"](pair.engine, "r1", TOKENS, ["prefill"]))
        assert pauses == [0.1, 0.2]


@pytest.mark.parametrize("cause", ["aborted", "deadline", "wrong secret"])
async def test_what_cannot_pass_is_raised_at_once(names: dict[str, Any], pauses: list[float], cause: str) -> None:
    class Engine:
        async def restore(self, request: Any) -> Any:
            raise RequestFailed(request.request_id, cause)

    with pytest.raises(RequestFailed, match=cause):
        await names["restore_patiently"](Engine(), "r1", TOKENS, ["prefill"])
    assert pauses == []
