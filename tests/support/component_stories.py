"""A core with components, with or without storage that keeps their records too, in a few words."""

from __future__ import annotations

import pytest

from simulation.rig import Rig
from tidekv.states import commands, events
from tidekv.states.component_specs import Component

PROMPT = b"abcdefgh"


def window(tokens: int = 3, device: int = 16, host: int = 16) -> Component:
    return Component(name="window", kind="window", window_tokens=tokens, device_pages=device, host_pages=host)


def state(device: int = 8, host: int = 8) -> Component:
    return Component(name="state", kind="state", device_pages=device, host_pages=host)


def rig_with(*components: Component, storage: bool = True, **fields: object) -> Rig:
    rig = Rig(components=components or (window(), state()), **fields)  # type: ignore[arg-type]  # Not a number.
    if storage:
        rig.attach_storage(component_pages=True)
    return rig


def left_by(ready: commands.ReportReady, end: int) -> tuple[events.ComponentLeft, ...]:
    """What a request that generated nothing leaves at the end of its prompt."""
    assert ready.component_pages is not None
    assert all(table.first + len(table.pages) == end for table in ready.component_pages)
    return tuple(
        events.ComponentLeft(table.component, table.first, tuple(table.pages)) for table in ready.component_pages
    )


def finish(
    rig: Rig,
    ready: commands.ReportReady,
    tokens: bytes,
    kind: type[events.Event] = events.FinishRequested,
    **fields: object,
) -> None:
    """The caller has generated nothing, and leaves all tails at the end of its prompt."""
    fields = {"component_pages": left_by(ready, len(tokens)), **fields}
    rig.step(kind, request_id=ready.request_id, keys=tokens, tokens=len(tokens), **fields)


def ready_with(rig: Rig, request_id: str, tokens: bytes) -> commands.ReportReady:
    """A prompt that prefill brings, since storage has nothing."""
    rig.arrive(request_id, tokens)
    for query in rig.take_all(commands.QueryStorage):
        rig.answer(query, 0)
    rig.serve(rig.take(commands.SendPromise))
    rig.take(commands.SendReceived)
    return rig.take(commands.ReportReady)


def cached(rig: Rig, tokens: bytes, name: str = "past") -> commands.ReportReady:
    """Bring tokens and their tails into every tier there is."""
    ready = ready_with(rig, name, tokens)
    finish(rig, ready, tokens)
    for of_components in (False, True):
        for copy in rig.take_all(commands.CopyPages, target="host", of_components=of_components):
            rig.copied(copy)
    puts = rig.take_all(commands.StorePages)
    while puts:
        for put in puts:
            rig.stored(put)
        puts = [*rig.take_all(commands.StorePages), *rig.take_all(commands.StorePages, of_components=True)]
    rig.take(commands.ReportFinished)
    rig.take(commands.ForgetTokens)
    rig.nothing_else()
    return ready


def only_in_storage(rig: Rig, tokens: bytes = PROMPT) -> None:
    cached(rig, tokens)
    rig.flush("l1")
    rig.flush("l2")


def tail(name: str, *ranges: tuple[int, int]) -> events.StoredComponent:
    return events.StoredComponent(name, ranges)


ALL = (tail("window", (5, 8)), tail("state", (7, 8)))


def asked(rig: Rig, tokens: bytes = PROMPT, request_id: str = "a", **fields: object) -> commands.QueryStorage:
    rig.arrive(request_id, tokens, **fields)
    return rig.take(commands.QueryStorage)


def fetching(rig: Rig, tokens: bytes = PROMPT, **fields: object) -> list[commands.FetchPages]:
    """A request with a plan that takes everything from storage."""
    rig.answer(asked(rig, tokens, **fields), 8, component_pages=ALL)
    return rig.take_all(commands.FetchPages, of_components=True)


def pages(rig: Rig, name: str) -> tuple[int, int]:
    """What is owned and cached of one component's host pages."""
    counts = rig.core.statistics()
    return counts[f"{name}_host_owned"], counts[f"{name}_host_cached"]


def device_pages(rig: Rig, name: str) -> dict[str, int]:
    """How many device pages of one component are in each condition."""
    counts = rig.core.statistics()
    return {word: counts[f"{name}_device_{word}"] for word in ("free", "owned", "cached", "draining", "protected")}


def raise_at_promises(rig: Rig, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the core raise where it is about to promise something, so many times."""
    raises, emit = iter([True] * times), rig.core.state.emit

    def failing(command: commands.Command) -> None:
        if isinstance(command, commands.SendPromise) and next(raises, False):
            raise RuntimeError("planted")
        emit(command)

    monkeypatch.setattr(rig.core.state, "emit", failing)


def settle(rig: Rig) -> None:
    rig.settle()
    rig.expect_nothing_held()


def recompute_order(rig: Rig, request_id: str, tokens: bytes) -> commands.Recompute:
    """The order to compute a prompt whose prefill is lost."""
    rig.arrive(request_id, tokens, can_recompute=True)
    promise = rig.take(commands.SendPromise)
    rig.step(events.RoomFailed, request_id=request_id, generation=promise.generation, cause="gone", settled=True)
    for copy in rig.take_all(commands.CopyPages, of_components=True):
        rig.copied(copy)
    return rig.take(commands.Recompute)
