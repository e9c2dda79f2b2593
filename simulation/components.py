"""Components in the simulated environment: a pool per component and tier, and the operations of callers on them.

As for a full page, the tag of a component's page at a position stands for the whole prefix up to there, and for the
component. That of a page that is written in part stands for the whole prompt.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING

import msgspec

from simulation.memory import GARBAGE, SimulatedPool, Violation
from tidekv.states.component_specs import Component, ComponentPages, ComponentTable, SnapshotPolicy
from tidekv.states.components.shared_ends import SharedEndCopy
from tidekv.states.events import ComponentLeft
from tidekv.states.pages.page_pool import PageState
from tidekv.states.records.causes import LOST_CAUSES
from tidekv.states.records.stages import State
from tidekv.states.types import page_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from simulation.memory import Contents
    from tidekv.states import commands
    from tidekv.states.core import Core
    from tidekv.states.prefix.node import TierName
    from tidekv.states.settings import CoreSettings

Tags = dict[str, list[int]]
"""Tags of a prompt's pages by position, for each component."""


class LiveComponents:
    """Component pages of one ready request, by position. A window has left earlier positions behind."""

    def __init__(self, tables: tuple[ComponentTable, ...], tokens: int) -> None:
        self.tables = tables
        self.known = {table.component: dict(enumerate(table.pages, table.first)) for table in tables}
        self.tokens = tokens
        """Number of tokens written."""
        self.records: dict[str, dict[int, int]] = {}
        """By state, spare records by the boundary that they are a snapshot of."""

    def table_of(self, name: str) -> ComponentTable:
        """Return the table that the request was given for one component."""
        return next(table for table in self.tables if table.component == name)


class SimulatedComponents:
    """All components of one core. Without components every method is a no-op."""

    def __init__(self, core: Core, contents: Contents, counts: Counter[str]) -> None:
        """`counts` gets counts of operations, for tests that check what a run exercised."""
        self._settings: CoreSettings = core.settings
        self._contents = contents
        self.components = {component.name: component for component in core.settings.components}
        self.pools: dict[tuple[TierName, str], SimulatedPool] = {}
        self._lost: set[str] = set()
        """Components of which host and storage deliver nothing any more."""
        self.counts = counts
        if core.state.components is not None:
            self.pools |= {("device", name): SimulatedPool(t.pool) for name, t in core.state.components.device.items()}
            self.pools |= {("host", name): SimulatedPool(t.pool) for name, t in core.state.components.host.items()}

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is being written or read."""
        return all(pool.is_quiet for pool in self.pools.values())

    def note_fetch(self, core: Core, command: commands.FetchPages) -> None:
        """Count a read for a request that waits for device memory."""
        request = core.request(command.request_id)
        self.counts["components_read_ahead"] += request is not None and request.waits_for_admission

    def note_copy(self, core: Core, command: commands.CopyPages) -> None:
        """Count a copy, and those to a request with the same prompt as another one."""
        self.counts[f"copies_{command.source}_to_{command.target}"] += 1
        self.counts["ends_shared"] += isinstance(core.state.operations.get(command.op), SharedEndCopy)

    def tags_of(self, namespace: str, tokens: bytes) -> Tags:
        """Return the tags of a prompt's pages, a partial last one included."""
        page_size = self._settings.page_size
        full = len(tokens) // page_size * page_size
        tags: Tags = {}
        for name in self.components:
            tags[name] = self._contents.tags(f"{name} of {namespace}", tokens[:full], page_size)
            if full < len(tokens):
                tags[name].append(self._contents.tag(f"{name} of {namespace} at {len(tokens)}", tokens))
        return tags

    # --- Tiers that are lost for one component ---

    def is_lost(self, component: str, hits: Callable[[str], bool], *, is_over: bool) -> bool:
        """Whether host and storage deliver nothing of a component any more. `is_over`: faults have ended."""
        if hits("component_tier_is_lost"):
            self._lost.add(component)
        self.counts["component_sources_lost"] += (is_lost := component in self._lost and not is_over)
        return is_lost

    # --- Checks of commands ---

    def check_extend(self, command: commands.SendExtend) -> None:
        """Raise a Violation unless an extend asks for pages that its request owns."""
        self.counts["components_extended"] += 1
        self._require(command.component, command.pages, (PageState.OWNED, PageState.DRAINING), "an extend")

    def check_moves(self, core: Core) -> None:
        """Raise a Violation if a request starts over because a source of component pages has failed."""
        for request_id, state in core.moves:
            request = core.request(request_id)
            if state is State.PREALLOC and request is not None and request.fallbacks.last_error in LOST_CAUSES.values():
                raise Violation(f"{request} starts over, since {request.fallbacks.last_error}")

    def check_promise(self, component_pages: tuple[ComponentPages, ...] | None, prompt_tokens: int) -> None:
        """Raise a Violation unless a promise requests the end of what the prompt needs of a component, or nothing."""
        if not self.components:
            if component_pages is not None:
                raise Violation(f"{component_pages} are promised, but the model has no components")
            return
        if component_pages is None or [tail.component for tail in component_pages] != list(self.components):
            raise Violation(f"a promise names the components {component_pages}, not each of {list(self.components)}")
        pages, page_size = self._settings.pages_of(prompt_tokens), self._settings.page_size
        for tail in component_pages:
            needed, end = (
                self.components[tail.component].needed_from(prompt_tokens, page_size),
                tail.first + len(tail.pages),
            )
            if tail.first < needed or end != pages:
                raise Violation(f"{tail} of {prompt_tokens} tokens is not the end of what is needed")
            self.counts["tails_sent" if tail.pages else "tails_cached"] += 1
            # DRAINING as well: the promised pages may be given up in the same step.
            self._require(tail.component, tail.pages, (PageState.OWNED, PageState.DRAINING), "a promise")

    def check_ready(
        self,
        component_pages: tuple[ComponentTable, ...],
        prompt_tokens: int,
        tags: Tags,
        who: str,
        *,
        is_early: bool = False,
    ) -> None:
        """Raise a Violation unless every tail is complete, has the right content, and is either owned or shared.

        Owned pages are written by the request; shared ones are cached and only read. Before READY (`is_early`) they may
        be pages that are about to be cached.
        """
        if [table.component for table in component_pages] != list(self.components):
            raise Violation(f"{who} is given the tails {component_pages} of the components {list(self.components)}")
        for table in component_pages:
            component = self.components[table.component]
            pool, page_size = self.pools["device", table.component], self._settings.page_size
            first, end = component.needed_from(prompt_tokens, page_size), self._settings.pages_of(prompt_tokens)
            if (table.first, table.first + len(table.pages)) != (first, end):
                raise Violation(f"{who} is given {table}, and needs positions [{first}, {end})")
            pool.expect(table.pages, tags[table.component][table.first :], f"{who}, its {table.component}")
            self._require(table.component, table.own, (PageState.OWNED,), who)
            shared = [page for page in table.pages if page not in table.own]
            allowed = (PageState.CACHED, PageState.OWNED) if is_early else (PageState.CACHED,)
            self._require(table.component, shared, allowed, who)
            if (shared and not component.is_shared) or len(set(table.own)) < component.live_pages(page_size):
                raise Violation(f"{who} cannot generate with {table}")
            self.counts["components_shared"] += bool(shared)

    # --- Callers that begin early ---

    def begin_use(self, component_pages: tuple[ComponentTable, ...], who: str) -> None:
        """Let a caller use its own pages. It updates records in place, and writes to pages that are in no table."""
        for table in component_pages:
            pool = self.pools["device", table.component]
            pool.begin_use(table.own, who)
            is_shared = self.components[table.component].is_shared
            for page in table.own:
                if not is_shared or page not in table.pages:
                    pool.use_put(page, GARBAGE, who)

    def end_use(self, component_pages: tuple[ComponentTable, ...], who: str, tags: Tags | None = None) -> None:
        """End the use. With `tags` the caller has them at the end of the prompt: it takes back what it has written."""
        for table in component_pages:
            pool = self.pools["device", table.component]
            if tags is not None and not self.components[table.component].is_shared:
                pool.use_put(table.pages[-1], tags[table.component][-1], who)
            pool.end_use(table.own, who)

    # --- Callers that compute ---

    def begin_compute(
        self,
        tables: tuple[ComponentTable, ...],
        resume_from: tuple[ComponentPages, ...],
        boundary: int,
        tags: Tags,
        who: str,
    ) -> None:
        """Begin the computation of a prompt from page `boundary` on: it reads the component pages of that boundary, and
        writes to all pages that the request owns.
        """
        for start in resume_from:
            needed = self.components[start.component].trailing_pages(self._settings.page_size)
            if (start.first, start.first + len(start.pages)) != (max(0, boundary - needed), boundary):
                raise Violation(f"{who} cannot continue at page {boundary} from {start}")
            pool = self.pools["device", start.component]
            pool.expect(start.pages, tags[start.component][start.first : boundary], who)
            pool.begin_read(start.pages, who)
            self.counts["computations_resumed"] += bool(start.pages)
        for table in tables:
            self.pools["device", table.component].begin_write(table.own, who)

    def end_compute(
        self,
        tables: tuple[ComponentTable, ...],
        resume_from: tuple[ComponentPages, ...],
        boundary: int,
        tags: Tags,
        who: str,
        *,
        snapshots: dict[str, dict[int, int]],
        is_garbage: bool,
    ) -> None:
        """End a computation, which has taken `snapshots`. What it read has not changed meanwhile."""
        for start in resume_from:
            found = tags[start.component][start.first : boundary]
            self.pools["device", start.component].end_read(start.pages, who, found)
        for table in tables:
            pool, own = self.pools["device", table.component], set(table.own)
            parts = zip(table.pages, tags[table.component][table.first :], strict=True)
            written = {page: tag for page, tag in parts if page in own and not is_garbage}
            for at, page in snapshots.get(table.component, {}).items():
                if page not in own or page in written:
                    raise Violation(f"{who} is to take a snapshot of {table.component} in page {page}: {table}")
                if not is_garbage:
                    written[page] = tags[table.component][at - 1]
                    self.counts["snapshots_computed"] += 1
            pool.end_write(page_ids(written), who, list(written.values()))
            pool.end_write(page_ids(own - set(written)), who, None)

    def generate(self, live: LiveComponents, tags: Tags, prompt_tokens: int, written: int, who: str) -> None:
        """Advance generation to `written` tokens: windows move, and state is written in place."""
        page_size = self._settings.page_size
        live.tokens = written
        if written == prompt_tokens:
            return
        for table in live.tables:
            name, component = table.component, self.components[table.component]
            pool, known = self.pools["device", name], live.known[name]
            if not component.is_shared:
                pool.put(table.own[0], tags[name][-1], who)
                self._take_snapshots(live, table, tags[name], range(prompt_tokens, written + 1), who)
                continue
            unused = [page for page in table.own if page not in table.pages]
            for position in range(prompt_tokens // page_size, self._settings.pages_of(written)):
                if position not in known:
                    # A window reuses pages at positions that it has left behind.
                    behind = [at for at in known if at < position - component.trailing_pages(page_size)]
                    behind = [at for at in behind if known[at] in table.own]
                    if not unused and not behind:
                        raise Violation(f"{who} has no page of {name} left for position {position}: {table}")
                    known[position] = unused.pop() if unused else known.pop(behind[0])
                pool.put(known[position], tags[name][position], who)
            needed = range(component.needed_from(written, page_size), self._settings.pages_of(written))
            pool.expect(page_ids(known[at] for at in needed), [tags[name][at] for at in needed], who)

    def _take_snapshots(
        self, live: LiveComponents, table: ComponentTable, tags: list[int], tokens: range, who: str
    ) -> None:
        """Copy the record to the spare ones at boundaries on the way, the oldest of which are overwritten."""
        spare, page_size = table.own[1:], self._settings.page_size
        taken = live.records.setdefault(table.component, {})
        boundaries = [at // page_size for at in tokens if at and at % page_size == 0]
        for number, boundary in enumerate(boundaries if spare else ()):
            page = spare[number % len(spare)]
            for other in [at for at, old in taken.items() if old == page]:
                del taken[other]
            taken[boundary] = page
            self.pools["device", table.component].put(page, tags[boundary - 1], who)
            self.counts["snapshots_taken"] += 1

    def left(self, live: LiveComponents, kept: int, random: Random) -> tuple[ComponentLeft, ...]:
        """Return the tails that a caller that keeps `kept` tokens can leave: those at the end of the last full page."""
        page_size = self._settings.page_size
        end = kept // page_size
        left = []
        for name, known in live.known.items():
            component = self.components[name]
            records = {at: page for at, page in live.records.get(name, {}).items() if at <= end}
            left += [ComponentLeft(name, at - 1, (page,)) for at, page in records.items()]
            if end in records:
                continue
            if not end or (not component.is_shared and (kept != live.tokens or kept % page_size)):
                # The state has advanced beyond the end of the page, so it does not belong to that boundary.
                continue
            if not component.is_shared:
                left.append(ComponentLeft(name, end - 1, (live.table_of(name).own[0],)))
                continue
            first = end
            lowest = max(0, end - component.trailing_pages(page_size) - random.choice((0, 0, 1)))
            while first > lowest and first - 1 in known:
                first -= 1
            left.append(ComponentLeft(name, first, tuple(known[at] for at in range(first, end))))
        self.counts["component_pages_left"] += len(left)
        return tuple(left)

    # --- Invariants ---

    def check_cached(self, core: Core) -> None:
        """Raise a Violation unless every cached page of a component has the content that its keys determine."""
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
                        who = f"cached {name} at {position} of {node}"
                        pool.expect(page_ids([page]), [tags[position]], who, may_be_flipped=tier.name == "host")
        for pool in self.pools.values():
            pool.check()

    def check_sums(self) -> None:
        """Raise a Violation if a pool does not add up."""
        for pool in (simulated.pool for simulated in self.pools.values()):
            if pool.free + pool.owned + pool.cached + pool.draining != pool.total:
                raise Violation(f"pool {pool.name} does not add up")

    def _require(self, name: str, pages: Iterable[int], allowed: tuple[PageState, ...], who: str) -> None:
        pool = self.pools["device", name].pool
        for page in pages:
            if pool.condition(page) not in allowed:
                raise Violation(f"{who} names page {page} of {pool.name}, which is {pool.condition(page).name}")


def draw_components(random: Random, page_size: int, *, always: bool = False) -> tuple[Component, ...]:
    """Draw windows, states and small pools in all combinations; unless `always`, none in every other run."""
    # Drawn in either case: a seed that has components anyway has the same ones with `always`.
    if random.random() < 0.5 and not always:
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


def draw_snapshots(random: Random) -> SnapshotPolicy:
    """Draw where snapshots are kept, and the spare records of a request."""
    return SnapshotPolicy(
        every_pages=random.choice((0, 0, 1, 2, 5)),
        prompt_end=random.random() < 0.8,
        output_end=random.random() < 0.8,
        branch_points=random.random() < 0.8,
        per_request=random.choice((0, 0, 1, 2, 4)),
    )


def draw_bounds(random: Random, component: Component) -> Component:
    """Draw how many snapshots of a state are kept; most of the time as many as its pools hold."""
    if component.is_shared or random.random() < 0.6:
        return component
    bounds = (None, 0, 1, 3, 10)
    return msgspec.structs.replace(
        component, device_snapshots_max=random.choice(bounds), host_snapshots_max=random.choice(bounds)
    )
