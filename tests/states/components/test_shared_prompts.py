"""Components never shorten what is restored of the full KV: ten users of one prompt, and any holes on any tier."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.rig import Rig
from tests.support.component_stories import ready_with, state, window
from tests.support.thorough import examples
from tidekv.states import commands, events
from tidekv.states.component_specs import Component

PAGE, SYSTEM = 20, bytes(1600)
MODELS = {
    "none": (),
    "window": (window(64, 200, 200),),
    "state": (state(60, 60),),
    "both": (window(64, 200, 200), state(60, 60)),
}
SIZES = {"page_size": PAGE, "key_bytes": PAGE, "device_pages": 1200, "host_pages": 400}


def user(number: int) -> bytes:
    return SYSTEM + bytes([number]) * 20


def rig_of(components: tuple[Component, ...]) -> Rig:
    rig = Rig(components=components, share_transfers=True, prefetch_threshold_tokens=0, **SIZES)  # type: ignore[arg-type]  # Not a number.
    rig.attach_storage(component_pages=bool(components))
    return rig


def serve_all(rig: Rig, stored_pages: int = 0) -> list[commands.ReportReady]:
    """End everything; storage has the first pages of each prompt and no component pages."""
    told: list[commands.Command] = []
    while rig.pending:
        for query in rig.take_all(commands.QueryStorage):
            rig.answer(query, max(0, min(stored_pages - query.first, query.count)))
        told += rig.settle()
    return [one for one in told if isinstance(one, commands.ReportReady)]


@pytest.mark.parametrize("found_in", ["nothing, one after the other", "nothing, all at once", "l1", "l2", "l3"])
@pytest.mark.parametrize("name", MODELS)
def test_ten_users_of_one_system_prompt_transfer_it_at_most_once(name: str, found_in: str) -> None:
    rig = rig_of(MODELS[name])
    stored_pages = 0
    if found_in in ("l1", "l2", "l3"):
        rig.arrive("first", user(99))
        (ready,) = serve_all(rig)
        rig.step(events.FinishRequested, request_id="first", keys=user(99), tokens=len(user(99)))
        rig.settle()
        for tier in ("l1", "l2")[: ("l1", "l2", "l3").index(found_in)]:
            rig.flush(tier)
        stored_pages = 80 if found_in == "l3" else 0
    sources = Counter[str]()
    for number in range(10):
        rig.arrive(str(number), user(number))
        if found_in != "nothing, all at once":
            (ready,) = serve_all(rig, stored_pages)
            sources.update(ready.sources)
    for ready in serve_all(rig) if found_in == "nothing, all at once" else ():
        sources.update(ready.sources)
    # Without this rule a model with a state transferred 16,200 tokens.
    assert sources["transfer"] == 10 * 20 + (1600 if found_in.startswith("nothing") else 0)
    assert sum(sources.values()) == 10 * 1620


POSITIONS = st.sets(st.integers(0, 7))
TIERS_OF = st.fixed_dictionaries({"device": POSITIONS, "host": POSITIONS, "storage": POSITIONS})


@pytest.mark.slow
@given(
    lengths=st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(0, 8)),
    holes=st.fixed_dictionaries({"window": TIERS_OF, "state": TIERS_OF}),
    width=st.integers(1, 9),
    prompt_tokens=st.integers(1, 17),
)
@examples(300)
def test_any_holes_leave_the_full_kv_as_without_components_and_tails_come_from_the_nearest_tier(
    lengths: tuple[int, int, int], holes: dict[str, dict[str, set[int]]], width: int, prompt_tokens: int
) -> None:
    past, prompt = bytes(range(16)), bytes(range(prompt_tokens))
    on_device, on_host, in_storage = lengths
    restored: dict[bool, int] = {}
    for with_components in (False, True):
        components = (window(width, 40, 40), state(20, 20)) if with_components else ()
        fields = {"page_size": 2, "key_bytes": 2, "device_pages": 60, "host_pages": 60}
        rig = Rig(components=components, **fields, prefetch_threshold_tokens=0)  # type: ignore[arg-type]  # Not a number.
        _fill(rig, past, max(on_device, on_host), on_device, on_host)
        rig.attach_storage(component_pages=with_components)
        if with_components:
            _place(rig, past, holes)
        rig.arrive("a", prompt)
        stored = tuple(
            events.StoredComponent(name, tuple((at, at + 1) for at in sorted(tiers["storage"])))
            for name, tiers in holes.items()
        )
        for query in rig.take_all(commands.QueryStorage):
            here = stored if query.components_first else ()
            rig.answer(query, max(0, min(in_storage - query.first, query.count)), component_pages=here)
        promise = rig.take(commands.SendPromise)
        restored[with_components] = promise.promised_tokens
        if with_components:
            _expect_tails(rig, promise, prompt_tokens, width, holes, (on_device, on_host))
        rig.pending.append(promise)
        rig.settle()
        rig.step(events.AbortRequested, request_id="a")
        rig.settle()
        rig.expect_nothing_held()
    assert restored[True] == restored[False]


def _fill(rig: Rig, past: bytes, pages: int, on_device: int, on_host: int) -> None:
    """Leave the first `on_device` and `on_host` full pages of `past` in the caches, in nodes of one page."""
    index = rig.core.state.index
    if not pages:
        return
    if on_host:
        ready = ready_with(rig, "past", past[: 2 * on_host])
        rig.step(events.FinishRequested, request_id="past", keys=past[: 2 * on_host], tokens=2 * on_host)
        rig.settle()
        assert ready.request_id == "past"
        rig.flush("l1")
    if on_device:
        # Prefill brings them, or a copy from the host.
        rig.arrive("again", past[: 2 * on_device])
        rig.settle()
        rig.step(events.AbortRequested, request_id="again")
        rig.settle()
    for node in list(index.nodes()):
        while node.page_count > 1:
            index.split(node, node.page_count - 1)
            break
    while wide := [node for node in index.nodes() if node.page_count > 1]:
        index.split(wide[0], 1)


def _place(rig: Rig, past: bytes, holes: dict[str, dict[str, set[int]]]) -> None:
    """Put component pages at exactly these positions, where there are full pages of the tier."""
    components = rig.core.state.components
    assert components is not None
    for name, tiers in holes.items():
        for tier in ("device", "host"):
            for node in list(components.index.nodes()):
                if getattr(node, tier) is not None and node.depth_pages - 1 in tiers[tier]:
                    pages = components.take(tier, name, 1)  # type: ignore[arg-type]  # One of the two names.
                    assert pages is not None
                    components.insert(tier, name, node, node.depth_pages - 1, pages)  # type: ignore[arg-type]


def _expect_tails(
    rig: Rig,
    promise: commands.SendPromise,
    prompt_tokens: int,
    width: int,
    holes: dict[str, dict[str, set[int]]],
    lengths: tuple[int, int],
) -> None:
    """Compare the source of each position with a model that looks at one position at a time."""
    assert promise.component_pages is not None
    copies, fetches = (
        rig.take_all(commands.CopyPages, of_components=True),
        rig.take_all(commands.FetchPages, of_components=True),
    )
    pages, full = -(-prompt_tokens // 2), prompt_tokens // 2
    for asked in promise.component_pages:
        tiers = holes[asked.component]
        first = max(0, prompt_tokens - (width if asked.component == "window" else 1)) // 2
        found = {"device": 0, "host": 0, "storage": 0}
        at = first
        while at < full:
            # A copy from the host to the device exists only where the device matched so far: a prefix.
            if at in tiers["device"] and at < lengths[0]:
                found["device"] += 1
            elif at in tiers["host"] and at < lengths[1]:
                found["host"] += 1
            elif at in tiers["storage"]:
                found["storage"] += 1
            else:
                break
            at += 1
        assert (at, pages - at) == (asked.first, len(asked.pages))
        ours = [copy for copy in copies if copy.component == asked.component]
        assert found["host"] == sum(len(copy.source_pages) for copy in ours if copy.source == "host")
        clones = sum(len(copy.source_pages) for copy in ours if copy.source == "device")
        assert clones == (found["device"] if asked.component == "state" else 0)
        read = [fetch for fetch in fetches if fetch.component == asked.component]
        assert found["storage"] == sum(len(fetch.positions) for fetch in read)
    rig.pending += [*copies, *fetches]
