"""A copy to the device whose layers come one after the other: a forward starts on layer 0 while others still come."""

from __future__ import annotations

import asyncio

from tidekv.backends.piece_moves import check_layer
from tidekv.backends.streams import Mark, Streams
from tidekv.states.errors import CopyFailed, InvalidRequest


class LayeredCopy:
    """What `PageCopier.to_device_by_layer` returns. Its pages belong to the copy until `done` has ended.

    `launched` ends when the copy is in its stream, which is long before it is made; from then on `follow(layer)` puts
    the caller's stream behind a layer. `done` is the copy's outcome: where it raises, what was computed from its
    pages is garbage. Where there are no streams, all layers come at once, and are there when `launched` ends.
    """

    def __init__(self, *, layer_count: int, streams: Streams, launched: asyncio.Future[None]) -> None:
        self.layer_count = layer_count
        self.launched = launched
        self.done: asyncio.Future[None]
        self._streams = streams
        self._marks: list[Mark] = []

    def follow(self, layer: int) -> None:
        """Let what the caller's current stream is given from now on begin after `layer` is in place; blocks nobody.

        Call it from any thread. Raises InvalidRequest for a layer that there is not, and before `launched` has ended: a
        stream cannot wait for what it does not know, and would read pages that are not there. Raises CopyFailed if the
        layer could not be launched.
        """
        self._streams.current().follow(self._mark(layer))

    def is_ready(self, layer: int) -> bool:
        """Whether the layer's bytes are in place. Raises what `follow` raises."""
        return self._mark(layer).is_reached()

    def told(self, mark: Mark) -> None:
        """Take the next layer's mark. For whoever launches the copy, before `launched` ends."""
        self._marks.append(mark)

    def _mark(self, layer: int) -> Mark:
        check_layer(layer, of=self.layer_count)
        if not self.launched.done():
            raise InvalidRequest("copy by layers: it is not in its stream yet; await launched first")
        if layer >= len(self._marks):
            raise CopyFailed(f"copy by layers: layer {layer} could not be launched; done says why")
        return self._marks[layer]
