"""The set-ups that are compared: one server, vLLM's NixlConnector as it is and with less noise, and tidekv."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from benchmarks.ports import HOST, free_port
from benchmarks.servers.plugins import write_entry_points
from benchmarks.vllm_pair.server import Server, ServerOptions

MODULE: Final = "tidekv.engine.integrations.vllm.connector"
TOGGLED_MODULE: Final = "benchmarks.vllm_pair.toggled_connector"
STEP_TIMES: Final = "TIDEKV_BENCHMARK_STEP_TIMES"
"""Environment variable of a server: the folder in which `toggled_connector` writes."""


COUNTED: Final = {"forward_cpu": "benchmarks.servers.forward_cpu:register"}
QUIET: Final = {"quiet_nixl": "benchmarks.servers.quiet_nixl:register"}
"""Plugins of vLLM, by entry point."""


@dataclass(frozen=True, slots=True)
class Place:
    """A server's part in a set-up: its role, "prefill" or "decode", the URI of the storage (L3), the ranks in which it
    hands over, and further keys of "handover".
    """

    role: str
    storage: str
    ranks: int = 1
    handover: Mapping[str, object] = field(default_factory=dict)


Transfer = Callable[[Place], Mapping[str, object] | None]
"""The `--kv-transfer-config` of a server."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A set-up by name. `counter`: metric of decode that counts the bytes from prefill.

    `is_toggled`: its connector writes times of steps. `is_concurrent`: the route names a room and starts prefill and
    decode at once. `rests_on_decode`: later turns of a conversation go to decode alone.
    `reads_decode`: prefill is told what decode has of a conversation.
    """

    name: str
    title: str
    transfer: Transfer
    is_pair: bool = True
    is_quiet: bool = False
    is_toggled: bool = False
    is_concurrent: bool = False
    rests_on_decode: bool = False
    reads_decode: bool = False
    counter: str | None = None

    def bytes_from_prefill(self, decode: Mapping[str, float], prefill: Mapping[str, float]) -> float | None:
        """Return the bytes of KV that prefill sent; None if it is no pair that counts them."""
        return None if self.counter is None else decode.get(self.counter, 0.0)

    def server(self, role: str, number: int, *, options: ServerOptions, folder: Path, storage: str) -> Server:
        """Return a server of this set-up; it is not started. `storage`: the URI of L3."""
        variables = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port(options.ranks)),  # Rank r adds r.
            "UCX_RCACHE_MAX_UNRELEASED": "1024",  # As vLLM sets it, unless a plugin has imported NIXL before.
        }
        if self.is_toggled:
            steps = steps_folder(folder, f"{role}-{number}")
            steps.mkdir(parents=True)
            variables[STEP_TIMES] = str(steps)
        plugins = {**COUNTED, **(QUIET if self.is_quiet else {})}
        points = write_entry_points(folder / "plugins", "tidekv_benchmark", "vllm.general_plugins", plugins)
        variables["PYTHONPATH"] = str(points)
        transfer = self.transfer(Place(role, storage, options.handover_ranks, options.handover))
        return Server(f"{role}-{number}", folder, options=options, transfer=transfer, variables=variables)


def steps_folder(folder: Path, server: str) -> Path:
    """Return where the toggled connector of a server in `folder` writes its files."""
    return folder / f"{server}-steps"


def _none(place: Place) -> None:
    return None


def _nixl(place: Place) -> Mapping[str, object]:
    return {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer" if place.role == "prefill" else "kv_consumer",
        "kv_load_failure_policy": "recompute",
    }


def _tidekv_storage(place: Place) -> Mapping[str, object]:
    return {
        "kv_connector": "TidekvConnector",
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "uri": place.storage,
            "model": "tiny",
            "host": "256MB",
        },
    }


def _tidekv(place: Place) -> Mapping[str, object]:
    is_prefill = place.role == "prefill"
    handover: dict[str, object] = {"model": "tiny", **place.handover}
    if is_prefill:
        handover["listen"] = f"{HOST}:{free_port(place.ranks)}"
    else:
        handover = {"host": "512MB", "uri": place.storage, "dials": [f"{HOST}:*"], **handover}
    return {
        "kv_connector": "TidekvConnector",
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_producer" if is_prefill else "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"handover": handover},
    }


def _tidekv_reads(place: Place) -> Mapping[str, object]:
    is_prefill = place.role == "prefill"
    # The first read begins once the link is open, which takes long while all servers start up on few cores.
    peers: dict[str, object] = {"enabled": True, "wait_s": 20.0, "wait_share": 0.9}
    peers |= {"allow": [f"{HOST}:*"]} if is_prefill else {"listen": f"{HOST}:{free_port()}"}
    engine = {"cache_peers": peers, "storage": {"prefetch_threshold_tokens": 16}}
    more = {"host": "256MB", "dials": [f"{HOST}:*"]} if is_prefill else {}
    transfer = _tidekv(replace(place, handover={"engine": engine, **more, **place.handover}))
    return {**transfer, "kv_role": "kv_both"} if is_prefill else transfer


def _toggled(place: Place) -> Mapping[str, object]:
    return {**_tidekv(place), "kv_connector_module_path": TOGGLED_MODULE}


TIDEKV_BYTES: Final = "vllm:tidekv_restore_bytes_transfer_total"
VARIANTS: Final = {
    variant.name: variant
    for variant in (
        Variant("single", "one server", _none, is_pair=False),
        Variant("nixl", "NixlConnector as it is", _nixl, counter="vllm:nixl_bytes_transferred_sum"),
        Variant(
            "nixl-quiet",
            "NixlConnector, quiet",
            _nixl,
            is_quiet=True,
            counter="vllm:nixl_bytes_transferred_sum",
        ),
        Variant("tidekv-single", "one server, tidekv's storage", _tidekv_storage, is_pair=False),
        Variant("tidekv-storage", "pair that shares tidekv's storage", _tidekv_storage),
        Variant("tidekv", "tidekv", _tidekv, counter=TIDEKV_BYTES),
        Variant("tidekv-rest", "tidekv, later turns on decode", _tidekv, counter=TIDEKV_BYTES, rests_on_decode=True),
        Variant("tidekv-reads", "tidekv, prefill reads decode", _tidekv_reads, counter=TIDEKV_BYTES, reads_decode=True),
        Variant("tidekv-both", "tidekv, both at once", _tidekv, counter=TIDEKV_BYTES, is_concurrent=True),
    )
}
TOGGLED: Final = Variant("tidekv-toggled", "tidekv", _toggled, is_toggled=True)
"""tidekv whose calls do nothing in every other group of steps; not for conversations, which it would delay."""
