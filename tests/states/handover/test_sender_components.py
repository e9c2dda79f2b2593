"""Tails of components at the sending side: what contradicts itself, what prefill may do wrong, what holds the end."""

from __future__ import annotations

import pytest

from tidekv.states.component_specs import ComponentPages
from tidekv.states.errors import InvalidRequest, RemoteProtocolError
from tidekv.states.handover.sender import ChunkReady, ComponentPart, ComponentReady, ComponentRequest, SenderRoom
from tidekv.states.types import page_ids


def requested(component: str, first: int, pages: list[int]) -> ComponentPages:
    return ComponentPages(component, first, page_ids(pages))


def room(*component_pages: ComponentPages) -> SenderRoom:
    """Three pages, of which decode has one."""
    return SenderRoom(
        prompt_tokens=10, decode_prefix_len=4, page_size=4, pages=page_ids([50, 51]), component_pages=component_pages
    )


def computed(*component_pages: ComponentPages) -> SenderRoom:
    sender = room(*component_pages)
    sender.remember(page_ids([0, 1, 2]), start_token=0)
    return sender


def test_requested_pages_are_listed_by_component() -> None:
    sender = room(requested("swa", 1, [7, 8]), requested("ssm", 3, []))
    assert sender.component_pages.requested == {
        "swa": ComponentRequest("swa", 1, 2),
        "ssm": ComponentRequest("ssm", 3, 0),
    }
    assert sender.component_pages.unsent == ["swa"]


@pytest.mark.parametrize(
    ("component_pages", "words"),
    [
        ([requested("swa", 0, [7])], "1 pages of component 'swa' at positions from 0 on, which does not end"),
        ([requested("swa", 2, [7, 8])], "which does not end with the prompt of 3 pages"),
        ([requested("swa", 1, [7, 7])], "names a page of component 'swa' twice"),
        ([requested("swa", 3, []), requested("swa", 2, [1])], "requests the pages of component 'swa' twice"),
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


def test_component_pages_that_were_not_requested_may_be_handed_over_and_are_not_written() -> None:
    sender = computed(requested("ssm", 3, []))
    sender.send_component_pages("ssm", page_ids([3]))
    sender.finish()
    written = []
    while (job := sender.next_job(pages_max=9)) is not None:
        written.append(job)
        sender.settle(job, landed=True)
    assert [len(job.our_pages) for job in written] == [2]
    assert sender.take_component_pages() == []
    assert sender.take_chunks() == [ChunkReady(0, 1, 2, last=True)]


@pytest.mark.parametrize(
    ("component", "pages", "words"),
    [
        ("full", [1], "there is no component 'full': this worker has 'swa'"),
        ("swa", [1], r"1 pages of component 'swa' were given; decode requests 2, at positions \[1, 3\)"),
        ("swa", [1, 2, 3], "3 pages of component 'swa' were given"),
    ],
)
def test_other_pages_than_requested_change_nothing(component: str, pages: list[int], words: str) -> None:
    sender = computed(requested("swa", 1, [7, 8]))
    with pytest.raises(InvalidRequest, match=words):
        sender.send_component_pages(component, page_ids(pages))
    assert sender.component_pages.unsent == ["swa"]


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
        ComponentPart("swa", 1, page_ids([4]), page_ids([7])),
        ComponentPart("swa", 2, page_ids([5]), page_ids([8])),
    ]
    sender.settle(pages, landed=True)
    sender.settle(parts[1], landed=True)
    assert (sender.take_component_pages(), sender.take_chunks(), sender.is_complete) == ([], [], False)
    sender.settle(parts[0], landed=True)
    assert (sender.take_component_pages(), sender.take_chunks()) == (
        [ComponentReady("swa")],
        [ChunkReady(0, 1, 2, last=True)],
    )
    assert sender.is_complete


def test_other_spans_do_not_wait_for_the_component_pages() -> None:
    """A decode that lost its local pages requests them; only span 0 brings component pages."""
    sender = computed(requested("swa", 1, [7, 8]))
    sender.extend(1, 0, page_ids([60]))
    sender.send_component_pages("swa", page_ids([4, 5]))
    sender.finish()
    jobs = [sender.next_job(pages_max=9) for _ in range(3)]
    for job in jobs[:2]:
        sender.settle(job, landed=True)
    assert sender.take_chunks() == [ChunkReady(1, 0, 1, last=True)]


def test_component_pages_that_did_not_land_are_never_reported_and_a_stop_starts_no_part() -> None:
    sender = computed(requested("swa", 1, [7, 8]))
    sender.send_component_pages("swa", page_ids([4, 5]))
    sender.next_job(pages_max=9)
    part = sender.next_job(pages_max=1)
    sender.stop("aborted")
    assert sender.next_job(pages_max=9) is None
    assert not sender.can_write()
    assert not sender.is_drained
    sender.settle(part, landed=False)
    assert not sender.component_pages.are_landed
    assert sender.take_component_pages() == []
