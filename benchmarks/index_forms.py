"""The two forms of the package in copies of it, in which `tidekv bench all` measures index, engine and journal.

The package ships as source, and with its index and some loops compiled if mypyc and a C compiler are available (see
`tidekv.engine.compiled`). Targets are stated for the fastest form that ships. Compiled files in the checkout would
change what runs there from then on, so a copy is compiled instead, once for each state of the source, and the result is
kept in the cache of peers. The checkout is only read. To measure a copy, its folder is put first in PYTHONPATH; the
measured program reports the form that it ran.
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
"""Number of compiled forms of other states of the source that are kept, in LRU order; two megabytes each."""

PREFIX = "tidekv-compiled-"


class NotCompiled(Exception):
    """The package cannot be compiled here; the text is the reason."""


def package_folder() -> Path:
    """Return the folder of the package that this process has imported."""
    return Path(str(tidekv.__file__)).parent


def copy_source(folder: Path) -> None:
    """Copy the package into a folder for PYTHONPATH, as source regardless of the form that the checkout runs."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__", compiled.DIGEST)
    shutil.copytree(package_folder(), folder / "tidekv", ignore=ignored)


def copy_compiled(folder: Path, cache: Path) -> None:
    """Copy the package into a folder, compiled.

    Takes half a minute of CPU unless `cache` has the result for this source. Raises NotCompiled if a compiler is
    missing or fails, or if a folder cannot be written.
    """
    try:
        copy_source(folder)
        # Digest of the copy, because the source may change meanwhile.
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
    """Return a digest of the relevant source and of its compiler."""
    try:
        compiler = metadata.version("mypy")
    except metadata.PackageNotFoundError as error:
        raise NotCompiled("mypyc is not installed (it comes with mypy)") from error
    digest = hashlib.sha256(f"{compiler} {sys.version} {compiled.digest_of(package / 'states')}".encode())
    # The compiled modules also depend on the types of the others.
    for path in sorted((package / "states").glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _keep(folder: Path, kept: Path) -> None:
    """Keep the compiled files, and delete the least recently used ones."""
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
        # Another process may have kept the same files first.
        if not kept.is_dir():
            whole.rename(kept)
