"""Opening of a core's journal by the engine's configuration."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from tidekv.engine.journal import Journal
from tidekv.transports.blocking import settled

if TYPE_CHECKING:
    from tidekv.engine.config.engine_config import EngineConfig
    from tidekv.states.core import Core
    from tidekv.states.types import Identity


async def open_journal(
    config: EngineConfig, core: Core, *, identity: Identity, page_bytes: int, instance: str
) -> Journal | None:
    """Open the journal of a core that has taken no event; None if journals are disabled. Raises InvalidConfig."""
    path = config.journal.path
    if path is None:
        return None

    def open_it() -> Journal:
        return Journal(
            path,
            core,
            with_tokens=config.journal.tokens,
            config=msgspec.to_builtins(config),
            layout={**msgspec.to_builtins(identity), "page_bytes": page_bytes},
            instance=instance,
            segment_bytes=config.journal.segment_bytes,
            segments_max=config.journal.segments_max,
        )

    # In a thread, to its end: it opens files, and must not be lost to a cancellation once it runs.
    return await settled(asyncio.ensure_future(asyncio.to_thread(open_it)))
