"""The fuzz itself: every target runs, knows every message, and a finding names its seed."""

from __future__ import annotations

import subprocess
import sys
from random import Random

import pytest

from tests.fuzz.targets import TARGETS, kinds_without_seed


@pytest.mark.parametrize("name", TARGETS)
def test_a_few_inputs_of_each_target_are_no_finding(name: str) -> None:
    for seed in range(300):
        TARGETS[name](Random(seed))


def test_every_message_is_a_seed_of_mutations() -> None:
    assert kinds_without_seed() == set()


def test_the_command_prints_its_seed_and_what_it_tried() -> None:
    # A process of its own, as CI runs it: what only pytest's configuration sets up is missing there.
    command = [sys.executable, "-m", "tests.fuzz", "--target", "dials", "--seconds", "0", "--seed", "5"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["fuzz: seed 5, dials", "fuzz: no finding in 200 of dials"]


def test_a_finding_names_the_input_that_repeats_it(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from tests.fuzz import __main__ as fuzz

    def fails(source: Random) -> None:
        assert source.random() != Random(7).random(), "found"

    monkeypatch.setitem(TARGETS, "dials", fails)
    monkeypatch.setattr(sys, "argv", ["fuzz", "--target", "dials", "--seconds", "0", "--seed", "5"])
    monkeypatch.setattr(fuzz.logging, "disable", lambda: None)
    assert fuzz.main() == 1
    assert "--target dials --seed 7 --one" in capsys.readouterr().out
