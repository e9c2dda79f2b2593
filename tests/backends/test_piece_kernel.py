"""The Triton kernel without a GPU: run by Triton's interpreter against numpy, and compiled for GPUs that are not here.

Needs Triton, which comes with torch's CUDA builds; anywhere else `pip install triton` (1 GB) brings it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton (pip install triton)")

CAPABILITIES = (80, 90, 100)


def test_the_kernel_moves_what_numpy_does() -> None:
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            Path(__file__).parents[1] / "support" / "interpreted_kernel.py",
        ],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout
    assert "3 passed" in ended.stdout


@pytest.mark.parametrize("to_rows", [True, False])
@pytest.mark.parametrize("element_bytes", [1, 2, 4, 8])
def test_the_kernel_compiles_for_gpus_of_three_generations(
    element_bytes: int, *, to_rows: bool, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Down to machine code, which needs no GPU; and aligned pieces move 16 bytes a thread."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = importlib.import_module("tidekv.backends.copies.kernel")
    element = {1: "*u8", 2: "*i16", 4: "*i32", 8: "*i64"}[element_bytes]
    arguments = {"addresses": "*i64", "pages": element, "row_ids": "*i64", "page_ids": "*i64"}
    arguments |= dict.fromkeys(["first_pair", "pair_count", "first_piece", "piece_count"], "i32")
    sizes = {"PIECE": 32 << 10, "PAGE": 2 << 20, "START": 0, "BLOCK": kernel.BLOCK_BYTES}
    constants = {name: size // element_bytes for name, size in sizes.items()}
    constants |= {"ELEMENT": kernel.ELEMENTS[element_bytes], "ALIGNED": True, "TO_ROWS": to_rows}
    source = ASTSource(
        kernel.move_pieces,
        arguments | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(1,): [["tt.divisibility", 16]]},
    )
    for capability in CAPABILITIES:
        compiled = triton.compile(
            source,
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": kernel.WARPS, "enable_fp_fusion": False},
        )
        assert compiled.asm["cubin"]
        assert compiled.metadata.shared == 0
        assert "ld.global.v2.b64" in compiled.asm["ptx"] or "ld.global.v4.b32" in compiled.asm["ptx"]
