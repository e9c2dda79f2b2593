"""SGLang reads and writes the storage tier that tidekv's decode engines use: its `HiCacheStorage`, interface v1.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
        '{"backend_name": "tidekv", "module_path": "tidekv.engine.integrations.sglang",
          "class_name": "TidekvHiCacheStorage", "interface_v1": 1,
          "uri": "file:/var/lib/tidekv?capacity=200GB", "model": "my-model"}'

The model's name must be that of the engines' `EngineConfig(model=…)`, and page size, dtype and heads must be the same:
keys are the same chain of hashes on both sides, and pages are put in tidekv's order on the way.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final  # SGLang has no types.

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from tidekv.backends.storage.base import KEY_BYTES
from tidekv.backends.storage.uri import open_storage
from tidekv.engine.integrations.page_layouts import HostPages
from tidekv.engine.integrations.storage_thread import StorageThread
from tidekv.states.errors import InvalidConfig, InvalidRequest, StorageFailed

LOG = logging.getLogger("tidekv.sglang")
TIMEOUT_S: Final = 30.0
OURS: Final = ("uri", "options", "model", "timeout_s")
LOADERS: Final = ("backend_name", "module_path", "class_name", "interface_v1")


class TidekvHiCacheStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang has no types.
    """One rank's storage. SGLang makes it, registers its host pool, and calls it from its own threads.

    A page that cannot be had is a miss, and storage that fails is one warning and misses: SGLang goes on without.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, object] | None = None) -> None:
        """Nothing is opened before a host pool is registered. Raises InvalidConfig, which names what is wrong."""
        given = dict(storage_config.extra_config or {})
        unknown = sorted(set(given) - {*OURS, *LOADERS})
        if unknown:
            raise InvalidConfig(f"tidekv has no option {unknown[0]!r} for SGLang; it has {', '.join(OURS)}")
        if not isinstance(given.get("uri"), str):
            raise InvalidConfig('extra config needs "uri", such as "file:/var/lib/tidekv?capacity=200GB"')
        if storage_config.pp_size != 1 or getattr(storage_config, "attn_cp_size", 1) != 1:
            raise InvalidConfig("pages of pipeline stages and context-parallel ranks cannot be shared with tidekv")
        self._config = storage_config
        self._uri: str = given["uri"]
        self._options = given.get("options")
        self._model = str(given.get("model") or storage_config.model_name or "")
        self._timeout_s = float(given.get("timeout_s", TIMEOUT_S))
        self._pages: HostPages | None = None
        self._store: StorageThread | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the storage for this host pool. Raises InvalidConfig for a pool whose pages cannot be shared."""
        super().register_mem_pool_host(mem_pool_host)
        is_mla = bool(self._config.is_mla_model)
        self._pages = HostPages(mem_pool_host, is_mla=is_mla)
        # All ranks hold the same latent vectors: they share one copy.
        rank, ranks = (0, 1) if is_mla else (int(self._config.tp_rank), int(self._config.tp_size))
        self._store = StorageThread(
            open_storage(self._uri, self._options),
            layout=self._pages.layout,
            model=self._model,
            rank=rank,
            ranks=ranks,
            timeout_s=self._timeout_s,
        )

    # --- Interface v1: pages in place, by the index of their first token ---

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Read pages into the host pool; True where the verified bytes are there."""
        pages, starts = self._required_pages(), self._starts(keys, host_indices)
        return self._get(keys, lambda number, ours: _copy(ours, pages.view(starts[number])))

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Write pages of the host pool; True where they can be got."""
        pages, starts = self._required_pages(), self._starts(keys, host_indices)
        if not self._config.is_storage_writer:
            return [True] * len(keys)
        return self._put(keys, lambda number, ours: _copy_back(pages.view(starts[number]), ours))

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many keys, from the first on, are probably there."""
        try:
            return self._opened().leading(_digests(keys))
        except StorageFailed as error:
            LOG.warning("storage cannot be asked, which counts as a miss: %s", error)
            return 0

    def exists(self, key: str) -> bool:
        """Tell whether a key is probably there."""
        return self.batch_exists([key]) == 1

    # --- The interface before it: flat pages ---

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Read one page into the flat page `target_location`, or a new one."""
        flat = self.mem_pool_host.get_dummy_flat_data_page() if target_location is None else target_location
        pages = self._required_pages()
        (good,) = self._get([key], lambda _, ours: _copy(ours, pages.flat_view(flat)))
        return flat if good else None

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Read pages into flat pages; None for each that is not there."""
        flats = target_locations or [self.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
        pages = self._required_pages()
        good = self._get(keys, lambda number, ours: _copy(ours, pages.flat_view(flats[number])))
        return [flat if is_there else None for flat, is_there in zip(flats, good, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Write one flat page."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Write flat pages; True if all can be got."""
        if not self._config.is_storage_writer:
            return True
        pages = self._required_pages()
        return all(self._put(keys, lambda number, ours: _copy_back(pages.flat_view(values[number]), ours)))

    # --- The rest ---

    def clear(self) -> None:
        """Forget every page of this model and layout."""
        self._opened().clear()

    def close(self) -> None:
        """Wait for what runs, and close the storage."""
        if self._store is not None:
            self._store.close()

    def _get(self, keys: Sequence[str], take: Any) -> list[bool]:
        try:
            return self._opened().get(_digests(keys), take)
        except StorageFailed as error:
            LOG.warning("storage cannot be read, which counts as a miss: %s", error)
            return [False] * len(keys)

    def _put(self, keys: Sequence[str], give: Any) -> list[bool]:
        try:
            return self._opened().put(_digests(keys), give)
        except StorageFailed as error:
            LOG.warning("storage cannot be written: %s", error)
            return [False] * len(keys)

    def _opened(self) -> StorageThread:
        if self._store is None:
            raise InvalidRequest("register_mem_pool_host comes before any call")
        return self._store

    def _required_pages(self) -> HostPages:
        self._opened()
        assert self._pages is not None, "it is made with the store"
        return self._pages

    def _starts(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[int]:
        """The first token of each page; the others follow it."""
        size = self._required_pages().layout.page_size
        if len(host_indices) != len(keys) * size:
            raise InvalidRequest(f"{len(keys)} pages of {size} tokens do not have {len(host_indices)} indices")
        starts: list[int] = host_indices[::size].tolist()
        return starts


def _digests(keys: Sequence[str]) -> list[bytes]:
    """SGLang writes digests in hex."""
    try:
        digests = [bytes.fromhex(key) for key in keys]
    except ValueError as error:
        raise InvalidRequest(f"a key is no digest in hex: {error}") from error
    if any(len(digest) != KEY_BYTES for digest in digests):
        raise InvalidRequest(f"a key is no digest of {KEY_BYTES} bytes")
    return digests


def _copy(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    theirs.copy_(ours.view(theirs.dtype).view(theirs.shape))


def _copy_back(theirs: torch.Tensor, ours: torch.Tensor) -> None:
    ours.view(theirs.dtype).view(theirs.shape).copy_(theirs)
