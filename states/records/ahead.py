"""Look-ahead reads: host pages that storage brings while their request waits for device pages.

The records do not know their request: the operations that read do (`tidekv.states.loads.look_ahead`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states.types import PageIds, page_ids

if TYPE_CHECKING:
    from tidekv.states.prefix.index import Receipt


class AheadRun:
    """One read of full pages. It owns `host_pages` until they join the tree or it is adopted by a load."""

    __slots__ = ("begun_at_s", "first", "host_pages", "is_landed", "op", "queued_pages")

    def __init__(self, *, first: int) -> None:
        self.first = first
        self.host_pages: PageIds = page_ids()
        self.op = 0
        self.is_landed = False
        self.begun_at_s = 0.0
        self.queued_pages = 0

    def own_host(self, pages: PageIds) -> None:
        """Own these host pages, and no others."""
        self.host_pages = pages

    def run_as(self, op: int) -> None:
        """Note the operation of the read."""
        self.op = op

    def was_queued(self, at_s: float, queued_pages: int) -> None:
        """Note when the read began, and the pages of all reads under way then, its own included."""
        self.begun_at_s, self.queued_pages = at_s, queued_pages

    def has_landed(self) -> None:
        """Note that the read has ended."""
        self.is_landed = True


class ComponentAhead:
    """One read of a component's pages. It owns `host_pages` until a fetch of the plan adopts it."""

    __slots__ = (
        "begun_at_s",
        "component",
        "host_pages",
        "is_adopted",
        "is_landed",
        "op",
        "positions",
        "queued_pages",
    )

    def __init__(self, component: str, positions: PageIds, host_pages: PageIds) -> None:
        self.component = component
        self.positions = positions
        self.host_pages = host_pages
        self.op = 0
        self.is_landed = False
        self.is_adopted = False
        """Whether a fetch of the request's plan has taken it over."""
        self.begun_at_s = 0.0
        self.queued_pages = 0

    def run_as(self, op: int) -> None:
        """Note the operation of the read."""
        self.op = op

    def was_queued(self, at_s: float, queued_pages: int) -> None:
        """Note when the read began, and the pages of all reads under way then, its own included."""
        self.begun_at_s, self.queued_pages = at_s, queued_pages

    def has_landed(self) -> None:
        """Note that the read has ended."""
        self.is_landed = True

    def note_adoption(self, *, is_adopted: bool) -> None:
        """Note whether a fetch of the plan has the host pages."""
        self.is_adopted = is_adopted

    def disown_host(self) -> None:
        """Note that the host pages were given back."""
        self.host_pages = page_ids()


class Ahead:
    """The look-ahead reads of one waiting request. `tidekv.states.loads.look_ahead` explains the fields."""

    __slots__ = ("attachment", "components", "first", "joined", "pin", "runs", "taken")

    def __init__(self, *, attachment: int) -> None:
        self.first = 0
        self.joined = 0
        self.attachment = attachment
        self.pin: Receipt | None = None
        """None as long as no full page is read ahead."""
        self.runs: list[AheadRun] = []
        self.components: dict[str, ComponentAhead] = {}
        self.taken = 0
        """Pages that it uses of `lookahead_pages_max`."""

    def use(self, pages: int) -> None:
        """Count pages that it uses of `lookahead_pages_max`."""
        self.taken += pages

    def begin(self, first: int, pin: Receipt) -> None:
        """Begin to read full pages starting at this position, behind pinned host pages."""
        self.first = self.joined = first
        self.pin = pin

    def read_nothing(self) -> None:
        """Note that no full page is read ahead, and that its pin was given back."""
        self.pin = None

    def add_run(self, run: AheadRun) -> None:
        """Note a read of the pages behind those of the last run."""
        self.runs.append(run)

    def join(self, pin: Receipt, depth_pages: int) -> None:
        """Note that the first run has joined the tree, which is pinned up to there now."""
        self.pin = pin
        self.joined = depth_pages

    def forget_runs(self, count: int) -> None:
        """Remove the first runs: they have joined the tree, or are loads of the plan now."""
        del self.runs[:count]

    def forget_last_run(self) -> None:
        """Remove the last run, which was given up."""
        self.runs.pop()

    def add_component(self, read: ComponentAhead) -> None:
        """Note the read of a component's pages."""
        self.components[read.component] = read

    def forget_component(self, read: ComponentAhead) -> None:
        """Remove the read of a component's pages, if it is there: it was given up, or a fetch of the plan has it."""
        self.components.pop(read.component, None)
