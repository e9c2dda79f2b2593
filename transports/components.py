"""Components in a hand-over: each is checked and exchanged as the pages are, with its own pool.

The part of a Hello about one component is turned into a Hello of its own (`hello_of`), so that one set of rules checks
pages and components. If the two ends have different numbers of ranks, a window is divided by its heads as the pages
are, provided that its heads are partitioned like theirs. A record of a state is indivisible: it is exchanged between
ranks with equal shares. Pure arithmetic, no memory access.
"""

from __future__ import annotations

import msgspec

from tidekv.states.types import ComponentIdentity, Identity
from tidekv.transports import slices
from tidekv.transports.base import Exchange
from tidekv.transports.control import wire


def components_of(hello: wire.Hello) -> dict[str, ComponentIdentity]:
    """Return the components of a Hello by name."""
    return {component.name: component for component in hello.identity.components}


def hello_of(hello: wire.Hello, name: str) -> wire.Hello:
    """Return the Hello as if this component were all that its sender has."""
    component = components_of(hello)[name]
    first, *others = component.groups
    identity = Identity(
        model=hello.identity.model,
        kind=first.kind,
        dtype=first.dtype,
        page_size=component.page_size,
        layers=first.layers,
        kv_heads=first.kv_heads,
        head_dim=first.head_dim,
        page_bytes=sum(component.piece_bytes),
        piece_bytes=component.piece_bytes,
        groups=tuple(others),
        bigram_keys=hello.identity.bigram_keys,
    )
    return msgspec.structs.replace(hello, identity=identity, memory=hello.components[name], components={})


def is_divided_like_pages(hello: wire.Hello, name: str) -> bool:
    """Whether the heads of a component are partitioned over the ranks as those of the pages are."""
    component, pages = components_of(hello)[name], hello.identity
    first = component.groups[0]
    return component.kind == "window" and (first.kind, first.kv_heads) == (pages.kind, pages.kv_heads)


def exchanges_with(*, decode: wire.Hello, prefill: wire.Hello) -> dict[str, Exchange] | None:
    """Return the bytes that this prefill rank writes to this decode rank: of the pages ("full") and of each component.

    The pools must have been checked. None: it writes none. Raises PeerMismatch if the heads cannot be partitioned over
    these ranks.
    """
    share = slices.share_between(decode=decode, prefill=prefill)
    if share is None:
        return None
    exchanges = {"full": slices.exchange_of(share, decode=decode, prefill=prefill)}
    for name in decode.components:
        there, here = hello_of(decode, name), hello_of(prefill, name)
        if is_divided_like_pages(decode, name) and is_divided_like_pages(prefill, name):
            exchanges[name] = slices.exchange_of(share, decode=there, prefill=here)
        else:
            exchanges[name] = Exchange(ours=here.memory, theirs=there.memory)
    return exchanges
