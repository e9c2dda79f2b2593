"""Writing a step at once, by native_steps.c where that was compiled: describes to it what it writes.

It writes the very bytes that `Recorder.note` and `Recorder.encode` make of the same steps. Those keep steps until there
are some, since to start an encoder of Python for each costs more than what it does; then they have left the processor's
caches, and so has the memory that would have been used again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from tidekv.engine.journal.schema import event_types
from tidekv.states.events import FinishRequested, RequestArrived, RetractRequested
from tidekv.states.request import State
from tidekv.states.witness import BOOKS_EVERY, COMMANDS, OF_REQUESTS, OMITTED, Witness

if TYPE_CHECKING:
    from tidekv.engine.journal.native_steps import StepWriter as StepWriter
    from tidekv.states.commands import Command
    from tidekv.states.core import Core
    from tidekv.states.events import Event

STEPS_MAX = 512
"""So many steps are in the buffer before `full` is called: some 100 KiB."""
PAGES_MAX = 4096
"""So many pages of one prompt are hashed on the loop: a third of a millisecond. A longer one is left to others."""
NO_KEYS, KEYS_ARRIVE, KEYS_END = range(3)
NEVER = object()
"""No field has this value."""


class Stepped(Protocol):
    """What is called with every step of a core: an event, what followed, and the class of the error that it raised."""

    def __call__(self, event: Event, given: list[Command], error: str = "", /) -> None: ...


class Left(Protocol):
    """What is called with a step that was not written: its prompt is too long, or there was an error."""

    def __call__(self, event: Event, given: list[Command], error: str, raised: Exception | None) -> None: ...


def _compiled() -> type[StepWriter] | None:
    try:
        from tidekv.engine.journal.native_steps import StepWriter
    except ImportError:
        return None
    return StepWriter


compiled = _compiled()
"""The type in C; None where it was not built."""


def writer(
    witness: Witness,
    core: Core,
    *,
    arrived: dict[str, tuple[bytes, bytes]],
    encode: Callable[[object], bytes],
    begun: Callable[[], None],
    full: Callable[[], None],
    left: Left,
    crowded: Callable[[], int],
    arrived_max: int,
    with_tokens: bool,
) -> StepWriter | None:
    """A writer of a core's steps, in the place of `witness.note`; None where it was not compiled.

    It calls `begun` when its buffer is no longer empty, `full` at each step while there are STEPS_MAX or more, `left`
    with a step that somebody else must take, and `crowded`, which returns the next limit, when more than `arrived_max`
    requests are in `arrived`.
    """
    if compiled is None:
        return None
    made = compiled(
        core=core,
        requests=witness.requests,
        evicted=witness.evicted,
        arrived=arrived,
        states=tuple(word for state in State for word in (state, encode(state))),
        books=witness.book_places,
        encode=encode,
        begun=begun,
        full=full,
        left=left,
        crowded=crowded,
        array_type=array,
        books_every=BOOKS_EVERY,
        full_steps=STEPS_MAX,
        key_bytes=core.settings.key_bytes,
        pages_max=PAGES_MAX,
        arrived_max=arrived_max,
        with_tokens=with_tokens,
    )
    witness.note_evictions_by(made.note_eviction)
    for event in event_types():
        _add_event(made, event)
    for command in COMMANDS:
        _add_command(made, command)
    return made


def _add_event(made: StepWriter, kind: type[Event]) -> None:
    """An object: its type, and the fields that do not have their default."""
    names, defaults = kind.__struct_fields__, kind.__struct_defaults__
    unwritten = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    before = [f',"{name}":'.encode() for name in names]
    fields = tuple((name, len(words), unwritten.get(name, NEVER)) for name, words in zip(names, before, strict=True))
    head = f'{{"type":"{kind.__name__}"'.encode()
    keys = (
        KEYS_ARRIVE if kind is RequestArrived else KEYS_END if kind in (FinishRequested, RetractRequested) else NO_KEYS
    )
    request_id = "request_id" if kind in OF_REQUESTS else None
    made.add_kind(kind, b"".join((head, *before, b"}")), len(head), 1, fields, request_id, keys)


def _add_command(made: StepWriter, kind: type[Command]) -> None:
    """A list: its type and the values of its fields, of which those for people are empty and the last."""
    names = [name for name in kind.__struct_fields__ if name not in OMITTED]
    omitted = kind.__struct_fields__[len(names) :]
    assert not set(omitted) - set(OMITTED), f"{kind.__name__} has fields behind those for people"
    head, tail = f'["{kind.__name__}"'.encode(), b',""' * len(omitted) + b"]"
    fields = tuple((name, 1, NEVER) for name in names)
    made.add_kind(kind, head + b"," * len(names) + tail, len(head), len(tail), fields, None, NO_KEYS)
