"""Serializable description of a component, for a worker in another process."""

from __future__ import annotations

import msgspec

from tidekv.backends.component_pools import ComponentPools
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.layout import LayerGroup
from tidekv.backends.page_layout import PageLayout
from tidekv.states.components.specs import ComponentKind


class ComponentOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A window or state that a prefill worker is to have."""

    name: str
    kind: ComponentKind
    window_tokens: int = 0
    groups: tuple[LayerGroup, ...]
    num_pages: int

    def pools(self) -> ComponentPools:
        """Allocate its pool."""
        device = DevicePool.allocate(PageLayout(self.groups), self.num_pages)
        return ComponentPools(name=self.name, kind=self.kind, window_tokens=self.window_tokens, device=device)
