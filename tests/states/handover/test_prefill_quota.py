"""The bound on the device pages of one prefill: what is admitted beside what it is charged with, to the page."""

from __future__ import annotations

import pytest

from tidekv.states.errors import BrokenInvariant
from tidekv.states.pages.prefill_quota import PrefillQuota


@pytest.mark.parametrize(("held", "pages", "admitted"), [(4, 6, True), (4, 7, False), (9, 1, True), (10, 1, False)])
def test_a_prefill_is_admitted_up_to_its_limit_and_no_page_beyond(held: int, pages: int, admitted: bool) -> None:
    quota = PrefillQuota(10)
    quota.charge("a", held)
    assert quota.admits("a", pages) is admitted
    assert quota.admits("b", pages), "another prefill has a quota of its own"
    assert quota.admits("a", 0) and quota.admits("", 99), "what needs no page, and what names no prefill"


def test_a_prefill_without_a_charge_is_admitted_with_any_number_of_pages_once() -> None:
    quota = PrefillQuota(10)
    assert quota.admits("a", 50)
    quota.charge("a", 50)
    assert not quota.admits("a", 1)
    quota.discharge("a", 50)
    assert quota.held == {} and quota.admits("a", 50)


def test_a_part_of_a_charge_stays() -> None:
    quota = PrefillQuota(10)
    quota.charge("a", 4)
    quota.charge("a", 3)
    quota.discharge("a", 4)
    assert quota.held == {"a": 3} and quota.admits("a", 7) and not quota.admits("a", 8)
    with pytest.raises(BrokenInvariant, match="is charged with 3 pages, not 4"):
        quota.discharge("a", 4)
    assert quota.held == {"a": 3}


def test_without_a_limit_charges_are_counted_only() -> None:
    quota = PrefillQuota(None)
    quota.charge("a", 10**6)
    assert quota.admits("a", 10**6) and quota.held == {"a": 10**6}
