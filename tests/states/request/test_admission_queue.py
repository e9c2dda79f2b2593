"""The admission queue by itself: the order in which waiting requests are tried."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

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


def _waiting(**fields: Any) -> Any:
    admission = Admission()
    for _ in range(fields.pop("passed", 0)):
        admission.pass_by()
    admission.note_quota(is_over=fields.pop("over_quota", False))
    known = {"priority": 0, "prefill": "one", "arrived_at_s": 1.0}
    return SimpleNamespace(admission=admission, **{**known, **fields})
