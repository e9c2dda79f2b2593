"""The two forms of the package, each in a copy of it: what `tidekv bench all` measures index, engine and journal in.

The package ships as source, and with its index and some loops compiled where mypyc and a C compiler are there (see
`tidekv.engine.compiled`). Targets are about the fastest form that ships. Compiled files in the checkout would change
what runs there from then on, so a copy is compiled, once for each state of the source; what came of it is kept where
peers are. The checkout is read, and never written to. A program is measured in a copy by putting that before everything
else in PYTHONPATH, and says itself which form it has run.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import tidekv
from tidekv.engine import compiled

KEPT = 3
"""Compiled forms of other states of the source that are kept, those used last: two megabytes each."""

PREFIX = "tidekv-compiled-"


class NotCompiled(Exception):
    """There can be no compiled form here; its text says why."""


def package_folder() -> Path:
    """The package that this process has imported."""
    return Path(str(tidekv.__file__)).parent


def copy_source(folder: Path) -> None:
    """Copy the package into a folder, as source whatever the checkout runs; the folder is for PYTHONPATH."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__", compiled.DIGEST)
    shutil.copytree(package_folder(), folder / "tidekv", ignore=ignored)


def copy_compiled(folder: Path, cache: Path) -> None:
    """Copy the package into a folder, compiled.

    Takes half a minute of CPU unless `cache` has what this source was compiled to. Raises NotCompiled where a compiler
    is missing or refuses, or a folder cannot be written to.
    """
    try:
        copy_source(folder)
        # Of the copy: the source may change meanwhile.
        kept = cache / f"{PREFIX}{sys.implementation.cache_tag}-{_digest(folder / 'tidekv')}"
        if not kept.is_dir():
            compiled.build(folder / "tidekv" / "states", folder, quiet=True)
            _keep(folder, kept)
            return
        kept.touch()
        shutil.copytree(kept, folder, dirs_exist_ok=True)
    except subprocess.CalledProcessError as error:
        said = [line for line in (error.stderr or "").splitlines() if line.strip()]
        raise NotCompiled(said[-1].strip() if said else f"mypyc ended with {error.returncode}") from error
    except OSError as error:
        raise NotCompiled(f"a copy could not be made: {error}") from error


def _digest(package: Path) -> str:
    """Names the source that counts, and what compiles it."""
    try:
        compiler = metadata.version("mypy")
    except metadata.PackageNotFoundError as error:
        raise NotCompiled("mypyc is not installed (it comes with mypy)") from error
    digest = hashlib.sha256(f"{compiler} {sys.version} {compiled.digest_of(package / 'states')}".encode())
    # Types of the others are in what is compiled.
    for path in sorted((package / "states").glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _keep(folder: Path, kept: Path) -> None:
    """Keep what was compiled, and forget what was used longest ago."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    before = sorted(kept.parent.glob(f"{PREFIX}*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in before[KEPT:]:
        shutil.rmtree(path, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".keeping-", dir=kept.parent) as arriving:
        whole = Path(arriving) / "whole"
        for path in (*folder.rglob("*.so"), folder / "tidekv" / "states" / compiled.DIGEST):
            there = whole / path.relative_to(folder)
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, there)
        # Whoever was faster has kept the same.
        if not kept.is_dir():
            whole.rename(kept)
