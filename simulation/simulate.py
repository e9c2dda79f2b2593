"""One seeded run of the core against a simulated environment, and its report."""

from __future__ import annotations

from collections.abc import Callable, Collection
from random import Random

import msgspec

from simulation.components import draw_bounds, draw_components, draw_snapshots
from simulation.early_callers import draws_early
from simulation.faults import Chosen
from simulation.policies import draw_policy
from simulation.world import World
from tidekv.states.errors import TidekvError
from tidekv.states.settings import CoreSettings
from tidekv.states.storage_policy import POLICY_FIELDS

CLIENTS_MAX = 16
SHORT_RESTS_SHARE = 0.25
LENT_SHARE = 0.2
"""Share of the runs without components in which the device pages are lent."""


class Report(msgspec.Struct, frozen=True):
    """Result of one run. The same seed gives the same report."""

    seed: int
    ranks: int
    requests: int
    events: int
    turns: int
    """Votes of several ranks."""
    epochs: int
    """Groups that the ranks have formed, one after another."""
    virtual_s: float
    ends: dict[str, int]
    """Requests by the end of their restore: "READY", or the cause of the failure."""
    faults: dict[str, int]
    """Number of times each kind of fault struck."""
    counters: dict[str, int]
    """Counters of the core; this and the following are those of the first rank."""
    component_pages: dict[str, int]
    """Counts of operations on components."""
    early: dict[str, int]
    """Counts of callers that began with the first layers of their prompts."""
    digest: int
    """CRC of every event and command, in order."""


class SimulationFailed(TidekvError):
    """A run reached a state that must never occur. The text contains the seed that repeats it."""

    def __init__(self, world: World, requests: int, faults: Chosen, what: BaseException) -> None:
        last = world.stepping
        recent = [f"  {event}\n" + "".join(f"      {each}\n" for each in given) for event, given in last.recent]
        on_ranks = f" on {len(world.ranks)} ranks" if len(world.ranks) > 1 else ""
        super().__init__(
            f"seed {world.seed}, {requests} requests{on_ranks}, faults {faults!r}: {type(what).__name__}: {what}\n"
            f"the last events of rank {last.number} and what followed from each:\n" + "\n".join(recent)
        )
        self.seed = world.seed
        self.what = f"{type(what).__name__}: {what}"
        self.recent = recent


def simulate(
    seed: int,
    requests: int,
    faults: Chosen = "all",
    settings: CoreSettings | None = None,
    clients: int | None = None,
    *,
    ranks: int = 1,
    without: Collection[str] = (),
    always_components: bool = False,
    early: bool | None = None,
    lends: bool = False,
    hints: bool = True,
    neighbours: bool = False,
    watch: Callable[[World], None] | None = None,
) -> Report:
    """Serve requests in virtual time, with faults drawn from the seed, and check every step.

    With several `ranks`, their cores vote on every event, and each has tiers and faults of its own. `faults` is "all",
    "none", names of `FAULTS`, or these with their rates; those in `without` are drawn like others, but never strike.
    Without `settings` those are drawn from the seed, too; with `always_components` every seed has components. With
    `early` callers begin with the first layers of their prompts; None draws that from the seed with the settings. With
    `lends` host engines lend the device pages in every seed; otherwise the seed draws that with the settings. With
    `hints` an orchestrator gives KV hints about the prompts all the time. With `neighbours` other decode workers share
    host memory with this one. `watch` receives the world before the run starts. Raises SimulationFailed with what is
    needed to repeat the run.
    """
    random = Random(f"settings {seed}")
    drawn = settings_of(random, seed, settings, always_components=always_components, lends=lends)
    if early is None:
        early = settings is None and draws_early(seed)
    early = early and not drawn.lends_device
    if neighbours:
        drawn = with_neighbours(drawn, seed)
    world = World(
        seed=seed,
        requests=requests,
        faults=faults,
        settings=drawn,
        ranks=ranks,
        without=without,
        early=early,
        hints=hints,
        neighbours=neighbours,
    )
    if watch is not None:
        watch(world)
    try:
        world.run(clients or random.randint(2, CLIENTS_MAX))
    except Exception as error:
        raise SimulationFailed(world, requests, faults, error) from error
    first = world.ranks[0]
    return Report(
        seed=seed,
        ranks=ranks,
        requests=requests,
        events=world.turns.events,
        turns=world.turns.count,
        epochs=world.turns.epoch + 1,
        virtual_s=world.now_s,
        ends=world.ends,
        faults={**world.faults.counts, **({} if world.neighbours is None else world.neighbours.faults.counts)},
        counters=dict(sorted(first.core.state.counters.items())),
        component_pages=dict(sorted(first.component_counts.items())),
        early=dict(sorted(first.early_counts.items())),
        digest=world.turns.digest,
    )


def settings_of(
    random: Random,
    seed: int,
    settings: CoreSettings | None = None,
    *,
    always_components: bool = False,
    lends: bool = False,
) -> CoreSettings:
    """Return the settings of a seed, or those that are given; `random` is the source of its sizes."""
    if settings is not None:
        return lending(settings) if lends else settings
    drawn = with_components(draw_settings(random), seed, always=always_components)
    # A seed of tests that is known by its number stays what it was; campaigns lend more often, and with components.
    if lends or (not drawn.components and lends_in(seed)):
        drawn = lending(drawn)
    return with_short_rests(drawn, seed)


def lends_in(seed: int, share: float = LENT_SHARE) -> bool:
    """Whether a seed draws lent device pages, if this share of the seeds does."""
    return Random(f"lent {seed}").random() < share


def has_short_rests(seed: int) -> bool:
    """Whether a seed draws a threshold for short rests, if its settings may have one."""
    return Random(f"short rests {seed}").random() < SHORT_RESTS_SHARE


def draw_settings(random: Random) -> CoreSettings:
    """Draw small pools and short deadlines, so that operations collide."""
    page_size = random.choice((1, 2, 4))
    policy = draw_policy(random, page_size)
    return CoreSettings(
        page_size=page_size,
        key_bytes=page_size,
        device_pages=random.choice((12, 24, 48, 120)),
        host_pages=random.choice((0, 8, 40, 200)),
        growth_reserve_pages=random.choice((0, 1, 2)),
        admission_scan_max=random.choice((1, 4, 16)),
        passes_max=random.choice((0, 3, 64)),
        ageing_s=random.choice((0.05, 5.0)),
        fetch_run_pages=random.choice((1, 2, 4, 32)),
        copy_run_pages=random.choice((1, 3, 256)),
        query_deadline_s=0.05,
        copy_deadline_s=0.2,
        attempts_per_prefill=random.choice((1, 1, 2)),
        keep_output=random.random() < 0.9,
        share_transfers=random.random() < 0.8,
        share_wait_s=random.choice((0.002, 0.02, 0.2)),
        **{name: getattr(policy, name) for name in POLICY_FIELDS},
        # Drawn last, so that everything before is what it was for the same seed.
        prefill_share=random.choice((1.0, 0.75, 0.4, 0.1)),
        namespace_share=random.choice((1.0, 1.0, 0.5, 0.2)),
        running_max=random.choice((0, 0, 0, 1, 3, 8)),
        retries_late=random.random() < 0.5,
    )


def with_components(settings: CoreSettings, seed: int, *, always: bool = False) -> CoreSettings:
    """Return the settings with the components that the seed draws; unless `always`, none in every other run."""
    drawn = draw_components(Random(f"components {seed}"), settings.page_size, always=always)
    # A source of its own, so that everything else is what it was for the same seed.
    source = Random(f"snapshots {seed}")
    drawn = tuple(draw_bounds(source, component) for component in drawn)
    return msgspec.structs.replace(settings, components=drawn, snapshots=draw_snapshots(source))


def with_short_rests(settings: CoreSettings, seed: int) -> CoreSettings:
    """Return the settings with a threshold for short rests if the seed draws one, in one of four runs that may."""
    random = Random(f"short rests {seed}")
    if settings.components or settings.lends_device or random.random() >= SHORT_RESTS_SHARE:
        return settings
    return msgspec.structs.replace(settings, recompute_threshold=random.randint(1, 6 * settings.page_size))


def with_neighbours(settings: CoreSettings, seed: int) -> CoreSettings:
    """Return the settings with host memory, and with bounds of what is shared with other decode workers, as the seed
    draws them.
    """
    random = Random(f"bounds of neighbours {seed}")
    return msgspec.structs.replace(
        settings,
        host_pages=settings.host_pages or random.choice((4, 40, 200)),
        peer_wait_s=random.choice((0.02, 0.1, 1.0)),
        peer_wait_share=random.choice((0.1, 0.25, 1.0)),
        peer_pause_s=random.choice((0.01, 0.5, 5.0)),
        peer_host_share=random.choice((0.1, 0.25, 1.0)),
        peer_reads_max=random.choice((1, 3, 16)),
    )


def lending(settings: CoreSettings) -> CoreSettings:
    """Return settings for a host engine that lends its device pages: enough of each component for eight requests, since
    it tries again and again for those that it lacks.
    """
    components = tuple(
        msgspec.structs.replace(each, device_pages=max(each.device_pages, 8 * each.live_pages(settings.page_size)))
        for each in settings.components
    )
    return msgspec.structs.replace(
        settings,
        lends_device=True,
        components=components,
        share_transfers=False,
        growth_reserve_pages=0,
        prefill_share=1.0,
        running_max=0,
    )
