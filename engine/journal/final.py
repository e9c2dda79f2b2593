"""What a core is at the end of a run, as numbers: a replay must come to the very same."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidekv.states.core import Core
    from tidekv.states.pages.page_pool import PagePool


def final_state(core: Core) -> dict[str, int]:
    """Checksums of index, pools and requests, and every number of `Core.statistics`. O(tree); changes nothing.

    Page keys do not enter: a journal has others than the run had.
    """
    return {
        "crc_index": _index(core),
        "crc_device": _pool(core.state.device),
        "crc_host": _pool(core.state.host),
        "crc_requests": _requests(core),
        **_components(core),
        **core.statistics(),
    }


def _index(core: Core) -> int:
    crc = 0
    pack = struct.Struct("<12q").pack
    for node in core.state.index.nodes():
        assert node.parent is not None
        numbers = pack(
            node.node_id,
            node.parent.node_id,
            node.page_count,
            node.depth_pages,
            node.tick,
            node.hits,
            node.anchored,
            node.guarded,
            node.host_anchored,
            node.host_guarded,
            node.priority,
            (node.load is not None) + 2 * node.void + 4 * node.stored,
        )
        crc = zlib.crc32(numbers, crc)
        crc = zlib.crc32(b"" if node.device is None else node.device, crc)
        crc = zlib.crc32(b"" if node.host is None else node.host, crc)
    for namespace in core.state.index.tree.roots:
        crc = zlib.crc32(namespace.encode(), crc)
    return crc


def _components(core: Core) -> dict[str, int]:
    """Pools of components, and which of their pages each node has."""
    index = core.state.components
    if index is None:
        return {}
    sums = {}
    for name in index.components:
        for tier in (index.device[name], index.host[name]):
            crc = _pool(tier.account)
            for node in index.index.nodes():
                held = sorted(tier.pages_of(node).items())
                crc = zlib.crc32(repr((node.node_id, held, tier.is_guarded(node))).encode(), crc)
            sums[f"crc_{name}_{tier.name}"] = crc
    return sums


def _pool(account: PagePool) -> int:
    conditions = bytes(account.condition(page) for page in range(account.total))
    return zlib.crc32(account.free_pages, zlib.crc32(conditions))


def _requests(core: Core) -> int:
    crc = 0
    for request in core.state.requests.values():
        words = (
            request.request_id,
            request.state.value,
            request.generation,
            request.attempts,
            request.raised,
            request.matched,
            request.promised,
            list(request.own),
            list(request.table),
            list(request.reserve),
            request.source_pages,
            [(load.first, load.page_count, load.stage.value) for load in request.loads],
        )
        crc = zlib.crc32(repr(words).encode(), crc)
    return crc
