"""Describes the journal's format: `python -m tools.journal_page > docs/journal.md`."""

from __future__ import annotations

import inspect
import sys

from tidekv.engine.journal.digest import COVERED_TURNS, STATE_PARTS
from tidekv.engine.journal.format import (
    JOURNAL_VERSION,
    EndLine,
    GapLine,
    RunLine,
    SegmentLine,
    TurnLine,
    event_types,
    seal,
)
from tidekv.engine.journal.journal import CLOSE_S, COALESCE_S
from tidekv.engine.journal.pages import DIGEST_BYTES
from tidekv.engine.journal.recorder import Recorder
from tidekv.states import events
from tidekv.states.core import Core
from tidekv.states.settings import CoreSettings

INTRODUCTION = """# The journal

<!-- Generated: python -m tools.journal_page > docs/journal.md -->

A journal holds the facts of one run of one engine: every event that its core took, turn of the loop by turn, every
raise of a rule, and digests of what followed. `tidekv replay` steps a fresh core through the facts and compares the
digests. It is text, one JSON object a line. This is version {version}; a journal of another version, or of other event
types, is refused by name: use the tidekv that wrote it.

A turn in which one request arrives (`journal.tokens`):

```json
{example}
```

**Events.** `took` has each event as `[type, field, …]`, with all fields in order: `python -m pydoc
tidekv.states.events` describes the {events} types.

**Checksums.** Every line ends in `"sum"`: the XXH32 of the line without `,"sum":"…"`, seeded with the sum of the line
before (0 for the first). A changed, lost, repeated or moved line is reported at that line (`JournalDamaged`).

**Digests.** They cover one turn in {covered_turns}, and each turn from the first raise or error in it on. `digest`
rolls over the effects of each step, and behind the turn over the numbers of each part of the state ({parts}, and each
tier of each component); `checks` and `parts` hold 16 bits of it behind each of these. A replay by changed rules stops
at the first covered event or turn that differs, and `ReplayDiverged` names it.

**Raises.** A rule that raises does not end a journal: the replay raises at the same instruction and goes on; with other
code, or another version of Python, it may diverge there. An exception that left `Core.step` stands in `errors`.

**Privacy.** `keys` are digests of {digest_bytes} bytes a page, in base64, under a secret that is not written anywhere:
they show which pages are equal, and nothing else. Namespaces (a vLLM request's `cache_salt` is part of one) are digests
too. With `journal.tokens` keys are the tokens (little-endian u32), and namespaces are in clear. Texts of errors are
written as they are.

**Files.** With `journal.segment_bytes` the journal goes on in `NAME.1`, `NAME.2`, …; with `journal.segments_max` the
oldest are deleted, and the rest cannot be replayed. An earlier run of the same name is moved to `NAME.previous`; so is
a symbolic link.

**In the application's log.** With `journal.log` the same lines are records of the logger `tidekv.journal`:
`journal_run`, `journal_line` (counted from 0), and the line itself in `journal`. `tidekv replay LOG`, `explain LOG` and
`timeline LOG` find them in `LOG` and in `LOG.*`, in any order; of several runs they read the newest, or that of
`--run`. A dropped record is reported as missing.

**The end.** A run that was closed has an `end` line. After kill -9 it is missing, and the last line may be cut off: all
lines before it are valid, and at most the last {coalesce_s:g} s are missing. `replay`, `explain` and `timeline` take
what is there, print where it ends on standard error and exit with code 2; with `--torn-ok` they exit with code 0 unless
not one event is left. At a line that was changed or lost they always exit with code 2.

**A slow disk.** Writing never blocks the engine. Turns that the disk is too slow for are dropped, and a `gap` line
counts them; a full disk ends the journal. Both are logged, and so is what closing could not write within {close_s:g} s.
"""


def journal_document() -> str:
    """Return the whole page, as Markdown."""
    parts = [
        INTRODUCTION.format(
            version=JOURNAL_VERSION,
            events=len(event_types()),
            example=_example(),
            parts=", ".join(STATE_PARTS),
            covered_turns=COVERED_TURNS,
            digest_bytes=DIGEST_BYTES,
            coalesce_s=COALESCE_S,
            close_s=CLOSE_S,
        ),
        "## Lines\n\n`python -m pydoc tidekv.engine.journal.format` describes each field.\n",
        "| `event` | meaning |\n|---|---|",
    ]
    lines = (RunLine, TurnLine, SegmentLine, GapLine, EndLine)
    parts += [f"| `{line.__struct_config__.tag}` | {_words(line)} |" for line in lines]
    return "\n".join([*parts, ""])


def _example() -> str:
    core = Core(CoreSettings(page_size=2, key_bytes=8, device_pages=8))
    recorder = Recorder(core, with_tokens=True)
    keys = b"".join(token.to_bytes(4, "little") for token in (101, 102, 103, 104))
    event = events.RequestArrived(at_s=12.5, request_id="r1", request_number=1, keys=keys, prompt_tokens=5)
    recorder.stepped(event, core.step(event))
    turn = recorder.end_turn()
    assert turn is not None
    return seal(recorder.render(turn), 0)[0].decode().strip()


def _words(kind: type) -> str:
    return " ".join((inspect.getdoc(kind) or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(journal_document())
