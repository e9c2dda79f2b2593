"""The admission queue by itself: the order in which waiting requests are tried."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.support.instructions import growth_of, instructions_of
from tidekv.states.records.request_parts import Admission
from tidekv.states.request.admission_queue import Queue
from tidekv.states.settings import CoreSettings


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=12), st.integers(1, 8))
def test_one_lane_is_tried_as_if_it_were_merged_with_another(waiting: list[tuple[int, bool]], scan_max: int) -> None:
    settings = CoreSettings(page_size=1, key_bytes=1, device_pages=1, passes_max=2, admission_scan_max=scan_max)

    def tried(*others: Any) -> list[int]:
        queue = Queue(settings)
        for arrival, (passed, over_quota) in enumerate(waiting):
            queue.add(_waiting(arrival=arrival, passed=passed, over_quota=over_quota))
        for other in others:
            queue.add(other)
        return [request.arrival for request in queue.candidates(2.0) if request not in others]

    assert tried() == tried(_waiting(arrival=99, priority=-9, prefill="another"))


@given(
    st.lists(
        st.tuples(st.integers(-3, 3), st.sampled_from(["one", "two", "three"]), st.booleans(), st.booleans()),
        max_size=12,
    )
)
def test_waiting_requests_are_tried_by_priority_and_age(waiting: list[tuple[int, str, bool, bool]]) -> None:
    settings = CoreSettings(page_size=1, key_bytes=1, device_pages=1, ageing_s=2.0)
    queue, requests = Queue(settings), []
    for arrival, (priority, prefill, over_quota, leaves) in enumerate(waiting):
        fields = {"priority": priority, "prefill": prefill, "over_quota": over_quota, "arrived_at_s": arrival // 2}
        request = _waiting(arrival=arrival, **fields)
        queue.add(request)
        requests += [(request, leaves)]
    for request, leaves in requests:
        if leaves:
            queue.remove(request)
    left = [request for request, leaves in requests if not leaves]
    left.sort(key=lambda request: (-(request.priority + (100.0 - request.arrived_at_s) / 2.0), request.arrival))
    expected, held_back = [], set()
    for request in left:
        if request.prefill not in held_back:
            expected.append(request)
        if request.admission.over_quota:
            held_back.add(request.prefill)
    assert list(queue.candidates(100.0)) == expected
    assert len(queue) == len(left) == len(list(queue))


def test_the_first_candidate_costs_the_same_whatever_waits_behind_it() -> None:
    def cost_at(count: int) -> int:
        queue = _queue_of(count)
        return instructions_of(lambda: next(queue.candidates(2.0)))

    assert growth_of(cost_at, small=64, large=4096) == 1


def test_a_request_leaves_the_queue_without_a_look_at_the_others() -> None:
    queue = _queue_of(512, lines=1)
    leaving = list(queue)[-1]
    for request in queue:
        request.compared = 0
    queue.remove(leaving)
    assert sum(request.compared for request in queue) == 0


def _queue_of(count: int, *, lines: int = 128) -> Queue:
    queue = Queue(CoreSettings(page_size=1, key_bytes=1, device_pages=1))
    for arrival in range(count):
        queue.add(_waiting(arrival=arrival, priority=-(arrival % lines), prefill=f"prefill {arrival % lines}"))
    return queue


def _waiting(**fields: Any) -> Any:
    admission = Admission()
    for _ in range(fields.pop("passed", 0)):
        admission.pass_by()
    admission.note_quota(is_over=fields.pop("over_quota", False))
    known = {"priority": 0, "prefill": "one", "arrived_at_s": 1.0}
    return Waiting(admission=admission, **{**known, **fields})


class Waiting(SimpleNamespace):
    """A stand-in of a request, which counts its comparisons."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        self.compared += 1
        return self is other

    __hash__ = object.__hash__
