"""`help(Room)` lists the fields of a room, and says which of its names are not for embedders."""

from __future__ import annotations

import inspect
import re

from tidekv import Room


async def test_the_documentation_of_a_room_names_its_fields_and_what_is_for_the_peer(world) -> None:
    decode, prefill = await world.decode(), await world.prefill()
    decode.promise(prefill.address, "r1", tokens=4, promised=0, pages=[1])
    room = await prefill.room("r1")
    text = inspect.getdoc(Room) or ""
    named = set(re.findall(r"\w+", text))
    assert {name for name in vars(room) if not name.startswith("_")} <= named
    of_peer = set(re.findall(r"`(\w+)`", text.partition("For the peer alone:")[2]))
    public = {name for name in [*dir(Room), *vars(room)] if not name.startswith("_")}
    assert of_peer <= public
    for name in public - of_peer - set(vars(room)):
        assert inspect.getdoc(getattr(Room, name)), name
    await room.send([30], start_token=0)
    await room.finish(first_token=1)
