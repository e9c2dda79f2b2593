"""Components in the simulated world: a pool for each window and state in each tier, and what a caller does with them.

The tag of a component's page at a position stands for the whole prefix down to there, like that of a full page, and for
its component. What ends within a page is like nothing else: nobody may ever match it.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING

from tidekv.engine.simulation.memory import SimulatedPool, Violation
from tidekv.states.accounts import Condition
from tidekv.states.components import Component, TailPages, TailTable
from tidekv.states.events import TailLeft
from tidekv.states.shapes import page_ids

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tidekv.engine.simulation.memory import Contents
    from tidekv.states.core import Core
    from tidekv.states.node import TierName
    from tidekv.states.settings import CoreSettings

Tags = dict[str, list[int]]
"""By component, the tag of its page at each position of a prompt."""


class LiveTails:
    """What one ready request has of each component: its pages by position. A window has left others behind."""

    def __init__(self, tables: tuple[TailTable, ...], tokens: int) -> None:
        self.tables = tables
        self.known = {table.component: dict(enumerate(table.pages, table.first)) for table in tables}
        self.tokens = tokens
        """So many tokens are written."""

    def table_of(self, name: str) -> TailTable:
        """What the request was given of one component."""
        return next(table for table in self.tables if table.component == name)


class SimulatedTails:
    """All components of one core. Without any, there is nothing to do for it."""

    def __init__(self, core: Core, contents: Contents) -> None:
        self._settings: CoreSettings = core.settings
        self._contents = contents
        self.components = {component.name: component for component in core.settings.components}
        self.pools: dict[tuple[TierName, str], SimulatedPool] = {}
        self.counts: Counter[str] = Counter()
        """What has happened, so that a run can be seen to have had it."""
        if core.state.components is not None:
            self.pools |= {
                ("device", name): SimulatedPool(t.account) for name, t in core.state.components.device.items()
            }
            self.pools |= {("host", name): SimulatedPool(t.account) for name, t in core.state.components.host.items()}

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is being written or read."""
        return all(pool.is_quiet for pool in self.pools.values())

    def tags_of(self, namespace: str, tokens: bytes, whose: object) -> Tags:
        """The tags of a prompt's pages, of a last one that is written in part too: that one is of `whose` alone."""
        page_size = self._settings.page_size
        full = len(tokens) // page_size * page_size
        tags: Tags = {}
        for name in self.components:
            tags[name] = self._contents.tags(f"{name} of {namespace}", tokens[:full], page_size)
            if full < len(tokens):
                tags[name].append(self._contents.tag(f"{name} of {whose} at {len(tokens)}", tokens[full:]))
        return tags

    # --- What the core wishes ---

    def check_promise(self, tails: tuple[TailPages, ...] | None, prompt_tokens: int, promised_tokens: int) -> None:
        """Raise a Violation unless a promise asks for what decode cannot have of each tail, and for nothing else."""
        if not self.components:
            if tails is not None:
                raise Violation(f"{tails} are promised where there are no components")
            return
        if tails is None or [tail.component for tail in tails] != list(self.components):
            raise Violation(f"a promise names the components {tails}, not each of {list(self.components)}")
        pages, page_size = self._settings.pages_of(prompt_tokens), self._settings.page_size
        for tail in tails:
            needed = max(
                self.components[tail.component].needed_from(prompt_tokens, page_size), promised_tokens // page_size
            )
            if len(tail.pages) != max(0, pages - needed) or (tail.pages and tail.first != needed):
                raise Violation(f"{tail} of {prompt_tokens} tokens, {promised_tokens} promised, is not what is needed")
            # What was promised may be given up in the same step.
            self._require(tail.component, tail.pages, (Condition.OWNED, Condition.DRAINING), "a promise")
        self.counts["boundaries_served" if promised_tokens else "boundaries_of_nothing"] += 1

    def check_ready(self, tails: tuple[TailTable, ...], prompt_tokens: int, tags: Tags, who: str) -> None:
        """Raise a Violation unless every tail is whole, holds the right bytes, and is the request's to write or to
        share.
        """
        if [table.component for table in tails] != list(self.components):
            raise Violation(f"{who} is given the tails {tails} of the components {list(self.components)}")
        for table in tails:
            component = self.components[table.component]
            pool, page_size = self.pools["device", table.component], self._settings.page_size
            first, end = component.needed_from(prompt_tokens, page_size), self._settings.pages_of(prompt_tokens)
            if (table.first, table.first + len(table.pages)) != (first, end):
                raise Violation(f"{who} is given {table}, and needs positions [{first}, {end})")
            pool.expect(table.pages, tags[table.component][table.first :], f"{who}, its {table.component}")
            self._require(table.component, table.own, (Condition.OWNED,), who)
            shared = [page for page in table.pages if page not in table.own]
            self._require(table.component, shared, (Condition.CACHED,), who)
            if (shared and not component.is_shared) or len(set(table.own)) < component.live_pages(page_size):
                raise Violation(f"{who} cannot go on with {table}")
            self.counts["tails_shared"] += bool(shared)

    # --- Callers that compute ---

    def begin_compute(self, tables: tuple[TailTable, ...], who: object) -> None:
        """A caller begins to compute a whole prompt: it writes to all that is its own."""
        for table in tables:
            self.pools["device", table.component].begin_write(table.own, who)

    def end_compute(self, tables: tuple[TailTable, ...], who: object, tags: Tags | None) -> tuple[TailTable, ...]:
        """It has: returns where its tails are. Without `tags` it left garbage."""
        ended = []
        for table in tables:
            pool, name = self.pools["device", table.component], table.component
            kept = tags[name][table.first :] if tags is not None else []
            pages = table.own[: len(kept)]
            pool.end_write(pages, who, kept)
            pool.end_write(table.own[len(kept) :], who, None)
            ended.append(TailTable(name, table.first, pages, table.own))
        return tuple(ended)

    def generate(self, live: LiveTails, tags: Tags, prompt_tokens: int, written: int, who: str) -> None:
        """Decode has gone on to `written` tokens: windows have moved, records were written in place."""
        page_size = self._settings.page_size
        live.tokens = written
        if written == prompt_tokens:
            return
        for table in live.tables:
            name, component = table.component, self.components[table.component]
            pool, known = self.pools["device", name], live.known[name]
            if not component.is_shared:
                pool.put(table.own[0], tags[name][-1], who)
                continue
            unused = [page for page in table.own if page not in table.pages]
            for position in range(prompt_tokens // page_size, self._settings.pages_of(written)):
                if position not in known:
                    # What the window has left behind is written again.
                    behind = [at for at in known if at < position - component.tail_pages(page_size)]
                    behind = [at for at in behind if known[at] in table.own]
                    if not unused and not behind:
                        raise Violation(f"{who} has no page of {name} left for position {position}: {table}")
                    known[position] = unused.pop() if unused else known.pop(behind[0])
                pool.put(known[position], tags[name][position], who)
            needed = range(component.needed_from(written, page_size), self._settings.pages_of(written))
            pool.expect(page_ids(known[at] for at in needed), [tags[name][at] for at in needed], who)

    def left(self, live: LiveTails, kept: int, random: Random) -> tuple[TailLeft, ...]:
        """What a caller that keeps `kept` tokens can leave of its tails: that of the last page that is full."""
        page_size = self._settings.page_size
        end = kept // page_size
        left = []
        for name, known in live.known.items():
            component = self.components[name]
            if not end or (not component.is_shared and (kept != live.tokens or kept % page_size)):
                # A record has gone on beyond the end of the page.
                continue
            if not component.is_shared:
                left.append(TailLeft(name, end - 1, tuple(live.table_of(name).own)))
                continue
            first = end
            lowest = max(0, end - component.tail_pages(page_size) - random.choice((0, 0, 1)))
            while first > lowest and first - 1 in known:
                first -= 1
            left.append(TailLeft(name, first, tuple(known[at] for at in range(first, end))))
        self.counts["tails_left"] += len(left)
        return tuple(left)

    # --- What must hold ---

    def check_cached(self, core: Core) -> None:
        """Raise a Violation unless every cached page of a component holds what the keys above it say."""
        index = core.state.components
        if index is None:
            return
        for node in index.index.nodes():
            keys = b"".join(above.edge for above in index.index.path(node))
            for name in self.components:
                tags = self._contents.tags(f"{name} of {node.namespace}", keys, self._settings.key_bytes)
                for tier in (index.device[name], index.host[name]):
                    for position, page in tier.pages_of(node).items():
                        pool = self.pools[tier.name, name]
                        pool.expect(page_ids([page]), [tags[position]], f"cached {name} at {position} of {node}")
        for pool in self.pools.values():
            pool.check()

    def check_sums(self) -> None:
        """Raise a Violation where a pool does not add up."""
        for pool in self.pools.values():
            account = pool.account
            if account.free + account.owned + account.cached + account.draining != account.total:
                raise Violation(f"pool {account.name} does not add up")

    def _require(self, name: str, pages: Iterable[int], allowed: tuple[Condition, ...], who: str) -> None:
        account = self.pools["device", name].account
        for page in pages:
            if account.condition(page) not in allowed:
                raise Violation(f"{who} names page {page} of {account.name}, which is {account.condition(page).name}")


def draw_components(random: Random, page_size: int) -> tuple[Component, ...]:
    """None in every other run; else windows, states and small pools in all mixtures."""
    if random.random() < 0.5:
        return ()
    chosen = random.choice(
        (("window",), ("state",), ("window", "state"), ("state", "window"), ("window", "state", "wide"))
    )
    return tuple(_draw_component(random, name, page_size) for name in chosen)


def _draw_component(random: Random, name: str, page_size: int) -> Component:
    host_pages = random.choice((0, 4, 40, 200))
    if name == "state":
        return Component(name=name, kind="state", device_pages=random.choice((1, 4, 16, 60)), host_pages=host_pages)
    least = 2 * page_size if name == "wide" else 0
    tokens = least + random.choice((1, page_size, page_size + 1, 3 * page_size, 6 * page_size + 1))
    one = Component(name=name, kind="window", window_tokens=tokens, device_pages=1)
    device_pages = one.live_pages(page_size) * random.choice((1, 2, 4, 10)) + random.choice((0, 1, 5, 20))
    return Component(name=name, kind="window", window_tokens=tokens, device_pages=device_pages, host_pages=host_pages)
