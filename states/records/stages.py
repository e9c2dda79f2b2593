"""What a request, a load, or a fetch of component pages waits for."""

from __future__ import annotations

import enum


class State(enum.Enum):
    """State of a request, named by what it waits for. `tidekv.states.request.table` lists what it owns in each."""

    PREALLOC = "PREALLOC"
    MATCH = "MATCH"
    PREFETCH = "PREFETCH"
    LOCAL_RESTORE = "LOCAL_RESTORE"
    TRANSFER = "TRANSFER"
    READY = "READY"
    FAILED = "FAILED"


class Stage(enum.Enum):
    """Stage of a load, named by the next source of its contents. `tidekv.states.loads.loads` draws the transitions."""

    FETCHING = "FETCHING"
    COPYING = "COPYING"
    FAILED = "FAILED"
    RECEIVING = "RECEIVING"
    RECLAIMING = "RECLAIMING"


class ComponentStage(enum.Enum):
    """Progress of a fetch of component pages."""

    FETCHING = "FETCHING"
    COPYING = "COPYING"
