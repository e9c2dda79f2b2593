"""Overview of a running engine or prefill peer from its metrics: requests, pools and tokens, or rooms and bytes."""

from __future__ import annotations

import http.client
import socket
import urllib.error
import urllib.request
from typing import TypeAlias

from prometheus_client.parser import text_string_to_metric_families
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tidekv.engine.trace.bars import BLOCK, COLORS
from tidekv.states.errors import InvalidRequest
from tidekv.states.validation import host_and_port, printable

Sample: TypeAlias = "dict[str, dict[tuple[str, ...], float]]"
BAR_COLUMNS = 40
METRICS_BYTES_MAX = 16 << 20
POOLS = ("device", "host")
CONDITIONS = {"owned": "cyan", "pinned": "blue", "evictable": "green", "draining": "red", "free": "grey30"}
"""Conditions of pages by color. Cached pages are pinned by requests and transfers, or else evictable."""


def scrape(address: str, *, timeout_s: float = 5.0) -> Sample:
    """Return numbers by metric and by label values, in the order of the labels' names.

    Raises InvalidRequest if the address does not serve metrics of tidekv.
    """
    host_and_port(address, "ADDRESS")
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=timeout_s) as answer:
            text = answer.read(METRICS_BYTES_MAX).decode()
        found: Sample = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, {})[tuple(map(printable, sample.labels.values()))] = sample.value
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise InvalidRequest(
            f"no engine answers at {address!r}: {_cause(error, timeout_s)}; set engine.metrics.listen, or "
            "prefill.metrics_listen, to this address"
        ) from error
    if "tidekv_requests" not in found and "tidekv_prefill_rooms" not in found:
        raise InvalidRequest(f"the server at {address!r} is not a tidekv engine or prefill peer")
    return found


def _cause(error: Exception, timeout_s: float) -> str:
    """Return in plain words why there are no metrics."""
    # What fails before an answer begins is wrapped in a URLError, what fails after that is not.
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(error, urllib.error.HTTPError):
        return f"the server there answers {error.code}, {error.reason}"
    if isinstance(reason, TimeoutError):
        return f"nothing came within {timeout_s:g} s"
    if isinstance(reason, ConnectionRefusedError):
        return "nothing listens there"
    if isinstance(reason, socket.gaierror):
        return "there is no host of that name"
    if isinstance(reason, (OSError, http.client.HTTPException)):
        return f"the connection failed ({getattr(reason, 'strerror', None) or type(reason).__name__})"
    return "the answer there is not one of Prometheus metrics"


def show(now: Sample, before: Sample | None, elapsed_s: float) -> RenderableType:
    """Return one picture. Rates are those since `before`."""
    if "tidekv_requests" not in now:
        return _prefill(now, before, elapsed_s)
    states = Table("state", "requests", title="requests")
    for (state,), count in now["tidekv_requests"].items():
        states.add_row(Text(state, COLORS.get(state, "")), f"{count:.0f}")
    ended = Table("ended", "all", "a second", title="restores")
    for (outcome,), count in now.get("tidekv_requests_ended_total", {}).items():
        ended.add_row(
            Text(outcome), f"{count:.0f}", _rate(now, before, "tidekv_requests_ended_total", (outcome,), elapsed_s)
        )
    sources = Table("source", "tokens", "share", title="tokens by source")
    tokens = now.get("tidekv_tokens_total", {})
    total = sum(tokens.values()) or 1
    for (source,), count in tokens.items():
        sources.add_row(Text(source), f"{count:.0f}", f"{count / total:.0%}")
    cuts = Table("cause", "times", title="extends by cause")
    for (cause,), count in now.get("tidekv_cuts_total", {}).items():
        cuts.add_row(Text(cause), f"{count:.0f}")
    declined = Table("cause", "pages", title="storage declined")
    for (cause,), count in now.get("tidekv_declined_pages_total", {}).items():
        declined.add_row(Text(cause), f"{count:.0f}")
    prefills = Table("prefill", "pages", title="withheld before READY")
    for (prefill,), count in now.get("tidekv_prefill_pages", {}).items():
        prefills.add_row(Text(prefill), f"{count:.0f}")
    tables = [states, ended, sources, cuts, declined, prefills, *_peers(now, before, elapsed_s)]
    lines: list[RenderableType] = [_pools(now), Columns(tables)]
    live = {what: count for (what,), count in now.get("tidekv_live", {}).items()}
    if now.get("tidekv_engine", {}).get(("draining", "engine"), 0) or live.get("pages_to_store"):
        requests = sum(now["tidekv_requests"].values())
        stored = now.get("tidekv_pages_total", {}).get(("stored",), 0)
        handed = now.get("tidekv_core_total", {}).get(("pages_handed",), 0)
        words = "draining" if now["tidekv_engine"].get(("draining", "engine")) else "storing what storage lacks"
        left = f"{live.get('pages_to_store', 0):.0f} left to store"
        if handed:
            left = f"{handed:.0f} handed over, {live.get('pages_to_store', 0):.0f} left"
        lines.append(Text(f"{words}: {requests:.0f} requests live, {stored:.0f} pages stored since the start, {left}"))
    if now.get("tidekv_storage_breaker_open", {}).get((), 0):
        lines.append(Text("storage is not used: the breaker is open", "bold red"))
    return Group(*lines)


def _peers(now: Sample, before: Sample | None, elapsed_s: float) -> list[Table]:
    """Return what other decode workers were asked for and sent, and what they read here; nothing without any."""
    table = Table("other decode workers", "all", "a second", title="peers")
    rows = [
        ("asked, times", "tidekv_core_total", ("peer_fetches",)),
        ("late, times", "tidekv_core_total", ("peer_fetches_late",)),
        ("pages read", "tidekv_pages_total", ("from_peers",)),
        ("pages they lacked", "tidekv_core_total", ("peer_pages_short",)),
        ("pages sent to them", "tidekv_pages_total", ("to_peers",)),
        ("pages handed over", "tidekv_core_total", ("pages_handed",)),
        ("pages taken over", "tidekv_core_total", ("pages_taken",)),
        ("named by hints, refused", "tidekv_peers_refused_total", ()),
    ]
    rows += [
        (f"pages not asked: {cause}", "tidekv_peer_declined_pages_total", (cause,))
        for (cause,) in now.get("tidekv_peer_declined_pages_total", {})
    ]
    found = [(words, name, labels) for words, name, labels in rows if now.get(name, {}).get(labels)]
    for words, name, labels in found:
        table.add_row(Text(words), f"{now[name][labels]:.0f}", _rate(now, before, name, labels, elapsed_s))
    return [table] if found else []


def _prefill(now: Sample, before: Sample | None, elapsed_s: float) -> RenderableType:
    rooms = Table("state", "rooms", title="rooms")
    for (state,), count in now["tidekv_prefill_rooms"].items():
        rooms.add_row(Text(state), f"{count:.0f}")
    ended = Table("ended", "all", "a second", title="rooms that ended")
    for (outcome,), count in now.get("tidekv_prefill_rooms_ended_total", {}).items():
        rate = _rate(now, before, "tidekv_prefill_rooms_ended_total", (outcome,), elapsed_s)
        ended.add_row(Text(outcome), f"{count:.0f}", rate)
    aborts = Table("cause", "rooms", title="not received, by cause")
    for (cause,), count in now.get("tidekv_prefill_aborts_total", {}).items():
        aborts.add_row(Text(cause), f"{count:.0f}")
    sent = Table("what", "all", "a second", title="sent")
    for what in ("bytes_sent", "pages_sent", "pages_withdrawn"):
        name = f"tidekv_prefill_{what}_total"
        count = now.get(name, {}).get((), 0.0)
        sent.add_row(what.replace("_", " "), f"{count:.0f}", _rate(now, before, name, (), elapsed_s))
    for what in ("writes_in_flight", "rooms_waited_for", "peers"):
        sent.add_row(what.replace("_", " "), f"{now.get(f'tidekv_prefill_{what}', {}).get((), 0.0):.0f}", "")
    return Columns([rooms, ended, aborts, sent])


def _pools(now: Sample) -> RenderableType:
    table = Table("pool", "", *CONDITIONS, title="pages")
    pools = {pool: {at[0]: count for at, count in now["tidekv_pool_pages"].items() if at[1] == pool} for pool in POOLS}
    for (component, condition, pool), count in now.get("tidekv_component_pool_pages", {}).items():
        pools.setdefault(f"{component}, {pool}", {})[condition] = count
    for pool, pages in pools.items():
        # Not the pages that receipts protect: those whose device page is being reclaimed are not evictable, either.
        pages["pinned"] = pages.get("cached", 0) - pages.get("evictable", 0)
        counts = {condition: pages.get(condition, 0) for condition in CONDITIONS}
        total = sum(counts.values())
        if not total:
            continue
        bar = Text()
        for condition, color in CONDITIONS.items():
            bar.append(BLOCK * round(counts[condition] / total * BAR_COLUMNS), color)
        table.add_row(Text(pool), bar, *(Text(f"{count:.0f}", CONDITIONS[name]) for name, count in counts.items()))
    return table


def _rate(now: Sample, before: Sample | None, name: str, labels: tuple[str, ...], elapsed_s: float) -> str:
    if before is None or elapsed_s <= 0:
        return ""
    return f"{(now[name][labels] - before.get(name, {}).get(labels, 0)) / elapsed_s:.1f}"
