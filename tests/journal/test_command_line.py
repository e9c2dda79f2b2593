"""`tidekv replay`: what it prints and how it exits."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import msgspec
import pytest

from tidekv import Replayer
from tidekv.engine.cli import main
from tidekv.engine.journal.format import seal
from tidekv.engine.trace.request_traces import read_request_traces
from tidekv.states.pages.page_pool import PagePool


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command line."""
    monkeypatch.setattr("sys.argv", ["tidekv", *map(str, arguments)])
    with pytest.raises(SystemExit) as raised:
        main.main()
    printed = capsys.readouterr()
    return int(raised.value.code or 0), printed.out, printed.err


def seal_by_crc(body: bytes) -> bytes:
    """A header as versions 2 to 5 wrote it."""
    return b'%b,"crc":"%08x"}\n' % (body[:-1], zlib.crc32(body))


def _empty(path: Path, content: bytes) -> None:
    path.write_bytes(b"")


def _cut(path: Path, content: bytes) -> None:
    path.write_bytes(content[: content.rindex(b"\n", 0, len(content) * 2 // 3) + 50])


def _cut_before_the_first_event(path: Path, content: bytes) -> None:
    path.write_bytes(content[: content.index(b"\n") + 100])


def _header_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content[: content.index(b"\n") + 1])


def _without_its_end(path: Path, content: bytes) -> None:
    path.write_bytes(b"".join(content.splitlines(keepends=True)[:-1]))


def _without_its_first_file(path: Path, content: bytes) -> None:
    path.rename(path.with_name(path.name + ".3"))


def _cut_in_the_header(path: Path, content: bytes) -> None:
    path.write_bytes(content[:200])


def _of_version_2(path: Path, content: bytes) -> None:
    path.write_bytes(seal_by_crc(b'{"event":"run","version":2,"run":"0011"}'))


def _of_version_5(path: Path, content: bytes) -> None:
    path.write_bytes(seal_by_crc(b'{"event":"run","version":5,"run":"0011"}'))


def _of_a_later_version(path: Path, content: bytes) -> None:
    path.write_bytes(seal(b'{"event":"run","version":99,"new":true}', 0)[0])


def _of_other_events(path: Path, content: bytes) -> None:
    header = msgspec.json.decode(content[: content.index(b"\n")])
    del header["sum"]
    path.write_bytes(seal(msgspec.json.encode({**header, "schema": "0" * 16}), 0)[0])


def _an_image(path: Path, content: bytes) -> None:
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 20)


def _a_text(path: Path, content: bytes) -> None:
    path.write_text("Dear diary,\n")


def _missing(path: Path, content: bytes) -> None:
    path.unlink()


def _a_directory(path: Path, content: bytes) -> None:
    path.unlink()
    path.mkdir()


def _a_changed_digit(path: Path, content: bytes) -> None:
    path.write_bytes(content.replace(b'"turn":0,', b'"turn":1,', 1))


BAD = {
    _empty: "empty",
    _cut: "cut off",
    _cut_in_the_header: "cut off",
    _cut_before_the_first_event: "cut off",
    _header_alone: "end record is missing",
    _without_its_end: "end record is missing",
    _without_its_first_file: "begins at segment 3",
    _of_version_2: "version 2",
    _of_version_5: "version 5",
    _of_a_later_version: "version 99",
    _of_other_events: "event types",
    _an_image: "no tidekv journal",
    _a_text: "no tidekv journal",
    _missing: "no journal",
    _a_directory: "directory",
    _a_changed_digit: ":2:",
}


SHOWN_IN_PART = (_cut, _without_its_end)


@pytest.mark.parametrize("make", BAD, ids=lambda make: make.__name__.strip("_"))
@pytest.mark.parametrize("command", ["replay", "explain", "timeline"])
def test_bad_input_is_one_clear_line_and_exit_code_2(simulate, monkeypatch, capsys, make, command) -> None:
    path = simulate(1, 12).path
    make(path, path.read_bytes())
    code, out, err = run(monkeypatch, capsys, command, path)
    assert code == 2
    assert err.count("\n") == 1, err
    assert err.startswith("tidekv: ")
    assert BAD[make] in err
    # What stands before a missing tail is shown all the same.
    assert bool(out) is (make in SHOWN_IN_PART)


@pytest.mark.parametrize("command", ["replay", "explain", "timeline"])
@pytest.mark.parametrize("make", [_cut, _without_its_end, _header_alone], ids=lambda make: make.__name__.strip("_"))
def test_missing_tail_may_be_declared_good_where_an_event_is_left(simulate, monkeypatch, capsys, make, command) -> None:
    path = simulate(1, 12).path
    make(path, path.read_bytes())
    code, out, err = run(monkeypatch, capsys, command, path, "--torn-ok")
    assert code == (0 if make in SHOWN_IN_PART else 2)
    assert bool(out) is (make in SHOWN_IN_PART)
    assert err.count("\n") == 1


def test_identical_journal_exits_0(simulate, monkeypatch, capsys) -> None:
    tape = simulate(1, 12)
    code, out, err = run(monkeypatch, capsys, "replay", tape.path)
    assert (code, err) == (0, "")
    assert out == f"identical: {len(tape.steps)} events, final index, pools and counters\n"


def test_divergence_exits_1_and_shows_both_sides(simulate, monkeypatch, capsys) -> None:
    path = simulate(1, 30).path
    take = PagePool.take
    with monkeypatch.context() as patch:
        patch.setattr(PagePool, "take", lambda self, count: take(self, count)[::-1])
        code, _, err = run(patch, capsys, "replay", path)
    assert code == 1
    assert "recorded: {" in err
    assert "replayed: {" in err


@pytest.mark.parametrize(("command", "shown"), [
    ("replay", "identical as far as the journal goes"), ("explain", "Time by state"), ("timeline", "READY"),
])  # fmt: skip
def test_the_good_part_of_a_damaged_journal_is_shown(simulate, monkeypatch, capsys, command: str, shown: str) -> None:
    path = simulate(1, 30).path
    lines = path.read_bytes().splitlines(keepends=True)
    at = len(lines) * 3 // 4
    lines[at] = lines[at].replace(b'"turn":', b'"turn": ', 1)
    path.write_bytes(b"".join(lines))
    code, out, err = run(monkeypatch, capsys, command, path, "--torn-ok")
    assert code == 2
    assert shown in out
    assert f"{path.name}:{at + 1}: " in err
    assert err.count("\n") == 1


def test_until_beyond_the_end_is_refused(simulate, monkeypatch, capsys) -> None:
    tape = simulate(1, 12)
    code, out, err = run(monkeypatch, capsys, "replay", tape.path, "--until", len(tape.steps))
    assert (code, out) == (2, "")
    assert f"--until must be below {len(tape.steps)}" in err


def test_explain_has_times_of_day(simulate, monkeypatch, capsys) -> None:
    _, out, _ = run(monkeypatch, capsys, "explain", simulate(1, 12).path, "--request", "r1")
    assert re.search(r"It arrived at 1970-01-01 00:0\d:\d\d\.\d{3} UTC", out)


def test_timeline_shows_failures_first_the_slowest_alone_and_letters_without_color(
    simulate, monkeypatch, capsys
) -> None:
    path = simulate(1, 60).path
    traces = read_request_traces(Replayer(path)).all
    monkeypatch.setenv("COLUMNS", "160")
    _, out, _ = run(monkeypatch, capsys, "timeline", path, "--limit", "0")
    ends = [word for line in out.splitlines() for word in ("READY", "FAILED") if f" {word} " in line.split("L1")[0]]
    ends = ends[: len(traces)]
    assert "FAILED" in ends
    assert ends == sorted(ends, key=lambda end: end != "FAILED")
    assert "t TRANSFER" in out
    assert "█" not in out
    _, out, _ = run(monkeypatch, capsys, "timeline", path, "--slowest", "2")
    assert "the 2 slowest of" in out


def test_until_shows_the_state(simulate, monkeypatch, capsys) -> None:
    path = simulate(1, 12).path
    code, out, _ = run(monkeypatch, capsys, "replay", path, "--until", 40)
    assert code == 0
    assert "identical: 41 events, stopped there" in out
    assert "live requests" in out
    assert "index" in out


def test_explain_and_timeline_of_one_request(simulate, monkeypatch, capsys, tmp_path) -> None:
    path = simulate(1, 12).path
    code, out, _ = run(monkeypatch, capsys, "explain", path, "--request", "r1")
    assert code == 0
    assert out.startswith("r1: ")
    assert "Time by state: " in out
    code, out, _ = run(monkeypatch, capsys, "timeline", path, "--request", "r1")
    assert code == 0
    assert "states" in out
    code, out, _ = run(monkeypatch, capsys, "timeline", path)
    assert code == 0
    assert "TRANSFER" in out


def test_explain_without_a_request_counts_failures_by_cause(simulate, monkeypatch, capsys) -> None:
    path = simulate(1, 60).path
    traces = read_request_traces(Replayer(path)).all
    causes = [trace.cause for trace in traces if trace.ended == "FAILED"]
    assert causes
    code, out, _ = run(monkeypatch, capsys, "explain", path)
    assert code == 0
    first = out.splitlines()[0]
    assert first.startswith(f"Failed requests: {len(causes)} (")
    assert all(f"{cause}: {causes.count(cause)}" in first for cause in causes)
    _, out, _ = run(monkeypatch, capsys, "explain", path, "--request", "r1")
    assert "Failed requests" not in out


def test_unknown_request_is_one_line_and_exit_code_2(simulate, monkeypatch, capsys) -> None:
    path = simulate(1, 12).path
    for command in ("explain", "timeline"):
        code, _, err = run(monkeypatch, capsys, command, path, "--request", "nobody")
        assert code == 2
        assert err.startswith("tidekv: there is no request 'nobody'")


def test_timeline_files_are_written(simulate, monkeypatch, capsys, tmp_path) -> None:
    path = simulate(1, 12).path
    page = tmp_path / "t.html"
    code, out, _ = run(monkeypatch, capsys, "timeline", path, "--html", page)
    assert code == 0
    assert str(page) in out
    assert page.stat().st_size > 10_000
    code, _, err = run(monkeypatch, capsys, "timeline", path, "--html", tmp_path / "no" / "t.html")
    assert (code, err.count("\n")) == (2, 1)
