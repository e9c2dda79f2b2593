"""Storage policies drawn at random, for the start of a run and for changes during it."""

from __future__ import annotations

from random import Random

from tidekv.states.storage_policy import StoragePolicy


def draw_policy(random: Random, page_size: int) -> StoragePolicy:
    """Draw policies with durations that suit the simulated tiers, which take milliseconds.

    Every other draw uses storage without limits, so that many operations run at once.
    """
    threshold = random.choice((0, 0, 2 * page_size))
    if random.random() < 0.5:
        return StoragePolicy(
            prefetch=random.choice(("soonest", "timeout")),
            prefetch_threshold_tokens=threshold,
            prefetch_base_s=0.1,
            lookahead_pages_max=random.choice((0, 1000)),
            store_wait_s=0.0,
            store_host_share=1.0,
            breaker_failures=0,
        )
    return StoragePolicy(
        prefetch=random.choice(("soonest", "timeout", "best_effort", "wait_complete")),
        prefetch_threshold_tokens=threshold,
        prefetch_base_s=0.1,
        fetch_pages_in_flight_max=random.choice((0, 0, 3, 12)),
        fetch_pages_per_s=random.choice((0.0, 0.0, 2.0, 500.0)),
        fetch_deadline_share=random.choice((0.0, 1.0, 1.0, 0.05)),
        lookahead_pages_max=random.choice((0, 4, 16, 1000)),
        write=random.choice(("through", "selective", "back", "back")),
        write_back_ahead=random.choice((0.1, 0.3, 1.0)),
        write_hits_min=random.choice((1, 2)),
        write_tokens_min=random.choice((0, 0, 3 * page_size)),
        renew_s=0.2,
        store_wait_s=random.choice((0.0, 0.02, 1.0)),
        store_fetch_s_max=random.choice((0.0, 0.0, 0.004)),
        breaker_failures=random.choice((0, 0, 1, 6)),
        breaker_backoff_s=0.05,
        breaker_backoff_max_s=0.4,
    )
