"""Context-parallel prefill ranks: each page has one holder, and a room writes exactly the pages that its rank holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidekv.states.component_specs import ComponentPages
from tidekv.states.errors import InvalidConfig, InvalidRequest
from tidekv.states.handover.context_parts import EVERY_PAGE, ContextPart, part_of
from tidekv.states.handover.rank_place import RankPlace
from tidekv.states.handover.sender import SenderRoom
from tidekv.states.types import page_ids

SIZE = 4


@given(contexts=st.integers(1, 9), stripe_pages=st.integers(0, 4), page_count=st.integers(0, 60))
def test_each_page_is_held_by_one_context(contexts: int, stripe_pages: int, page_count: int) -> None:
    parts = [
        part_of(RankPlace(rank=rank, ranks=contexts, contexts=contexts, stripe_pages=stripe_pages))
        for rank in range(contexts)
    ]
    holders = [[at for at, part in enumerate(parts) if part.holds(page, page_count)] for page in range(page_count)]
    assert all(len(of) == 1 for of in holders)
    flat = [of[0] for of in holders]
    if stripe_pages:
        assert flat == [page // stripe_pages % contexts for page in range(page_count)]
    else:
        counts = [flat.count(context) for context in range(contexts)]
        assert flat == sorted(flat) and counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1


def test_ranks_are_counted_context_by_context() -> None:
    parts = [part_of(RankPlace(rank=rank, ranks=6, contexts=3, stripe_pages=2)) for rank in range(6)]
    assert [part.context for part in parts] == [0, 0, 1, 1, 2, 2]
    assert part_of(RankPlace(rank=1, ranks=2, contexts=1, stripe_pages=0)) is EVERY_PAGE
    for contexts, stripe_pages in ((0, 0), (4, 0), (2, -1)):
        with pytest.raises(InvalidConfig, match="context-parallel"):
            part_of(RankPlace(rank=0, ranks=6, contexts=contexts, stripe_pages=stripe_pages))


@given(data=st.data())
def test_the_contexts_of_a_room_together_write_every_requested_page_once(data: st.DataObject) -> None:
    contexts, stripe_pages = data.draw(st.integers(2, 4)), data.draw(st.integers(0, 3))
    tokens = data.draw(st.integers(1, 50))
    count = -(-tokens // SIZE)
    promised = data.draw(st.integers(0, tokens // SIZE))
    extended = data.draw(st.integers(0, promised))
    tail = data.draw(st.integers(0, count))
    needed = data.draw(st.integers(0, tail))
    window = ComponentPages("swa", tail, page_ids(range(500 + tail, 500 + count)))
    again = data.draw(st.integers(needed, tail))
    written: dict[tuple[str, int], int] = {}
    for context in range(contexts):
        part = ContextPart(context, contexts, stripe_pages)
        room = SenderRoom(
            prompt_tokens=tokens,
            decode_prefix_len=promised * SIZE,
            page_size=SIZE,
            pages=page_ids(range(100 + promised, 100 + count)),
            component_pages=[window],
            needed_from={"swa": needed},
            part=part,
        )
        if extended:
            room.extend(1, 0, page_ids(range(200, 200 + extended)))
        if again < tail:
            room.extend(2, again, page_ids(range(600 + again, 600 + tail)), "swa")
        held = part.held(range(count), count)
        steps = sorted(data.draw(st.sets(st.integers(0, tokens // SIZE), max_size=3)) | {count})
        cursors = {("full", 0): promised, ("full", 1): 0, ("swa", 0): tail, ("swa", 2): again}
        pages_max = data.draw(st.integers(1, 4))
        ends = {("full", 0): count, ("full", 1): extended, ("swa", 0): count, ("swa", 2): tail}

        def write(
            room: SenderRoom = room,
            part: ContextPart = part,
            pages_max: int = pages_max,
            cursors: dict[tuple[str, int], int] = cursors,
        ) -> None:
            while (job := room.next_job(pages_max=pages_max)) is not None:
                assert len(job.our_pages) == len(job.their_pages) <= pages_max
                for ours, theirs in zip(job.our_pages, job.their_pages, strict=True):
                    assert (job.component, theirs) not in written, "two contexts write one page"
                    written[job.component, theirs] = ours
                room.settle(job, written=True, checksums=bytes(len(job.our_pages)))
            for chunk in room.take_chunks():
                span = chunk.component, chunk.span
                assert chunk.first == cursors[span]
                cursors[span] += chunk.count
                # A chunk has the checksums of the pages in its range that this rank holds.
                assert len(chunk.checksums) == len(part.held(range(chunk.first, cursors[span]), count))

        start = 0
        for step in steps:
            pages = page_ids(at for at in held if start <= at < step)
            with pytest.raises(InvalidRequest):
                room.remember(pages, start_token=start * SIZE)
            with pytest.raises(InvalidRequest):
                room.remember(page_ids([*pages, 9]), start_token=start * SIZE, end_token=min(step * SIZE, tokens))
            room.remember(pages, start_token=start * SIZE, end_token=min(step * SIZE, tokens))
            start = step
            write()
        if any(at >= needed for at in held):
            room.send_component_pages("swa", page_ids(at for at in held if at >= needed))
        room.finish()
        write()
        assert room.is_complete and room.pages_unwritten == 0
        assert cursors == ends
    assert written == {
        **{("full", 100 + at): at for at in range(promised, count)},
        **{("full", 200 + at): at for at in range(extended)},
        **{("swa", 500 + at): at for at in range(tail, count)},
        **{("swa", 600 + at): at for at in range(again, tail)},
    }
