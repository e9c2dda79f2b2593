"""The pools of one decode rank as a prefill rank writes to them: its pages', and each component's."""

from __future__ import annotations

from contextlib import AsyncExitStack

import msgspec

from tidekv.transports import base
from tidekv.transports import components
from tidekv.transports.control import wire


class Target(msgspec.Struct, frozen=True):
    """Handles of the pools that are written to, by component; "full" are the pages."""

    handles: dict[str, base.PeerMemory]

    async def forget(self, transport: base.Transport) -> None:
        """Give all handles back; nothing is written to any of them."""
        for handle in self.handles.values():
            await transport.remove_peer(handle)


async def make_target(transport: base.Transport, *, ours: wire.Hello, theirs: wire.Hello) -> Target | None:
    """Make the pools of a decode rank writable, as far as its heads are ours to write, all of them or none; None: we
    write nothing to it. Raises RemoteProtocolError, TransferFailed.
    """
    exchanges = components.exchanges_with(decode=theirs, prefill=ours)
    if exchanges is None:
        return None
    handles: dict[str, base.PeerMemory] = {}
    async with AsyncExitStack() as undo:
        for name, exchange in exchanges.items():
            memory = theirs.components.get(name, theirs.memory)
            handle = await transport.add_peer(theirs.instance, theirs.metadata, memory, exchange)
            undo.push_async_callback(transport.remove_peer, handle)
            handles[name] = handle
        undo.pop_all()
    return Target(handles)
