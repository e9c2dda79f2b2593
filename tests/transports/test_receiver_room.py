"""The receiving room accepts exactly the chunks that follow one another, whatever prefill reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidekv.states.errors import LocalProtocolError, RemoteProtocolError
from tidekv.transports.decode.decode_room import ReceiverRoom

CHUNK = st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 5), st.booleans())


@given(chunks=st.lists(CHUNK, max_size=30), refused=st.sets(st.integers(0, 25), max_size=2))
def test_a_chunk_is_taken_exactly_when_it_follows(chunks: list[tuple[int, int, int, bool]], refused: set[int]) -> None:
    """Against a model: the pages of each span that are still to come, as a list."""
    room = ReceiverRoom(first=2, count=5)
    room.extend(1, 0, 2)
    left: dict[int, list[int] | None] = {0: [2, 3, 4, 5, 6], 1: [0, 1]}
    for turn, (span, first, count, last) in enumerate(chunks):
        if turn in refused:
            if left.get(1) is None:
                with pytest.raises(RemoteProtocolError, match="refused"):
                    room.refuse(1)
            else:
                room.refuse(1)
                left.pop(1)
        wanted = left.get(span)
        pages = list(range(first, first + count))
        follows = (
            wanted is not None
            and wanted[:count] == pages
            and (bool(pages) or (wanted[0] if wanted else {0: 7, 1: 2}[span]) == first)
            and (not last or len(wanted) == count)
        )
        if follows:
            assert wanted is not None
            room.receive(span=span, first=first, count=count, last=last)
            left[span] = None if last else wanted[count:]
        else:
            with pytest.raises(RemoteProtocolError):
                room.receive(span=span, first=first, count=count, last=last)


def test_a_span_is_requested_once_and_refused_before_it_is_complete() -> None:
    room = ReceiverRoom(first=0, count=1)
    with pytest.raises(LocalProtocolError, match="span 0 was requested already"):
        room.extend(0, 0, 1)
    with pytest.raises(RemoteProtocolError, match="span 3 is refused"):
        room.refuse(3)
    room.receive(span=0, first=0, count=1, last=True)
    with pytest.raises(RemoteProtocolError, match="comes after the span's last one"):
        room.receive(span=0, first=1, count=0, last=True)
    with pytest.raises(RemoteProtocolError, match="complete"):
        room.refuse(0)


def test_the_last_chunk_of_span_0_comes_after_the_component_pages() -> None:
    room = ReceiverRoom(first=0, count=2, component_pages={"swa": (0, 2), "ssm": (1, 1)})
    room.extend(1, 0, 1)
    room.receive(span=1, first=0, count=1, last=True)
    room.receive(span=0, first=0, count=1, last=False)
    room.receive(component="ssm", span=0, first=1, count=1, last=True)
    with pytest.raises(RemoteProtocolError, match="is marked as the last; the pages of 'swa' were not sent"):
        room.receive(span=0, first=1, count=1, last=True)
    for wrong, text in (("ssm", "comes after the span's last one"), ("other", "was never requested")):
        with pytest.raises(RemoteProtocolError, match=f"of span 0 of component '{wrong}' {text}"):
            room.receive(component=wrong, span=0, first=1, count=1, last=True)
    room.receive(component="swa", span=0, first=0, count=1, last=False)
    with pytest.raises(RemoteProtocolError, match="the pages of 'swa' were not sent"):
        room.receive(span=0, first=1, count=1, last=True)
    room.receive(component="swa", span=0, first=1, count=1, last=True)
    room.receive(span=0, first=1, count=1, last=True)


def test_a_further_span_of_a_component_is_one_of_its_own() -> None:
    room = ReceiverRoom(first=0, count=0, component_pages={})
    room.extend(1, 3, 2, "swa")
    room.extend(2, 4, 1)
    with pytest.raises(RemoteProtocolError, match="span 1 was never requested"):
        room.receive(span=1, first=3, count=2, last=True)
    with pytest.raises(RemoteProtocolError, match="span 2 of component 'swa' was never requested"):
        room.receive(component="swa", span=2, first=4, count=1, last=True)
    room.receive(component="swa", span=1, first=3, count=1, last=False)
    room.refuse(1)
    with pytest.raises(RemoteProtocolError, match="or was refused"):
        room.receive(component="swa", span=1, first=4, count=1, last=True)
    # The promise does not wait for further spans.
    room.receive(span=0, first=0, count=0, last=True)
