"""What a NIXL by script does with a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Script:
    """What becomes of one request: over at once or after that many checks, in place or failed."""

    checks: int = 0
    is_made: bool = True
    fails: bool = False
    release_fails: bool = False
