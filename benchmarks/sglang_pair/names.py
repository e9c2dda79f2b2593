"""Names by which a harness and its plugins within SGLang know one another."""

from __future__ import annotations

from typing import Final

REPORT: Final = "tidekv_benchmark"
"""Key of `plugin.watch`'s report in the internal state that `/server_info` shows."""
HANG: Final = "TIDEKV_BENCHMARK_HANG"
"""Environment variable of a server: while the file that it names exists, storage does not answer."""
HANG_POLL_S: Final = 0.05
