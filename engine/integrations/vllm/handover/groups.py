"""vLLM's groups of KV: the full KV, and beside it sliding windows and states, which are components of the engines.

vLLM has one table of blocks for each group, by position, and all groups take their blocks from the same memory: a block
belongs to one group at a time. Of a window it keeps the blocks that the next token needs, of a state the last one or
two; other positions hold the null block.

With components both ends hand over all tokens of a prompt but the last (`handed_tokens`). Decode computes that one
itself: of a state it needs the record before it, and of a window one token more than behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final  # vLLM's configuration is not typed here: tests and type checks go without vLLM.

from tidekv.engine.integrations.vllm.drafts import depends_on_next_token
from tidekv.engine.integrations.vllm.settings import KINDS, kinds_of, layer_specs
from tidekv.states.component_specs import ComponentKind
from tidekv.states.errors import InvalidConfig

COMPONENT_KINDS: Final[Mapping[str, ComponentKind]] = {"SlidingWindowSpec": "window", "MambaSpec": "state"}
"""The kind of a component by vLLM's name of what a group of layers keeps."""
NULL_BLOCK: Final = 0
"""vLLM's block at positions that a request does not keep."""
Table = Sequence[Sequence[int]]
"""A request's blocks by group and position."""


@dataclass(frozen=True, slots=True)
class ComponentBlocks:
    """A window or state. `group`: its number among vLLM's groups. `block_size`: tokens between two of its blocks."""

    name: str
    kind: ComponentKind
    group: int
    layer_names: tuple[str, ...]
    block_size: int
    window_tokens: int = 0

    def at_end(self, table: Table, tokens: int) -> tuple[int, ...]:
        """Return the blocks that the end of so many tokens needs; empty if vLLM does not have all of them any more."""
        last = -(-tokens // self.block_size)
        first = max(0, tokens - self.window_tokens) // self.block_size if self.kind == "window" else last - 1
        blocks = tuple(table[self.group][max(first, 0) : last])
        return () if len(blocks) < last - first or NULL_BLOCK in blocks else blocks


@dataclass(frozen=True, slots=True)
class BlockGroups:
    """All groups. `full`: the number of the group that has the full KV. `bigram_keys`: a block's KV depends on the
    token after it, too.
    """

    full: int
    components: tuple[ComponentBlocks, ...]
    bigram_keys: bool = False

    def handed_tokens(self, prompt_tokens: int) -> int:
        """Return how many tokens of a prompt are handed over, from the first one on."""
        return prompt_tokens - 1 if self.components else prompt_tokens

    @property
    def can_look_up(self) -> bool:
        """Whether a prompt is served up to any full block. Of windows and states, what is kept ends where a prompt has
        ended.
        """
        return not self.components

    @property
    def has_states(self) -> bool:
        """Whether there is a state, whose record must not be behind the tokens that are handed over."""
        return any(each.kind == "state" for each in self.components)

    def at_end(self, table: Table, tokens: int, *, windows_only: bool = False) -> dict[str, tuple[int, ...]]:
        """Return the blocks that the end of so many tokens needs, by component, without those of which vLLM does not
        have all.
        """
        wanted = [each for each in self.components if each.kind == "window" or not windows_only]
        found = {each.name: each.at_end(table, tokens) for each in wanted}
        return {name: blocks for name, blocks in found.items() if blocks}


def read_groups(kv_cache_groups: Sequence[Any], speculative: Any = None) -> BlockGroups:
    """Return vLLM's groups. `speculative`: vLLM's configuration of a draft; None without.

    Raises InvalidConfig, which names what a group keeps, or the draft, if it cannot be handed over.
    """
    full, components = [], []
    specs = [group.kv_cache_spec for group in kv_cache_groups]
    names = [" and ".join(kinds_of(spec)) for spec in specs]
    for number, (group, spec, name) in enumerate(zip(kv_cache_groups, specs, names, strict=True)):
        kind = COMPONENT_KINDS.get(name)
        if KINDS.keys() >= set(kinds_of(spec)):
            full.append(number)
        elif kind is None:
            known = ", ".join((*KINDS, *COMPONENT_KINDS))
            raise InvalidConfig(
                f"KV of {name} cannot be handed over, that of {known} can: serve this model without this connector"
            )
        else:
            components.append(
                ComponentBlocks(
                    name=f"{kind}_{number}",
                    kind=kind,
                    group=number,
                    layer_names=tuple(group.layer_names),
                    block_size=int(spec.block_size),
                    # vLLM's window includes the token that is computed.
                    window_tokens=max(int(layer_specs(spec)[0].sliding_window) - 1, 1) if kind == "window" else 0,
                )
            )
    if len(full) != 1:
        raise InvalidConfig(
            f"KV in groups of {', '.join(names) or 'nothing'} cannot be handed over: exactly one of them must be of "
            f"{' or '.join(KINDS)}, which has blocks for all tokens of a prompt"
        )
    block_size = int(specs[full[0]].block_size)
    for component in components:
        if component.kind == "window" and component.block_size != block_size:
            raise InvalidConfig(
                f"windows with blocks of {component.block_size} tokens beside full KV with blocks of {block_size} "
                "cannot be handed over: layers of one model must have equal heads"
            )
    return BlockGroups(full[0], tuple(components), depends_on_next_token(speculative))
