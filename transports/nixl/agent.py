"""NIXL's agent behind a small, typed interface.

The wrapper shipped with NIXL fixes the progress thread's pause to zero, which occupies a core, and releases handles in
finalizers, possibly while they are in flight. So this module uses the bindings beneath it, by these rules:

- a request is released only after its end, and not used after that (NIXL would crash);
- after `close` no call reaches NIXL: what was in flight ends in TransferFailed;
- every error of NIXL is raised as TransferFailed, with NIXL's own as its cause.

All calls may block (a post copies on shared memory): never call them on the event loop. They may come from several
threads: the agent runs with NIXL's strict locking.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

from tidekv.states.errors import InvalidConfig, LocalProtocolError, TransferFailed
from tidekv.states.types import PoolMemory, Segment
from tidekv.transports.nixl import rdma_module
from tidekv.transports.nixl.layout import extents, strided_rows
from tidekv.transports.nixl.plan import Part

# NIXL has ended processes by SIGABRT inside loadRemoteMD while another agent of the same process was being destroyed
# (two transports in one process, as in tests and examples). A dead agent of another process is an error, no abort.
_LOADING = threading.Lock()

LISTEN_DELAY_US = 100_000  # A required argument without effect: the listener thread is off.


class PeerDisconnected(TransferFailed):
    """NIXL reports that the peer's process, or its agent, is gone."""


class NixlAgent:
    """One agent with its backends and its progress thread. The constructor takes up to half a second."""

    def __init__(self, name: str, *, backends: Mapping[str, Mapping[str, str]], progress_delay_us: int) -> None:
        """Raises InvalidConfig if NIXL is not installed, TransferFailed if a backend does not start."""
        self._nixl: Any = _bindings()  # NIXL's bindings have no type information.
        self.name = name
        nixl = self._nixl
        config = nixl.nixlAgentConfig(
            True, False, 0, nixl.NIXL_THREAD_SYNC_STRICT, 1, progress_delay_us, LISTEN_DELAY_US, False
        )
        # Looked up once: every post compares with these, right after a copy that has evicted the caches.
        self._success, self._in_progress = nixl.NIXL_SUCCESS, nixl.NIXL_IN_PROG
        try:
            self._agent: Any = nixl.nixlAgent(name, config)
        except Exception as error:
            _raise_translated("an agent cannot be made", error)
        for backend, options in backends.items():
            if backend == "UCX":
                rdma_module.leave_out_unused(options, os.environ)
            self._call(f"backend {backend} cannot be started", "createBackend", backend, dict(options))
        rdma_module.keep_exit_code()

    def plugins(self) -> list[str]:
        """Return the names of the plugins that NIXL found, started or not."""
        return list(self._call("no list of plugins", "getAvailPlugins"))

    def register(self, *memories: PoolMemory) -> None:
        """Make pools readable and writable for NIXL and our peers. Memory that several of them share is registered
        once.
        """
        by_place: dict[tuple[str, int], list[PoolMemory]] = {}
        for memory in memories:
            by_place.setdefault((memory.kind, memory.device), []).append(memory)
        for (kind, device), there in by_place.items():
            rows = np.array([(start, size, device) for start, size in extents(*there)], dtype=np.uint64)
            descriptors = self._nixl.nixlRegDList(self._kind(kind), rows)
            self._call("the pool cannot be registered", "registerMem", descriptors, [])

    def metadata(self) -> bytes:
        """Return the bytes that a peer passes to `load_peer`: our addresses and the memory registered now."""
        return bytes(self._call("no metadata", "getLocalMD"))

    def load_peer(self, blob: bytes) -> str:
        """Load a peer and return the name that the blob contains.

        The blob must be authentic: NIXL may crash over a mangled one.
        """
        with _LOADING:
            name: bytes = self._call("the peer's metadata cannot be loaded", "loadRemoteMD", blob)
        return name.decode(errors="replace")

    def forget_peer(self, name: str) -> None:
        """Disconnect from a peer and drop its loaded metadata."""
        self._call(f"{name} cannot be removed", "invalidateRemoteMD", name)

    def prepare(self, pieces: tuple[Segment, ...], *, kind: str, device: int, owner: str | None = None) -> int:
        """Prepare a list over all pieces of a pool, ours or that of peer `owner`. Returns its handle, for
        `release_list`.
        """
        agent = self._nixl.NIXL_INIT_AGENT if owner is None else owner
        rows = strided_rows(pieces, device)
        return int(self._call("a list cannot be prepared", "prepXferDlist", agent, self._kind(kind), rows, []))

    def release_list(self, handle: int) -> None:
        """Release a prepared list. Requests made of it must have ended."""
        self._call("a list cannot be released", "releasedDlistH", handle)

    def write_request(self, ours: int, theirs: int, part: Part) -> NixlRequest:
        """Make a write of one part between two prepared lists, not posted yet. The caller releases it."""
        write = self._nixl.NIXL_WRITE
        handle = self._call(
            "a write cannot be made", "makeXferReq", write, ours, part.ours, theirs, part.theirs, b"", [], False
        )
        return NixlRequest(self, int(handle))

    def read_request(self, ours: int, theirs: int) -> NixlRequest:
        """Make a read of the first descriptor of their list into the first of ours, not posted yet. The caller releases
        it.
        """
        first = np.zeros(1, dtype=np.int32)
        read = self._nixl.NIXL_READ
        handle = self._call("a read cannot be made", "makeXferReq", read, ours, first, theirs, first, b"", [], False)
        return NixlRequest(self, int(handle))

    @property
    def is_closed(self) -> bool:
        """True once `close` was called."""
        return self._agent is None

    def close(self) -> None:
        """Destroy the agent with its threads and connections. On TCP this is a fence: nothing lands afterwards."""
        with _LOADING:
            self._agent = None

    def post(self, handle: int) -> bool:
        """Post a request, for `NixlRequest` only. Returns True if it is already done."""
        return self._is_done(self._call("a post failed", "postXferReq", handle, b""))

    def check(self, handle: int) -> bool:
        """Poll a posted request, for `NixlRequest` only. Returns True if it is done."""
        return self._is_done(self._call("a transfer failed", "getXferStatus", handle))

    def release(self, handle: int) -> None:
        """Release an ended request, for `NixlRequest` only."""
        self._call("a request cannot be released", "releaseXferReq", handle)

    def _is_done(self, status: Any) -> bool:  # NIXL's own enumeration.
        if status == self._success:
            return True
        if status == self._in_progress:
            return False
        raise TransferFailed(f"NIXL returned {status}")

    def _kind(self, kind: str) -> Any:  # NIXL's own enumeration.
        return {"DRAM": self._nixl.DRAM_SEG, "VRAM": self._nixl.VRAM_SEG}[kind]

    def _call(self, failure: str, method: str, *arguments: Any) -> Any:  # The bindings have no types.
        # A local reference for the duration of the call: `close` may drop the agent from another thread meanwhile.
        agent = self._agent
        if agent is None:
            raise TransferFailed(f"{failure}: agent {self.name} is closed")
        try:
            return getattr(agent, method)(*arguments)
        except Exception as error:
            _raise_translated(failure, error)


class NixlRequest:
    """One transfer of NIXL, from its creation to its release. Used only on the thread that posts it."""

    def __init__(self, agent: NixlAgent, handle: int) -> None:
        self._agent = agent
        self._handle: int | None = handle
        self._in_flight = False

    def post(self) -> bool:
        """Start the transfer. Returns True if it is already done. Raises TransferFailed if it ended in an error."""
        return self._track(self._agent.post)

    def check(self) -> bool:
        """Return True if the transfer is done. Raises TransferFailed if it ended in an error. After either it may be
        released.
        """
        return self._track(self._agent.check)

    def release(self) -> None:
        """Release the transfer after its end. Does nothing on a closed agent. Raises LocalProtocolError while it is in
        flight.
        """
        if self._in_flight:
            raise LocalProtocolError("a NIXL request is released while it is in flight")
        handle, self._handle = self._handle, None
        if handle is not None and not self._agent.is_closed:
            self._agent.release(handle)

    def _track(self, call: Callable[[int], bool]) -> bool:
        if self._handle is None:
            raise LocalProtocolError("a NIXL request is used after its release")
        self._in_flight = True
        try:
            done = call(self._handle)
        except TransferFailed:
            self._in_flight = False
            raise
        self._in_flight = not done
        return done


def _raise_translated(failure: str, error: Exception) -> NoReturn:
    """Raise an exception of NIXL as TransferFailed or PeerDisconnected."""
    # NIXL's exceptions have no common base class; their module identifies them.
    if not (isinstance(error, RuntimeError) or type(error).__module__.startswith("nixl")):
        raise error
    kind = PeerDisconnected if type(error).__name__ == "nixlRemoteDisconnectError" else TransferFailed
    raise kind(f"{failure}: {error}") from error


def _bindings() -> Any:  # NIXL has no type information.
    """Import NIXL with its logs off, unless its environment sets a level: our errors carry its messages."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    try:
        from nixl import _bindings
    except ImportError as error:
        raise InvalidConfig(f"NIXL cannot be imported ({error}): install nixl, or use another transport") from error
    return _bindings
