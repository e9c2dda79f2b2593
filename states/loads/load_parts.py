"""Parts of a load: where it is cut in two, and what of it joins the tree's host pages. See `loads`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states.request.request import Load
from tidekv.states.rollback import Undo

if TYPE_CHECKING:
    from tidekv.states.core_state import CoreState
    from tidekv.states.prefix.index import PrefixIndex


def cut_load(index: PrefixIndex, load: Load, at: int) -> Load:
    """Cut a load at its page `at`; `load` keeps the first part, the rest is returned, without sharers."""
    kept = pages = 0
    while pages + load.nodes[kept].page_count <= at:
        pages += load.nodes[kept].page_count
        kept += 1
    if pages < at:
        # The upper half joins the nodes of the load in front of the lower one.
        index.split(load.nodes[kept], at - pages)
        kept += 1
    rest = Load(first=load.first + at, tier=load.tier, stage=load.stage)
    with Undo() as undo:
        shorter = index.lock(load.nodes[kept - 1])
        undo.callback(index.unlock, shorter)
        for node in load.nodes[kept:]:
            index.set_load(node, rest)
            undo.callback(index.set_load, node, load)
        undo.keep()
    rest.cause, rest.filler, rest.span = load.cause, load.filler, load.span
    # The lock of the whole ends where the rest ends.
    rest.lock, load.lock = load.lock, shorter
    rest.nodes, load.nodes = load.nodes[kept:], load.nodes[:kept]
    rest.host_pages, load.host_pages = load.host_pages[at:], load.host_pages[:at]
    return rest


def publish_host(state: CoreState, load: Load) -> None:
    """What was fetched joins the tree as host pages where its parent is there too; else it is a bounce buffer."""
    for node in load.nodes:
        state.index.mark_stored(node)
    parent = load.nodes[0].parent
    assert parent is not None
    if not state.index.has_host(parent):
        return
    for node in load.nodes:
        ours = load.host_pages[: node.page_count]
        if node.host is None:
            state.index.give_host(node, ours)
        else:
            # The same pages were fetched ahead for another request meanwhile.
            state.host.give_back(ours)
        load.host_pages = load.host_pages[node.page_count :]
