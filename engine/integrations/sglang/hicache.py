"""`HiCacheStorage` for SGLang (interface v1) on the storage tier that tidekv's decode engines use.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
        '{"backend_name": "tidekv", "module_path": "tidekv.engine.integrations.sglang.hicache",
          "class_name": "TidekvHiCacheStorage", "interface_v1": 1,
          "uri": "file:/var/lib/tidekv?capacity=200GB", "model": "my-model"}'

The model's name must equal that of the engines' `EngineConfig(model=…)`, and page size, dtype and heads must be the
same: both sides compute the same chain of hashes as keys, and pages are stored in tidekv's order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final  # SGLang has no types.

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from tidekv.backends.storage.base import KEY_BYTES
from tidekv.backends.storage.uri import open_storage
from tidekv.engine.integrations.sglang.page_layouts import HostPages
from tidekv.engine.integrations.sglang.storage_thread import StorageThread
from tidekv.engine.log import engine_log
from tidekv.states.errors import EngineClosed, InvalidConfig, InvalidRequest
from tidekv.states.validation import unknown

LOG = engine_log("tidekv.sglang")
TIMEOUT_S: Final = 30.0
OURS: Final = ("uri", "options", "model", "timeout_s")
LOADERS: Final = ("backend_name", "module_path", "class_name", "interface_v1")


class TidekvHiCacheStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang has no types.
    """Storage of one rank. SGLang creates it, registers its host pool, and calls it from its own threads.

    A page that cannot be read is a miss. A failure of storage is logged as a warning and counts as a miss.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, object] | None = None) -> None:
        """Check the options. Storage is opened by `register_mem_pool_host`. Raises InvalidConfig."""
        given = dict(storage_config.extra_config or {})
        for name in sorted(set(given) - {*OURS, *LOADERS}):
            raise InvalidConfig(f"extra config: {unknown(name, OURS, 'option')}")
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
        """Open the storage for a host pool. Raises InvalidConfig if its pages cannot be shared with tidekv."""
        super().register_mem_pool_host(mem_pool_host)
        is_mla = bool(self._config.is_mla_model)
        self._pages = HostPages(mem_pool_host, is_mla=is_mla)
        # With MLA all ranks hold the same latent vectors, and share one copy.
        rank, ranks = (0, 1) if is_mla else (int(self._config.tp_rank), int(self._config.tp_size))
        self._store = StorageThread(
            open_storage(self._uri, self._options),
            layout=self._pages.layout,
            model=self._model,
            rank=rank,
            ranks=ranks,
            timeout_s=self._timeout_s,
        )

    # --- Interface v1: pages in place, identified by the index of their first token ---

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Read pages into the host pool; True for each whose bytes were read and verified."""
        pages, starts = self._required_pages(), self._starts(keys, host_indices)
        return self._get(keys, lambda number, ours: _copy(ours, pages.view(starts[number])), extra_info)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Write pages of the host pool; True for each that storage has now."""
        pages, starts = self._required_pages(), self._starts(keys, host_indices)
        if not self._config.is_storage_writer:
            return [True] * len(keys)
        return self._put(keys, lambda number, ours: _copy_back(pages.view(starts[number]), ours), extra_info)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return the number of keys, from the first on, that storage probably has."""
        return self._opened().leading(_digests(keys), prefix_keys=_prefix_keys(extra_info))

    def exists(self, key: str) -> bool:
        """Return whether storage probably has a key."""
        return self.batch_exists([key]) == 1

    # --- The earlier interface: flat pages ---

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Read one page into the flat page `target_location`, or a new one."""
        flat = self.mem_pool_host.get_dummy_flat_data_page() if target_location is None else target_location
        pages = self._required_pages()
        (is_valid,) = self._get([key], lambda _, ours: _copy(ours, pages.flat_view(flat)))
        return flat if is_valid else None

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Read pages into flat pages; None for each that is missing."""
        flats = target_locations or [self.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
        pages = self._required_pages()
        valid = self._get(keys, lambda number, ours: _copy(ours, pages.flat_view(flats[number])))
        return [flat if is_valid else None for flat, is_valid in zip(flats, valid, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Write one flat page."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Write flat pages; True if storage has all of them now."""
        if not self._config.is_storage_writer:
            return True
        pages = self._required_pages()
        return all(self._put(keys, lambda number, ours: _copy_back(pages.flat_view(values[number]), ours)))

    # --- The rest ---

    def clear(self) -> None:
        """Delete every page of this model and layout."""
        self._opened().clear()

    def close(self) -> None:
        """Wait for running calls, and close the storage."""
        if self._store is not None:
            self._store.close()

    def _get(self, keys: Sequence[str], take: Any, extra_info: Any = None) -> list[bool]:
        return _copied(self._opened().get, keys, take, extra_info)

    def _put(self, keys: Sequence[str], give: Any, extra_info: Any = None) -> list[bool]:
        return _copied(self._opened().put, keys, give, extra_info)

    def _opened(self) -> StorageThread:
        if self._store is None:
            raise InvalidRequest("register_mem_pool_host comes before any call")
        return self._store

    def _required_pages(self) -> HostPages:
        self._opened()
        assert self._pages is not None, "it is created with the store"
        return self._pages

    def _starts(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[int]:
        """Return the first token index of each page; the page's other tokens follow it."""
        size = self._required_pages().layout.page_size
        if len(host_indices) != len(keys) * size:
            raise InvalidRequest(f"{len(keys)} pages of {size} tokens do not have {len(host_indices)} indices")
        starts: list[int] = host_indices[::size].tolist()
        return starts


def _copied(call: Callable[..., list[bool]], keys: Sequence[str], copy: Any, extra_info: Any) -> list[bool]:
    """Read or write pages, each with a copy to or from SGLang's memory. A copy that raises is logged, and its call has
    no page: SGLang's threads of backups and prefetches end with the first exception that leaves a call.
    """
    try:
        return call(_digests(keys), copy, prefix_keys=_prefix_keys(extra_info))
    except (InvalidRequest, EngineClosed):
        raise
    except Exception:
        LOG.exception("pages of SGLang could not be copied")
        return [False] * len(keys)


def _prefix_keys(extra_info: Any) -> list[bytes]:
    """Return the keys of the pages before those of a call, which SGLang passes if it was told to
    (`hicache_storage_pass_prefix_keys`).
    """
    return _digests(getattr(extra_info, "prefix_keys", None) or ())


def _digests(keys: Sequence[str]) -> list[bytes]:
    """Decode the keys, which SGLang passes as hex digests. Raises InvalidRequest."""
    try:
        digests = [bytes.fromhex(key) for key in keys]
    except ValueError as error:
        raise InvalidRequest(f"a key is not a hex digest: {error}") from error
    if any(len(digest) != KEY_BYTES for digest in digests):
        raise InvalidRequest(f"a key is not a digest of {KEY_BYTES} bytes")
    return digests


def _copy(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    theirs.copy_(ours.view(theirs.dtype).view(theirs.shape))


def _copy_back(theirs: torch.Tensor, ours: torch.Tensor) -> None:
    ours.view(theirs.dtype).view(theirs.shape).copy_(theirs)
