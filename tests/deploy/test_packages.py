"""Wheel and sdist hold real files, and work in a clean environment without the checkout and without a network."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = ("states", "backends", "transports", "engine")
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(cwd), "COLUMNS": "120", **environment},
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def build(kind: str, source: Path, into: Path) -> Path:
    """Build as pip does with --no-build-isolation: the backend's hook, in a process of its own."""
    into.mkdir(exist_ok=True)
    return into / run(sys.executable, "-c", BUILD, kind, into, cwd=source).split()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what packages are made of, with its links."""
    copy = tmp_path_factory.mktemp("source") / "tidekv"
    copy.mkdir()
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*FOLDERS, "src"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=left_out)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in"):
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def sdist(source: Path) -> Path:
    return build("build_sdist", source, source.parent / "dist")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the unpacked sdist, as an installer does that finds no wheel."""
    place = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(place, filter="data")
    (unpacked,) = place.iterdir()
    return build("build_wheel", unpacked, sdist.parent)


def files_of(source: Path) -> set[str]:
    """Every file of the package, by its path in the package."""
    files = {f"tidekv/{path.name}" for path in (source / "src" / "tidekv").iterdir() if path.is_file()}
    for folder in FOLDERS:
        below = (path for path in (source / folder).rglob("*") if path.is_file())
        files |= {f"tidekv/{path.relative_to(source).as_posix()}" for path in below}
    return files


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package_and_none_is_a_link(source: Path, sdist: Path, wheel: Path) -> None:
    with tarfile.open(sdist) as archive:
        kinds = {(member.isfile() or member.isdir()) for member in archive}
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert kinds == {True}
    assert {f"src/{file}" for file in files_of(source)} <= names
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml"} <= names
    with zipfile.ZipFile(wheel) as archive:
        held = {info.filename: info.file_size for info in archive.infolist() if ".dist-info/" not in info.filename}
    assert set(held) == files_of(source)
    assert held["tidekv/engine/trace/timeline.html"] > 1000
    assert "tidekv/py.typed" in held


@pytest.mark.slow
def test_the_page_of_the_package_has_the_readme_and_no_link_that_needs_a_checkout(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        told = message_from_bytes(archive.read(name))
    assert told["Description-Content-Type"] == "text/markdown"
    page = told.get_payload()
    assert isinstance(page, str) and "# tidekv" in page and "## Try it" in page and "import tidekv" in page
    links = re.findall(r"\]\(([^)]*)\)", page) + re.findall(r"(?:src|srcset|href)=\"([^\"]*)\"", page)
    assert [link for link in links if not link.startswith("https://")] == []


@pytest.mark.slow
def test_the_wheel_works_in_a_clean_environment_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "venv"
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin" / "python"
    installer = Path(sys.base_prefix) / "bin" / "python3"
    if subprocess.run([installer, "-m", "pip", "--version"], capture_output=True, check=False).returncode:
        pytest.skip(f"{installer} has no pip")
    pip = (installer, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps", wheel)
    run(*pip, cwd=tmp_path)
    # What tidekv stands on, from where the tests have it. Links of editable packages are not followed from here.
    packages = next((place / "lib").glob("python*/site-packages"))
    (packages / "present.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = run(python, "-c", "import tidekv, tidekv.testing; print(tidekv.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(packages)
    public = "from tidekv import *; import tidekv; print(all(name in globals() for name in tidekv.__all__))"
    assert run(python, "-c", public, cwd=tmp_path).strip() == "True"
    tidekv = place / "bin" / "tidekv"
    assert "simulate" in run(tidekv, "--help", cwd=tmp_path)
    assert "ok" in run(tidekv, "config", "check", cwd=tmp_path)
    plain = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}  # As in `run`: the checkout is not on the path.
    for command in ("run", "prefill", "decode", "simulate"):
        options = [tidekv, command, "--seed", "1"]
        refused = subprocess.run(options, cwd=tmp_path, capture_output=True, text=True, check=False, env=plain)
        said = f"tidekv: `tidekv {command}` is not part of the installed package: run it in a checkout; "
        assert (refused.returncode, refused.stderr) == (2, f"{said}see 'tidekv {command} --help'\n")
