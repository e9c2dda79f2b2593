"""Environment of `python3 dev.py sglang`: SGLang for servers without a GPU, NIXL, sglang-router and this checkout.

It needs only the standard library, since it runs before there is an environment. TIDEKV_TEST_SGLANG_VENV names one that
has all of that already; it is used as it is.

SGLang is installed without what it requires: most of that are kernels for GPUs, of which `stand_ins` takes the place
here. No file of SGLang is changed; what a machine without a GPU lacks is replaced at run time by `cpu_plugin`.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from tools import environment

ROOT = Path(__file__).resolve().parents[2]
DIRECTORY = ROOT / ".venv-sglang"
SGLANG_VERSION = "0.5.23"
TORCH_VERSION = "2.13.0"
WITHOUT_DEPENDENCIES = (f"sglang=={SGLANG_VERSION}", "sglang-router==0.3.2", "torchvision==0.28.0")
"""The version of torchvision is the one for this torch."""
IMPORTED = (
    "aiohttp==3.14.5",
    "apache-tvm-ffi==0.1.11",
    "compressed-tensors==0.18.0",
    "dill==0.4.1",
    "distro==1.9.0",
    "einops==0.8.2",
    "fastapi==0.165.0",
    "gguf==0.19.0",
    "ipython==9.18.1",
    "kernels==0.14.1",
    "loguru==0.7.3",
    "mistral-common==1.13.1",
    "nixl==1.5.1",
    "numpy==2.3.5",
    "nvidia-ml-py==13.615.71",
    "openai==2.8.0",
    "openai-harmony==0.0.4",
    "orjson==3.13.0",
    "packaging==26.4",
    "partial-json-parser==0.2.1.1.post7",
    "pillow==13.0.0",
    "psutil==7.2.2",
    "pybase64==1.5.1",
    "pycountry==26.2.16",
    "pydantic==2.14.4",
    "python-dateutil==2.9.0.post0",
    "python-multipart==0.0.34",
    "pyzmq==27.3.0",
    "regex==2026.11.19",
    "requests==2.34.2",
    "scipy==1.17.1",
    "sentencepiece==0.2.1",
    "setproctitle==1.3.8",
    "soundfile==0.13.1",
    "tiktoken==0.14.0",
    "tokenizers==0.23.2",
    f"torch=={TORCH_VERSION}",
    "tqdm==4.70.1",
    "transformers==5.19.0",
    "uvicorn==0.54.0",
    "watchfiles==1.3.0",
    "xgrammar==0.2.7",
    "zstandard==0.25.0",
)
"""What SGLang imports to serve text, with the versions that it asks for or that it is known to run with here."""
MARKER = "tidekv-installed"
GIVEN = "TIDEKV_TEST_SGLANG_VENV"


def wanted_marker() -> str:
    """Return the content of the marker of a finished installation; another content requires a new one."""
    made_from = (ROOT / "pyproject.toml").read_bytes() + " ".join([*WITHOUT_DEPENDENCIES, *IMPORTED]).encode()
    digest = hashlib.sha256(made_from).hexdigest()
    return f"{SGLANG_VERSION} {digest} {sys.version_info.major}.{sys.version_info.minor} {ROOT}\n"


def set_up(directory: Path = DIRECTORY) -> Path:
    """Make the environment unless it is up to date, and return its Python. Exits with pip's message if pip fails."""
    requirements = [*IMPORTED, "-e", f"{ROOT}[redis]"]
    return environment.fill(directory, requirements, marker=directory / MARKER, wanted=wanted_marker(), mend=_mend)


def _mend(python: Path) -> None:
    environment.pip(python, ("install", "--quiet", "--no-deps", *WITHOUT_DEPENDENCIES))
    # A torchvision for CUDA describes operators that its library does not have beside a torch for CPUs, and fails at
    # its import. SGLang imports it in any case; a model of text uses none of them.
    packages = python.parents[1] / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    if not list(packages.glob("nvidia_cuda_runtime*")):
        (packages / "torchvision" / "_meta_registrations.py").write_text('"""Left out: see tidekv\'s dev.py."""\n')


if __name__ == "__main__":
    environment.print_python(GIVEN, set_up, "SGLang, NIXL and tidekv's dependencies")
