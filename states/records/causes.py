"""Causes that the records of a request name by a key, and what each means. No decision depends on them."""

from __future__ import annotations

DECLINED = {
    "storage_left_alone": "storage is not usable at the moment",
    "out_of_reach": "the pages before them in the prompt have left the caches",
    "below_threshold": "they are too few to be worth a fetch",
    "limit": "the limits on fetches leave too few of them",
    "slower": "the transfer is expected to bring them sooner",
    "unmeasured": "the speed of storage or of prefill is not known yet; other pages are fetched to measure it",
    "copies_slower": "the transfer is expected to bring them sooner than copies from host memory",
    "no_host_page": "host memory has no free page",
    "in_the_way": "pages of an earlier load of the same prompt are still being reclaimed",
}
"""Reasons why a plan does not load pages that storage has, or host memory, by name."""
PEER_DECLINED = {
    "paused": "it was late, or failed, a moment ago",
    "below_threshold": "they are too few to be worth a read",
    "limit": "the limits on reads from peers leave too few of them",
    "slower": "prefill is expected to send them sooner",
    "unmeasured": "the speed of peers or of prefill is not known yet; other pages are read to measure it",
    "no_host_page": "host memory has no free page",
    "in_the_way": "pages of an earlier load of the same prompt are still being reclaimed",
}
"""Reasons why a plan does not ask a peer of its request for pages that no tier has, by name. No decision depends on
them.
"""
LOST_CAUSES = {
    "component_fetch_short": "storage did not deliver all pages of a component",
    "component_fetch_late": "storage did not deliver the pages of a component in time",
    "component_copy_failed": "a copy of a component failed",
    "component_copy_late": "a copy of a component did not end in time",
    "record_updated": "its caller may have updated a record before layers of its pages were lost",
    "end_sender_left": "the request that was to share its component pages has left",
    "end_sender_slow": "the transfer of another request, which was to bring its component pages, stalled for too long",
    "end_copy_failed": "the copy of the component pages of another request failed",
    "end_copy_late": "the copy of the component pages of another request did not end in time",
}
"""Reasons why prefill was asked for component pages again, by name. No decision depends on them."""
LOAD_CAUSES = {
    "fetch_short": "the fetch from storage failed or returned fewer pages",
    "fetch_late": "the fetch from storage missed its deadline",
    "peer_short": "the peer had fewer of the pages, or failed",
    "peer_late": "the peer did not send the pages in time",
    "transfer_done": "the transfer ended before the fetch, and the policy does not wait for the fetch",
    "copy_failed": "the copy from host to device failed",
    "copy_late": "the copy from host to device did not end in time",
    "sender_left": "the request whose transfer was to bring them has left",
    "sender_slow": "the transfer of another request, which was to bring them, stalled for too long",
    "rule_raised": "a rule of the core raised",
}
"""Reasons why a load failed and prefill was asked for its pages, by name. No decision depends on them."""
