"""Statistics of the core: current amounts, and counters since the start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states.request.table import LIVE, READY

if TYPE_CHECKING:
    from tidekv.states.inspect.invariants import Parts


def operations_in_flight(core: Parts) -> int:
    """Number of operations in flight, without that of the circuit breaker, queries without a request, and pins."""
    idle = core.storage.is_open + len(core.storage.queries_left) + len(core.hints.pins)
    return len(core.state.operations) - idle


def count_core(core: Parts) -> dict[str, int]:
    """Requests by state, pages by pool and page state, amounts in flight, and all counters."""
    state = core.state
    states = dict.fromkeys((f"requests_{kind.value.lower()}" for kind in (*LIVE, READY)), 0)
    for request in state.requests.values():
        states[f"requests_{request.state.value.lower()}"] += 1
    pools = {
        f"{pool.name}_{page_state}": getattr(pool, page_state)
        for pool in (state.device, state.host)
        for page_state in ("free", "owned", "cached", "draining", "total")
    }
    return {
        **states,
        **pools,
        **_count_components(core),
        "device_evictable": state.index.device_evictable,
        "device_protected": state.index.device_protected,
        "host_evictable": state.index.host_evictable,
        "host_protected": state.index.host_protected,
        "evicted_over_share": state.index.evicted_over_share,
        "queue": len(core.queue),
        "loads": len(core.loads),
        "lookahead_pages": core.lookahead.pages,
        "backups": len(core.backups),
        "offers": len(core.offers),
        "operations": operations_in_flight(core),
        "l3_breaker_open": int(core.storage.is_open),
        "rooms": len(core.rooms),
        "rooms_draining": core.rooms.draining_rooms,
        "requests_returning": len(core.lending.returning),
        "requests_running": core.running,
        "hint_pinned_pages": core.hints.pinned_pages,
        "pages_to_store": core.store_all.pages_left,
        "peer_pages_in_flight": core.peers.pages_in_flight,
        "shared_pages": core.hints.shared_pages,
        "requests_retracted": core.backups.retracted_requests,
        **state.counters,
    }


def _count_components(core: Parts) -> dict[str, int]:
    components = core.state.components
    if components is None:
        return {}
    numbers = {}
    for name in components.components:
        for tier in (components.device[name], components.host[name]):
            pool = tier.pool
            for page_state in ("free", "owned", "cached", "draining", "total"):
                numbers[f"{name}_{tier.name}_{page_state}"] = getattr(pool, page_state)
            numbers[f"{name}_{tier.name}_evictable"] = tier.evictable
            numbers[f"{name}_{tier.name}_protected"] = tier.protected
    return numbers
