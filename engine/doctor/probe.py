"""Checks that could hang or crash, one a child process: `python -m tidekv.engine.doctor.probe NAME [ARGUMENT]`.

Each prints its findings as JSON. The doctor kills those that do not answer in time, so nothing here has deadlines.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

from tidekv.engine.doctor.finding import Finding, in_bytes

BLOCK_BYTES: Final = 4 << 20
STORAGE_BYTES: Final = 256 << 20
STORAGE_TURN_S: Final = 2.0
STORAGE_WANTED: Final = 500 << 20
LAG_WANTED_S: Final = 0.002


def nixl(_: str) -> list[Finding]:
    """Make an agent, list its plugins, and start UCX as a worker does; list the ports that it opens."""
    from tidekv.engine.doctor.machine import data_plane, listening
    from tidekv.states.errors import TidekvError
    from tidekv.transports.nixl_agent import NixlAgent

    reinstall = "Run: pip install --force-reinstall nixl==1.5.1, and look at what it says above."
    try:
        agent = NixlAgent(f"doctor-{os.getpid()}", backends={}, progress_delay_us=20_000)
        plugins = sorted(agent.plugins())
    except TidekvError as error:
        return [Finding("nixl", "bad", f"no agent can be made: {error}", reinstall)]
    listed = ", ".join(plugins)
    if "UCX" not in plugins:
        return [Finding("nixl", "bad", f"plugins: {listed}; UCX is missing", reinstall)]
    try:
        before = set(listening())
        agent = NixlAgent(f"doctor-ucx-{os.getpid()}", backends={"UCX": {}}, progress_delay_us=20_000)
        ports = data_plane([port for port in listening() if port not in before], environment=os.environ)
    except TidekvError as error:
        advice = "Unset UCX_TLS and UCX_NET_DEVICES, or name devices that exist."
        return [Finding("nixl", "bad", f"UCX does not start: {error}", advice)]
    if "POSIX" not in plugins:
        advice = "Storage needs it with io=nixl only."
        return [Finding("nixl", "warn", f"plugins: {listed}; POSIX is missing", advice), ports]
    return [Finding("nixl", "ok", f"UCX starts; plugins: {listed}"), ports]


def ucx(_: str) -> list[Finding]:
    """Name the transports of the UCX that NIXL brings along."""
    found: set[str] = set()
    for package in ("nixl_cu13", "nixl_cu12"):
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:
            libraries = Path(spec.origin).parent.parent / f"{package}.libs" / "ucx"
            found |= {file.name.removeprefix("libuct_").partition(".")[0] for file in libraries.glob("libuct_*.so*")}
    if not found:
        return [Finding("ucx", "warn", "no UCX modules beside NIXL", "Is NIXL built here, with a UCX of its own?")]
    return [Finding("ucx", "ok", f"built in: tcp, shared memory; modules: {', '.join(sorted(found))}")]


def gpu(_: str) -> list[Finding]:
    """Name the GPUs that torch sees; none is no fault."""
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        listed = ", ".join(f"{each.name} with {in_bytes(each.total_memory)}" for each in names)
        return [Finding("gpu", "ok", listed)]
    if Path("/dev/nvidia0").exists():
        found = f"there is /dev/nvidia0, but torch {torch.__version__} sees no CUDA device"
        return [Finding("gpu", "bad", found, "Install torch's CUDA build that fits the driver (see nvidia-smi).")]
    return [Finding("gpu", "warn", "none", 'Fine for tests with device = "cpu"; serving wants a GPU.')]


def loop(_: str) -> list[Finding]:
    """Measure how late an idle event loop is."""
    import uvloop

    async def lags() -> list[float]:
        found = []
        for _ in range(200):
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            found.append(time.perf_counter() - due)
        return sorted(found)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        late = runner.run(lags())[197]
    if late > LAG_WANTED_S:
        advice = "The machine is busy, or stops this process: leave it more CPUs, and pin them."
        return [Finding("event loop", "warn", f"{late * 1000:.1f} ms late at p99, idle", advice)]
    return [Finding("event loop", "ok", f"{late * 1000:.2f} ms late at p99, idle")]


def storage(directory: str) -> list[Finding]:
    """Write and read a file in a directory, past the page cache where that is possible. Leaves nothing behind."""
    try:
        free = os.statvfs(directory)
        room = free.f_bavail * free.f_frsize
        if room < 2 * STORAGE_BYTES:
            advice = "Make room, or name another directory: a cache that cannot hold anything helps nobody."
            return [Finding("storage", "bad", f"{directory} has {in_bytes(room)} free", advice)]
        with tempfile.NamedTemporaryFile(dir=directory, prefix="tidekv-doctor-") as file:
            written, write_s = _write(file.fileno())
            read_s, direct = _read(Path(file.name), written)
    except OSError as error:
        return [Finding("storage", "bad", f"{directory}: {error.strerror}", "Name a directory that this user may use.")]
    rates = (written / write_s, written / read_s)
    how = "past the page cache" if direct else "maybe from the page cache"
    found = f"{directory}: writes {in_bytes(int(rates[0]))}/s, reads {in_bytes(int(rates[1]))}/s {how}, "
    found += f"{in_bytes(room)} free"
    if min(rates) < STORAGE_WANTED:
        advice = "Slow for L3: raise engine.storage.prefetch_threshold_tokens, or use a local NVMe disk."
        return [Finding("storage", "warn", found, advice)]
    return [Finding("storage", "ok", found)]


def _write(file: int) -> tuple[int, float]:
    block = os.urandom(BLOCK_BYTES)
    start_s = time.perf_counter()
    written = 0
    while written < STORAGE_BYTES and time.perf_counter() - start_s < STORAGE_TURN_S:
        written += os.write(file, block)
    os.fsync(file)
    return written, time.perf_counter() - start_s


def _read(path: Path, size: int) -> tuple[float, bool]:
    """Return how long reading took, and whether it was surely the device that was read."""
    direct = True
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        direct = False  # As on tmpfs.
        file = os.open(path, os.O_RDONLY)
    with contextlib.closing(mmap.mmap(-1, BLOCK_BYTES)) as buffer:
        try:
            if not direct:
                os.posix_fadvise(file, 0, size, os.POSIX_FADV_DONTNEED)
            start_s = time.perf_counter()
            while os.readv(file, [buffer]):
                pass
            return time.perf_counter() - start_s, direct
        finally:
            os.close(file)


PROBES: Final[Mapping[str, Callable[[str], list[Finding]]]] = {
    "nixl": nixl,
    "ucx": ucx,
    "gpu": gpu,
    "event loop": loop,
    "storage": storage,
}

if __name__ == "__main__":
    # NIXL and torch write to stdout as they like; only the last line is ours.
    answer = PROBES[sys.argv[1]](sys.argv[2] if len(sys.argv) > 2 else "")
    sys.stdout.write(f"\n{msgspec.json.encode(answer).decode()}\n")
    sys.stdout.flush()
    # Without finalizers: what hangs at exit would be taken for a check that hangs.
    os._exit(0)
