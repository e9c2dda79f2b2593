"""The sending room: every page once, chunks in order, one last a span, never drained while something is in flight."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.thorough import examples
from tidekv.states.component_specs import ComponentPages
from tidekv.states.errors import InvalidRequest, LocalProtocolError, RemoteProtocolError
from tidekv.states.handover.sender import SPANS_MAX, ChunkReady, SenderRoom, WriteJob
from tidekv.states.types import page_ids

PAGE = 4


def room(
    *,
    tokens: int,
    promised: int = 0,
    component_pages: dict[str, tuple[int, list[int]]] | None = None,
    needed_from: dict[str, int] | None = None,
) -> SenderRoom:
    """A room with decode pages from 100 up; of components, where they begin and their pages."""
    count = -(-tokens // PAGE) - promised // PAGE
    return SenderRoom(
        prompt_tokens=tokens,
        decode_prefix_len=promised,
        page_size=PAGE,
        pages=page_ids(range(100, 100 + count)),
        component_pages=[
            ComponentPages(name, first, page_ids(pages)) for name, (first, pages) in (component_pages or {}).items()
        ],
        needed_from=needed_from,
    )


def jobs(sender: SenderRoom, *, pages_max: int = 100) -> list[WriteJob]:
    taken = []
    while (job := sender.next_job(pages_max=pages_max)) is not None:
        taken.append(job)
    return taken


def land_all(sender: SenderRoom) -> list[ChunkReady]:
    for job in jobs(sender):
        sender.settle(job, written=True)
    return sender.take_chunks()


def test_what_was_promised_is_left_out() -> None:
    sender = room(tokens=18, promised=8)
    sender.remember(page_ids(range(5)), start_token=0)
    (job,) = jobs(sender)
    assert (job.first, list(job.our_pages), list(job.their_pages)) == (2, [2, 3, 4], [100, 101, 102])
    assert sender.take_chunks() == []
    sender.settle(job, written=True)
    assert sender.take_chunks() == [ChunkReady(0, 2, 3, last=False)]
    sender.finish()
    assert land_all(sender) == [ChunkReady(0, 5, 0, last=True)]
    assert sender.is_complete


def test_the_last_chunk_carries_pages_where_prefill_finished_in_time() -> None:
    sender = room(tokens=8)
    sender.remember(page_ids([7, 8]), start_token=0)
    sender.finish()
    assert land_all(sender) == [ChunkReady(0, 0, 2, last=True)]


@pytest.mark.parametrize("sent", [0, 2])
def test_a_full_hit_writes_nothing_and_still_ends(sent: int) -> None:
    sender = room(tokens=8, promised=8)
    sender.remember(page_ids(range(sent)), start_token=0)
    assert sender.take_chunks() == []
    sender.finish()
    assert land_all(sender) == [ChunkReady(0, 2, 0, last=True)]


def test_an_extend_waits_for_what_is_not_computed() -> None:
    sender = room(tokens=16, promised=8)
    sender.extend(1, 0, page_ids([50, 51]))
    assert jobs(sender) == []
    sender.remember(page_ids([0]), start_token=0)
    (job,) = jobs(sender)
    assert (job.span, job.first, list(job.their_pages)) == (1, 0, [50])
    sender.settle(job, written=True)
    assert sender.take_chunks() == [ChunkReady(1, 0, 1, last=False)]
    sender.remember(page_ids([1, 2, 3]), start_token=4)
    sender.finish()
    assert land_all(sender)[-1] == ChunkReady(1, 1, 1, last=True)
    sender.extend(2, 1, page_ids([60]))
    assert land_all(sender) == [ChunkReady(2, 1, 1, last=True)]


def test_an_extend_of_a_full_hit_without_pages_is_refused_each_time() -> None:
    sender = room(tokens=8, promised=8)
    sender.extend(1, 0, page_ids([50]))
    sender.finish()
    assert [refusal.span for refusal in sender.take_refusals()] == [1]
    sender.extend(1, 0, page_ids([50]))
    assert [refusal.span for refusal in sender.take_refusals()] == [1]
    assert land_all(sender) == [ChunkReady(0, 2, 0, last=True)]


def test_a_stopped_room_refuses_nothing_any_more() -> None:
    sender = room(tokens=8, promised=8)
    sender.finish()
    sender.extend(1, 0, page_ids([50]))
    sender.stop("aborted")
    assert sender.take_refusals() == []


def test_a_repeated_extend_is_harmless_and_a_second_meaning_is_not() -> None:
    sender = room(tokens=8, promised=8)
    sender.extend(1, 0, page_ids([50]))
    sender.extend(1, 0, page_ids([50]))
    with pytest.raises(RemoteProtocolError, match="twice, as different pages"):
        sender.extend(1, 0, page_ids([51]))
    sender.remember(page_ids([0, 1]), start_token=0)
    assert len(jobs(sender)) == 1


def test_a_page_that_is_not_full_waits_for_its_rest() -> None:
    sender = room(tokens=11)
    sender.remember(page_ids([1, 2]), start_token=0, end_token=6)
    assert [job.first for job in jobs(sender)] == [0]
    assert sender.computed_pages == 1
    sender.remember(page_ids([2, 3]), start_token=4)
    assert [list(job.our_pages) for job in jobs(sender)] == [[2, 3]]


def test_an_empty_last_chunk_is_reported_with_the_pages_before_it() -> None:
    sender = room(tokens=8)
    sender.remember(page_ids([7, 8]), start_token=0)
    (job,) = jobs(sender)
    sender.finish()
    assert sender.take_chunks() == []
    sender.settle(job, written=True)
    assert sender.take_chunks() == [ChunkReady(0, 0, 2, last=True)]
    assert sender.is_complete


def test_chunks_are_reported_in_page_order_and_merged_if_they_were_written_together() -> None:
    sender = room(tokens=12)
    sender.remember(page_ids([0, 1, 2]), start_token=0)
    first, second, third = jobs(sender, pages_max=1)
    sender.settle(third, written=True)
    sender.settle(second, written=True)
    assert sender.take_chunks() == []
    sender.settle(first, written=True)
    assert sender.take_chunks() == [ChunkReady(0, 0, 3, last=False)]


def test_a_failed_write_is_never_reported() -> None:
    sender = room(tokens=8)
    sender.remember(page_ids([0, 1]), start_token=0)
    sender.finish()
    (job,) = jobs(sender)
    sender.settle(job, written=False)
    assert sender.take_chunks() == []
    assert not sender.is_complete


def test_a_stopped_room_is_drained_only_when_nothing_is_in_flight() -> None:
    sender = room(tokens=8)
    sender.remember(page_ids([0, 1]), start_token=0)
    one = sender.next_job(pages_max=1)
    assert one is not None
    assert sender.stop("aborted")
    assert not sender.stop("again")
    assert sender.stopped == "aborted"
    assert sender.next_job(pages_max=1) is None
    assert not sender.is_drained
    sender.settle(one, written=True)
    assert sender.is_drained
    assert sender.take_chunks() == []


@pytest.mark.parametrize(
    ("tokens", "promised", "pages"), [(10, 3, 3), (10, 12, 0), (10, -4, 4), (10, 4, 1), (10, 4, 3), (8, 8, 1)]
)
def test_a_promise_that_contradicts_itself_is_the_peers_fault(tokens: int, promised: int, pages: int) -> None:
    with pytest.raises(RemoteProtocolError):
        SenderRoom(prompt_tokens=tokens, decode_prefix_len=promised, page_size=PAGE, pages=page_ids(range(pages)))


@pytest.mark.parametrize(("first", "pages"), [(-1, 1), (0, 4), (3, 1), (2**30, 1)])
def test_an_extend_outside_the_prompt_is_the_peers_fault(first: int, pages: int) -> None:
    with pytest.raises(RemoteProtocolError):
        room(tokens=10).extend(1, first, page_ids(range(pages)))


def test_spans_are_bounded() -> None:
    sender = room(tokens=4)
    for number in range(1, SPANS_MAX):
        sender.extend(number, 0, page_ids([1]))
    with pytest.raises(RemoteProtocolError, match="more than"):
        sender.extend(SPANS_MAX, 0, page_ids([1]))


@pytest.mark.parametrize(
    ("pages", "start", "end"),
    [([2], 8, None), ([2], 2, None), ([2], -4, None), ([9], 0, None), ([1, 2, 3], 4, None), ([2], 4, 3), ([2], 4, 9)],
    ids=["gap", "in a page", "negative", "other page", "beyond", "end before start", "end beyond the pages"],
)
def test_pages_that_do_not_follow_are_refused_and_change_nothing(pages: list[int], start: int, end: int | None) -> None:
    sender = room(tokens=10)
    sender.remember(page_ids([1]), start_token=0)
    with pytest.raises(InvalidRequest):
        sender.remember(page_ids(pages), start_token=start, end_token=end)
    assert sender.computed_pages == 1
    sender.remember(page_ids([1, 2, 3]), start_token=0)
    assert sender.computed_pages == 3


def test_finishing_without_all_pages_is_refused_and_changes_nothing() -> None:
    sender = room(tokens=10)
    with pytest.raises(InvalidRequest, match=r"\[0, 3\)"):
        sender.finish()
    sender.remember(page_ids([1, 2, 3]), start_token=0)
    sender.finish()
    with pytest.raises(LocalProtocolError, match="already"):
        sender.finish()
    with pytest.raises(InvalidRequest, match="finished"):
        sender.remember(page_ids([1, 2, 3]), start_token=0)


def checksums_of(pages: Iterable[int]) -> bytes:
    """What a test takes for the checksums of prefill's pages."""
    return b"".join(page.to_bytes(16, "little") for page in pages)


class Sending(RuleBasedStateMachine):
    """Any interleaving of sends, extends of any component, writes that end in any order, and a stop."""

    @initialize(tokens=st.integers(1, 30), data=st.data())
    def open(self, tokens: int, data: st.DataObject) -> None:
        self.tokens = tokens
        self.page_count = -(-tokens // PAGE)
        promised = data.draw(st.integers(0, tokens // PAGE))
        # The first position that prefill hands over of each component: the promise may begin behind it.
        self.needed = {
            "full": 0,
            "window": data.draw(st.integers(0, self.page_count - 1)),
            "state": self.page_count - 1,
        }
        # First position and decode's pages by component and number of the span; what was written where.
        self.spans = {("full", 0): (promised, list(range(100, 100 + self.page_count - promised)))}
        self.requested = {}
        for name, base in (("window", 500), ("state", 600)):
            first = data.draw(st.integers(self.needed[name], self.page_count))
            self.requested[name] = (first, list(range(base, base + self.page_count - first)))
            if first < self.page_count:
                self.spans[name, 0] = self.requested[name]
        self.sender = room(
            tokens=tokens,
            promised=promised * PAGE,
            component_pages=self.requested,
            needed_from={name: first for name, first in self.needed.items() if name != "full"},
        )
        self.flying: list[WriteJob] = []
        self.written: dict[tuple[str, int], int] = {}
        self.told = {span: first for span, (first, _) in self.spans.items()}
        self.lasts: list[tuple[str, int]] = []
        self.handed_over: set[str] = set()
        self.numbers = 0
        self.stopped = False

    @rule(count=st.integers(0, 3), partial=st.integers(0, PAGE - 1))
    def send(self, count: int, partial: int) -> None:
        if self.sender.finished:
            return
        start = self.sender.computed_pages
        ids = page_ids(range(start, min(start + count, self.page_count)))
        reach = min((start + len(ids)) * PAGE, self.tokens)
        end = max(reach - partial, min(start * PAGE, self.tokens))
        if start * PAGE <= end:
            self.sender.remember(ids, start_token=start * PAGE, end_token=end)

    @rule(name=st.sampled_from(["window", "state"]))
    def send_component_pages(self, name: str) -> None:
        if not self.sender.finished:
            self.sender.send_component_pages(name, page_ids(range(self.needed[name], self.page_count)))
            self.handed_over.add(name)

    @rule()
    def finish(self) -> None:
        if self.sender.finished or self.sender.computed_pages < self.page_count:
            return
        owed = [name for name in ("window", "state") if (name, 0) in self.spans and name not in self.handed_over]
        if owed:
            with pytest.raises(InvalidRequest, match=f"the pages of component '{owed[0]}'"):
                self.sender.finish()
            return
        self.sender.finish()
        if not self.stopped:
            self.forget_refused()

    def forget_refused(self) -> None:
        """Prefill never had pages of a component that the promise does not ask for: its further spans are refused."""
        refused = {refusal.span for refusal in self.sender.take_refusals()}
        gone = [(name, number) for name, number in self.spans if name not in ("full", *self.handed_over)]
        assert refused == {number for name, number in gone if self.spans[name, number][1]}
        for span in [span for span in gone if span[1] in refused]:
            del self.spans[span], self.told[span]

    @precondition(lambda self: not self.stopped)
    @rule(data=st.data(), name=st.sampled_from(["full", "full", "window", "state"]))
    def extend(self, data: st.DataObject, name: str) -> None:
        first = data.draw(st.integers(self.needed[name], self.page_count))
        count = data.draw(st.integers(0, self.page_count - first))
        self.numbers = number = self.numbers + 1
        theirs = list(range(1000 * number, 1000 * number + count))
        self.sender.extend(number, first, page_ids(theirs), name)
        self.spans[name, number] = (first, theirs)
        self.told[name, number] = first
        if self.sender.finished:
            self.forget_refused()

    @rule(data=st.data())
    def repeat_extend(self, data: st.DataObject) -> None:
        further = sorted(span for span in self.spans if span[1])
        if further:
            name, number = data.draw(st.sampled_from(further))
            first, theirs = self.spans[name, number]
            self.sender.extend(number, first, page_ids(theirs), name)

    @rule(pages_max=st.integers(1, 3))
    def post(self, pages_max: int) -> None:
        could = self.sender.can_write()
        job = self.sender.next_job(pages_max=pages_max)
        assert (job is not None) == could
        if job is not None:
            assert not self.stopped
            self.flying.append(job)
            for ours, theirs in zip(job.our_pages, job.their_pages, strict=True):
                assert (job.component, theirs) not in self.written, "a page is written once"
                self.written[job.component, theirs] = ours

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        job = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        self.sender.settle(job, written=True, checksums=checksums_of(job.our_pages))

    @rule()
    def tell(self) -> None:
        flying = {(job.component, page) for job in self.flying for page in job.their_pages}
        for chunk in self.sender.take_chunks():
            assert not self.stopped
            name, span = chunk.component, (chunk.component, chunk.span)
            first, theirs = self.spans[span]
            assert span not in self.lasts, "nothing follows the last"
            assert chunk.first == self.told[span], "the cursor only grows, without a gap"
            assert chunk.count or chunk.last
            chunk_pages = theirs[chunk.first - first : chunk.first - first + chunk.count]
            assert chunk.checksums == checksums_of(self.written[name, page] for page in chunk_pages)
            for page in chunk_pages:
                assert (name, page) in self.written
                assert (name, page) not in flying
            self.told[span] += chunk.count
            if chunk.last:
                assert self.told[span] == first + len(theirs)
                assert self.sender.finished or name != "full"
                if span == ("full", 0):
                    assert all(other in self.lasts for other in self.spans if other[1] == 0 and other[0] != "full")
                self.lasts.append(span)

    @precondition(lambda self: not self.stopped)
    @rule(really=st.integers(0, 9))
    def stop(self, really: int) -> None:
        if really == 0:
            self.sender.stop("aborted")
            self.stopped = True

    @invariant()
    def drained_means_nothing_is_in_flight(self) -> None:
        if hasattr(self, "sender"):
            assert self.sender.in_flight == len(self.flying)
            assert self.sender.is_drained == (self.stopped and not self.flying)

    def teardown(self) -> None:
        """Without further calls, every span is served completely and ended once."""
        if not hasattr(self, "sender") or self.stopped:
            return
        start = self.sender.computed_pages
        if start < self.page_count:
            self.sender.remember(page_ids(range(start, self.page_count)), start_token=start * PAGE)
        for name in self.requested:
            self.send_component_pages(name)
        self.finish()
        while self.sender.can_write():
            self.post(2)
        while self.flying:
            job = self.flying.pop()
            self.sender.settle(job, written=True, checksums=checksums_of(job.our_pages))
        self.tell()
        assert sorted(self.lasts) == sorted(self.spans)
        assert self.sender.is_complete
        for (name, _), (first, theirs) in self.spans.items():
            assert [self.written[name, page] for page in theirs] == list(range(first, first + len(theirs)))


TestSending = Sending.TestCase
TestSending.settings = examples(150, stateful_step_count=40)


@given(st.integers(1, 40), st.integers(0, 50), st.integers(0, 12))
def test_a_promise_is_taken_exactly_when_it_is_sound(tokens: int, promised: int, pages: int) -> None:
    sound = promised % PAGE == 0 and promised <= tokens and pages == -(-tokens // PAGE) - promised // PAGE
    try:
        SenderRoom(prompt_tokens=tokens, decode_prefix_len=promised, page_size=PAGE, pages=page_ids(range(pages)))
    except RemoteProtocolError:
        assert not sound
    else:
        assert sound
