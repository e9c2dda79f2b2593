"""Entry points by which a serving engine loads a module of this checkout, without an installation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_entry_points(folder: Path, name: str, group: str, targets: Mapping[str, str]) -> Path:
    """Describe a distribution `name` with entry points of a group in `folder`, and return the folder for PYTHONPATH."""
    information = folder / f"{name}-1.dist-info"
    information.mkdir(parents=True, exist_ok=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1\n")
    lines = [f"[{group}]", *(f"{entry} = {target}" for entry, target in targets.items())]
    (information / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder
