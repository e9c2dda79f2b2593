"""The core against any order of events: `tests/support/core_machine.py` plays every part."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.support.core_machine import CoreMachine

CoreMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=80, suppress_health_check=list(HealthCheck)
)
TestCore = CoreMachine.TestCase
