"""What a step found: checks, figures and notes, in a file that is whole after every one of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where a step runs, how much it does, and its folder for temporary files."""

    device: torch.device
    short: bool
    work: Path

    @property
    def on_cuda(self) -> bool:
        """Whether the step runs on a GPU, and not on its stand-ins."""
        return self.device.type == "cuda"


@dataclass
class Report:
    """Checks with their outcome; rows of the table; figures by name for the targets; and notes in words."""

    about: dict[str, str] = field(default_factory=dict)
    path: Path | None = None
    checks: list[tuple[str, bool, str]] = field(default_factory=list)
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def check(self, what: str, passed: bool, detail: str = "") -> None:
        """Add the outcome of a check."""
        self.checks.append((what, passed, detail))
        if not passed:
            print(f"FAILED: {what}: {detail}", flush=True)
        self.save()

    @contextmanager
    def checking(self, what: str) -> Iterator[None]:
        """Check that a block raises nothing; later checks go on if it does."""
        try:
            yield
        except Exception as error:
            self.check(what, False, f"{type(error).__name__}: {error}")
        else:
            self.check(what, True)

    def row(self, what: str, measured: str, asked: str = "") -> None:
        """Add a row."""
        self.rows.append((what, measured, asked))
        print(f"{what}: {measured}" + (f" (asked: {asked})" if asked else ""), flush=True)
        self.save()

    def figure(self, name: str, value: float, words: str) -> None:
        """Add a figure of the target table."""
        self.figures[name], self.words[name] = value, words
        self.save()

    def note(self, text: str) -> None:
        """Add a note."""
        self.notes.append(text)
        print(text, flush=True)
        self.save()

    def save(self) -> None:
        """Replace the file."""
        if self.path is not None:
            found = asdict(self)
            del found["path"]
            write_whole(self.path, json.dumps(found, indent=1, ensure_ascii=False))


def write_whole(path: Path, text: str) -> None:
    """Replace a file, so that a reader finds the old text or the new one."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    os.replace(new, path)
