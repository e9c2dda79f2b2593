"""The prefix index against a model too simple to be wrong: a dict from each prefix to its pages, and live receipts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.prefixes import Prefix, keys, prefix_of
from tests.support.thorough import examples
from tidekv.states.pages.page_pool import PagePool, PageState
from tidekv.states.prefix.index import Node, PrefixIndex, Receipt
from tidekv.states.prefix.policies import FIFO, LFU, LRU, PRIORITY, SLRU
from tidekv.states.types import PageIds, page_ids

DEVICE_PAGES, HOST_PAGES = 32, 24

PROMPTS = st.tuples(st.sampled_from(["", "adapter"]), st.lists(st.integers(0, 2), max_size=8).map(tuple))
PICK = st.integers(0, 1 << 16)


def prefixes(prompt: Prefix) -> list[Prefix]:
    return [(prompt[0], prompt[1][:end]) for end in range(1, len(prompt[1]) + 1)]


def covers(prompt: Prefix, prefix: Prefix) -> bool:
    return prompt[0] == prefix[0] and prompt[1][: len(prefix[1])] == prefix[1]


@dataclass
class Page:
    """What the model knows of one prefix."""

    device: int | None = None
    host: int | None = None
    load: FakeLoad | None = None
    is_reclaiming: bool = False


@dataclass(eq=False)
class FakeLoad:
    nodes: list[Node] = field(default_factory=list)

    def split(self, upper: Node, lower: Node) -> None:
        assert upper.load is lower.load is self and lower.parent is upper
        self.nodes.insert(self.nodes.index(lower), upper)


class IndexAgainstModel(RuleBasedStateMachine):
    """Any mix of calls leaves the index equal to the model; evictions take what a full scan would."""

    @initialize(policy=st.sampled_from([LRU, LRU, LFU, SLRU, FIFO, PRIORITY]))
    def start(self, policy: object) -> None:
        self.policy = policy
        self.device = PagePool("device", DEVICE_PAGES)
        self.host = PagePool("host", HOST_PAGES)
        self.index = PrefixIndex(key_bytes=4, device=self.device, host=self.host, policy=policy)  # type: ignore[arg-type]  # One of the policies.
        self.dropped: list[tuple[str, list[int]]] = []
        self.index.on_evict.append(lambda node, tier: self.dropped.append((tier, list(getattr(node, tier)))))
        self.pages: dict[Prefix, Page] = {}
        self.locks: list[tuple[Receipt, Prefix, PageIds]] = []
        self.pins: list[tuple[Receipt, Prefix]] = []
        self.loads: list[FakeLoad] = []
        self.voids: list[list[Node]] = []

    # --- The model's own view ---

    def lengths(self, prompt: Prefix) -> tuple[int, int]:
        device = total = 0
        for prefix in prefixes(prompt):
            page = self.pages.get(prefix)
            if page is None or page.is_reclaiming:
                break
            total += 1
            if page.device is not None:
                device += 1
        return device, total - device

    def find(self, prompt: Prefix) -> Node | None:
        return next((node for node in self.index.nodes() if prefix_of(node) == prompt), None)

    def node_pages(self, node: Node) -> list[Page]:
        prefix = prefix_of(node)
        return [self.pages[above] for above in prefixes(prefix)[-node.page_count :]]

    def held(self, node: Node) -> bool:
        """Whether a receipt, load or page in RECLAIMING keeps the node's device pages."""
        prefix = prefix_of(node)
        if any(covers(locked, prefix) for _, locked, _ in self.locks):
            return True
        return any(covers(below, prefix) and (page.load or page.is_reclaiming) for below, page in self.pages.items())

    def host_held(self, node: Node) -> bool:
        prefix = prefix_of(node)
        if any(covers(pinned, prefix) for _, pinned in self.pins):
            return True
        return any(covers(below, prefix) and page.load and page.host is not None for below, page in self.pages.items())

    def forget(self, tier: str, ids: list[int]) -> None:
        for prefix, page in list(self.pages.items()):
            if getattr(page, tier) in ids:
                setattr(page, tier, None)
                if page.device is None and page.host is None:
                    del self.pages[prefix]

    def scan_victims(self, tier: str, count: int) -> list[int]:
        """The pages that go if every leaf of the tier is looked at for every victim."""
        held = self.held if tier == "device" else self.host_held
        here = [node for node in self.index.nodes() if getattr(node, tier) is not None]
        children = {node: sum(getattr(child, tier) is not None for child in node.children.values()) for node in here}
        leaves = [node for node in here if not children[node] and not held(node)]
        victims: list[int] = []
        while len(victims) < count and leaves:
            victim = min(leaves, key=lambda node: (self.index.device_tier.queue._policy.priority(node), node.node_id))
            leaves.remove(victim)
            ids = list(getattr(victim, tier))
            surplus = len(victims) + len(ids) - count
            victims += ids if surplus <= 0 or victim.is_reclaiming else ids[surplus:]
            parent = victim.parent
            assert parent is not None
            if parent.parent is not None:
                children[parent] -= 1
                if not children[parent] and not held(parent):
                    leaves.append(parent)
        return victims

    # --- Rules ---

    @rule(prompt=PROMPTS, pick=PICK, priority=st.integers(0, 2))
    def insert(self, prompt: Prefix, pick: int, priority: int) -> None:
        ours, fresh, inserted, duplicates, rejected = page_ids(), page_ids(), 0, [], []
        above, stopped = prefixes(prompt), False
        table = []
        for number, prefix in enumerate(above):
            page = self.pages.get(prefix)
            theirs = None if page is None else page.device
            # Some of the pages that are given are those of the tree, as a request's locked prefix is.
            if theirs is not None and pick >> number & 1:
                mine = theirs
            elif self.device.free:
                mine = self.device.take(1)[0]
                fresh.append(mine)
            else:
                prompt = (prompt[0], prompt[1][:number])
                break
            ours.append(mine)
            stopped = stopped or (
                page is not None and (page.is_reclaiming or (page.load is not None and mine != theirs))
            )
            if stopped:
                rejected += [mine] if mine != theirs else []
                table.append(mine)
            elif theirs is None:
                self.pages.setdefault(prefix, Page()).device = mine
                inserted += 1
                table.append(mine)
            else:
                duplicates += [mine] if mine != theirs else []
                table.append(theirs)
        result = self.index.insert(prompt[0], keys(*prompt[1]), ours, priority=priority)
        assert result.inserted_count == inserted
        assert result.duplicates.tolist() == duplicates
        assert result.rejected.tolist() == rejected
        assert result.pages.tolist() == table
        assert len(self.index.device_path(result.node)) == result.node.depth_pages
        if not stopped:
            assert prefix_of(result.node) == prompt
        self.device.give_back(result.duplicates + result.rejected)

    @rule(prompt=PROMPTS, lock=st.booleans(), pin=st.booleans())
    def match(self, prompt: Prefix, lock: bool, pin: bool) -> None:
        expected = self.lengths(prompt)
        assert self.index.probe_prefix(prompt[0], keys(*prompt[1])) == expected
        match = self.index.match(prompt[0], keys(*prompt[1]))
        assert (match.device_pages, match.host_pages) == expected
        assert prefix_of(match.device_node) == (prompt[0], prompt[1][: expected[0]])
        assert prefix_of(match.host_node) == (prompt[0], prompt[1][: sum(expected)])
        pages = self.index.device_path(match.device_node)
        assert pages.tolist() == [self.pages[prefix].device for prefix in prefixes(prompt)[: expected[0]]]
        if lock:
            receipt = self.index.lock(match.device_node)
            self.locks.append((receipt, prefix_of(match.device_node), pages))
        if pin:
            pinned = self.index.pin(match.host_node)
            self.pins.append((pinned, prefix_of(pinned.node)))

    @precondition(lambda self: self.locks)
    @rule(pick=PICK)
    def unlock(self, pick: int) -> None:
        receipt, prompt, pages = self.locks.pop(pick % len(self.locks))
        # The page ids of a locked prefix are those that were there when it was locked.
        assert [self.pages[prefix].device for prefix in prefixes(prompt)] == pages.tolist()
        assert self.index.device_path(receipt.node) == pages
        self.index.unlock(receipt)

    @precondition(lambda self: self.pins)
    @rule(pick=PICK)
    def unpin(self, pick: int) -> None:
        receipt, prompt = self.pins.pop(pick % len(self.pins))
        assert all(self.pages[prefix].host is not None for prefix in prefixes(prompt))
        self.index.unpin(receipt)

    @rule(count=st.integers(0, 12), tier=st.sampled_from(["device", "host"]))
    def evict(self, count: int, tier: str) -> None:
        expected = self.scan_victims(tier, count)
        evictable = getattr(self.index, f"{tier}_evictable")
        self.dropped.clear()
        freed = (self.index.evict_device if tier == "device" else self.index.evict_host)(count)
        assert freed == len(expected) >= min(count, evictable)
        assert self.dropped == [(tier, ids) for _, ids in self.dropped]
        assert sorted(page for _, ids in self.dropped for page in ids) == sorted(expected)
        self.forget(tier, expected)

    @rule(tier=st.sampled_from(["device", "host"]))
    def flush(self, tier: str) -> None:
        expected = self.scan_victims(tier, 1000)
        cached = (self.device if tier == "device" else self.host).cached
        dropped, spared = self.index.flush(tier)  # type: ignore[arg-type]  # One of the two names.
        # Void pages are not cached: they neither go nor are they spared.
        assert (dropped, spared) == (len(expected), cached - len(expected))
        self.forget(tier, expected)

    @rule(pick=PICK)
    def give_host(self, pick: int) -> None:
        nodes = [
            node
            for node in self.index.nodes()
            if node.host is None and node.parent.host is not None and node.page_count <= self.host.free
        ]
        if nodes:
            node = nodes[pick % len(nodes)]
            ids = self.host.take(node.page_count)
            for page, given in zip(self.node_pages(node), ids, strict=True):
                page.host = given
            self.index.give_host(node, ids)

    @rule(pick=PICK, loading=st.booleans())
    def give_device(self, pick: int, loading: bool) -> None:
        nodes = [
            node
            for node in self.index.nodes()
            if node.device is None
            and node.parent.device is not None
            and not node.parent.is_reclaiming
            and node.page_count <= self.device.free
        ]
        if nodes:
            node = nodes[pick % len(nodes)]
            ids = self.device.take(node.page_count)
            load = self.new_load(node) if loading else None
            for page, given in zip(self.node_pages(node), ids, strict=True):
                page.device, page.load = given, load
            self.index.give_device(node, ids, load)

    def new_load(self, node: Node) -> FakeLoad:
        load = FakeLoad([node])
        self.loads.append(load)
        return load

    @rule(prompt=PROMPTS)
    def insert_pending(self, prompt: Prefix) -> None:
        match = self.index.match(prompt[0], keys(*prompt[1]))
        start = match.device_pages
        suffix = prompt[1][start:][: self.device.free]
        if not suffix or keys(*suffix[:1]) in match.device_node.children:
            return
        ids, load = self.device.take(len(suffix)), FakeLoad()
        node = self.index.insert_pending(match.device_node, prompt[0], keys(*suffix), ids, load)
        load.nodes.append(node)
        self.loads.append(load)
        for prefix, given in zip(prefixes(prompt)[start:], ids, strict=False):
            self.pages[prefix] = Page(device=given, load=load)

    @precondition(lambda self: self.loads)
    @rule(pick=PICK, fails=st.booleans())
    def end_load(self, pick: int, fails: bool) -> None:
        load = self.loads.pop(pick % len(self.loads))
        for node in load.nodes:
            for page in self.node_pages(node):
                page.load, page.is_reclaiming = None, fails
            if fails:
                self.index.set_reclaiming(node)
            else:
                self.index.set_load(node, None)
        if fails:
            self.voids.append(load.nodes)

    @precondition(lambda self: self.voids)
    @rule(pick=PICK)
    def settle(self, pick: int) -> None:
        nodes = self.voids[pick % len(self.voids)]
        node = nodes[-1]
        mine = prefix_of(node)
        below = [other for other in node.subtree() if other is not node and other.device is not None]
        in_use = any(covers(locked, mine) for _, locked, _ in self.locks) or any(self.held(other) for other in below)
        pages = self.index.drop_reclaiming(node)
        assert (pages is None) == in_use
        if pages is not None:
            assert self.device.holds(pages, PageState.DRAINING)
            self.device.settle(pages)
            for page in (self.pages[prefix] for prefix in prefixes(mine)):
                page.is_reclaiming = page.is_reclaiming and page.device not in pages
            gone = [page.device for prefix, page in self.pages.items() if covers(prefix, mine) and prefix != mine]
            self.forget("device", [page for page in gone if page is not None] + pages.tolist())
            nodes.pop()
            self.voids = [rest for rest in self.voids if rest]

    @rule(pick=PICK, tier=st.sampled_from(["device", "host"]))
    def drop(self, pick: int, tier: str) -> None:
        held = self.held if tier == "device" else self.host_held
        nodes = [
            node
            for node in self.index.nodes()
            if getattr(node, tier) is not None
            and not held(node)
            and all(getattr(child, tier) is None for child in node.children.values())
        ]
        if nodes:
            node = nodes[pick % len(nodes)]
            ids = list(getattr(node, tier))
            (self.index.drop_device if tier == "device" else self.index.drop_host)(node)
            self.forget(tier, ids)

    @rule(pick=PICK)
    def split(self, pick: int) -> None:
        nodes = [node for node in self.index.nodes() if node.page_count > 1 and not node.is_reclaiming]
        if nodes:
            node = nodes[pick % len(nodes)]
            cut = 1 + pick % (node.page_count - 1)
            depth = node.depth_pages
            upper = self.index.split(node, cut)
            assert node.parent is upper and upper.page_count == cut and node.depth_pages == depth

    # --- What holds after every call ---

    @invariant()
    def index_agrees_with_model(self) -> None:
        self.index.check()
        self.device.check()
        self.host.check()
        found: dict[Prefix, Page] = {}
        for node in self.index.nodes():
            for number, prefix in enumerate(prefixes(prefix_of(node))[-node.page_count :]):
                device = None if node.device is None else node.device[number]
                host = None if node.host is None else node.host[number]
                found[prefix] = Page(device=device, host=host, load=node.load, is_reclaiming=node.is_reclaiming)
        assert found == self.pages
        assert self.device.owned == self.host.owned == 0

    @invariant()
    def locks_are_the_live_receipts(self) -> None:
        for node in self.all_nodes():
            prefix = prefix_of(node)
            assert node.lock_ref == sum(covers(locked, prefix) for _, locked, _ in self.locks)
            assert node.host_lock_ref == sum(covers(pinned, prefix) for _, pinned in self.pins)
            assert (node.guarded > 0) == self.held(node)
            assert (node.host_guarded > 0) == self.host_held(node)

    def all_nodes(self) -> Iterator[Node]:
        yield from self.index.tree.roots.values()
        yield from self.index.nodes()

    def teardown(self) -> None:
        if not hasattr(self, "index"):
            return
        for load in self.loads:
            for node in load.nodes:
                self.index.set_reclaiming(node)
        self.voids += [load.nodes for load in self.loads]
        for receipt, _, _ in self.locks:
            self.index.unlock(receipt)
        for receipt, _ in self.pins:
            self.index.unpin(receipt)
        remaining = [node for nodes in self.voids for node in nodes]
        for node in sorted(remaining, key=lambda node: -node.depth_pages):
            pages = self.index.drop_reclaiming(node)
            assert pages is not None
            self.device.settle(pages)
        self.index.flush("device")
        self.index.flush("host")
        assert not list(self.index.nodes())
        assert self.device.free == DEVICE_PAGES and self.host.free == HOST_PAGES


TestIndexAgainstModel = IndexAgainstModel.TestCase
TestIndexAgainstModel.settings = examples(80, stateful_step_count=40)
