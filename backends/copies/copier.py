"""Copies of pages between the device pool and the host pool, and within the device pool, as futures.

They run on the lanes of `tidekv.backends.copies.lanes`, one for each direction; this module decides which are small
enough for the event loop. A submitted copy is always made, even if its future is cancelled: only its outcome means that
nothing touches its pages any more. The caller decides how many may be in flight, and what a failure means.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

import numpy.typing as npt

from tidekv.backends.checksums import FoundChecksums, HostChecksums
from tidekv.backends.completions import Completions
from tidekv.backends.copies.block_order import BlockMover, BlockPool
from tidekv.backends.copies.cpu_moves import PageCloner, PageMover
from tidekv.backends.copies.cuda import CopyChoice, CudaMover, OnLayer, StagedCloner
from tidekv.backends.copies.lanes import NOT_RUNNING, TO_DEVICE, TO_HOST, CopyLanes
from tidekv.backends.copies.pieces import check_layer, layer_count
from tidekv.backends.copies.stream_lane import Layers, Move
from tidekv.backends.copies.streams import InlineMark, Mark, Streams, streams_of
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.host.pool import HostPool
from tidekv.backends.memory import PageIndex
from tidekv.backends.page_layout import same_pages
from tidekv.states.errors import (
    CopyFailed,
    EngineClosed,
    InvalidConfig,
    InvalidRequest,
    PagesDamaged,
    TidekvError,
)
from tidekv.states.types import PageIds

CLONE: Final = "clone"
# Bounds of a copy that the event loop makes itself: bytes, and assignments by the interpreter. At either bound it takes
# about 30 µs, and 100 µs if nothing of it is in the processor's caches; the way to a thread and back takes as long
# again, and twice that on a busy machine.
SMALL_BYTES_MAX: Final = 128 << 10
SMALL_STEPS_MAX: Final = 64

Pages: TypeAlias = "PageIds | npt.ArrayLike"
Mover: TypeAlias = "BlockMover | CudaMover | PageMover | CheckedMover"


@dataclass(frozen=True, slots=True)
class CopierStatistics:
    """Copies submitted, completed and failed, and bytes of the completed ones by direction. `kernel` is the state
    of the GPU kernel: "" without a GPU, or until the warm-up has ended.
    """

    submitted: int
    completed: int
    failed: int
    to_device_bytes: int
    to_host_bytes: int
    cloned_bytes: int = 0
    kernel: str = ""


class PageCopier:
    """Copies pages between a device pool and a host pool of the same layout, and within the device pool.

    `start` and `close` it on the loop that awaits it. With `lanes` its copies share these with other copiers; the owner
    of the lanes starts them first, and closes them last. `choice` selects the form of copies on CUDA. With `checksums`,
    of this host pool, copies to the host note the checksums of their pages, and copies to the device verify them; not
    on CUDA. With FoundChecksums, copies to the device verify the pages that an earlier process left, once. Raises
    InvalidConfig if the pools do not fit each other.
    """

    def __init__(
        self,
        device: DevicePool,
        host: HostPool | None,
        *,
        lanes: CopyLanes | None = None,
        choice: CopyChoice | None = None,
        checksums: HostChecksums | FoundChecksums | None = None,
    ) -> None:
        if host is not None and not same_pages(device.layout, host.layout):
            raise InvalidConfig(f"copies: device pool has {device.layout}, host pool has {host.layout}")
        on_cuda = device.device.type == "cuda"
        if on_cuda and host is not None and not host.pinned:
            raise InvalidConfig("copies: a device pool on CUDA needs a pinned host pool; allocate it with pin=True")
        self._device = device
        self._host = host
        self._mover: Mover | None = None
        self._cloner: StagedCloner | PageCloner | None = None
        if isinstance(device, BlockPool):
            self._mover = None if host is None else BlockMover(device, host)
        elif host is not None:
            self._mover = CudaMover(device, host, choice or CopyChoice()) if on_cuda else PageMover(device, host)
            if isinstance(checksums, HostChecksums):
                self._mover = CheckedMover(PageMover(device, host), checksums)
        self._found = checksums if isinstance(checksums, FoundChecksums) else None
        if not isinstance(device, BlockPool):
            self._cloner = StagedCloner(device) if on_cuda else PageCloner(device)
        self._small_pages_max = _small_pages(self._mover, self._cloner, device.layout.page_bytes)
        self._lanes = CopyLanes(device.device) if lanes is None else lanes
        self._owns_lanes = lanes is None
        self._closing = False
        self._kernel = ""
        self._in_flight: set[asyncio.Future[None]] = set()
        self._submitted = self._completed = self._failed = 0
        self._bytes = {TO_DEVICE: 0, TO_HOST: 0, CLONE: 0}

    def start(self) -> None:
        """Start its own lanes, on the running loop; shared ones are running. On CUDA the kernel is compiled in the
        background, and copies do without it until then. Once only.
        """
        if self._owns_lanes:
            self._lanes.start()
        if isinstance(self._mover, CudaMover):
            self._warm_up(self._mover)

    async def close(self) -> None:
        """Refuse further copies, wait until all submitted ones have ended, and stop its own lanes.

        Unbounded, since a copy cannot be stopped: the caller sets the deadline, and keeps the memory if it passes.
        """
        self._closing = True
        while self._in_flight:
            await asyncio.wait(self._in_flight)
        if self._owns_lanes:
            await self._lanes.close()

    def to_device(self, host_pages: Pages, device_pages: Pages) -> asyncio.Future[None]:
        """Copy host pages to device pages, pairwise; the future ends when all bytes are in place.

        The pages belong to the copy until then, even if the future is cancelled. The future raises CopyFailed if the
        copy did not work, PagesDamaged if a page does not have its checksum; its destination holds garbage then. Raises
        InvalidRequest for pages that are not in the pools and for lists of different lengths, EngineClosed before
        `start` and after `close`.
        """
        host, mover = self._both()
        sources, targets = host.check_pages(host_pages), self._device.check_pages(device_pages)
        move = self._verified_first(sources, partial(mover.to_device, sources, targets))
        return self._submit(TO_DEVICE, move, len(sources), len(targets))

    def to_host(self, device_pages: Pages, host_pages: Pages) -> asyncio.Future[None]:
        """Copy device pages to host pages, pairwise; as `to_device`.

        On CUDA both directions first wait for the work that the caller's current stream has now: a page is read after
        it was computed, and overwritten after it was last used.
        """
        host, mover = self._both()
        sources, targets = self._device.check_pages(device_pages), host.check_pages(host_pages)
        return self._submit(TO_HOST, partial(mover.to_host, sources, targets), len(sources), len(targets))

    def to_device_by_layer(
        self, host_pages: Pages, device_pages: Pages, on_layers: Callable[[int], None] | None = None
    ) -> LayeredCopy:
        """Copy as `to_device`, layer 0 of all pages first, and mark each layer as it arrives.

        `on_layers` is called on the loop with the number of layers in place, for each layer but the last one, whose
        arrival is the end of the copy.

        A layer is that of all groups which have one of that number. This takes more of the device than `to_device`, or
        more launches: for a forward pass that waits. With checksums all layers arrive at the end, once they are
        verified.
        """
        host, mover = self._both()
        sources, targets = host.check_pages(host_pages), self._device.check_pages(device_pages)
        copy = LayeredCopy(
            layer_count=layer_count(self._device),
            streams=streams_of(self._device.device),
            launched=asyncio.get_running_loop().create_future(),
        )
        move = self._verified_first(
            sources, partial(_by_layer, mover, sources, targets, copy.on_layer, copy.layer_count)
        )
        copy.done = self._submit(
            TO_DEVICE, move, len(sources), len(targets), launched=copy.launched, layers=copy.marked
        )
        if on_layers is not None:
            for layers, arrived in enumerate(copy.arrived[:-1], 1):
                arrived.add_done_callback(partial(_report_layers, on_layers, layers))
        return copy

    def clone(self, source_pages: Pages, target_pages: Pages) -> asyncio.Future[None]:
        """Copy device pages to other device pages, pairwise; as `to_device`, in the same lane.

        Raises InvalidRequest for the blocks of a host engine.
        """
        if self._cloner is None:
            raise InvalidRequest("blocks of a host engine are not copied to each other")
        sources, targets = self._device.check_pages(source_pages), self._device.check_pages(target_pages)
        return self._submit(CLONE, partial(self._cloner.clone, sources, targets), len(sources), len(targets))

    def statistics(self) -> CopierStatistics:
        """Return the counters so far."""
        return CopierStatistics(
            submitted=self._submitted,
            completed=self._completed,
            failed=self._failed,
            to_device_bytes=self._bytes[TO_DEVICE],
            to_host_bytes=self._bytes[TO_HOST],
            cloned_bytes=self._bytes[CLONE],
            kernel=self._kernel,
        )

    def _verified_first(self, host_pages: PageIndex, move: Move) -> Move:
        """Return a copy that raises PagesDamaged, with nothing copied, unless all found pages have their checksums."""
        found = self._found
        if found is None or not found.is_unverified(host_pages):
            return move

        def verified() -> None:
            if (intact := found.intact(host_pages)) < len(host_pages):
                raise _damaged(host_pages, intact, "has changed since an earlier process wrote it")
            move()

        return verified

    def _both(self) -> tuple[HostPool, Mover]:
        if self._host is None or self._mover is None:
            raise InvalidRequest("this copier was made without a host pool: it copies within the device only")
        return self._host, self._mover

    def _warm_up(self, mover: CudaMover) -> None:
        """Compile the kernel on the lane. If that fails, copies stay as they are, and statistics report it."""
        ended = self._lanes.submit(TO_DEVICE, mover.warm_up)
        self._in_flight.add(ended)
        ended.add_done_callback(self._in_flight.discard)
        ended.add_done_callback(partial(self._settle_warm_up, mover))

    def _settle_warm_up(self, mover: CudaMover, ended: asyncio.Future[None]) -> None:
        error = ended.exception()
        self._kernel = f"not used: {error!r}" if error else "ready" if mover.has_kernel else "there is no Triton"

    def _submit(
        self,
        direction: str,
        move: Move,
        source_count: int,
        target_count: int,
        *,
        launched: asyncio.Future[None] | None = None,
        layers: Layers | None = None,
    ) -> asyncio.Future[None]:
        if source_count != target_count:
            raise InvalidRequest(f"copy {direction}: {source_count} source pages for {target_count} destination pages")
        if self._closing:
            raise EngineClosed(NOT_RUNNING)
        outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # The lane settles a future of its own: the caller may cancel the outcome, and the copy still has an end.
        lane, is_small = TO_DEVICE if direction == CLONE else direction, source_count <= self._small_pages_max
        ended = self._lanes.submit(lane, move, is_small=is_small, launched=launched, layers=layers)
        self._submitted += 1
        self._in_flight.add(ended)
        ended.add_done_callback(partial(self._settle, direction, source_count, outcome))
        return outcome

    def _settle(
        self, direction: str, page_count: int, outcome: asyncio.Future[None], ended: asyncio.Future[None]
    ) -> None:
        self._in_flight.discard(ended)
        error = ended.exception()
        if error is None:
            self._completed += 1
            self._bytes[direction] += page_count * self._device.layout.page_bytes
        else:
            self._failed += 1
            if not isinstance(error, TidekvError):
                failure = CopyFailed(f"copy {direction} of {page_count} pages failed: {error!r}")
                failure.__cause__ = error
                error = failure
        if outcome.done():
            return
        if error is None:
            outcome.set_result(None)
        else:
            outcome.set_exception(error)


class CheckedMover:
    """Moves pages as PageMover does; notes the checksums of pages that leave the device, and verifies them on the way
    back.

    Both are of the bytes on the device, so the copies are covered as well as the time in between.
    """

    def __init__(self, mover: PageMover, checksums: HostChecksums) -> None:
        self._mover = mover
        self._checksums = checksums
        self.steps_a_page = mover.steps_a_page

    def to_device(self, host_pages: PageIndex, device_pages: PageIndex) -> None:
        """Copy host pages to device pages, pairwise. Raises PagesDamaged."""
        self._mover.to_device(host_pages, device_pages)
        if (intact := self._checksums.intact(host_pages, on_device=device_pages)) < len(host_pages):
            raise _damaged(host_pages, intact, "has changed since it was written")

    def to_host(self, device_pages: PageIndex, host_pages: PageIndex) -> None:
        """Copy device pages to host pages, pairwise."""
        self._checksums.note(host_pages, on_device=device_pages)
        self._mover.to_host(device_pages, host_pages)


def _damaged(host_pages: PageIndex, intact: int, words: str) -> PagesDamaged:
    text = f"host page {host_pages[intact]}, number {intact} of {len(host_pages)}, {words}: its checksum differs"
    return PagesDamaged(text, intact=intact)


def _small_pages(mover: Mover | None, cloner: StagedCloner | PageCloner | None, page_bytes: int) -> int:
    """Return the maximum number of pages of a small copy; 0 disables small copies, on a GPU and of blocks."""
    kinds = PageMover | CheckedMover | PageCloner
    steps = max((part.steps_a_page for part in (mover, cloner) if isinstance(part, kinds)), default=0)
    return min(SMALL_BYTES_MAX // page_bytes, SMALL_STEPS_MAX // steps) if steps else 0


def _by_layer(mover: Mover, sources: PageIndex, targets: PageIndex, on_layer: OnLayer, layers: int) -> None:
    """Copy layer by layer; with checksums copy and verify everything, and mark the layers then."""
    if not isinstance(mover, CheckedMover):
        mover.to_device_by_layer(sources, targets, on_layer)
        return
    mover.to_device(sources, targets)
    for _ in range(layers):
        on_layer(InlineMark())


def _report_layers(on_layers: Callable[[int], None], layers: int, arrived: asyncio.Future[None]) -> None:
    # An error is reported by the end of the copy.
    if not arrived.cancelled() and arrived.exception() is None:
        on_layers(layers)


class LayeredCopy:
    """A layered copy, as returned by `PageCopier.to_device_by_layer`. Its pages belong to it until `done` has ended.

    `launched` ends when the copy is in its stream, long before it is made; from then on `follow(layer)` orders the
    caller's stream behind a layer. `arrived[layer]` ends when the layer's bytes are in place; if the copy fails, some
    of these futures may never end. `done` is the copy's outcome: if it raises, results computed from its pages are
    garbage. Without streams, `launched` ends after the last layer has arrived.
    """

    def __init__(self, *, layer_count: int, streams: Streams, launched: asyncio.Future[None]) -> None:
        self.layer_count = layer_count
        self.launched = launched
        self.done: asyncio.Future[None]
        loop = asyncio.get_running_loop()
        self.arrived: tuple[asyncio.Future[None], ...] = tuple(loop.create_future() for _ in range(layer_count))
        self._arrivals = Completions(loop)
        self._streams = streams
        self._marks: list[Mark] = []

    def follow(self, layer: int) -> None:
        """Order later work of the caller's current stream behind the arrival of `layer`, without blocking.

        Call it from any thread. Raises InvalidRequest for a layer that does not exist, and before `launched` has ended:
        a stream cannot wait for what it does not know, and would read pages that are not there. Raises CopyFailed if
        the layer could not be launched.
        """
        self._streams.current().follow(self._mark(layer))

    def is_ready(self, layer: int) -> bool:
        """Return whether the layer's bytes are in place. Raises what `follow` raises."""
        return self._mark(layer).is_reached()

    def on_layer(self, mark: Mark) -> None:
        """Add the next layer's mark. Called by the launch of the copy, before `launched` ends."""
        self._marks.append(mark)
        if isinstance(mark, InlineMark):
            self._arrivals.deliver([(self.arrived[len(self._marks) - 1], None)])

    def marked(self) -> list[tuple[Mark, asyncio.Future[None]]]:
        """Return the marks of the launched layers, each with the future of its arrival."""
        return list(zip(self._marks, self.arrived, strict=False))

    def _mark(self, layer: int) -> Mark:
        check_layer(layer, of=self.layer_count)
        if not self.launched.done():
            raise InvalidRequest("copy by layers: it is not in its stream yet; await launched first")
        if layer >= len(self._marks):
            raise CopyFailed(f"copy by layers: layer {layer} could not be launched; await done for the reason")
        return self._marks[layer]
