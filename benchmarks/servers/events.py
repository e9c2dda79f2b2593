"""Actions on servers between and amid the turns of conversations."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from tidekv.states.errors import InvalidConfig

WHEN: Final = {
    "restart": "before",
    "damage": "before",
    "reset": "before",
    "forget": "before",
    "kill": "amid",
    "freeze": "amid",
    "hang": "amid",
    "fill": "before",
}
STRIKES: Final = ("kill", "freeze")
STORAGE: Final = "storage"
"""Name of the storage (L3) among the servers of an event."""


@dataclass(frozen=True, slots=True)
class Event:
    """An action on a server at a turn.

    restart: end it and start it again before the turn. damage: overwrite bytes of its storage, while its memory is
    empty. reset: empty its prefix cache before the turn. forget: so, and the connector's view of storage. kill: SIGKILL
    amid the turn, and start it again. freeze: SIGSTOP for FREEZE_S seconds amid the turn. hang: no answer for as long.
    fill: no room from the turn on.
    Which of these a server knows depends on its engine; the server "storage" is redis or a folder.
    """

    turn: int
    action: str
    server: str

    @classmethod
    def parse(cls, text: str, servers: Mapping[str, Collection[str]]) -> Event:
        """Parse "5:kill:decode-0"; `servers`: those that there are, with the actions that each knows.

        Raises InvalidConfig.
        """
        turn, _, rest = text.partition(":")
        action, _, server = rest.partition(":")
        if not turn.isdigit() or action not in WHEN or not server:
            raise InvalidConfig(f"an event is TURN:ACTION:SERVER with {', '.join(WHEN)}, not {text!r}")
        if server not in servers:
            raise InvalidConfig(f"{text!r}: there is no server {server!r}; there are {', '.join(sorted(servers))}")
        if action not in servers[server]:
            raise InvalidConfig(f"{text!r}: {server} knows {', '.join(servers[server])}, not {action}")
        return cls(int(turn), action, server)
