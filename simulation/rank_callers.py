"""Scripts of requests that the callers of all ranks follow, each at its own time.

Components on one simulated rank: use by its callers, and the state that must be equal on all ranks.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from simulation.components import LiveComponents
from tidekv.states.settings import CoreSettings
from tidekv.states.types import PageIds, page_ids

if TYPE_CHECKING:
    from simulation.components import SimulatedComponents, Tags
    from tidekv.states.core import Core
    from tidekv.states.events import ComponentLeft


def check_components(component_pages: SimulatedComponents, caller: RankCaller) -> None:
    """Raise a Violation unless a ready request has every tail at its prompt's end."""
    tables, tags = caller.component_pages.tables, caller.component_tags
    component_pages.check_ready(tables, len(caller.tokens), tags, caller.request_id)


def leave_components(
    component_pages: SimulatedComponents, caller: RankCaller, tokens: bytes, *, rank: int
) -> tuple[ComponentLeft, ...]:
    """Generate up to the end of `tokens`; returns what is left of each tail.

    The callers of all ranks leave the same, except for the rank that the script names in `leaves_no_component_on`.
    """
    script, live = caller.script, caller.component_pages
    if not live.tables:
        return ()
    check_components(component_pages, caller)
    tags = component_pages.tags_of("", tokens)
    component_pages.generate(live, tags, len(script.tokens), len(tokens), f"decoding of {script.request_id}")
    # Seeded by the request, so that all ranks draw the same.
    left = component_pages.left(live, len(tokens), Random(script.request_id))
    return () if script.leaves_no_component_on == rank else left


def kept_components(core: Core) -> tuple[object, ...]:
    """Return the state that must be equal on all ranks: free pages of each pool, and pages of each node."""
    components = core.state.components
    return tuple(
        (tuple(tier.pool.free_pages), tuple(tuple(tier.pages_of(node).items()) for node in tier.nodes()))
        for tier in (() if components is None else components.tiers)
    )


HISTORIES = tuple(Random("histories").choices(b"ab", k=64) for _ in range(4))


class Script:
    """One request: prompt, output, and how it ends."""

    def __init__(
        self, request_id: str, tokens: bytes, output: bytes, *, retracts: bool, cache: bool, priority: int
    ) -> None:
        self.request_id = request_id
        self.tokens = tokens
        self.output = output
        self.retracts = retracts
        self.cache = cache
        self.priority = priority
        self.early = False
        self.deadline_at_s = float("inf")
        self.prefill_count = 1
        self.aborted_by = -1
        """The only rank whose caller aborts; -1 means none."""
        self.missing_on = -1
        """The rank whose caller never submits the request; -1 means none."""
        self.leaves_no_component_on = -1
        """The only rank whose caller leaves nothing of components; -1 means none."""
        self.holds_more_on = -1
        """With lent pages, the rank whose host engine holds one page more of the prompt; -1 means none."""
        self.flushes: tuple[str, ...] = ()
        self.ends: dict[int, str] = {}


class RankCaller:
    """The caller of one request on one rank."""

    def __init__(self, script: Script, tags: list[int], tail: list[int], component_tags: Tags) -> None:
        """`tags` are those of the prompt's full pages, `tail` that of a partial last one."""
        self.script = script
        self.request_id, self.tokens = script.request_id, script.tokens
        self.tags, self.tail, self.component_tags = tags, tail, component_tags
        self.output = script.output
        self.is_ready = False
        self.is_given_back = False
        self.pages: PageIds = page_ids()
        self.held = 0
        """With lent pages, how many hold the prompt from the start."""
        self.lent_components: dict[str, PageIds] = {}
        self.reserve: PageIds = page_ids()
        self.wanted = False
        self.component_pages = LiveComponents((), len(script.tokens))


def draw_script(
    random: Random, request_number: int, settings: CoreSettings, ranks: int, written: list[bytes], asked: list[bytes]
) -> Script:
    """Draw a request that shares a prefix with others.

    `written` lists the tokens written by earlier requests, the only ends at which components can be served; `asked`
    lists their prompts, the last of which may still be on their way. The new request is added to both.
    """
    size = settings.page_size
    history = bytes(random.choice(HISTORIES))
    longest = max(1, (settings.device_pages * 3 // 5 - settings.growth_reserve_pages) * size)
    shared = history[: random.randrange(0, max(1, min(len(history), longest - 2 * size)))]
    tokens = (shared + bytes(random.choices(b"ab", k=random.randint(1, 2 * size))))[:longest]
    if settings.components and written and random.random() < 0.5:
        tokens = (random.choice(written[-6:]) + random.choice((b"", b"", bytes(random.choices(b"ab", k=size)))))[
            :longest
        ]
    if settings.components and settings.share_transfers and asked and random.random() < 0.3:
        tokens = random.choice(asked[-4:])
    asked.append(tokens)
    script = Script(
        f"r{request_number}",
        tokens,
        bytes(random.choices(b"ab", k=random.randint(0, 2 * size))),
        retracts=random.random() < 0.1,
        cache=random.random() < 0.95,
        priority=random.choice((0, 0, 0, 1)),
    )
    script.prefill_count = random.choice((1, 2, 3))
    if random.random() < 0.08:
        script.aborted_by = random.randrange(ranks)
    if ranks > 1 and random.random() < 0.01:
        script.missing_on = random.randrange(ranks)
    if random.random() < 0.05:
        script.flushes = random.choice((("l1",), ("l2",), ("l1", "l2")))
    if settings.components:
        if random.random() < 0.15:
            # Component pages need few host pages, so they would otherwise hardly ever have to come from storage.
            script.flushes = ("l1", "l2")
        if random.random() < 0.7:
            # Component state can be left only at the end of a page, and the last generated token has no KV yet.
            script.output = script.output[: len(script.output) - (len(tokens) + len(script.output) - 1) % size]
        if ranks > 1 and random.random() < 0.02:
            script.leaves_no_component_on = random.randrange(ranks)
        written.append((tokens + script.output[:-1])[:longest])
    return script
