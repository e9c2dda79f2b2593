"""What a router makes of the events equals what the index holds, after every step of any run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from random import Random
from typing import Any

import numpy as np
import pytest

from simulation.components import draw_components
from simulation.rig import Rig
from simulation.simulate import draw_settings, with_components
from simulation.world import World
from tests.support.thorough import thorough_beyond
from tidekv.backends.keys.chain import page_digests
from tidekv.backends.keys.namespaces import join_namespaces
from tidekv.backends.keys.page_keys import PageKeys
from tidekv.engine.kv_events.content import KVContent, Seen
from tidekv.engine.kv_events.messages import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, Medium, hash_of
from tidekv.engine.kv_events.names import Wording, digest_of
from tidekv.engine.kv_events.watcher import KVEventWatcher, groups_of
from tidekv.states import commands, events
from tidekv.states.core import Core
from tidekv.states.prefix.node import Node
from tidekv.states.settings import CoreSettings

Held = dict[tuple[int, str], set[int]]
"""Hashes by group and medium; group 0 is the full KV."""
MEDIA = ("GPU", "CPU", "STORAGE")


class ByteContent(KVContent):
    """For cores with bytes as tokens: a page's key is as wide as the page has tokens."""

    def _seed(self, namespace: str) -> bytes:
        return namespace.encode()

    def _digests(self, keys: bytes, above: bytes) -> list[bytes]:
        found = []
        for start in range(0, len(keys), self._key_bytes):
            above = sha256(above + keys[start : start + self._key_bytes]).digest()
            found.append(above)
        return found

    def _tokens_of(self, edge: bytes) -> list[int]:
        return list(edge)


class AtOnce:
    """An outlet that makes events in the call; `has_room` is set by the test."""

    def __init__(self, take: Callable[[Sequence[KVEvent]], None]) -> None:
        self._take = take
        self.has_room = True

    def publish(self, make: Callable[[], Sequence[KVEvent]], whole: Callable[[], Iterable[KVEvent]]) -> None:
        assert self.has_room
        self.whole = whole
        if events := make():
            self._take(events)


class Router:
    """Applies the events it receives, and rejects any that are inconsistent."""

    def __init__(self, page_size: int, *, components: int = 0) -> None:
        self.page_size = page_size
        self.components = components
        self.held: Held = defaultdict(set)
        self.published: list[KVEvent] = []

    def take(self, batch: Iterable[KVEvent]) -> None:
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
                if event.parent_block_hash is not None and not 0 < place[0] <= self.components:
                    above = [medium for medium in MEDIA if event.parent_block_hash in self.held[place[0], medium]]
                    assert above, "a page comes after the one before it"
                    assert place[1] != "GPU" or "GPU" in above, "on the device after the one before it there"
                self.held[place] |= set(event.block_hashes)

    @property
    def knows(self) -> Held:
        return {place: hashes for place, hashes in self.held.items() if hashes}


class Model:
    """What is published of a core, by walking all of it after every step: too simple to be wrong."""

    def __init__(self, core: Core, *, components: bool = False) -> None:
        self.core = core
        self.components = components
        self.salted = len(core.settings.components) + 1 if components else 1
        self.stored: set[int] = set()
        """Pages that storage has been seen to have, in the tree or not."""
        self.parents: dict[int, int | None] = {}
        self.groups: dict[int, int] = {}
        self.attachment = core.state.index.tree.attachment
        self.was_marked: set[int] = set()

    def step(self) -> Held:
        tree = self.core.state.index.tree
        held: Held = defaultdict(set)
        if self.attachment != tree.attachment:
            self.attachment = tree.attachment
            self.stored.clear()
        marked, unmarked, chains = set[int](), set[int](), dict[Node, list[bytes]]()
        for node in tree.nodes():
            before = node.namespace.encode() if node.parent.is_root else chains[node.parent][-1]
            above = None if node.parent.is_root else hash_of(before)
            digests = chains[node] = []
            for start in range(0, len(node.edge), tree.key_bytes):
                before = sha256(before + node.edge[start : start + tree.key_bytes]).digest()
                digests.append(before)
                self.parents[hash_of(before)], above = above, hash_of(before)
                self.groups[hash_of(before)] = self.salted if node.namespace else 0
            hashes = [hash_of(digest) for digest in digests]
            if node.device is not None and node.load is None and not node.is_reclaiming:
                held[0, "GPU"] |= set(hashes)
            if node.host is not None:
                held[0, "CPU"] |= set(hashes)
            (marked if tree.is_stored(node) else unmarked).update(hashes)
            index = self.core.state.components
            for group, name in enumerate(index.components if self.components else (), start=1):
                by_position = dict(enumerate(hashes, node.depth_pages - node.page_count))
                for medium, tier in (("GPU", index.device[name]), ("CPU", index.host[name])):
                    held[group, medium] |= {by_position[at] for at in tier.pages_of(node)}
        self.stored |= marked
        self.stored -= unmarked & self.was_marked
        self.was_marked = marked
        held[0, "STORAGE"] = set(self.stored)
        return self._reachable(held)

    def _reachable(self, held: Held) -> Held:
        """Leave out what cannot be used, and salted pages to their own group."""
        shown: Held = defaultdict(set, {place: hashes for place, hashes in held.items() if place[0]})
        seen: dict[int, list[str]] = {}

        def media_of(page: int) -> list[str]:
            path = []
            at: int | None = page
            while at is not None and at not in seen:
                path.append(at)
                at = self.parents[at]
            for one in reversed(path):
                found = [medium for medium in MEDIA if one in held[0, medium]]
                parent = self.parents[one]
                above = MEDIA if parent is None else seen[parent]
                seen[one] = [medium for medium in found if above and (medium != "GPU" or "GPU" in above)]
            return seen[page]

        for page in set().union(*(held[0, medium] for medium in MEDIA)):
            for medium in media_of(page):
                shown[self.groups[page], medium].add(page)
        return {place: hashes for place, hashes in shown.items() if hashes}


def without(media: set[str], held: Held) -> Held:
    return {place: hashes for place, hashes in held.items() if place[1] not in media}


def watched_world(seed: int, requests: int, *, jams: bool = False, components: int = 0) -> tuple[Router, int]:
    """Run a world with all faults on; after each step the router knows what there is."""
    random = Random(f"settings {seed}")
    settings = draw_settings(random)
    if components:
        settings = with_components(settings, components)
    world = World(seed=seed, requests=requests, faults="all", settings=settings)
    count = len(settings.components) if components else 0
    router = Router(settings.page_size, components=count)
    outlet = AtOnce(router.take)
    groups = groups_of(settings) if components else ()
    content = ByteContent(page_size=settings.page_size, key_bytes=settings.key_bytes, groups=groups)
    watcher = KVEventWatcher(world.core, outlet, content, components=bool(components))
    model = Model(world.core, components=bool(components))
    # Pages that were stored and then forgotten while the queue was full are not known to have been.
    unseen = {"STORAGE"} if jams else set()
    step, steps = world.core.step, 0

    def stepped(event: events.Event) -> list[commands.Command]:
        nonlocal steps
        given = step(event)
        steps += 1
        outlet.has_room = not jams or steps % 50 > 20
        watcher.stepped(event, given)
        wanted = model.step()
        if outlet.has_room:
            assert without(unseen, router.knows) == without(unseen, wanted), f"step {steps}: {event}"
        if outlet.has_room and steps % 20 == 0:
            late = Router(settings.page_size, components=count)
            late.take(outlet.whole())
            assert late.knows == router.knows, "a newcomer knows the same"
        return given

    world.core.step = stepped
    world.run(random.randint(2, 16))
    outlet.has_room = True
    watcher.stepped(events.ClockAdvanced(at_s=0.0), [])
    return router, steps


WITH_COMPONENTS = [seed for seed in range(1, 30) if draw_components(Random(f"components {seed}"), 1)]


@pytest.mark.parametrize("seed", thorough_beyond(WITH_COMPONENTS[:2], WITH_COMPONENTS[:6]))
def test_a_router_knows_the_windows_and_records_there_are_whatever_happens(seed: int) -> None:
    router, _ = watched_world(seed, 60, components=seed, jams=seed % 2 > 0)
    stored = [event for event in router.published if isinstance(event, BlockStored)]
    assert {event.kv_cache_spec_kind for event in stored if not event.group_idx} == {"full_attention"}
    of_components = {event.kv_cache_spec_kind for event in stored if event.group_idx} - {"full_attention"}  # Salted.
    assert of_components and of_components <= {"sliding_window", "mamba"}
    assert any(isinstance(event, BlockRemoved) and event.group_idx for event in router.published)


@pytest.mark.parametrize("seed", thorough_beyond((40, 43, 45, 50), range(40, 52)))
def test_a_router_knows_what_there_is_whatever_happens(seed: int) -> None:
    router, steps = watched_world(seed, 60)
    kinds = {type(event) for event in router.published}
    assert steps > 100
    assert BlockStored in kinds


@pytest.mark.parametrize("seed", [40, 41])
def test_a_router_is_right_again_after_changes_were_lost_and_is_not_cleared_for_it(seed: int) -> None:
    router, _ = watched_world(seed, 60, jams=True)
    assert sum(isinstance(event, AllBlocksCleared) for event in router.published) == 1


def test_the_same_run_gives_the_same_events() -> None:
    assert watched_world(7, 50)[0].published == watched_world(7, 50)[0].published


def test_tokens_are_named_by_the_keys_that_storage_has() -> None:
    """The hash of a page is the beginning of its storage key."""
    packed = bytes(range(64))
    (digest, *_) = page_digests(packed, 16)
    assert hash_of(digest) == int(digest.hex()[:16], 16)
    assert hash_of(b"\xff" * 32) == 2**64 - 1, "vllm-router drops a batch with a negative one"


def test_nothing_is_noted_where_nobody_watches() -> None:
    index = Rig().core.state.index
    assert index.tree.dirty_nodes is None
    assert index.device_tier.dirty_nodes is None
    assert index.host_tier.dirty_nodes is None


class Desk:
    """An index with packed tokens as keys, as in a live run, and a watcher that is stepped explicitly."""

    def __init__(self, **options: Any) -> None:
        self.core = Core(CoreSettings(page_size=2, key_bytes=8, device_pages=16, host_pages=16))
        self.index = self.core.state.index
        self.batches: list[Sequence[KVEvent]] = []
        self.outlet = AtOnce(self.batches.append)
        self.watcher = KVEventWatcher(self.core, self.outlet, KVContent(page_size=2, key_bytes=8, **options))
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
        return self.sent()

    def sent(self) -> list[KVEvent]:
        """The events published since the last step."""
        return [event for batch in self.batches for event in batch]

    def to_storage(self, node: Node) -> None:
        """Let the index forget pages that storage has."""
        self.index.mark_stored(node)
        self.published()
        self.index.evict_device(node.page_count)


def hashes(*tokens: int, namespace: str = "") -> list[int]:
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    return [hash_of(digest) for digest in page_digests(packed, 2, namespace=namespace)]


def test_pages_named_by_pairs_are_told_with_their_own_tokens() -> None:
    core, batches = Core(CoreSettings(page_size=2, key_bytes=12, device_pages=16)), []
    content = KVContent(page_size=2, key_bytes=12, bigrams=True, wording=Wording(("llm-d",), bigrams=True))
    watcher = KVEventWatcher(core, AtOnce(batches.append), content)
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


def test_a_salt_is_in_the_first_page_of_a_prompt_only_and_its_pages_are_a_group() -> None:
    desk = Desk()
    desk.put(1, 2, 3, 4, namespace="tenant")
    (stored,) = desk.published()
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == hashes(1, 2, 3, 4, namespace="tenant") != hashes(1, 2, 3, 4)
    assert stored.extra_keys == [("dynamo-cache-salt:tenant",), None]
    assert (stored.group_idx, stored.kv_cache_spec_kind, stored.cache_salt) == (1, "full_attention", None)
    desk.put(1, 2, 3, 4, 5, 6, namespace="tenant")
    (stored,) = desk.published()
    assert isinstance(stored, BlockStored)
    assert (stored.extra_keys, stored.group_idx) == (None, 1)
    desk.index.evict_device(3)
    removed = hashes(1, 2, 3, 4, 5, 6, namespace="tenant")
    assert desk.published() == [BlockRemoved(removed, "GPU", 1)]


@pytest.mark.parametrize(
    ("routers", "key", "field"),
    [
        (("dynamo",), "dynamo-cache-salt:tenant", None),
        (("dynamo-indexer", "vllm-router"), "dynamo-cache-salt:tenant", None),
        (("llm-d",), "tenant", None),
        (("llm-d", "vllm-router"), "tenant", None),
        (("dynamo", "llm-d"), "tenant", "tenant"),
        (("vllm-router",), digest_of("tenant"), None),
        ((), digest_of("tenant"), None),
    ],
)
def test_a_salt_has_the_form_that_the_listening_routers_read(routers: Any, key: str, field: str | None) -> None:
    desk = Desk(wording=Wording(routers))
    desk.put(1, 2, namespace="tenant")
    (stored,) = desk.published()
    assert isinstance(stored, BlockStored)
    assert (stored.extra_keys, stored.cache_salt, stored.group_idx) == ([(key,)], field, 1)


def test_the_namespace_of_the_engine_and_that_of_the_request_are_published_apart() -> None:
    desk = Desk(wording=Wording(("llm-d",)))
    said = []
    for engine, request, adapter in (
        ("fleet", "", ""),
        ("fleet", "tenant", ""),
        ("fleet", "fleet", ""),
        ("", "tenant", "sql"),
        ("fleet", "tenant", "sql"),
        ("", "", "sql"),
    ):
        desk.put(1, 2, namespace=join_namespaces(engine, request, adapter))
        # The third one is the first one: a router has one word for both.
        (stored,) = desk.published() or [None]
        said.append(stored and (stored.extra_keys and stored.extra_keys[0], stored.lora_name))
    tenant = ("tenant",)
    assert said == [(("fleet",), None), (tenant, None), None, (tenant, "sql"), (tenant, "sql"), (None, "sql")]


def test_without_tokens_only_hashes_are_published() -> None:
    seen = Seen(1, 0, 2, "", np.array([1, 2, 3, 4], dtype="<u4").tobytes(), ("GPU",))
    content = KVContent(page_size=2, key_bytes=8, tokens=False)
    assert content.changes([seen]) == [BlockStored(hashes(1, 2, 3, 4), None, [], 2, None, "GPU", None)]


def test_a_page_is_held_back_while_a_load_fills_the_page_before_it() -> None:
    desk = Desk()
    first = desk.put(1, 2)
    desk.index.set_load(first, Rig())
    rest = np.array([3, 4], dtype="<u4").tobytes()
    desk.index.insert_pending(first, "", rest, desk.core.state.device.take(1))
    assert desk.published() == []
    desk.index.set_load(first, None)
    assert desk.published() == [BlockStored(hashes(1, 2, 3, 4), None, [1, 2, 3, 4], 2, None, "GPU", None)]


def test_pages_that_the_index_forgets_stay_published_while_storage_has_them() -> None:
    desk = Desk()
    desk.to_storage(desk.put(1, 2, 3, 4))
    assert desk.published() == [BlockRemoved(hashes(1, 2, 3, 4), "GPU")]
    # Prefill brings them again: storage still has them, although the new node has no mark.
    again = desk.put(1, 2, 3, 4)
    assert desk.published() == [BlockStored(hashes(1, 2, 3, 4), None, [1, 2, 3, 4], 2, None, "GPU", None)]
    desk.index.mark_stored(again)
    assert desk.published() == []
    desk.index.unmark_stored(again)
    assert desk.published() == [BlockRemoved(hashes(1, 2, 3, 4), "STORAGE")]


def test_pages_that_storage_drops_are_withdrawn_until_it_confirms_them_again() -> None:
    desk = Desk()
    node = desk.put(1, 2, 3, 4)
    desk.index.mark_stored(node, renewed=1)
    desk.published()
    last = page_digests(np.array([1, 2, 3, 4], dtype="<u4").tobytes(), 2)[1]
    desk.batches.clear()
    desk.watcher.storage_lacks([last, b"unknown"])
    assert desk.sent() == [BlockRemoved(hashes(1, 2, 3, 4)[1:], "STORAGE")]
    desk.index.tree.touch(node)
    assert desk.published() == []
    desk.index.mark_stored(node, renewed=2)
    (stored,) = desk.published()
    assert stored == BlockStored(hashes(1, 2, 3, 4)[1:], hashes(1, 2)[0], [3, 4], 2, None, "STORAGE", None)
    desk.to_storage(node)
    desk.published()
    desk.batches.clear()
    desk.watcher.storage_lacks(page_digests(np.array([1, 2], dtype="<u4").tobytes(), 2))
    # What is behind the gap cannot be read either.
    assert desk.sent() == [BlockRemoved(hashes(1, 2, 3, 4), "STORAGE")]


def test_pages_in_storage_only_have_a_limit_and_the_first_forgotten_go_first() -> None:
    content = KVContent(page_size=2, key_bytes=8, stored_pages_max=3)

    def seen(number: int, media: tuple[Medium, ...], *, gone: bool = False) -> Seen:
        edge = b"" if gone else np.array([number, 0, number, 1], dtype="<u4").tobytes()
        return Seen(number, 0, 2, "", edge, media)

    for number in (1, 2, 3):
        content.changes([seen(number, ("STORAGE",))])
        withdrawn = content.changes([seen(number, (), gone=True)])
        expected = [[], [BlockRemoved(hashes(1, 0, 1, 1), "STORAGE")], [BlockRemoved(hashes(2, 0, 2, 1), "STORAGE")]]
        assert withdrawn == expected[number - 1]
    assert len(content._pages) == 2


def test_storage_that_is_left_takes_its_pages_out_of_the_stream() -> None:
    desk = Desk()
    desk.to_storage(desk.put(1, 2, 3, 4))
    desk.put(5, 6)
    desk.published()
    desk.index.forget_stored()
    assert desk.published() == [BlockRemoved(hashes(1, 2, 3, 4), "STORAGE")]


def test_pairs_are_published_to_the_router_that_reads_them() -> None:
    packed = np.arange(5, dtype="<u4").tobytes()
    content = KVContent(page_size=2, key_bytes=12, bigrams=True)
    (stored,) = content.changes([Seen(1, 0, 2, "", PageKeys(2, bigrams=True).of(packed), ("GPU",))])
    assert isinstance(stored, BlockStored)
    assert stored.token_ids == [(0, 1), (1, 2), (2, 3), (3, 4)]


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
