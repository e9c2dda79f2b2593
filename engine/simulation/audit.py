"""Invariants between two steps, recomputed from scratch: the state of the core, and the content of the pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.engine.simulation.memory import Violation

if TYPE_CHECKING:
    from tidekv.engine.simulation.surroundings import Surroundings
    from tidekv.states.prefix.node import Node


def audit(world: Surroundings) -> None:
    """Raise BrokenInvariant or Violation at the first contradiction."""
    world.core.check()
    world.device.check()
    world.host.check()
    world.tails.check_cached(world.core)
    width = world.settings.key_bytes
    tags: dict[Node, list[int]] = {}
    for node in world.core.state.index.nodes():
        parent = node.parent
        assert parent is not None
        before: int | str = node.namespace if parent.is_root else tags[parent][-1]
        own: list[int] = []
        for start in range(0, len(node.edge), width):
            before = world.contents.tag(before, node.edge[start : start + width])
            own.append(before)
        tags[node] = own
        if node.device is not None and node.load is None and not node.void:
            world.device.expect(node.device, own, f"cached node {node}")
        if node.host is not None:
            world.host.expect(node.host, own, f"cached node {node}")
    for request in world.core.state.requests.values():
        if not world.caller(request.request_id):
            raise Violation(f"{request} lives, but its caller is gone")
