"""Published routers believe what live engines have: `.ci/routers` makes their environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.router_program import NO_NAMESPACE, ROUTERS

pytest.importorskip("zmq")
ENVIRONMENT = os.environ.get("TIDEKV_TEST_ROUTERS")


@pytest.mark.slow
@pytest.mark.skipif(ENVIRONMENT is None, reason="TIDEKV_TEST_ROUTERS names no environment: see .ci/routers")
@pytest.mark.parametrize("name", ROUTERS)
def test_a_published_router_believes_what_the_engines_have(name: str) -> None:
    command = [sys.executable, "-m", "tests.support.router_program", str(ENVIRONMENT), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode == NO_NAMESPACE:
        pytest.skip("no network namespace can be made here, and the routers listen on all addresses")
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == []
