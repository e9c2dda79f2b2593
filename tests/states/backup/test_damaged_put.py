"""A put that finds a damaged host page: the page leaves host memory, and a raise meanwhile ends nothing else."""

from __future__ import annotations

import pytest

from simulation.rig import Rig
from tidekv.states import commands, events
from tidekv.states.prefix.node import Node

TOKENS = b"abcdef"


def put_with_a_damaged_page(rig: Rig) -> commands.StorePages:
    rig.attach_storage()
    rig.make_ready("a", TOKENS)
    rig.finish("a", TOKENS)
    rig.copied(rig.take(commands.CopyPages, target="host"))
    return rig.take(commands.StorePages)


def test_a_damaged_page_leaves_host_memory_with_those_below_it() -> None:
    rig = Rig()
    put = put_with_a_damaged_page(rig)
    rig.step(events.PagesStored, op=put.op, stored=2, intact=2)
    assert rig.core.state.host.cached == 0
    assert rig.core.statistics()["l2_damaged"] == 1


def test_a_raise_while_it_is_dropped_leaves_the_ended_backup_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    put = put_with_a_damaged_page(rig)
    index = rig.core.state.index
    original = index.path

    def path(node: Node) -> list[Node]:
        if not len(rig.core.backups):
            raise ZeroDivisionError("planted")
        return original(node)

    monkeypatch.setattr(index, "path", path)
    rig.core.step(events.PagesStored(at_s=0.0, op=put.op, stored=2, intact=2))
    monkeypatch.undo()
    rig.core.check()
    assert rig.core.statistics()["transitions_raised"] == 1
    assert rig.core.state.host.cached == len(TOKENS)
