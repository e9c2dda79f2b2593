"""UCX's own word on the path that it takes between two pools."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.gpu.report import Report

LINES_MAX = 60
TRANSPORTS = r"\b(cuda_ipc|cuda_copy|gdr_copy|tcp|sysv|posix|cma|self|rc_\w+)\b"


def logging_to(path: Path) -> dict[str, str]:
    """Return variables with which UCX writes its choices to a file; set them before it is loaded."""
    return {"UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y", "UCX_LOG_FILE": str(path)}


def tell_path(report: Report, path: Path) -> None:
    """Report the transports that are named for writes, and the lines that name them."""
    lines = [line.strip() for line in path.read_text().splitlines()] if path.exists() else []
    # Tables of protocols have a bar, endpoints a number of their configuration.
    chosen = [line for line in lines if "|" in line or "cfg#" in line]
    used = sorted(set(re.findall(TRANSPORTS, "\n".join(chosen))))
    report.row("transports that UCX names in its log", ", ".join(used) or "none: the log is empty")
    for line in chosen[:LINES_MAX]:
        report.note(f"ucx: {line[:200]}")
