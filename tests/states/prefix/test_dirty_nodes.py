"""A watcher of the index misses nothing: what a page has in any tier changes only where its node was touched."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from simulation.rig import Rig
from tests.support.thorough import examples
from tidekv.engine.kv_events.watcher import watch
from tidekv.states import commands, events
from tidekv.states.prefix.index import PrefixIndex
from tidekv.states.prefix.node import Node

Seen = dict[bytes, tuple[tuple[bool, ...], Node]]


def seen(index: PrefixIndex) -> Seen:
    """By the tokens down to it: what each page has, and the node that it is in."""
    found: Seen = {}
    for node in index.nodes():
        prefix = b"".join(above.edge for above in index.path(node))
        has = (
            node.device is not None,
            node.host is not None,
            node.load is not None,
            node.is_reclaiming,
            index.tree.is_stored(node),
        )
        first = node.depth_pages - node.page_count
        for depth in range(first + 1, node.depth_pages + 1):
            found[prefix[:depth]] = (has, node)
    return found


class WatchedRig(Rig):
    """A rig that compares all pages before and after every step with what was touched in it."""

    def __init__(self) -> None:
        super().__init__(device_pages=8, host_pages=6, fetch_run_pages=2, copy_run_pages=2)
        self.index = self.core.state.index
        self.dirty_nodes = watch(self.index)
        self.changes = 0

    def step(self, event_type: type[events.Event], **fields: object) -> list[commands.Command]:
        before, cuts_before = seen(self.index), {node: node.page_count for node in self.index.nodes()}
        wishes = super().step(event_type, **fields)
        after = seen(self.index)
        for node in self.index.nodes():
            assert cuts_before.get(node) == node.page_count or node in self.dirty_nodes, node
        for page in before.keys() | after.keys():
            was, now = before.get(page), after.get(page)
            # Another storage is no change of a node: what the last one had is forgotten everywhere at once.
            kept = 4 if event_type is events.StorageChanged else 5
            if (was and was[0][:kept]) != (now and now[0][:kept]):
                self.changes += 1
                nodes = [entry[1] for entry in (was, now) if entry is not None]
                assert any(node in self.dirty_nodes for node in nodes), (page, was, now)
        self.dirty_nodes.clear()
        return wishes

    def go_on(self, *, good: bool) -> None:
        """Let everything that is in flight end, well or badly."""
        while self.pending:
            pending, self.pending = self.pending, []
            for wish in pending:
                match wish:
                    case commands.QueryStorage():
                        self.answer(wish, wish.count if good else 0)
                    case commands.FetchPages():
                        self.fetched(wish, None if good else len(wish.host_pages) // 2)
                    case commands.CopyPages():
                        self.copied(wish, "" if good else "failed")
                    case commands.StorePages():
                        self.stored(wish, None if good else len(wish.host_pages) // 2)
                    case commands.SendPromise():
                        self.serve(wish)
                    case commands.SendExtend():
                        self.chunk(wish)
                    case commands.SendAbort():
                        self.drained(wish)
                    case _:
                        pass


TOKENS = st.binary(min_size=1, max_size=6).map(lambda raw: bytes(b"ab"[byte % 2] for byte in raw))
DEEDS = st.tuples(
    st.sampled_from(["keep", "abort", "late", "flush l1", "flush l2", "other storage"]), TOKENS, st.booleans()
)


@examples(60)
@given(deeds=st.lists(DEEDS, min_size=1, max_size=14))
def test_no_page_changes_in_a_node_that_was_not_touched(deeds: list[tuple[str, bytes, bool]]) -> None:
    rig = WatchedRig()
    rig.attach_storage()
    for number, (deed, tokens, good) in enumerate(deeds):
        name = f"r{number}"
        match deed:
            case "flush l1" | "flush l2":
                rig.flush(deed[-2:])
            case "other storage":
                rig.step(events.StorageChanged, available=good)
            case "abort":
                rig.arrive(name, tokens)
                rig.abort(name)
            case "late":
                rig.arrive(name, tokens)
                for query in rig.take_all(commands.QueryStorage):
                    rig.answer(query, query.count)
                rig.wait_until(rig.now_s + 100.0)
            case _:
                rig.arrive(name, tokens)
        rig.go_on(good=good)
        if rig.core.request(name) is not None:
            rig.finish(name, tokens)
            rig.go_on(good=good)
    assert rig.changes or all(deed != "keep" for deed, _, _ in deeds)


def test_there_is_one_list_of_what_was_touched_for_all_who_ask() -> None:
    rig = Rig()
    rig.make_cached("before", b"xyz")
    first = watch(rig.core.state.index)
    assert first == {}
    rig.make_cached("a", b"ab")
    assert first
    assert watch(rig.core.state.index) is first
    # In the order of the first touch, each node once.
    assert [node.edge for node in first] == [b"ab"]


def test_who_does_not_watch_keeps_no_list() -> None:
    rig = Rig()
    rig.make_cached("a", b"ab")
    rig.flush("l1", "l2")
    assert rig.core.state.index.tree.dirty_nodes is None
    assert rig.core.state.index.device_tier.dirty_nodes is None
