"""Greedy speculative decoding on pages: a draft proposes, the target verifies, both keep KV.

    target   [0, n)   KV of the tokens of the answer so far, all but the last
    draft    [0, d)   its own KV of the same positions; d may lag behind by the refused proposals

With `shift` 1 the input of the draft is as in the EAGLE family: at position i it is token i + 1. Its KV at the last
position of a page then depends on the token after the page, so keys must cover pairs (`EngineConfig.bigram_keys`).

The output equals that of the target without a draft. The draft's KV only affects how many proposals are accepted.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.support.group_model import CausalModel, GroupModel, choices


@dataclass(frozen=True, slots=True)
class Answer:
    """The output, and the number of tokens that each step of the target added: accepted proposals plus one."""

    output: list[int]
    steps: list[int]

    @property
    def accept_length(self) -> float:
        """Mean number of tokens per step of the target; 1 without a draft."""
        return sum(self.steps) / len(self.steps)


class Speculation:
    """A target and its draft, at the same page ids unless the draft is given pages of its own."""

    def __init__(self, target: GroupModel, draft: GroupModel, *, shift: int = 0, proposals_max: int = 4) -> None:
        self.target = target
        self.draft = draft
        self.shift = shift
        self.proposals_max = proposals_max

    def prefill(self, prompt: Sequence[int], pages: Sequence[int], draft_pages: Sequence[int] | None = None) -> int:
        """Compute the KV of both models for the prompt; returns the first token of the answer."""
        (first_token,) = choices(self.target.forward(prompt, 0, pages)[-1:])
        inputs = [*prompt, first_token][self.shift : self.shift + len(prompt)]
        self.draft.forward(inputs, 0, pages if draft_pages is None else draft_pages)
        return first_token

    def answer(
        self,
        prompt: Sequence[int],
        first_token: int,
        pages: Sequence[int],
        count: int,
        draft_pages: Sequence[int] | None = None,
    ) -> Answer:
        """Generate `count` tokens, including the given first one, after a prompt with its KV in the pages.

        The pages must hold `count + proposals_max` tokens more than the prompt. At the end both models have KV of all
        positions but the last.
        """
        draft_pages = pages if draft_pages is None else draft_pages
        said, steps = [*prompt, first_token], []
        draft_known = len(prompt)
        while len(said) < len(prompt) + count:
            end = len(said) - self.shift
            proposals = self._propose(said, draft_known, draft_pages)
            wanted = choices(self.target.forward([said[-1], *proposals], len(said) - 1, pages))
            agreed = next((at for at, token in enumerate(proposals) if token != wanted[at]), len(proposals))
            said += wanted[: agreed + 1]
            steps.append(agreed + 1)
            draft_known = end + min(agreed, len(proposals) - 1)
        del said[len(prompt) + count :]
        if draft_known < len(said) - 1:
            self.draft.forward(said[draft_known + self.shift : len(said) - 1 + self.shift], draft_known, draft_pages)
        return Answer(said[len(prompt) :], steps)

    def _propose(self, said: list[int], draft_known: int, pages: Sequence[int]) -> list[int]:
        """Feed the draft the tokens that it lacks, at least the last one, and then its own proposals."""
        end = len(said) - self.shift
        start = min(draft_known, end - 1)
        proposals = choices(self.draft.forward(said[start + self.shift :], start, pages)[-1:])
        while len(proposals) < self.proposals_max:
            proposals += choices(self.draft.forward(proposals[-1:], end + len(proposals) - 1, pages))
        return proposals


def first_layers(target: CausalModel, count: int) -> CausalModel:
    """Build a draft from a target's first layers, with the same embeddings, norm and head. Weights are shared."""
    draft = copy.copy(target)
    draft._modules = dict(target._modules)
    draft.config = copy.deepcopy(target.config)
    draft.config.num_hidden_layers = count
    draft.model = copy.copy(target.model)
    draft.model._modules = dict(target.model._modules)
    draft.model.config = draft.config
    draft.model.layers = torch.nn.ModuleList(target.model.layers[:count])
    return draft


def dampen_later_layers(target: CausalModel, first: int, *, by: float) -> None:
    """Scale the contribution of the layers from `first` on, so that a draft of the layers before often agrees.

    Random weights lack the redundancy of trained ones.
    """
    with torch.no_grad():
        for layer in target.model.layers[first:]:
            layer.self_attn.o_proj.weight.mul_(by)
            layer.mlp.down_proj.weight.mul_(by)
