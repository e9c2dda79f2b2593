"""Watching what changes in the prefix index, for whoever tells others of it. Nobody watches: nothing is noted.

A node is touched when it gets or loses a copy, is cut in two, is filled or begins to be filled by a load, becomes void,
or is seen in storage. What that means for others is theirs to find out, when a step is over: a node may be touched and
be again what it was, or have left the tree.
"""

from __future__ import annotations

from tidekv.states.prefix.index import PrefixIndex
from tidekv.states.prefix.node import Node


def watch(index: PrefixIndex) -> dict[Node, None]:
    """Note from now on which nodes are touched, in the order of their first touch. The watcher empties the dict.

    All watchers of an index share it: there may be one.
    """
    if index.tree.touched is None:
        index.tree.touched = index.device_tier.touched = index.host_tier.touched = {}
    return index.tree.touched
