"""Tools for the figures: pools of a given size, copies in one form, timing on the device, and the limit of its bus.

Everything goes through a `Rig`, so that the program itself can be run without a GPU, with meaningless figures.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from benchmarks.gpu.copy_rig import ALWAYS, NEVER, memmove_launch
from benchmarks.gpu.report import Setting
from tidekv.backends.copies.cuda import CopyChoice, CopyForm, CudaMover, triton_launch
from tidekv.backends.copies.pieces import Launch
from tidekv.backends.copies.streams import streams_of
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.host.pool import HostPool
from tidekv.backends.layout import KVLayout
from tidekv.backends.memory import PageIndex

TO_DEVICE, TO_HOST = "to device", "to host"


@dataclass(frozen=True)
class Shape:
    """KV of a model on one GPU, and the size of its pages."""

    name: str
    page_size: int
    layers: int = 32
    kv_heads: int = 8

    @property
    def layout(self) -> KVLayout:
        """Return the layout in bfloat16, with heads of 128."""
        return KVLayout(
            num_layers=self.layers,
            num_kv_heads=self.kv_heads,
            head_dim=128,
            dtype="bfloat16",
            page_size=self.page_size,
        )

    def __str__(self) -> str:
        return f"{self.name}, page {self.page_size}"


SHAPES = (
    Shape("8 heads", 64),
    Shape("8 heads", 16),
    Shape("1 of 8 ranks", 64, kv_heads=1),
    Shape("1 of 8 ranks", 16, kv_heads=1),
)
# Pages of 32 KiB, from which stretches of any length can be formed.
SMALL = Shape("4 layers, 1 head", 16, layers=4, kv_heads=1)


@dataclass(frozen=True, kw_only=True)
class Rig:
    """A device, the size and number of copies, and the dimensions of the decode-like step beside copies."""

    device: torch.device
    total_bytes: int
    rounds: int
    hidden: int = 8192
    context: int = 1024
    steps: int = 300
    load_s: float = 3.0
    matmul: int = 8192
    find_launch: Callable[[], Launch | None] = triton_launch
    shapes: tuple[Shape, ...] = SHAPES
    small: Shape = SMALL

    @classmethod
    def of(cls, setting: Setting) -> Rig:
        """Return a rig for the current GPU: 512 MiB, or an eighth of its free memory if that is less.

        Without a GPU everything is tiny, and nothing is a figure.
        """
        if setting.on_cuda:
            free_bytes, _ = torch.cuda.mem_get_info()
            total_bytes = min((64 if setting.short else 512) << 20, free_bytes // 8)
            return cls(device=setting.device, total_bytes=total_bytes, rounds=3 if setting.short else 7)
        tiny = tuple(Shape("tiny", page_size, layers=2, kv_heads=1) for page_size in (4, 1))
        return cls(
            device=setting.device,
            total_bytes=1 << 16,
            rounds=1,
            hidden=16,
            context=4,
            steps=2,
            load_s=0.05,
            matmul=16,
            find_launch=lambda: memmove_launch,
            shapes=tiny,
            small=Shape("tiny", 1, layers=1, kv_heads=1),
        )

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gb_s(self, work: Callable[[], None], total_bytes: int) -> float:
        """Return GB/s of work on a stream of its own, launch included: the median of the rounds after a warm-up."""
        stream, spent_s = streams_of(self.device).make(), []
        for _ in range(self.rounds + 1):
            self.synchronize()
            began_s = time.perf_counter()
            stream.run(work)
            self.synchronize()
            spent_s.append(time.perf_counter() - began_s)
        return total_bytes / statistics.median(spent_s[1:]) / 1e9


class Pools:
    """A device pool and a host pool of twice the pages that are copied at a time, and movers for both forms."""

    def __init__(self, rig: Rig, shape: Shape) -> None:
        layout = shape.layout
        self.rig = rig
        self.shape = shape
        self.count = max(2, rig.total_bytes // layout.page_bytes)
        self.total_bytes = self.count * layout.page_bytes
        self.device = DevicePool.allocate(layout, 2 * self.count, device=rig.device)
        self.host = HostPool.allocate(layout, 2 * self.count)

    def mover(self, kernel_below_bytes: int | None = None) -> CudaMover:
        """Return a mover with its kernel compiled. By default it chooses the form as the engine does."""
        choice = CopyChoice() if kernel_below_bytes is None else CopyChoice(kernel_below_bytes)
        mover = CudaMover(self.device, self.host, choice, find_launch=self.rig.find_launch)
        streams_of(self.rig.device).make().run(mover.warm_up)
        self.rig.synchronize()
        return mover

    def pages(self, run_pages: int, *, seed: int) -> PageIndex:
        """Return distinct pages in runs of this length, at random places."""
        runs = -(-self.count // run_pages)
        starts = np.random.default_rng(seed).permutation(2 * self.count // run_pages)[:runs] * run_pages
        return (starts[:, None] + np.arange(run_pages)).reshape(-1)[: self.count].astype(np.int64)

    def gb_s(self, mover: CudaMover, way: str, run_pages: int = 1) -> float:
        """Return GB/s of copies of all pages, at random places of the device, in runs of host pages."""
        above, below = self.pages(1, seed=1), self.pages(run_pages, seed=2)
        count = min(len(above), len(below))
        above, below = above[:count], below[:count]
        work = partial(mover.to_device, below, above) if way == TO_DEVICE else partial(mover.to_host, above, below)
        return self.rig.gb_s(work, count * self.device.layout.page_bytes)


@dataclass(frozen=True)
class Speed:
    """Speed of one form for pages in one direction; `limit_gb_s` is that of one pinned copy of as many bytes."""

    shape: Shape
    way: str
    form: CopyForm
    chosen: bool
    gb_s: float
    limit_gb_s: float

    @property
    def percent(self) -> float:
        """Percent of the limit."""
        return 100 * self.gb_s / self.limit_gb_s


def pinned_limits(rig: Rig) -> dict[str, float]:
    """Return GB/s of one asynchronous copy of contiguous pinned memory, in each direction."""
    pools = Pools(rig, rig.small)  # Keeps its memory pinned while it is referenced.
    host = pools.host.buffer.view(-1)[: rig.total_bytes]
    device = torch.empty(len(host), dtype=torch.uint8, device=rig.device)

    def up() -> None:
        device.copy_(host, non_blocking=True)

    def down() -> None:
        host.copy_(device, non_blocking=True)

    return {TO_DEVICE: rig.gb_s(up, len(host)), TO_HOST: rig.gb_s(down, len(host))}


def page_speeds(rig: Rig, limits: dict[str, float]) -> list[Speed]:
    """Return the speeds of pages at random places on both sides, in all shapes, directions and forms."""
    speeds = []
    for shape in rig.shapes:
        pools = Pools(rig, shape)
        chosen = pools.mover().form(pools.pages(1, seed=2))
        kernel, asynchronous = pools.mover(ALWAYS), pools.mover(NEVER)
        ways = [(CopyForm.KERNEL, kernel, TO_DEVICE)] if kernel.has_kernel else []
        ways += [(CopyForm.ASYNC, asynchronous, way) for way in limits]
        for form, mover, way in ways:
            is_chosen = way == TO_HOST or form is chosen
            speeds.append(Speed(shape, way, form, is_chosen, pools.gb_s(mover, way), limits[way]))
    return speeds


def meeting_point(rig: Rig) -> list[tuple[int, dict[CopyForm, float]]]:
    """Return GB/s of both forms to the device, by bytes of a stretch; empty without a kernel."""
    pools = Pools(rig, rig.small)
    movers = {CopyForm.KERNEL: pools.mover(ALWAYS), CopyForm.ASYNC: pools.mover(NEVER)}
    if not movers[CopyForm.KERNEL].has_kernel:
        return []
    found = []
    run_pages = 1
    while run_pages <= min(128, pools.count):
        speeds = {form: pools.gb_s(mover, TO_DEVICE, run_pages) for form, mover in movers.items()}
        found.append((run_pages * pools.device.layout.page_bytes, speeds))
        run_pages *= 2
    return found
