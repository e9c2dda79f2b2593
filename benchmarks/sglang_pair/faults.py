"""The faults amid which answers are compared, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.servers.events import STORAGE, Event
from benchmarks.sglang_pair.server import ACTIONS
from benchmarks.sglang_pair.storage import ACTIONS as STORAGE_ACTIONS

SERVERS: Final = ("prefill-0", "prefill-1", "decode-0")


@dataclass(frozen=True, slots=True)
class Fault:
    """What strikes. `events` are those of a run of at least three turns; `aborts`: share of requests."""

    text: str
    events: Sequence[str] = ()
    aborts: float = 0.0
    is_second_prefill_needed: bool = False

    def parsed(self, turns: int) -> list[Event]:
        """Return the events that a run of so many turns has."""
        actions = {**dict.fromkeys(SERVERS, ACTIONS), STORAGE: STORAGE_ACTIONS}
        return [event for text in self.events if (event := Event.parse(text, actions)).turn < turns]


ABORTS: Final = 0.2
FAULTS: Final = {
    "flush": Fault(
        "decode's device and host memory is emptied between turns", ["1:reset:decode-0", "2:reset:decode-0"]
    ),
    "memory": Fault("decode ends and starts again: its memory is lost, its storage is there", ["1:restart:decode-0"]),
    "freeze": Fault("prefill is stopped for 12 s amid a turn", ["1:freeze:prefill-0"]),
    "kill": Fault(
        "prefill is killed amid a turn; a second one is there", ["1:kill:prefill-0"], is_second_prefill_needed=True
    ),
    "aborts": Fault("a fifth of the requests is aborted", aborts=ABORTS),
    "damage": Fault("bytes of every stored page are overwritten, and memory is emptied", ["1:damage:decode-0"]),
    "hang": Fault("storage does not answer for 12 s, and memory was emptied", ["1:reset:decode-0", "1:hang:storage"]),
    "full": Fault("storage has no room from the second turn on", ["1:fill:storage"]),
    "all": Fault(
        "all of these in one run",
        [
            "1:reset:decode-0",
            "2:freeze:prefill-0",
            "3:damage:decode-0",
            "4:kill:prefill-0",
            "5:reset:decode-0",
            "5:hang:storage",
            "6:restart:decode-0",
            "7:fill:storage",
            "8:reset:decode-0",
        ],
        aborts=ABORTS,
        is_second_prefill_needed=True,
    ),
}
"""The last one is for longer runs."""
