"""The storage policy and the keyword arguments that change it."""

from __future__ import annotations

from typing import get_type_hints

from tidekv.states.storage_policy import PolicyChanges, StoragePolicy


def test_each_field_of_the_policy_can_be_changed_and_has_one_type() -> None:
    assert get_type_hints(PolicyChanges, include_extras=True) == get_type_hints(StoragePolicy, include_extras=True)
