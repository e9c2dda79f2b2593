"""Lanes of a GPU without one: the launching thread, the waiting thread, and when outcomes are reported."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tidekv.backends.copies.copier import LayeredCopy, PageCopier
from tidekv.backends.copies.stream_lane import StreamLane
from tidekv.backends.copies.streams import InlineMark, InlineStreams, Mark, Stream
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.host.pool import HostPool
from tidekv.backends.layout import KVLayout
from tidekv.states.errors import CopyFailed, InvalidRequest

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, dtype="float16", page_size=4)


class GatedMark:
    """A mark that the device reaches when the test releases it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.reached = threading.Event()
        self.error = error

    def wait(self) -> None:
        self.reached.wait()
        if self.error is not None:
            raise self.error

    def is_reached(self) -> bool:
        return self.reached.is_set()


class GatedStream:
    """Launches at once, and ends when its marks are reached."""

    def __init__(self) -> None:
        self.marks: list[GatedMark] = []
        self.followed: list[Mark] = []
        self.threads: set[str] = set()
        self.lost = False

    def run(self, work: Callable[[], None]) -> None:
        self.threads.add(threading.current_thread().name)
        work()

    def mark(self) -> Mark:
        if self.lost:
            raise RuntimeError("the device is lost")
        self.marks.append(GatedMark())
        return self.marks[-1]

    def follow(self, mark: Mark) -> None:
        self.followed.append(mark)


class GatedStreams:
    """The caller's stream and the lane's."""

    def __init__(self) -> None:
        self.callers = GatedStream()
        self.lanes = GatedStream()

    def current(self) -> Stream:
        return self.callers

    def make(self) -> Stream:
        return self.lanes


def lane_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("tidekv-copy-test")]


async def test_copies_are_launched_ahead_and_told_in_order_when_the_device_is_done() -> None:
    streams = GatedStreams()
    lane = StreamLane(streams, name="tidekv-copy-test")
    launched = [asyncio.get_running_loop().create_future() for _ in range(3)]
    done: list[int] = []
    ended = [lane.submit(lambda: None, told) for told in launched]
    for number, end in enumerate(ended):
        end.add_done_callback(lambda _, number=number: done.append(number))
    await asyncio.gather(*launched)
    # All are in the stream, each behind what its caller's stream had, and none has ended.
    assert streams.lanes.followed == streams.callers.marks
    assert len(streams.callers.marks) == len(streams.lanes.marks) == 3
    assert not done
    streams.lanes.marks[1].reached.set()
    streams.lanes.marks[0].reached.set()
    await ended[1]
    assert done == [0, 1]
    assert not ended[2].done()
    streams.lanes.marks[2].reached.set()
    await ended[2]
    assert streams.lanes.threads == {"tidekv-copy-test-launch"}
    assert len(lane_threads()) == 2
    lane.stop()
    assert not lane_threads()


async def test_a_copy_that_could_not_be_launched_ends_when_what_was_launched_of_it_has() -> None:
    streams = GatedStreams()
    lane = StreamLane(streams, name="tidekv-copy-test")

    def fail() -> None:
        raise RuntimeError("out of memory")

    launched = asyncio.get_running_loop().create_future()
    ended = lane.submit(fail, launched)
    await launched
    assert not ended.done()
    streams.lanes.marks[0].reached.set()
    with pytest.raises(RuntimeError, match="out of memory"):
        await ended
    # The lane goes on.
    after = asyncio.get_running_loop().create_future()
    ended = lane.submit(lambda: None, after)
    await after
    streams.lanes.marks[1].reached.set()
    await ended
    lane.stop()


async def test_what_the_device_reports_is_the_copys_outcome() -> None:
    streams = GatedStreams()
    lane = StreamLane(streams, name="tidekv-copy-test")
    launched = asyncio.get_running_loop().create_future()
    ended = lane.submit(lambda: None, launched)
    await launched
    streams.lanes.marks[0].error = RuntimeError("CUDA error: an illegal memory access was encountered")
    streams.lanes.marks[0].reached.set()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        await ended
    # A device that takes no event any more does not block any caller either.
    streams.lanes.lost = True
    with pytest.raises(RuntimeError, match="the device is lost"):
        await lane.submit(lambda: None)
    lane.stop()


async def test_layers_are_followed_once_they_are_launched_and_not_before() -> None:
    launched = asyncio.get_running_loop().create_future()
    streams = GatedStreams()
    copy = LayeredCopy(layer_count=2, streams=streams, launched=launched)
    with pytest.raises(InvalidRequest, match="await launched first"):
        copy.follow(0)
    mark = GatedMark()
    copy.on_layer(mark)
    with pytest.raises(InvalidRequest, match="await launched first"):
        copy.is_ready(0)
    launched.set_result(None)
    copy.follow(0)
    assert streams.callers.followed == [mark]
    assert not copy.is_ready(0)
    mark.reached.set()
    assert copy.is_ready(0)
    for layer in (-1, 2):
        with pytest.raises(InvalidRequest, match=f"layers are 0 to 1; layer {layer} is not one"):
            copy.follow(layer)
    with pytest.raises(CopyFailed, match="layer 1 could not be launched"):
        copy.follow(1)


async def test_without_streams_all_layers_are_there_when_the_copy_is_launched() -> None:
    device, host = DevicePool.allocate(LAYOUT, 8), HostPool.allocate(LAYOUT, 8)
    written = torch.randint(0, 256, (8, LAYOUT.page_bytes), dtype=torch.uint8)
    host.write_pages(range(8), written)
    copier = PageCopier(device, host)
    copier.start()
    copy = copier.to_device_by_layer([1, 2, 7], [4, 0, 5])
    assert copy.layer_count == 3
    await copy.launched
    for layer in range(3):
        copy.follow(layer)
        assert copy.is_ready(layer)
    assert torch.equal(device.read_pages([4, 0, 5]), written[[1, 2, 7]])
    await copy.done
    with pytest.raises(InvalidRequest, match="2 source pages for 1 destination"):
        copier.to_device_by_layer([1, 2], [1])
    assert (copier.statistics().completed, copier.statistics().kernel) == (1, "")
    await copier.close()


def test_the_cpu_as_a_stream_has_done_what_it_was_given() -> None:
    streams, done = InlineStreams(), []
    for stream in (streams.current(), streams.make()):
        stream.run(lambda: done.append(np.int64(1)))
        mark = stream.mark()
        assert isinstance(mark, InlineMark)
        mark.wait()
        stream.follow(mark)
    assert len(done) == 2
    with pytest.raises(AssertionError, match="another device"):
        streams.current().follow(GatedMark())
