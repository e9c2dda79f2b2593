"""`tidekv simulate`: what it prints, what it refuses, and that a violation is seen from outside."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from simulation.campaign import shapes_of
from simulation.faults import FAULTS
from tidekv.engine.cli.main import app
from tidekv.states.errors import InvalidConfig
from tidekv.states.records.request import Load


def simulate(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["simulate", "--jobs", "1", *arguments])


def test_it_counts_what_was_injected_and_how_requests_ended() -> None:
    done = simulate("--seed", "5", "--seeds", "2", "--requests", "60")
    assert done.exit_code == 0, done.output
    assert "seeds 5 to 6, 60 requests each, faults: all" in done.output
    assert "120 requests over 2 seeds" in done.output
    assert re.search(r"READY\s*│\s*\d+", done.output)
    assert done.output.splitlines()[-1] == "no violation"


def test_only_the_faults_that_were_named_are_injected() -> None:
    chosen = sorted(FAULTS)[:2]
    done = simulate("--seed", "5", "--requests", "150", "--faults", ", ".join(chosen))
    assert done.exit_code == 0, done.output
    counts = dict(re.findall(r"│\s*(\w+)\s*│\s*([\d,]+)\s*│", done.output))
    assert {name for name in FAULTS if counts.get(name, "0") != "0"} <= set(chosen)


def test_none_injects_nothing_and_every_request_is_ready() -> None:
    done = simulate("--seed", "5", "--requests", "60", "--faults", "none")
    assert "0 faults of 0 kinds" in done.output
    assert done.exit_code == 0


def test_operations_on_components_are_counted() -> None:
    done = simulate("--requests", "60", "--seed", "3")
    assert done.exit_code == 0, done.output
    found = re.search(r"^operations on components: (.*)$", done.output, re.MULTILINE)
    assert found is not None and "tails_sent " in found[1]


def test_a_seed_is_a_run_on_one_rank_and_one_on_several_unless_their_number_is_given() -> None:
    assert [shape.requests for shape in shapes_of(7, 40)] == [30, 10]
    assert "40 requests over 1 seeds" in simulate("--seed", "7", "--requests", "40").output
    assert "40 requests over 1 seeds" in simulate("--seed", "7", "--requests", "40", "--ranks", "1").output
    assert "40 requests over 1 seeds" in simulate("--seed", "7", "--requests", "40", "--faults", "abort").output


def test_a_fresh_seed_is_printed_and_gives_the_same_run_again() -> None:
    fresh = simulate("--seed", "-1", "--requests", "40")
    (seed,) = re.findall(r"seeds (\d+) to \1, 40 requests", fresh.output)
    again = simulate("--seed", seed, "--requests", "40")
    events = [re.search(r"([\d,]+) events, ([\d,]+) faults", run.output) for run in (fresh, again)]
    assert events[0] and events[1] and events[0].groups() == events[1].groups()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--faults", "meteor"], "there is no fault 'meteor'; allowed: all, none, "),
        (["--without", "meteor"], "there is no fault 'meteor'"),
        (["--journals", "/nowhere"], "no directory"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(arguments: list[str], words: str) -> None:
    refused = simulate(*arguments)
    assert isinstance(refused.exception, InvalidConfig)
    assert words in str(refused.exception)


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_violation_is_printed_with_the_seed_that_repeats_it_and_stops_no_other_seed(
    ranks: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def forgets(self: Load, index: object) -> None:
        self.lock = None

    monkeypatch.setattr(Load, "unlock", forgets)
    done = simulate(
        "--seed", "4", "--seeds", "3", "--requests", "120", "--ranks", ranks, "--owned", "--journals", str(tmp_path)
    )
    assert done.exit_code == 1
    (failed, seeds) = re.findall(r"VIOLATIONS in (\d+) of (\d+) seeds", done.output)[0]
    assert (int(failed) > 0, seeds) == (True, "3")
    assert len(re.findall(r"^seed \d+, 120 requests.*, faults 'all': ", done.output, re.MULTILINE)) == int(failed)
    assert "and what followed from each" in done.output
    seed, smaller = re.findall(r"^seed (\d+) fails like this with (\d+) requests", done.output, re.MULTILINE)[0]
    assert int(smaller) <= 120
    assert (tmp_path / f"simulation-{seed}.journal").is_file()
    again = re.search(rf"again: tidekv simulate (--seed {seed} .*)$", done.output, re.MULTILINE)
    assert again is not None
    repeated = simulate(*shlex.split(again[1]), "--journals", str(tmp_path))
    assert repeated.exit_code == 1
    assert f"seed {seed}, {smaller} requests" in repeated.output
