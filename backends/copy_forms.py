"""Which of its two forms a copy between GPU and host takes: a rule of one number, and nothing that acts.

    kernel   one launch reads and writes the pinned host pages over the bus, piece by piece
    async    each stretch of host pages crosses by one asynchronous copy, to or from staged pages on the device

An asynchronous copy keeps the GPU's multiprocessors free and runs at the speed of the bus, once it has begun. What it
costs to begin is paid for each stretch of consecutive host pages, by the CPU (about 6 µs through torch) and by the copy
engine (about 2 µs), so it needs long stretches: at 50 GB/s, 6 µs are 300 KiB. The kernel begins once, whatever is
scattered; but its programs hold multiprocessors for as long as the bus takes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from tidekv.states.errors import InvalidConfig

# Estimated from the costs above, with some distance; not measured yet. `benchmarks/gpu.py` measures both forms over
# stretches of all sizes, and says where they meet.
KERNEL_BELOW_BYTES: Final = 512 << 10


class CopyForm(enum.Enum):
    """How pages cross the bus."""

    KERNEL = "kernel"
    ASYNC = "async"


@dataclass(frozen=True, slots=True)
class CopyChoice:
    """Chooses the kernel for copies whose stretches of host memory have fewer bytes than this on average.

    0 never chooses it. Raises InvalidConfig for a negative number.
    """

    kernel_below_bytes: int = KERNEL_BELOW_BYTES

    def __post_init__(self) -> None:
        if type(self.kernel_below_bytes) is not int or self.kernel_below_bytes < 0:
            raise InvalidConfig(f"copies: kernel_below_bytes must be an int from 0, not {self.kernel_below_bytes!r}")

    def form(self, *, total_bytes: int, stretch_count: int, has_kernel: bool) -> CopyForm:
        """Return the form for a copy of `total_bytes` in `stretch_count` stretches."""
        if has_kernel and total_bytes < stretch_count * self.kernel_below_bytes:
            return CopyForm.KERNEL
        return CopyForm.ASYNC
