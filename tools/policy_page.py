"""Generator of the section "Policies" of docs/storage.md: `python -m tools.policy_page docs/storage.md`.

Defaults come from `StoragePolicy`. A policy without a row here, or a row without a policy, is an error.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from tidekv.states.storage.answer_time import GAIN_SHARE, WAIT_MAX_S, WAIT_MIN_S
from tidekv.states.storage.source_split import MARKED_GAIN
from tidekv.states.storage.throughput import ESTIMATE_FRESH_S
from tidekv.states.storage_policy import StoragePolicy

BEGIN = "<!-- Policies, from the code: python -m tools.policy_page docs/storage.md -->"
END = "<!-- End of the policies. -->"

HEAD = f"""\
## Policies

Policies determine how a decode engine uses its storage. Each is a field of `StorageOptions` and can be changed while
requests run: `engine.change_policy(write="back", lookahead_pages_max=512)`. Running operations continue as they began;
later ones follow the new policies. The change is an event of the journal. Pages that a policy declines are requested
from prefill: the promise is shorter, no request waits or fails, and `l3_declined_pages` counts the pages.

**Writing.** `through` is the safest: each finished request is on the host and in storage soon after. `selective` saves
writes if most prompts are seen once. `back` copies and writes least, and as late as possible: it keeps a share of each
pool (`write_back_ahead`) free or clean, so that eviction, which never waits, finds pages that have another copy.
Pages that eviction drops without a copy are counted (`l1_pages_dropped`, `l2_pages_dropped`); pages that were never
about to be evicted are lost when the process ends.

**What storage has.** Storage evicts what it does not see in use, and it does not see hits on the device or the host.
So a put names the whole prefix: storage is asked which pages it has, notes that they are in use, and is given the
others. A page is not put again while it is there; `pages_stored_again` counts pages that it had lost. A prefix
without anything to put is named when it is used again after `renew_s`, or after this worker has put a sixteenth of
the capacity. With `back` a mark from an earlier period is checked before a page is dropped for it. Pages behind a gap
are not counted as stored. Prefill, the vLLM connector and the SGLang backend do the same at each prompt that they
see. `s3:` and `mooncake:` know the use of their own process only, and `s3:` notices that another process or a rule
has removed a page when it reads it; after a restart `s3:` orders pages by their time of writing.

`flush(("l3",))` waits for puts in flight, removes all pages, and stores those that are still on the device or the
host again at their next use. `flush(("l1", "l2", "l3"), namespace="tenant")` deletes from storage the pages of that
namespace whose prompts are still on the device or the host: keys of storage do not tell whose a page is.

**Wait for the answer.** A request asks storage at its arrival, and takes no device pages while it waits for the
answer. The wait is the mean of the measured answer times and four times their deviation, at least
{WAIT_MIN_S * 1000:g} ms. It is at most {GAIN_SHARE:.0%} of the time that storage can save: the time of all pages in
question from prefill, less that from both, times the share of such pages found recently. While the speed of
the transfer is unknown, that is {WAIT_MAX_S * 1000:g} ms. Answers that take longer on average are not waited for. The
plan is then made without storage (`l3_queries_outwaited`). A later answer is used if the request still waits for
device memory, or returns to the queue; prefill is writing the pages otherwise. With `wait_complete` the wait is
`query_deadline_s`.

**Throughput of storage.** For each fetch that brought all its pages, or is late, the core records the seconds from
its command to its outcome and the pages that were under way when it began. Both sums are weighted: each fetch counts
7/8 of the one after it. Their ratio is the time of a page, `page_s`. A plan fetches at most `n` pages with
`(pages under way + n) * page_s <= fetch_deadline_share * time that it may take`. After {ESTIMATE_FRESH_S:g} s without a
fetch the measurement is old: it bounds no plan any more, and the next one replaces it. Fetches of few pages, which are
mostly latency, do not make a page dearer.

**Split between storage and transfer.** With `soonest` the throughput of the transfer is measured in the same way, by
spans of rooms. A plan takes what storage has from the faster of the two, unless the prompt would take {MARKED_GAIN:g}
times as long as with both. Then it splits what storage has so that storage and prefill finish at the same time, each
after the work that is queued there: the front is fetched, the rest is sent by prefill. When prefill has sent everything
and fetches are still under way, the last of these are requested from prefill as well if it sends them markedly sooner;
their reads continue without effect. They are divided once more if a fetch takes half as long again as expected. While
one of the two throughputs is unknown, one plan at a time fetches an eighth of what storage has, at least
`prefetch_threshold_tokens`, or everything if nothing has been transferred yet, and half of the remaining pages are
requested each time; other plans fetch nothing. Mostly storage is known before its first hit: while its speed is
unknown, some of the pages that were just put are read back, for no request. So storage
costs a request no more than it gains, however slow it is: `python3 dev.py bench policies` measures that on real
processes. The time that prefill computes is part of its throughput. The pages of windows and states are not split:
what storage has of them without a gap is fetched.

Plans rely on the last measurement, however old: a fetch that turns out slower is noticed, and prefill is asked for its
pages, so that being wrong costs little. A storage that is not used because it was slow is measured again once its
measurement is old, by one plan at a time, with a fetch of `prefetch_threshold_tokens`. From the second time on that a
prompt is asked for, `soonest` is meant to be within a fifth of the better of always waiting for storage and never
using it. The first put makes storage read once to measure it, and the next put once more if that was not faster than
prefill: the first read may have met a stall. `python3 dev.py bench first-rounds` measures this on real processes in
four minutes, and prints what the plans chose; it leaves out differences
below 2 ms, the noise of a machine. `wait_complete` uses all of storage from the first hit on, at the price of waiting
for it when it is slow.

**Look-ahead.** A request that waits for device memory has already looked up its pages in storage. If
`lookahead_pages_max` is set, these pages are fetched to the host meanwhile and count as `l3`; reads that are
still under way when the request is admitted continue as its own. Look-ahead requires that all pages in front of these
are on the host, or that there are none. The pages of windows and states that the end of the prompt needs are read ahead
as well, before full pages, and count in the same bound: a request cannot be ready without them. What storage fails to
deliver of them before the admission comes from prefill; `component_pages_fetched_ahead` counts what it delivered.
"""

ROWS: dict[str, tuple[str, str, str]] = {
    "prefetch": (
        "maximum wait of a request for its fetches: `timeout`, by their length; `best_effort`, until its transfer is "
        "done; `wait_complete`, until they end (these two at most half of the time to its deadline); `soonest`, like "
        "`timeout`, but pages that the transfer brings sooner are not fetched; see above",
        "`wait_complete` or `timeout` if computing pages in prefill costs more than waiting for storage; `best_effort` "
        "if prefill is idle",
        "pages that have not landed are requested from prefill by extend",
    ),
    "prefetch_threshold_tokens": (
        "minimum tokens of a hit that is fetched",
        "higher with slow storage or fast prefill; 0 in tests",
        "the transfer sends the pages",
    ),
    "prefetch_base_s": ("fixed seconds of `timeout`", "about the p99 of one fetch", "see `prefetch`"),
    "prefetch_per_ki_token_s": (
        "seconds of `timeout` for each 1,024 tokens",
        "less than the time of prefill for them",
        "see `prefetch`",
    ),
    "fetch_pages_in_flight_max": (
        "maximum pages under way from storage, over all requests; 0 means no limit",
        "storage shared with other users",
        "the plan fetches what is left of the limit",
    ),
    "fetch_pages_per_s": (
        "maximum pages per second, with a burst of one second; 0 means no limit",
        "storage that bills or throttles reads",
        "the plan fetches what the rate allows",
    ),
    "fetch_deadline_share": (
        "share of the plan's time limit within which fetches must land at the measured throughput; 0 means no limit",
        "below 1 if latency varies much",
        "the plan fetches the pages that land in time",
    ),
    "lookahead_pages_max": (
        "maximum host pages that waiting requests fill ahead, over all of them; 0 disables look-ahead",
        "requests wait for device memory and the host pool is large: up to a quarter of it",
        "the request fetches when it is admitted",
    ),
    "write": (
        "`through`, `selective` or `back`; see above",
        "`selective` for one-off prompts, `back` for little host traffic",
        "the pages are not in storage",
    ),
    "write_hits_min": ("minimum prompts that contained a page; for `selective`", "2 or 3", "as `write`"),
    "write_tokens_min": (
        "minimum tokens of a prefix that is put",
        "prefill computes shorter prefixes faster than a fetch",
        "as `write`",
    ),
    "write_back_ahead": (
        "share of each pool kept free or clean, 0 to 1; for `back`",
        "larger for bursts of prompts: up to the pages that are allocated during one copy",
        "eviction drops the pages and counts them",
    ),
    "put_wait_s": (
        "maximum seconds that puts wait for fetches; 0 means that they do not wait",
        "reads matter more than writes",
        "—",
    ),
    "put_fetch_s_max": (
        "average seconds of a fetch above which puts wait up to `put_wait_s`; 0 means no bound",
        "writes slow storage down for readers",
        "—",
    ),
    "renew_s": (
        "minimum seconds between two notes to storage that a page is in use on the device or the host",
        "lower if several workers fill the storage in less than this; higher if it bills requests",
        "storage evicts the page, which is put again at its next use",
    ),
    "put_host_share": (
        "maximum share of the host pool pinned by puts, 0 to 1; a single put always begins; 1 means no bound",
        "higher if storage is fast and bursts of finished requests are to be stored whole",
        "the pages are not in storage; counted as `l3_puts_declined`",
    ),
    "breaker_failures": (
        "consecutive failures and late calls after which storage is not used; 0 means never",
        "lower if failing calls are slow",
        "requests continue without storage",
    ),
    "breaker_backoff_s": ("seconds until the first probe; doubled for each further one until a call succeeds", "", "—"),
    "breaker_backoff_max_s": ("maximum seconds between probes", "", "—"),
}
"""Effect with unit, reason to change it, and consequence of declined pages, for each policy."""


def policies_section() -> str:
    """Return the section as Markdown."""
    lines = [
        HEAD,
        "| policy | default | effect | when to change it | consequence |",
        "|---|---|---|---|---|",
    ]
    for field in msgspec.structs.fields(StoragePolicy):
        effect, when, declined = ROWS[field.name]
        lines.append(f"| `{field.name}` | {field.default} | {effect} | {when} | {declined} |")
    return "\n".join(lines)


def with_policies(page: str) -> str:
    """Return the page with the current section."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{policies_section()}\n\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_policies(path.read_text()))
