"""Damage is named as damage, at its line; it is never taken for another decision of the core."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.support.thorough import examples
from tidekv import JournalDamaged, JournalRefused, ReplayDiverged, Replayer
from tidekv.engine.journal.format import SUFFIX_BYTES, write_lines
from tidekv.engine.journal.reader import JournalReader

TURN_EVENTS = 5
HERE = examples(120, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture
def journal(simulate) -> Path:
    path: Path = simulate(2, 12).path
    return path


def damage_of(path: Path) -> JournalDamaged | None:
    """What a replay reports about the journal's bytes; a divergence would be raised."""
    try:
        return Replayer(path).run().torn
    except JournalDamaged as damage:
        return damage


@HERE
@given(data=st.data())
def test_flipped_bit_is_named_at_its_line(journal: Path, data: st.DataObject) -> None:
    content = journal.read_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    flipped = content[at] ^ (1 << data.draw(st.integers(0, 7)))
    broken = journal.with_name("broken")
    broken.write_bytes(content[:at] + bytes((flipped,)) + content[at + 1 :])
    damage = damage_of(broken)
    assert damage is not None
    assert damage.line == content[:at].count(b"\n") + 1


def test_bytes_of_the_header_and_of_the_last_line_count(journal: Path) -> None:
    content = journal.read_bytes()
    lines = content.count(b"\n")
    header = content.index(b"\n") + 1
    end = content[:-1].rindex(b"\n") + 1
    broken = journal.with_name("broken")
    for at in [*range(header), *range(end, len(content), 3), len(content) - 1]:
        bit = at % 8
        broken.write_bytes(content[:at] + bytes((content[at] ^ (1 << bit),)) + content[at + 1 :])
        damage = damage_of_lines(broken)
        assert damage is not None, (at, bit)
        assert damage.line == (1 if at < header else lines), (at, bit)


def damage_of_lines(path: Path) -> JournalDamaged | None:
    """What reading reports: the same, without stepping a core."""
    try:
        reader = JournalReader(path)
        for _ in reader.lines():
            pass
    except JournalDamaged as damage:
        return damage
    return reader.torn


def test_dropped_line_is_named_where_it_is_missing(journal: Path) -> None:
    lines = journal.read_bytes().splitlines(keepends=True)
    broken = journal.with_name("broken")
    for at in range(len(lines)):
        broken.write_bytes(b"".join(lines[:at] + lines[at + 1 :]))
        damage = damage_of(broken)
        assert damage is not None
        assert damage.line == at + 1, at
    assert "end record" in str(damage)


def test_swapped_pair_is_named_at_the_first_of_the_two(journal: Path) -> None:
    lines = journal.read_bytes().splitlines(keepends=True)
    broken = journal.with_name("broken")
    for at in range(len(lines) - 1):
        broken.write_bytes(b"".join([*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]]))
        damage = damage_of(broken)
        assert damage is not None
        assert damage.line == at + 1, at


def test_repeated_line_and_line_behind_the_end_are_named(journal: Path) -> None:
    lines = journal.read_bytes().splitlines(keepends=True)
    broken = journal.with_name("broken")
    for at in range(len(lines)):
        broken.write_bytes(b"".join([*lines[: at + 1], lines[at], *lines[at + 1 :]]))
        damage = damage_of(broken)
        assert damage is not None
        assert damage.line == at + 2, at


def test_torn_tail_is_tolerated_and_told_at_every_length(journal: Path) -> None:
    content = journal.read_bytes()
    header = content.index(b"\n") + 1
    broken = journal.with_name("broken")
    taken = -1
    for length in range(header, len(content), 2003):
        broken.write_bytes(content[:length])
        replayed = Replayer(broken).run()
        assert replayed.torn is not None
        assert replayed.torn.line == content[:length].count(b"\n") + 1
        assert replayed.events >= taken
        taken = replayed.events
    for length in range(1, header - 1):
        broken.write_bytes(content[:length])
        with pytest.raises((JournalDamaged, JournalRefused)):
            Replayer(broken)


@pytest.mark.parametrize(("field", "at", "part"), [("checks", 0, "effects"), ("parts", 0, "host pool")])
def test_line_with_a_good_checksum_and_another_digest_is_a_divergence_in_that_part(
    journal: Path, field: str, at: int, part: str
) -> None:
    # A journal changed on purpose can be sealed again; then the digests of the replay disagree.
    forged = [line[:-SUFFIX_BYTES] + b"}" for line in journal.read_bytes().splitlines()]
    turn = msgspec.json.decode(forged[1])
    turn[field][-1 if field == "parts" else 0] ^= 1 << at
    broken = journal.with_name("broken")
    write_lines(broken, [forged[0], msgspec.json.encode(turn), *forged[2:]])
    with pytest.raises(ReplayDiverged) as diverged:
        Replayer(broken).run()
    assert diverged.value.parts == (part,)
    assert (diverged.value.turn, diverged.value.seq) == (0, 0 if field == "checks" else TURN_EVENTS - 1)
