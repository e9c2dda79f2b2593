"""`Rollback` against the standard library's `ExitStack`: same callbacks, same order, same errors."""

from __future__ import annotations

from contextlib import ExitStack

from hypothesis import given
from hypothesis import strategies as st

from tidekv.states.rollback import Rollback


class Broken(Exception):
    """What a callback, or the block, raises."""


def run(
    stack: Rollback | ExitStack, raising: list[bool], *, keeps: bool, ends: str
) -> tuple[list[int], list[str] | None]:
    """Run a block with callbacks of which some raise; those that ran, and the words of its error and its contexts."""
    ran: list[int] = []

    def take_back(number: int, raises: bool) -> None:
        ran.append(number)
        if raises:
            raise Broken(f"callback {number}")

    def block() -> None:
        with stack as undo:
            for number, raises in enumerate(raising):
                undo.callback(take_back, number, raises)
            if keeps:
                undo.keep() if isinstance(undo, Rollback) else undo.pop_all()
            if ends == "raises":
                raise Broken("block")
            if ends == "returns":
                return

    try:
        block()
    except Broken as error:
        return ran, [str(error), "block" if "block" in _contexts(error) else ""]
    return ran, None


def _contexts(error: BaseException | None) -> list[str]:
    return [] if error is None else [str(error), *_contexts(error.__context__)]


@given(st.lists(st.booleans(), max_size=5), st.booleans(), st.sampled_from(["raises", "returns", "ends"]))
def test_it_takes_back_what_an_exit_stack_would(raising: list[bool], keeps: bool, ends: str) -> None:
    found = run(Rollback(), raising, keeps=keeps, ends=ends)
    assert found == run(ExitStack(), raising, keeps=keeps, ends=ends)


def test_what_was_kept_stays_and_what_comes_after_it_does_not() -> None:
    taken_back: list[str] = []
    with Rollback() as undo:
        undo.callback(taken_back.append, "before")
        undo.keep()
        undo.callback(taken_back.append, "after")
    assert taken_back == ["after"]
