"""The device pool: pages in the tensors that the model's attention reads and writes, one per layer and part (L1).

Layer first: piece `i` of page `p` is row `p` of tensor `i`. The pool owns no page table and knows no owner of a page;
it says where bytes lie and moves them for tests and checks. Bulk copies are `tidekv.backends.copies`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy.typing as npt
import torch

from tidekv.backends.layout import KVLayout
from tidekv.backends.memory import PageIndex, allocate_host_bytes, check_page_count, page_index
from tidekv.states.errors import InvalidConfig, InvalidRequest, OutOfMemory
from tidekv.states.shapes import PageIds, PoolMemory, Segment


class DevicePool:
    """`num_pages` pages of a layout in device memory. Make one with `allocate` or `wrap`.

    `k[layer]` and `v[layer]` are tensors [num_pages, page_size, num_kv_heads, head_dim] of the layout's dtype, which
    the model may read and write in place; with kind "mla" `k` has the latent tensors and `v` is empty. `rows[i]` is
    piece i of all pages as uint8 [num_pages, piece_bytes]; `block` is all pieces as uint8 [pieces, num_pages,
    piece_bytes] where they lie in one stretch, else None. The pool keeps the tensors alive.
    """

    def __init__(
        self, *, layout: KVLayout, num_pages: int, pieces: Sequence[torch.Tensor], block: torch.Tensor | None
    ) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.device = pieces[0].device
        self.block = block
        step = layout.tensors_per_layer
        self.k = tuple(pieces[::step])
        self.v = tuple(pieces[1::step]) if step == 2 else ()
        self.rows = tuple(piece.view(num_pages, -1).view(torch.uint8) for piece in pieces)
        self.memory = PoolMemory(
            segments=tuple(
                Segment(
                    address=row.data_ptr(),
                    piece_bytes=layout.piece_bytes,
                    stride_bytes=layout.piece_bytes,
                    page_count=num_pages,
                )
                for row in self.rows
            ),
            page_count=num_pages,
            kind="VRAM" if self.device.type == "cuda" else "DRAM",
            device=self.device.index or 0,
        )

    @classmethod
    def allocate(cls, layout: KVLayout, num_pages: int, device: str | torch.device = "cpu") -> DevicePool:
        """Allocate a zeroed pool on "cpu" or a CUDA device; CPU memory is touched at once.

        Raises InvalidConfig for a wrong count or device, OutOfMemory if there is not that much.
        """
        check_page_count(num_pages, what="device pool")
        place = _usable_device(device)
        total_bytes = num_pages * layout.page_bytes
        if place.type == "cpu":
            flat = allocate_host_bytes(total_bytes, what="device pool on cpu")
        else:
            try:
                flat = torch.zeros(total_bytes, dtype=torch.uint8, device=place)
            except torch.OutOfMemoryError as error:
                raise OutOfMemory(f"device pool needs {total_bytes} bytes on {place}: {error}") from error
        block = flat.view(layout.piece_count, num_pages, layout.piece_bytes)
        pieces = [row.view(layout.torch_dtype).view(num_pages, *layout.piece_shape) for row in block]
        return cls(layout=layout, num_pages=num_pages, pieces=pieces, block=block)

    @classmethod
    def wrap(
        cls, k_buffers: Sequence[torch.Tensor], v_buffers: Sequence[torch.Tensor] | None, layout: KVLayout
    ) -> DevicePool:
        """Make a pool of the caller's tensors, one a layer for K and one for V (`v_buffers=None` with kind "mla").

        Each is contiguous, [num_pages, page_size, num_kv_heads, head_dim] or [num_pages * page_size, num_kv_heads,
        head_dim]; none may overlap another. Nothing is copied. InvalidConfig names the tensor and what is wrong.
        """
        if (v_buffers is None) != (layout.kind == "mla"):
            wanted = "None" if layout.kind == "mla" else "one tensor a layer"
            raise InvalidConfig(f"device pool: v_buffers must be {wanted} for kind {layout.kind!r}")
        groups = [("k_buffers", k_buffers)] + ([("v_buffers", v_buffers)] if v_buffers is not None else [])
        for name, buffers in groups:
            if len(buffers) != layout.num_layers:
                raise InvalidConfig(f"device pool: {name} has {len(buffers)} tensors for {layout.num_layers} layers")
        first = k_buffers[0]
        views = {
            (name, layer): _as_pages(buffer, layout=layout, like=first, name=f"{name}[{layer}]")
            for name, buffers in groups
            for layer, buffer in enumerate(buffers)
        }
        num_pages = views["k_buffers", 0].shape[0]
        check_page_count(num_pages, what="device pool")
        for (name, layer), view in views.items():
            if view.shape[0] != num_pages:
                raise InvalidConfig(
                    f"device pool: {name}[{layer}] has {view.shape[0]} pages, k_buffers[0] has {num_pages}"
                )
        _refuse_overlaps(views)
        pieces = [views[name, layer] for layer in range(layout.num_layers) for name, _ in groups]
        return cls(layout=layout, num_pages=num_pages, pieces=pieces, block=None)

    def check_pages(self, pages: PageIds | npt.ArrayLike) -> PageIndex:
        """Return the page ids as an index array; InvalidRequest names the first that is not a page of this pool."""
        return page_index(pages, num_pages=self.num_pages, what="device pool")

    def read_pages(self, pages: PageIds | npt.ArrayLike) -> torch.Tensor:
        """Return copies of the pages' bytes: uint8 [n, page_bytes] on the pool's device, pieces in layout order."""
        index = torch.from_numpy(self.check_pages(pages)).to(self.device)
        return torch.stack([row.index_select(0, index) for row in self.rows], dim=1).view(
            len(index), self.layout.page_bytes
        )

    def write_pages(self, pages: PageIds | npt.ArrayLike, page_bytes: torch.Tensor) -> None:
        """Overwrite pages with `page_bytes`, uint8 [n, page_bytes] as `read_pages` returns them."""
        index = torch.from_numpy(self.check_pages(pages)).to(self.device)
        expected = (len(index), self.layout.page_bytes)
        if page_bytes.dtype != torch.uint8 or tuple(page_bytes.shape) != expected:
            raise InvalidRequest(
                f"device pool: page bytes must be uint8 {list(expected)}, "
                f"not {page_bytes.dtype} {list(page_bytes.shape)}"
            )
        parts = page_bytes.to(self.device).view(len(index), self.layout.piece_count, self.layout.piece_bytes)
        for piece, row in enumerate(self.rows):
            row.index_copy_(0, index, parts[:, piece])


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
        raise InvalidConfig(f"device pool: {name} is {buffer.dtype}, the layout says {layout.dtype}")
    if buffer.device != like.device or buffer.device.type not in ("cpu", "cuda"):
        raise InvalidConfig(f"device pool: {name} is on {buffer.device}; all must be on one cpu or cuda device")
    if not buffer.is_contiguous():
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
    return buffer.detach().view(-1, *layout.piece_shape)


def _refuse_overlaps(views: dict[tuple[str, int], torch.Tensor]) -> None:
    """Two pieces in the same memory would overwrite each other."""
    ordered = sorted(views.items(), key=lambda item: item[1].data_ptr())
    for (before, low), (after, high) in itertools.pairwise(ordered):
        if low.data_ptr() + low.nbytes > high.data_ptr():
            raise InvalidConfig(
                f"device pool: {before[0]}[{before[1]}] and {after[0]}[{after[1]}] lie in the same memory"
            )
