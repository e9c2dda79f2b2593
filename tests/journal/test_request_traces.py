"""Stories of simulated runs with every fault: nothing goes another way than planned without a cause that is told."""

from __future__ import annotations

from tidekv import Replayer
from tidekv.engine.trace.causes import EXTENDED
from tidekv.engine.trace.explain import explain
from tidekv.engine.trace.request_trace import Story
from tidekv.engine.trace.request_traces import read_stories

SEEDS = range(1, 6)


def test_whatever_fails_in_a_run_has_a_cause(simulate) -> None:
    extends = fallbacks = 0
    for seed in SEEDS:
        told = read_stories(Replayer(simulate(seed, 80).path))
        assert len(told.all) >= 80
        for story in told.all:
            check_causes(story, explain(story, now_s=told.last_at_s))
            extends += sum(work.span > 0 for work in story.works)
            fallbacks += len(story.fallbacks)
    assert extends > 10
    assert fallbacks > 100


def check_causes(story: Story, words: str) -> None:
    taken_back = [work for work in story.works if work.kind == "span" and work.span]
    assert all(work.cause and work.cause != EXTENDED["other"] for work in taken_back), words
    went_back = [state for _, state in story.states].count("PREALLOC") - 1
    assert len([note for note in story.fallbacks if "back to the queue" in note.consequence]) == went_back, words
    assert all(note.cause and note.consequence for note in story.fallbacks), words
    assert all(f"{note.cause}; {note.consequence}" in words for note in story.fallbacks)
    if story.ended == "FAILED":
        assert story.cause and f": {story.cause}" in words, words
    if taken_back and story.ended == "READY":
        assert story.fallbacks, words
