"""Pools of components: sliding-window pages and state snapshots, which travel beside the KV of every page.

    full pool        one page for every page of a prompt
    window's pool    a page holds `page_size` tokens of its layers; of a prompt the trailing ones are kept
    state's pool     a page is one record: all of a recurrent model's state after so many tokens

A component's layout is a `KVLayout` or `PageLayout` like any other. For a record it describes only the shape, and its
`page_size` is one of the dimensions: Mamba layers with a state of [intermediate, 16] and a convolution of
[intermediate, 4] elements are two groups,

    PageLayout.of(
        full=KVLayout(kind="mla", num_layers=layers, page_size=intermediate, num_kv_heads=1, head_dim=16, …),
        convolution=KVLayout(kind="mla", num_layers=layers, page_size=intermediate, num_kv_heads=1, head_dim=4, …),
    )

so that the model reads and writes `pool.k[layer][page, :, 0]` and `pool.group("convolution").k[layer][page, :, 0]`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tidekv.backends.device.pool import DevicePool
from tidekv.backends.host.pool import HostPool
from tidekv.backends.page_layout import group_identity, same_pages
from tidekv.states.component_specs import Component, ComponentKind
from tidekv.states.errors import InvalidConfig
from tidekv.states.types import ComponentIdentity, Identity


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComponentPools:
    """A window or state with its pools: `DecodeEngine(…, components=(ComponentPools(…), …))`.

    `kind` is "window" (sliding-window attention; a position needs `window_tokens` tokens before it) or "state"
    (recurrent layers; a page is one record). `name` is an identifier other than "full", the same at both ends of a
    hand-over and on all ranks.

    `device` holds the pages of requests, and cached ones: a request needs the pages of `window_tokens` and one that it
    writes, or one record, so size the pool for all concurrent requests. `host` holds pages that were copied to host
    memory. None keeps none there; prompts are then restored from host memory only as far as the device has the
    component. The caller keeps ownership of the pools. Raises InvalidConfig, which names the component.

    `channels` lets ranks of unequal numbers exchange the records of a state: its `page_size` is the channels that this
    rank holds, part by part, and `channels` has the number of each part. Tensor parallelism must divide each part
    evenly, in rank order, or keep a copy of it on every rank (as many channels at both ends). A convolution of x, B and
    C in one tensor has three parts. Empty: a record is indivisible.
    """

    name: str
    kind: ComponentKind
    device: DevicePool
    host: HostPool | None = None
    window_tokens: int = 0
    channels: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise InvalidConfig(f"component {self.name!r}: a name must be an identifier")
        if self.host is not None and not same_pages(self.host.layout, self.device.layout):
            raise InvalidConfig(
                f"component {self.name!r}: host pool has layout {self.host.layout}, device pool has"
                f" {self.device.layout}"
            )
        if type(self.window_tokens) is not int:
            raise InvalidConfig(f"component {self.name!r}: window_tokens must be a count, not {self.window_tokens!r}")
        self._check_channels()
        assert self.component.name == self.name, "what makes no sense of the rest was raised"

    @property
    def component(self) -> Component:
        """The component as the core is configured with it."""
        return Component(
            name=self.name,
            kind=self.kind,
            device_pages=self.device.num_pages,
            host_pages=0 if self.host is None else self.host.num_pages,
            window_tokens=self.window_tokens,
        )

    @property
    def identity(self) -> ComponentIdentity:
        """Properties that must be equal at both ends before bytes of this component are exchanged."""
        layout = self.device.layout
        return ComponentIdentity(
            name=self.name,
            kind=self.kind,
            window_tokens=self.window_tokens,
            page_size=layout.page_size,
            piece_bytes=layout.pieces,
            groups=tuple(group_identity(group) for group in layout.groups),
            channels=self.channels,
        )

    def _check_channels(self) -> None:
        if self.channels and self.kind != "state":
            raise InvalidConfig(f"component {self.name!r}: channels are those of a state; a {self.kind} has heads")
        sound = isinstance(self.channels, tuple) and all(type(one) is int and one > 0 for one in self.channels)
        if self.channels and not (sound and sum(self.channels) == self.device.layout.page_size):
            raise InvalidConfig(
                f"component {self.name!r}: channels must be a tuple of counts whose sum is the page_size of the layout,"
                f" {self.device.layout.page_size}, not {self.channels!r}"
            )


def with_components(identity: Identity, components: Sequence[ComponentPools]) -> Identity:
    """Return the identity of pages that have these components beside them."""
    of_each = sorted((pools.identity for pools in components), key=lambda each: each.name)
    return msgspec.structs.replace(identity, components=tuple(of_each))


def check_components(
    components: Sequence[ComponentPools], *, device: DevicePool, host: HostPool | None, is_lent: bool = False
) -> None:
    """Raise InvalidConfig for components that do not fit each other, or the full pools `device` and `host`.

    `is_lent`: a host engine gives each device page to one of the pools at a time, so these may lie in the same memory.
    """
    names = [pools.name for pools in components]
    pools_by_name = {"full": (device, host)}
    for pools in components:
        if names.count(pools.name) > 1:
            raise InvalidConfig(
                f"component {pools.name!r} is given {names.count(pools.name)} times: one pool pair each"
            )
        here, there = pools.device.layout.page_size, device.layout.page_size
        if pools.kind == "window" and here != there:
            raise InvalidConfig(f"component {pools.name!r} has pages of {here} tokens, the full pool of {there}")
        if pools.device.device != device.device:
            raise InvalidConfig(
                f"component {pools.name!r} is on {pools.device.device}, the full pool on {device.device}: all device"
                " pools of an engine are on one device"
            )
        if pools.host is not None and host is None:
            raise InvalidConfig(
                f"component {pools.name!r} has a host pool and the full KV has none: without it nothing is"
                " restored from host memory; give the engine one as well, or none to the component"
            )
        pools_by_name[pools.name] = (pools.device, pools.host)
    _refuse_overlaps(pools_by_name, is_lent=is_lent)


def _refuse_overlaps(pools_by_name: dict[str, tuple[DevicePool, HostPool | None]], *, is_lent: bool) -> None:
    """Refuse pools in the same memory: they would overwrite each other's pages."""
    pieces = sorted(
        (segment.address, segment.address + segment.stride_bytes * segment.page_count, f"{tier} pool of {name!r}")
        for name, both in pools_by_name.items()
        for tier, pool in zip(("device", "host"), both, strict=True)
        if pool is not None and not (is_lent and tier == "device")
        for segment in pool.memory.segments
    )
    for (_, end, before), (start, _, after) in itertools.pairwise(pieces):
        if start < end:
            raise InvalidConfig(f"{before} and {after} lie in the same memory")
