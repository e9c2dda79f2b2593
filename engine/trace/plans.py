"""What was planned for a request when its promise went out: which pages come from where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.engine.trace.request_trace import Plan

if TYPE_CHECKING:
    from collections.abc import Container

    from tidekv.states.commands import SendPromise
    from tidekv.states.request.request import Request


def plan_of(
    command: SendPromise, request: Request | None, begun: Container[int], *, page_size: int, at_s: float
) -> tuple[Plan, list[int]]:
    """The plan behind a promise, and the operations under way that it shares with others. `begun` are the operations
    that the same step has begun.
    """
    loads = {"l2": 0, "l3": 0}
    shared = declined = 0
    joined = []
    sent: dict[str, int] = {}
    promised = -(-command.promised_tokens // page_size)
    if request is not None:
        declined = request.declined[1]
        for load in request.loads:
            pages = load.sharers.get(request, 0)
            if load.filler is request:
                continue  # What its own room is to bring.
            if load.filler is not None:
                name = load.filler.request_id
                sent[name] = sent.get(name, 0) + pages
            elif load.op in begun:
                loads[load.tier] += pages
            else:
                shared += pages
                joined.append(load.op)
    local = promised - loads["l2"] - loads["l3"] - shared - sum(sent.values())
    plan = Plan(
        at_s,
        command.generation,
        command.prefill,
        max(0, local),
        loads["l2"],
        loads["l3"],
        shared,
        command.promised_tokens,
        len(command.pages),
        declined,
        {tail.component: len(tail.pages) for tail in command.tails or ()},
        sent,
    )
    return plan, joined
