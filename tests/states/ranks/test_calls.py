"""Calls of the ranks' callers: one is made when all of them have made the same, in the leader's order."""

from __future__ import annotations

from tidekv.states import commands, events
from tidekv.states.ranks.vote_items import RequestVote
from tidekv.states.ranks.votes import VoteVector


def test_an_arrival_waits_for_the_callers_of_all_ranks_and_has_the_leaders_numbers(make_ranks) -> None:
    ranks = make_ranks(3)
    arrival = {"request_id": "a", "keys": b"ab", "prompt_tokens": 2}
    ranks.receive(events.RequestArrived, ranks=[1], request_number=50, generation=9, **arrival)
    ranks.receive(events.RequestArrived, ranks=[0], request_number=3, generation=4, **arrival)
    assert ranks.turn().events == []
    ranks.receive(events.RequestArrived, ranks=[2], request_number=70, generation=2, **arrival)
    ranks.now_s = 1.0
    ranks.turn()
    (event,) = ranks.taken
    assert isinstance(event, events.RequestArrived)
    assert (event.request_number, event.generation, event.keys, event.at_s) == (3, 4, b"ab", 1.0)


def test_arrivals_come_in_the_leaders_order(make_ranks) -> None:
    ranks = make_ranks(2)
    for rank, order in ((0, "ab"), (1, "ba")):
        for name in order:
            ranks.receive(
                events.RequestArrived, ranks=[rank], request_id=name, request_number=1, keys=b"x", prompt_tokens=1
            )
    ranks.turn()
    assert [event.request_id for event in ranks.taken] == ["a", "b"]


def test_a_call_that_one_rank_lacks_is_refused_after_the_hold_by_its_number(make_ranks) -> None:
    ranks = make_ranks(3)
    ranks.receive(events.RequestArrived, ranks=[0, 1], request_id="a", request_number=1, keys=b"x", prompt_tokens=1)
    assert ranks.turn().refusals == []
    assert ranks.agreements[0].next_deadline_s() == 2.0
    ranks.now_s = 2.0
    (refusal,) = ranks.turn().refusals
    assert refusal.cause == "ranks differ"
    assert refusal.detail == "rank 2 did not make the call in time"
    assert ranks.taken == []
    # The late rank's caller is refused as well, without a vote.
    ranks.receive(events.RequestArrived, ranks=[2], request_id="a", request_number=1, keys=b"x", prompt_tokens=1)
    assert ranks.agreements[2].take_refusals(3.0) == []
    (late,) = ranks.agreements[2].take_refusals(4.0)
    assert late.detail == "rank 0 did not make the call in time"


def test_a_request_that_one_rank_lacks_ends_at_its_deadline_if_that_is_before_the_end_of_the_hold(make_ranks) -> None:
    ranks = make_ranks(2)
    arrival = {"request_number": 1, "keys": b"x", "prompt_tokens": 1, "deadline_at_s": 0.5}
    ranks.receive(events.RequestArrived, ranks=[0], request_id="a", **arrival)
    ranks.receive(events.RequestArrived, ranks=[1], request_id="b", **arrival)
    assert ranks.turn().refusals == []
    assert [agreement.next_deadline_s() for agreement in ranks.agreements] == [0.5, 0.5]
    ranks.now_s = 0.5
    (refusal,) = ranks.turn().refusals
    assert (refusal.cause, refusal.detail) == ("ranks differ", "rank 1 did not make the call in time")
    (late,) = ranks.agreements[1].take_refusals(0.5)
    assert (late.cause, late.detail) == ("ranks differ", "rank 0 did not make the call in time")


def test_requests_of_one_name_that_differ_are_refused(make_ranks) -> None:
    ranks = make_ranks(2)
    for rank, keys in ((0, b"x"), (1, b"y")):
        ranks.receive(events.RequestArrived, ranks=[rank], request_id="a", request_number=1, keys=keys, prompt_tokens=1)
    (refusal,) = ranks.turn().refusals
    assert "different contents" in refusal.detail


def test_the_tokens_behind_the_last_full_page_are_compared_and_reach_every_core(make_ranks) -> None:
    ranks = make_ranks(2)
    arrival = {"request_number": 1, "keys": b"x", "prompt_tokens": 2}
    for rank, rest in ((0, b"y"), (1, b"z")):
        ranks.receive(events.RequestArrived, ranks=[rank], request_id="a", rest=rest, **arrival)
    (refusal,) = ranks.turn().refusals
    assert "different contents" in refusal.detail
    ranks.receive(events.RequestArrived, request_id="b", rest=b"y", **arrival)
    ranks.turn()
    assert [event.rest for event in ranks.taken] == [b"y"]


def test_a_caller_that_gives_up_before_the_arrival_ends_it_on_all_ranks(make_ranks) -> None:
    ranks = make_ranks(2)
    ranks.receive(events.RequestArrived, ranks=[0], request_id="a", request_number=1, keys=b"x", prompt_tokens=1)
    ranks.turn()
    ranks.receive(events.AbortRequested, ranks=[0], request_id="a")
    (refusal,) = ranks.turn().refusals
    assert refusal.cause == "aborted"


def test_a_caller_that_gives_up_before_the_leader_named_its_call_needs_no_vote(make_ranks) -> None:
    ranks = make_ranks(2)
    ranks.receive(events.RequestArrived, request_id="a", request_number=1, keys=b"x", prompt_tokens=1)
    ranks.receive(events.AbortRequested, request_id="a", cause="cancelled by the caller")
    for agreement in ranks.agreements:
        (refusal,) = agreement.take_refusals(0.0)
        assert refusal.cause == "cancelled by the caller"
    assert ranks.turn().events == []
    ranks.receive(events.AbortRequested, request_id="nobody")
    assert not any(agreement.has_news for agreement in ranks.agreements)


def test_an_abort_between_the_vote_on_an_arrival_and_its_result_is_not_lost(make_ranks) -> None:
    ranks = make_ranks(2)
    ranks.arrive()
    ranks.turn(lambda: ranks.receive(events.AbortRequested, ranks=[1], request_id="a", cause="cancelled by the caller"))
    assert ranks.types() == ["RequestArrived"]
    assert ranks.agreements[1].has_news
    ranks.turn()
    failed = ranks.take(commands.ReportFailed)
    assert failed.cause == "cancelled by the caller"


def test_a_finish_of_one_caller_alone_ends_with_its_request_and_not_a_later_one_of_that_id(make_ranks) -> None:
    for made_on in (0, 1):
        ranks = make_ranks(2)
        ranks.make_ready()
        ranks.receive(events.FinishRequested, ranks=[made_on], request_id="a", keys=b"abcd", tokens=4)
        ranks.turn()
        ranks.receive(events.AbortRequested, ranks=[1 - made_on], request_id="a")
        ranks.turn()
        ranks.take(commands.ReportDropped)
        ranks.arrive(generation=500)
        ranks.turn()
        # The hold time of the first finish is over, and the callers of the second request finish with another text.
        ranks.now_s = 5.0
        ranks.turn()
        assert all(core.request("a") is not None for core in ranks.cores)
        assert ranks.taken == []
        assert all(not agreement._own_calls and not agreement._named for agreement in ranks.agreements)


def test_an_abort_by_one_caller_is_an_abort_on_all_ranks(make_ranks) -> None:
    ranks = make_ranks(3)
    ranks.make_ready()
    ranks.receive(events.AbortRequested, ranks=[1], request_id="a", cause="cancelled by the caller")
    ranks.receive(events.AbortRequested, ranks=[2], request_id="a", cause="because")
    ranks.receive(events.GrowthTaken, ranks=[2], request_id="a", page_count=1)
    ranks.turn()
    assert ranks.taken == [events.AbortRequested(at_s=0.0, request_id="a", cause="cancelled by the caller")]
    ranks.take(commands.ReportDropped)
    ranks.receive(events.GrowthTaken, request_id="a", page_count=1)
    assert ranks.turn().events == []


def test_growth_is_what_all_callers_have_taken(make_ranks) -> None:
    ranks = make_ranks(2)
    ranks.make_ready()
    ranks.receive(events.GrowthTaken, ranks=[0], request_id="a", page_count=1, wanted=2)
    assert ranks.turn().events == []
    ranks.receive(events.GrowthTaken, ranks=[1], request_id="a", page_count=1)
    ranks.turn()
    assert ranks.taken == [events.GrowthTaken(at_s=0.0, request_id="a", page_count=1)]
    ranks.receive(events.GrowthTaken, ranks=[1], request_id="a", page_count=0, wanted=3)
    ranks.turn()
    assert ranks.taken == [events.GrowthTaken(at_s=0.0, request_id="a", page_count=0, wanted=2)]
    # One of the three that rank 1 wanted is left, which no other rank wants.
    assert ranks.turn().events == []


def test_finish_waits_for_all_callers_and_a_missing_one_drops_the_request(make_ranks) -> None:
    ranks = make_ranks(2)
    ranks.make_ready()
    ranks.receive(events.FinishRequested, request_id="a", keys=b"abcd", tokens=4)
    ranks.turn()
    assert ranks.take(commands.ReportFinished).inserted == 0
    ranks.arrive("b", b"efgh")
    ranks.turn()
    for rank in range(2):
        for event in (
            events.PromiseSent(at_s=0.0, request_id="b", generation=0, writer="p", ranks=1),
            events.ChunkReceived(at_s=0.0, request_id="b", generation=0, rank=0, span=0, first=0, count=4, last=True),
            events.AuxReceived(at_s=0.0, request_id="b", generation=0, rank=0),
        ):
            ranks.agreements[rank].receive(event)
    ranks.turn()
    ranks.receive(events.FinishRequested, ranks=[0], request_id="b", keys=b"efgh", tokens=4)
    ranks.turn()
    ranks.now_s = 5.0
    decision = ranks.turn()
    assert decision.refusals[0].detail == "rank 1 did not make the call in time"
    assert ranks.types() == ["AbortRequested"]
    ranks.take(commands.ReportDropped)


def test_retracting_and_dropping_are_calls_of_all_ranks(make_ranks) -> None:
    ranks = make_ranks(2)
    ranks.make_ready()
    ranks.receive(events.RetractRequested, request_id="a", keys=b"abcd", tokens=4)
    ranks.turn()
    ranks.receive(events.CopyEnded, op=ranks.take(commands.CopyPages, target="host").op)
    ranks.turn()
    assert ranks.take(commands.ReportRetracted).held_pages == 4
    ranks.receive(events.RetractedDropped, ranks=[1], request_id="a")
    ranks.turn()
    ranks.receive(events.RetractedDropped, ranks=[0], request_id="a")
    ranks.turn()
    assert ranks.types() == ["RetractedDropped"]


def test_an_abort_comes_before_calls_that_all_callers_made_in_the_same_turn(make_ranks) -> None:
    ranks = make_ranks(2)
    ranks.make_ready()
    ranks.receive(events.RetractRequested, request_id="a", keys=b"abcd", tokens=4)
    ranks.receive(events.AbortRequested, ranks=[1], request_id="a")
    ranks.turn()
    assert ranks.types() == ["AbortRequested", "RetractRequested"]
    ranks.take(commands.ReportDropped)
    assert ranks.turn().is_idle


def test_only_the_leader_flushes_and_changes_policies(make_ranks) -> None:
    ranks = make_ranks(2)
    ranks.make_ready()
    ranks.receive(events.FlushRequested, ranks=[0], call=1, tiers=("l1",))
    ranks.turn()
    assert ranks.take(commands.ReportFlushed).spared == {"l1": 4}


def test_the_leader_changes_a_request_on_all_ranks(make_ranks) -> None:
    ranks = make_ranks(2)
    ranks.receive(events.RequestArrived, request_id="a", request_number=1, keys=b"ab", prompt_tokens=2)
    ranks.turn()
    ranks.receive(events.RequestChanged, ranks=[0], request_id="a", priority=2, deadline_at_s=9.0)
    ranks.turn()
    ranks.turn()
    found = [core.request("a") for core in ranks.cores]
    assert [(request.priority, request.deadline_at_s) for request in found] == [(2, 9.0)] * 2


def test_what_comes_after_an_agreed_abort_is_no_event() -> None:
    vote_vector = VoteVector()
    item = RequestVote(1, vote_vector, "a")
    item.abort(vote_vector, "aborted")
    item.abort(vote_vector, "aborted")
    vote_vector.take(vote_vector.cast(len(vote_vector)))
    assert item.decide(vote_vector, 1.0) == [events.AbortRequested(at_s=1.0, request_id="a")]
    item.grow(vote_vector, 1, 2)
    assert vote_vector.take(vote_vector.cast(len(vote_vector))) == [item]
    assert item.decide(vote_vector, 1.0) == []


def test_a_wish_that_not_all_callers_have_any_more_is_no_event() -> None:
    vote_vector = VoteVector()
    item = RequestVote(1, vote_vector, "a")
    assert item.decide(vote_vector, 1.0) == []
