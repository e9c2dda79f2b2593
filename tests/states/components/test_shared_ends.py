"""Requests with the same prompt at the same time: prefill is asked for the component pages of its end once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.rig import Rig
from tests.support.component_stories import cached, device_pages, raise_at_promises, state, window
from tests.support.thorough import examples
from tidekv.states import commands, events
from tidekv.states.component_specs import Component
from tidekv.states.components.shared_ends import SharedEndCopy
from tidekv.states.records.causes import LOST_CAUSES

PROMPT = b"abcdefghi"
"""Four full pages of two tokens, and a partial one."""
WINDOW, STATE = window(5, device=60), state(20)
MODELS = {"window": (WINDOW,), "state": (STATE,), "both": (WINDOW, STATE)}
AT_THE_END = {"window": 3, "state": 1}


def rig_of(*components: Component, **fields: object) -> Rig:
    given: dict[str, object] = {"page_size": 2, "key_bytes": 2, "share_transfers": True, **fields}
    return Rig(components=components or MODELS["both"], **given)  # type: ignore[arg-type]  # Not a number.


def asked(promise: commands.SendPromise) -> dict[str, int]:
    assert promise.component_pages is not None
    return {one.component: len(one.pages) for one in promise.component_pages}


def arrive(rig: Rig, *names: str, prompt: bytes = PROMPT, **fields: object) -> dict[str, commands.SendPromise]:
    for name in names:
        rig.arrive(name, prompt, **fields)
    return {promise.request_id: promise for promise in rig.take_all(commands.SendPromise)}


def pages_of(prompt: bytes) -> int:
    return -(-len(prompt) // 2)


def copy_all(rig: Rig) -> list[str]:
    """End all copies of components; returns the requests that are READY then, in order."""
    for copy in rig.take_all(commands.CopyPages, of_components=True):
        rig.copied(copy)
    return [ready.request_id for ready in rig.take_all(commands.ReportReady)]


def finish_all(rig: Rig) -> None:
    """End everything that is in flight, and every request."""
    rig.settle()
    for request_id in list(rig.core.state.requests):
        rig.abort(request_id)
    rig.settle()
    rig.expect_nothing_held()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:8], PROMPT[:1]], ids=["partial", "full pages", "no full page"])
def test_ten_equal_prompts_ask_for_the_component_pages_of_one(name: str, prompt: bytes) -> None:
    kinds = {one.name: min(AT_THE_END[one.name], pages_of(prompt)) for one in MODELS[name]}
    rig = rig_of(*MODELS[name], device_pages=60)
    promises = arrive(rig, *"0123456789", prompt=prompt)
    assert [asked(promise) for promise in promises.values()] == [kinds, *([dict.fromkeys(kinds, 0)] * 9)]
    for promise in promises.values():
        rig.serve(promise)
    copies = rig.take_all(commands.CopyPages, of_components=True)
    assert len(copies) == 9 * len(kinds) and not rig.take_all(commands.ReportReady)
    sender = rig.request("0").component_pages
    assert sender is not None
    for copy in copies:
        assert copy.source_pages == sender.plan.tables[copy.component]
        assert (copy.source, copy.target) == ("device", "device")
        rig.copied(copy)
    readies = rig.take_all(commands.ReportReady)
    assert len(readies) == 10
    written = [page for ready in readies for table in ready.component_pages or () for page in table.own]
    # Each request has pages of its own, as without sharing.
    assert len(written) == 10 * sum(4 if kind == "window" else 1 for kind in kinds)
    assert rig.core.statistics()["shared_component_pages"] == 9 * sum(kinds.values())
    finish_all(rig)


@pytest.mark.parametrize(
    "second",
    [
        {"prompt": PROMPT[:-1] + b"x"},
        {"prompt": PROMPT[:-1]},
        {"prompt": PROMPT + b"j"},
        {"prompt": b"x" + PROMPT[1:]},
        {"namespace": "other"},
        {"cache": False},
        # An end that depends on a token which is not known yet.
        {"rest": b""},
    ],
    ids=str,
)
def test_another_end_is_not_shared(second: dict[str, object]) -> None:
    rig = rig_of()
    arrive(rig, "a")
    (promise,) = arrive(rig, "b", **second).values()  # type: ignore[arg-type]  # The prompt, or fields of the event.
    assert all(asked(promise).values())
    finish_all(rig)


def test_neither_is_that_of_a_prompt_which_is_not_kept_or_if_sharing_is_off() -> None:
    rig = rig_of()
    arrive(rig, "a", cache=False)
    assert all(asked(arrive(rig, "b")["b"]).values())
    finish_all(rig)
    rig = rig_of(share_transfers=False)
    assert all(all(asked(promise).values()) for promise in arrive(rig, "a", "b").values())
    finish_all(rig)


def test_what_a_cache_has_comes_from_there_and_the_rest_from_the_other_request() -> None:
    rig = rig_of(page_size=1, key_bytes=1)
    cached(rig, PROMPT[:8])
    promises = arrive(rig, "a", "b")
    # All pages of the window but the last one are on the device.
    assert [asked(promise) for promise in promises.values()] == [{"window": 1, "state": 1}, {"window": 0, "state": 0}]
    rig.serve(promises["a"])
    rig.serve(promises["b"])
    copies = rig.take_all(commands.CopyPages, of_components=True)
    assert [(copy.component, len(copy.source_pages)) for copy in copies] == [("window", 1), ("state", 1)]
    rig.pending += copies
    finish_all(rig)


def test_requests_that_lack_nothing_wait_for_no_other() -> None:
    rig = rig_of(page_size=1, key_bytes=1)
    cached(rig, PROMPT[:8])
    for promise in arrive(rig, "a", "b", prompt=PROMPT[:8]).values():
        assert asked(promise) == {"window": 0, "state": 0}
        assert not rig.request(promise.request_id).waits_for_sender
    finish_all(rig)


def test_the_sender_is_ready_only_when_the_copies_from_its_pages_have_ended() -> None:
    rig = rig_of(state())
    promises = arrive(rig, "a", "b")
    rig.serve(promises["a"])
    copy = rig.take(commands.CopyPages, of_components=True)
    assert not rig.take_all(commands.ReportReady)
    # Nothing joins any more: the sender does not wait for requests that arrive later.
    assert asked(arrive(rig, "c")["c"]) == {"state": 1}
    rig.copied(copy)
    assert rig.take(commands.ReportReady).request_id == "a"
    rig.serve(promises["b"])
    assert rig.take(commands.ReportReady).request_id == "b"
    finish_all(rig)


def test_a_request_joins_while_the_sender_waits_for_something_else() -> None:
    rig = rig_of(state())
    rig.make_cached("past", PROMPT[:4])
    rig.flush("l1")
    promises = arrive(rig, "a")
    rig.serve(promises["a"])
    copy_of_host = rig.take(commands.CopyPages, target="device")
    promises = arrive(rig, "b")
    assert asked(promises["b"]) == {"state": 0}
    # What the sender's room has brought is in place already.
    copy = rig.take(commands.CopyPages, of_components=True)
    rig.copied(copy_of_host)
    assert not rig.take_all(commands.ReportReady)
    rig.copied(copy)
    assert rig.take(commands.ReportReady).request_id == "a"
    finish_all(rig)


def fails(rig: Rig) -> None:
    rig.step(events.RoomFailed, request_id="a", generation=0, cause="out of memory there", settled=True)


def is_refused(rig: Rig) -> None:
    rig.step(events.RoomRefused, request_id="a", generation=0, span=0, cause="it forgot the prompt")


def is_lost(rig: Rig) -> None:
    rig.step(events.WriterLost, writer="prefill.1", cause="silence")


ENDS: dict[str, Callable[[Rig], object]] = {
    "is aborted": lambda rig: rig.abort("a"),
    "misses its deadline": lambda rig: rig.wait_until(1.0),
    "fails": fails,
    "is refused": is_refused,
    "is lost": is_lost,
}


@pytest.mark.parametrize("has_arrived", [False, True], ids=["before its pages arrive", "after a part of them"])
@pytest.mark.parametrize("end", ENDS)
def test_if_the_sender_leaves_the_oldest_waiter_is_the_next_one(end: str, has_arrived: bool) -> None:
    rig = rig_of(share_wait_s=100.0)
    promises = arrive(rig, "a", deadline_at_s=1.0) | arrive(rig, "b", "c")
    if has_arrived or end == "is lost":
        rig.promised(promises["a"])
        rig.chunk(promises["a"], count=4, last=False)
    for name in ("b", "c"):
        rig.serve(promises[name], writer="prefill.2")
    ENDS[end](rig)
    rig.take(commands.ReportFailed)
    extends = rig.take_all(commands.SendExtend)
    rig.pending += extends
    extends = [extend for extend in extends if extend.component != "full"]
    assert [(extend.request_id, extend.generation) for extend in extends] == [("b", 0)] * 2
    assert {extend.component: len(extend.pages) for extend in extends} == AT_THE_END
    assert rig.core.statistics()["shared_ends_passed_on"] == 1
    assert rig.request("b").fallbacks.last_error == LOST_CAUSES["end_sender_left"]
    told = rig.settle()
    assert {one.request_id for one in told if isinstance(one, commands.ReportReady)} == {"b", "c"}
    finish_all(rig)


def test_a_sender_that_moves_to_the_next_prefill_leaves_its_waiters_to_another_one() -> None:
    rig = rig_of()
    arrive(rig, "a", prefill_count=2)
    arrive(rig, "b")
    fails(rig)
    # The waiter asks for the end, and the request that left joins it.
    extends = rig.take_all(commands.SendExtend)
    assert {extend.component: len(extend.pages) for extend in extends if extend.component != "full"} == AT_THE_END
    promise = rig.take(commands.SendPromise)
    assert (promise.request_id, sum(asked(promise).values())) == ("a", 0)
    rig.pending += [*extends, promise]
    finish_all(rig)


def test_a_waiter_that_leaves_is_not_copied_to_and_the_others_are() -> None:
    rig = rig_of(state())
    promises = arrive(rig, "a", "b", "c")
    rig.abort("b")
    rig.serve(promises["a"])
    copy = rig.take(commands.CopyPages, of_components=True)
    rig.copied(copy)
    rig.serve(promises["c"])
    assert [ready.request_id for ready in rig.take_all(commands.ReportReady)] == ["a", "c"]
    finish_all(rig)


def test_the_sender_that_leaves_during_a_copy_keeps_its_pages_until_it_has_ended() -> None:
    rig = rig_of(state())
    promises = arrive(rig, "a", "b")
    rig.serve(promises["a"])
    copy = rig.take(commands.CopyPages, of_components=True)
    rig.abort("a")
    assert device_pages(rig, "state")["owned"] == 2
    rig.copied(copy)
    assert device_pages(rig, "state")["owned"] == 1
    rig.serve(promises["b"])
    assert [one.request_id for one in rig.take_all(commands.ReportReady)] == ["b"]
    finish_all(rig)


def test_a_waiter_that_leaves_during_its_copy_holds_its_pages_and_the_sender_until_it_has_ended() -> None:
    rig = rig_of(state())
    promises = arrive(rig, "a", "b")
    rig.serve(promises["a"])
    copy = rig.take(commands.CopyPages, of_components=True)
    rig.abort("b")
    assert device_pages(rig, "state")["owned"] == 2 and not rig.take_all(commands.ReportReady)
    rig.copied(copy)
    assert device_pages(rig, "state")["owned"] == 1
    assert rig.take(commands.ReportReady).request_id == "a"
    finish_all(rig)


@pytest.mark.parametrize("raises", [False, True])
def test_after_a_failed_copy_the_waiter_asks_its_own_prefill(raises: bool) -> None:
    rig = rig_of(state())
    promises = arrive(rig, "a", "b")
    rig.serve(promises["a"])
    copy = rig.take(commands.CopyPages, of_components=True)
    if raises:
        rig.step(events.CommandRaised, op=copy.op, detail="RuntimeError: no stream")
    else:
        rig.copied(copy, error="bus error")
    assert rig.take(commands.ReportReady).request_id == "a"
    assert rig.request("b").fallbacks.last_error == LOST_CAUSES["end_copy_failed"]
    extend = rig.take(commands.SendExtend)
    assert (extend.request_id, extend.component, extend.pages) == ("b", "state", copy.target_pages)
    rig.pending.append(extend)
    finish_all(rig)


def test_after_a_late_copy_both_get_fresh_pages_and_the_old_ones_stay_until_it_ends() -> None:
    rig = rig_of(state(), copy_deadline_s=1.0)
    promises = arrive(rig, "a", "b")
    rig.serve(promises["a"])
    copy = rig.take(commands.CopyPages, of_components=True)
    rig.wait_until(1.0)
    assert (
        rig.request("a").fallbacks.last_error == rig.request("b").fallbacks.last_error == LOST_CAUSES["end_copy_late"]
    )
    extends = rig.take_all(commands.SendExtend)
    assert [(extend.request_id, extend.component) for extend in extends] == [("a", "state"), ("b", "state")]
    assert not {*copy.source_pages, *copy.target_pages} & {page for extend in extends for page in extend.pages}
    rig.pending += extends
    assert device_pages(rig, "state")["owned"] == 4
    rig.copied(copy)
    assert device_pages(rig, "state")["owned"] == 2
    finish_all(rig)


def test_a_sender_that_two_late_copies_read_keeps_its_pages_until_both_have_ended() -> None:
    """The first one that ended freed them under the other."""
    rig = rig_of(state(), copy_deadline_s=1.0)
    promises = arrive(rig, "a", "b", "c")
    rig.serve(promises["a"])
    first, second = rig.take_all(commands.CopyPages, of_components=True)
    assert first.source_pages == second.source_pages
    rig.wait_until(1.0)
    extends = rig.take_all(commands.SendExtend)
    assert [extend.request_id for extend in extends] == ["b", "c"]
    rig.pending += extends
    rig.copied(first)
    assert not rig.take_all(commands.ReportReady)
    assert device_pages(rig, "state")["owned"] == 4
    rig.copied(second)
    assert rig.take(commands.ReportReady).request_id == "a"
    assert device_pages(rig, "state")["owned"] == 3
    finish_all(rig)


def test_a_waiter_waits_for_a_stalled_sender_for_a_while_only() -> None:
    rig = rig_of(share_wait_s=0.5)
    promises = arrive(rig, "a", "b")
    # Its full pages have arrived, so that the waiter waits for the component pages and nothing else.
    rig.promised(promises["a"])
    rig.chunk(promises["a"], count=4, last=False)
    rig.serve(promises["b"])
    rig.wait_until(0.4)
    assert rig.state("b") == "TRANSFER"
    rig.wait_until(0.5)
    assert rig.request("b").fallbacks.last_error == LOST_CAUSES["end_sender_slow"]
    assert rig.core.statistics()["shared_ends_passed_on"] == 1
    extends = rig.take_all(commands.SendExtend)
    assert {extend.component: len(extend.pages) for extend in extends} == AT_THE_END
    for extend in extends:
        assert extend.request_id == "b"
        rig.chunk(extend)
    # The sender goes on: nothing is waited for any more.
    rig.chunk(promises["a"], first=4, count=1)
    rig.aux(promises["a"])
    assert {one.request_id for one in rig.take_all(commands.ReportReady)} == {"a", "b"}
    finish_all(rig)


def test_a_sender_of_which_something_lands_meanwhile_is_waited_for() -> None:
    rig = rig_of(share_wait_s=0.5)
    promises = arrive(rig, "a", "b")
    rig.promised(promises["a"])
    rig.chunk(promises["a"], count=4, last=False)
    rig.serve(promises["b"])
    rig.wait_until(0.4)
    rig.aux(promises["a"])
    rig.wait_until(0.9)
    rig.chunk(promises["a"], first=4, count=1)
    assert set(copy_all(rig)) == {"a", "b"}
    assert not rig.core.statistics()["shared_ends_passed_on"]
    finish_all(rig)


def test_pages_of_one_prefill_rank_are_not_enough() -> None:
    rig = rig_of(state())
    promises = arrive(rig, "a", "b")
    rig.promised(promises["a"], ranks=2)
    for rank in (0, 1):
        assert not rig.take_all(commands.CopyPages, of_components=True)
        rig.chunk(promises["a"], rank=rank)
        rig.aux(promises["a"], rank=rank)
    assert len(rig.take_all(commands.CopyPages, of_components=True)) == 1


@pytest.mark.parametrize("times", [1, 2])
def test_a_plan_that_raises_leaves_no_waiter_and_no_sender(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for first in ("a", "b"):
        rig = rig_of()
        if first == "b":
            arrive(rig, "a")
        raise_at_promises(rig, times, monkeypatch)
        promise = arrive(rig, first)[first]
        # After a raise a request shares nothing.
        assert asked(promise) == AT_THE_END
        assert all(asked(arrive(rig, "c")["c"]).values()) == (first == "a")
        finish_all(rig)


LEAVES = ("abort", "refuse", "lose", "stall")
"""Faults of a sender that leave its waiters without it."""


class Play:
    """Equal and other prompts, of which senders have faults, in the order of their arrival."""

    def __init__(self, rig: Rig, prompts: list[bytes], faults: list[str]) -> None:
        self.rig = rig
        self.faults = {str(number): fault for number, fault in enumerate(faults)}
        self.prompts = {str(number): prompt for number, prompt in enumerate(prompts)}
        self.rooms: dict[str, commands.SendPromise] = {}
        """By request, the promise that no prefill has served."""
        self.extends: dict[str, list[commands.SendExtend]] = {}
        """By request, extends of component pages that no prefill has served."""
        self.sent = Counter[str]()
        for name, prompt in self.prompts.items():
            rig.arrive(name, prompt)
        self.take_promises()

    def take_promises(self) -> None:
        for abort in self.rig.take_all(commands.SendAbort):
            self.rig.drained(abort)
        for extend in self.rig.take_all(commands.SendExtend):
            if extend.component == "full":
                self.rig.chunk(extend)
            else:
                self.extends.setdefault(extend.request_id, []).append(extend)
                self.sent[extend.component] += len(extend.pages)
        for promise in self.rig.take_all(commands.SendPromise):
            self.rooms[promise.request_id] = promise
            self.sent.update(asked(promise))
            self.rig.promised(promise, f"prefill of {promise.request_id}")

    def serve(self, name: str) -> None:
        for extend in self.extends.pop(name, []):
            self.rig.chunk(extend)
        if (promise := self.rooms.pop(name, None)) is not None:
            self.rig.chunk(promise)
            self.rig.aux(promise)

    def run(self) -> None:
        while senders := {*self.extends, *(name for name in self.rooms if sum(asked(self.rooms[name]).values()))}:
            # What stalls while another one is played would be passed on as well.
            self.play(min(self.extends or senders, key=int))
            self.take_promises()
        for name in list(self.rooms):
            self.serve(name)
        assert not self.rig.take_all(commands.CopyPages, of_components=True)

    def play(self, name: str) -> None:
        rig, fault = self.rig, self.faults[name]
        self.faults[name] = "none"
        promise = self.rooms.get(name)
        request = rig.core.request(name)
        assert request is not None
        room = {"request_id": name, "generation": request.generation}
        if fault in ("abort", "refuse", "lose"):
            self.rooms.pop(name, None)
            self.extends.pop(name, None)
        if fault == "abort":
            rig.abort(name)
        elif fault == "refuse":
            rig.step(events.RoomRefused, **room, span=0, cause="it forgot the prompt")
        elif fault == "lose":
            rig.step(events.WriterLost, writer=f"prefill of {name}", cause="silence")
        elif fault == "stall":
            # The first token is late, and the waiters have everything else.
            if promise is not None:
                rig.chunk(promise)
            for other in [other for other in self.rooms if other != name and self.is_equal(other, name)]:
                if not sum(asked(self.rooms[other]).values()):
                    self.serve(other)
            rig.wait_until(rig.now_s + 0.5)
        else:
            self.serve(name)
            self.copy()

    def is_equal(self, one: str, other: str) -> bool:
        return self.prompts[one] == self.prompts[other]

    def copy(self) -> None:
        for copy in self.rig.take_all(commands.CopyPages, of_components=True):
            owner = self.rig.core.state.operations[copy.op]
            assert isinstance(owner, SharedEndCopy)
            to = owner.waiter.request
            fails = to is not None and self.faults[to.request_id] == "copy fails"
            self.rig.copied(copy, error="bus error" if fails else "")


@given(
    users=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(("none", *LEAVES, "copy fails"))), max_size=8),
    page_size=st.sampled_from((1, 2, 4)),
)
@examples(200)
def test_each_end_is_sent_as_often_as_a_naive_model_counts(users: list[tuple[int, str]], page_size: int) -> None:
    # The naive model: the requests of one end wait in line. Prefill sends it to the first of them, and again to the
    # next one if the first leaves. If it does not, all others have it then, except those whose copy fails.
    expected, lines = 0, list[list[str]]()
    for prompt in range(3):
        lines.append([fault for number, fault in users if number == prompt])
    for line in lines:
        while line:
            expected += 1
            first, *line = line
            if first not in LEAVES:
                expected += line.count("copy fails")
                break
    prompts = (b"abcdefghi", b"abcdefghj", b"abcdefgh")
    rig = rig_of(
        window(5, device=200, host=0),
        state(60, host=0),
        page_size=page_size,
        key_bytes=page_size,
        device_pages=300,
        host_pages=0,
        share_wait_s=0.5,
        copy_deadline_s=100.0,
    )
    play = Play(rig, [prompts[number] for number, _ in users], [fault for _, fault in users])
    play.run()
    assert play.sent["state"] == expected
    left = sum(fault in ("abort", "refuse", "lose") for _, fault in users)
    ready = {one.request_id for one in rig.take_all(commands.ReportReady)}
    assert len(ready) >= len(users) - left
    finish_all(rig)
