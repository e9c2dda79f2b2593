"""Checks that could hang or crash, one per child process: `python -m tidekv.engine.doctor.probe NAME [ARGUMENT]`.

Each prints its findings as JSON. The doctor kills a child that takes too long, so nothing here has a deadline.
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
    """Create an agent, list its plugins, and start UCX as a worker does."""
    from tidekv.engine.doctor.machine import data_plane, listening
    from tidekv.states.errors import TidekvError
    from tidekv.transports.nixl import rdma_module
    from tidekv.transports.nixl.agent import NixlAgent

    reinstall = "Run: pip install --force-reinstall nixl==1.5.1, and read the messages of NIXL above."
    try:
        agent = NixlAgent(f"doctor-{os.getpid()}", backends={}, progress_delay_us=20_000)
        plugins = sorted(agent.plugins())
    except TidekvError as error:
        return [Finding("nixl", "bad", f"no agent can be created: {error}", reinstall)]
    listed = ", ".join(plugins)
    if "UCX" not in plugins:
        return [Finding("nixl", "bad", f"plugins: {listed}; UCX is missing", reinstall)]
    is_set = rdma_module.MODULES_VARIABLE in os.environ
    try:
        before = set(listening())
        agent = NixlAgent(f"doctor-ucx-{os.getpid()}", backends={"UCX": {}}, progress_delay_us=20_000)
        ports = data_plane([port for port in listening() if port not in before], environment=os.environ)
    except TidekvError as error:
        advice = "Unset UCX_TLS and UCX_NET_DEVICES, or name devices that exist."
        return [Finding("nixl", "bad", f"UCX does not start: {error}", advice)]
    ending = process_end(rdma_module.why_unused({}, os.environ), is_set=is_set, crashes=rdma_module.keep_exit_code())
    if "POSIX" not in plugins:
        advice = "Storage needs it with io=nixl only."
        return [Finding("nixl", "warn", f"plugins: {listed}; POSIX is missing", advice), ports, ending]
    return [Finding("nixl", "ok", f"UCX starts; plugins: {listed}"), ports, ending]


def process_end(unused: str, *, is_set: bool, crashes: bool) -> Finding:
    """Tell how a process with a NIXL agent ends. `unused` is why no RDMA device is used, empty if one is."""
    variable = "UCX_MODULES"
    if crashes:
        found = (
            "NIXL and the system each bring RDMA libraries: a process that loads both crashes at its end; those with a "
            "NixlTransport skip the libraries' destructors and keep their exit code"
        )
        advice = f"Set {variable}=^ib if no RDMA device is to be used." if not unused else f"Unset {variable}."
        return Finding("process end", "warn", found, advice)
    if is_set:
        return Finding("process end", "ok", f"{variable}={os.environ[variable]}; RDMA libraries are loaded once")
    if unused:
        return Finding("process end", "ok", f"UCX loads without its RDMA module: {unused}")
    return Finding("process end", "ok", "RDMA libraries are loaded once")


def ucx(_: str) -> list[Finding]:
    """List the transports of the UCX that is bundled with NIXL."""
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
    """List the GPUs that torch sees. None is only a warning."""
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        listed = ", ".join(f"{each.name} with {in_bytes(each.total_memory)}" for each in names)
        return [Finding("gpu", "ok", listed)]
    if Path("/dev/nvidia0").exists():
        found = f"/dev/nvidia0 exists, but torch {torch.__version__} sees no CUDA device"
        return [Finding("gpu", "bad", found, "Install torch's CUDA build that fits the driver (see nvidia-smi).")]
    return [Finding("gpu", "warn", "none", 'Sufficient for tests with device = "cpu"; serving needs a GPU.')]


def loop(_: str) -> list[Finding]:
    """Measure the delay of timers of an idle event loop."""
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
        advice = "The machine is busy, or suspends this process: give it more CPUs, and pin them."
        return [Finding("event loop", "warn", f"{late * 1000:.1f} ms late at p99, idle", advice)]
    return [Finding("event loop", "ok", f"{late * 1000:.2f} ms late at p99, idle")]


def storage(directory: str) -> list[Finding]:
    """Write and read a file in a directory, bypassing the page cache if possible. Leaves no file behind.

    In place of a directory that is missing, and that the engine would make, the one that it would be made in.
    """
    from tidekv.backends.storage.file.ownership import check_root
    from tidekv.states.errors import StorageFailed

    if ":" in directory.partition("/")[0]:
        # Not repeated: a URI may have a password in it.
        found = "--storage names a directory, not a URI"
        return [Finding("storage", "bad", found, "Try a store that is elsewhere with: tidekv store stat URI.")]
    given = Path(directory).expanduser().absolute()
    place = next(each for each in (given, *given.parents) if each.exists())
    try:
        if place == given:
            check_root(given)
        else:
            directory = f"{place} (in which {given} would be made)"
        free = os.statvfs(place)
        room = free.f_bavail * free.f_frsize
        if room < 2 * STORAGE_BYTES:
            advice = "Free space, or use another directory: this one is too small for a cache."
            return [Finding("storage", "bad", f"{directory} has {in_bytes(room)} free", advice)]
        with tempfile.NamedTemporaryFile(dir=place, prefix="tidekv-doctor-") as file:
            written, write_s = _write(file.fileno())
            read_s, direct = _read(Path(file.name), written)
    except StorageFailed as failed:
        return [
            Finding("storage", "bad", str(failed), "No engine opens it: use another directory, or correct this one.")
        ]
    except OSError as error:
        return [Finding("storage", "bad", f"{directory}: {error.strerror}", "Use a directory this user can write.")]
    rates = (written / write_s, written / read_s)
    how = "past the page cache" if direct else "possibly from the page cache"
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
    """Return the seconds that reading took, and whether it certainly bypassed the page cache."""
    direct = True
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        direct = False  # Not supported, for example on tmpfs.
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
    # NIXL and torch also write to stdout; the findings are the last line.
    answer = PROBES[sys.argv[1]](sys.argv[2] if len(sys.argv) > 2 else "")
    sys.stdout.write(f"\n{msgspec.json.encode(answer).decode()}\n")
    sys.stdout.flush()
    # Without finalizers: a library that hangs at exit would make the check look hung.
    os._exit(0)
