"""UCX's RDMA module `ib`: left out where nothing uses it, and kept from crashing the end of a process where something
does.

The module loads the vendors' libraries of the system (Debian: `ibverbs-providers`) beside those that NIXL bundles. The
process then has two libnl-route, and ends by SIGSEGV when the dynamic linker runs their destructors, whatever its exit
code was. UCX reads `UCX_MODULES` when it is loaded, for the whole process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Final

from tidekv.transports.log import engine_log

LOG = engine_log("tidekv.transports")
MODULES_VARIABLE: Final = "UCX_MODULES"
WITHOUT_RDMA: Final = "^ib"
TRANSPORTS_VARIABLE: Final = "UCX_TLS"
# UCX's transports over RDMA begin so: rc_verbs, rc_x, ud, dc_mlx5, srd, gga_mlx5, and ib for all of them.
RDMA_TRANSPORTS: Final = ("all", "ib", "rc", "ud", "dc", "srd", "gga")
DOUBLE_LIBRARY: Final = "libnl-route-3"


def rdma_devices(root: Path = Path("/")) -> list[str]:
    """Return the names of the InfiniBand and RoCE devices."""
    folder = root / "sys/class/infiniband"
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def why_unused(options: Mapping[str, str], environment: Mapping[str, str], *, root: Path = Path("/")) -> str:
    """Return why a UCX backend with these options uses no RDMA device; empty if it may use one."""
    devices = rdma_devices(root)
    if not devices:
        return "this machine has no RDMA device"
    transports = environment.get(TRANSPORTS_VARIABLE, "")
    if transports and not _names_rdma(transports):
        return f"{TRANSPORTS_VARIABLE}={transports} names no RDMA transport"
    named = environment.get("UCX_NET_DEVICES") or options.get("device_list") or _net_devices(options)
    if named and "all" not in named.split(",") and not any(device in named for device in devices):
        return f"UCX uses only {named}"
    return ""


def leave_out_unused(
    options: Mapping[str, str], environment: MutableMapping[str, str], *, root: Path = Path("/")
) -> None:
    """Make UCX load without its RDMA module if the backend uses no RDMA device, unless the user has set the modules.

    To be called before a UCX backend starts: UCX is loaded by the first one of the process.
    """
    is_unused = bool(why_unused(options, environment, root=root))
    if is_unused:
        environment.setdefault(MODULES_VARIABLE, WITHOUT_RDMA)
    elif environment.get(MODULES_VARIABLE) == WITHOUT_RDMA:
        LOG.warning(
            "UCX runs without RDMA: its module was left out for a transport of this process or of its parent that used "
            "no RDMA device. Set the variable to all before the process starts.",
            variable=MODULES_VARIABLE,
        )


def keep_exit_code() -> bool:
    """Make the process end with its exit code although it has loaded libnl-route twice. Returns whether it has.

    The C library then ends the process before the destructors of the libraries run, of which one would crash.
    """
    if not _is_loaded_twice(Path("/proc/self/maps").read_text()):
        return False
    libc = ctypes.CDLL(None)
    # `on_exit` passes the exit status to the function, so `_exit` needs no code of Python, which has ended by then. It
    # exists in glibc only, as NIXL's wheels do. A second registration is harmless.
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
    return True


def _is_loaded_twice(maps: str) -> bool:
    files = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if DOUBLE_LIBRARY in line}
    return len(files) > 1


def _names_rdma(transports: str) -> bool:
    """Whether a value of UCX_TLS may choose a transport over RDMA."""
    if transports.startswith("^"):  # All but those named.
        return "ib" not in transports.removeprefix("^").split(",")
    return any(one.strip().startswith(RDMA_TRANSPORTS) for one in transports.split(","))


def _net_devices(options: Mapping[str, str]) -> str:
    """Return the network devices that the options of a UCX backend name in UCX's own form, as NET_DEVICES=lo."""
    _, _, named = options.get("engine_config", "").partition("NET_DEVICES=")
    return named
