"""Profile of one request by part, in counts: `python -m benchmarks.request_profile --svg FILE`.

The requests are those of `engine.py`: prompts of 4,096 tokens, half cached in device memory, host memory or storage, by
turns, and a journal. Counted are calls of Python functions and interpreted instructions on the loop's thread, the same
on every machine and at every load. Work inside of C functions counts as one instruction, so a count is no time: it
shows where work is done that need not be. The core's clock advances by a fixed step each time that it is read, so that
a turn of the loop has about as many events as on a quiet machine.

A call belongs to the part of its function, or else to the part of its caller. The flame graph has one box for each
function of each stack, as wide as the instructions that it and its callees took.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import uvloop

from benchmarks.engine import TIERS, Load, Rig
from tidekv.engine.decode.driver import Driver

IN_FLIGHT = 48
CLOCK_STEP_S = 25e-6
"""Step of the core's clock: a turn has about 20 events."""
PARTS = {
    "rig": ("benchmarks/engine",),
    "journal": ("engine/journal/",),
    "logging": ("engine/log.py", "structlog/"),
    "metrics": ("engine/metrics/",),
    "state machine": ("transitions/", "states/request/table.py", "states/request/guards_and_actions.py"),
    "arrival": ("engine/decode/arrivals.py", "backends/keys/", ":Core._arrived"),
    "match": (":Restore.grant", ":Restore.ask_storage", ":Core.reclaim_and_admit", "states/request/admission_queue.py"),
    "plan": (":Restore.fix_plan",),
    "promise": (":Rooms.open", ":Executor._promise", ":Core._promise_sent"),
    "transfer progress": ("transports/",),
    "loads": ("states/loads/", "backends/copies/"),
    "READY": (":Restore.commit", ":PendingCalls._tell_ready"),
    "finish": ("states/request/ready.py", "states/backup/", ":DecodeEngine.finish", ":PendingCalls._end"),
    "consequences": (":Core.settle", ":Core.move_on", ":Core.work_ahead", ":_may_"),
    "storage": ("states/storage/", "backends/storage/", ":Executor._"),
    "engine loop": ("engine/decode/", "engine/", "asyncio/"),
}
"""Parts, each with what a place of its functions contains: `states/core.py:Core.settle`. The first one counts."""
ROW, WIDTH, SHOWN = 17, 1400, 2.0
"""Pixels of the flame graph: height of a box, width of all, width of the narrowest box."""
COLORS = ("#f2b880", "#9cc5a1", "#8fb8de", "#d9a5b3", "#c8b6ff", "#e6d690", "#a8dadc", "#d4b483", "#b5c99a", "#cdb4db")


def place_of(code: CodeType) -> str:
    """Return file and function, the file from the folder of its package on."""
    parts = Path(code.co_filename).parts
    start = max((at for at, part in enumerate(parts) if part in ("tidekv", "site-packages", "python3.11")), default=-3)
    return f"{'/'.join(parts[start + 1 :])}:{code.co_qualname}"


def part_of(place: str) -> str:
    """Return the part of a function by its place; empty if it is its caller's."""
    return next((part for part, words in PARTS.items() if any(word in place for word in words)), "")


@dataclass(slots=True, eq=False)
class Box:
    """A function on one stack."""

    place: str
    calls: int = 0
    instructions: int = 0
    """Its own, without those of its callees."""
    callees: dict[CodeType, Box] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Instructions, those of its callees included."""
        return self.instructions + sum(callee.total for callee in self.callees.values())


class Profile:
    """Counts of the thread that enters it, until it is left."""

    def __init__(self) -> None:
        self.root = Box("all")
        self._stack = [self.root]

    def __enter__(self) -> Profile:
        # Python 3.12 traces opcodes only if a frame of the interpreter had asked for it before `settrace`.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        del self._stack[1:]

    def _note(self, frame: FrameType, kind: str, argument: object) -> Any:
        stack = self._stack
        if kind == "opcode":
            stack[-1].instructions += 1
        elif kind == "call":
            code = frame.f_code
            box = stack[-1].callees.get(code)
            if box is None:
                box = stack[-1].callees[code] = Box(place_of(code))
            box.calls += 1
            stack.append(box)
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
        elif kind == "return" and len(stack) > 1:
            stack.pop()
        return self._note

    def by_part(self) -> tuple[Counter[str], Counter[str]]:
        """Return calls and instructions by part."""
        calls, instructions = Counter[str](), Counter[str]()

        def add(box: Box, outer: str) -> None:
            part = part_of(box.place) or outer
            calls[part] += box.calls
            instructions[part] += box.instructions
            for callee in box.callees.values():
                add(callee, part)

        add(self.root, "engine loop")
        return calls, instructions

    def by_function(self) -> tuple[Counter[str], Counter[str]]:
        """Return calls and own instructions by function."""
        calls, instructions = Counter[str](), Counter[str]()
        boxes = [self.root]
        while boxes:
            box = boxes.pop()
            calls[box.place] += box.calls
            instructions[box.place] += box.instructions
            boxes += box.callees.values()
        return calls, instructions


def draw(profile: Profile, requests: int, words: str) -> str:
    """Return the flame graph as SVG."""
    total, found, deepest = profile.root.total, [], 0
    colors = dict(zip(PARTS, itertools.cycle(COLORS)))

    def add(box: Box, x: float, depth: int, outer: str) -> None:
        nonlocal deepest
        width, part = box.total / total * WIDTH, part_of(box.place) or outer
        if width < SHOWN:
            return
        deepest = max(deepest, depth)
        y, name = ROW * (depth + 1), box.place.rpartition(":")[2]
        detail = f"{box.place}: {box.calls / requests:.1f} calls, {box.total / requests:.0f} instructions ({part})"
        text = f'<text x="{x + 3:.1f}" y="{y + 12}">{escape(name[: int(width / 6.2)])}</text>' if width > 30 else ""
        found.append(
            f'<g><title>{escape(detail)}</title><rect x="{x:.1f}" y="{y}" width="{width - 0.4:.1f}" height="{ROW - 1}" '
            f'fill="{colors[part]}"/>{text}</g>'
        )
        x += box.instructions / total * WIDTH
        for callee in sorted(box.callees.values(), key=lambda callee: -callee.total):
            add(callee, x, depth + 1, part)
            x += callee.total / total * WIDTH

    add(profile.root, 0.0, 0, "engine loop")
    height = ROW * (deepest + 3)
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="monospace" '
            'font-size="10" role="img">',
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/><text x="3" y="12">{escape(words)}</text>',
            *found,
            "</svg>\n",
        )
    )


async def measure(load: Load, in_flight: int, *, journal: bool) -> Profile:
    """Profile one block of requests, after another one."""
    steps = itertools.count(1)
    with (
        tempfile.TemporaryDirectory(prefix="tidekv-") as folder,
        patch.object(Driver, "clock", staticmethod(lambda: next(steps) * CLOCK_STEP_S)),
    ):
        rig = Rig(load, in_flight, str(Path(folder) / "run.journal") if journal else None)
        async with rig.engine:
            await rig.block()
            profile = Profile()
            await rig.block(profile)
    return profile


def main() -> None:
    """Parse the options, count, print the parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--in-flight", type=int, default=IN_FLIGHT)
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=list(TIERS), help="where cached halves are")
    parser.add_argument("--no-journal", action="store_true")
    parser.add_argument("--svg", type=Path, help="draw the flame graph to this file")
    parser.add_argument("--functions", type=int, default=0, help="number of functions with the most instructions")
    chosen = parser.parse_args()
    load = Load(4096, 64, 512, tuple(chosen.tiers))
    profile = uvloop.run(measure(load, chosen.in_flight, journal=not chosen.no_journal))
    calls, instructions = profile.by_part()
    rig = instructions.pop("rig", 0), calls.pop("rig", 0)
    count = chosen.in_flight
    print(f"{'part':<20}{'calls':>9}{'instructions':>14}   a request")
    for part, number in instructions.most_common():
        print(f"{part:<20}{calls[part] / count:>9.1f}{number / count:>14.0f}")
    words = f"{calls.total() / count:,.0f} calls and {instructions.total() / count:,.0f} instructions a request"
    print(f"{words}, and {rig[1] / count:,.0f} and {rig[0] / count:,.0f} of the rig")
    found = profile.by_function()
    for place, number in found[1].most_common(chosen.functions):
        print(f"{number / count:>9.1f}{found[0][place] / count:>9.2f}  {place}")
    if chosen.svg is not None:
        chosen.svg.write_text(draw(profile, count, f"{words}, {count} in flight; without time inside of C functions"))


if __name__ == "__main__":
    main()
