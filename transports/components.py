"""Components in a hand-over: each is checked and exchanged as the pages are, with its own pool.

The part of a Hello about one component is turned into a Hello of its own (`hello_of`), so that one set of rules checks
pages and components. If the two ends have different numbers of ranks, a window is divided by its heads as the pages
are, and a record of a state by its channels. A record without channels is indivisible: it is exchanged between ranks
of instances with as many ranks. Pure arithmetic, no memory access.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tidekv.states.types import ComponentIdentity, Identity
from tidekv.transports import slices, wire
from tidekv.transports.base import Exchange
from tidekv.transports.slices import Cut


def components_of(hello: wire.Hello) -> dict[str, ComponentIdentity]:
    """Return the components of a Hello by name."""
    return {component.name: component for component in hello.identity.components}


def pages_of(identity: Identity, component: ComponentIdentity) -> Identity:
    """Return the identity of the pages or records of a component, as if they were all that there is."""
    first, *others = component.groups
    return Identity(
        model=identity.model,
        kind=first.kind,
        dtype=first.dtype,
        page_size=component.page_size,
        layers=first.layers,
        kv_heads=first.kv_heads,
        head_dim=first.head_dim,
        page_bytes=sum(component.piece_bytes),
        piece_bytes=component.piece_bytes,
        groups=tuple(others),
        bigram_keys=identity.bigram_keys,
    )


def hello_of(hello: wire.Hello, name: str) -> wire.Hello:
    """Return the Hello as if this component were all that its sender has."""
    identity = pages_of(hello.identity, components_of(hello)[name])
    return msgspec.structs.replace(hello, identity=identity, memory=hello.components[name], components={})


def cuts_with(*, decode: wire.Hello, prefill: wire.Hello) -> dict[str, list[Cut]]:
    """Return what this prefill rank writes to this decode rank, by pool: "full" and the components; empty: nothing.

    The pools must have been checked. Raises PeerMismatch if the heads cannot be partitioned over these ranks.
    """
    cuts = {"full": list(slices.cuts_of(decode=decode, prefill=prefill))}
    for name, theirs in components_of(decode).items():
        ours = components_of(prefill)[name]
        pools = hello_of(decode, name).identity, hello_of(prefill, name).identity
        if theirs.kind == "window":
            found = slices.cuts_of(decode=decode, prefill=prefill, pages=pools)
        else:
            channels = theirs.channels, ours.channels
            found = slices.record_cuts_of(decode=decode, prefill=prefill, records=pools, channels=channels)
        cuts[name] = list(found)
    return {name: of_pool for name, of_pool in cuts.items() if of_pool}


def exchanges_with(*, decode: wire.Hello, prefill: wire.Hello) -> dict[str, Exchange]:
    """Return the bytes of `cuts_with` in the pools of both ends, by pool."""
    return {
        name: slices.exchange_of(
            cuts, ours=prefill.components.get(name, prefill.memory), theirs=decode.components.get(name, decode.memory)
        )
        for name, cuts in cuts_with(decode=decode, prefill=prefill).items()
    }


def missing_of(decode: wire.Hello, written: Iterable[dict[str, Exchange]]) -> str:
    """Return which pool of decode all its prefill ranks together do not write whole; empty if they write all pools.

    `written` are the exchanges with each of them, which never overlap.
    """
    exchanges = list(written)
    for name in ("full", *decode.components):
        wanted = decode.components.get(name, decode.memory).page_bytes
        found = sum(each[name].theirs.page_bytes for each in exchanges if name in each)
        if found != wanted:
            of = "pages" if name == "full" else f"component {name!r}"
            return f"the prefill ranks of the request hold {found} of the {wanted} bytes of each page of our {of}"
    return ""
