"""Python's cycle collector, as a measuring program sets it."""

from __future__ import annotations

import gc

ADVISED_THRESHOLDS = (50_000, 20, 50)


def set_collector(collector: str = "advised") -> None:
    """Set Python's cycle collector as docs/operating.md advises ("advised"), or leave its default."""
    if collector == "advised":
        gc.collect()
        gc.freeze()
        gc.set_threshold(*ADVISED_THRESHOLDS)
