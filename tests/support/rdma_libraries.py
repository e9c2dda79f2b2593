"""The system's RDMA libraries, which crash the end of a process that has loaded those of NIXL as well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waits import LIMIT_S

VARIABLE = "TIDEKV_TEST_RDMA_LIBRARIES"
"""Names a folder into which Debian's packages ibverbs-providers, libibverbs1 and libnl-route-3-200 are unpacked."""
BARE_AGENT = "from nixl import _api as api; api.nixl_agent('bare', api.nixl_agent_config(backends=['UCX']))"
CRASHED = -11


def process_environment(libraries: str, **changes: str) -> dict[str, str]:
    """Return the environment of a process that finds RDMA libraries, or skip the test where there are none.

    `libraries` is "with" or "without".
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")} | changes
    if libraries == "without":
        return environment
    if folder := os.environ.get(VARIABLE):
        found = [
            str(path) for path in (*Path(folder).glob("usr/lib/*-linux-gnu"), *Path(folder).glob("lib/*-linux-gnu"))
        ]
        environment["LD_LIBRARY_PATH"] = os.pathsep.join([*found, environment.get("LD_LIBRARY_PATH", "")]).strip(":")
    bare = [sys.executable, "-c", BARE_AGENT]
    done = subprocess.run(bare, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode != CRASHED:
        pytest.skip(f"a bare NIXL agent ends in order here: set {VARIABLE}, see .ci/run")
    return environment
