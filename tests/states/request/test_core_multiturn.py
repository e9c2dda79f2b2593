"""Hit rates of a conversation, exactly: page 64, prompts of 64, 256, 448, 640, 832 and 1,024 tokens."""

from __future__ import annotations

from fractions import Fraction

import pytest

from simulation.rig import Rig
from tidekv.states import commands, events

PAGE = 64
ROUNDS = 6
OUTPUT = 129
USER = 63


def token_bytes(tokens: list[int]) -> bytes:
    """Two bytes a token, so that every token of the conversation is its own."""
    return b"".join(token.to_bytes(2, "little") for token in tokens)


class Conversation:
    """One conversation over a rig that uses all tiers, or only the device."""

    def __init__(self, *, keep_output: bool, tiers: str) -> None:
        self.rig = Rig(
            page_size=PAGE,
            key_bytes=2 * PAGE,
            device_pages=64,
            host_pages=64,
            growth_reserve_pages=3,
            keep_output=keep_output,
        )
        self.tiers = tiers
        if "l3" in tiers:
            self.rig.attach_storage()
        self.tokens = list(range(PAGE))
        self.stored = 0

    def play_round(self, number: int) -> int:
        """Restore, generate, finish; returns the tokens that did not come from prefill."""
        rig, name = self.rig, f"round {number}"
        full = len(self.tokens) // PAGE * PAGE
        rig.step(
            events.RequestArrived,
            request_id=name,
            request_number=number,
            keys=token_bytes(self.tokens[:full]),
            prompt_tokens=len(self.tokens),
        )
        for query in rig.take_all(commands.QueryStorage):
            rig.answer(query, max(0, self.stored - query.first))
        for fetch in rig.take_all(commands.FetchPages):
            rig.fetched(fetch)
        for copy in rig.take_all(commands.CopyPages, target="device"):
            rig.copied(copy)
        rig.serve(rig.take(commands.SendPromise))
        sources = rig.take(commands.ReportReady).sources
        assert sum(sources.values()) == len(self.tokens)
        self.generate(name)
        if self.tiers != "l1":
            # Only the last tier of this run keeps anything between the rounds.
            rig.flush(*("l1", "l2")[: 2 if self.tiers == "l3" else 1])
        return len(self.tokens_before) - sources["transfer"]

    def generate(self, name: str) -> None:
        """The last token of the output has no KV yet; the user's next words follow it."""
        rig = self.rig
        self.tokens_before = self.tokens
        start = 1000 * (len(self.tokens) // PAGE)
        self.tokens = self.tokens + [start + step for step in range(OUTPUT)]
        written = self.tokens[:-1]
        grown = len(written) // PAGE - len(self.tokens_before) // PAGE
        rig.step(events.GrowthTaken, request_id=name, page_count=grown)
        keys = token_bytes(written[: len(written) // PAGE * PAGE])
        rig.step(events.FinishRequested, request_id=name, keys=keys, tokens=len(written))
        for copy in rig.take_all(commands.CopyPages, target="host"):
            rig.copied(copy)
        for put in rig.take_all(commands.StorePages):
            self.stored = len(put.host_pages)
            rig.stored(put)
        rig.pending = []
        self.tokens += [60000 + start // PAGE + step for step in range(USER)]


@pytest.mark.parametrize("tiers", ["l1", "l2", "l3"])
@pytest.mark.parametrize(
    ("keep_output", "rates", "overall"),
    [
        (True, (0.750, 0.857, 0.900, 0.923, 0.9375), 0.882),
        (False, (0.250, 0.571, 0.700, 0.769, 0.8125), 0.686),
    ],
    ids=["output kept", "output not kept"],
)
def test_each_round_hits_exactly_what_the_rounds_before_left(
    tiers: str, keep_output: bool, rates: tuple[float, ...], overall: float
) -> None:
    conversation = Conversation(keep_output=keep_output, tiers=tiers)
    prompts = [len(conversation.tokens)]
    hits = [conversation.play_round(0)]
    for number in range(1, ROUNDS):
        prompts.append(len(conversation.tokens))
        hits.append(conversation.play_round(number))
    assert prompts == [64, 256, 448, 640, 832, 1024]
    assert hits[0] == 0
    found = [Fraction(hit, prompt) for hit, prompt in zip(hits, prompts, strict=True)]
    assert [round(float(rate), 4) for rate in found[1:]] == pytest.approx(rates, abs=0.0005)
    assert float(Fraction(sum(hits), sum(prompts))) == pytest.approx(overall, abs=0.0005)
    conversation.rig.expect_nothing_held()
