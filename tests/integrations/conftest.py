"""SGLang's base class: its own, from an unpacked wheel that TIDEKV_TEST_SGLANG names, or one made of its contract."""

from __future__ import annotations

import importlib
import os
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import ModuleType

import pytest

MODULE = "sglang.srt.mem_cache.hicache_storage"


class HiCacheStorage(ABC):
    """What SGLang 0.5.23 asks of a storage backend, as its own class declares it."""

    def register_mem_pool_host(self, mem_pool_host: object) -> None:
        self.mem_pool_host = mem_pool_host

    @abstractmethod
    def get(self, key, target_location=None, target_sizes=None): ...

    @abstractmethod
    def batch_get(self, keys, target_locations=None, target_sizes=None): ...

    @abstractmethod
    def set(self, key, value=None, target_location=None, target_sizes=None): ...

    @abstractmethod
    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None): ...

    @abstractmethod
    def exists(self, key): ...


@pytest.fixture(params=["contract", "wheel"])
def backend(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The module under test, upon either base class."""
    place = os.environ.get("TIDEKV_TEST_SGLANG")
    if request.param == "wheel" and place is None:
        pytest.skip("set TIDEKV_TEST_SGLANG to an unpacked wheel of sglang to test with its own classes")
    before = dict(sys.modules)
    package = types.ModuleType("sglang")
    package.__path__ = [f"{place}/sglang"] if request.param == "wheel" else []
    sys.modules["sglang"] = package
    if request.param == "contract":
        for name in ("sglang.srt", "sglang.srt.mem_cache"):
            sys.modules[name] = types.ModuleType(name)
        sys.modules[MODULE] = types.ModuleType(MODULE)
        vars(sys.modules[MODULE])["HiCacheStorage"] = HiCacheStorage
    try:
        yield importlib.import_module("tidekv.engine.integrations.sglang")
    finally:
        for name in set(sys.modules) - set(before):
            if name.startswith("sglang") or name == "tidekv.engine.integrations.sglang":
                del sys.modules[name]
        sys.modules.pop("tidekv.engine.integrations.sglang", None)
