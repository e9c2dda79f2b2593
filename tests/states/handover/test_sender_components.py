"""Pages of components at the sending side: what contradicts itself, what prefill may do wrong, what holds the end."""

from __future__ import annotations

import pytest

from tidekv.states.component_specs import ComponentPages
from tidekv.states.errors import InvalidRequest, RemoteProtocolError
from tidekv.states.handover.sender import ChunkReady, RequestedComponent, SenderRoom, SpanRefused, WriteJob
from tidekv.states.types import page_ids

NEEDED = {"swa": 1, "ssm": 2}
"""First positions that the prompt's end needs."""


def requested(component: str, first: int, pages: list[int]) -> ComponentPages:
    return ComponentPages(component, first, page_ids(pages))


def room(*component_pages: ComponentPages, promised: int = 4) -> SenderRoom:
    """Three pages, of which decode has one."""
    return SenderRoom(
        prompt_tokens=10,
        decode_prefix_len=promised,
        page_size=4,
        pages=page_ids([50, 51, 52][promised // 4 :] if promised < 10 else []),
        component_pages=component_pages,
        needed_from=NEEDED,
    )


def computed(*component_pages: ComponentPages) -> SenderRoom:
    sender = room(*component_pages)
    sender.remember(page_ids([0, 1, 2]), start_token=0)
    return sender


def handed_over(*component_pages: ComponentPages) -> SenderRoom:
    sender = computed(*component_pages)
    sender.send_component_pages("swa", page_ids([4, 5]))
    sender.send_component_pages("ssm", page_ids([3]))
    return sender


def write_all(sender: SenderRoom, *, pages_max: int = 9) -> list[WriteJob]:
    written = []
    while (job := sender.next_job(pages_max=pages_max)) is not None:
        written.append(job)
        sender.settle(job, written=True)
    return written


def test_prefill_hands_over_what_the_end_needs_whatever_is_requested() -> None:
    sender = room(requested("swa", 2, [7]), requested("ssm", 3, []))
    assert sender.component_pages == {
        "swa": RequestedComponent("swa", 1, 2, 1),
        "ssm": RequestedComponent("ssm", 2, 1, 0),
    }


@pytest.mark.parametrize(
    ("component_pages", "words"),
    [
        ([requested("swa", 0, [7])], "1 pages of component 'swa' at positions from 0 on, which does not end"),
        ([requested("swa", 2, [7, 8])], "which does not end with the prompt of 3 pages"),
        ([requested("swa", 1, [7, 7])], "names a page of component 'swa' twice"),
        ([requested("swa", 3, []), requested("swa", 2, [1])], "requests the pages of component 'swa' twice"),
        ([requested("ssm", 1, [1, 2])], r"requests pages \[1, 3\) of component 'ssm' .* needs those from 2 on"),
        ([requested("mamba", 2, [1])], "requests pages of component 'mamba', which the prompt does not have"),
    ],
)
def test_a_promise_that_contradicts_itself_is_refused(component_pages: list[ComponentPages], words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        room(*component_pages)


def test_a_room_cannot_finish_without_requested_component_pages() -> None:
    sender = computed(requested("ssm", 2, [7]))
    with pytest.raises(InvalidRequest, match="the room cannot finish: the pages of component 'ssm' were never sent"):
        sender.finish()
    assert not sender.finished
    sender.send_component_pages("ssm", page_ids([3]))
    sender.finish()
    with pytest.raises(InvalidRequest, match="pages of component 'ssm' can no longer be sent"):
        sender.send_component_pages("ssm", page_ids([3]))


def test_component_pages_that_were_not_requested_are_not_written() -> None:
    sender = handed_over(requested("swa", 2, [7]), requested("ssm", 3, []))
    sender.finish()
    assert [(job.component, list(job.our_pages)) for job in write_all(sender)] == [("full", [1, 2]), ("swa", [5])]
    assert sender.take_chunks() == [ChunkReady(0, 2, 1, last=True, component="swa"), ChunkReady(0, 1, 2, last=True)]
    assert sender.is_complete


@pytest.mark.parametrize(
    ("component", "pages", "words"),
    [
        ("full", [1], "there is no component 'full': this worker has 'swa'"),
        ("swa", [1], r"1 pages of component 'swa' were given; the end of the prompt needs 2, at positions \[1, 3\)"),
        ("swa", [1, 2, 3], "3 pages of component 'swa' were given"),
    ],
)
def test_other_pages_than_needed_change_nothing(component: str, pages: list[int], words: str) -> None:
    sender = computed(requested("swa", 1, [7, 8]))
    with pytest.raises(InvalidRequest, match=words):
        sender.send_component_pages(component, page_ids(pages))
    with pytest.raises(InvalidRequest, match="the pages of component 'swa' were never sent"):
        sender.finish()


def test_component_pages_are_sent_once_and_repeating_them_is_harmless() -> None:
    sender = computed(requested("swa", 1, [7, 8]))
    for _ in range(2):
        sender.send_component_pages("swa", page_ids([4, 5]))
    with pytest.raises(InvalidRequest, match="other pages of component"):
        sender.send_component_pages("swa", page_ids([5, 4]))


def test_the_last_chunk_waits_for_the_component_pages_and_they_are_reported_first() -> None:
    sender = computed(requested("swa", 1, [7, 8]))
    sender.send_component_pages("swa", page_ids([4, 5]))
    sender.finish()
    pages, *parts = [sender.next_job(pages_max=1 if at else 9) for at in range(3)]
    assert parts == [
        WriteJob(0, 1, page_ids([4]), page_ids([7]), "swa"),
        WriteJob(0, 2, page_ids([5]), page_ids([8]), "swa"),
    ]
    assert pages is not None and parts[0] is not None and parts[1] is not None
    sender.settle(pages, written=True)
    sender.settle(parts[1], written=True)
    assert (sender.take_chunks(), sender.is_complete) == ([], False)
    sender.settle(parts[0], written=True)
    assert sender.take_chunks() == [ChunkReady(0, 1, 2, last=True, component="swa"), ChunkReady(0, 1, 2, last=True)]
    assert sender.is_complete


def test_further_spans_do_not_wait_for_the_component_pages_of_the_promise() -> None:
    sender = computed(requested("swa", 1, [7, 8]))
    sender.extend(1, 0, page_ids([60]))
    sender.send_component_pages("swa", page_ids([4, 5]))
    sender.finish()
    jobs = [sender.next_job(pages_max=9) for _ in range(3)]
    for job in jobs[:2]:
        assert job is not None
        sender.settle(job, written=True)
    assert sender.take_chunks() == [ChunkReady(1, 0, 1, last=True)]


@pytest.mark.parametrize("when", ["before the pages", "before the finish", "after the finish"])
def test_a_further_span_brings_component_pages_that_decode_has_lost(when: str) -> None:
    """Decode had the whole end, so the promise asks for none of it."""
    nothing = requested("swa", 3, []), requested("ssm", 3, [])
    sender = room(*nothing) if when == "before the pages" else handed_over(*nothing)
    if when == "after the finish":
        sender.finish()
        write_all(sender)
        assert sender.take_chunks() == [ChunkReady(0, 1, 2, last=True)] and sender.is_complete
    for _ in range(2):
        sender.extend(1, 1, page_ids([70]), "swa")
    assert sender.pages_unwritten == (1 if when == "after the finish" else 3)
    assert not sender.is_complete
    sender.extend(2, 2, page_ids([80]), "ssm")
    if when == "before the pages":
        assert not sender.can_write()
        sender.remember(page_ids([0, 1, 2]), start_token=0)
        sender.send_component_pages("swa", page_ids([4, 5]))
        sender.send_component_pages("ssm", page_ids([3]))
    if when != "after the finish":
        sender.finish()
    written = {
        (job.component, theirs): ours
        for job in write_all(sender)
        for ours, theirs in zip(job.our_pages, job.their_pages, strict=True)
    }
    assert {key: ours for key, ours in written.items() if key[0] != "full"} == {("swa", 70): 4, ("ssm", 80): 3}
    chunks = sender.take_chunks()
    assert chunks[:2] == [
        ChunkReady(1, 1, 1, last=True, component="swa"),
        ChunkReady(2, 2, 1, last=True, component="ssm"),
    ]
    assert sender.is_complete and sender.pages_unwritten == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((1, 0, page_ids([7]), "swa"), r"requests pages \[0, 1\) of component 'swa' .* needs those from 1 on"),
        ((1, 2, page_ids([7, 8]), "swa"), r"requests pages \[2, 4\) of component 'swa' of a prompt of 3 pages"),
        ((1, 1, page_ids([7, 7]), "swa"), "names a page of component 'swa' twice in span 1"),
        ((1, 1, page_ids([7]), "nobody"), "component 'nobody', which the prompt does not have"),
        ((4, 0, page_ids([7])), "requested span 4 twice, as different pages"),
    ],
)
def test_an_extend_that_contradicts_the_room_is_refused(args: tuple, words: str) -> None:
    sender = handed_over()
    sender.extend(4, 1, page_ids([1]), "swa")
    with pytest.raises(RemoteProtocolError, match=words):
        sender.extend(*args)


@pytest.mark.parametrize("is_finished", [True, False])
def test_after_a_full_hit_without_component_pages_an_extend_of_them_is_refused(is_finished: bool) -> None:
    """Prefill need not have pages of what decode has promised whole."""
    sender = computed(requested("swa", 3, []))
    if is_finished:
        sender.finish()
    sender.extend(1, 1, page_ids([7]), "swa")
    if not is_finished:
        sender.finish()
    refused = SpanRefused(1, "prefill sent only 0 pages of component 'swa' of this room")
    assert sender.take_refusals() == [refused]
    sender.extend(1, 1, page_ids([7]), "swa")
    assert sender.take_refusals() == [refused]


def test_component_pages_that_did_not_land_are_never_reported_and_a_stop_starts_no_part() -> None:
    sender = computed(requested("swa", 1, [7, 8]))
    sender.send_component_pages("swa", page_ids([4, 5]))
    sender.next_job(pages_max=9)
    part = sender.next_job(pages_max=1)
    assert part is not None
    sender.stop("aborted")
    assert sender.next_job(pages_max=9) is None
    assert not sender.can_write()
    assert not sender.is_drained
    sender.settle(part, written=False)
    assert sender.pages_unwritten == 4
    assert sender.take_chunks() == []
