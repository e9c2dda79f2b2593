"""Look-ahead reads: host pages that storage brings while their request waits for device pages.

The records do not know their request: the operations that read do (`tidekv.states.loads.look_ahead`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states.records.reads import Read
from tidekv.states.types import PageIds, page_ids

if TYPE_CHECKING:
    from tidekv.states.prefix.index import Receipt


class LookAheadRead(Read):
    """A read that a request does not wait for yet."""

    __slots__ = ("has_ended",)

    def __init__(self, host_pages: PageIds) -> None:
        super().__init__(host_pages)
        self.has_ended = False

    def end(self) -> None:
        """Note that the read has ended."""
        self.has_ended = True


class AheadRun(LookAheadRead):
    """A read of full pages. It owns the host pages until they join the tree or a load adopts them."""

    __slots__ = ("first",)

    def __init__(self, *, first: int) -> None:
        super().__init__(page_ids())
        self.first = first


class ComponentAhead(LookAheadRead):
    """A read of a component's pages. It owns the host pages until a fetch of the plan adopts them."""

    __slots__ = ("component", "is_adopted", "positions")

    def __init__(self, component: str, positions: PageIds, host_pages: PageIds) -> None:
        super().__init__(host_pages)
        self.component = component
        self.positions = positions
        self.is_adopted = False
        """Whether a fetch of the request's plan has taken it over."""

    def note_adoption(self, *, is_adopted: bool) -> None:
        """Note whether a fetch of the plan has the host pages."""
        self.is_adopted = is_adopted


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
