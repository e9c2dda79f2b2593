"""First message of each side: how it is made, and how the other side's is checked.

Values that must be equal are compared field by field, so that a refusal names the field. A peer whose pages are laid
out differently must never pass: its writes would put bytes into wrong places.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from tidekv.states.errors import InvalidConfig, PeerMismatch, RemoteProtocolError
from tidekv.states.handover.rank_place import SOLE, RankPlace
from tidekv.states.types import ComponentIdentity, GroupIdentity, Identity, PoolMemory
from tidekv.transports import base, components, process, slices, wire

HELLO_S = 5.0
"""Seconds in which a listener expects the Hello. A dialler waits for it as long as for any other message."""
OF_ALL_GROUPS = ("groups", "page_bytes", "piece_bytes")
"""Fields of an identity derived from all layer groups: compared after the groups, so the differing group is named."""


def make_hello(
    transport: base.Transport,
    *,
    memory: PoolMemory,
    identity: Identity,
    lease_s: float,
    place: RankPlace = SOLE,
    component_memory: Mapping[str, PoolMemory] | None = None,
    heartbeat_s: float = 0.0,
    checksums: Literal["none", "required", "offered"] = "none",
    staging: PoolMemory | None = None,
    liveness_key: bytes = b"",
    sends: wire.Sends = "computed",
    shares_at: str = "",
    cached_place: RankPlace = SOLE,
) -> wire.Hello:
    """Return our Hello. `memory`, that of components and `staging` must be registered with the transport already.

    For `kv_heads_total` see `slices.partition`, for `checksums` `wire.Hello`. `heartbeat_s` is the interval of our
    pings in seconds; 0: we only answer pings.
    """
    return wire.Hello(
        version=wire.VERSION,
        instance=transport.instance,
        identity=identity,
        rank=place.rank,
        ranks=place.ranks,
        metadata=transport.metadata(),
        memory=memory,
        process=process.this_process(),
        lease_s=lease_s,
        kv_heads_total=place.kv_heads_total,
        stages=place.stages,
        components=dict(component_memory or {}),
        heartbeat_s=heartbeat_s,
        checksums=checksums,
        staging=staging,
        contexts=place.contexts,
        stripe_pages=place.stripe_pages,
        liveness_key=liveness_key,
        sends=sends,
        shares_at=shares_at,
        cached_place=cached_place,
    )


async def receive_hello(link: base.Link) -> wire.Hello:
    """Return the peer's Hello, which must be its first message. Raises LinkClosed or RemoteProtocolError."""
    return as_hello(link, await link.receive())


def as_hello(link: base.Link, message: wire.AnyMessage) -> wire.Hello:
    """Return the first message of a link if it is a Hello. Raises RemoteProtocolError."""
    if not isinstance(message, wire.Hello):
        raise RemoteProtocolError(f"{link.peer_label} began with {type(message).__name__} instead of Hello")
    return message


def check_hello(ours: wire.Hello, theirs: wire.Hello) -> None:
    """Raise PeerMismatch with the first field that differs, RemoteProtocolError for invalid memory or ranks."""
    _must_equal("version", ours.version, theirs.version)
    _must_equal("what is sent (computed pages by prefill, cached ones by decode)", ours.sends, theirs.sends)
    for name in ("ranks", "stages", "rank"):
        field = f"{name} of workers that share host memory"
        _must_equal(field, getattr(ours.cached_place, name), getattr(theirs.cached_place, name))
    if theirs.ranks % (theirs.stages * theirs.contexts) or not theirs.rank < theirs.ranks:
        raise RemoteProtocolError(
            f"peer announces itself as rank {theirs.rank} of {theirs.ranks} in {theirs.stages} stages and"
            f" {theirs.contexts} contexts"
        )
    try:
        slices.partition(theirs, kind=theirs.identity.kind, heads=theirs.identity.kv_heads)
    except InvalidConfig as error:
        raise PeerMismatch(field=f"ranks ({error})", ours=ours.ranks, theirs=theirs.ranks) from error
    _check_lease(ours, theirs)
    if "required" in (ours.checksums, theirs.checksums) and "offered" not in (ours.checksums, theirs.checksums):
        raise PeerMismatch(field="page_checksums", ours=ours.checksums, theirs=theirs.checksums)
    _check_page_layout(ours, theirs, pages=(ours.identity, theirs.identity))
    _must_equal("kv_heads_total", slices.total_of(ours), slices.total_of(theirs))
    base.check_memory(theirs.memory)
    if theirs.staging is not None:
        base.check_memory(theirs.staging)
        if len(theirs.staging.segments) != 1 or theirs.staging.page_count != 1:
            raise RemoteProtocolError("peer announces a staging ring that is not one segment of one page")
    _check_components(ours, theirs)


def lease_of(ours: wire.Hello, theirs: wire.Hello) -> float:
    """Seconds for which prefill keeps a room that decode does not name: the shorter lease of both ends."""
    return min(ours.lease_s, theirs.lease_s)


def _check_lease(ours: wire.Hello, theirs: wire.Hello) -> None:
    """Require a ping interval below the lease, so each ping arrives before the lease renewed by the previous one
    expires.
    """
    lease_s = lease_of(ours, theirs)
    if max(ours.heartbeat_s, theirs.heartbeat_s) >= lease_s:
        raise PeerMismatch(
            field=f"heartbeat_s, which must be less than the lease of {lease_s:g} s",
            ours=ours.heartbeat_s,
            theirs=theirs.heartbeat_s,
        )


def _check_page_layout(
    ours: wire.Hello, theirs: wire.Hello, *, pages: tuple[Identity, Identity], of: str = "", channels: bool = False
) -> None:
    """Compare the page layouts of both sides, ours and theirs; `of` names the component, if they are of one.

    `channels` is true for records that are divided by their channels.
    """
    # The other end may hold more or fewer heads and layers: sizes are compared after conversion to ours.
    mine = pages[0]
    identity, pieces = slices.as_held_by(ours, theirs, pages=pages, channels=channels)
    for name in Identity.__struct_fields__:
        if name in (*OF_ALL_GROUPS, "components"):
            continue
        if name == "layers" and ours.stages != theirs.stages and mine.layers != identity.layers:
            totals = (
                f"{each.layers} in each of {hello.stages}" for each, hello in zip(pages, (ours, theirs), strict=True)
            )
            _must_equal("layers of all stages, which must be as many in each" + of, *totals)
        _must_equal(name + of, getattr(mine, name), getattr(identity, name))
    _check_groups(mine.groups, identity.groups, of=of)
    for name in OF_ALL_GROUPS:
        _must_equal(name + of, getattr(mine, name), getattr(identity, name))
    # The identity describes the intended layout, the memory the actual one, whose pieces a write pairs up.
    _must_equal("memory pieces" + of, _pieces(ours.memory), pieces)


def _check_components(ours: wire.Hello, theirs: wire.Hello) -> None:
    """Require the same components on both sides: without its window or state a model cannot continue the sequence."""
    here, there = components.components_of(ours), components.components_of(theirs)
    for name in {**here, **there}:
        of = f" of component {name!r}"
        if name not in here or name not in there:
            _must_equal(f"component {name!r}", _summary(here.get(name)), _summary(there.get(name)))
        for field in ("kind", "window_tokens"):
            _must_equal(field + of, getattr(here[name], field), getattr(there[name], field))
        is_divided = _check_channels(ours, theirs, name) if here[name].kind == "state" else False
        parts = components.hello_of(ours, name), components.hello_of(theirs, name)
        # The heads of a window may be partitioned as those of the pages are: the Hellos are those of the pages.
        hellos = [
            msgspec.structs.replace(hello, memory=part.memory)
            for hello, part in zip((ours, theirs), parts, strict=True)
        ]
        _check_page_layout(*hellos, pages=(parts[0].identity, parts[1].identity), of=of, channels=is_divided)
        base.check_memory(theirs.components[name])


def _check_channels(ours: wire.Hello, theirs: wire.Hello, name: str) -> bool:
    """Require records that the ranks of both ends can exchange. Returns whether they are divided by their channels."""
    of = f" of component {name!r}"
    here, there = (components.components_of(hello)[name].channels for hello in (ours, theirs))
    widths = [slices.width_of(hello) for hello in (ours, theirs)]
    if widths[0] == widths[1]:
        _must_equal(f"channels{of}", here, there)
        return False
    if not here or not there:
        # Only a record with channels says how it is divided over ranks.
        _must_equal(f"ranks (it cannot be divided without channels){of}", *widths)
    _must_equal(f"number of parts with channels{of}", len(here), len(there))
    for part, (mine, other) in enumerate(zip(here, there, strict=True)):
        if mine != other:
            _must_equal(f"channels of part {part} over all ranks{of}", mine * widths[0], other * widths[1])
    return True


def _summary(component: ComponentIdentity | None) -> str:
    if component is None:
        return "absent"
    size = f"{sum(component.piece_bytes)} bytes"
    return (
        f"a window of {component.window_tokens} tokens, {size} a page"
        if component.kind == "window"
        else f"a {component.kind}, {size} a record"
    )


def _check_groups(ours: tuple[GroupIdentity, ...], theirs: tuple[GroupIdentity, ...], *, of: str) -> None:
    """Require the same layer groups in every page: a page without draft KV cannot replace one that has it."""
    here, there = ({group.name: group for group in groups} for groups in (ours, theirs))
    for name in {**here, **there}:
        if name not in here or name not in there:
            _must_equal(f"layer group {name!r} of a page{of}", here.get(name, "absent"), there.get(name, "absent"))
        for field in GroupIdentity.__struct_fields__:
            _must_equal(
                f"{field} of layer group {name!r}{of}", *(getattr(groups[name], field) for groups in (here, there))
            )
    _must_equal(f"order of layer groups{of}", tuple(here), tuple(there))


def _must_equal(field: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise PeerMismatch(field=field, ours=ours, theirs=theirs)


def _pieces(memory: PoolMemory) -> tuple[int, ...]:
    return tuple(segment.piece_bytes for segment in memory.segments)
