"""Describes the journal's format: `python -m tools.journal_page > docs/journal.md`."""

from __future__ import annotations

import ast
import inspect
import sys
from types import ModuleType

from tidekv.engine.journal import lines
from tidekv.engine.journal.journal import CLOSE_S, COALESCE_S
from tidekv.engine.journal.pages import DIGEST_BYTES
from tidekv.engine.journal.schema import event_types, field_types
from tidekv.states import events
from tidekv.states.inspect import step_record
from tidekv.states.inspect.step_record import BOOK_NUMBERS, BOOKS_EVERY, COMMANDS, COMPONENT_NUMBERS, short_fields

INTRODUCTION = """# The journal

<!-- Generated: python -m tools.journal_page > docs/journal.md -->

A journal holds one run of one engine: every event that its core took, and in short what followed from each. It is text,
one JSON object a line. This is version {version} of the format; a journal of another version, or of other event types,
is refused by name: the tidekv that wrote it reads it.

**Checksums.** Every line ends in `"crc"`: eight hexadecimal digits, the CRC-32 of the line without `,"crc":"…"`, begun
with the CRC of the line before (0 for the first). A changed bit, a line that is missing, or two that changed places are
found at that line.

**Privacy.** `keys` are digests of {digest_bytes} bytes a page, in base64. They tell which pages are equal, and nothing
else. Each is a SipHash of the page's tokens under the secret that Python draws for itself when a process starts, and
that is written nowhere. Where Python hashes in another way, or `PYTHONHASHSEED` gives the secret, it is BLAKE2b under a
secret of the run. With `journal.tokens` keys are the tokens themselves, packed as little-endian u32;
with `bigram_keys` each page's key has the token behind the page as well.
Texts of errors are written as they are.

**Files.** With `journal.segment_bytes` the journal goes on in `NAME.1`, `NAME.2`, …; with `journal.segments_max` the
oldest are deleted, and what is left cannot be replayed, since a replay needs the run from its start: it is refused with
the number of the first segment that is there. What an earlier run left under the same name is moved aside, to
`NAME.previous`.

**The end.** A run that was closed has an `end` line. After kill -9 there is none, and maybe half a line: all before it
is good, and at most the last {coalesce_s:g} s are missing. Nobody can tell that from a journal that was cut afterwards.
So `tidekv replay`, `explain` and `timeline` take all that is there, say on one line of standard error where it ends,
and exit with code 2; with `--torn-ok` they exit with code 0, unless not even one event is left.

**A slow disk.** Writing never holds up the service. What cannot be written in time is dropped, and a `gap` line says
how many events; a disk that is full ends the journal. Both, and what closing the engine could not write any more
within {close_s:g} s, is told to the log (`tidekv.journal`).

**Replay.** The same events give the same answers, to the last page. So only events are inputs; `gave` and `state` are
there to compare with, and to read. Every `gave` is compared word by word, and the final numbers with those of the `end`
line. So the first event that moves a request in another way, gives another command, takes other pages, or evicts
others is named. What shows in the numbers of `books` alone, which one event of {books_every} has, is named at the next
event that has them.
"""


def journal_document() -> str:
    """The whole page, as Markdown."""
    words = INTRODUCTION.format(
        version=lines.JOURNAL_VERSION,
        digest_bytes=DIGEST_BYTES,
        coalesce_s=COALESCE_S,
        close_s=CLOSE_S,
        books_every=BOOKS_EVERY,
    )
    parts = [words, "## Lines\n"]
    parts += [
        _section(line, f'`"event": "{line.__struct_config__.tag}"`', lines, skip=())
        for line in (lines.RunLine, lines.SegmentLine, lines.StepsLine, lines.GapLine, lines.EndLine)
    ]
    parts.append(_section(lines.StepRecord, "One of `steps`", lines, skip=()))
    parts.append(_section(step_record.StepResult, "`gave`", step_record, skip=()))
    parts.append(
        f"The numbers of `books` are: {', '.join(f'`{name}`' for name in BOOK_NUMBERS)}. `tick` counts uses of the "
        "index, `next` is the free page that is taken next (-1: none is free), pages are counted by condition, "
        "`protected` ones are cached and may not go, `receipts` are live locks or pins. Where there are windows "
        f"and states, the numbers {', '.join(f'`{name}`' for name in COMPONENT_NUMBERS)} of each follow in the "
        "order of "
        "the settings, first of its pages on the device, then of those on the host.\n"
    )
    parts.append(
        "## Events\n\nFields that have their default are left out. All have `type`, the heading, and `at_s`.\n"
    )
    parts += [_section(kind, f"`{kind.__name__}`", events, skip=("at_s",)) for kind in event_types()]
    parts.append(
        "## Commands in short\n\nName first, then these fields, in this order; of pages the "
        "CRC-32 of their ids (little-endian i32). `detail` is empty: it holds words for people.\n"
    )
    for kind in COMMANDS:
        pages = short_fields(kind)[1]
        fields = [f"`{name}` (pages)" if name in pages else f"`{name}`" for name in kind.__struct_fields__]
        parts.append(f"- `{kind.__name__}`: {', '.join(fields)}")
    return "\n".join(parts) + "\n"


def _section(kind: type, title: str, module: ModuleType, *, skip: tuple[str, ...]) -> str:
    words = " ".join((inspect.getdoc(kind) or "").split())
    notes = _attribute_notes(module, kind.__name__)
    rows = [f"### {title}\n", f"{words}\n"]
    fields = {name: type_words for name, type_words in field_types(kind).items() if name not in skip}
    if fields:
        rows += ["| field | type | |", "|---|---|---|"]
        for name, type_words in fields.items():
            escaped = type_words.replace("|", "\\|")
            rows.append(f"| `{name}` | `{escaped}` | {notes.get(name, '')} |")
        rows.append("")
    return "\n".join(rows)


def _attribute_notes(module: ModuleType, name: str) -> dict[str, str]:
    """The strings that stand below the fields of a class."""
    tree = ast.parse(inspect.getsource(module))
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            for field, note in zip(node.body, node.body[1:], strict=False):
                if (
                    isinstance(field, ast.AnnAssign)
                    and isinstance(field.target, ast.Name)
                    and isinstance(note, ast.Expr)
                    and isinstance(note.value, ast.Constant)
                ):
                    found[field.target.id] = " ".join(str(note.value.value).split())
    return found


if __name__ == "__main__":
    sys.stdout.write(journal_document())
