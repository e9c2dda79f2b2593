"""Puts leave a share of the host pool to reads: a store that hangs must not pin all of it."""

from __future__ import annotations

import pytest

from simulation.rig import Rig
from tidekv.states import commands
from tidekv.states.errors import InvalidConfig
from tidekv.states.storage_policy import StoragePolicy


def rig_of(**settings: object) -> Rig:
    rig = Rig(
        **{"device_pages": 32, "host_pages": 16, "prefetch_threshold_tokens": 0, "breaker_failures": 0, **settings}
    )
    rig.attach_storage()
    return rig


def finish_and_back_up(rig: Rig, name: str, tokens: bytes) -> list[commands.StorePages]:
    """A whole request, up to its copy on the host; returns the put that follows, if any."""
    rig.make_ready(name, tokens)
    rig.finish(name, tokens)
    rig.copied(rig.take(commands.CopyPages, target="host"))
    rig.take(commands.ReportFinished)
    return rig.take_all(commands.StorePages)


def prompt(number: int, pages: int = 4) -> bytes:
    return bytes(range(16 * number, 16 * number + pages))


def test_puts_that_do_not_end_leave_half_of_the_host_to_reads() -> None:
    rig = rig_of()
    puts = [finish_and_back_up(rig, f"r{number}", prompt(number)) for number in range(4)]
    assert [len(put) for put in puts] == [1, 1, 0, 0]
    core = rig.core
    assert core.state.index.host_protected == 8
    assert core.statistics()["l3_puts_declined"] == 2
    # A read finds room on the host beside the puts that hang.
    rig.arrive("read", prompt(9, 8))
    rig.answer(rig.take(commands.QueryStorage), 8)
    assert len(rig.take(commands.FetchPages).host_pages) == 8
    core.check()


def test_without_a_bound_puts_pin_whatever_there_is() -> None:
    rig = rig_of(store_host_share=1.0)
    assert [len(finish_and_back_up(rig, f"r{number}", prompt(number))) for number in range(4)] == [1, 1, 1, 1]
    assert rig.core.state.index.host_protected == 16


def test_the_first_put_begins_however_long_its_prefix_is() -> None:
    rig = rig_of()
    (put,) = finish_and_back_up(rig, "long", prompt(0, 14))
    assert len(put.host_pages) == 14


def test_what_was_left_out_is_put_with_the_next_finish_of_its_prefix() -> None:
    rig = rig_of()
    puts = [finish_and_back_up(rig, f"r{number}", prompt(number)) for number in range(3)]
    assert puts[2] == []
    for (put,) in puts[:2]:
        rig.stored(put)
    rig.make_ready("again", prompt(2))
    rig.finish("again", prompt(2))
    (put,) = rig.take_all(commands.StorePages)
    assert len(put.host_pages) == 4
    rig.core.check()


def test_a_put_that_waits_for_fetches_counts_as_one_that_pins() -> None:
    rig = rig_of()
    rig.arrive("read", prompt(9, 2))
    rig.answer(rig.take(commands.QueryStorage), 2)
    rig.take(commands.FetchPages)
    rig.take(commands.SendPromise)
    for number in range(4):
        assert finish_and_back_up(rig, f"r{number}", prompt(number, 3)) == []
    assert len(rig.core.backups.waiting) == 2
    assert rig.core.statistics()["l3_puts_declined"] == 2


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_share_is_from_0_to_1(share: float) -> None:
    with pytest.raises(InvalidConfig, match="store_host_share"):
        StoragePolicy(store_host_share=share)
