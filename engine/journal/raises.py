"""Recording of the place where a rule raised in the core's code, and the same raise in a replay.

The core handles a rule that raises, and its later decisions depend on the statements executed before the raise. A
defect raises again in a replay; an external error (memory, a hook, an injected fault) does not. So the place is
recorded: the frames of the core from `Core.step` down, each with the bytecode offset of its instruction, and the local
numbers and strings that distinguish the iterations of a loop. A replay follows the same frames and raises before the
same instruction. Frames of other packages, of tests and of the simulation are excluded. With the same code on the same
version of Python the place is exact; with other code it may not be found, and the replay diverges there.

The rule and the number of its call are not enough: a rule leaves what it did before the raise (recency, counters, pages
taken), its fallback goes on from there, and only the parts in a `Rollback` are reversed.
"""

from __future__ import annotations

import bisect
import dis
import sys
import traceback
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidekv import states
from tidekv.engine.journal.format import FrameRecord, RaiseRecord
from tidekv.states.core import Core
from tidekv.states.raises import rule_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import CodeType, FrameType

    from tidekv.states.commands import Command
    from tidekv.states.events import Event
    from tidekv.states.records.request import Request

STEP = Core.step.__code__
STATES = tuple({name for folder in states.__path__ for name in (str(folder), str(Path(folder).resolve()))})
EMPTY_CODE_BYTES = 8
"""Maximum code size of the frames that a compiled module adds to a traceback."""
ID_FIELDS = ("request_id", "op", "node_id", "first", "request_number")
LOCALS_MAX = 32
TEXT_MAX = 200


class ReplayedRaise(Exception):
    """Exception of the run, raised again by the replay. Its class has the name of the original one."""


def raise_record(at: int, request: Request | None) -> RaiseRecord:
    """Describe the exception that is being handled. Call it in the core's handler."""
    error = sys.exception()
    assert error is not None, "the core calls its raise watchers while it handles the exception"
    kind = type(error)
    stack = _stack_of(error)
    return RaiseRecord(
        at=at,
        rule=rule_of(error),
        error=kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}",
        text=str(error),
        traceback="".join(traceback.format_exception(error)),
        stack=stack,
        request_id="" if request is None else request.request_id,
    )


def _stack_of(error: BaseException) -> list[FrameRecord]:
    trace = error.__traceback__
    assert trace is not None
    # Above the handler frames are still running; from the handler down they are those of the traceback.
    outer: list[FrameRecord] = []
    frame = trace.tb_frame.f_back
    while trace.tb_frame.f_code is not STEP and frame is not None:
        if _is_of_core(frame.f_code):
            outer.append(_record(frame, frame.f_lasti, frame.f_lineno))
        if frame.f_code is STEP:
            break
        frame = frame.f_back
    found = outer[::-1]
    while trace is not None:
        if _is_of_core(trace.tb_frame.f_code):
            found.append(_record(trace.tb_frame, trace.tb_lasti, trace.tb_lineno))
        trace = trace.tb_next
    return found


def _record(frame: FrameType, offset: int, line: int) -> FrameRecord:
    return FrameRecord(frame.f_code.co_qualname, _instruction_at(frame.f_code, offset), line, _locals_of(frame))


def _locals_of(frame: FrameType) -> dict[str, int | str]:
    found: dict[str, int | str] = {}
    for name, value in frame.f_locals.items():
        # A namespace holds a tenant's salt: the journal has a digest of it, and a replay sees that one.
        if isinstance(value, bool) or name.startswith("_") or "namespace" in name:
            continue
        if isinstance(value, int | str):
            found[name] = value if isinstance(value, int) else value[:TEXT_MAX]
        else:
            for field in ID_FIELDS:
                number = getattr(value, field, None)
                if isinstance(number, int | str):
                    found[f"{name}.{field}"] = number
        if len(found) >= LOCALS_MAX:
            break
    return found


@lru_cache(maxsize=4096)
def _is_of_core(code: CodeType) -> bool:
    # A replay cannot follow the frames of a compiled module in a traceback.
    return code.co_filename.startswith(STATES) and len(code.co_code) > EMPTY_CODE_BYTES


@lru_cache(maxsize=1024)
def _instructions(code: CodeType) -> list[int]:
    found, before = [], ""
    for instruction in dis.get_instructions(code):
        # Python 3.11 calls in two instructions, or in the first if it has specialized that: count both as one.
        if before != "PRECALL":
            found.append(instruction.offset)
        before = instruction.opname
    return found


def _instruction_at(code: CodeType, offset: int) -> int:
    """Return the start of the instruction at an offset: a call in progress points after its opcode."""
    starts = _instructions(code)
    return starts[max(bisect.bisect_right(starts, offset) - 1, 0)]


class RaiseInjector:
    """Steps a core with the recorded raises of its rules."""

    def __init__(self, core: Core, *, key_bytes: int, compares_locals: bool = True) -> None:
        """`key_bytes` is the width of a page's key in the run: local offsets into keys scale with it. Without
        `compares_locals` the first of several iterations raises.
        """
        self._core = core
        self._compares_locals = compares_locals
        self._scale = (key_bytes, core.settings.key_bytes)
        self._left: Iterator[RaiseRecord] = iter(())
        self._next: RaiseRecord | None = None
        core.state.raise_watchers.append(self._go_on)

    def step(self, event: Event, raises: Sequence[RaiseRecord]) -> list[Command]:
        """Run `Core.step` with these raises, in order. Raises at places that are not reached are skipped."""
        if not raises:
            return self._core.step(event)
        self._left = iter(raises)
        self._next = next(self._left)
        before = sys.gettrace()
        # Python 3.12 traces opcodes only if a frame of the interpreter had asked for it before `settrace`.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._entered)
        try:
            return self._core.step(event)
        finally:
            self._next = None
            sys.settrace(before)

    def _go_on(self, request: Request | None) -> None:
        """Trace again: Python stops tracing a thread whose trace function has raised."""
        if self._next is None:
            return
        sys.settrace(self._entered)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not STEP:
            if _is_of_core(frame.f_code):
                frame.f_trace, frame.f_trace_lines, frame.f_trace_opcodes = self._at_instruction, False, True
            frame = frame.f_back

    def _entered(self, frame: FrameType, kind: str, argument: Any) -> Any:  # Any: as sys.settrace has it.
        """Trace the instructions of a function of the core that was called."""
        if not _is_of_core(frame.f_code):
            return None
        # Python 3.13 traces the opcodes of frames only that have a trace function when they ask for it.
        frame.f_trace = self._at_instruction
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        return self._at_instruction

    def _at_instruction(self, frame: FrameType, kind: str, argument: Any) -> Any:  # Any: as above.
        record = self._next
        if kind == "opcode" and record is not None and frame.f_code.co_qualname == record.stack[-1].function:
            stack = record.stack
            if _instruction_at(frame.f_code, frame.f_lasti) == stack[-1].offset and self._is_at(frame, stack):
                self._next = next(self._left, None)
                raise _exception_of(record)
        return self._at_instruction

    def _is_at(self, frame: FrameType, stack: Sequence[FrameRecord]) -> bool:
        """Return whether the frames of the core up to `Core.step` match the stack."""
        current: FrameType | None = frame
        for recorded in reversed(stack):
            while current is not None and not _is_of_core(current.f_code):
                current = current.f_back
            if current is None or current.f_code.co_qualname != recorded.function:
                return False
            if _instruction_at(current.f_code, current.f_lasti) != recorded.offset:
                return False
            if self._compares_locals and not self._are_equal(recorded.locals, _locals_of(current)):
                return False
            current = current.f_back
        return True

    def _are_equal(self, recorded: dict[str, int | str], ours: dict[str, int | str]) -> bool:
        run, replay = self._scale
        for name, value in recorded.items():
            found = ours.get(name)
            if found == value:
                continue
            if isinstance(value, int) and isinstance(found, int) and value * replay == found * run:
                continue
            return False
        return True


def _exception_of(record: RaiseRecord) -> ReplayedRaise:
    module, _, name = record.error.rpartition(".")
    kind = type(name, (ReplayedRaise,), {"__module__": module or "builtins"})
    found: ReplayedRaise = kind(record.text)
    return found
