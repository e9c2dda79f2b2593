"""The compiled form of the prefix index: made by mypyc of the very same source, optional, needed by nothing. With it
come four modules in C, for what Python cannot do as fast: packing an array of tokens in one pass, comparing a prompt
with the keys of a node by whole lines of the cache, turning a list of pages round, and writing each step to the journal
when it has just been made.

    python3 dev.py compile             make it for this Python, in a checkout: a minute or two, and a C compiler
    python3 dev.py compile --remove    run the source again

An extension module goes before the source beside it, for whoever imports it from then on. A change to the source is
not seen until it is compiled again: `form` tells, and so do `tidekv doctor` and the tests. Only the modules of the
index are compiled: those below have nothing that mypyc cannot do, and they are what loops.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Final, Literal

from tidekv.states import index

MODULES: Final = (
    "accounts", "conditions", "dropping", "eviction", "index", "index_check", "insertion", "native_conditions", "node",
    "tails", "tiers", "tree",
)  # fmt: skip
"""The modules of `tidekv.states` that are compiled, together: calls between them cost a C call."""

NATIVE: Final = ("backends/native_tokens", "states/native_edges", "states/native_pages", "engine/journal/native_steps")
"""The modules of `tidekv` in C."""

C_FILES: Final = (
    *(f"{name}.c" for name in NATIVE), *(f"engine/journal/native_{name}.h" for name in ("hash", "json", "step"))
)  # fmt: skip
"""Their files: those in C, and what these include."""

GROUP: Final = "tidekv_states"
DIGEST: Final = "compiled.sha256"

Form = Literal["source", "compiled", "stale"]

# Runs in a folder where the package holds nothing else: mypyc follows every import.
SETUP: Final = """
import sys
from mypyc.build import mypycify
from setuptools import Extension, setup

group, *paths = sys.argv[1:]
native = [path.removesuffix(".c") for path in paths if path.endswith(".c")]
sys.argv = ["compiled", "build_ext", "--inplace"]
options = ["--strict", "--follow-imports=silent", "--config-file=", *(path for path in paths if path.endswith(".py"))]
modules = mypycify(options, opt_level="3", group_name=group)
modules += [Extension(path.replace("/", "."), [f"{path}.c"], extra_compile_args=["-O3"]) for path in native]
setup(name="compiled", packages=[], ext_modules=modules)
"""


def states_folder() -> Path:
    """Where the modules of `tidekv.states` are."""
    return Path(str(index.__file__)).parent


def form(loaded: Path | None = None) -> Form:
    """Tell what runs in this process: the source, what was compiled of it, or what was compiled of another source.

    `loaded` is the file that the index came from, which it knows itself.
    """
    loaded = Path(str(index.__file__)) if loaded is None else loaded
    if loaded.suffix == ".py":
        return "source"
    folder = loaded.parent
    noted = folder / DIGEST
    return "compiled" if noted.is_file() and noted.read_text() == digest_of(folder) else "stale"


def digest_of(folder: Path) -> str:
    """Name the source that is compiled."""
    digest = hashlib.sha256()
    for name in MODULES:
        digest.update((folder / f"{name}.py").read_bytes())
    for name in C_FILES:
        digest.update((folder.parent / name).read_bytes())
    return digest.hexdigest()


def remove(folder: Path, libraries: Path) -> None:
    """Take what was compiled away. Processes that run it go on with it."""
    for name in MODULES:
        for built in folder.glob(f"{name}.*.so"):
            built.unlink()
    for name in NATIVE:
        for built in folder.parent.glob(f"{name}.*.so"):
            built.unlink()
    for built in libraries.glob(f"{GROUP}__mypyc.*.so"):
        built.unlink()
    (folder / DIGEST).unlink(missing_ok=True)


def build(folder: Path, libraries: Path, *, quiet: bool = False) -> None:
    """Compile the modules of `folder` and put them there, with the library that they share into `libraries`, and those
    in C to where they belong.

    Raises CalledProcessError, and leaves everything as it was, where a compiler is missing or refuses. What compilers
    say is printed, or with `quiet` goes into the error.
    """
    digest = digest_of(folder)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    with tempfile.TemporaryDirectory() as made:
        stage = Path(made)
        package = stage / "tidekv" / "states"
        package.mkdir(parents=True)
        for name in C_FILES:
            there = package.parent / name
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder.parent / name, there)
        for empty in (package.parent / "__init__.py", package.parent / "py.typed"):
            empty.touch()
        for source in folder.glob("*.py"):
            shutil.copy(source, package)
        paths = [f"tidekv/states/{name}.py" for name in MODULES] + [f"tidekv/{name}.c" for name in NATIVE]
        # The search path of whoever calls would lead to the package itself.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        subprocess.run(
            [sys.executable, "-c", SETUP, GROUP, *paths],
            cwd=stage,
            env=environment,
            check=True,
            capture_output=quiet,
            text=True,
        )
        remove(folder, libraries)
        for name in MODULES:
            _put(package / f"{name}{suffix}", folder)
        for name in NATIVE:
            _put(package.parent / f"{name}{suffix}", (folder.parent / name).parent)
        _put(stage / f"{GROUP}__mypyc{suffix}", libraries)
        (folder / DIGEST).write_text(digest)


def _put(built: Path, folder: Path) -> None:
    """Never over a file that a process may run."""
    arriving = folder / f".{built.name}"
    shutil.copy(built, arriving)
    arriving.replace(folder / built.name)


def main(arguments: list[str]) -> int:
    """Do what the command line asks."""
    import tidekv

    folder, libraries = states_folder().resolve(), Path(str(tidekv.__file__)).parent.parent
    if arguments == ["--remove"]:
        remove(folder, libraries)
        print(f"{folder}: the source runs")
        return 0
    if arguments:
        print("usage: python3 dev.py compile [--remove]", file=sys.stderr)
        return 2
    try:
        build(folder, libraries)
    except subprocess.CalledProcessError as error:
        print(f"not compiled, the source runs: mypyc ended with {error.returncode}, see above", file=sys.stderr)
        return 1
    print(f"{folder}: the compiled form runs, until the source changes or `--remove`")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
