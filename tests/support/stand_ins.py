"""Make a serving engine importable from its unpacked wheel without most of its dependencies.

Used by the programs beside this file, each in a process of its own.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Set as AbstractSet
from typing import Any  # What it stands in for has no types.
from unittest.mock import MagicMock


class Nothing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for packages, and modules, that are imported and not used."""

    def __init__(self, unused: AbstractSet[str]) -> None:
        self._unused = unused

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        parts = name.split(".")
        if self._unused.isdisjoint(".".join(parts[:count]) for count in range(1, len(parts) + 1)):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return MagicMock(name=spec.name, __name__=spec.name, __path__=[], __spec__=spec, __file__=None)

    def exec_module(self, module: object) -> None:
        pass


def make_importable(name: str, *, wheel: str, packages: str) -> None:
    """Make a package importable from an unpacked wheel, without what its own __init__ does. `packages` is a directory
    with what it needs and this environment lacks.
    """
    sys.path.append(packages)
    package = types.ModuleType(name)
    package.__path__ = [f"{wheel}/{name}"]
    vars(package)["__version__"] = "0"
    sys.modules[name] = package
    # Before any stand-in: transformers looks at what is installed when it is asked for these.
    import transformers

    for member in ("AutoImageProcessor", "AutoProcessor", "AutoTokenizer", "PretrainedConfig", "ProcessorMixin"):
        getattr(transformers, member)
