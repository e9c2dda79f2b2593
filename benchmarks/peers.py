"""Systems that tidekv is compared with: downloaded from the package registry on demand, and imported.

The wheel of a peer is downloaded without its dependencies, by pip, into a cache folder, and unpacked there. Of its
imports, small packages that it really uses are downloaded too; those that it only imports (model code, user interfaces,
GPU compilers) are replaced by empty modules. The result is not a running server, which is not needed: indexes and page
hashes run on the CPU. `peer_trees.py` checks their behavior before they are measured.

A process imports at most one peer, because their stand-ins conflict.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import os
import subprocess
import sys
import types
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path

DOWNLOAD_TIMEOUT_S = 240.0
CACHE_VARIABLE = "BENCH_PEERS"


class PeerMissing(Exception):
    """A peer cannot be measured; the text is the reason."""


@dataclass(frozen=True)
class Peer:
    """Requirements for importing a peer."""

    name: str
    version: str
    needs: tuple[str, ...]
    """Packages that it uses, with versions where these matter."""
    stands_in: tuple[str, ...]
    """Packages that it imports but does not use here."""
    leaves_out: tuple[str, ...] = ()
    """Suffixes of names in its wheel that are not unpacked."""

    @property
    def wheels(self) -> tuple[str, ...]:
        """Return everything to download."""
        return (f"{self.name}=={self.version}", *self.needs)


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "sglang",
            "0.5.23",
            ("dill", "orjson", "psutil", "pybase64", "apache-tvm-ffi==0.1.11"),
            ("torchvision", "IPython", "triton", "sentencepiece", "compressed_tensors", "gguf", "partial_json_parser",
             "vllm"),
        ),
        Peer(
            "vllm",
            "0.33.0",
            ("openai-harmony", "cloudpickle", "py-cpuinfo", "fastapi", "psutil", "cachetools", "cbor2", "blake3",
             "pybase64"),
            ("torchvision", "IPython", "xgrammar", "partial_json_parser", "llguidance"),
            leaves_out=(".so",),
        ),
    )
}  # fmt: skip


def default_cache() -> Path:
    """Return the default cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named) if named else Path.home() / ".cache" / "tidekv-bench" / "peers"


def fetch(name: str, cache: Path) -> Path:
    """Download and unpack a peer unless it is cached; returns the folder to import from. Raises PeerMissing."""
    peer = PEERS[name]
    digest = hashlib.sha256(repr((peer.wheels, peer.leaves_out)).encode()).hexdigest()[:8]
    folder = cache / f"{peer.name}-{peer.version}-{sys.implementation.cache_tag}-{digest}"
    if (folder / "complete").is_file():
        return folder
    wheels = folder / "wheels"
    try:
        wheels.mkdir(parents=True, exist_ok=True)
        _download(peer, wheels)
        for wheel in wheels.glob("*.whl"):
            _unpack(wheel, folder, peer.leaves_out)
            wheel.unlink()
        (folder / "complete").touch()
    except (OSError, zipfile.BadZipFile) as error:
        raise PeerMissing(f"{name} {peer.version} cannot be kept in {cache}: {error}") from error
    return folder


def _download(peer: Peer, wheels: Path) -> None:
    pip = ["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(wheels)]
    # An environment may lack pip; the interpreter that it was created from usually has it.
    said = "there is no pip"
    for python in dict.fromkeys((sys.executable, getattr(sys, "_base_executable", sys.executable))):
        try:
            done = subprocess.run(
                [python, *pip, *peer.wheels], capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            said = str(error)
            continue
        if done.returncode == 0:
            return
        said = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
    raise PeerMissing(f"{peer.name} {peer.version} did not come from the registry: {said}")


def _unpack(wheel: Path, folder: Path, leaves_out: tuple[str, ...]) -> None:
    # Only extensions of the peer itself may be left out; those of its dependencies are needed.
    own = wheel.name.startswith(folder.name.partition("-")[0] + "-")
    with zipfile.ZipFile(wheel) as packed:
        for name in packed.namelist():
            if not (own and name.endswith(leaves_out)):
                packed.extract(name, folder)


class _Anything(type):
    """A class whose attributes are all such classes."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)


def _anything(name: str) -> type:
    def first_or_self(self: object, *arguments: object, **_: object) -> object:
        # So that it also works as a decorator.
        return arguments[0] if arguments else self

    def attribute(self: object, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)

    body = {"__init__": lambda self, *_, **__: None, "__call__": first_or_self, "__getattr__": attribute}
    return _Anything(name, (), body)


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Creates empty modules for the named packages, unless real ones are installed."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = frozenset(names)

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in self._names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _StandIn(spec.name)
        module.__path__ = []
        module.__version__ = "0"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave the module empty."""


def make_importable(name: str, folder: Path) -> None:
    """Prepare this process to import a peer from its folder. Nothing of the peer is imported yet."""
    warnings.filterwarnings("ignore")
    os.environ.setdefault("PYTHONHASHSEED", "0")
    # Real packages first: torch and transformers look for compilers when imported, and must not find stand-ins.
    import torch
    import torch._inductor.runtime.triton_heuristics
    import torch.utils._triton
    from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer, PretrainedConfig, ProcessorMixin

    del AutoImageProcessor, AutoProcessor, AutoTokenizer, PretrainedConfig, ProcessorMixin
    torch.utils._triton.has_triton_package()
    torch.set_num_threads(1)
    # After the installed packages, which take precedence.
    sys.path.append(str(folder))
    if name == "sglang":
        # Its own __init__ would load the whole server.
        package = types.ModuleType("sglang")
        package.__path__ = [str(folder / "sglang")]
        package.__version__ = PEERS[name].version  # type: ignore[attr-defined]  # As a package has it.
        sys.modules["sglang"] = package
    if name == "vllm":
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.meta_path.append(_StandIns(PEERS[name].stands_in))
