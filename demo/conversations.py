"""Generator of workloads: chats of several rounds, and agents with many small steps and sub-agents.

Equal options give equal workloads in every process. Only the input of users and tools is generated here. A model's
answer is known only after it was computed, so `Transcripts` assembles prompts while the workload runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, Literal, TypeAlias, get_args

from tidekv.states.errors import InvalidConfig, InvalidRequest
from tidekv.states.validation import checked

Kind: TypeAlias = Literal["chat", "agents"]
Source: TypeAlias = Literal["l1", "l2", "l3", "transfer"]
SOURCES: Final[tuple[Source, ...]] = get_args(Source)
"""Sources of a prompt's tokens."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal token counts. `spread` is the standard deviation of the logarithm; 0 makes all equal to the median."""

    median: int
    spread: float = 0.0
    least: int = 1
    most: int = 1 << 20

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.median <= self.most:
            raise InvalidConfig(
                f"lengths must have 1 <= least <= median <= most, not {self.least}, {self.median}, {self.most}"
            )
        if not 0 <= self.spread <= 5:
            raise InvalidConfig(f"the spread of lengths must be from 0 to 5, not {self.spread}")

    def draw(self, source: Random) -> int:
        """Draw one length from [least, most]."""
        drawn = round(self.median * math.exp(self.spread * source.gauss(0.0, 1.0)))
        return min(self.most, max(self.least, drawn))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """Size of a workload. Raises InvalidConfig, which names the wrong field.

    "chat": `conversations` of `rounds` rounds each; those with equal `number % groups` share a system prompt.
    "agents": the system prompt stands for tools, and all steps append only. Each agent starts `sub_agents` other agents
    of `sub_agent_rounds` rounds: alternately one that continues the agent's own context, and one that begins with a
    prompt shared by all such sub-agents.
    """

    kind: Kind = "chat"
    conversations: int = 6
    rounds: int = 4
    groups: int = 2
    system: Lengths = Lengths(96, 0.3, 16)
    user: Lengths = Lengths(40, 0.6, 4)
    output: Lengths = Lengths(32, 0.4, 4)
    think_s: float = 0.0
    sub_agents: int = 2
    sub_agent_rounds: int = 3
    vocabulary: int = 512
    seed: int = 1

    def __post_init__(self) -> None:
        checked(self.kind, Kind, "kind", InvalidConfig)
        least = {"conversations": 1, "rounds": 1, "groups": 1, "sub_agents": 0, "sub_agent_rounds": 1, "vocabulary": 2}
        for name, lowest in least.items():
            value = getattr(self, name)
            if type(value) is not int or value < lowest:
                raise InvalidConfig(f"{name} must be an int from {lowest}, not {value!r}")
        if not (math.isfinite(self.think_s) and self.think_s >= 0):
            raise InvalidConfig(f"think_s must be a finite number of seconds of at least 0, not {self.think_s}")


def agent_options(*, agents: int = 3, rounds: int = 12, vocabulary: int = 512, seed: int = 1) -> WorkloadOptions:
    """Return options with the proportions of recorded coding agents: a long shared beginning, small steps."""
    return WorkloadOptions(
        kind="agents",
        conversations=agents,
        rounds=rounds,
        groups=1,
        system=Lengths(512),
        user=Lengths(24, 0.9, 4, 512),
        output=Lengths(12, 0.7, 2, 128),
        vocabulary=vocabulary,
        seed=seed,
    )


def long_prompt_options(*, vocabulary: int = 512, seed: int = 1) -> WorkloadOptions:
    """Return options of chats with long system prompts and short answers, for which the transfer decides the wait."""
    return WorkloadOptions(
        conversations=4,
        rounds=4,
        groups=2,
        system=Lengths(4096),
        user=Lengths(40, 0.6, 4, 96),
        output=Lengths(12, 0.3, 8, 16),
        vocabulary=vocabulary,
        seed=seed,
    )


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    """One request of a conversation: new tokens of its prompt, number of tokens to generate, and the pause before it.

    `think_s` counts from the end of the previous turn, or of the turn that the conversation starts after.
    """

    conversation: int
    round: int
    new_user_tokens: tuple[int, ...]
    output_tokens: int
    think_s: float

    @property
    def request_id(self) -> str:
        """Name that is unique in the workload."""
        return f"conversation-{self.conversation}/round-{self.round}"


@dataclass(frozen=True, slots=True)
class Conversation:
    """A sequence of turns.

    `after` is the (conversation, round) that must be answered before it starts; None starts at once. With `inherits`
    its first prompt continues the prompt and output of that turn.
    """

    number: int
    turns: tuple[ConversationTurn, ...]
    after: tuple[int, int] | None = None
    inherits: bool = False


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations, each listed after the one that it starts after."""

    conversations: tuple[Conversation, ...]

    def in_order(self) -> Iterator[ConversationTurn]:
        """Yield all turns, one round of every conversation at a time, each turn after those that it depends on."""
        answered: set[tuple[int, int]] = set()
        following = {conversation.number: 0 for conversation in self.conversations}
        while following:
            for conversation in self.conversations:
                position = following.get(conversation.number)
                if position is None or (conversation.after and conversation.after not in answered):
                    continue
                turn = conversation.turns[position]
                yield turn
                answered.add((turn.conversation, turn.round))
                if position + 1 < len(conversation.turns):
                    following[conversation.number] = position + 1
                else:
                    del following[conversation.number]

    @property
    def context_tokens_max(self) -> int:
        """Tokens of the longest prompt with its output, which pools and model must be able to hold."""
        lengths: dict[tuple[int, int], int] = {}
        for turn in self.in_order():
            conversation = self.conversations[turn.conversation]
            before = (turn.conversation, turn.round - 1) if turn.round else conversation.after
            inherited = lengths[before] if before and (turn.round or conversation.inherits) else 0
            lengths[turn.conversation, turn.round] = inherited + len(turn.new_user_tokens) + turn.output_tokens
        return max(lengths.values())


def make_workload(options: WorkloadOptions) -> Workload:
    """Generate the workload, which depends on the options only."""
    made = [_chat(number, options) for number in range(options.conversations)]
    if options.kind == "agents":
        for agent in range(options.conversations):
            for sub_agent in range(options.sub_agents):
                made.append(_sub_agent(len(made), made[agent], sub_agent, options))
    return Workload(tuple(made))


@dataclass(slots=True)
class Transcripts:
    """Texts of the conversations so far: returns the next prompt and takes its answer."""

    workload: Workload
    _said: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def prompt(self, turn: ConversationTurn) -> list[int]:
        """Return the whole prompt of a turn: the text so far and the turn's new tokens.

        Raises InvalidRequest if the previous turn is not answered.
        """
        conversation = self.workload.conversations[turn.conversation]
        before = (turn.conversation, turn.round - 1) if turn.round else conversation.after
        if before is not None and before not in self._said:
            raise InvalidRequest(f"{turn.request_id} needs the answer to round {before[1]} of conversation {before[0]}")
        inherits = bool(turn.round) or conversation.inherits
        return [*(self._said[before] if before is not None and inherits else ()), *turn.new_user_tokens]

    def answer(self, turn: ConversationTurn, output: Sequence[int]) -> None:
        """Add the answer to a turn. Raises InvalidRequest if it has one already."""
        key = (turn.conversation, turn.round)
        if key in self._said:
            raise InvalidRequest(f"{turn.request_id} is answered already")
        self._said[key] = [*self.prompt(turn), *(int(token) for token in output)]


def _chat(number: int, options: WorkloadOptions) -> Conversation:
    """Generate a conversation, whose first turn begins with the system prompt of its group."""
    source = Random(f"{options.seed}/conversation/{number}")
    system = _beginning(f"group/{number % options.groups}", options)
    return Conversation(number, _turns(number, options.rounds, system, source, options))


def _sub_agent(number: int, parent: Conversation, order: int, options: WorkloadOptions) -> Conversation:
    """Generate a sub-agent of `parent`, started after one of its rounds. Every other one inherits the context."""
    source = Random(f"{options.seed}/conversation/{number}")
    started = source.randrange(len(parent.turns))
    inherits = order % 2 == 0
    system = () if inherits else _beginning("sub-agents", options)
    turns = _turns(number, options.sub_agent_rounds, system, source, options)
    return Conversation(number, turns, after=(parent.number, started), inherits=inherits)


def _turns(
    number: int, rounds: int, system: tuple[int, ...], source: Random, options: WorkloadOptions
) -> tuple[ConversationTurn, ...]:
    return tuple(
        ConversationTurn(
            conversation=number,
            round=position,
            new_user_tokens=(() if position else system) + _tokens(options.user.draw(source), source, options),
            output_tokens=options.output.draw(source),
            # Exponential: many short pauses, some long ones. Drawn even if unused, so that all else stays the same.
            think_s=source.expovariate(1.0) * options.think_s,
        )
        for position in range(rounds)
    )


def _beginning(name: str, options: WorkloadOptions) -> tuple[int, ...]:
    """Generate a system prompt that depends only on its name and the seed."""
    source = Random(f"{options.seed}/{name}")
    return _tokens(options.system.draw(source), source, options)


def _tokens(count: int, source: Random, options: WorkloadOptions) -> tuple[int, ...]:
    return tuple(source.randrange(options.vocabulary) for _ in range(count))
