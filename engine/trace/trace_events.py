"""Request traces as trace-event JSON for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

import msgspec

from tidekv.engine.trace.request_trace import RequestTrace, Work

TRACKS = {"states": 1, "storage": 2, "copies": 3, "prefill": 4, "fallbacks": 5, "loop blocked": 6}
TRACK_OF = {
    "query": "storage",
    "fetch": "storage",
    "store": "storage",
    "copy": "copies",
    "tail": "copies",
    "tail fetch": "storage",
    "backup": "copies",
    "span": "prefill",
    "recompute": "prefill",
}


def trace_events(request_traces: list[RequestTrace], *, now_s: float) -> bytes:
    """Return one process per request, one thread per kind of work; microseconds since the first arrival."""
    start_s = request_traces[0].arrived_at_s if request_traces else 0.0
    events: list[dict[str, object]] = []
    serial = 0
    for number, request_trace in enumerate(request_traces, start=1):
        name = {"name": "process_name", "ph": "M", "pid": number, "args": {"name": request_trace.request_id}}
        events.append(name)
        events += [
            {"name": "thread_name", "ph": "M", "pid": number, "tid": thread, "args": {"name": track}}
            for track, thread in TRACKS.items()
        ]
        ends = [at_s for at_s, _ in request_trace.states[1:]]
        ends.append(
            request_trace.given_back_at_s
            or (request_trace.ended_at_s if request_trace.ended == "FAILED" else now_s)
            or now_s
        )
        for (at_s, state), end_s in zip(request_trace.states, ends, strict=True):
            events.append(
                {
                    "name": state,
                    "cat": "state",
                    "ph": "X",
                    "pid": number,
                    "tid": TRACKS["states"],
                    "ts": _us(at_s - start_s),
                    "dur": _us(end_s - at_s),
                }
            )
        events += [
            {
                "name": stall.where or "not scheduled?",
                "cat": "loop blocked",
                "ph": "X",
                "pid": number,
                "tid": TRACKS["loop blocked"],
                "ts": _us(stall.began_at_s - start_s),
                "dur": _us(stall.ended_at_s - stall.began_at_s),
            }
            for stall in request_trace.stalls
        ]
        for work in request_trace.works:
            serial += 1
            events += _work_events(work, number, serial, start_s, now_s)
        events += [
            {
                "name": note.cause,
                "cat": "fallback",
                "ph": "i",
                "s": "p",
                "pid": number,
                "tid": TRACKS["fallbacks"],
                "ts": _us(note.at_s - start_s),
                "args": {"consequence": note.consequence},
            }
            for note in request_trace.fallbacks
        ]
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def _work_events(work: Work, process: int, serial: int, start_s: float, now_s: float) -> list[dict[str, object]]:
    """Add a pair of asynchronous events, since works of one kind overlap."""
    track = TRACK_OF[work.kind]
    shared: dict[str, object] = {
        "name": f"{work.kind} [{work.first}, {work.first + work.count})",
        "cat": track,
        "id": serial,
        "pid": process,
        "tid": TRACKS[track],
    }
    end_s = now_s if work.ended_at_s is None else work.ended_at_s
    args = {"good": work.good, "trouble": work.trouble, "wasted": work.wasted}
    return [
        {**shared, "ph": "b", "ts": _us(work.begun_at_s - start_s), "args": args},
        {**shared, "ph": "e", "ts": _us(end_s - start_s)},
    ]


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
