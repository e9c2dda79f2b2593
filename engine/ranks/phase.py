"""What one rank is doing: see `tidekv.engine.ranks.driver` for how it goes from one to the next."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """What this rank is doing."""

    FORMING = "forming"
    VOTING = "voting"
    ALONE = "alone"
    CLOSED = "closed"
