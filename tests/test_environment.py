"""Set-up of a virtual environment: what pip would install is said first, then exactly that is installed."""

from __future__ import annotations

import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest

from tests.support.waits import LIMIT_S
from tools import environment
from tools.environment import Package, describe

TORCH = Package("torch", "2.13.0", "https://registry/torch.whl", False, 900_000_000)
TORCH_CPU = Package("torch", "2.13.0+cpu", "https://registry/torch.whl", False, 190_000_000)
CUDA = Package("nvidia-cublas", "13.0", "https://registry/cublas.whl", False, 600_000_000)
SMALL = Package("six", "1.16.0", "https://registry/six.whl", False, None)


def wheel(directory: Path, name: str, *needs: str) -> None:
    """Write the wheel of a package of one module."""
    directory.mkdir(exist_ok=True)
    with zipfile.ZipFile(directory / f"{name}-1.0-py3-none-any.whl", "w") as file:
        info = f"{name}-1.0.dist-info"
        required = "".join(f"Requires-Dist: {each}\n" for each in needs)
        file.writestr(f"{name}.py", f"NAME = {name!r}\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{required}")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")


@pytest.mark.slow
def test_what_was_announced_is_installed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    outside = Path(sys.base_prefix) / "bin" / "python3"
    if subprocess.run([outside, "-m", "pip", "--version"], capture_output=True, check=False).returncode:
        pytest.skip(f"{outside} has no pip")
    monkeypatch.setattr(environment, "PIP", (str(outside), "-m", "pip"))
    wheel(tmp_path / "wheels", "upper", "lower>=1")
    wheel(tmp_path / "wheels", "lower")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    mended: list[Path] = []
    marker = tmp_path / "made" / "marker"
    for _ in range(2):
        python = environment.fill(tmp_path / "made", ["upper"], marker=marker, wanted="1", mend=mended.append)
    assert mended == [python]
    assert "2 packages, 0 MB to download" in capfd.readouterr().err
    done = subprocess.run(
        [python, "-c", "import upper, lower; print(upper.NAME, lower.NAME)"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "upper lower\n"
    with pytest.raises(SystemExit, match="pip failed with exit code 1"):
        environment.fill(tmp_path / "other", ["missing"], marker=tmp_path / "other" / "marker", wanted="1")
    assert not (tmp_path / "other" / "marker").exists()


def test_a_second_start_waits_for_the_first_one_and_uses_what_that_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("the environment was cleared under its maker")

    waits = threading.Event()
    monkeypatch.setattr(environment.venv, "create", never)
    monkeypatch.setattr(environment, "say", lambda line: waits.set() if "waiting" in line else None)
    made, marker = tmp_path / "made", tmp_path / "marker"
    with ThreadPoolExecutor(1) as threads:
        with environment.only_one(made):
            second = threads.submit(environment.fill, made, ["upper"], marker=marker, wanted="1")
            assert waits.wait(LIMIT_S)
            (made / "bin").mkdir(parents=True)
            (made / "bin" / "python").touch()
            marker.write_text("1")
        assert second.result(LIMIT_S) == made / "bin" / "python"


@pytest.mark.parametrize(
    ("packages", "gpu", "said"),
    [
        ([TORCH, CUDA, SMALL], False, "needs none of its CUDA packages (600 MB)"),
        ([TORCH_CPU, SMALL], True, "CPU build, and this machine has an NVIDIA GPU"),
    ],
)
def test_a_build_of_torch_that_does_not_fit_the_machine_is_named(packages: list[Package], gpu: bool, said: str) -> None:
    assert said in describe(packages, gpu=gpu)[-1]
    assert not any("build" in line for line in describe(packages, gpu=not gpu))


def test_a_cpu_build_beside_triton_is_none_for_cuda() -> None:
    triton = Package("triton", "3.9.0", "https://registry/triton.whl", False, 286_000_000)
    assert not any("build" in line for line in describe([TORCH_CPU, triton], gpu=False))


def test_a_python_without_pip_is_named_with_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "PIP", (sys.executable, "-m", "no_such_pip"))
    with pytest.raises(SystemExit, match=rf"{sys.executable} has no pip, .* python3-pip"):
        environment.fill(tmp_path / "made", [], marker=tmp_path / "marker", wanted="1")
    assert not (tmp_path / "made").exists()


def test_constraints_have_no_builds_and_not_the_checkout(tmp_path: Path) -> None:
    for name, version in (("tidekv", "0.1"), ("Some_Thing.x", "2.0+cpu"), ("abc", "1")):
        information = tmp_path / f"{name}-{version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    found = environment.pinned(metadata.distributions(path=[str(tmp_path)]))
    assert found == ["abc==1", "some-thing-x==2.0"]


def test_sizes_are_summed_and_large_packages_listed() -> None:
    lines = describe([SMALL, CUDA, TORCH], gpu=True)
    assert lines == [
        "3 packages, 1,500 MB to download unless cached, and 1 of unknown size",
        "  torch 2.13.0: 900 MB",
        "  nvidia-cublas 13.0: 600 MB",
    ]
