"""The program that counts how the code is cut."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

from tools import structure

ROOT = Path(__file__).resolve().parent.parent


def test_a_record_of_a_request_is_found_by_a_declared_and_by_an_assigned_field() -> None:
    kinds = ast.parse(
        "class A:\n    request_id: str\nclass B:\n    def __init__(self):\n        self.request_id = ''"
    ).body
    assert [structure.fields_of(kind) for kind in kinds] == [{"request_id"}, {"request_id"}]
    assert "engine/integrations/vllm/handover/jobs.py:RestoreJob" in structure.request_forms(ROOT)


def test_the_wheel_has_the_library_and_what_is_beside_it_and_each_file_once(tmp_path: Path) -> None:
    for name, lines in (("states/a.py", 2), ("engine/b.py", 3), ("engine/cli/c.py", 4), ("tests/d.py", 5)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("\n" * lines)
    (tmp_path / "src" / "package").mkdir(parents=True)
    (tmp_path / "src" / "package" / "engine").symlink_to(tmp_path / "engine")
    counts = structure.count_lines(tmp_path)
    assert (counts["lines of the wheel"], counts["lines of the library alone"], counts["lines of tests"]) == (9, 5, 5)


def test_a_trace_counts_modules_and_the_changes_between_them(tmp_path: Path) -> None:
    trace = structure.Trace(tmp_path)
    for name in ("states/a.py", "states/a.py", "engine/b.py", "states/a.py", "tests/c.py"):
        code = SimpleNamespace(co_filename=str(tmp_path / name))
        trace.note(SimpleNamespace(f_code=code, f_locals={}), "call", None)
        trace.note(SimpleNamespace(f_code=code, f_locals={"found": structure.HITS}), "return", None)
    assert trace.calls == {"states/a.py": 3, "engine/b.py": 1}
    assert trace.with_hits == {"states/a.py", "engine/b.py"}
    assert trace.changes == {"states/a.py": 1, "engine/b.py": 1}
    assert [line.split() for line in trace.places()][1:] == [
        ["1", "3", "*", "states/a.py"],
        ["1", "1", "*", "engine/b.py"],
    ]
