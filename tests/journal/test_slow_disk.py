"""A disk that hangs or refuses: the loop never waits for it, memory is bounded, and missing records are reported."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.support.inside import runtime_of
from tests.support.waits import LIMIT_S
from tidekv import JournalDamaged, Replayer
from tidekv.engine.journal import Journal
from tidekv.engine.journal import journal as journal_module
from tidekv.engine.journal.format import EndLine, GapLine, TurnLine, unseal
from tidekv.engine.journal.reader import _DECODER
from tidekv.engine.journal.recorder import Recorder
from tidekv.states import events
from tidekv.states.core import Core
from tidekv.states.settings import CoreSettings

SETTINGS = CoreSettings(page_size=2, key_bytes=2, device_pages=16)
BYTES_MAX = 100_000
LINE_BYTES = 2_000
"""More than any line here has."""


class HangingDisk:
    """What a journal writes behind its header goes into a pipe without a reader, until `works`."""

    def __init__(self, journal: Journal) -> None:
        self._path = Path(journal.place)
        self._read_end, write_end = os.pipe()
        os.dup2(write_end, journal._files._file.fileno())
        os.close(write_end)
        self._reader: threading.Thread | None = None

    def works(self) -> None:
        self._reader = threading.Thread(target=self._drain)
        self._reader.start()

    def _drain(self) -> None:
        with self._path.open("ab") as file:
            while content := os.read(self._read_end, 1 << 16):
                file.write(content)

    def end(self) -> None:
        """Everything that was written is in the file."""
        if self._reader is not None:
            self._reader.join()
        os.close(self._read_end)


@pytest.fixture
def core() -> Core:
    return Core(SETTINGS)


@pytest.fixture
def journal(core: Core, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Journal]:
    monkeypatch.setattr(journal_module, "HURRY_BYTES", 10_000)
    monkeypatch.setattr(journal_module, "BYTES_WAITING_MAX", BYTES_MAX)
    yield Journal(str(tmp_path / "j"), core)


def step(core: Core, journal: Journal, count: int, keys: bytes = b"aabbcc") -> None:
    """Requests that arrive and are aborted."""
    for _ in range(count):
        number = core.statistics().get("requests_arrived", 0)
        for event in (
            events.RequestArrived(at_s=1, request_id="r", request_number=number, keys=keys, prompt_tokens=len(keys)),
            events.AbortRequested(at_s=1, request_id="r"),
        ):
            journal.stepped(event, core.step(event), "")
            journal.end_turn()


def lines_of(path: Path) -> list[object]:
    """Every line, checked."""
    found: list[object] = []
    crc = 0
    for line in path.read_bytes().splitlines():
        unsealed = unseal(line, crc)
        assert unsealed is not None
        body, crc = unsealed
        found.append(_DECODER.decode(body))
    return found


def test_loop_goes_on_while_the_disk_hangs_and_what_does_not_fit_is_a_gap(core: Core, journal: Journal) -> None:
    disk = HangingDisk(journal)
    # Far more than a pipe holds and than may wait. It all returns, though nothing is read.
    step(core, journal, 4000)
    assert journal._queued_bytes - journal._taken_bytes <= BYTES_MAX + LINE_BYTES
    assert journal._missing_events > 2000
    disk.works()
    journal.close(timeout_s=LIMIT_S)
    disk.end()
    lines = lines_of(Path(journal.place))
    gaps = [line.events for line in lines if isinstance(line, GapLine)]
    written = sum(len(line.took) for line in lines if isinstance(line, TurnLine))
    assert sum(gaps) == journal.events_dropped > 0
    assert written + sum(gaps) == 8000
    assert isinstance(lines[-1], EndLine)
    assert lines[-1].events == 8000
    with pytest.raises(JournalDamaged, match="were never written"):
        Replayer(journal.place).run()


def test_after_a_gap_the_journal_goes_on_with_the_right_numbers(core: Core, journal: Journal) -> None:
    disk = HangingDisk(journal)
    step(core, journal, 4000)
    disk.works()
    while journal._missing_events:
        step(core, journal, 1)
    step(core, journal, 5)
    journal.close()
    disk.end()
    turns = events_taken = 0
    for line in lines_of(Path(journal.place)):
        if isinstance(line, TurnLine):
            assert line.turn == turns
            turns, events_taken = turns + 1, events_taken + len(line.took)
        elif isinstance(line, GapLine):
            turns, events_taken = turns + line.turns, events_taken + line.events
    assert events_taken == turns == journal._recorder.events


def test_long_prompts_are_left_to_the_thread_and_wait_for_it_within_bounds(
    core: Core, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_longest_on_loop", 1000)
    disk = HangingDisk(journal)
    for number in range(200):
        step(core, journal, 1, bytes(Random(number).randbytes(4000)))
        assert journal._queued_bytes - journal._taken_bytes <= BYTES_MAX + 4 * LINE_BYTES
    assert journal._left_to_thread > 0
    assert journal.events_dropped > 0
    disk.works()
    journal.close()
    disk.end()
    assert journal._left_to_thread == journal._rendered
    assert any(isinstance(line, GapLine) for line in lines_of(Path(journal.place)))


def test_prompts_of_any_length_are_in_the_journal_in_their_order(
    core: Core, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(str(tmp_path / "j"), core)
    monkeypatch.setattr(journal, "_longest_on_loop", 1000)
    words = Random(1)
    long = words.randbytes(5000)
    prompts = [long[: words.randrange(2, 5000, 2)] for _ in range(150)] + [words.randbytes(3000) for _ in range(20)]
    words.shuffle(prompts)
    for keys in prompts:
        step(core, journal, 1, keys)
    journal.close()
    assert 0 < journal._left_to_thread == journal._rendered
    steps = list(Replayer(journal.place).steps())
    assert [len(step.event.keys) // 8 for step in steps[::2]] == [len(keys) // 2 for keys in prompts]  # type: ignore[attr-defined]


def test_closing_does_not_wait_for_ever_and_says_what_is_missing(
    core: Core, journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    disk = HangingDisk(journal)
    step(core, journal, 2000)
    with caplog.at_level(logging.WARNING, "tidekv.journal"):
        journal.close(timeout_s=0.05)
    (record,) = caplog.records
    fields = record.tidekv  # type: ignore[attr-defined]  # What the engine's log adds.
    assert (fields["event"], fields["events"], fields["has_end"]) == ("the journal is incomplete", 4000, False)
    assert fields["missing"] == journal.events_dropped > 0
    assert "within 0.05 s" in fields["cause"]
    assert str(journal.path) in record.getMessage()
    # Should the disk come back, nothing that would look like an end is written.
    disk.works()
    journal._thread.join()
    disk.end()
    replayed = Replayer(journal.place).run()
    assert replayed.torn is not None
    assert 0 < replayed.events < 4000


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_ends_the_journal_and_not_the_run(
    core: Core, journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        os.dup2(full.fileno(), journal._files._file.fileno())
    with caplog.at_level(logging.WARNING, "tidekv.journal"):
        step(core, journal, 10)
        journal.close()
    now, end = caplog.messages
    assert "the journal ends here, the engine goes on: " in now and "[Errno 28]" in now
    assert "events=20 missing=20 has_end=False" in end and "[Errno 28]" in end


def test_mistake_of_the_writer_ends_the_journal_with_its_traceback(
    core: Core, journal: Journal, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorder, "render", lambda self, turn: 1 // 0)
    with caplog.at_level(logging.WARNING, "tidekv.journal"):
        step(core, journal, 10)
        journal.close()
    assert "ends here" in caplog.messages[0]
    assert "Traceback (most recent call last)" in caplog.records[0].getMessage()
    assert journal.events_dropped == 20


async def test_engine_serves_and_closes_while_its_journal_hangs(
    make_pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = Journal.close
    monkeypatch.setattr(Journal, "close", lambda self: close(self, timeout_s=0.05))
    async with asyncio.timeout(LIMIT_S), make_pair(journal_path=str(tmp_path / "j")) as pair:
        journal = runtime_of(pair.engine).journal
        disk = HangingDisk(journal)
        for number in range(200):
            prompt = [number, *range(40)]
            await pair.finish(await pair.restore(f"r{number}", prompt), prompt, [1, 2])
    assert journal._thread.is_alive()
    assert journal.events_dropped > 0
    disk.works()
    await asyncio.to_thread(journal._thread.join)
    disk.end()
