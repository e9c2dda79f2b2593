"""Generator of the section "Policies" of docs/storage.md: `python -m tools.policy_page docs/storage.md`."""

from __future__ import annotations

import sys
from pathlib import Path

from tidekv.states.storage.answer_time import GAIN_SHARE, WAIT_MAX_S, WAIT_MIN_S
from tidekv.states.storage.fetch_source import ESTIMATE_FRESH_S
from tidekv.states.storage.source_split import TRUSTED_S

BEGIN = "<!-- Policies, from the code: python -m tools.policy_page docs/storage.md -->"
END = "<!-- End of the policies. -->"

POLICIES = f"""\
## Policies

Each policy is a field of `StorageOptions` ([values and defaults](configuration.md#enginestorage), [which one
when](operating.md#which-policy-when)) and can be changed while requests run, as by
`engine.change_policy(write="back", lookahead_pages_max=512)`. Pages that a policy declines are requested from
prefill; `l3_declined_pages` counts them.

**Writing.** With `back` pages that were not yet written are lost when the process ends. `l1_pages_dropped` and
`l2_pages_dropped` count pages that were evicted without another copy. `PrefillPeer(storage=…)` writes `through`, by
way of host memory of its own, which keeps the newest prompts; longer ones pass through it. Its `store_pages_written`,
`store_pages_declined` and `store_pages_lost` count pages.

**What storage has.** Storage does not see hits on the device or the host, so pages in use are named to it again after
`renew_s`. `pages_stored_again` counts pages that it had lost. `s3:` and `mooncake:` know the use of their own process
only; after a restart `s3:` orders pages by their time of writing.

`flush(("l3",))` removes all pages; those that are still on the device or the host are stored again at their next use.

**Wait for the answer.** A request asks storage at its arrival, and takes no device pages while it waits. The wait is
the mean of the measured answer times and four times their deviation, at least {WAIT_MIN_S * 1000:g} ms. It is at most
{GAIN_SHARE:.0%} of the time that storage can save; {WAIT_MAX_S * 1000:g} ms while the speed of the transfer is
unknown. After the wait the plan is made without storage (`l3_queries_outwaited`). With `wait_complete` the wait is
`query_deadline_s`.

**Throughput.** The core measures the time of a page from storage over the last fetches. A plan fetches the pages that
come in `fetch_deadline_share` of its time, behind those under way. {ESTIMATE_FRESH_S:g} s after the last fetch the
measurement bounds no plan.

**Split between storage and transfer.** With `soonest` the transfer is measured in the same way, prefill's computation
included. A plan fetches what storage has, unless the transfer of all of it is sooner, or a part from each markedly
sooner. Host memory that is measured to be slower than the transfer, and would take more than {1e3 * TRUSTED_S:g} ms,
is split in the same way (`l2_declined_pages`). While the speed of storage is unknown, one plan at a time measures it
with a part of its pages. Windows and states are not split.

**Prefetch for waiting requests.** If `lookahead_pages_max` is set, pages of a request that waits for device memory are
fetched to the host meanwhile and count as `l3`; those of windows and states come first
(`component_pages_fetched_ahead`).
"""


def with_policies(page: str) -> str:
    """Return the page with the current section."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{POLICIES.rstrip()}\n\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_policies(path.read_text()))
