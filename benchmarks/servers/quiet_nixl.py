"""Plugin that lets the NIXL of a serving engine share a machine of few cores, for a fair baseline.

NIXL's Python wrapper fixes the pause of its progress thread at 0, so that every process with an agent spins on a core,
idle or not. And while requests wait for remote KV, the loop of vLLM's worker or SGLang's scheduler runs empty and holds
the interpreter lock, so that the threads of transfers wait up to the switch interval for each turn.
"""

from __future__ import annotations

import sys
from typing import Any, Final

PAUSE_US: Final = 1000
SWITCH_S: Final = 0.0005


def register() -> None:
    """Set both in this process. vLLM calls it in each of its processes; a second call has no effect."""
    sys.setswitchinterval(SWITCH_S)
    import nixl._api as api

    if not isinstance(api.nixlBind, _QuietBinding):
        api.nixlBind = _QuietBinding(api.nixlBind)


class _QuietBinding:
    """NIXL's binding, except that agents get a progress thread that sleeps between its turns."""

    def __init__(self, binding: Any) -> None:  # A compiled module.
        self._binding = binding

    def __getattr__(self, name: str) -> Any:  # Whatever the module has.
        return getattr(self._binding, name)

    def nixlAgent(self, name: str, configuration: Any) -> Any:  # noqa: N802  # NIXL's name, and its objects.
        configuration.pthrDelay = PAUSE_US
        return self._binding.nixlAgent(name, configuration)
