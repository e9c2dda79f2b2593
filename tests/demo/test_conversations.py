"""Generated workloads are the same for the same options, share what they should, and can be run in their order."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo.conversations import (
    Conversation,
    ConversationTurn,
    Lengths,
    Transcripts,
    Workload,
    WorkloadOptions,
    agent_options,
    long_prompt_options,
    make_workload,
)
from demo.link import LARGE_MODEL
from demo.phase import reusable_tokens
from tests.support.thorough import examples
from tidekv.backends.keys.chain import pack_tokens
from tidekv.states.errors import InvalidConfig, InvalidRequest

OPTIONS = st.builds(
    WorkloadOptions,
    kind=st.sampled_from(["chat", "agents"]),
    conversations=st.integers(1, 5),
    rounds=st.integers(1, 4),
    groups=st.integers(1, 3),
    system=st.just(Lengths(20, 0.5, 3)),
    user=st.just(Lengths(6, 1.0)),
    output=st.just(Lengths(5, 0.5)),
    sub_agents=st.integers(0, 3),
    sub_agent_rounds=st.integers(1, 3),
    seed=st.integers(0, 10),
)


def run(workload: Workload) -> dict[str, tuple[list[int], list[int]]]:
    """Answer every turn, in order, by the turn's own number; returns prompts and outputs by request id."""
    transcripts, said = Transcripts(workload), {}
    for turn in workload.in_order():
        prompt = transcripts.prompt(turn)
        output = [1000 + turn.conversation] * turn.output_tokens
        transcripts.answer(turn, output)
        said[turn.request_id] = (prompt, output)
    return said


@examples(80)
@given(OPTIONS)
def test_every_turn_comes_once_behind_what_it_needs(options: WorkloadOptions) -> None:
    workload = make_workload(options)
    assert workload == make_workload(options)
    said = run(workload)
    turns = Counter(turn.request_id for conversation in workload.conversations for turn in conversation.turns)
    assert Counter(said.keys()) == turns
    assert max(turns.values()) == 1
    assert workload.context_tokens_max == max(len(prompt) + len(output) for prompt, output in said.values())
    for conversation in workload.conversations:
        for turn in conversation.turns:
            prompt, _ = said[turn.request_id]
            before = (turn.conversation, turn.round - 1) if turn.round else conversation.after
            inherited: list[int] = []
            if before and (turn.round or conversation.inherits):
                above = workload.conversations[before[0]].turns[before[1]]
                inherited = [token for part in said[above.request_id] for token in part]
            assert prompt == [*inherited, *turn.new_user_tokens]
            assert all(0 <= token < options.vocabulary for token in turn.new_user_tokens)
            assert turn.output_tokens >= 1
            assert turn.new_user_tokens


def test_groups_share_a_system_prompt_and_nothing_else() -> None:
    first = [
        conversation.turns[0].new_user_tokens
        for conversation in make_workload(
            WorkloadOptions(conversations=4, groups=2, system=Lengths(50), user=Lengths(10))
        ).conversations
    ]
    assert first[0][:50] == first[2][:50]
    assert first[1][:50] == first[3][:50]
    assert len({tokens[:50] for tokens in first}) == 2
    assert len({tokens[50:] for tokens in first}) == 4


def test_seeds_and_other_options_do_not_disturb_one_another() -> None:
    base = make_workload(WorkloadOptions(conversations=3))
    # One more conversation, or a pause to think, leaves the others' tokens as they are.
    assert make_workload(WorkloadOptions(conversations=4)).conversations[:3] == base.conversations
    paused = make_workload(WorkloadOptions(conversations=3, think_s=2.0))
    for ours, theirs in zip(base.in_order(), paused.in_order(), strict=True):
        assert (ours.new_user_tokens, ours.output_tokens) == (theirs.new_user_tokens, theirs.output_tokens)
        assert (ours.think_s, theirs.think_s > 0) == (0.0, True)
    assert make_workload(WorkloadOptions(conversations=3, seed=2)) != base


def test_agents_reuse_most_of_their_prompts() -> None:
    workload = make_workload(agent_options(agents=3, rounds=12))
    kinds = Counter((conversation.after is not None, conversation.inherits) for conversation in workload.conversations)
    assert kinds == {(False, False): 3, (True, True): 3, (True, False): 3}
    pairs = [(pack_tokens(prompt), pack_tokens(output)) for prompt, output in run(workload).values()]
    rate = sum(reusable_tokens(pairs, 16)) / sum(len(prompt) // 4 for prompt, _ in pairs)
    assert rate > 0.85


def test_lengths_stay_within_their_bounds_and_around_their_median() -> None:
    workload = make_workload(
        WorkloadOptions(conversations=60, rounds=10, user=Lengths(40, 0.8, 10, 100), output=Lengths(7))
    )
    lengths = sorted(len(turn.new_user_tokens) for turn in workload.in_order() if turn.round)
    assert lengths[0] == 10
    assert lengths[-1] == 100
    assert 34 <= lengths[len(lengths) // 2] <= 46
    assert {turn.output_tokens for turn in workload.in_order()} == {7}


def test_transcripts_refuse_turns_out_of_order() -> None:
    turns = tuple(ConversationTurn(0, position, (position,), 1, 0.0) for position in range(2))
    branch = Conversation(1, (ConversationTurn(1, 0, (9,), 1, 0.0),), after=(0, 0), inherits=True)
    transcripts = Transcripts(Workload((Conversation(0, turns), branch)))
    with pytest.raises(InvalidRequest, match="conversation-0/round-1 needs the answer to round 0 of conversation 0"):
        transcripts.prompt(turns[1])
    with pytest.raises(InvalidRequest, match="conversation-1/round-0 needs the answer to round 0 of conversation 0"):
        transcripts.answer(branch.turns[0], [5])
    transcripts.answer(turns[0], [7])
    assert transcripts.prompt(turns[1]) == [0, 7, 1]
    assert transcripts.prompt(branch.turns[0]) == [0, 7, 9]
    with pytest.raises(InvalidRequest, match="conversation-0/round-0 is answered already"):
        transcripts.answer(turns[0], [7])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "batch"}, "kind must be chat or agents, not 'batch'"),
        ({"rounds": 0}, "rounds must be an int from 1, not 0"),
        ({"vocabulary": 1}, "vocabulary must be an int from 2"),
        ({"think_s": -1.0}, "think_s must be a finite number of seconds of at least 0"),
    ],
)
def test_wrong_options_say_what_is_allowed(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        WorkloadOptions(**options)  # type: ignore[arg-type]  # Wrong values are the point.
    with pytest.raises(InvalidConfig, match="least <= median <= most"):
        Lengths(5, least=6)


def test_long_prompts_take_the_link_of_the_deployment_for_long_and_are_mostly_known() -> None:
    """The saving in `tidekv run` is that of the link: a busy machine makes computation slower, and not the link."""
    said = run(make_workload(long_prompt_options()))
    prompts = [prompt for prompt, _ in said.values()]
    assert sorted(map(len, prompts))[len(prompts) // 2] / LARGE_MODEL.tokens_per_s > 0.4
    systems = {tuple(prompt[:4096]) for prompt in prompts}
    assert len(systems) * 4096 < 0.15 * sum(map(len, prompts))
