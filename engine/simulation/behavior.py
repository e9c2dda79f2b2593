"""What each injected fault must lead to, by component: `docs/faults.md` is drawn from here.

    python -m tidekv.engine.simulation.behavior > docs/faults.md

That the behavior holds is checked by the world and its audit, after each step and at the end of each run: this file
only says it in words. A fault without words, or words without a fault, fail a test.
"""

from __future__ import annotations

from tidekv.engine.simulation.faults import FAULTS

HEAD = """\
# Faults

Every kind of fault that the simulator injects, and what must follow from it. Drawn from the code by `python -m
tidekv.engine.simulation.behavior`; a test compares. `tidekv simulate --faults all` draws from its seed which of them
are on and how often each strikes; `--faults NAME,NAME` turns single ones on.

Behind all of them stand the same checks, after each step, every 100 events and at the end of a run: every pool adds
up, no page has two owners, `lock_ref` is the number of live receipts, the prefix closure holds, cursors only grow,
each request has exactly one end, each page of a READY request holds its own bytes, nobody reads or writes a page that
somebody else owns, and when all requests are over nothing is held. A request fails only by what is allowed to fail
it: a lost prefill (all of its list), an abort, its own deadline, a computation of its caller's, or a raise of our own
code for the third time.
"""

REQUIRED: dict[str, dict[str, str]] = {
    "Storage": {
        "query_fails": "The answer counts as nothing found; prefill sends the pages; the request becomes READY.",
        "query_raises": "As if storage had found nothing. Nothing waits for an outcome that cannot come.",
        "query_is_late": "At the deadline the plan is made without storage. The answer is counted when it comes.",
        "query_is_stuck": "As late. No page waits for it, and whoever has the request's id by then does not hear of "
        "it.",
        "query_promises_too_much": "The hint is not trusted: pages that the read does not bring are asked of prefill "
        "by extend.",
        "query_promises_too_little": "The read stays within the answer; prefill sends the rest.",
        "query_is_nonsense": "The number is cut to what was asked for; no page outside the prompt is read.",
        "fetch_fails": "The pages of the read are asked of prefill by extend; its host pages are given back.",
        "fetch_raises": "As a read that failed: extend, and nothing is left reserved.",
        "fetch_is_short": "What landed is copied to the device; the rest is asked of prefill by extend.",
        "fetch_is_corrupt": "The page and all behind it in the read are misses; its bytes are never published, nor "
        "copied.",
        "fetch_is_late": "At the deadline its device pages are extended into; its host pages stay owned until the "
        "read ends.",
        "fetch_is_stuck": "As late: the request becomes READY without it, and the host pages come back when it ends.",
        "fetch_reports_nonsense": "The number is cut to what was asked for.",
        "page_is_lost": "A miss: `exists` is a hint. The page is asked of prefill by extend.",
        "storage_forgets": "A later query finds less; a chain with a hole counts up to the hole.",
        "store_fails": "Nothing is marked as stored; the backup ends and gives its receipts back; it may be tried "
        "again.",
        "store_raises": "As a put that failed.",
        "store_is_partial": "Only whole runs that were stored are marked; the rest is put again by a later backup.",
        "store_is_late": "Counted. The host pages stay pinned until the put ends: they are still read.",
        "store_is_stuck": "As late; eviction passes the pinned pages by.",
        "storage_is_detached": "No question is asked and no put begun meanwhile; what runs is settled; requests go on.",
        "probe_fails": "Storage that is left alone for its errors stays so, and is probed again later; requests go on.",
        "policy_changes": "What is under way goes on as it began; what comes next follows the new policies.",
    },
    "Copies on this machine": {
        "copy_in_fails": "The destination is never shown to anybody; prefill is asked by extend into the same pages.",
        "copy_in_raises": "As a copy that failed: nothing was started, so nothing writes there.",
        "copy_in_is_late": "The load is void and its pages belong to the copy until it ends; its requests start over "
        "on others.",
        "copy_in_is_stuck": "As late; a write that comes after everybody has gone hits pages that have no other owner.",
        "copy_out_fails": "The host pages are given back and not shown; device pages stay what they are; the request "
        "is over.",
        "copy_out_raises": "As a copy that failed.",
        "copy_out_is_late": "Counted. Source and destination stay owned until it ends.",
        "tail_copy_fails": "To the device: the request starts over and loads no component from the host, after another "
        "failure it begins with the first page. To the host: its pages are given back.",
        "tail_copy_raises": "As a copy that failed: nothing was started, so nothing writes there.",
        "tail_copy_is_late": "The request starts over on other pages; those of the copy are owned until it has ended.",
        "tail_copy_is_stuck": "As late: what it writes has no other owner, however late it comes.",
        "outcome_repeats": "The second telling is counted as late and changes nothing.",
    },
    "Prefill and the network": {
        "connect_fails": "The room never was: the next prefill of the list is tried, or the request fails at once and "
        "says why.",
        "promise_is_slow": "The local restore goes on meanwhile; nothing but the request itself waits.",
        "room_is_refused": "The next prefill of the list, in a new generation; FAILED with prefill's words after the "
        "last.",
        "extend_is_refused": "As a room that was refused; what had landed locally is found again by the new match.",
        "room_fails": "The next prefill or FAILED at once; the pages wait in the quarantine for every writer's word.",
        "room_fails_settled": "The next prefill or FAILED; the pages are free at once.",
        "write_is_slow": "The request waits in TRANSFER, up to its own deadline; others are not held up.",
        "tail_write_is_slow": "As any write: the last chunk of span 0 comes behind it; given up, its pages are in the "
        "quarantine.",
        "aux_is_slow": "All pages are here and the request still waits: the first token belongs to it.",
        "drain_is_slow": "The pages stay in the quarantine; nobody gets them before the word has come.",
        "peer_crashes": "Its rooms fail; pages are free once its death is proven; its next life is another writer.",
        "peer_is_partitioned": "Its rooms fail; it goes on writing, into pages that are in the quarantine.",
        "frame_repeats": "Counted; cursors, spans and accounts stay as they are.",
        "frame_is_foreign": "Counted and dropped.",
        "frame_is_of_old_generation": "Counted and dropped; the request's new room does not hear of it.",
        "frame_of_wrong_rank": "Counted and dropped; the room does not become complete by it.",
        "frame_of_wrong_span": "Counted and dropped.",
        "chunk_skips_pages": "Counted; the cursor does not move, so the room is not complete before the missing pages "
        "came.",
    },
    "Callers": {
        "abort": "FAILED at once; own pages are free, or in the quarantine while somebody may write to them.",
        "abort_at_once": "The request leaves the queue and holds nothing.",
        "abort_when_ready": "All is given back; what the prompt brought to the cache stays there.",
        "abort_of_nothing": "Counted; nothing changes.",
        "deadline": "FAILED with the state that it waited in; as an abort otherwise.",
        "flush": "What is locked or pinned is spared, and told; everything else is forgotten.",
        "retract": "The KV is held in host memory until the resume, which restores prompt and output.",
        "retracted_is_dropped": "What was held in host memory becomes ordinary cache.",
        "output_is_dropped": "The prompt's pages stay cached; those of the output are free.",
        "tail_is_not_left": "No boundary is served there: the next request goes back to one whose tails are whole.",
        "no_cache": "No page of the request enters the cache.",
        "recompute_fails": "The request fails, with prefill's loss and the caller's error behind it.",
        "recompute_raises": "As a computation that failed.",
        "recompute_is_slow": "The pages that it writes to are owned until it has ended, though the request is long "
        "over.",
        "id_returns": "The new request has generations above the old one's: its rooms are not taken for one another.",
        "clock_is_late": "Deadlines act when the core is told the time; nothing is missed.",
    },
    "Ourselves": {
        "rule_raises": "Index and accounts are as before the rule. The request falls back to L1 + L2, then to "
        "L1 + transfer, and fails with the traceback the third time; no other request notices.",
    },
}
"""The required behavior of each fault, by component."""


def faults_page() -> str:
    """The page as Markdown."""
    parts = [HEAD]
    for component, required in REQUIRED.items():
        rows = [f"| `{name}` | {FAULTS[name]} | {words} |" for name, words in required.items()]
        parts.append(
            "\n".join(
                [f"## {component}", "", "| fault | what happens | what must follow |", "|---|---|---|", *rows, ""]
            )
        )
    return "\n".join(parts)


if __name__ == "__main__":
    print(faults_page(), end="")
