"""The files of a journal: rotation, what was there before, a process that is killed, a disk that refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tidekv import InvalidConfig, JournalDamaged, JournalRefused, Replayer
from tidekv.engine.journal import Journal
from tidekv.engine.journal.format import ArrivalRecord, TurnLine
from tidekv.engine.journal.reader import JournalReader
from tidekv.engine.journal.segments import SegmentFiles
from tidekv.states import events
from tidekv.states.core import Core
from tidekv.states.settings import CoreSettings

SETTINGS = CoreSettings(page_size=2, key_bytes=2, device_pages=16)


def write(path: Path, requests: int, namespace: str = "", **options: int) -> tuple[Core, Journal]:
    """A journal of requests that arrive and are aborted."""
    core = Core(SETTINGS)
    journal = Journal(str(path), core, **options)
    for number in range(requests):
        for event in (
            events.RequestArrived(
                at_s=number,
                request_id=f"r{number}",
                request_number=number,
                keys=b"aabbcc",
                prompt_tokens=7,
                namespace=namespace,
            ),
            events.AbortRequested(at_s=number, request_id=f"r{number}"),
        ):
            journal.stepped(event, core.step(event))
            journal.end_turn()
    journal.close()
    return core, journal


def test_journal_is_written_and_replays(tmp_path: Path) -> None:
    path = tmp_path / "j"
    write(path, 200)
    assert Replayer(path).run().complete
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["j"]


def test_full_segments_go_on_in_further_files(tmp_path: Path) -> None:
    path = tmp_path / "j"
    write(path, 200, segment_bytes=10_000)
    names = {entry.name for entry in tmp_path.iterdir()}
    assert {"j", "j.1", "j.2"} <= names
    replayed = Replayer(path).run()
    assert (replayed.complete, replayed.events) == (True, 400)
    # Each further file belongs to the one before.
    (tmp_path / "j.1").rename(tmp_path / "aside")
    with pytest.raises(JournalDamaged, match="segment 1 is missing"):
        Replayer(path).run()
    (tmp_path / "j.2").rename(tmp_path / "j.1")
    with pytest.raises(JournalDamaged, match=r"j\.1:1:"):
        Replayer(path).run()
    with pytest.raises(JournalRefused, match="later segment"):
        Replayer(tmp_path / "aside")


def test_oldest_segments_are_deleted_and_the_rest_is_refused_clearly(tmp_path: Path) -> None:
    path = tmp_path / "j"
    write(path, 200, segment_bytes=10_000, segments_max=2)
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(JournalRefused, match="earlier ones were deleted"):
        Replayer(path)


def test_earlier_run_is_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "j"
    first, second = write(path, 3)[0], write(path, 4)[0]
    assert Replayer(path).run().events == 8
    assert Replayer(tmp_path / "j.previous").run().events == 6
    write(path, 5)
    assert Replayer(tmp_path / "j.previous").run().events == 8
    assert first is not second


def test_a_link_that_leads_nowhere_is_moved_aside_and_what_it_names_not_made(tmp_path: Path) -> None:
    (tmp_path / "j").symlink_to(tmp_path / "victim")
    (tmp_path / "j.1").symlink_to(tmp_path / "other victim")
    write(tmp_path / "j", 200, segment_bytes=4000)
    assert Replayer(tmp_path / "j").run().complete
    assert not (tmp_path / "victim").exists() and not (tmp_path / "other victim").exists()
    assert (tmp_path / "j.previous").is_symlink() and (tmp_path / "j.previous.1").is_symlink()


def test_a_file_that_appears_in_the_place_of_the_next_one_is_not_written_to(tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path / "j", segments_max=0, run_line=b"run")
    (tmp_path / "j.1").symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        files.begin_next()
    files.write([b"goes on"])
    files.close()
    assert not (tmp_path / "victim").exists()
    assert (tmp_path / "j").read_bytes() == b"rungoes on"


@pytest.mark.parametrize("tokens", [False, True])
def test_a_namespace_is_in_clear_only_where_tokens_are(tmp_path: Path, tokens: bool) -> None:
    write(tmp_path / "j", 3, "tenant-7/SALT-c0ffee", with_tokens=tokens)
    assert (b"SALT-c0ffee" in (tmp_path / "j").read_bytes()) == tokens
    replayer = Replayer(tmp_path / "j")
    assert replayer.run().complete
    write(tmp_path / "k", 1, "another", with_tokens=tokens)
    arrived = [
        Replayer(path).event_of(line.took[0]).namespace
        for path in (tmp_path / "j", tmp_path / "k")
        for line in JournalReader(path).lines()
        if isinstance(line, TurnLine) and isinstance(line.took[0], ArrivalRecord)
    ]
    assert len(arrived) == 4 and len(set(arrived)) == 2


def test_directory_gets_a_file_for_each_run(tmp_path: Path) -> None:
    journals = [write(tmp_path, 2)[1] for _ in range(3)]
    assert len({journal.path for journal in journals}) == 3
    assert all(Replayer(journal.path).run().complete for journal in journals)


def test_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="nowhere"):
        Journal(str(tmp_path / "nowhere" / "j"), Core(SETTINGS))


def test_what_is_no_regular_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    with pytest.raises(InvalidConfig, match="no regular file"):
        Journal(str(path), Core(SETTINGS))
    assert [entry.name for entry in tmp_path.iterdir()] == ["fifo"]


def test_half_a_character_in_a_text_does_not_end_the_journal(tmp_path: Path) -> None:
    core = Core(SETTINGS)
    journal = Journal(str(tmp_path / "j"), core)
    cause = os.fsdecode(b"no file caf\xe9")
    for event in (
        events.RequestArrived(at_s=1, request_id="r", request_number=1, keys=b"aabb", prompt_tokens=4),
        events.AbortRequested(at_s=2, request_id="r", cause=cause),
        events.WriterLost(at_s=3, writer="w", cause=cause),
    ):
        journal.stepped(event, core.step(event))
    journal.close()
    steps = list(Replayer(journal.path).steps())
    assert journal.events_dropped == 0
    assert [step.event.cause for step in steps[1:]] == ["no file caf?"] * 2  # type: ignore[attr-defined]


def test_keys_of_requests_that_are_gone_are_not_kept_for_ever(tmp_path: Path) -> None:
    journal = write(tmp_path / "j", 2000)[1]
    assert len(journal._recorder._arrived) < 600


def test_killed_process_leaves_a_journal_that_replays_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "j"
    script = f"""
from pathlib import Path
from tidekv.engine.journal import Journal
from tidekv.engine.journal.format import ArrivalRecord, TurnLine
from tidekv.engine.journal.reader import JournalReader
from tidekv.engine.journal.segments import SegmentFiles
from tidekv.states import events
from tidekv.states.core import Core
from tidekv.states.settings import CoreSettings
core = Core(CoreSettings(page_size=2, key_bytes=2, device_pages=16))
path = Path({str(path)!r})
journal = Journal(str(path), core)
number = 0
while True:
    number += 1
    event = events.RequestArrived(
        at_s=number, request_id=f"r{{number}}", request_number=number, keys=b"aabbcc", prompt_tokens=7
    )
    journal.stepped(event, core.step(event))
    event = events.AbortRequested(at_s=number, request_id=f"r{{number}}")
    journal.stepped(event, core.step(event))
    journal.end_turn()
    if number % 100 == 0 and path.stat().st_size > 100_000:
        print("going", flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"going\n"
        os.kill(child.pid, signal.SIGKILL)
    replayed = Replayer(path).run()
    assert replayed.torn is not None
    assert replayed.events > 100
    assert not replayed.complete
