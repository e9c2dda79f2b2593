"""Components beside the prefix index against a naive model: any mix of calls, random holes, and bytes that are moved.

The model knows by prefix which page holds a component's piece of it, and, by page, which prefix's bytes it holds. The
longest boundary that can be served is found by trying all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.prefixes import Prefix, keys, prefix_of
from tests.support.thorough import examples
from tidekv.states.component_specs import Component
from tidekv.states.pages.page_pool import PagePool, PageState
from tidekv.states.prefix.component_index import ComponentIndex, ComponentReceipt
from tidekv.states.prefix.index import Node, PrefixIndex
from tidekv.states.types import PageIds, page_ids

PROMPTS = st.tuples(st.sampled_from(["", "adapter"]), st.lists(st.integers(0, 1), max_size=9).map(tuple))
PICK = st.integers(0, 1 << 16)
TIERS = st.sampled_from(["device", "host"])
SETS = [
    [Component(name="window", kind="window", window_tokens=3, device_pages=9, host_pages=7)],
    [Component(name="state", kind="state", device_pages=5, host_pages=4)],
    [
        Component(name="window", kind="window", window_tokens=2, device_pages=9, host_pages=8),
        Component(name="state", kind="state", device_pages=6, host_pages=5),
    ],
    [
        Component(name="wide", kind="window", window_tokens=4, device_pages=12, host_pages=8),
        Component(name="narrow", kind="window", window_tokens=1, device_pages=6, host_pages=0),
    ],
]


def cut(prompt: Prefix, end: int) -> Prefix:
    return prompt[0], prompt[1][:end]


@dataclass
class Books:
    """What the model knows of one component in one tier."""

    pool: PagePool
    pages: dict[Prefix, int] = field(default_factory=dict)
    """By prefix: the page that the index keeps for its last position."""
    memory: dict[int, object] = field(default_factory=dict)
    """By page: the owner of the bytes it holds."""

    def write(self, page: int, what: object) -> None:
        # What is in the index is never written again.
        assert self.pool.condition(page) is PageState.OWNED
        self.memory[page] = what


@dataclass
class Held:
    """One receipt, and the pages that it must protect, by component and prefix."""

    receipt: ComponentReceipt
    kind: str
    boundary: int
    kept: dict[str, dict[Prefix, int]]


class ComponentsAgainstModel(RuleBasedStateMachine):
    """After any calls a match equals the naive answer, the page pools balance, and no page is lost or overwritten."""

    @initialize(components=st.sampled_from(SETS), prompts=st.lists(PROMPTS, min_size=2, max_size=4), pick=PICK)
    def start(self, components: list[Component], prompts: list[Prefix], pick: int) -> None:
        self.full = {"device": PagePool("device", 30), "host": PagePool("host", 20)}
        self.index = PrefixIndex(key_bytes=4, device=self.full["device"], host=self.full["host"])
        self.component_pages = ComponentIndex(self.index, components, page_size=1)
        self.trailing_pages = {c.name: c.window_tokens or 1 for c in components}
        self.names = list(self.trailing_pages)
        self.models = {
            (tier, name): Books(tiers[name].pool)
            for tier, tiers in (("device", self.component_pages.device), ("host", self.component_pages.host))
            for name in self.names
        }
        self.held: list[Held] = []
        self.taken: list[tuple[str, str, PageIds]] = []
        """Tier, component, and pages that a caller owns."""
        # An empty tree has nothing to show: most runs start from something.
        for number, prompt in enumerate(prompts):
            self.insert_full(prompt)
            if pick >> number & 1:
                self.give_the_other_tiers_copy(pick, "host")
            self.insert_components("device" if pick >> number & 2 else "host", number)

    # --- The model's own view ---

    def trailing_positions(self, name: str, prompt: Prefix, boundary: int) -> list[Prefix]:
        first = max(0, boundary - self.trailing_pages[name])
        return [cut(prompt, position + 1) for position in range(first, boundary)]

    def longest(self, prompt: Prefix, *, use_host: bool) -> tuple[int, int]:
        on_device, beyond = self.index.probe_prefix(prompt[0], keys(*prompt[1]))
        tiers = ("device", "host") if use_host else ("device",)
        boundary = on_device + beyond if use_host else on_device
        while not all(
            any(piece in self.models[tier, name].pages for tier in tiers)
            for name in self.names
            for piece in self.trailing_positions(name, prompt, boundary)
        ):
            boundary -= 1
        return min(boundary, on_device), max(0, boundary - on_device)

    def keep(self, receipt: ComponentReceipt, prompt: Prefix, boundary: int) -> Held:
        kind = receipt.full.kind
        kept = {}
        for name in self.names:
            pages = self.models[kind, name].pages
            kept[name] = {
                piece: pages[piece] for piece in self.trailing_positions(name, prompt, boundary) if piece in pages
            }
        return Held(receipt, kind, boundary, kept)

    def protected(self, tier: str, name: str) -> set[Prefix]:
        return {piece for part in self.live if part.kind == tier for piece in part.kept[name]}

    @property
    def live(self) -> list[Held]:
        return self.held

    def is_guarded(self, tier: str, name: str, node: Node) -> bool:
        """Whether the component pages of a receipt's boundary include positions of the node."""
        return any(
            part.kind == tier
            and node in self.index.path(part.receipt.full.node)
            and node.depth_pages > part.boundary - self.trailing_pages[name]
            for part in self.live
        )

    def found(self, tier: str, name: str) -> dict[Prefix, int]:
        """What the index keeps, read from it."""
        component_tier = (self.component_pages.device if tier == "device" else self.component_pages.host)[name]
        return {
            cut(prefix_of(node), position + 1): page
            for node in self.index.nodes()
            for position, page in component_tier.pages_of(node).items()
        }

    def shrink(self) -> dict[tuple[str, str], dict[Prefix, int]]:
        """Check that the index dropped only unprotected pages, and drop them in the model; returns them."""
        gone = {}
        for (tier, name), model in self.models.items():
            found = self.found(tier, name)
            gone[tier, name] = {piece: page for piece, page in model.pages.items() if piece not in found}
            assert not self.protected(tier, name) & gone[tier, name].keys()
            for piece in gone[tier, name]:
                del model.pages[piece]
        return gone

    def nodes(self, tier: str) -> list[Node]:
        return [node for node in self.index.nodes() if getattr(node, tier) is not None]

    # --- The full KV ---

    @rule(prompt=PROMPTS)
    def insert_full(self, prompt: Prefix) -> None:
        pool = self.full["device"]
        prompt = cut(prompt, pool.free)
        inserted = self.index.insert(prompt[0], keys(*prompt[1]), pool.take(len(prompt[1])))
        pool.give_back(inserted.duplicates)

    @rule(pick=PICK, tier=TIERS)
    def give_the_other_tiers_copy(self, pick: int, tier: str) -> None:
        pool = self.full[tier]
        nodes = [
            node
            for node in self.index.nodes()
            if getattr(node, tier) is None and getattr(node.parent, tier) is not None and node.page_count <= pool.free
        ]
        if nodes:
            node = nodes[pick % len(nodes)]
            (self.index.give_host if tier == "host" else self.index.give_device)(node, pool.take(node.page_count))

    @rule(tier=TIERS, count=st.integers(1, 8))
    def evict_full(self, tier: str, count: int) -> None:
        (self.index.evict_device if tier == "device" else self.index.evict_host)(count)
        gone = self.shrink()
        other = "host" if tier == "device" else "device"
        assert not any(gone[other, name] for name in self.names)

    @rule(pick=PICK)
    def split(self, pick: int) -> None:
        nodes = [node for node in self.index.nodes() if node.page_count > 1]
        if nodes:
            node = nodes[pick % len(nodes)]
            self.index.split(node, 1 + pick % (node.page_count - 1))

    # --- Components ---

    @rule(tier=TIERS, pick=PICK, first=PICK, count=st.integers(1, 5))
    def insert(self, tier: str, pick: int, first: int, count: int) -> None:
        nodes = self.nodes(tier)
        if nodes:
            self.enter(tier, self.names[pick % len(self.names)], nodes[pick % len(nodes)], first, count)

    def enter(self, tier: str, name: str, node: Node, first: int, count: int) -> None:
        model, prompt = self.models[tier, name], prefix_of(node)
        first %= node.depth_pages
        count = min(count, node.depth_pages - first, model.pool.free)
        ours = model.pool.take(count)
        pieces = [cut(prompt, position + 1) for position in range(first, first + count)]
        for piece, page in zip(pieces, ours, strict=True):
            model.write(page, piece)
        table, unused = self.component_pages.insert(tier, name, node, first, ours)  # type: ignore[arg-type]  # One of the two names.
        theirs = [piece in model.pages for piece in pieces]
        assert unused.tolist() == [page for page, known in zip(ours, theirs, strict=True) if known]
        for piece, page in zip(pieces, ours, strict=True):
            model.pages.setdefault(piece, page)
        assert table.tolist() == [model.pages[piece] for piece in pieces]
        model.pool.give_back(unused)

    @rule(tier=TIERS, pick=PICK)
    def insert_components(self, tier: str, pick: int) -> None:
        """As a finished request leaves them: whole, and of every component."""
        nodes = self.nodes(tier)
        if nodes:
            node = nodes[pick % len(nodes)]
            for name in self.names:
                first = max(0, node.depth_pages - self.trailing_pages[name])
                self.enter(tier, name, node, first, node.depth_pages - first)

    @rule(tier=TIERS, pick=PICK)
    def hold(self, tier: str, pick: int) -> None:
        nodes = self.nodes(tier)
        if nodes:
            node = nodes[pick % len(nodes)]
            take = self.component_pages.lock if tier == "device" else self.component_pages.pin
            receipt = take(node, self.component_pages.firsts(node.depth_pages))
            self.held.append(self.keep(receipt, prefix_of(node), node.depth_pages))

    @rule(tier=TIERS, pick=PICK, count=st.integers(1, 6))
    def evict(self, tier: str, pick: int, count: int) -> None:
        name = self.names[pick % len(self.names)]
        component_tier = (self.component_pages.device if tier == "device" else self.component_pages.host)[name]
        evictable = component_tier.evictable
        freed = self.component_pages.evict(tier, name, count)  # type: ignore[arg-type]  # One of the two names.
        gone = self.shrink()
        assert freed == len(gone.pop((tier, name))) >= min(count, evictable)
        assert not any(gone.values())

    @rule(tier=TIERS, pick=PICK)
    def drop(self, tier: str, pick: int) -> None:
        name = self.names[pick % len(self.names)]
        component_tier = (self.component_pages.device if tier == "device" else self.component_pages.host)[name]
        nodes = [node for node in self.nodes(tier) if not component_tier.is_guarded(node)]
        if nodes:
            node = nodes[pick % len(nodes)]
            pages = set(component_tier.pages_of(node).values())
            self.component_pages.drop(tier, name, node)  # type: ignore[arg-type]  # One of the two names.
            assert set(self.shrink()[tier, name].values()) == pages

    @rule(prompt=PROMPTS, use_host=st.booleans(), lock=st.booleans(), pin=st.booleans())
    def match(self, prompt: Prefix, use_host: bool, lock: bool, pin: bool) -> None:
        expected = self.longest(prompt, use_host=use_host)
        assert self.component_pages.probe_prefix(prompt[0], keys(*prompt[1]), use_host=use_host) == expected
        match = self.component_pages.match(prompt[0], keys(*prompt[1]), use_host=use_host)
        assert (match.device_pages, match.host_pages) == expected
        boundary = sum(expected)
        assert prefix_of(match.host_node) == cut(prompt, boundary)
        if lock:
            receipt = self.component_pages.lock(match.device_node, self.component_pages.firsts(boundary))
            self.held.append(self.keep(receipt, prompt, boundary))
        if pin:
            receipt = self.component_pages.pin(match.host_node, self.component_pages.firsts(boundary))
            self.held.append(self.keep(receipt, prompt, boundary))

    @precondition(lambda self: self.held)
    @rule(pick=PICK)
    def give_back(self, pick: int) -> None:
        part = self.held.pop(pick % len(self.held))
        (self.component_pages.unlock if part.kind == "device" else self.component_pages.unpin)(part.receipt)

    @rule(prompt=PROMPTS, first=st.integers(0, 8))
    def sources(self, prompt: Prefix, first: int) -> None:
        match = self.index.match(prompt[0], keys(*prompt[1]))
        found = match.device_pages + match.host_pages
        for name in self.names:
            here = [self.component_pages.sources(name, match.host_node, first)[at] for at in (0, 1)]
            known = [
                {
                    at: self.models[tier, name].pages[piece]
                    for at in range(first, found)
                    if (piece := cut(prompt, at + 1)) in self.models[tier, name].pages
                }
                for tier in ("device", "host")
            ]
            assert here == known
            assert self.component_pages.positions(prompt[0], keys(*prompt[1]), name, first) >= {*known[0], *known[1]}

    @rule(tier=TIERS, pick=PICK, count=st.integers(0, 6))
    def take(self, tier: str, pick: int, count: int) -> None:
        name = self.names[pick % len(self.names)]
        of_component = (self.component_pages.device if tier == "device" else self.component_pages.host)[name]
        free, room = of_component.pool.free, of_component.room
        pages = self.component_pages.take(tier, name, count)  # type: ignore[arg-type]  # One of the two names.
        gone = self.shrink()
        assert (pages is None) == (room < count)
        # Nothing goes where there is room, nor if there is too little.
        assert not any(lost for where, lost in gone.items() if where != (tier, name))
        assert not gone[tier, name] or free < count <= room
        if pages is not None:
            assert len(pages) == count
            self.taken.append((tier, name, pages))

    @precondition(lambda self: self.taken)
    @rule(pick=PICK)
    def give_pages_back(self, pick: int) -> None:
        tier, name, pages = self.taken.pop(pick % len(self.taken))
        self.component_pages.give_back({name: pages}, tier)  # type: ignore[arg-type]  # One of the two names.

    # --- What holds after every call ---

    @invariant()
    def books_add_up(self) -> None:
        self.index.check()
        self.component_pages.check()
        for (tier, name), model in self.models.items():
            assert self.found(tier, name) == model.pages
            # Every page is where its bytes belong, through all splits.
            assert all(model.memory[page] == piece for piece, page in model.pages.items())
            pool, own = model.pool, page_ids()
            for where, whose, pages in self.taken:
                own += pages if (where, whose) == (tier, name) else page_ids()
            assert pool.holds(own, PageState.OWNED) and pool.owned == len(own)
            assert pool.free + pool.owned + pool.cached + pool.draining == pool.total
            tiers = self.component_pages.device if tier == "device" else self.component_pages.host
            held = sum(
                len(tiers[name].pages_of(node)) for node in self.index.nodes() if self.is_guarded(tier, name, node)
            )
            assert (tiers[name].protected, tiers[name].evictable) == (held, pool.cached - held)
            assert tiers[name].receipts == sum(part.kind == tier for part in self.live)

    @invariant()
    def what_receipts_keep_is_there(self) -> None:
        for part in self.live:
            for name, kept in part.kept.items():
                pages = self.models[part.kind, name].pages
                assert all(pages.get(piece) == page for piece, page in kept.items())

    def teardown(self) -> None:
        if not hasattr(self, "component_pages"):
            return
        while self.held:
            self.give_back(0)
        while self.taken:
            self.give_pages_back(0)
        # With nothing held, an empty tree leaves every pool free.
        self.index.flush("device")
        self.index.flush("host")
        self.component_pages.check()
        for model in self.models.values():
            assert model.pool.free == model.pool.total


TestComponentsAgainstModel = ComponentsAgainstModel.TestCase
TestComponentsAgainstModel.settings = examples(80, stateful_step_count=40)
