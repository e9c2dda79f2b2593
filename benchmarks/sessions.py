"""Agent sessions end to end in two processes, with and without decode cache: `python -m benchmarks.sessions RECORDING`.

Lengths are an eighth of the recorded ones. Requests are served one at a time, so the time to ready does not include the
verification of other requests. The prefill worker keeps prefixes in both runs, which differ in what it must send. All
pages of every 16th request are verified. Storage is in memory, since nearly all hits are in L1. Two figures from two
passes:

- The time to ready, of the first requests: a token has 56 KiB of KV, as in a model of 7B parameters with 28 layers and
  4 KV heads (Qwen2.5-7B); both device pools together take 9.4 GB. Prefill has computed a prompt before decode requests
  it, so the time is that of the hand-over.
- The bytes on the wire, of all requests: with little KV per token, which changes both sums by the same factor.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import torch
import uvloop

from benchmarks.figures import Figures, option_parser
from demo.blocks import TraceOptions
from demo.main_job import JobResult, TierOptions, run_trace
from tidekv import KVLayout

LAYOUT = KVLayout(num_layers=28, num_kv_heads=4, head_dim=128, dtype="bfloat16", page_size=16)
L1_PAGES, L2_PAGES = 5120, 1024
STORAGE = "memory:?capacity=512MB"
VERIFY_EVERY = 16


def replay(recording: Path, *, sessions: int, requests: int, tiers: TierOptions) -> JobResult:
    """Run both phases of a recording."""
    options = TraceOptions(length_scale=1 / 8, time_scale=0.0, requests_max=requests, sessions_max=sessions)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(run_trace(recording, options, tiers))
    assert not result.failures, result.failures
    return result


def main() -> None:
    """Run both passes with and without cache, and write the figures."""
    parser = option_parser(__doc__)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--requests", type=int, default=240, help="maximum requests for the time to ready; 0 is all")
    parser.add_argument("--in-flight", type=int, default=1)
    parser.add_argument("--compute-within", action="store_true", help="compute prompts only when decode requests them")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    tiers = TierOptions(
        in_flight_max=chosen.in_flight,
        trace_layout=LAYOUT,
        l1_pages=L1_PAGES,
        l2_pages=L2_PAGES,
        storage=STORAGE,
        verify_every=VERIFY_EVERY,
        computed_ahead=not chosen.compute_within,
    )
    with Figures(chosen.json) as figures:
        result = replay(chosen.recording, sessions=chosen.sessions, requests=chosen.requests, tiers=tiers)
        on, off = result.phases
        p50_ms = [phase.ready_ms(50) for phase in (on, off)]
        figures.add(
            "sessions.ready",
            p50_ms[1] / p50_ms[0],
            f"p50 {p50_ms[0]:.1f} ms with the cache, {p50_ms[1]:.1f} ms without; {on.requests} requests",
        )
        figures.note(
            f"{on.prompt_tokens:,} prompt tokens, {on.hit_rate:.1%} not sent; p99 {on.ready_ms(99):.1f} and "
            f"{off.ready_ms(99):.1f} ms; {result.compared:,} pages verified; {result.wall_s:.0f} s"
        )
        tiers = replace(tiers, trace_layout=None, l1_pages=0)
        result = replay(chosen.recording, sessions=chosen.sessions, requests=0, tiers=tiers)
        on, off = result.phases
        sent_mb = [phase.bytes_sent / 1e6 for phase in (on, off)]
        figures.add(
            "sessions.bytes",
            sent_mb[1] / sent_mb[0],
            f"{sent_mb[0]:,.0f} MB against {sent_mb[1]:,.0f} MB; {on.requests} requests, {on.prompt_tokens:,} tokens",
        )
        figures.note(f"all requests: {result.compared:,} pages verified; {result.wall_s:.0f} s")


if __name__ == "__main__":
    main()
