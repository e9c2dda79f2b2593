"""Every counter that is scraped, once more: from the steps of a journal, and without the code that counts live."""

from __future__ import annotations

from collections import Counter, defaultdict

from prometheus_client.parser import text_string_to_metric_families

from tidekv import Replayer
from tidekv.engine.metrics import MetricsFold
from tidekv.states import commands, events
from tidekv.states.records.stages import State
from tidekv.states.types import FULL

Samples = dict[tuple[str, str], float]
ELSEWHERE = (
    "tidekv_cuts_total",
    "tidekv_declined_pages_total",
    "tidekv_peer_declined_pages_total",
    "tidekv_evicted_over_share_pages_total",
    "tidekv_snapshots_total",
)
"""Not recounted: tests inject the causes of the first three, a model of the tree's eviction recounts the fourth, and
tests of the policy on snapshots the fifth.
"""


def scraped(text: str) -> tuple[set[str], Samples]:
    """Names of the families, and values by name and by the values of the labels."""
    families = list(text_string_to_metric_families(text))
    samples = {
        (sample.name, " ".join(value for name, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    return {family.name for family in families}, samples


def counters_of(samples: Samples) -> Samples:
    """Those that can be recounted."""
    endings = ("_total", "_count", "_sum")
    return {key: value for key, value in samples.items() if key[0].endswith(endings) and key[0] not in ELSEWHERE}


def recount(replayer: Replayer, fold: MetricsFold, *, page_bytes: int) -> Samples:
    """All counters once more, from the steps of the journal."""
    names = {
        commands.QueryStorage: "query", commands.FetchPages: "fetch", commands.StorePages: "store",
        commands.ProbeStorage: "probe", commands.Recompute: "recompute",
    }  # fmt: skip
    counts: Counter[tuple[str, str]] = Counter(
        {("tidekv_requests_arrived_total", ""): 0, ("tidekv_peers_refused_total", ""): 0}
    )
    begun: dict[int, tuple[str, float]] = {}
    component_pages: dict[int, tuple[str, int]] = {}
    states: dict[str, tuple[str, float]] = {}
    arrived: dict[str, float] = {}
    received: dict[str, int] = defaultdict(int)
    rooms: dict[str, int] = {}
    sizes = replayer.core.settings.page_size

    def add(family: str, label: str, value: float = 1) -> None:
        counts[f"tidekv_{family}", label] += value

    replayer.core.state.index.on_evict.append(lambda node, tier: add("evicted_pages_total", tier, node.page_count))
    for step in replayer.steps():
        event = step.event
        fold.stepped(event, step.commands, step.error)
        add("events_total", type(event).__name__)
        for raised in replayer.core.state.raises:
            add("raises_total", raised.rule)
        if isinstance(event, events.RequestArrived) and not step.error:
            add("requests_arrived_total", "")
            add("peers_refused_total", "", len(event.peers_refused))
        if isinstance(event, events.FinishRequested | events.RetractRequested) and not step.error:
            for left in event.component_pages:
                add("component_pages_total", f"{left.component} left", len(left.pages))
        if isinstance(event, events.ChunkReceived):
            add("pages_total", "delivered", event.count)
            if rooms.get(event.request_id) == event.generation:
                received[event.request_id] += event.count
            else:
                add("pages_total", "wasted", event.count)
        if getattr(event, "op", None) in begun:
            name, at_s = begun.pop(event.op)
            add("call_seconds_count", name)
            add("call_seconds_sum", name, event.at_s - at_s)
            if getattr(event, "error", "") or isinstance(event, events.CommandRaised):
                add("calls_failed_total", name)
            elif event.op not in component_pages and name in ("fetch", "store"):
                valid = max(event.valid if name == "fetch" else event.written, 0)
                add("pages_total", "fetched" if name == "fetch" else "stored", valid)
            elif event.op in component_pages:
                label, count = component_pages[event.op]
                said = {"fetch": "valid", "store": "written"}.get(name)
                add("component_pages_total", label, max(getattr(event, said), 0) if said else count)
        for request_id, state in step.moves:
            if request_id in states:
                was, since_s = states.pop(request_id)
                add("state_seconds_count", was)
                add("state_seconds_sum", was, event.at_s - since_s)
            else:
                arrived[request_id] = event.at_s
            if state in (State.READY, State.FAILED, State.PREALLOC):
                rooms.pop(request_id, None)
            if state is State.READY:
                add("ready_seconds_count", "ready")
                add("ready_seconds_sum", "ready", event.at_s - arrived[request_id])
                received.pop(request_id, None)
            elif state is not State.FAILED:
                states[request_id] = (state.value, event.at_s)
            if state in (State.FAILED, State.PREALLOC) and request_id in received:
                add("pages_total", "wasted", received.pop(request_id))
        for command in step.commands:
            if isinstance(command, commands.CopyPages):
                begun[command.op] = (f"copy_to_{command.target}", event.at_s)
            if isinstance(command, commands.CopyPages) and command.component != FULL:
                way = {("host", "device"): "loaded", ("device", "host"): "backed_up", ("device", "device"): "cloned"}
                what = way[command.source, command.target]
                component_pages[command.op] = (f"{command.component} {what}", len(command.source_pages))
            elif isinstance(command, commands.FetchPages | commands.StorePages) and command.component != FULL:
                what = "fetched" if isinstance(command, commands.FetchPages) else "stored"
                component_pages[command.op] = (f"{command.component} {what}", 0)
            if type(command) in names:
                begun[command.op] = (names[type(command)], event.at_s)
            elif isinstance(command, commands.SendPromise):
                rooms[command.request_id] = command.generation
                add("pages_total", "promised", -(-command.promised_tokens // sizes))
                add("pages_total", "asked", len(command.pages))
                for tail in command.component_pages or ():
                    add("component_pages_total", f"{tail.component} asked", len(tail.pages))
            elif isinstance(command, commands.SendExtend):
                add("pages_total", "extended", len(command.pages))
            elif isinstance(command, commands.ReportReady | commands.ReportRestored):
                add("requests_ended_total", getattr(command, "cause", "") or "ready")
                for source, tokens in command.sources.items():
                    add("tokens_total", source, tokens)
                    add("bytes_total", source, tokens * page_bytes / sizes)
            elif isinstance(command, commands.ReportFailed):
                add("requests_ended_total", command.cause)
    for name, value in replayer.core.state.counters.items():
        add("core_total", name, value)
    return dict(counts)
