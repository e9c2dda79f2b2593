"""The first message of each side: how it is made, and how the other side's is judged.

What has to be equal is compared field by field, so that a refusal names the field. Must never let a peer through whose
pages are not laid out like ours: its writes would be bytes in wrong places.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tidekv.states.errors import PeerMismatch, RemoteProtocolError
from tidekv.states.types import ComponentIdentity, GroupIdentity, Identity, PoolMemory
from tidekv.transports import base, components, process, slices
from tidekv.transports.control import wire

HELLO_S = 5.0
"""Seconds in which a listener expects the Hello. A dialler waits no longer than for any other sign of life."""
OF_ALL_GROUPS = ("groups", "page_bytes", "piece_bytes")
"""Fields of an identity that follow from all groups of a page: the group that is to blame is named before them."""


def make_hello(
    transport: base.Transport,
    *,
    memory: PoolMemory,
    identity: Identity,
    lease_s: float,
    rank: int = 0,
    ranks: int = 1,
    kv_heads_total: int = 0,
    stages: int = 1,
    component_memory: Mapping[str, PoolMemory] | None = None,
    heartbeat_s: float = 0.0,
) -> wire.Hello:
    """Our Hello; `memory` and that of components must be registered with the transport already. `kv_heads_total`: see
    `slices.holding`. `heartbeat_s`: seconds between our pings, 0 if we only answer those of the other end.
    """
    return wire.Hello(
        version=wire.VERSION,
        instance=transport.instance,
        identity=identity,
        rank=rank,
        ranks=ranks,
        metadata=transport.metadata(),
        memory=memory,
        process=process.this_process(),
        lease_s=lease_s,
        kv_heads_total=kv_heads_total,
        stages=stages,
        components=dict(component_memory or {}),
        heartbeat_s=heartbeat_s,
    )


async def receive_hello(link: base.Link) -> wire.Hello:
    """The peer's Hello, which must be its first message. Raises LinkClosed or RemoteProtocolError."""
    message = await link.receive()
    if not isinstance(message, wire.Hello):
        raise RemoteProtocolError(f"{link.peer_label} began with {type(message).__name__} instead of Hello")
    return message


def judge_hello(ours: wire.Hello, theirs: wire.Hello) -> None:
    """Raise PeerMismatch with the first field that differs, RemoteProtocolError for memory that is not sound."""
    _must_equal("version", ours.version, theirs.version)
    _must_equal("stages", ours.stages, theirs.stages)
    if theirs.ranks % theirs.stages or not theirs.rank < theirs.ranks:
        raise RemoteProtocolError(
            f"peer says that it is rank {theirs.rank} of {theirs.ranks} in {theirs.stages} stages"
        )
    _judge_lease(ours, theirs)
    _judge_pages(ours, theirs)
    _must_equal("kv_heads_total", slices.total_of(ours), slices.total_of(theirs))
    base.check_memory(theirs.memory)
    _judge_components(ours, theirs)


def lease_of(ours: wire.Hello, theirs: wire.Hello) -> float:
    """Seconds for which prefill keeps a room that decode does not name: neither end has to bear more than it said."""
    return min(ours.lease_s, theirs.lease_s)


def _judge_lease(ours: wire.Hello, theirs: wire.Hello) -> None:
    """Each ping must come before the lease that the one before it renewed is over."""
    lease_s = lease_of(ours, theirs)
    if max(ours.heartbeat_s, theirs.heartbeat_s) >= lease_s:
        raise PeerMismatch(
            field=f"heartbeat_s, which must be less than the lease of {lease_s:g} s",
            ours=ours.heartbeat_s,
            theirs=theirs.heartbeat_s,
        )


def _judge_pages(ours: wire.Hello, theirs: wire.Hello, *, of: str = "") -> None:
    """Compare the pages of both, those of a component named by `of`."""
    # Ranks may hold more heads or fewer at the other end: all that follows from their number is compared as if not.
    identity, pieces = slices.in_heads_of(theirs, ours)
    names = [info.name for info in msgspec.structs.fields(Identity) if info.name not in (*OF_ALL_GROUPS, "components")]
    for name in names:
        _must_equal(name + of, getattr(ours.identity, name), getattr(identity, name))
    _judge_groups(ours.identity.groups, identity.groups, of=of)
    for name in OF_ALL_GROUPS:
        _must_equal(name + of, getattr(ours.identity, name), getattr(identity, name))
    # The identity says what the layout should be, the memory what really lies there; a write pairs the pieces up.
    _must_equal("memory pieces" + of, _pieces(ours.memory), pieces)


def _judge_components(ours: wire.Hello, theirs: wire.Hello) -> None:
    """Both must have the same components: without its window, or its state, a model cannot go on where it stopped."""
    here, there = components.components_of(ours), components.components_of(theirs)
    for name in {**here, **there}:
        of = f" of component {name!r}"
        if name not in here or name not in there:
            _must_equal(f"component {name!r}", _in_words(here.get(name)), _in_words(there.get(name)))
        for field in ("kind", "window_tokens"):
            _must_equal(field + of, getattr(here[name], field), getattr(there[name], field))
        if not all(components.is_divided_like_pages(hello, name) for hello in (ours, theirs)):
            # Its bytes are not those of heads, or lie otherwise: only ranks that hold the same can exchange them.
            _must_equal(f"ranks (it cannot be divided){of}", ours.ranks, theirs.ranks)
            _must_equal(f"kv_heads (it cannot be divided){of}", ours.identity.kv_heads, theirs.identity.kv_heads)
        _judge_pages(components.hello_of(ours, name), components.hello_of(theirs, name), of=of)
        base.check_memory(theirs.components[name])


def _in_words(component: ComponentIdentity | None) -> str:
    if component is None:
        return "absent"
    size = f"{sum(component.piece_bytes)} bytes"
    return (
        f"a window of {component.window_tokens} tokens, {size} a page"
        if component.kind == "window"
        else f"a {component.kind}, {size} a record"
    )


def _judge_groups(ours: tuple[GroupIdentity, ...], theirs: tuple[GroupIdentity, ...], *, of: str) -> None:
    """Every page of both sides must hold the same groups: a page without draft KV is not one that has it."""
    here, there = ({group.name: group for group in groups} for groups in (ours, theirs))
    for name in {**here, **there}:
        if name not in here or name not in there:
            _must_equal(f"layer group {name!r} of a page{of}", here.get(name, "absent"), there.get(name, "absent"))
        for info in msgspec.structs.fields(GroupIdentity):
            field = f"{info.name} of layer group {name!r}{of}"
            _must_equal(field, *(getattr(groups[name], info.name) for groups in (here, there)))
    _must_equal(f"order of layer groups{of}", tuple(here), tuple(there))


def _must_equal(field: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise PeerMismatch(field=field, ours=ours, theirs=theirs)


def _pieces(memory: PoolMemory) -> tuple[int, ...]:
    return tuple(segment.piece_bytes for segment in memory.segments)
