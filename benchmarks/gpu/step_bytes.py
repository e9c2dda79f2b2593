"""Every byte: copies in all forms, layouts and page lists, against a copy page by page between bytes of all pages."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.gpu.copy_rig import FORMS, CopyRig
from benchmarks.gpu.report import Report, Setting
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.host.pool import HostPool
from tidekv.backends.layout import KVLayout
from tidekv.backends.memory import PageIndex
from tidekv.backends.page_layout import Layout, PageLayout

RUN_PAGES = 8


def layouts(page_size: int, *, layers: int) -> dict[str, Layout]:
    """Return the layouts: plain, 8-bit with scales, latent, and one whose pieces no vector divides."""

    def kv(dtype: str, heads: int, dim: int, kind: str = "mha", layers: int = layers) -> KVLayout:
        return KVLayout(
            num_layers=layers, num_kv_heads=heads, head_dim=dim, dtype=dtype, page_size=page_size, kind=kind
        )

    return {
        "bfloat16": kv("bfloat16", 4, 128),
        "fp8": kv("float8_e4m3fn", 4, 128),
        "fp8 with scales": PageLayout.of(full=kv("float8_e4m3fn", 4, 128), scales=kv("float32", 4, 1)),
        "latent": kv("bfloat16", 1, 576, kind="mla"),
        "with a draft layer of odd pieces": PageLayout.of(
            full=kv("bfloat16", 2, 64), draft=kv("uint8", 1, 5, layers=1)
        ),
    }


def pool_of(layout: Layout, pages: int, device: torch.device, *, wrapped: bool) -> DevicePool:
    """Allocate a pool, or wrap tensors of our own as an engine would."""
    if not wrapped:
        return DevicePool.allocate(layout, pages, device=device)
    if isinstance(layout, PageLayout):
        return DevicePool.join(**{name: pool_of(shape, pages, device, wrapped=True) for name, shape in layout.groups})
    parts = [
        [
            torch.zeros(pages, *layout.piece_shape, dtype=layout.torch_dtype, device=device)
            for _ in range(layout.num_layers)
        ]
        for _ in range(layout.tensors_per_layer)
    ]
    return DevicePool.wrap(parts[0], parts[1] if len(parts) > 1 else None, layout)


@dataclass
class Model:
    """Both pools, and the bytes that they must hold."""

    device: DevicePool
    host: HostPool
    on_device: torch.Tensor
    on_host: torch.Tensor

    @classmethod
    def of(cls, device: DevicePool, host: HostPool) -> Model:
        """Fill both pools with random bytes."""
        contents = [
            torch.randint(0, 256, (pool.num_pages, pool.layout.page_bytes), dtype=torch.uint8)
            for pool in (device, host)
        ]
        device.write_pages(range(device.num_pages), contents[0])
        host.write_pages(range(host.num_pages), contents[1])
        return cls(device, host, *contents)

    def move(self, host: PageIndex, device: PageIndex, *, to_device: bool) -> None:
        """Copy page by page."""
        for below, above in zip(host.tolist(), device.tolist(), strict=True):
            if to_device:
                self.on_device[above] = self.on_host[below]
            else:
                self.on_host[below] = self.on_device[above]

    def wrong(self) -> str:
        """Describe the first difference; empty without one. Pages that no copy named are compared, too."""
        for name, pool, wanted in (("device", self.device, self.on_device), ("host", self.host, self.on_host)):
            found = pool.read_pages(range(pool.num_pages)).cpu()
            if not torch.equal(found, wanted):
                pages, places = (found != wanted).nonzero(as_tuple=True)
                return f"{len(set(pages.tolist()))} {name} pages, first page {int(pages[0])} from byte {int(places[0])}"
        return ""


def page_lists(count: int, total: int, random: np.random.Generator, *, in_runs: bool) -> tuple[PageIndex, PageIndex]:
    """Return host pages for both directions: distinct, scattered or in runs."""
    if in_runs:
        starts = random.permutation(total // RUN_PAGES)[: -(-2 * count // RUN_PAGES)] * RUN_PAGES
        chosen = (starts[:, None] + np.arange(RUN_PAGES)).reshape(-1)[: 2 * count]
    else:
        chosen = random.permutation(total)[: 2 * count]
    return chosen[:count].astype(np.int64), chosen[count:].astype(np.int64)


async def check_copies(rig: CopyRig, model: Model, form: str, *, counts: tuple[int, ...]) -> str:
    """Copy both ways at once, whole and by layer. Describes the first difference."""
    random = np.random.default_rng(7)
    total = model.host.num_pages
    async with rig.copier(model.device, model.host, form) as copier:
        for count, in_runs, by_layer in itertools.product(counts, (False, True), (False, True)):
            up, down = page_lists(count, total, random, in_runs=in_runs)
            above = random.permutation(model.device.num_pages)[: 2 * count].astype(np.int64)
            up_above, down_above = above[:count], above[count:]
            storing = copier.to_host(down_above, down)
            if by_layer:
                layered = copier.to_device_by_layer(up, up_above)
                await layered.launched
                for layer in range(layered.layer_count):
                    await layered.arrived[layer]
                loading = layered.done
            else:
                loading = copier.to_device(up, up_above)
            await asyncio.gather(storing, loading)
            model.move(up, up_above, to_device=True)
            model.move(down, down_above, to_device=False)
            if wrong := model.wrong():
                return f"{count} pages, {'in runs' if in_runs else 'scattered'}, by layer {by_layer}: {wrong}"
    return ""


def run(setting: Setting, report: Report) -> None:
    """Check all of them."""
    torch.manual_seed(1)
    layers, pages = (2, 32) if setting.short else (4, 64)
    counts = (1, 7, 16) if setting.short else (1, 7, 32)
    page_sizes = (4,) if setting.short else (16, 64)
    rig = CopyRig(setting)
    for page_size in page_sizes:
        for name, layout in layouts(page_size, layers=layers).items():
            for wrapped, form in itertools.product((False, True), FORMS):
                what = f"{name}, pages of {page_size}, {'lent tensors' if wrapped else 'own pool'}, {form}"
                if not rig.has_form(form):
                    report.note(f"{what}: there is no Triton")
                    continue
                device, host = pool_of(layout, pages, setting.device, wrapped=wrapped), HostPool.allocate(layout, pages)
                try:
                    wrong = asyncio.run(check_copies(rig, Model.of(device, host), form, counts=counts))
                except Exception as error:
                    wrong = f"{type(error).__name__}: {error}"
                report.check(what, not wrong, wrong)
    rig.close()
