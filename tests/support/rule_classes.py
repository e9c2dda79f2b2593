"""The classes whose methods are the actions of the request machine, in place of the objects of one core."""

from __future__ import annotations

from typing import Any

from tidekv.states.handover.rooms import Rooms
from tidekv.states.request.guards_and_actions import Actions, Receiving
from tidekv.states.request.lending import Lending
from tidekv.states.request.ready import Serving
from tidekv.states.request.restore import Restore
from tidekv.states.request.table import Rules

KINDS: dict[str, Any] = {
    "restore": Restore,
    "lending": Lending,
    "rooms": Rooms,
    "receiving": Receiving,
    "serving": Serving,
    "actions": Actions,
}
CLASSES = Rules(**KINDS)
"""`row.before(CLASSES)` is the function that a row names."""
OWNERS = {owner.__name__: owner for owner in KINDS.values()}
