"""Stand-in for `sgl_kernel`, SGLang's compiled kernels, on a machine without a GPU.

SGLang imports names of it wherever a kernel may be used. Here each name, also of a module within, is a function that
raises when it is called, so that what needs a kernel fails by the kernel's name. Only `scalar_type` does not exist:
SGLang has a placeholder of its own for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn  # A kernel takes anything.

__version__ = "0.4.10"  # SGLang checks it.


class _Modules(MetaPathFinder, Loader):
    """Finds any module within this package, and makes it an empty one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}.") or fullname.endswith(".scalar_type"):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = _names_of(spec.name)  # type: ignore[method-assign]  # PEP 562, for this module.
        return module

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to execute."""


def _names_of(module: str) -> Callable[[str], Callable[..., NoReturn]]:
    def attribute(name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def kernel(*args: Any, **kwargs: Any) -> NoReturn:
            raise NotImplementedError(f"{module}.{name} is a kernel for GPUs, and this is its stand-in")

        return kernel

    return attribute


__getattr__ = _names_of(__name__)
sys.meta_path.append(_Modules())
