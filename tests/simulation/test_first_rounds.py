"""The default policy from the second round on: near the better of always waiting for storage and of having none."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import cache
from itertools import product
from struct import pack

import pytest

from tests.support.thorough import thorough_beyond
from tidekv.states import commands, events
from tidekv.states.core import Core
from tidekv.states.settings import CoreSettings

PAGE = 16
LINK_PAGE_S = 0.0002 * PAGE
ROUNDS = 4
SPEEDS = (50.0, 4.0, 0.25, 0.05)
"""Of storage, as multiples of the link's."""


class Source:
    """A source that serves one request after the other, at a fixed time a page."""

    def __init__(self, page_s: float, latency_s: float, *, stall_s: float = 0.0) -> None:
        self.page_s, self.latency_s = page_s, latency_s
        self.free_at_s = 0.0
        self.stall_s = stall_s
        """More time that the first call takes."""

    def serve(self, now_s: float, pages: int) -> float:
        """Return the seconds until these pages are there."""
        self.free_at_s = max(self.free_at_s, now_s) + pages * self.page_s + self.stall_s
        self.stall_s = 0.0
        return self.free_at_s + self.latency_s - now_s


class Modelled:
    """A core on a virtual clock, with pools that keep no prompt until its next round."""

    def __init__(self, policy: str, *, pages: int, at_once: int, storage_page_s: float, stall_s: float) -> None:
        room = pages * (at_once + 1) + 8
        chosen = {} if policy == "never" else {"prefetch": policy}
        self.core = Core(
            CoreSettings(page_size=PAGE, key_bytes=4, device_pages=room, host_pages=room, **chosen)  # type: ignore[arg-type]
        )
        self.now_s = 0.0
        self.pages = pages
        self.link, self.storage = Source(LINK_PAGE_S, 0.0005), Source(storage_page_s, 0.0005, stall_s=stall_s)
        self.answer_s = 0.0002 + stall_s
        self.stored: set[bytes] = set()
        self._left: dict[int, bytes] = {}
        self.begun_s: dict[str, float] = {}
        self.taken_s: dict[str, float] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        if policy != "never":
            self.step(events.StorageChanged, available=True)

    def after(self, delay_s: float, kind: type[events.Event], **fields: object) -> None:
        self._number += 1
        heapq.heappush(self._due, (self.now_s + delay_s, self._number, lambda: self.step(kind, **fields)))

    def step(self, kind: type[events.Event], **fields: object) -> None:
        for command in self.core.step(kind(at_s=self.now_s, **fields)):  # type: ignore[arg-type]  # Fields of the kind.
            self.begin(command)

    def run(self) -> None:
        """Go on until nothing is left to happen."""
        while self._due:
            deadline_s = self.core.next_deadline_s()
            if deadline_s is not None and deadline_s < self._due[0][0]:
                self.now_s = max(self.now_s, deadline_s)
                self.step(events.ClockAdvanced)
                continue
            self.now_s, _, happen = heapq.heappop(self._due)
            happen()

    def keys(self, request_id: str) -> bytes:
        number = int(request_id.partition("-")[2])
        return b"".join(pack(">HH", number, page) for page in range(self.pages))

    def arrive(self, request_id: str) -> None:
        self.begun_s[request_id] = self.now_s
        self._number += 1
        self.step(
            events.RequestArrived,
            request_id=request_id,
            request_number=self._number,
            keys=self.keys(request_id),
            prompt_tokens=self.pages * PAGE + 1,
        )

    def begin(self, command: commands.Command) -> None:
        match command:
            case commands.QueryStorage():
                keys = self.keys(command.request_id)
                flags = [keys[at * 4 : at * 4 + 4] in self.stored for at in range(command.first, self.pages)]
                self.after(self.answer_s, events.StorageAnswered, op=command.op, found=[*flags, False].index(False))
                self.answer_s = 0.0002
            case commands.FetchPages():
                count = len(command.host_pages)
                self.after(self.storage.serve(self.now_s, count), events.PagesFetched, op=command.op, valid=count)
            case commands.StorePages():
                _, keys = (
                    self.core.keys_stored(command.op)
                    if not command.request_number
                    else ("", self._left[command.request_number])
                )
                count = len(command.host_pages) + command.asked
                self.stored.update(keys[at * 4 : at * 4 + 4] for at in range(len(command.host_pages)))
                self.after(0.0001, events.PagesStored, op=command.op, stored=count, written=count)
            case commands.CopyPages():
                self.after(0.00005, events.CopyEnded, op=command.op)
            case commands.SendPromise() | commands.SendExtend():
                self.send(command)
            case commands.ReportReady():
                self.taken_s[command.request_id] = self.now_s - self.begun_s[command.request_id]
                request = self.core.request(command.request_id)
                assert request is not None
                self._left[request.request_number] = keys = self.keys(command.request_id)
                tokens = self.pages * PAGE
                self.after(0.0, events.FinishRequested, request_id=command.request_id, keys=keys, tokens=tokens)

    def send(self, asked: commands.SendPromise | commands.SendExtend) -> None:
        room = {"request_id": asked.request_id, "generation": asked.generation}
        count, span, first = len(asked.pages), 0, self.pages + 1 - len(asked.pages)
        if isinstance(asked, commands.SendExtend):
            span, first = asked.span, asked.first
        else:
            self.after(0.0, events.PromiseSent, writer="prefill.1", ranks=1, **room)
            self.after(0.0001, events.AuxReceived, rank=0, **room)
        at_s = self.link.serve(self.now_s, count)
        self.after(at_s, events.ChunkReceived, rank=0, span=span, first=first, count=count, last=True, **room)


@cache  # Most runs are what several others are compared with.
def rounds(policy: str, *, tokens: int, at_once: int, storage_page_s: float, stall_s: float = 0.0) -> tuple[float, ...]:
    """Return the mean time to READY of each round. The first query and the first read take `stall_s` more."""
    world = Modelled(policy, pages=tokens // PAGE, at_once=at_once, storage_page_s=storage_page_s, stall_s=stall_s)
    means = []
    for number in range(ROUNDS):
        for first in range(0, 8, at_once):
            for prompt in range(first, first + at_once):
                world.arrive(f"{number}-{prompt}")
            world.run()
        taken = [world.taken_s[f"{number}-{prompt}"] for prompt in range(8)]
        means.append(sum(taken) / len(taken))
    return tuple(means)


@pytest.mark.parametrize(
    ("tokens", "at_once", "speed"),
    thorough_beyond(
        [
            *((tokens, at_once, speed) for tokens in (256, 2048) for at_once in (1, 4) for speed in SPEEDS),
            *((512, 1, 4.0), (1024, 4, 0.25), (4096, 1, 0.05), (8192, 4, 4.0), (8192, 1, 0.25)),
        ],
        product([256, 512, 1024, 2048, 4096, 8192], [1, 4], SPEEDS),
    ),
)
def test_from_the_second_round_on_the_default_is_near_the_better_of_always_and_never(
    tokens: int, at_once: int, speed: float
) -> None:
    prompts, page_s = {"tokens": tokens, "at_once": at_once}, LINK_PAGE_S / speed
    never = rounds("never", **prompts, storage_page_s=0.0)
    always, default = (rounds(policy, **prompts, storage_page_s=page_s) for policy in ("wait_complete", "soonest"))
    for number in range(1, ROUNDS):
        assert default[number] <= 1.2 * min(always[number], never[number]), (number, always, never, default)


@pytest.mark.parametrize(
    ("tokens", "at_once", "stall_s"),
    thorough_beyond(
        [
            *((256, at_once, stall_s) for at_once in (1, 4) for stall_s in (0.1, 0.3, 0.5)),
            *((1024, 1, 0.1), (1024, 4, 0.3), (4096, 1, 0.5), (8192, 4, 0.3)),
        ],
        product([256, 1024, 4096, 8192], [1, 4], [0.1, 0.3, 0.5]),
    ),
)
def test_a_first_query_and_a_first_read_that_stall_cost_no_later_round(
    tokens: int, at_once: int, stall_s: float
) -> None:
    # The shorter stalls leave storage faster than prefill, but so little that plans would share pages out to both.
    arguments = {"tokens": tokens, "at_once": at_once, "storage_page_s": LINK_PAGE_S / 16}
    always = rounds("wait_complete", **arguments)
    stalled = rounds("soonest", **arguments, stall_s=stall_s)
    for number in range(1, ROUNDS):
        assert stalled[number] <= 1.2 * always[number], (number, always, stalled)
