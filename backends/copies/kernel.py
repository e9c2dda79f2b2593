"""The GPU kernel that moves pieces of pages between separate tensors for each piece and whole pages.

Import it through `tidekv.backends.copies.pieces` only: it needs Triton, which comes with torch's CUDA builds.

    rows    piece i of page p at  addresses[i] + p * piece         the device pool, layer first
    pages   piece i of page p at  p * page + start + i * piece     host pages (pinned), or pages staged on the device

The programs share the blocks of all pieces of all pages among themselves, so that a few of them keep the bus busy and
leave the other multiprocessors free. Neighbouring blocks of a page go to neighbouring programs: what crosses the bus at
one time is adjacent. Page ids are 64 bits wide, and so are offsets computed from them: pools are larger than 4 GiB.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from tidekv.backends.copies.pieces import PieceShape

ELEMENTS: Final = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.uint8}
# Bytes in flight are the product of both, and have to cover what the bus transfers within the 1 to 2 µs of a read of
# host memory: 55 GB/s times 2 µs are 110 KB. Few programs leave the rest of the GPU free.
BUS_PROGRAMS: Final = 32
# Within device memory many programs end sooner, and a step beside them loses less: 16 MiB took 31 µs instead of 58, a
# memory-bound step beside loads 6.4 % more time instead of 9.1 % (one H100, 40 GB/s).
DEVICE_PROGRAMS: Final = 512
BLOCK_BYTES: Final = 8 << 10
WARPS: Final = 4


# No kernel is specialized for any of these numbers: it would be compiled in the middle of a restore.
@triton.jit(do_not_specialize=["first_pair", "pair_count", "first_piece", "piece_count"])  # type: ignore[untyped-decorator]  # Triton has no types, and a kernel's arguments are the device's.
def move_pieces(  # type: ignore[no-untyped-def]  # As above.
    addresses,  # int64 [pieces]: where each piece's tensor begins.
    pages,  # The first byte of the whole pages, as elements.
    row_ids,  # int64: pages in the tensors,
    page_ids,  # int64: and the whole pages they are copied from or to, pairwise.
    first_pair,
    pair_count,
    first_piece,
    piece_count,
    ELEMENT: tl.constexpr,  # noqa: N803  # Constants of a kernel are written so.
    PIECE: tl.constexpr,  # noqa: N803  # Elements of a piece,
    PAGE: tl.constexpr,  # noqa: N803  # and of a page;
    START: tl.constexpr,  # noqa: N803  # where piece 0 begins in a page.
    BLOCK: tl.constexpr,  # noqa: N803  # Elements that a program moves at a time, a power of two.
    ALIGNED: tl.constexpr,  # noqa: N803  # Every address begins at a multiple of 16 bytes.
    TO_ROWS: tl.constexpr,  # noqa: N803
):
    """Copy pieces [first_piece, +piece_count) of pairs [first_pair, +pair_count)."""
    blocks: tl.constexpr = (PIECE + BLOCK - 1) // BLOCK
    for item in range(tl.program_id(0), pair_count * piece_count * blocks, tl.num_programs(0)):
        pair = first_pair + item // (piece_count * blocks)
        piece = first_piece + item // blocks % piece_count
        offsets = item % blocks * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < PIECE
        row = tl.load(addresses + piece).to(tl.pointer_type(ELEMENT))
        if ALIGNED:
            # Nothing is known of an address that was loaded; without this hint a thread moves one element at a time.
            row = tl.multiple_of(row, 16)
        in_row = row + tl.load(row_ids + pair) * PIECE + offsets
        in_page = pages + tl.load(page_ids + pair) * PAGE + START + piece * PIECE + offsets
        if TO_ROWS:
            tl.store(in_row, tl.load(in_page, mask=inside), mask=inside)
        else:
            tl.store(in_page, tl.load(in_row, mask=inside), mask=inside)


def launch(
    addresses: torch.Tensor,
    pages: torch.Tensor,
    row_ids: torch.Tensor,
    page_ids: torch.Tensor,
    *,
    pairs: range,
    pieces: range,
    shape: PieceShape,
    to_rows: bool,
) -> None:
    """Enqueue the copy of these pieces of these pairs on the current stream; see `move_pieces`."""
    size = shape.element_bytes
    programs = BUS_PROGRAMS if pages.device.type == "cpu" else DEVICE_PROGRAMS
    move_pieces[(programs if pairs else 1,)](
        addresses,
        pages,
        row_ids,
        page_ids,
        pairs.start,
        len(pairs),
        pieces.start,
        len(pieces),
        ELEMENT=ELEMENTS[size],
        PIECE=shape.piece_bytes // size,
        PAGE=shape.page_bytes // size,
        START=shape.start_bytes // size,
        BLOCK=BLOCK_BYTES // size,
        ALIGNED=shape.aligned,
        TO_ROWS=to_rows,
        num_warps=WARPS,
        enable_fp_fusion=False,  # Nothing is computed. Unsaid, Triton warns that its default will change.
    )
