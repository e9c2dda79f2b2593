"""Layouts in which storage has a model's pages: by the numbers of ranks of the instances that wrote them.

A rank stores its pages as it holds them, in a namespace of its own slice of the heads. Ranks with the same bytes share
one: those that hold copies of the same heads, and with MLA all ranks of a stage. A rank of an instance of another width
(number of tensor-parallel ranks per pipeline stage) reads the pages of all ranks that hold a part of its heads, and
takes its part of each:

    written by 2 ranks of 4 heads    | 0 1 2 3 | 4 5 6 7 |
    read by rank 1 of 4                  | 2 3 |              the second half of what writer 0 stored
    read by 1 rank                   | 0 1 2 3 4 5 6 7 |      both writers' pages

The slices are those of the hand-over (`tidekv.transports.slices`). What other instances store follows from the layout
of this rank, so nothing about them is configured. Pure arithmetic: no storage is accessed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from tidekv.backends.keys.chain import component_namespace, storage_namespace
from tidekv.backends.layout import FULL, KVLayout, LayerGroup
from tidekv.backends.page_layout import Layout, PageLayout
from tidekv.backends.storage.label import Label, label_of
from tidekv.states.errors import InvalidConfig
from tidekv.states.handover.rank_place import RankPlace
from tidekv.states.types import ComponentIdentity, GroupIdentity, Identity
from tidekv.transports.components import pages_of
from tidekv.transports.slices import Cut, cuts_of, groups_of, partition, record_cuts_of, stage_of, total_of

WIDTH_MAX: Final = 64
"""Maximum tensor-parallel ranks per stage of an instance whose pages are read."""
RECORD_FORMS_MAX: Final = 64
"""Maximum ways to divide the records of states that are considered for one width."""


class RankLayout(msgspec.Struct, frozen=True):
    """What determines the bytes that a rank stores: its place in its instance, and the identity of its pages."""

    identity: Identity
    rank: int = 0
    ranks: int = 1
    stages: int = 1
    kv_heads_total: int = 0

    @property
    def width(self) -> int:
        """Tensor-parallel ranks per stage."""
        return self.ranks // self.stages

    @property
    def contexts(self) -> int:
        """Parts of the tokens: ranks that hold only a part of them store nothing."""
        return 1

    def pages(self, component: str = "") -> Identity:
        """Return the identity of the full pages, or of those of a component as if they were all that there is."""
        return pages_of(self.identity, self._component(component)) if component else self.identity

    def slice(self, component: str = "") -> tuple[int, int]:
        """Return which slice of pages this rank stores, and into how many all ranks divide them.

        Ranks that hold copies of the same heads store the same slice. Raises InvalidConfig if the ranks cannot hold the
        heads.
        """
        stage, place = stage_of(self.rank, ranks=self.ranks, stages=self.stages)
        copies = 1
        if not component or self._component(component).kind == "window":
            groups = groups_of(self.pages(component))
            copies = math.gcd(*(partition(self, kind=group.kind, heads=group.heads).copies for group in groups))
        slices = self.width // copies
        return stage * slices + place // copies, self.stages * slices

    def namespace(self, component: str = "") -> bytes:
        """Return the namespace in which this rank stores full pages, or those of a component. Raises InvalidConfig."""
        number, slices = self.slice(component)
        full = storage_namespace(self.identity, rank=number, ranks=slices)
        return component_namespace(full, component) if component else full

    def label(self, component: str = "") -> Label:
        """Return the label of what this rank stores. Raises InvalidConfig."""
        number, slices = self.slice(component)
        return label_of(self.identity, component, rank=number, ranks=slices)

    def cuts_from(self, writer: RankLayout, component: str = "") -> list[Cut]:
        """Return what this rank takes of each page that a rank of another width has stored; "ours" is the writer."""
        pages = self.pages(component), writer.pages(component)
        if component and self._component(component).kind == "state":
            channels = self._component(component).channels, writer._component(component).channels
            return list(record_cuts_of(decode=self, prefill=writer, records=pages, channels=channels))
        return list(cuts_of(decode=self, prefill=writer, pages=pages))

    def _component(self, name: str) -> ComponentIdentity:
        return next(each for each in self.identity.components if each.name == name)


def layout_at(place: RankPlace, identity: Identity) -> RankLayout:
    """Return the layout of a rank whose pages have this identity."""
    return RankLayout(identity, place.rank, place.ranks, place.stages, place.kv_heads_total)


class Source(NamedTuple):
    """The pages of one rank of another width, and what is taken of each."""

    namespace: bytes
    layout: Layout
    cuts: list[Cut]


class StoredLayout(NamedTuple):
    """Pages of instances of one width, as one rank of another width reads them: from all sources, or not at all."""

    width: int
    sources: tuple[Source, ...]


def other_layouts(reader: RankLayout, component: str = "") -> list[StoredLayout]:
    """Return all other layouts in which storage may have this rank's full pages, or those of a component.

    They are of instances with as many pipeline stages. Those that need the fewest bytes come first.
    """
    if component and (part := reader._component(component)).kind == "state" and not part.channels:
        return []  # Records that cannot be divided.
    own, wanted = reader.namespace(component), reader.pages(component).page_bytes
    found: dict[tuple[bytes, ...], StoredLayout] = {}
    seen: set[tuple[Identity, int]] = set()
    for width in range(1, WIDTH_MAX + 1):
        if width == reader.width:
            continue
        for writers in _instances(reader, width):
            # Further ranks may only hold copies: they share the namespaces of an instance that was seen.
            form = writers[0].identity, writers[0].slice(component)[1]
            if form in seen:
                continue
            seen.add(form)
            sources = [
                Source(writer.namespace(component), layout_of(writer.pages(component)), cuts)
                for writer in writers
                if (cuts := reader.cuts_from(writer, component))
            ]
            names = tuple(source.namespace for source in sources)
            # Ranks that divide the heads as ours do store in our namespaces.
            taken = sum(cut.rows * cut.row_bytes for source in sources for cut in source.cuts)
            if own not in names and taken == wanted:
                found.setdefault(names, StoredLayout(width, tuple(sources)))
    return sorted(found.values(), key=_read_bytes)


def layout_of(identity: Identity) -> Layout:
    """Return the layout of pages of this identity."""
    groups = (
        LayerGroup(FULL, _layout_of(identity, identity.page_size)),
        *(LayerGroup(group.name, _layout_of(group, identity.page_size)) for group in identity.groups),
    )
    return PageLayout(groups) if len(groups) > 1 else groups[0].layout


def _layout_of(group: Identity | GroupIdentity, page_size: int) -> KVLayout:
    return KVLayout(
        num_layers=group.layers,
        num_kv_heads=group.kv_heads,
        head_dim=group.head_dim,
        dtype=group.dtype,
        page_size=page_size,
        kind=group.kind,
    )


def _read_bytes(layout: StoredLayout) -> int:
    return sum(source.layout.page_bytes for source in layout.sources)


def _instances(reader: RankLayout, width: int) -> Iterator[list[RankLayout]]:
    """Yield the ranks of the reader's stage of each instance of this width that can hold the reader's model."""
    first = stage_of(reader.rank, ranks=reader.ranks, stages=reader.stages)[0] * width
    total = reader.kv_heads_total if reader.identity.kind == "mla" else total_of(reader)
    for identity in _identities(reader, width):
        ranks = [
            RankLayout(identity, first + place, width * reader.stages, reader.stages, total) for place in range(width)
        ]
        if _has_same_model(reader, ranks[0]):
            yield ranks


def _has_same_model(reader: RankLayout, writer: RankLayout) -> bool:
    """Whether all groups of pages and windows have as many heads in all at both widths."""
    windows = [component.name for component in reader.identity.components if component.kind == "window"]
    try:
        return all(
            partition(reader, kind=ours.kind, heads=ours.heads).total
            == partition(writer, kind=theirs.kind, heads=theirs.heads).total
            for name in ("", *windows)
            for ours, theirs in zip(groups_of(reader.pages(name)), groups_of(writer.pages(name)), strict=True)
        )
    except InvalidConfig:
        return False


def _identities(reader: RankLayout, width: int) -> Iterator[Identity]:
    """Yield the identities that a rank of this width can have; several if parts of a record may be copies."""
    full = _resized(reader, reader.identity, width)
    if full is None:
        return
    forms = [_component_forms(reader, component, width) for component in reader.identity.components]
    for components in itertools.islice(itertools.product(*forms), RECORD_FORMS_MAX):
        yield msgspec.structs.replace(full, components=components)


def _component_forms(reader: RankLayout, component: ComponentIdentity, width: int) -> list[ComponentIdentity]:
    """Return the forms that a component can have at a width; none if its heads cannot be divided by it."""
    pages = pages_of(reader.identity, component)
    if component.kind == "window":
        resized = _resized(reader, pages, width)
        if resized is None:
            return []
        return [_with_pages(component, resized)]
    if not component.channels:
        return [component]
    # Whether a part is divided or a copy is not recorded: both forms are possible, and the namespace tells them apart.
    of_parts = [
        [count, *([count * reader.width // width] if not count * reader.width % width else [])]
        for count in component.channels
    ]
    forms = []
    for channels in itertools.islice(itertools.product(*of_parts), RECORD_FORMS_MAX):
        size = sum(channels)
        pieces = tuple(piece // pages.page_size * size for piece in pages.piece_bytes)
        resized = msgspec.structs.replace(pages, page_size=size, piece_bytes=pieces, page_bytes=sum(pieces))
        forms.append(msgspec.structs.replace(_with_pages(component, resized), channels=channels))
    return forms


def _with_pages(component: ComponentIdentity, pages: Identity) -> ComponentIdentity:
    first, *_ = component.groups
    return msgspec.structs.replace(
        component,
        page_size=pages.page_size,
        piece_bytes=pages.piece_bytes,
        groups=(msgspec.structs.replace(first, kv_heads=pages.kv_heads), *pages.groups),
    )


def _resized(reader: RankLayout, pages: Identity, width: int) -> Identity | None:
    """Return the identity of these pages on a rank of another width; None if it cannot hold their heads."""
    heads, pieces = [], list[int]()
    for group in groups_of(pages):
        total = partition(reader, kind=group.kind, heads=group.heads).total
        count = group.heads if group.kind == "mla" else max(total // width, 1)
        if group.kind != "mla" and total % width and width % total:
            return None
        heads.append(count)
        pieces += [pages.piece_bytes[piece] // group.heads * count for piece in group.pieces]
    groups = _with_heads(pages.groups, heads[1:])
    return msgspec.structs.replace(
        pages, kv_heads=heads[0], groups=groups, piece_bytes=tuple(pieces), page_bytes=sum(pieces)
    )


def _with_heads(groups: Sequence[GroupIdentity], heads: Sequence[int]) -> tuple[GroupIdentity, ...]:
    return tuple(msgspec.structs.replace(group, kv_heads=count) for group, count in zip(groups, heads, strict=True))
