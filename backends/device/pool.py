"""The device pool (L1): pages in the tensors that the model's attention reads and writes, one per layer and part.

Layer first: piece `i` of page `p` is row `p` of tensor `i`, whichever group of layers the piece belongs to. The pool
has no page table and does not know the owners of its pages; it knows where bytes lie, and moves them for tests and
checks. Bulk copies are in `tidekv.backends.copies.copier`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy.typing as npt
import torch

from tidekv.backends.layout import FULL, KVLayout
from tidekv.backends.memory import ALIGNMENT_BYTES, PageIndex, allocate_host_bytes, check_page_count, page_index
from tidekv.backends.page_layout import Layout, PageLayout
from tidekv.states.errors import InvalidConfig, InvalidRequest, OutOfMemory
from tidekv.states.types import PageIds, PoolMemory, Segment
from tidekv.states.validation import unknown


class PoolGroup:
    """One group of layers in a device pool: views of the pool's memory, with no memory of their own.

    `tensors` are the group's pieces in layout order, each [num_pages, page_size, num_kv_heads, head_dim] of its dtype;
    `k[layer]` and `v[layer]` are the same tensors by layer (kind "mla": `k` has the latent tensors, `v` is empty). The
    model may read and write them in place. `rows[i]` is piece i of all pages as uint8 [num_pages, piece_bytes]; `block`
    is all of them as uint8 [pieces, num_pages, piece_bytes] if they are contiguous, else None.
    """

    __slots__ = ("block", "k", "layout", "name", "rows", "tensors", "v")

    def __init__(
        self, name: str, layout: KVLayout, tensors: Sequence[torch.Tensor], block: torch.Tensor | None
    ) -> None:
        self.name = name
        self.layout = layout
        self.tensors = tuple(tensors)
        self.block = block
        step = layout.tensors_per_layer
        self.k = self.tensors[::step]
        self.v = self.tensors[1::step] if step == 2 else ()
        self.rows = tuple(tensor.view(len(tensor), -1).view(torch.uint8) for tensor in self.tensors)


class DevicePool:
    """`num_pages` pages of a layout in device memory. Make one with `allocate`, `wrap` or `join`.

    `k[layer]` and `v[layer]` are tensors [num_pages, page_size, num_kv_heads, head_dim] of the layout's dtype, which
    the model may read and write in place; with kind "mla" `k` has the latent tensors and `v` is empty. If pages have
    several groups these are the group "full", and `group(name)` has each. `rows[i]` is piece i of all pages over all
    groups, as uint8 [num_pages, bytes of the piece]. The pool keeps the tensors alive.
    """

    def __init__(self, *, layout: Layout, groups: Sequence[PoolGroup]) -> None:
        self.layout = layout
        self.groups = tuple(groups)
        full = self.groups[0]
        self.k, self.v = full.k, full.v
        self.num_pages = len(full.tensors[0])
        self.device = full.tensors[0].device
        self.rows = tuple(row for group in self.groups for row in group.rows)
        self.memory = PoolMemory(
            segments=tuple(
                Segment(
                    address=row.data_ptr(),
                    piece_bytes=row.shape[1],
                    stride_bytes=max(row.stride(0), row.shape[1]),
                    page_count=self.num_pages,
                )
                for row in self.rows
            ),
            page_count=self.num_pages,
            kind="VRAM" if self.device.type == "cuda" else "DRAM",
            device=self.device.index or 0,
        )

    @classmethod
    def allocate(cls, layout: Layout, num_pages: int, device: str | torch.device = "cpu") -> DevicePool:
        """Allocate a zeroed pool on "cpu" or a CUDA device; CPU memory is touched at once.

        Raises InvalidConfig for a wrong count or device, OutOfMemory if there is not enough.
        """
        check_page_count(num_pages, what="device pool")
        place = _usable_device(device)
        starts, total_bytes = _group_starts(layout, num_pages)
        if place.type == "cpu":
            flat = allocate_host_bytes(total_bytes, what="device pool on cpu")
        else:
            try:
                flat = torch.zeros(total_bytes, dtype=torch.uint8, device=place)
            except torch.OutOfMemoryError as error:
                raise OutOfMemory(f"device pool needs {total_bytes} bytes on {place}: {error}") from error
        groups = []
        for (name, shape), start in zip(layout.groups, starts, strict=True):
            part = flat[start : start + num_pages * shape.page_bytes]
            block = part.view(shape.piece_count, num_pages, shape.piece_bytes)
            tensors = [row.view(shape.torch_dtype).view(num_pages, *shape.piece_shape) for row in block]
            groups.append(PoolGroup(name, shape, tensors, block))
        return cls(layout=layout, groups=groups)

    @classmethod
    def wrap(
        cls, k_buffers: Sequence[torch.Tensor], v_buffers: Sequence[torch.Tensor] | None, layout: KVLayout
    ) -> DevicePool:
        """Make a pool from the caller's tensors, one for each layer for K and one for V (`v_buffers=None` with kind
        "mla").

        Each is contiguous, [num_pages, page_size, num_kv_heads, head_dim] or [num_pages * page_size, num_kv_heads,
        head_dim]; none may overlap another. In host memory the pages of the first form may have bytes of others between
        them. Nothing is copied. InvalidConfig names the tensor and what is wrong. Pages
        of several groups are wrapped group by group, and joined by `join`.
        """
        if not isinstance(layout, KVLayout):
            raise InvalidConfig("device pool: wrap takes one group's KVLayout; wrap each group, and join the pools")
        if (v_buffers is None) != (layout.kind == "mla"):
            wanted = "None" if layout.kind == "mla" else "one tensor a layer"
            raise InvalidConfig(f"device pool: v_buffers must be {wanted} for kind {layout.kind!r}")
        parts = [("k_buffers", k_buffers)] + ([("v_buffers", v_buffers)] if v_buffers is not None else [])
        for name, buffers in parts:
            if len(buffers) != layout.num_layers:
                raise InvalidConfig(f"device pool: {name} has {len(buffers)} tensors for {layout.num_layers} layers")
        first = k_buffers[0]
        views = {
            f"{name}[{layer}]": _as_pages(buffer, layout=layout, like=first, name=f"{name}[{layer}]")
            for name, buffers in parts
            for layer, buffer in enumerate(buffers)
        }
        num_pages = views["k_buffers[0]"].shape[0]
        check_page_count(num_pages, what="device pool")
        for name, view in views.items():
            if view.shape[0] != num_pages:
                raise InvalidConfig(f"device pool: {name} has {view.shape[0]} pages, k_buffers[0] has {num_pages}")
        _refuse_overlaps(views)
        tensors = [views[f"{name}[{layer}]"] for layer in range(layout.num_layers) for name, _ in parts]
        return cls(layout=layout, groups=[PoolGroup(FULL, layout, tensors, None)])

    @classmethod
    def join(cls, full: DevicePool, **mirrors: DevicePool) -> DevicePool:
        """Make one pool from pools of one group each: its page p is page p of all of them, `join(full=…, draft=…)`.

        For existing tensors: wrap those of each group, and join. Nothing is copied, and the parts stay usable. Raises
        InvalidConfig for pools of different counts, devices or page sizes, or in the same memory.
        """
        pools = {FULL: full, **mirrors}
        for name, pool in pools.items():
            if len(pool.groups) > 1:
                raise InvalidConfig(f"device pool: {name!r} has {len(pool.groups)} groups itself; join pools of one")
            if (pool.num_pages, pool.device) != (full.num_pages, full.device):
                raise InvalidConfig(
                    f"device pool: group {name!r} has {pool.num_pages} pages on {pool.device}, "
                    f"{FULL!r} has {full.num_pages} on {full.device}"
                )
        layout = PageLayout.of(**{name: pool.groups[0].layout for name, pool in pools.items()})
        _refuse_overlaps(
            {f"{name}[{piece}]": row for name, pool in pools.items() for piece, row in enumerate(pool.groups[0].rows)}
        )
        parts = [(name, pool.groups[0]) for name, pool in pools.items()]
        return cls(layout=layout, groups=[PoolGroup(name, g.layout, g.tensors, g.block) for name, g in parts])

    def group(self, name: str) -> PoolGroup:
        """Return one group of layers: views into this pool, for as long as the pool lives. InvalidConfig lists the
        groups.
        """
        for group in self.groups:
            if group.name == name:
                return group
        names = [group.name for group in self.groups]
        raise InvalidConfig(f"device pool: {unknown(name, names, 'group')}")

    def check_pages(self, pages: PageIds | npt.ArrayLike) -> PageIndex:
        """Return the page ids as an index array; InvalidRequest names the first that is not a page of this pool."""
        return page_index(pages, num_pages=self.num_pages, what="device pool")

    def read_pages(self, pages: PageIds | npt.ArrayLike) -> torch.Tensor:
        """Return copies of the pages' bytes: uint8 [n, page_bytes] on the pool's device, pieces in layout order."""
        index = torch.from_numpy(self.check_pages(pages)).to(self.device)
        return torch.cat([row.index_select(0, index) for row in self.rows], dim=1)

    def write_pages(self, pages: PageIds | npt.ArrayLike, page_bytes: torch.Tensor) -> None:
        """Overwrite pages with `page_bytes`, uint8 [n, page_bytes] as `read_pages` returns them."""
        index = torch.from_numpy(self.check_pages(pages)).to(self.device)
        expected = (len(index), self.layout.page_bytes)
        if page_bytes.dtype != torch.uint8 or tuple(page_bytes.shape) != expected:
            raise InvalidRequest(
                f"device pool: page bytes must be uint8 {list(expected)}, "
                f"not {page_bytes.dtype} {list(page_bytes.shape)}"
            )
        # By torch's own function: the method of that name has no types.
        parts = torch.split_with_sizes(page_bytes.to(self.device), self.layout.pieces, dim=1)
        for row, part in zip(self.rows, parts, strict=True):
            row.index_copy_(0, index, part)


def _group_starts(layout: Layout, num_pages: int) -> tuple[list[int], int]:
    """Return the offset of each group in the pool's memory, a multiple of ALIGNMENT_BYTES, and the total bytes."""
    starts, end = [], 0
    for group in layout.groups:
        starts.append(-(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        end = starts[-1] + num_pages * group.layout.page_bytes
    return starts, end


def _usable_device(device: str | torch.device) -> torch.device:
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise InvalidConfig(f"device pool: device must be 'cpu', 'cuda' or 'cuda:N', not {device!r}") from error
    if place.type not in ("cpu", "cuda"):
        raise InvalidConfig(f"device pool: device must be 'cpu', 'cuda' or 'cuda:N', not {device!r}")
    if place.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InvalidConfig(f"device pool: {device!r} asked for, but torch sees no CUDA device here")
    index = torch.cuda.current_device() if place.index is None else place.index
    if index >= torch.cuda.device_count():
        raise InvalidConfig(
            f"device pool: {device!r} asked for, but torch sees {torch.cuda.device_count()} CUDA devices"
        )
    return torch.device("cuda", index)


def _as_pages(buffer: torch.Tensor, *, layout: KVLayout, like: torch.Tensor, name: str) -> torch.Tensor:
    """Check one tensor of the caller and view it as [num_pages, page_size, num_kv_heads, head_dim]."""
    if not isinstance(buffer, torch.Tensor):
        raise InvalidConfig(f"device pool: {name} must be a torch tensor, not {type(buffer).__name__}")
    if buffer.dtype != layout.torch_dtype:
        raise InvalidConfig(f"device pool: {name} is {buffer.dtype}, the layout requires {layout.dtype}")
    if buffer.device != like.device or buffer.device.type not in ("cpu", "cuda"):
        raise InvalidConfig(f"device pool: {name} is on {buffer.device}; all must be on one cpu or cuda device")
    # Kernels of GPUs compute addresses from the size of a page.
    has_gaps = buffer.device.type == "cpu" and buffer.dim() == 4 and _has_whole_pages(buffer)
    if not (buffer.is_contiguous() or has_gaps):
        raise InvalidConfig(f"device pool: {name} is not contiguous: strides {buffer.stride()}")
    token_shape = layout.piece_shape[1:]
    shape = tuple(buffer.shape)
    paged = len(shape) == 4 and shape[1:] == layout.piece_shape
    flat = len(shape) == 3 and shape[1:] == token_shape and shape[0] % layout.page_size == 0
    if not (paged or flat):
        tokens = ", ".join(map(str, token_shape))
        raise InvalidConfig(
            f"device pool: {name} has shape {list(shape)}; it must be [num_pages, {layout.page_size}, {tokens}] "
            f"or [num_pages * {layout.page_size}, {tokens}]"
        )
    return buffer.detach() if paged else buffer.detach().view(-1, *layout.piece_shape)


def _has_whole_pages(buffer: torch.Tensor) -> bool:
    """Whether each page is contiguous, and pages do not overlap."""
    return buffer[:1].is_contiguous() and buffer.stride(0) >= buffer[:1].numel()


def _refuse_overlaps(views: dict[str, torch.Tensor]) -> None:
    """Refuse two pieces in the same memory: they would overwrite each other."""
    ordered = sorted(views.items(), key=lambda item: item[1].data_ptr())
    for (before, low), (after, high) in itertools.pairwise(ordered):
        if low.data_ptr() + low.stride(0) * low.itemsize * (len(low) - 1) + low[:1].nbytes > high.data_ptr():
            raise InvalidConfig(f"device pool: {before} and {after} lie in the same memory")
