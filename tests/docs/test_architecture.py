"""docs/architecture.md names modules and packages that exist, and its reading path leads through the restore."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PATH = re.findall(r"^\| \d+ \| `([^`]+)` \|", PAGE, re.MULTILINE)


def test_reading_path_leads_through_what_does_the_work() -> None:
    assert {Path(name).stem for name in PATH} >= {
        "table",
        "core",
        "restore",
        "plan_fetches",
        "loads",
        "rooms",
        "executor",
    }


def test_every_module_and_package_that_the_page_names_exists() -> None:
    named = re.findall(
        r"`((?:states|backends|transports|engine|benchmarks|tools|tests|examples|deploy|src)/[\w/.]*)`", PAGE
    )
    assert len(named) > 40
    assert not [name for name in named if not (ROOT / name).exists()]


def test_every_package_is_in_the_layout_table() -> None:
    packages = {
        init.parent.relative_to(ROOT).as_posix()
        for folder in ("states", "backends", "transports", "engine")
        for init in (ROOT / folder).glob("*/__init__.py")
    }
    assert not [package for package in packages if f"`{package}`" not in PAGE]


def test_every_name_that_the_page_takes_from_the_core_exists() -> None:
    words = "\n".join((ROOT / name).read_text() for name in PATH)
    words += "".join((ROOT / "states" / name).read_text() for name in ("events.py", "commands.py"))
    request = PAGE.partition("## One request")[2].partition("## Layout")[0]
    for name in re.findall(r"`(?:\w+\.)?(\w+)`", request):
        assert re.search(rf"\b{name}\b", words), name
