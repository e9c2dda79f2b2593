"""The look at known holes of dependencies: what is found fails the check, what cannot be asked for does not."""

from __future__ import annotations

import json
import sys

import pytest

from tools import audit

NOT_ASKED = {"name": "odd", "skip_reason": "local"}


def vulnerable(*ids: str) -> dict[str, object]:
    holes = [{"id": name, "aliases": [f"CVE-{name}"], "fix_versions": ["1.1"]} for name in ids]
    return {"dependencies": [{"name": "six", "version": "1.0", "vulns": holes}, NOT_ASKED]}


def saying(output: str, code: int = 0) -> list[str]:
    program = f"import sys; print({output!r}); print('no route', file=sys.stderr); sys.exit({code})"
    return [sys.executable, "-c", program]


def test_a_known_hole_fails_the_check_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main(saying(json.dumps(vulnerable("A-1")), 1)) == 1
    assert capsys.readouterr().out == "audit: six 1.0: A-1, mended in 1.1\n"


def test_no_hole_and_an_accepted_one_pass(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "ACCEPTED", {"CVE-A-1": "not reachable"})
    assert audit.main(saying(json.dumps(vulnerable("A-1")), 1)) == 0
    assert audit.main(saying(json.dumps(vulnerable()))) == 0
    assert capsys.readouterr().out == 2 * "audit: no known holes\n"


def test_a_database_that_is_not_reached_is_said_and_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main(saying("", 1)) == 0
    assert "skipped, the advisory database is not reached: no route" in capsys.readouterr().out
    assert audit.main([sys.executable, "-c", "import time; time.sleep(60)"], limit_s=0.1) == 0
    assert "no answer within 0.1 s" in capsys.readouterr().out
