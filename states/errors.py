"""Every error that tidekv raises on purpose, by what the caller can do about it."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

VALUE_CHARACTERS_MAX: Final = 500
"""Maximum length of a value in the text of PeerMismatch."""


class TidekvError(Exception):
    """Root of all errors of this package."""


class InvalidRequest(TidekvError, ValueError):
    """The call is wrong and changed nothing: fix it and call again."""


class InvalidConfig(InvalidRequest):
    """A setting, option or layout is wrong; nothing was started."""


class CapacityError(TidekvError):
    """There is no room now; nothing was changed: try later, or give something back."""


class OutOfPages(CapacityError):
    """The device pool has no page for the new tokens: retract or finish a request."""


class OutOfMemory(CapacityError, MemoryError):
    """A pool asked for more memory than there is; nothing was allocated."""


class CopyFailed(TidekvError):
    """A copy between device and host failed: its destination holds garbage, and nothing writes there any more."""


class TransferFailed(TidekvError):
    """Bytes did not come from, or go to, another process."""


class LinkClosed(TransferFailed):
    """A control link has ended; the text says which, by whom and why. `is_orderly`: the peer said goodbye before."""

    def __init__(self, cause: str | None, *, is_orderly: bool = False) -> None:
        super().__init__(cause)
        self.is_orderly = is_orderly


class StorageFailed(TidekvError):
    """A storage engine cannot do its work; requests go on without it."""


class EngineClosed(TidekvError):
    """The engine is closed or closing and takes no more calls."""


class ProtocolError(TidekvError):
    """The hand-over protocol was broken."""


class LocalProtocolError(ProtocolError):
    """This process broke the protocol: a bug of ours or of the embedder."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol."""


class PeerMismatch(RemoteProtocolError):
    """The peer's model, layout, page size, dtype or version is not ours; `field` names the first that differs."""

    def __init__(self, *, field: str, ours: object, theirs: object) -> None:
        super().__init__(f"peer differs in {field}: ours is {_brief(ours)}, theirs is {_brief(theirs)}")
        self.field = field
        self.ours = ours
        self.theirs = theirs


def _brief(value: object) -> str:
    """A value as one bounded line: the peer chose it."""
    text = repr(value)
    return text if len(text) <= VALUE_CHARACTERS_MAX else f"{text[:VALUE_CHARACTERS_MAX]}…"


class IllegalEvent(TidekvError):
    """An event that the table has no row for, in this state: a bug of the driver, nothing was changed."""


class BrokenInvariant(TidekvError, AssertionError):
    """An account or the index contradicts itself: a bug of tidekv. The engine stops; report it with the journal."""


class RanksDiverged(BrokenInvariant):
    """The ranks of an instance no longer keep the same: a bug, or callers that did not do the same on all ranks.

    `parts` names what differs. The instance stops.
    """

    def __init__(self, *, turn: int, parts: tuple[str, ...]) -> None:
        super().__init__(f"ranks differ at turn {turn} in: {', '.join(parts)}")
        self.turn = turn
        self.parts = parts


class RankBroken(TidekvError):
    """The engine of one rank broke and said so: all ranks of the instance stop."""

    def __init__(self, *, rank: int) -> None:
        super().__init__(f"the engine of rank {rank} broke; its log says why")
        self.rank = rank


class RankLost(TidekvError):
    """A rank of the instance is out of reach: requests fail until all ranks have formed a new group."""

    def __init__(self, *, rank: int, cause: str) -> None:
        super().__init__(f"rank {rank} is lost: {cause}")
        self.rank = rank
        self.cause = cause


class JournalRefused(InvalidRequest):
    """This is no journal that this version can read: empty, of another kind or version, or without its start."""


class JournalDamaged(TidekvError):
    """A line of a journal is not what was written, or is missing. `line` is where, counted from 1 in file `path`."""

    def __init__(self, *, path: str, line: int, cause: str) -> None:
        super().__init__(f"journal damaged at {path}:{line}: {cause}")
        self.path = path
        self.line = line
        self.cause = cause


class ReplayDiverged(TidekvError):
    """Something else follows from an event than in the run: the rules of the core have changed.

    `seq`, `event` and `turn` are the first such event and its turn; `parts` names what differs: "raises", "error",
    "moves", "commands", "evictions", or a part of the state. `recorded` and `replayed` are both sides, in words.
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
    """Why a prefill did not send what a request asked of it: the `cause` of RequestFailed if no other prefill is left.

    Events carry it as text, as the beginning of their cause: see `words` and `parse`.
    """

    PROTOCOL_ERROR = "protocol error"
    MISMATCH = "prefill does not match"
    WRONG_SECRET = "wrong secret"
    UNKNOWN_HOST = "unknown host"
    MISCONFIGURED = "misconfigured"
    RAISED = "prefill raised"
    PROCESS_GONE = "prefill process gone"
    LOST = "prefill lost"
    SILENT = "prefill silent"
    UNREACHABLE = "prefill unreachable"
    CONNECTION_REFUSED = "connection refused"
    TRANSFER_FAILED = "transfer failed"
    LEASE_ENDED = "lease ended"
    CLOSING = "prefill closing"
    FAILED = "prefill failed"
    REFUSED = "refused by prefill"

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later at the same prefill, with nothing changed. Of the others a person
        has to change something first: an address, a secret, a version, code.
        """
        return self not in NOT_RETRYABLE

    def words(self, detail: str) -> str:
        """This cause with what is known beyond it, as the text of an event."""
        return f"{self.value}: {detail}"

    @staticmethod
    def parse(text: str) -> tuple[PrefillCause, str] | None:
        """What `words` put together; None for text that does not begin with a cause."""
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
        PrefillCause.RAISED,
    }
)
PREFILL_CAUSES: Final = {cause.value: cause for cause in PrefillCause}


class RequestFailed(TidekvError):
    """A request ended in FAILED; `cause` says why, `detail` holds what is known beyond that (a peer's words, a
    traceback).
    """

    def __init__(self, request_id: str, cause: str, detail: str = "") -> None:
        super().__init__(
            f"request {request_id!r} failed: {cause}"
            + (f" ({detail.strip().splitlines()[-1]})" if detail.strip() else "")
        )
        self.request_id = request_id
        self.cause = cause
        self.detail = detail
