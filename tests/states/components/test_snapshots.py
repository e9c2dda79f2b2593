"""Snapshots of states: the places where the policy keeps them, their bounds, and the counts of what they bring."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.rig import Rig
from tests.support.component_stories import PROMPT, finish, ready_with, recompute_order, rig_with, state
from tests.support.thorough import examples
from tidekv.states import commands, events
from tidekv.states.component_specs import Component, SnapshotPolicy
from tidekv.states.errors import InvalidConfig

LONG = bytes(range(40))
NONE = SnapshotPolicy(prompt_end=False, output_end=False, branch_points=False)


def rig_of(policy: SnapshotPolicy, component: Component | None = None, **fields: int) -> Rig:
    sizes = {"device_pages": 200, "host_pages": 200, **fields}
    return rig_with(component or state(device=20, host=20), storage=False, snapshots=policy, **sizes)


def computed(rig: Rig, request_id: str, tokens: bytes) -> commands.Recompute:
    """The same; the caller computes and finishes, and leaves nothing of its own accord."""
    order = recompute_order(rig, request_id, tokens)
    rig.step(events.Recomputed, op=order.op, error="")
    finish(rig, rig.take(commands.ReportReady), tokens, component_pages=())
    rig.settle()
    return order


def counts(rig: Rig) -> dict[str, int]:
    assert rig.core.component_pages is not None
    return {what: count for what, count in rig.core.component_pages.snapshots.statistics()["state"].items() if count}


def kept(rig: Rig, tier: str = "device") -> list[int]:
    """The boundaries of all cached snapshots."""
    components = rig.core.state.components
    assert components is not None
    tiers = components.device if tier == "device" else components.host
    nodes = list(components.index.nodes())
    assert all(at == node.depth_pages - 1 for node in nodes for at in tiers["state"].pages_of(node))
    return sorted(at + 1 for node in nodes for at in tiers["state"].pages_of(node))


def leave(rig: Rig, request_id: str, tokens: bytes, *boundaries: int, kind: type[events.Event] | None = None) -> None:
    """A prompt comes from prefill, and the caller leaves snapshots of these boundaries."""
    ready = ready_with(rig, request_id, tokens)
    assert ready.component_pages is not None
    own = ready.component_pages[0].own
    left = tuple(
        events.ComponentLeft("state", boundary - 1, (page,)) for boundary, page in zip(boundaries, own, strict=False)
    )
    assert len(left) == len(boundaries)
    finish(rig, ready, tokens, kind or events.FinishRequested, component_pages=left)
    rig.settle()


def test_prompts_that_part_are_computed_from_where_they_part() -> None:
    rig = rig_of(SnapshotPolicy(per_request=2, prompt_end=False))
    # Three prompts begin with the same twelve pages. Nothing is known of that at the first one.
    assert computed(rig, "a", LONG[:12] + b"aaaa").snapshots == {"state": {}}
    second = computed(rig, "b", LONG[:12] + b"bbbb")
    assert second.first == 0 and second.snapshots is not None and list(second.snapshots["state"]) == [12]
    third = computed(rig, "c", LONG[:12] + b"cccc")
    assert third.first == 12 and third.snapshots == {"state": {}}
    assert third.resume_from is not None
    assert list(third.resume_from[0].pages) == list(second.snapshots["state"].values())
    assert counts(rig) == {"kept_branch": 1, "resumed": 1, "resumed_tokens": 12}
    rig.expect_nothing_held()


def test_without_the_policy_every_prompt_is_computed_from_its_first_token() -> None:
    rig = rig_of(SnapshotPolicy(per_request=2, prompt_end=False, branch_points=False))
    assert [computed(rig, name, LONG[:12] + name.encode() * 4).first for name in "abc"] == [0, 0, 0]
    assert not kept(rig)


def test_a_computation_takes_branches_first_then_the_prompts_end_then_the_last_intervals() -> None:
    policy = SnapshotPolicy(every_pages=5, per_request=4)
    rig = rig_of(policy)
    order = computed(rig, "a", LONG[:23])
    assert order.snapshots is not None and list(order.snapshots["state"]) == [23, 20, 15, 10]
    assert kept(rig) == [10, 15, 20, 23]
    # It goes on from the last one in front of the place where they part, takes what is not there yet, and no others.
    order = computed(rig, "b", LONG[:22] + b"xyz" * 4)
    assert order.first == 20 and order.snapshots is not None
    assert list(order.snapshots["state"]) == [22, 34, 30, 25]
    assert counts(rig) == {
        "kept_branch": 1, "kept_prompt_end": 2, "kept_interval": 5, "resumed": 1, "resumed_tokens": 20,
    }  # fmt: skip
    rig.expect_nothing_held()


def test_spare_records_are_an_option_and_never_make_a_request_wait() -> None:
    for spare, pool, expected in ((0, 9, 1), (3, 9, 4), (3, 2, 2), (3, 1, 1)):
        rig = rig_of(SnapshotPolicy(per_request=spare), state(device=pool))
        ready = ready_with(rig, "a", PROMPT)
        assert ready.component_pages is not None and len(ready.component_pages[0].own) == expected
        finish(rig, ready, PROMPT)
        rig.settle()
        rig.expect_nothing_held()
    rig = rig_of(SnapshotPolicy(per_request=3))
    rig.arrive("uncached", PROMPT, cache=False)
    (ready,) = (told for told in rig.settle() if isinstance(told, commands.ReportReady))
    assert ready.component_pages is not None and len(ready.component_pages[0].own) == 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"output_end": True}, {"kept_output_end": [9]}),
        ({"every_pages": 4}, {"kept_interval": [4]}),
        ({"every_pages": 3}, {"kept_interval": [3, 9]}),
        ({"every_pages": 3, "output_end": True}, {"kept_interval": [3], "kept_output_end": [9]}),
    ],
)
def test_what_callers_leave_is_kept_where_the_policy_wants_it(
    changes: dict[str, int], expected: dict[str, list[int]]
) -> None:
    policy = SnapshotPolicy(
        **{"prompt_end": False, "output_end": False, "branch_points": False, "per_request": 3, **changes}  # type: ignore[arg-type]  # Each is of its type.
    )
    rig = rig_of(policy)
    ready = ready_with(rig, "a", LONG[:2])
    rig.step(events.GrowthTaken, request_id="a", page_count=0, wanted=7)
    given = rig.take(commands.GiveReserve)
    rig.step(events.GrowthTaken, request_id="a", page_count=len(given.pages))
    assert ready.component_pages is not None
    own = ready.component_pages[0].own
    left = tuple(events.ComponentLeft("state", at - 1, (page,)) for at, page in zip((9, 3, 4, 5), own, strict=True))
    rig.step(events.FinishRequested, request_id="a", keys=LONG[:9], tokens=9, component_pages=left)
    rig.settle()
    assert kept(rig) == sorted(at for places in expected.values() for at in places)
    declined = 4 - len(kept(rig))
    assert counts(rig) == {
        **{name: len(places) for name, places in expected.items()}, **({"declined": declined} if declined else {})
    }  # fmt: skip
    rig.expect_nothing_held()


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({}, "declined"),
        ({"prompt_end": True}, "kept_prompt_end"),
        ({"output_end": True}, "kept_output_end"),
        ({"prompt_end": True, "output_end": True}, "kept_prompt_end"),
        ({"every_pages": 4}, "kept_interval"),
        ({"branch_points": True}, "declined"),
    ],
)
def test_a_snapshot_at_a_prompts_end_is_kept_as_that_or_as_the_end_of_an_output_of_no_page(
    changes: dict[str, int], place: str
) -> None:
    policy = SnapshotPolicy(**{"prompt_end": False, "output_end": False, "branch_points": False, **changes})  # type: ignore[arg-type]  # Each is of its type.
    rig = rig_of(policy)
    leave(rig, "a", PROMPT, 8)
    assert counts(rig) == {place: 1}


def test_a_snapshot_that_a_caller_leaves_where_cached_prompts_part_is_kept_as_a_branch() -> None:
    rig = rig_of(SnapshotPolicy(prompt_end=False, output_end=False, branch_points=True, per_request=1))
    leave(rig, "a", PROMPT)
    # Nothing parts after four pages yet.
    leave(rig, "b", PROMPT + b"i", 4)
    assert counts(rig) == {"declined": 1}
    leave(rig, "c", PROMPT[:4] + b"xyz", 4)
    assert counts(rig) == {"declined": 1, "kept_branch": 1} and kept(rig) == [4]


def test_a_retracted_request_continues_from_its_end_whatever_the_policy_is() -> None:
    rig = rig_of(NONE)
    leave(rig, "a", PROMPT, 8)
    assert not kept(rig)
    leave(rig, "b", PROMPT, 8, kind=events.RetractRequested)
    assert kept(rig) == kept(rig, "host") == [8]


def test_snapshots_are_bounded_and_leave_by_themselves_the_least_recently_used_first() -> None:
    bounded = Component(
        name="state", kind="state", device_pages=20, host_pages=20, device_snapshots_max=2, host_snapshots_max=1
    )
    rig = rig_of(SnapshotPolicy(), bounded)
    # Each of them goes on from the one before; all four share a path of the tree.
    for end in (4, 8, 12):
        leave(rig, str(end), LONG[:end], end)
    assert kept(rig) == [8, 12] and kept(rig, "host") == [12]
    # A prompt that ends at 8 uses the older one, so the younger one is the next to go.
    rig.arrive("again", LONG[:8])
    rig.settle()
    rig.abort("again")
    leave(rig, "16", LONG[:16], 16)
    assert kept(rig) == [8, 16] and kept(rig, "host") == [16]
    # Full pages are all where they were.
    assert rig.core.state.index.probe_prefix("", LONG[:16]) == (16, 0)
    assert counts(rig) == {"kept_prompt_end": 4, "hits_device": 1, "evicted_device": 2, "evicted_host": 3}
    rig.settle()
    rig.expect_nothing_held()


def test_a_bound_of_nothing_keeps_none_and_fails_nothing() -> None:
    nothing = Component(
        name="state", kind="state", device_pages=20, host_pages=20, device_snapshots_max=0, host_snapshots_max=0
    )
    rig = rig_of(SnapshotPolicy(per_request=2), nothing)
    leave(rig, "a", LONG[:8], 8)
    assert computed(rig, "b", LONG[:12]).snapshots == {"state": {}}
    assert not kept(rig) and counts(rig)["declined"] == 1
    rig.expect_nothing_held()


def test_hits_are_counted_by_the_tier_that_had_the_record() -> None:
    rig = rig_of(SnapshotPolicy())
    leave(rig, "a", LONG[:8], 8)
    for flushed, tier in (((), "device"), (("l1",), "host")):
        if flushed:
            rig.flush(*flushed)
        rig.arrive("b", LONG[:8])
        rig.settle()
        rig.abort("b")
        rig.settle()
        assert counts(rig)[f"hits_{tier}"] == 1


def test_bounds_are_for_states_alone() -> None:
    with pytest.raises(InvalidConfig, match="'w', a window, cannot keep at most 3 snapshots"):
        Component(name="w", kind="window", window_tokens=3, device_pages=9, device_snapshots_max=3)
    with pytest.raises(InvalidConfig, match="cannot keep at most -1 snapshots"):
        Component(name="s", kind="state", device_pages=9, host_snapshots_max=-1)


PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9).map(bytes), min_size=1, max_size=8)


@given(
    prompts=PROMPTS,
    policy=st.builds(
        SnapshotPolicy,
        every_pages=st.integers(0, 3),
        prompt_end=st.booleans(),
        branch_points=st.booleans(),
        per_request=st.integers(0, 3),
    ),
    bound=st.integers(0, 4),
)
@examples(150)
def test_any_prompts_continue_from_a_snapshot_that_a_policy_has_kept(
    prompts: list[bytes], policy: SnapshotPolicy, bound: int
) -> None:
    component = Component(name="state", kind="state", device_pages=12, device_snapshots_max=bound)
    rig = rig_of(policy, component, host_pages=0)
    taken: dict[int, bytes] = {}
    for number, prompt in enumerate(prompts):
        before = kept(rig)
        order = computed(rig, str(number), prompt)
        assert order.first == 0 or order.first in before
        assert order.resume_from is not None and order.snapshots is not None
        # The record that it continues from is the one that was written for exactly these tokens.
        assert [taken[page] for page in order.resume_from[0].pages] == ([prompt[: order.first]] if order.first else [])
        wanted = order.snapshots["state"]
        assert len(wanted) <= policy.per_request and all(order.first < at <= len(prompt) for at in wanted)
        taken.update({page: prompt[:at] for at, page in wanted.items()})
        assert len(kept(rig)) <= bound
        rig.expect_nothing_held()
    totals = counts(rig)
    assert sum(totals.get(f"kept_{place}", 0) for place in ("branch", "prompt_end", "interval")) == len(
        kept(rig)
    ) + totals.get("evicted_device", 0)
