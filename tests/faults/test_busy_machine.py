"""A pair whose machine has no processor to spare becomes slow: no request fails, neither singly nor in waves."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.waits import LIMIT_S

pytestmark = [pytest.mark.nixl, pytest.mark.slow]

BUSY_PROCESSES = 6
WAVES, REQUESTS = 2, 12
DEADLINE_S = 30.0
DEFAULTS = {"heartbeat_s": 0.5, "peer_silence_s": 2.0, "retries_late": True}
"""Those of an embedder who sets nothing; other tests are more patient, and do not try again."""


@pytest.fixture
def busy() -> Iterator[None]:
    """Processes that take all the time they get; they end with the test, or by themselves."""
    spins = f"import time\nend = time.monotonic() + {2 * LIMIT_S}\nwhile time.monotonic() < end: pass"
    with contextlib.ExitStack() as stack:
        for _ in range(BUSY_PROCESSES):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", spins]))
            stack.callback(process.kill)
        yield


async def test_six_busy_processes_beside_a_pair_fail_no_request_that_has_30_s(
    spawn_prefill: Any, decode_over_nixl: Any, prompt: Any, busy: None
) -> None:
    child = await spawn_prefill()
    async with (
        asyncio.timeout(LIMIT_S),
        decode_over_nixl([child.ready.address], device_pages=96, host_pages=96, **DEFAULTS) as decode,
    ):
        for wave in range(WAVES):
            late = decode.core()["late_retries"]
            if wave % 2:
                child.signal(signal.SIGSTOP)
            turns = [
                asyncio.create_task(
                    decode.serve(f"r{wave}.{number}", prompt(1 + wave * REQUESTS + number, 6), deadline_s=DEADLINE_S)
                )
                for number in range(REQUESTS)
            ]
            if wave % 2:
                # It gets no turn for longer than the silence that decode accepts.
                tried = asyncio.create_task(decode.until(lambda late=late: decode.core()["late_retries"] > late))
                await asyncio.wait([tried, *turns], return_when=asyncio.FIRST_COMPLETED)
                tried.cancel()
                child.signal(signal.SIGCONT)
            ended = await asyncio.gather(*turns, return_exceptions=True)
            failed = [error for error in ended if isinstance(error, BaseException)]
            assert not failed, (wave, failed, decode.core()["late_retries"])
        await decode.assert_nothing_held()
