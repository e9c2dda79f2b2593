"""The table against the machine: in every state every event follows the table, or is refused without effect."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from transitions import Machine

from simulation.rig import Rig
from tests.support.rule_classes import CLASSES
from tidekv.states import commands, events
from tidekv.states.errors import IllegalEvent
from tidekv.states.events import Event
from tidekv.states.records.request import Request
from tidekv.states.records.stages import State
from tidekv.states.request.table import LIVE, TRANSITIONS, diagram
from tidekv.states.storage_policy import StoragePolicy

KINDS = [
    found
    for found in vars(events).values()
    if isinstance(found, type) and issubclass(found, Event) and found is not Event
]
INTERNAL = [kind for kind in KINDS if kind not in events.AnyEvent.__args__]  # type: ignore[attr-defined]  # A union's.
OF_THE_TABLE = {row.event for row in TRANSITIONS}


ARRIVAL = events.RequestArrived(at_s=0.0, request_id="someone else", request_number=99, keys=b"x", prompt_tokens=1)


def make_event(kind: type[Event], request: Request) -> Event:
    """An event of this kind that is meant for this request, with plausible fields."""
    values: dict[str, object] = {
        "at_s": 0.0,
        "request_id": request.request_id,
        "generation": request.generation,
        "op": request.answer.op,
        "writer": "prefill.1",
        "ranks": 1,
        "keys": request.keys,
        "tokens": request.prompt_tokens,
        "lent_pages": (),
        "prompt_tokens": request.prompt_tokens,
        "page_count": 0,
        "tiers": ("l1",),
        "settled": False,
        "last": False,
        "available": True,
        "policy": StoragePolicy(),
        "cause": "because",
        "detail": "because",
        "error": "",
        "prefills": ("prefill",),
        "runs": (),
    }
    fields = {field.name: values.get(field.name, 0) for field in msgspec.structs.fields(kind)}
    return kind(**fields)


def digest(rig: Rig) -> object:
    """All that an illegal event must leave alone."""
    core = rig.core
    nodes = [(repr(node), node.anchored, node.host_anchored) for node in core.state.index.nodes()]
    requests = [
        (repr(request), list(request.held.own), list(request.held.reserve), request.held.promised, request.answer.op)
        for request in core.state.requests.values()
    ]
    return core.statistics(), nodes, requests, core.next_deadline_s()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in OF_THE_TABLE], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("state", State, ids=lambda state: state.value)
def test_every_state_takes_every_event_as_the_table_says(state: State, kind: type[Event]) -> None:
    rig = Rig()
    rig.bring(State.TRANSFER)
    request = rig.request("a")
    rig.abort("a")
    rig.drained(rig.take(commands.SendAbort))
    rig = Rig()
    rig.bring(state)
    request = rig.core.request("a") or request
    assert request.state is state
    rows = [row for row in TRANSITIONS if row.event is kind and state in row.source]
    before = digest(rig)
    if not rows:
        with pytest.raises(IllegalEvent, match=f"{kind.__name__} in {state.value}"):
            rig.core.fire(request, make_event(kind, request))
        assert request.state is state
        assert digest(rig) == before
        return
    event = make_event(kind, request)
    rig.core.state.operations.pop(request.answer.op, None)
    rig.core.fire(request, event)
    assert request.state in {row.dest or state for row in rows} | {state}
    if kind is events.Granted:
        # It follows from what the core does before, which was not done here.
        return
    rig.core.settle()
    rig.core.state.out.clear()
    rig.core.check()


def test_the_machine_of_the_library_makes_each_change_of_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[str]()
    set_state = Machine.set_state

    def noted(machine: Machine, state: str, model: Request) -> None:
        made.append(state)
        set_state(machine, state, model)

    monkeypatch.setattr(Machine, "set_state", noted)
    rig = Rig()
    rig.bring(State.READY)
    assert made == ["MATCH", "TRANSFER", "READY"]


def taken_by(rig: Rig, run: Callable[[], object]) -> list[str]:
    """Names of the events of which `run` takes a row of the machine, in order."""
    taken = list[str]()

    def noted(kind: type[Event], take: Callable[..., None]) -> Callable[..., None]:
        def take_and_note(*given: object) -> None:
            take(*given)
            taken.append(kind.__name__)

        return take_and_note

    for kind, by_state in rig.core.rows.items():
        for rows in by_state.values():
            rows[:] = [(only_if, take and noted(kind, take)) for only_if, take in rows]
    run()
    return taken


def test_a_request_takes_one_row_for_each_fact_and_each_state() -> None:
    rig = Rig(device_pages=64, host_pages=64)
    rig.make_cached("warm", b"abcdefgh")

    def run() -> None:
        rig.arrive("a", b"abcdefgh" + b"ijklmnopqrstuvwx")
        promise = rig.take(commands.SendPromise)
        rig.promised(promise)
        first, count = 8, len(promise.pages) // 4
        for at in range(4):
            rig.chunk(promise, first=first + at * count, count=count, last=at == 3)
        rig.aux(promise)
        rig.take(commands.ReportReady)
        rig.finish("a", b"abcdefgh" + b"ijklmnopqrstuvwx")

    assert taken_by(rig, run) == [
        "StorageDue", "Granted", "PlanDue", "Progressed", "PromiseSent", *["ChunkReceived"] * 4, "AuxReceived",
        "Progressed", "FinishRequested",
    ]  # fmt: skip


def test_a_guard_that_raises_falls_back_as_an_action_does(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    has_raised = list[int]()
    is_planned = Request.is_planned.fget
    assert is_planned is not None

    def fails_once(request: Request) -> bool:
        if request.state is State.MATCH and not has_raised:
            has_raised.append(1)
            raise ZeroDivisionError("a bug")
        return is_planned(request)

    monkeypatch.setattr(Request, "is_planned", property(fails_once))
    rig.arrive("a", b"abcdefgh")
    assert has_raised
    assert rig.state("a") == "TRANSFER"
    assert rig.core.statistics()["transitions_raised"] == 1


def test_internal_events_are_of_the_table_and_never_journalled() -> None:
    assert INTERNAL and set(INTERNAL) <= OF_THE_TABLE


@pytest.mark.parametrize(
    "kind",
    # A core with device pages of its own takes no offers, and one with requests has no host pages left to find.
    [kind for kind in KINDS if kind not in OF_THE_TABLE and kind not in (events.PagesOffered, events.HostPagesFound)],
    ids=lambda kind: kind.__name__,
)
@pytest.mark.parametrize("state", State, ids=lambda state: state.value)
def test_events_that_are_not_of_the_table_leave_a_request_where_it_is(state: State, kind: type[Event]) -> None:
    rig = Rig()
    rig.bring(state)
    event = msgspec.structs.replace(make_event(kind, Request(ARRIVAL, arrival=0, settings=Rig().settings)))
    rig.core.step(event)
    rig.core.check()
    found = rig.core.request("a")
    assert (State.FAILED if found is None else found.state) is state


@pytest.mark.parametrize("state", State, ids=lambda state: state.value)
def test_calls_on_a_request_in_the_wrong_state_are_refused_and_change_nothing(state: State) -> None:
    rig = Rig()
    rig.bring(state)
    if state in (State.READY, State.FAILED):
        return
    for kind in (events.GrowthTaken, events.FinishRequested, events.RetractRequested):
        before = digest(rig)
        with pytest.raises(IllegalEvent, match=f"{kind.__name__} in {state.value}"):
            rig.core.step(make_event(kind, rig.request("a")))
        assert digest(rig) == before
        rig.core.check()


def test_a_second_arrival_of_a_live_id_is_refused_and_changes_nothing() -> None:
    rig = Rig()
    rig.bring(State.TRANSFER)
    before = digest(rig)
    with pytest.raises(IllegalEvent, match="arrived twice"):
        rig.arrive("a", b"xyz")
    assert digest(rig) == before


def test_every_live_state_can_fail_and_final_ones_have_no_way_out() -> None:
    for state in LIVE:
        assert any(row.dest is State.FAILED and state in row.source for row in TRANSITIONS)
    for row in TRANSITIONS:
        assert State.FAILED not in row.source
        assert State.READY not in row.source or row.dest in (None, State.FAILED)


def test_every_row_has_words() -> None:
    for row in TRANSITIONS:
        action = None if row.before is None else row.before(CLASSES)
        for function in (action, row.only_if):
            assert function is None or function.__doc__


def test_the_diagram_names_every_state_and_every_event_that_moves() -> None:
    drawn = diagram()
    for state in State:
        assert state.value in drawn
    for row in TRANSITIONS:
        if row.dest is not None:
            assert row.event.__name__ in drawn
