"""Trees of files as the kernel shows them, for what reads memory and limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

GIB = 1 << 30
MakeRoot = Callable[[Mapping[str, str]], Path]


@pytest.fixture
def make_root(tmp_path: Path) -> MakeRoot:
    """Write files below a directory that stands for /, beside a machine of 64 GiB of which 32 are available."""

    def make(files: Mapping[str, str]) -> Path:
        meminfo = f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {32 << 20} kB\n"
        for name, text in {"proc/meminfo": meminfo, **files}.items():
            file = tmp_path / "root" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path / "root"

    return make
