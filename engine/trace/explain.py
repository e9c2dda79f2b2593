"""Explanation of a request's latency in text: what each tier served, promised and wasted, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime

from tidekv.engine.trace.request_trace import SOURCES, PlanTrace, RequestTrace, Stall, Work
from tidekv.states.validation import printable

STALLS_MAX = 3
"""Maximum stalls named for one request."""
SOURCE_WORDS = {
    "l1": "device memory (L1)",
    "l2": "host memory (L2)",
    "l3": "storage (L3)",
    "peer": "another decode worker",
    "transfer": "prefill",
    "recompute": "its caller, which computed it",
}
WAIT_WORDS = {
    "PREALLOC": "for free device pages",
    "MATCH": "for its plan",
    "PREFETCH": "for reads from storage or a peer",
    "LOCAL_RESTORE": "for copies from host to device",
    "TRANSFER": "for prefill",
}


def explain(trace: RequestTrace, *, now_s: float, unix_s: float | None = None) -> str:
    """Return the explanation of one request as lines of text. `now_s`, the journal's end, bounds live requests.
    `unix_s` is the time of day, in Unix seconds, at time 0 of the events; with it the lines begin with one.
    """
    lines = [_headline(trace, now_s)]
    if unix_s is not None:
        began, ended_at_s = _clock(unix_s + trace.arrived_at_s), trace.ended_at_s
        ended = "" if ended_at_s is None else f", {trace.ended} at {_clock(unix_s + ended_at_s)}"
        lines.append(f"It arrived at {began}{ended}.")
    if trace.resumes is not None:
        since_s = trace.arrived_at_s - (trace.resumes.given_back_at_s or trace.arrived_at_s)
        lines.append(
            f"It resumes what was retracted {_ms(since_s)} before, of which {trace.resumes.held_pages} pages were held "
            "in host memory."
        )
    lines += _sources(trace)
    lines += _waits(trace, now_s)
    for plan in trace.plans:
        lines += _plan(trace, plan)
    lines += _works(trace)
    lines += [_note(at_s - trace.arrived_at_s, words) for at_s, words in trace.notes]
    lines += [
        f"Fallback at {_ms(note.at_s - trace.arrived_at_s)}: {note.cause}; {note.consequence}."
        for note in trace.fallbacks
    ]
    lines += _waste(trace)
    if trace.ended == "FAILED":
        lines.append(f"It failed{' after READY' if trace.was_ready else ''}: {trace.cause}{_detail(trace)}.")
    else:
        # More speed does not help a request that failed for another reason.
        lines += _faster(trace, now_s)
    if trace.is_partial:
        restored = sum(trace.sources.values())
        lines.append(
            f"It ended early: {trace.cause}{_detail(trace)}; {restored} of {trace.prompt_tokens} tokens were in place, "
            "and its caller computes the rest."
        )
    if trace.returned_at_s is not None and trace.returned_at_s > (trace.ended_at_s or trace.returned_at_s):
        late_s = trace.returned_at_s - (trace.ended_at_s or 0.0)
        lines.append(f"Its pages were handed back {_ms(late_s)} later, when nothing wrote to them any more.")
    if trace.given_back and trace.given_back_at_s is not None:
        held = f"; {trace.held_pages} pages of it were held in host memory" if trace.given_back == "retracted" else ""
        lines.append(
            f"It was {trace.given_back} {_ms(trace.given_back_at_s - (trace.ended_at_s or trace.arrived_at_s))} after "
            f"READY, {trace.grown_pages} pages longer{held}."
        )
    return "\n".join(lines)


def failures_by_cause(traces: Iterable[RequestTrace]) -> str:
    """Return one line with the causes of failed requests, most frequent first; "" if none failed."""
    counts = Counter(trace.cause for trace in traces if trace.ended == "FAILED")
    if not counts:
        return ""
    parts = "; ".join(f"{cause}: {count}" for cause, count in counts.most_common())
    return f"Failed requests: {counts.total()} ({parts})."


def _note(after_s: float, words: str) -> str:
    if after_s < 0.0:
        return f"Before it arrived, {_ms(-after_s)} earlier, {words}."
    return f"Meanwhile, at {_ms(after_s)}, {words}."


def _headline(trace: RequestTrace, now_s: float) -> str:
    size = f"{trace.prompt_tokens} tokens in {trace.page_count} pages"
    if trace.ended_at_s is None:
        state = trace.states[-1][1] if trace.states else "nowhere"
        return f"{printable(trace.request_id)}: under way in {state} for {_ms(now_s - trace.arrived_at_s)}; {size}."
    return f"{printable(trace.request_id)}: {trace.ended} after {_ms(trace.ended_at_s - trace.arrived_at_s)}; {size}."


def _sources(trace: RequestTrace) -> list[str]:
    if not trace.sources:
        return []
    parts = [f"{trace.sources[name]} from {SOURCE_WORDS[name]}" for name in SOURCES if trace.sources.get(name)]
    return [f"Tokens by source: {', '.join(parts) or 'none'}."]


def _waits(trace: RequestTrace, now_s: float) -> list[str]:
    spent = trace.time_in(now_s)
    if not spent:
        return []
    total = sum(spent.values())
    parts = ", ".join(f"{state} {_ms(seconds)}" for state, seconds in spent.items())
    longest = max(spent, key=lambda state: spent[state])
    share = f", {spent[longest] / total:.0%} of the time" if total else ""
    stalled_s = trace.stalled_by_state(now_s)
    need = f" (it needed {trace.needed_pages} at once)" if longest == "PREALLOC" and trace.needed_pages else ""
    what = WAIT_WORDS[longest]
    if longest == "PREALLOC" and not trace.needed_pages and any(work.kind == "query" for work in trace.works):
        what = "for the answer of storage"
    if stalled_s[longest] >= spent[longest] / 2 > 0.0:
        what = "while decode's own event loop was blocked"
    lines = [f"Time by state: {parts}.", f"It waited longest in {longest}, {what}{need}{share}."]
    if trace.stalls:
        parts = ", ".join(_stall(trace, stall) for stall in trace.stalls[:STALLS_MAX])
        more = f", and {len(trace.stalls) - STALLS_MAX} more" if len(trace.stalls) > STALLS_MAX else ""
        lines.append(
            f"Decode's event loop was blocked for {_ms(sum(stalled_s.values()))} of this time: {parts}{more}. What "
            "arrived meanwhile was seen at the end of that only."
        )
    if trace.over_quota_of and trace.gave_way:
        lines.append(
            f"The prefill {trace.over_quota_of} gave way to another one of its list: other requests of it withheld as "
            "many device pages as they may (admission.prefill_share)."
        )
    elif trace.over_quota_of:
        lines.append(
            f"In PREALLOC it waited for the quota of prefill {trace.over_quota_of}: other requests of that prefill "
            "withheld as many device pages as they may (admission.prefill_share)."
        )
    if trace.waited_to_run:
        lines.append("In PREALLOC it waited until another request ended: as many ran as may (admission.running_max).")
    return lines


def _plan(trace: RequestTrace, plan: PlanTrace) -> list[str]:
    matched = f"{plan.l1_pages} pages in L1, {plan.l2_pages} in L2, {plan.l3_pages} in L3"
    matched += f", {plan.peer_pages} perhaps at a peer" if plan.peer_pages else ""
    shared = f", {plan.shared_pages} under load by another request" if plan.shared_pages else ""
    shared += "".join(f", {count} on their way from prefill for {name}" for name, count in plan.sent_pages.items())
    asked = [f"{count} pages of {name}" for name, count in plan.trailing_pages.items()]
    filled = f"; component pages that are on their way for {plan.sender} are copied from there" if plan.sender else ""
    return [
        f"Plan at {_ms(plan.at_s - trace.arrived_at_s)}, generation {plan.generation}, prefill number {plan.prefill}: "
        f"matched {matched}{shared}; promised {plan.promised_tokens} tokens, "
        f"asked prefill for {', '.join([f'{plan.delta_pages} pages', *asked])}{filled}."
    ]


def _works(trace: RequestTrace) -> list[str]:
    lines = []
    for work in trace.works:
        source = f"storage{' ahead' if work.ahead else ''}"
        name = {
            "query": f"Asked storage for pages {_pages(work)}: it has {work.delivered}",
            "fetch": f"Fetched pages {_pages(work)} from {source}: {work.delivered} came",
            "peer fetch": f"Read pages {_pages(work)} from peer {printable(work.cause)}: {work.delivered} came",
            "copy": f"Copied pages {_pages(work)} from host to device",
            "component fetch": f"Fetched {work.count} pages of {work.component} from {source}: {work.delivered} came",
            "shared component copy": f"Copied pages {_pages(work)} of {work.component} from {work.cause}",
            "component copy": f"Copied pages {_pages(work)} of {work.component} {work.cause}",
            "backup": f"Backed up pages {_pages(work)} to the host",
            "store": f"Put pages {_pages(work)} in storage: {work.delivered} were stored",
            "recompute": f"The caller computed pages {_pages(work)}{work.cause and f', {work.cause}'}",
            "span": _span_words(work),
        }[work.kind]
        if work.ended_at_s is None:
            lines.append(f"{name}; that has not ended.")
        else:
            error = f"; {work.error}" if work.error else ""
            blocked_s = trace.stalled_in(work.begun_at_s, work.ended_at_s)
            blocked = f" (decode's event loop was blocked for {_ms(blocked_s)} of that)" if blocked_s else ""
            lines.append(f"{name}, in {_ms(work.ended_at_s - work.begun_at_s)}{blocked}{error}.")
    return lines


def _span_words(work: Work) -> str:
    what = "the delta" if work.span == 0 else f"extend {work.span}"
    what += f", since {work.cause}" if work.cause else ""
    first = f", the first after {_ms(work.chunks[0][0] - work.begun_at_s)}" if work.chunks else ""
    of = f" of {work.component}" if work.component else ""
    pages = f"{work.delivered} of pages {_pages(work)}{of}"
    return f"Prefill delivered {pages} ({what}) in {len(work.chunks)} chunks{first}"


def _waste(trace: RequestTrace) -> list[str]:
    wasted = [(work.kind, work.wasted) for work in trace.works if work.wasted]
    if not wasted:
        return []
    names = {
        "fetch": "fetched too late",
        "peer fetch": "sent too late by a peer",
        "span": "sent by prefill for a room that was left",
        "copy": "copied too late",
    }
    parts = ", ".join(f"{count} pages {names.get(kind, kind)}" for kind, count in wasted)
    return [f"Wasted: {parts}."]


def _faster(trace: RequestTrace, now_s: float) -> list[str]:
    """Return one piece of advice, for the longest wait."""
    spent = trace.time_in(now_s)
    if not spent or not sum(spent.values()):
        return []
    longest = max(spent, key=lambda state: spent[state])
    if sum(trace.stalled_by_state(now_s).values()) >= sum(spent.values()) / 2:
        worst = max(trace.stalls, key=lambda stall: stall.ended_at_s - stall.began_at_s)
        where = f": {worst.where}" if worst.where else " (no code was seen: maybe the process was not scheduled)"
        return [f"What would have helped: an event loop of decode that is not blocked{where}."]
    if longest == "TRANSFER" and trace.plans:
        plan = trace.plans[-1]
        extended = sum(work.count for work in trace.works if work.kind == "span" and work.span)
        advice = f"prefill had {plan.delta_pages} pages of delta" + (f" and {extended} of extends" if extended else "")
        advice += "; a longer cached prefix, or a prefill that starts earlier, would have made it faster"
    else:
        advice = {
            "PREALLOC": "more device pages, or fewer requests at once, would have made it faster"
            if trace.needed_pages
            else "a faster answer of storage would have made it faster",
            "MATCH": "nothing: a plan takes no time",
            "PREFETCH": "faster storage, or more host memory so that less has to be fetched, would have made it faster",
            "LOCAL_RESTORE": "faster copies, or more device memory so that less has to be copied, would have made it "
            "faster",
            "TRANSFER": "a prefill that starts earlier would have made it faster",
        }[longest]
    return [f"What would have helped: {advice}."]


def _clock(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC"


def _stall(trace: RequestTrace, stall: Stall) -> str:
    where = f" by {stall.where}" if stall.where else " by no code that was seen"
    return f"{_ms(stall.ended_at_s - stall.began_at_s)} until {_ms(stall.ended_at_s - trace.arrived_at_s)}{where}"


def _detail(trace: RequestTrace) -> str:
    lines = trace.detail.strip().splitlines()
    return f" ({lines[-1].strip()})" if lines else ""


def _pages(work: Work) -> str:
    return f"[{work.first}, {work.first + work.count})"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
