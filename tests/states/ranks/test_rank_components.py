"""Windows and states on several ranks: a failure on one falls back on all, and differing state is named."""

from __future__ import annotations

import msgspec
import pytest

from tidekv.states import commands, events
from tidekv.states.component_specs import Component
from tidekv.states.core import Core
from tidekv.states.ranks.state_digest import StateDigest
from tidekv.states.types import FULL

COMPONENTS = (
    Component(name="window", kind="window", window_tokens=2, device_pages=12, host_pages=12),
    Component(name="state", kind="state", device_pages=6, host_pages=6),
)
PROMPT = b"abcd"


@pytest.fixture
def ranks(make_ranks):
    """Three ranks with the prompt and its component pages on device and host."""
    settings = msgspec.structs.replace(make_ranks.settings, components=COMPONENTS)
    ranks = make_ranks(3, settings=settings)
    ranks.make_ready("a", PROMPT)
    ready = ranks.take(commands.ReportReady)
    give_back(ranks, "a", left_of(ready))
    for given in ranks.given:
        assert sum(isinstance(command, commands.ReportFinished) for command in given) == 1
    ranks.receive(events.CopyEnded, op=ranks.take(commands.CopyPages, target="host").op)
    ranks.turn()
    for copy in take_copies(ranks):
        ranks.receive(events.CopyEnded, op=copy.op)
    ranks.turn()
    for given in ranks.given:
        given.clear()
    return ranks


def left_of(ready: commands.ReportReady) -> tuple[events.ComponentLeft, ...]:
    assert ready.component_pages is not None
    return tuple(
        events.ComponentLeft(table.component, table.first, tuple(table.pages)) for table in ready.component_pages
    )


def give_back(ranks, request_id: str, *left: tuple[events.ComponentLeft, ...]) -> None:
    """The callers of all ranks finish; each leaves different component pages, or all the same."""
    for rank in range(3):
        component_pages = left[rank % len(left)]
        ranks.receive(
            events.FinishRequested,
            ranks=[rank],
            request_id=request_id,
            keys=PROMPT,
            tokens=len(PROMPT),
            component_pages=component_pages,
        )
    ranks.turn()


def take_copies(ranks) -> list[commands.CopyPages]:
    found = [[command for command in given if _is_of_component(command)] for given in ranks.given]
    assert found[0] and all(copies == found[0] for copies in found)
    for rank, given in enumerate(ranks.given):
        ranks.given[rank] = [command for command in given if not _is_of_component(command)]
    return found[0]


def _is_of_component(command: commands.Command) -> bool:
    return isinstance(command, commands.CopyPages) and command.component != FULL


@pytest.mark.parametrize("at_rank", [0, 1, 2])
def test_after_a_copy_that_fails_on_one_rank_all_ask_their_prefill_for_its_pages(ranks, at_rank: int) -> None:
    ranks.receive(events.FlushRequested, ranks=[0], call=1, tiers=("l1",))
    ranks.turn()
    ranks.arrive("b", PROMPT)
    ranks.turn()
    assert ranks.take(commands.SendPromise).promised_tokens == 4
    window, state = take_copies(ranks)
    assert (window.source, state.source) == ("host", "host")
    ranks.receive(events.CopyEnded, op=state.op)
    for rank in range(3):
        ranks.receive(events.CopyEnded, ranks=[rank], op=window.op, error="bus error" if rank == at_rank else "")
    ranks.turn()
    assert events.CopyEnded(at_s=0.0, op=window.op, error=f"failed on rank {at_rank}") in ranks.taken
    extend = ranks.take(commands.SendExtend)
    assert (extend.generation, extend.component, extend.pages) == (0, "window", window.target_pages)
    ranks.turn()


def test_a_copy_that_one_rank_still_makes_is_waited_for_on_all(ranks) -> None:
    ranks.arrive("b", PROMPT)
    ranks.turn()
    (clone,) = take_copies(ranks)
    assert (clone.component, clone.source, clone.target) == ("state", "device", "device")
    ranks.receive(events.CopyEnded, ranks=[0, 2], op=clone.op)
    assert ranks.turn().events == []
    ranks.receive(events.CopyEnded, ranks=[1], op=clone.op)
    ranks.turn()
    assert ranks.types() == ["CopyEnded"]


def test_callers_that_leave_different_component_pages_are_refused_on_all_ranks(ranks) -> None:
    ranks.arrive("b", b"wxyz")
    ranks.turn()
    promise = ranks.take(commands.SendPromise)
    for agreement in ranks.agreements:
        for event in (
            events.PromiseSent(at_s=0.0, request_id="b", generation=promise.generation, writer="p", ranks=1),
            events.ChunkReceived(at_s=0.0, request_id="b", generation=0, rank=0, span=0, first=0, count=4, last=True),
            events.AuxReceived(at_s=0.0, request_id="b", generation=0, rank=0),
        ):
            agreement.receive(event)
    ranks.turn()
    left = left_of(ranks.take(commands.ReportReady))
    give_back(ranks, "b", left, left, left[:1])
    assert "AbortRequested" in ranks.types()
    assert ranks.take(commands.ReportDropped).request_id == "b"


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("name", ["window", "state"])
def test_free_pages_of_a_component_that_differ_are_named(ranks, tier: str, name: str) -> None:
    components = ranks.cores[1].state.components
    free = (components.device if tier == "device" else components.host)[name].pool.free_pages
    free[0], free[1] = free[1], free[0]
    assert ranks.diverged() == {f"component {name}"}


@pytest.mark.parametrize("tier", ["device", "host"])
def test_differing_component_pages_are_named_when_ranks_are_idle(ranks, tier: str) -> None:
    assert ranks.turn().is_idle
    components = ranks.cores[2].state.components
    books = (components.device if tier == "device" else components.host)["window"]
    (node,) = (node for node in books.nodes() if books.pages_of(node))
    pages = books.pages_of(node)
    first, second = sorted(pages)[-2:]
    pages[first], pages[second] = pages[second], pages[first]
    assert ranks.diverged(whole=True) == {"component window"}


def test_a_guard_more_on_one_rank_is_named(make_ranks) -> None:
    settings = msgspec.structs.replace(make_ranks.settings, components=COMPONENTS)
    cores = [Core(settings), Core(settings)]
    prints = [StateDigest(core) for core in cores]
    event = events.RequestArrived(at_s=0.0, request_id="a", request_number=1, keys=PROMPT, prompt_tokens=4)
    given = [core.step(event) for core in cores]
    cores[1].state.components.device["state"].receipts += 1
    for at, prints_of in enumerate(prints):
        prints_of.stepped(event, given[at])
    first, second = (prints_of.numbers(1, whole=False) for prints_of in prints)
    assert [name for name, ours, theirs in zip(prints[0].parts, first, second, strict=True) if ours != theirs] == [
        "component state"
    ]


@pytest.mark.parametrize(
    ("kind", "field", "part"),
    [(commands.SendPromise, "component_pages", "rooms"), (commands.CopyPages, "target_pages", "page tables")],
)
def test_pages_of_components_that_a_command_names_are_compared(ranks, kind: type, field: str, part: str) -> None:
    keys = PROMPT if kind is commands.CopyPages else PROMPT + b"x"
    event = events.RequestArrived(at_s=0.0, request_id="b", request_number=9, keys=keys, prompt_tokens=len(keys))
    given = [core.step(event) for core in ranks.cores]
    (command,) = (command for command in given[1] if isinstance(command, kind))
    if field == "component_pages":
        changed = tuple(
            msgspec.structs.replace(tail, pages=type(tail.pages)("i", [page + 1 for page in tail.pages]))
            for tail in command.component_pages
        )
    else:
        changed = type(command.target_pages)("i", [page + 1 for page in command.target_pages])
    other = [msgspec.structs.replace(one, **{field: changed}) if one is command else one for one in given[1]]
    for rank, agreement in enumerate(ranks.agreements):
        agreement.stepped(event, other if rank == 1 else given[rank])
    assert ranks.diverged() == {part}
