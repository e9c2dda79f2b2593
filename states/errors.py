"""All errors that tidekv raises deliberately, grouped by what the caller can do about them."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

VALUE_CHARACTERS_MAX: Final = 500
"""Maximum length of a value in the text of PeerMismatch."""


def cause_of(error: BaseException) -> str:
    """Return the cause of an error for the text of another, which names the file or address already.

    Of an error of the operating system these are its words without the number and the names.
    """
    words = error.strerror if isinstance(error, OSError) else None
    return words or str(error) or type(error).__name__


class TidekvError(Exception):
    """Root of all errors of this package."""


class InvalidRequest(TidekvError, ValueError):
    """The call is invalid and changed nothing. Fix it and call again."""


class InvalidConfig(InvalidRequest):
    """A setting, option or layout is invalid. Nothing was started."""


class CapacityError(TidekvError):
    """There is not enough room at the moment, and nothing was changed. Try later, or release pages."""


class OutOfPages(CapacityError):
    """The device pool has no page for new tokens. Retract or finish a request."""


class OutOfMemory(CapacityError, MemoryError):
    """A pool needs more memory than there is. Nothing was allocated."""


class CopyFailed(TidekvError):
    """A copy between device and host failed. The contents of its destination are undefined, and it has no writer."""


class PagesDamaged(CopyFailed):
    """A page in host memory has not the checksum that was noted when it was written. Its bytes have changed since.

    `intact` is the number of pages of the copy before the first damaged one.
    """

    def __init__(self, text: str, *, intact: int) -> None:
        super().__init__(text)
        self.intact = intact


class TransferFailed(TidekvError):
    """A transfer from or to another process failed."""


class LinkClosed(TransferFailed):
    """A control link has ended. The text names the link, the side that ended it, and the cause.

    `is_orderly` means that the peer announced the end.
    """

    def __init__(self, cause: str | None, *, is_orderly: bool = False) -> None:
        super().__init__(cause)
        self.is_orderly = is_orderly


class StorageFailed(TidekvError):
    """A call of a storage engine failed. Requests continue without storage."""


class EngineClosed(TidekvError):
    """The engine is closed or closing and accepts no more calls."""


class ProtocolError(TidekvError):
    """The hand-over protocol was violated."""


class LocalProtocolError(ProtocolError):
    """This process violated the protocol: a bug of tidekv or of its caller."""


class RemoteProtocolError(ProtocolError):
    """The peer violated the protocol."""


class PeerMismatch(RemoteProtocolError):
    """The peer's model, layout, page size, dtype or version differs. `field` names the first difference."""

    def __init__(self, *, field: str, ours: object, theirs: object) -> None:
        super().__init__(f"peer differs in {field}: ours is {_brief(ours)}, theirs is {_brief(theirs)}")
        self.field = field
        self.ours = ours
        self.theirs = theirs


def _brief(value: object) -> str:
    """Return a value as one bounded line, since the peer has chosen it."""
    text = repr(value)
    return text if len(text) <= VALUE_CHARACTERS_MAX else f"{text[:VALUE_CHARACTERS_MAX]}…"


class IllegalEvent(TidekvError):
    """The table has no row for an event in the request's state. Nothing was changed; this is a bug of the driver."""


class BrokenInvariant(TidekvError, AssertionError):
    """A page pool, the index or another record of the core contradicts itself: a bug of tidekv.

    The engine stops. Report the bug with the journal.
    """


class RanksDiverged(BrokenInvariant):
    """The ranks of an instance have different states: a bug, or callers that made different calls on the ranks.

    `parts` names the parts that differ. The instance stops.
    """

    def __init__(self, *, turn: int, parts: tuple[str, ...]) -> None:
        super().__init__(f"ranks differ at turn {turn} in: {', '.join(parts)}")
        self.turn = turn
        self.parts = parts


class RankBroken(TidekvError):
    """The engine of one rank broke and reported it. All ranks of the instance stop."""

    def __init__(self, *, rank: int) -> None:
        super().__init__(f"the engine of rank {rank} broke; its log has the cause")
        self.rank = rank


class RankLost(TidekvError):
    """A rank of the instance is unreachable. Requests fail until all ranks have formed a new group."""

    def __init__(self, *, rank: int, cause: str) -> None:
        super().__init__(f"rank {rank} is lost: {cause}")
        self.rank = rank
        self.cause = cause


class JournalRefused(InvalidRequest):
    """This version cannot read the file as a journal: it is empty, of another kind or version, or lacks its start."""


class JournalDamaged(TidekvError):
    """A line of a journal is damaged or missing: line `line`, counted from 1, of file `path`."""

    def __init__(self, *, path: str, line: int, cause: str) -> None:
        super().__init__(f"journal damaged at {path}:{line}: {cause}")
        self.path = path
        self.line = line
        self.cause = cause


class ReplayDiverged(TidekvError):
    """In a replay, the core's result of an event differs from the recorded one: its rules have changed.

    `seq`, `event` and `turn` identify the first such event; `parts` names what differs: "raises", "error", "effects"
    (moves, commands and evictions), or a part of the state. `recorded` and `replayed` describe both results.
    """

    def __init__(
        self, *, seq: int, event: str, turn: int, parts: tuple[str, ...], recorded: str, replayed: str, hint: str = ""
    ) -> None:
        super().__init__(
            f"replay diverged at event {seq} (turn {turn}) in {', '.join(parts)}: {event}\n"
            f"  recorded: {recorded}\n  replayed: {replayed}" + (f"\n  {hint}" if hint else "")
        )
        self.seq = seq
        self.event = event
        self.turn = turn
        self.parts = parts
        self.recorded = recorded
        self.replayed = replayed


class PrefillCause(StrEnum):
    """Why a prefill did not send a request's pages. The `cause` of RequestFailed if no other prefill is left.

    Events carry it as text, at the start of their cause: see `words` and `parse`.
    """

    PROTOCOL_ERROR = "protocol error"
    MISMATCH = "prefill does not match"
    WRONG_SECRET = "wrong secret"
    UNKNOWN_HOST = "unknown host"
    MISCONFIGURED = "misconfigured"
    OTHER_PROMPT = "other prompt"
    RAISED = "prefill raised"
    UNFINISHED = "prefill unfinished"
    PROCESS_GONE = "prefill process gone"
    LOST = "prefill lost"
    SILENT = "prefill silent"
    UNREACHABLE = "prefill unreachable"
    CONNECTION_REFUSED = "connection refused"
    TRANSFER_FAILED = "transfer failed"
    DAMAGED = "pages damaged"
    LEASE_ENDED = "lease ended"
    CLOSING = "prefill closing"
    FAILED = "prefill failed"
    REFUSED = "refused by prefill"

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later at the same prefill without any change.

        The other causes need an operator to change something first: an address, a secret, a version, code.
        """
        return self not in NOT_RETRYABLE

    @property
    def is_lateness(self) -> bool:
        """Whether it says only that an end was late: the same request succeeds once both get their turns again."""
        return self in (PrefillCause.SILENT, PrefillCause.LEASE_ENDED)

    def words(self, detail: str) -> str:
        """Return the text of an event: this cause, then `detail`."""
        return f"{self.value}: {detail}"

    @staticmethod
    def parse(text: str) -> tuple[PrefillCause, str] | None:
        """Split a text of `words` into cause and detail; None if it does not begin with a cause."""
        cause, separator, detail = text.partition(": ")
        if not separator or cause not in PREFILL_CAUSES:
            return None
        return PREFILL_CAUSES[cause], detail


NOT_RETRYABLE: Final = frozenset(
    {
        PrefillCause.PROTOCOL_ERROR,
        PrefillCause.MISMATCH,
        PrefillCause.WRONG_SECRET,
        PrefillCause.UNKNOWN_HOST,
        PrefillCause.MISCONFIGURED,
        PrefillCause.OTHER_PROMPT,
        PrefillCause.RAISED,
        PrefillCause.UNFINISHED,
    }
)
PREFILL_CAUSES: Final = {cause.value: cause for cause in PrefillCause}


class RequestFailed(TidekvError):
    """A request ended in FAILED. `cause` is the reason; `detail` has more about it, such as a peer's text or a
    traceback.
    """

    def __init__(self, request_id: str, cause: str, detail: str = "") -> None:
        super().__init__(
            f"request {request_id!r} failed: {cause}"
            + (f" ({detail.strip().splitlines()[-1]})" if detail.strip() else "")
        )
        self.request_id = request_id
        self.cause = cause
        self.detail = detail


class LayersLost(TidekvError):
    """A source of a request's pages failed after its early READY. `cause` is the reason.

    Stop what uses the pages, then wait for layer 0 and begin again with the request's pages and first token as they are
    then.
    """

    def __init__(self, request_id: str, cause: str) -> None:
        super().__init__(
            f"request {request_id!r}: layers of its pages were lost: {cause}; stop using the pages, then wait for"
            " layer 0 and begin again"
        )
        self.request_id = request_id
        self.cause = cause
