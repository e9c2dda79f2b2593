"""The core against any order of events: `tests/support/core_machine.py` plays every part."""

from __future__ import annotations

from hypothesis import HealthCheck

from tests.support.core_machine import CoreMachine
from tests.support.thorough import examples

CoreMachine.TestCase.settings = examples(80, stateful_step_count=80, suppress_health_check=list(HealthCheck))
TestCore = CoreMachine.TestCase
