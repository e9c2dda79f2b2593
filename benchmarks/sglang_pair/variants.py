"""The set-ups that are compared: one server, SGLang's own caches of a decode server, and tidekv."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.ports import HOST, free_port
from benchmarks.servers.plugins import write_entry_points
from benchmarks.sglang_pair.names import HANG
from benchmarks.sglang_pair.server import MODEL, PLAIN, Server, ServerOptions
from benchmarks.sglang_pair.storage import PAUSED, StorageFolder

MIB: Final = float(1 << 20)
SENT_MIB: Final = "sglang:kv_transfer_total_mb_sum"
"""Metric of prefill: MiB of KV that it sent."""
ENTRY_POINTS: Final = {
    "benchmark_cpu": "benchmarks.sglang_pair.plugin:run_on_cpu",
    "benchmark_latent": "benchmarks.sglang_pair.plugin:run_latent_on_cpu",
    "benchmark_windows": "benchmarks.sglang_pair.plugin:run_windows_on_cpu",
    "benchmark_quiet": "benchmarks.sglang_pair.plugin:be_quiet",
    "benchmark_forward": "benchmarks.sglang_pair.plugin:count_forward_passes",
    "benchmark_watch": "benchmarks.sglang_pair.plugin:watch",
    "benchmark_hang": "benchmarks.sglang_pair.plugin:hang_on_request",
    # As in pyproject.toml. What an editable installation wrote about this checkout may be older than its plugin.
    "tidekv": "tidekv.engine.integrations.sglang.handover.plugin:register",
}
HICACHE_STORE: Final = {
    "backend_name": "tidekv",
    "interface_v1": 1,
    "module_path": "tidekv.engine.integrations.sglang.hicache",
    "class_name": "TidekvHiCacheStorage",
}
SETTINGS: Final = "TIDEKV_SGLANG"
"""Environment variable with the settings of the backend `tidekv`."""
ROOM: Final = 1.2
"""Host memory of decode by what it is to hold: all conversations, or its device memory, of which SGLang needs more."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a decode server keeps KV, and how much of it: tokens of the device pool, tokens of all conversations."""

    storage: StorageFolder
    device_tokens: int
    all_tokens: int
    page_size: int
    kv_bytes: int
    """Of a token, on all ranks."""
    hangs: bool = False
    prefills: Sequence[str] = ()
    """The bootstrap services of all prefill servers, host:port."""

    @property
    def uri(self) -> str:
        """The folder as storage of tidekv."""
        return f"{PAUSED if self.hangs else 'file'}:{self.storage.path}?capacity=400MB"


Arguments = Callable[[Place], Sequence[str]]
"""Arguments of a decode server for its cache."""
Settings = Callable[[str, Place, int], Mapping[str, object]]
"""The settings of the backend `tidekv`, by role, place and the port for its metrics."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A set-up by name. `settings`: those of the backend `tidekv`, None for NIXL; `is_quiet`: see `plugin.be_quiet`."""

    name: str
    title: str
    cache: Arguments
    is_pair: bool = True
    is_quiet: bool = True
    settings: Settings | None = None

    def bytes_from_prefill(self, decode: Mapping[str, float], prefill: Mapping[str, float]) -> float | None:
        """Return the bytes of KV that prefill sent; None for one server."""
        return prefill.get(SENT_MIB, 0.0) * MIB if self.is_pair else None

    def server(self, role: str, number: int, *, options: ServerOptions, folder: Path, place: Place) -> Server:
        """Return a server of this set-up; it is not started."""
        arguments: list[str] = []
        variables = {
            HANG: str(place.storage.marker),
            "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(place.storage.path),
        }
        metrics_port = 0
        if self.settings is not None and role != PLAIN:
            # A prefill that does not read has no engine.
            metrics_port = free_port() if role == "decode" or self.settings is _tidekv_reads else 0
            variables[SETTINGS] = json.dumps(self.settings(role, place, metrics_port))
        if role != PLAIN:
            backend = "nixl" if self.settings is None else "tidekv"
            arguments.append(f"--disaggregation-transfer-backend={backend}")
        if role == "decode":
            arguments += self.cache(place)
        plugins = ["benchmark_cpu", "benchmark_forward", "benchmark_watch"]
        plugins += ["benchmark_latent"] if options.shape.latent else []
        plugins += ["benchmark_windows"] if options.shape.window else []
        plugins += ["tidekv"] if self.settings is not None else []
        plugins += ["benchmark_quiet"] if self.is_quiet else []
        plugins += ["benchmark_hang"] if place.hangs else []
        points = write_entry_points(folder / "plugins", "tidekv_benchmark", "sglang.srt.plugins", ENTRY_POINTS)
        engines = {PAUSED: "benchmarks.sglang_pair.storage:open_paused"}
        write_entry_points(points, "tidekv_benchmark_storage", "tidekv.storage", engines)
        return Server(
            f"{role}-{number}",
            folder,
            role=role,
            options=options,
            arguments=arguments,
            plugins=plugins,
            plugin_folder=points,
            damage=place.storage.damage,
            variables=variables,
            metrics_port=metrics_port,
        )


def _none(place: Place) -> list[str]:
    return []


def _radix(place: Place) -> list[str]:
    return ["--disaggregation-decode-enable-radix-cache"]


def _hicache(place: Place, *, ratio: float) -> list[str]:
    # "direct" is the copy that `plugin` has without a GPU, and storage needs this layout with it.
    return [
        *_radix(place),
        "--enable-hierarchical-cache",
        f"--hicache-ratio={max(ratio, ROOM):.2f}",
        "--hicache-io-backend=direct",
        "--hicache-mem-layout=page_first_direct",
        "--hicache-write-policy=write_through",
    ]


def _l2(place: Place) -> list[str]:
    return _hicache(place, ratio=ROOM * place.all_tokens / place.device_tokens)


def _l3(place: Place, *, backend: str, extra: Mapping[str, object]) -> list[str]:
    given = {"prefetch_threshold": 2 * place.page_size, **extra}
    return [
        *_hicache(place, ratio=ROOM),
        f"--hicache-storage-backend={backend}",
        "--hicache-storage-prefetch-policy=wait_complete",
        "--hicache-storage-backend-extra-config",
        json.dumps(given),
    ]


def _file(place: Place) -> list[str]:
    return _l3(place, backend="file", extra={})


def _store(place: Place) -> list[str]:
    return _l3(place, backend="dynamic", extra={**HICACHE_STORE, "uri": place.uri, "model": MODEL})


def _tidekv(
    role: str, place: Place, metrics_port: int, *, holds_all: bool = True, stores: bool = True, lasts: bool = False
) -> Mapping[str, object]:
    if role == "prefill":
        return {}
    return {
        "dials": [f"{HOST}:*"],
        "prefills": list(place.prefills),
        "host": int(ROOM * (place.all_tokens if holds_all else place.device_tokens) * place.kv_bytes),
        **({"uri": place.uri} if stores else {}),
        **({"host_path": str(place.storage.path.with_name("pool"))} if lasts else {}),
        "engine": {"metrics": {"listen": f"{HOST}:{metrics_port}"}},
    }


def _tidekv_reads(role: str, place: Place, metrics_port: int) -> Mapping[str, object]:
    """Decode shares its host memory, and prefill reads there whatever it lacks of full pages."""
    settings = dict(_tidekv("decode", place, metrics_port, stores=False))
    if role == "prefill":
        peers: dict[str, object] = {"enabled": True, "host_share": 1.0}
        del settings["prefills"]
    else:
        peers = {"enabled": True, "listen": f"{HOST}:0", "read_share": 1.0}
    engine = {
        "metrics": {"listen": f"{HOST}:{metrics_port}"},
        "cache_peers": peers,
        "storage": {"prefetch_threshold_tokens": place.page_size},
        "page_checksums": True,
    }
    return {**settings, "engine": engine}


_QUIET: Final = (
    Variant("none", "no cache", _none),
    Variant("radix", "radix (L1)", _radix),
    Variant("l2", "HiCache, L2", _l2),
    Variant("file", "HiCache, L2 and file", _file),
    Variant("store", "HiCache, L2 and tidekv", _store),
    Variant("tidekv-l2", "tidekv, L2", _radix, settings=partial(_tidekv, stores=False)),
    Variant("tidekv-l3", "tidekv, L2 and file", _radix, settings=partial(_tidekv, holds_all=False)),
    Variant("tidekv-lasting", "tidekv, L2 in a file", _radix, settings=partial(_tidekv, stores=False, lasts=True)),
    Variant("tidekv-reads", "tidekv, prefill reads decode", _radix, settings=_tidekv_reads),
    Variant("tidekv", "tidekv", _radix, settings=_tidekv),
)
SINGLE: Final = Variant("single", "one server", _none, is_pair=False)
AS_IT_IS: Final = "-as-is"
VARIANTS: Final = {
    variant.name: variant
    for variant in (
        SINGLE,
        *_QUIET,
        *(replace(one, name=one.name + AS_IT_IS, title=f"{one.title}, as it is", is_quiet=False) for one in _QUIET),
    )
}
"""SGLang is compared with threads that pause, and as it is: see `plugin.be_quiet`."""
