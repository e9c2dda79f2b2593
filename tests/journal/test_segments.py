"""The files of a journal."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest

from tidekv.engine.journal.segments import PIECES_MAX, SegmentFiles


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


@pytest.mark.parametrize("taken", [1, 7, 10_000])
def test_pieces_that_the_disk_takes_in_part_are_written_to_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    def take_some(file: int, pieces: Sequence[bytes]) -> int:
        assert len(pieces) <= PIECES_MAX
        return os.write(file, b"".join(pieces)[:taken])

    monkeypatch.setattr(os, "writev", take_some)
    pieces = [b"%d," % number for number in range(2 * PIECES_MAX + 1)]
    files = SegmentFiles(tmp_path / "j", segments_max=0, run_line=b"run,")
    files.write(pieces)
    files.close()
    assert (tmp_path / "j").read_bytes() == b"run," + b"".join(pieces)
