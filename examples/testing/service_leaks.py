"""A property-based test of a service of your own: whatever its clients do, no page and no lock stays behind.

Put your code in the place of `Service`, and run `pytest examples/testing/service_leaks.py`.
"""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from tidekv import DecodeEngine, DecodeRequest
from tidekv.testing import loopback_pair


class Service:
    """The code under test: it serves one request to its end."""

    def __init__(self, engine: DecodeEngine) -> None:
        self.engine = engine

    async def serve(self, request: DecodeRequest, output: list[int], end: str) -> None:
        ready = await self.engine.restore(request)
        self.engine.grow(ready, len(output))
        if end == "client left":
            await self.engine.abort(request.request_id)
        elif end == "preempted":
            self.engine.drop(await self.engine.retract(ready, output))
        else:
            await self.engine.finish(ready, output)


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=20)  # Few different tokens, so that prompts share prefixes.
TURNS = st.lists(st.tuples(PROMPTS, st.sampled_from(["served", "client left", "preempted"])), max_size=6)


async def serve_all(service: type[Service], turns: list[tuple[list[int], str]]) -> None:
    """Serve all turns at the same time, and require that everything was given back."""
    async with loopback_pair() as pair, asyncio.timeout(60):
        serving = service(pair.engine)
        async with asyncio.TaskGroup() as together:
            for number, (tokens, end) in enumerate(turns):
                together.create_task(serving.serve(pair.request(f"r{number}", tokens), [7, 8], end))
        await pair.check_idle()


@given(TURNS)
@settings(deadline=None, max_examples=25)
def test_nothing_stays_behind(turns: list[tuple[list[int], str]]) -> None:
    asyncio.run(serve_all(Service, turns))
