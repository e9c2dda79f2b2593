"""The files of a journal."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tidekv.engine.journal.segments import SegmentFiles


def test_only_the_owner_may_read_a_journal(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        files = SegmentFiles(tmp_path / "j", segments_max=0, run_line=b"x" * 10)
        files.begin_next()
        files.close()
    finally:
        os.umask(mask)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"j": 0o600, "j.1": 0o600}
