"""Memory of requests in flight is counted at the moment at which all of them have rooms."""

from __future__ import annotations

import uvloop

from benchmarks.request_memory import KEY_BYTES, LOAD, measure


def test_a_request_in_flight_takes_its_tokens_and_little_else() -> None:
    allocated, keys = uvloop.run(measure(12))
    # The half that is not cached, and the third of the other half that storage has.
    assert keys == KEY_BYTES * LOAD.prompt_tokens * (1 / 2 + 1 / 6)
    assert KEY_BYTES * LOAD.prompt_tokens < allocated - keys < 40_000
