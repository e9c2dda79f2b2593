"""What a router makes of the events equals what the index holds, after every step of any run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from hashlib import sha256
from random import Random

import numpy as np
import pytest

from simulation.components import draw_components
from simulation.rig import Rig
from simulation.simulate import draw_settings, with_components
from simulation.world import World
from tidekv.backends.keys.chain import page_digests
from tidekv.backends.keys.page_keys import PageKeys
from tidekv.engine.kv_events.messages import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, hash_of, name_of
from tidekv.engine.kv_events.watcher import KVEventTracker, KVEventWatcher, Seen, groups_of
from tidekv.states import commands, events
from tidekv.states.core import Core
from tidekv.states.prefix.node import Node
from tidekv.states.settings import CoreSettings

Held = dict[tuple[int, str], set[int]]
"""Hashes by group and medium; group 0 is the full KV."""


class ByteTracker(KVEventTracker):
    """For cores with bytes as tokens: a page's key is as wide as the page has tokens."""

    def _digests_of(self, node: Seen) -> list[bytes]:
        before = self._published[node.parent_id].last_digest if node.parent_id else node.namespace.encode()
        found = []
        for start in range(0, len(node.edge), self._key_bytes):
            before = sha256(before + node.edge[start : start + self._key_bytes]).digest()
            found.append(before)
        return found

    def _tokens_of(self, edge: bytes) -> list[int]:
        return list(edge)


class AtOnce:
    """An outlet that makes events in the call; `has_room` is set by the test."""

    def __init__(self, take: Callable[[Sequence[KVEvent]], None]) -> None:
        self._take = take
        self.has_room = True

    def publish(self, make: Callable[[], Sequence[KVEvent]]) -> None:
        assert self.has_room
        if events := make():
            self._take(events)


class Router:
    """Applies the events it receives, and rejects any that are inconsistent."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.held: Held = defaultdict(set)
        self.published: list[KVEvent] = []

    def take(self, batch: Sequence[KVEvent]) -> None:
        assert batch
        removed: Held = {}
        for event in batch:
            self.published.append(event)
            if isinstance(event, AllBlocksCleared):
                self.held.clear()
                continue
            place = (event.group_idx or 0, event.medium)
            if isinstance(event, BlockRemoved):
                assert event.block_hashes
                assert set(event.block_hashes) <= self.held[place], "what was never stored is removed"
                self.held[place] -= set(event.block_hashes)
                removed.setdefault(place, set()).update(event.block_hashes)
            else:
                assert not removed, "what is new comes first"
                assert (
                    len(event.token_ids)
                    == len(event.block_hashes) * self.page_size
                    == len(event.block_hashes) * (event.block_size)
                )
                assert not set(event.block_hashes) & self.held[place], "stored twice"
                self.held[place] |= set(event.block_hashes)

    @property
    def knows(self) -> Held:
        return {place: hashes for place, hashes in self.held.items() if hashes}


def truth(core: Core, *, components: bool = False) -> Held:
    """What the index holds, by walking all of it."""
    held: Held = defaultdict(set)
    tree = core.state.index.tree
    chains: dict[Node, bytes] = {}
    for node in tree.nodes():
        before = node.namespace.encode() if node.parent.is_root else chains[node.parent]
        hashes: dict[int, None] = {}
        for start in range(0, len(node.edge), tree.key_bytes):
            before = sha256(before + node.edge[start : start + tree.key_bytes]).digest()
            hashes[hash_of(before)] = None
        chains[node] = before
        if node.device is not None and node.load is None and not node.is_reclaiming:
            held[0, "GPU"] |= hashes.keys()
        if node.host is not None:
            held[0, "CPU"] |= hashes.keys()
        if tree.is_stored(node):
            held[0, "STORAGE"] |= hashes.keys()
        index = core.state.components
        for group, name in enumerate(index.components if components else (), start=1):
            by_position = dict(enumerate(hashes, node.depth_pages - node.page_count))
            for medium, tier in (("GPU", index.device[name]), ("CPU", index.host[name])):
                held[group, medium] |= {by_position[at] for at in tier.pages_of(node)}
    return {place: hashes for place, hashes in held.items() if hashes}


def watched_world(seed: int, requests: int, *, jams: bool = False, components: int = 0) -> tuple[Router, int]:
    """Run a world with all faults on; after each step the router knows what there is."""
    random = Random(f"settings {seed}")
    settings = draw_settings(random)
    if components:
        settings = with_components(settings, components)
    world = World(seed=seed, requests=requests, faults="all", settings=settings)
    router = Router(settings.page_size)
    outlet = AtOnce(router.take)
    groups = groups_of(settings)
    tracker = ByteTracker(page_size=settings.page_size, key_bytes=settings.key_bytes, groups=groups)
    watcher = KVEventWatcher(world.core, outlet, tracker=tracker, components=bool(components))
    step, steps = world.core.step, 0

    def stepped(event: events.Event) -> list[commands.Command]:
        nonlocal steps
        given = step(event)
        steps += 1
        outlet.has_room = not jams or steps % 50 > 20
        watcher.stepped(event, given)
        if not outlet.has_room:
            return given
        assert router.knows == truth(world.core, components=bool(components)), f"step {steps}: {event}"
        return given

    world.core.step = stepped
    world.run(random.randint(2, 16))
    outlet.has_room = True
    watcher.stepped(events.ClockAdvanced(at_s=0.0), [])
    assert router.knows == truth(world.core, components=bool(components))
    return router, steps


WITH_COMPONENTS = [seed for seed in range(1, 30) if draw_components(Random(f"components {seed}"), 1)]


@pytest.mark.parametrize("seed", WITH_COMPONENTS[:6])
def test_a_router_knows_the_windows_and_records_there_are_whatever_happens(seed: int) -> None:
    router, _ = watched_world(seed, 60, components=seed, jams=seed % 2 > 0)
    stored = [event for event in router.published if isinstance(event, BlockStored)]
    assert {event.kv_cache_spec_kind for event in stored if not event.group_idx} == {"full_attention"}
    of_components = {event.kv_cache_spec_kind for event in stored if event.group_idx}
    assert of_components and of_components <= {"sliding_window", "mamba"}
    assert any(isinstance(event, BlockRemoved) and event.group_idx for event in router.published)


@pytest.mark.parametrize("seed", range(40, 52))
def test_a_router_knows_what_there_is_whatever_happens(seed: int) -> None:
    router, steps = watched_world(seed, 60)
    kinds = {type(event) for event in router.published}
    assert steps > 100
    assert BlockStored in kinds


@pytest.mark.parametrize("seed", [40, 41])
def test_a_router_is_told_anew_after_changes_were_lost(seed: int) -> None:
    router, _ = watched_world(seed, 60, jams=True)
    assert sum(isinstance(event, AllBlocksCleared) for event in router.published) > 2


def test_the_same_run_gives_the_same_events() -> None:
    assert watched_world(7, 50)[0].published == watched_world(7, 50)[0].published


def test_tokens_are_named_by_the_keys_that_storage_has() -> None:
    """The hash of a page is the beginning of its storage key; SGLang's is the same."""
    packed = bytes(range(64))
    (digest, *_) = page_digests(packed, 16)
    assert hash_of(digest) == int.from_bytes(digest[:8], "big", signed=True)
    assert -(2**63) <= hash_of(digest) < 2**63
    assert hash_of(b"\xff" * 32) == -1
    unsigned = int(digest.hex()[:16], 16)
    assert hash_of(digest) == (unsigned - 2**64 if unsigned >= 2**63 else unsigned)


def test_nothing_is_noted_where_nobody_watches() -> None:
    index = Rig().core.state.index
    assert index.tree.dirty_nodes is None
    assert index.device_tier.dirty_nodes is None
    assert index.host_tier.dirty_nodes is None


class Desk:
    """An index with packed tokens as keys, as in a live run, and a watcher that is stepped explicitly."""

    def __init__(self) -> None:
        self.core = Core(CoreSettings(page_size=2, key_bytes=8, device_pages=16, host_pages=16))
        self.index = self.core.state.index
        self.batches: list[Sequence[KVEvent]] = []
        self.watcher = KVEventWatcher(self.core, AtOnce(self.batches.append))
        assert self.batches == [[AllBlocksCleared()]]
        self.batches.clear()

    def put(self, *tokens: int, namespace: str = "") -> Node:
        keys = b"".join(token.to_bytes(4, "little") for token in tokens)
        pages = self.core.state.device.take(len(tokens) // 2)
        inserted = self.index.insert(namespace, keys, pages)
        self.core.state.device.give_back(inserted.duplicates)
        return inserted.node

    def published(self) -> list[KVEvent]:
        """The events published for the last step."""
        self.batches.clear()
        self.watcher.stepped(events.ClockAdvanced(at_s=0.0), [])
        return [event for batch in self.batches for event in batch]


def hashes(*tokens: int, namespace: str = "") -> list[int]:
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    return [hash_of(digest) for digest in page_digests(packed, 2, namespace=namespace)]


def test_pages_named_by_pairs_are_told_with_their_own_tokens() -> None:
    core, batches = Core(CoreSettings(page_size=2, key_bytes=12, device_pages=16)), []
    watcher = KVEventWatcher(core, AtOnce(batches.append), bigrams=True)
    keys, wanted = PageKeys(2, bigrams=True), []
    for tokens in ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 9, 9, 9]):
        packed = b"".join(token.to_bytes(4, "little") for token in tokens)
        inserted = core.state.index.insert("", keys.of(packed), core.state.device.take(3))
        core.state.device.give_back(inserted.duplicates)
        batches.clear()
        watcher.stepped(events.ClockAdvanced(at_s=0.0), [])
        wanted = [hash_of(digest) for digest in page_digests(packed, 2, bigrams=True)]
        above = 1 if tokens[4] == 9 else 0  # The second page of the other prompt goes on with 5, and is another one.
        (published,) = batches
        assert published == [
            BlockStored(wanted[above:], wanted[0] if above else None, tokens[2 * above : 6], 2, None, "GPU", None)
        ]


def test_a_branch_is_told_with_its_parent_and_what_is_known_is_not_told_again() -> None:
    desk = Desk()
    desk.put(1, 2, 3, 4, 5, 6)
    (first,) = desk.published()
    assert first == BlockStored(hashes(1, 2, 3, 4, 5, 6), None, [1, 2, 3, 4, 5, 6], 2, None, "GPU", None)
    desk.put(1, 2, 3, 4, 7, 8, 9, 10)  # Cuts the first node in two.
    (second,) = desk.published()
    wanted = hashes(1, 2, 3, 4, 7, 8, 9, 10)
    assert second == BlockStored(wanted[2:], wanted[1], [7, 8, 9, 10], 2, None, "GPU", None)
    assert desk.published() == []


def test_a_namespace_changes_hashes_and_is_told() -> None:
    desk = Desk()
    desk.put(1, 2, 3, 4, namespace="tenant")
    (stored,) = desk.published()
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == hashes(1, 2, 3, 4, namespace="tenant") != hashes(1, 2, 3, 4)
    assert stored.extra_keys == [(name_of("tenant"),)] * 2
    assert "tenant" not in repr(stored)
    assert name_of("tenant") != name_of("other")


def test_without_tokens_only_hashes_are_published() -> None:
    seen = Seen(1, 0, 2, "", np.array([1, 2, 3, 4], dtype="<u4").tobytes(), ("GPU",))
    tracker = KVEventTracker(page_size=2, key_bytes=8, tokens=False)
    assert tracker.changes([seen]) == [BlockStored(hashes(1, 2, 3, 4), None, [], 2, None, "GPU", None)]


def test_a_page_that_moves_down_is_told_there_before_it_is_gone_here() -> None:
    desk = Desk()
    node = desk.put(1, 2, 3, 4)
    desk.published()
    desk.index.give_host(node, desk.core.state.host.take(2))
    desk.index.mark_stored(node)
    desk.index.evict_device(2)
    found = desk.published()
    assert [(type(event).__name__, event.medium) for event in found] == [
        ("BlockStored", "CPU"),
        ("BlockStored", "STORAGE"),
        ("BlockRemoved", "GPU"),
    ]
    desk.index.forget_stored()
    assert desk.published() == [BlockRemoved(hashes(1, 2, 3, 4), "STORAGE")]
    assert desk.published() == []


def test_pages_that_drain_are_not_there_and_pages_under_a_load_not_yet() -> None:
    desk = Desk()
    node = desk.put(1, 2, 3, 4)
    desk.published()
    desk.index.set_reclaiming(node)
    assert desk.published() == [BlockRemoved(hashes(1, 2, 3, 4), "GPU")]
    other = Desk()
    node = other.put(1, 2)
    other.index.set_load(node, Rig())
    assert other.published() == []
    other.index.set_load(node, None)
    (stored,) = other.published()
    assert isinstance(stored, BlockStored)


def test_one_node_alone_is_looked_at_where_one_was_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Telling costs as much as has changed, however much is cached."""
    desk = Desk()
    for token in range(1, 9):
        desk.put(token, token)
    desk.published()
    looked: list[Node] = []
    seen = desk.watcher._seen
    monkeypatch.setattr(desk.watcher, "_seen", lambda node: looked.append(node) or seen(node))
    desk.put(50, 50)
    assert len(desk.published()) == 1
    assert len(looked) == 1
