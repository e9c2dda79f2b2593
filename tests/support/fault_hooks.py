"""Hooks by which fault tests halt real operations half-way: a gate between the caller and the poller's thread.

Behind the gate is the real operation. Some of its parts are posted before it halts and the rest after the gate has
opened, as in a process that is stopped or slow. The hooks do not change the bytes that are written.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tidekv.backends.base import Pollable, Poller
from tidekv.backends.copies import cpu_moves
from tidekv.engine.poller import PollerThread, StreamDrive
from tidekv.transports.base import Ended, StreamTurn, TransferStream

if TYPE_CHECKING:
    from tidekv.backends.device.pool import DevicePool
    from tidekv.backends.storage.base import BufferOf, Storage
    from tidekv.states.types import PoolMemory
    from tidekv.transports.loopback import LoopbackNetwork


class GatedPoller:
    """A poller with operations that halt at a closed gate. `halted` is set once the first one has halted."""

    def __init__(self, inner: Poller) -> None:
        """Must be created on the loop that `inner` serves."""
        self.halted = asyncio.Event()
        self._inner = inner
        self._loop = asyncio.get_running_loop()
        self._open = threading.Event()
        self._open.set()
        self._after_checks = 0
        self._skips = 0
        self._stops_process = False

    def close_gate(self, *, after_checks: int = 0, stops_process: bool = False, skips: int = 0) -> None:
        """Close the gate for operations submitted from now on, except the first `skips`.

        They halt after `after_checks` checks, or once they are done; 0 halts before the post. With `stops_process` the
        whole process stops itself there, as by SIGSTOP, and the gate is open when it is continued.
        """
        self.halted.clear()
        self._after_checks = after_checks
        self._stops_process = stops_process
        self._skips = skips
        self._open.clear()

    def open_gate(self) -> None:
        """Let halted operations continue."""
        self._open.set()

    def submit(self, pollable: Pollable) -> asyncio.Future[None]:
        """See `Poller.submit`."""
        if self._open.is_set() or self._skips:
            self._skips = max(0, self._skips - 1)
            return self._inner.submit(pollable)
        return self._inner.submit(_Gated(pollable, self._open, self._after_checks, self._halt))

    def drive(self, stream: TransferStream) -> _GatedDrive:
        """See `tidekv.transports.base.Poller`. Each `begin` counts as an operation, and each turn as a check."""
        assert isinstance(self._inner, PollerThread), "only the thread itself has streams"
        gated = _GatedStream(stream, self._open, self._halt)
        return _GatedDrive(self, self._inner.drive(gated), gated)

    def _checks_of_next(self) -> int | None:
        """Return the turns of a new operation up to the gate; None if it is not gated."""
        if self._open.is_set():
            return None
        if self._skips:
            self._skips -= 1
            return None
        return self._after_checks

    def _halt(self) -> None:
        """Report that an operation has reached the gate. Runs on the poller's thread."""
        if self._stops_process:
            self._stops_process = False
            # Sent to this thread, which then stops before the next line. A signal to the process may be delivered to
            # any of its threads, and this one would continue to write until then.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            self._open.set()
        self._loop.call_soon_threadsafe(self.halted.set)


class _GatedDrive:
    """A drive with a stream that halts for operations that begin while the gate is closed."""

    def __init__(self, gate: GatedPoller, inner: StreamDrive, stream: _GatedStream) -> None:
        self._gate = gate
        self._inner = inner
        self._stream = stream

    def begin(self) -> asyncio.Future[None]:
        """See `tidekv.transports.base.Drive`."""
        checks = self._gate._checks_of_next()
        if checks is not None:
            self._stream.hold(checks)
        return self._inner.begin()

    def wake(self) -> None:
        """See `tidekv.transports.base.Drive`."""
        self._inner.wake()


class _GatedStream:
    """A stream that halts. Operations that end while it is held are reported once the gate is open."""

    def __init__(self, inner: TransferStream, gate: threading.Event, on_halt: Callable[[], None]) -> None:
        self._inner = inner
        self._gate = gate
        self._on_halt = on_halt
        self._checks_left: int | None = None
        self._has_reported = False
        self._ended: Ended = []

    def hold(self, checks: int) -> None:
        """Take at most `checks` more turns, fewer if an operation ends, and then none until the gate is open."""
        if self._checks_left is None:
            self._checks_left = checks
            self._has_reported = False

    @property
    def is_empty(self) -> bool:
        """See `tidekv.transports.base.Stream`."""
        return not self._ended and self._inner.is_empty

    def advance(self, tell: Callable[[Ended], None]) -> StreamTurn:
        """See `tidekv.transports.base.Stream`."""
        if self._checks_left and not self._gate.is_set():
            self._checks_left -= 1
            self._inner.advance(self._ended.extend)
            if self._ended:
                self._checks_left = 0
            return StreamTurn.MOVED
        if self._checks_left is not None and not self._is_passed():
            return StreamTurn.WAITING
        self._checks_left = None
        if self._ended:
            ended, self._ended = self._ended, []
            tell(ended)
            return StreamTurn.MOVED
        return self._inner.advance(tell)

    def _is_passed(self) -> bool:
        """Whether the gate is open. The first call at a closed gate reports the halt."""
        if not self._gate.is_set() and not self._has_reported:
            self._has_reported = True
            self._on_halt()
        return self._gate.is_set()


class _Gated:
    """One operation that halts. All methods run on the poller's thread."""

    def __init__(self, inner: Pollable, gate: threading.Event, after_checks: int, on_halt: Callable[[], None]) -> None:
        self._inner = inner
        self._gate = gate
        self._checks_left = after_checks
        self._on_halt = on_halt
        self._is_posted = False
        self._is_done = False
        self._has_reported = False

    @property
    def rounds(self) -> int:
        return self._inner.rounds

    def post(self) -> bool:
        if not self._checks_left:
            return self._pass_gate()
        self._begin()
        return self._is_done and self._pass_gate()

    def check(self) -> bool:
        if self._checks_left and not self._is_done:
            self._checks_left -= 1
            self._is_done = self._inner.check()
            return self._is_done and self._pass_gate()
        return self._pass_gate()

    def _pass_gate(self) -> bool:
        """Continue if the gate is open. Before that no operation ends, whatever has happened to its bytes."""
        if not self._gate.is_set() and not self._has_reported:
            self._has_reported = True
            self._on_halt()
        if not self._gate.is_set():
            return False
        if not self._is_posted:
            self._begin()
        elif not self._is_done:
            self._is_done = self._inner.check()
        return self._is_done

    def _begin(self) -> None:
        self._is_posted = True
        self._is_done = self._inner.post()

    def release(self) -> None:
        if self._is_posted:
            self._inner.release()


class GatedStorage:
    """A storage engine with reads and writes that pass a gate; everything else is forwarded."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self.gate: GatedPoller | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def register(self, pool: PoolMemory, buffer_of: BufferOf, *, namespace: bytes, poller: Poller) -> None:
        """See `Storage.register`. The gate exists from now on."""
        self.gate = GatedPoller(poller)
        await self._inner.register(pool, buffer_of, namespace=namespace, poller=self.gate)


class LayerGate:
    """Holds copies by layer before each layer but the first, on the thread of the copies, or lets them fail there.

    It covers the copiers of one device pool or, without one, all of the process: use one such gate at a time. `patch`
    is `setattr`, or that of a test's monkeypatch.
    """

    def __init__(
        self,
        layer_count: int,
        *,
        device: DevicePool | None = None,
        patch: Callable[[object, str, object], None] = setattr,
    ) -> None:
        self.layers = [threading.Event() for _ in range(layer_count)]
        """For each layer, set if copies may go on to it."""
        self.before_layer: Callable[[int], None] = _pass
        """Called on the thread of the copies before each layer that is not held; an exception fails the copy."""
        copy = cpu_moves._GroupMover.layer_to_device
        starts = None if device is None else {row.data_ptr() for row in device.rows}

        # Any: the arguments of the mover, passed on.
        def held(mover: Any, host_pages: Any, device_pages: Any, runs: Any, layer: int) -> None:
            if starts is None or mover._rows[0].ctypes.data in starts:
                self.layers[layer].wait(_GATE_S)
                self.before_layer(layer)
            copy(mover, host_pages, device_pages, runs, layer)

        patch(cpu_moves._GroupMover, "layer_to_device", held)
        self.close()

    def close(self, first: int = 1) -> None:
        """Hold copies before layer `first`, and let layers before it pass."""
        self.before_layer = _pass
        for layer, opened in enumerate(self.layers):
            if layer < first:
                opened.set()
            else:
                opened.clear()

    def open(self, *, fails: bool = False) -> None:
        """Let the copies go on to their end, or fail at their next layer."""
        self.before_layer = _fail if fails else _pass
        for opened in self.layers:
            opened.set()


class WriteGate:
    """Holds every write on a loopback network after the first `free` ones."""

    def __init__(self, network: LoopbackNetwork, free: int = 0) -> None:
        self.free = free
        self.is_reached, self.opened = asyncio.Event(), asyncio.Event()
        network.before_write = self._before_write

    async def _before_write(self, writer: str, target: str, pages: int) -> None:
        if self.free:
            self.free -= 1
            return
        self.is_reached.set()
        await self.opened.wait()


_GATE_S = 120.0
"""Maximum seconds for which a copy is held; a test that forgets to open the gate still ends."""


def _pass(layer: int) -> None:
    """Do nothing before a layer."""


def _fail(layer: int) -> None:
    raise ZeroDivisionError("a bug of the copy")
