"""NIXL's agent as this package uses it: its bindings behind a small, typed surface that cannot be misused.

The wrapper that NIXL ships fixes the progress thread's pause to zero, which burns a core, and releases handles from
finalizers, which may be in flight; so the bindings beneath it are used. What this file holds to:

- a request is released only when it has ended, and is not touched after that (NIXL would crash);
- after `close` nothing reaches NIXL any more: what was in flight ends in TransferFailed;
- every error of NIXL leaves here as TransferFailed, with NIXL's own as its cause.

All calls may block (a post copies on shared memory): never call them on the event loop. They may come from several
threads, the agent is strict about its locks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

from tidekv.states.errors import InvalidConfig, LocalProtocolError, TransferFailed
from tidekv.states.types import PoolMemory, Segment
from tidekv.transports.nixl.layout import extents, strided_rows
from tidekv.transports.nixl.plan import Part

LISTEN_DELAY_US = 100_000  # Of the listener thread, which is off.


class PeerDisconnected(TransferFailed):
    """NIXL reports that the peer's process, or its agent, is gone."""


class NixlAgent:
    """One agent with its backends and its sleeping progress thread. Making one takes up to half a second."""

    def __init__(self, name: str, *, backends: Mapping[str, Mapping[str, str]], progress_delay_us: int) -> None:
        """Raises InvalidConfig where NIXL is not installed, TransferFailed where a backend does not start."""
        self._nixl: Any = _bindings()  # NIXL's bindings have no type information.
        self.name = name
        nixl = self._nixl
        config = nixl.nixlAgentConfig(
            True, False, 0, nixl.NIXL_THREAD_SYNC_STRICT, 1, progress_delay_us, LISTEN_DELAY_US, False
        )
        # Looked up once: each post asks for these, and does so with empty caches.
        self._success, self._in_progress = nixl.NIXL_SUCCESS, nixl.NIXL_IN_PROG
        try:
            self._agent: Any = nixl.nixlAgent(name, config)
        except Exception as error:
            _raise_translated("an agent cannot be made", error)
        for backend, options in backends.items():
            self._call(f"backend {backend} cannot be started", "createBackend", backend, dict(options))

    def plugins(self) -> list[str]:
        """The plugins that NIXL has found, started or not."""
        return list(self._call("no list of plugins", "getAvailPlugins"))

    def register(self, memory: PoolMemory) -> None:
        """Let NIXL and our peers reach a pool."""
        rows = np.array([(start, size, memory.device) for start, size in extents(memory)], dtype=np.uint64)
        descriptors = self._nixl.nixlRegDList(self._kind(memory.kind), rows)
        self._call("the pool cannot be registered", "registerMem", descriptors, [])

    def metadata(self) -> bytes:
        """What a peer's `load_peer` takes: our addresses and what is registered now."""
        return bytes(self._call("no metadata", "getLocalMD"))

    def load_peer(self, blob: bytes) -> str:
        """Make a peer known; returns the name that the blob really holds. The blob must be authentic: NIXL may crash
        over a mangled one.
        """
        name: bytes = self._call("the peer's metadata cannot be loaded", "loadRemoteMD", blob)
        return name.decode(errors="replace")

    def forget_peer(self, name: str) -> None:
        """Disconnect from a peer and drop what was loaded of it."""
        self._call(f"{name} cannot be removed", "invalidateRemoteMD", name)

    def prepare(self, pieces: tuple[Segment, ...], *, kind: str, device: int, owner: str | None = None) -> int:
        """Prepare a list over all pieces of a pool, ours or that of peer `owner`; returns its handle."""
        whose = self._nixl.NIXL_INIT_AGENT if owner is None else owner
        rows = strided_rows(pieces, device)
        return int(self._call("a list cannot be prepared", "prepXferDlist", whose, self._kind(kind), rows, []))

    def release_list(self, handle: int) -> None:
        """Give a prepared list back; requests made of it must have ended."""
        self._call("a list cannot be released", "releasedDlistH", handle)

    def write_request(self, ours: int, theirs: int, part: Part) -> Request:
        """Make a write of one part between two prepared lists; it is not posted yet."""
        write = self._nixl.NIXL_WRITE
        handle = self._call(
            "a write cannot be made", "makeXferReq", write, ours, part.ours, theirs, part.theirs, b"", [], False
        )
        return Request(self, int(handle))

    def read_request(self, ours: int, theirs: int) -> Request:
        """Make a read of the first descriptor of their list over the first of ours; it is not posted yet."""
        first = np.zeros(1, dtype=np.int32)
        read = self._nixl.NIXL_READ
        handle = self._call("a read cannot be made", "makeXferReq", read, ours, first, theirs, first, b"", [], False)
        return Request(self, int(handle))

    @property
    def is_closed(self) -> bool:
        """True once `close` was called."""
        return self._agent is None

    def close(self) -> None:
        """Destroy the agent with its threads and connections. On TCP this is a fence: nothing lands afterwards."""
        self._agent = None

    def post(self, handle: int) -> bool:
        """Post a request, for `Request` only; True when it is already done."""
        return self._is_done(self._call("a post failed", "postXferReq", handle, b""))

    def check(self, handle: int) -> bool:
        """Ask a posted request, for `Request` only; True when it is done."""
        return self._is_done(self._call("a transfer failed", "getXferStatus", handle))

    def release(self, handle: int) -> None:
        """Release an ended request, for `Request` only."""
        self._call("a request cannot be released", "releaseXferReq", handle)

    def _is_done(self, status: Any) -> bool:  # NIXL's own enumeration.
        if status == self._success:
            return True
        if status == self._in_progress:
            return False
        raise TransferFailed(f"NIXL answered {status}")

    def _kind(self, kind: str) -> Any:  # NIXL's own enumeration.
        return {"DRAM": self._nixl.DRAM_SEG, "VRAM": self._nixl.VRAM_SEG}[kind]

    def _call(self, failure: str, method: str, *arguments: Any) -> Any:  # The bindings have no types.
        # One reference for the length of the call: `close` may drop the agent from another thread meanwhile.
        agent = self._agent
        if agent is None:
            raise TransferFailed(f"{failure}: agent {self.name} is closed")
        try:
            return getattr(agent, method)(*arguments)
        except Exception as error:
            _raise_translated(failure, error)


class Request:
    """One transfer of NIXL, from its making to its release; belongs to the thread that posts it."""

    def __init__(self, agent: NixlAgent, handle: int) -> None:
        self._agent = agent
        self._handle: int | None = handle
        self._in_flight = False

    def post(self) -> bool:
        """Start it; True when it is already done. Raises TransferFailed when it ended in an error."""
        return self._ask(self._agent.post)

    def check(self) -> bool:
        """True when it is done. Raises TransferFailed when it ended in an error; either way it may be released."""
        return self._ask(self._agent.check)

    def release(self) -> None:
        """Give it back to NIXL, which must not happen before its end. Harmless on a closed agent."""
        if self._in_flight:
            raise LocalProtocolError("a NIXL request is released while it is in flight")
        handle, self._handle = self._handle, None
        if handle is not None and not self._agent.is_closed:
            self._agent.release(handle)

    def _ask(self, call: Callable[[int], bool]) -> bool:
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
    """Raise what a call of NIXL raised as an error of ours. Its errors have no base of their own, so they are known by
    the module that defines them.
    """
    if not (isinstance(error, RuntimeError) or type(error).__module__.startswith("nixl")):
        raise error
    kind = PeerDisconnected if type(error).__name__ == "nixlRemoteDisconnectError" else TransferFailed
    raise kind(f"{failure}: {error}") from error


def _bindings() -> Any:  # NIXL has no type information.
    """Import NIXL, quiet unless its environment, which it reads once, says otherwise: our errors tell what happened."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    try:
        from nixl import _bindings
    except ImportError as error:
        raise InvalidConfig(f"NIXL cannot be imported: {error}. Install nixl, or use another transport.") from error
    return _bindings
