"""The section "Policies" of docs/storage.md, written from the code: `python -m tools.policy_page PAGE`.

Defaults come from `StoragePolicy`; a policy without a row here, or a row without a policy, is an error.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from tidekv.states.storage.policy import StoragePolicy
from tidekv.states.storage.throughput import ESTIMATE_FRESH_S

BEGIN = "<!-- Policies, from the code: python -m tools.policy_page docs/storage.md -->"
END = "<!-- End of the policies. -->"

HEAD = f"""\
## Policies

How a decode engine uses its storage. Each is a field of `StorageOptions`, and can be changed while requests run,
without any of them failing: `engine.change_policy(write="back", lookahead_pages_max=512)`. What is under way goes on as
it began, what comes next follows the new policies; the change is an event of the journal. Whatever a policy declines is
asked of prefill: the promise is shorter, no request waits or fails for it, and `l3_declined_pages` counts the pages.

Three ways to write. `through` is the safest: each finished request is on the host and in storage soon after.
`selective` saves writes where most prompts are seen once. `back` copies and writes least, and as late as possible: a
share of each pool (`write_back_ahead`) is kept free or clean, so that eviction, which never waits, finds pages that
have another copy; what it has to drop all the same is counted (`l1_pages_dropped`, `l2_pages_dropped`), and what was
never in need of room is lost with the process.

The pace of storage: of each fetch that brought all its pages, or is late, the core knows the seconds from its command
to its outcome and the pages that were under way when it began. In the sums of both each fetch weighs 7/8 of the one
after it; their ratio is what a page costs, `page_s`. A plan of `n` pages fetches at most as many as satisfy
`(pages under way + n) * page_s <= fetch_deadline_share * time that it may take`. After {ESTIMATE_FRESH_S:g} s without a
fetch nothing is known any more, and storage is tried again in full.

With `soonest` the pace of the transfer is measured in the same way, by spans of rooms. A plan divides what storage has
so that storage and prefill end at the same time, each behind what waits there already: the front is fetched, the rest
is part of what prefill sends. Whenever prefill has sent all that it was asked for and fetches are still under way, the
last of these are asked of it as well, as far as it brings them sooner; their reads go on, for nobody. Where nothing is
known of one of the two, a plan fetches all, and half of what is left is asked each time. Time that prefill takes to
compute counts as its pace. Restores of windows and states are not divided: their boundary decides.

Look-ahead: a request that waits for device memory has asked storage already. With a bound, what storage has is brought
to the host meanwhile, and the request finds it there (counted as `l3`); reads that are still under way when it is
admitted go on as its own. It needs what is in front of these pages to be on the host, or nothing in front of them.
"""

ROWS: dict[str, tuple[str, str, str]] = {
    "prefetch": (
        "how long a request waits for its fetches: `timeout`, for a time by their length; `best_effort`, until its "
        "transfer is done; `wait_complete`, until they end (these two at most half of what is left to its deadline); "
        "`soonest`, like `timeout`, and what the transfer would bring sooner is not fetched; see above",
        "`best_effort` where prefill is idle; `wait_complete` where prefill costs more than waiting; `soonest` where "
        "storage may be slower than the link, and prefill has what storage has",
        "what has not landed is asked of prefill by extend",
    ),
    "prefetch_threshold_tokens": (
        "tokens; a shorter hit is not fetched",
        "higher with slow storage or fast prefill; 0 in tests",
        "the transfer brings it",
    ),
    "prefetch_base_s": ("seconds; the fixed part of `timeout`", "about the p99 of one fetch", "see `prefetch`"),
    "prefetch_per_ki_token_s": (
        "seconds for each 1,024 tokens; the other part of `timeout`",
        "less than what prefill takes for them",
        "see `prefetch`",
    ),
    "fetch_pages_in_flight_max": (
        "pages under way from storage, over all requests; 0: no limit",
        "storage that others share",
        "the plan fetches what is left of the limit",
    ),
    "fetch_pages_per_s": (
        "pages a second, one second's worth saved up; 0: no limit",
        "storage that bills or throttles reads",
        "the plan fetches what has been saved up",
    ),
    "fetch_deadline_share": (
        "a part of the time that a plan may take; it fetches what lands within it at the pace of late; 0: no limit",
        "below 1 where latency varies much",
        "the plan fetches what lands in time, or nothing",
    ),
    "lookahead_pages_max": (
        "host pages that waiting requests may fill ahead, over all of them; 0: none",
        "device memory is what requests wait for, and the host pool is large: up to a quarter of it",
        "the request fetches when it is admitted",
    ),
    "write": (
        "`through`, `selective` or `back`; see above",
        "`selective` for one-off prompts, `back` for little host traffic",
        "the pages are not in storage",
    ),
    "write_hits_min": ("prompts that a page was part of; for `selective`", "2 or 3", "as `write`"),
    "write_tokens_min": (
        "tokens; shorter prefixes are not put",
        "what prefill computes faster than a fetch",
        "as `write`",
    ),
    "write_back_ahead": (
        "a share of each pool, 0 to 1; for `back`",
        "larger where prompts come in bursts: up to what is taken while one copy runs",
        "eviction drops the pages, and counts them",
    ),
    "put_wait_s": (
        "seconds; puts give way to fetches for so long; 0: not at all",
        "reads matter more than writes",
        "—",
    ),
    "put_fetch_s_max": (
        "seconds; while a fetch takes longer than this on average, puts wait as long as `put_wait_s`; 0: no bound",
        "writes slow storage down for readers",
        "—",
    ),
    "put_host_share": (
        "a share of the host pool, 0 to 1; a put begins beside others only if no more is pinned; 1: no bound",
        "higher if storage is fast and bursts of finished requests are to be stored whole",
        "the pages are not in storage; counted as `l3_puts_declined`",
    ),
    "breaker_failures": (
        "failures and lates in a row, after which storage is asked nothing; 0: never",
        "lower where failing calls are slow",
        "requests go on without storage",
    ),
    "breaker_backoff_s": ("seconds until the first probe; each further one after twice the time", "", "—"),
    "breaker_backoff_max_s": ("seconds; the longest wait between probes", "", "—"),
}
"""For each policy: its effect with its unit, when to change it, and what follows where it declines."""


def policies_section() -> str:
    """The section as Markdown."""
    lines = [
        HEAD,
        "| policy | default | what it says | when to change it | what is declined |",
        "|---|---|---|---|---|",
    ]
    for field in msgspec.structs.fields(StoragePolicy):
        effect, when, declined = ROWS[field.name]
        lines.append(f"| `{field.name}` | {field.default} | {effect} | {when} | {declined} |")
    return "\n".join(lines)


def with_policies(page: str) -> str:
    """The page with the section as it is now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{policies_section()}\n\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_policies(path.read_text()))
