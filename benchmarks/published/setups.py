"""Parameters of the published runs, fixed from the publications before anything was run here.

The two publications are of different machines, and neither states the speed of its link. `LINKS_BYTES_PER_S` is one set
of link speeds for both tables: the results at all of them are printed side by side.

A published table states results, but seldom speeds. A speed that is not stated is derived from the table's own rows, by
the rule given next to it; if that is not possible it is an assumption, and marked as one. Every parameter is swept from
half to double (`benchmarks.published.sweep`), so the conclusions do not rest on single values.

One parameter was added after results were known, and no verdict uses it: `PREFILL_OF_TWO_B200_TOKENS_PER_S`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

PAGE_TOKENS = 64
KI = 1024
LINK_OF_ROUNDS_BYTES_PER_S = 16 * 64 * KI * 256 * KI / 48.87
"""Link of the rounds, derived from their p99 without a cache: 16 prompts of 64 Ki tokens in 48.87 s, or 5.6 GB/s."""
LINKS_BYTES_PER_S = (LINK_OF_ROUNDS_BYTES_PER_S, 22.5e9, 90e9)
"""The derived link; one port of 200 Gb/s and two of 400 Gb/s, at nine tenths, which are assumptions."""
ASSUMED_PREFETCH = "wait_complete"
"""Prefetch policy of the published rounds, which is not stated: their storage speed is derived as if every cached page
were read. The results with the default policy of tidekv are printed beside it.
"""
TOKEN_STEP_S = (0.040, 0.0007)
"""Decoding step of n requests, from the published milliseconds per token of the capacity effect: 65.2 with about 37
requests, 134.6 with 128. The latencies of the same table imply longer steps (`CapacitySetup`); both cannot be true.
"""
PREFILL_OF_TWO_B200_TOKENS_PER_S = 2 * 4.5e15 * 0.4 / (2 * 32.8e9 + 4 * 64 * 64 * 128 * 52_250)
"""Assumed prefill speed of two GPUs of that class for Qwen3-32B: two fifths of their 4.5e15 8-bit operations per
second each, divided by two operations per weight plus the attention of 64 layers of 64 heads of 128 over 52,250 earlier
tokens. Added after results were known.
"""


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Speeds of a modeled world. Bytes are counted over all layers and ranks."""

    token_bytes: float
    """KV of one token."""
    prefill_workers: int
    prefill_tokens_per_s: float
    """New tokens per second of one prefill worker, which computes one request after the other."""
    link_bytes_per_s: float
    """Link into the decode worker, shared by all prefill workers."""
    step_base_s: float
    step_request_s: float
    """One decoding step of n running requests takes `step_base_s + n * step_request_s`."""
    storage_bytes_per_s: float = 0.0
    """Reads of one reader of storage; writes have the same speed in addition. 0 disables storage."""
    copy_bytes_per_s: float = 25e9
    """Between host and device memory, each way. An assumption: one PCIe 4 slot with 16 lanes."""
    memory_bytes_per_s: float = 3.35e12
    """Bandwidth of device memory, which copies take from decoding. An assumption: one H100."""
    message_s: float = 0.0005
    """One control message. An assumption; no result depends on it."""

    @property
    def page_bytes(self) -> float:
        """KV of one page."""
        return self.token_bytes * PAGE_TOKENS


@dataclass(frozen=True, kw_only=True)
class CapacitySetup:
    """A long prefix shared by all requests, with more requests in flight than fit into device memory without sharing.

    Published (sglang pull request 19746): Qwen3-32B, 8-bit KV, page 64, three prefill workers and one decode worker
    with two GPUs of the B200 class each, 1,000 requests, 128 in flight, a shared prefix of 50 K tokens and 4.5 K tokens
    of each request's own, about 355 output tokens. Not published: the number of different prefixes (one is assumed),
    whether requests preceded the run (none are assumed), and the spread of lengths (a tenth, drawn from the seed).

        without / with decode radix cache   requests/s 1.2433 / 1.6075, time to first token p50 71.94 / 6.99 s,
                                            latency p50 98.05 / 70.67 s, about 37 requests running without it;
        with it, 256 in flight              1.69 requests/s

    Token bytes: 64 layers * 2 * 8 heads * 128 * 1 byte. Step: p50 of latency minus p50 of the first token, over 355
    tokens, is 73.5 ms without and 179.4 ms with the cache; requests/s times the same seconds implies 32.5 and 102.4
    running requests; the step is the line through both points. Prefill: the slowest speed that the published run with
    256 in flight allows, since 592 s minus the last request's 355 steps sufficed for the prefix and 333 suffixes on
    each worker. Pool: 37 requests of 858 pages. Link: the fastest of `LINKS_BYTES_PER_S`, an assumption. There is no
    storage, so the prefetch policy has no effect.

    The published milliseconds per token imply shorter steps (`TOKEN_STEP_S`). With these, decoding without other limits
    would reach 2.8 requests/s, which so slow a prefill would hide; `by_token_step` uses a prefill as fast as its GPUs.
    """

    speeds: Speeds = Speeds(
        token_bytes=128 * KI,
        prefill_workers=3,
        prefill_tokens_per_s=2660.0,
        link_bytes_per_s=LINKS_BYTES_PER_S[-1],
        step_base_s=0.0243,
        step_request_s=0.001515,
    )
    requests: int = 1000
    in_flight: int = 128
    prefix_tokens: int = 50_000
    suffix_tokens: int = 4_500
    output_tokens: int = 355
    output_spread: float = 0.1
    pool_tokens: int = 37 * 858 * PAGE_TOKENS
    warm: bool = False
    """Whether one request with the prefix is served before the clock starts."""

    def by_token_step(self) -> CapacitySetup:
        """Return the setup with steps by the published milliseconds per token, and prefill as fast as its GPUs are."""
        base_s, request_s = TOKEN_STEP_S
        speeds = replace(
            self.speeds,
            step_base_s=base_s,
            step_request_s=request_s,
            prefill_tokens_per_s=PREFILL_OF_TWO_B200_TOKENS_PER_S,
        )
        return replace(self, speeds=speeds)


@dataclass(frozen=True, kw_only=True)
class RoundsSetup:
    """Conversations of six rounds, with host memory and storage below a decode worker's device memory.

    Published (sglang pull request 26227): Qwen 32B, Mooncake, prompts of 4, 16, 28, 40, 52, 64 Ki tokens; each round
    adds 8 Ki generated tokens and 4 Ki of the user. Hit rates follow exactly from that, with decode output reusable and
    with prompts only.

        without / with L2 + L3   time to first token mean 15.36 / 9.33 s, p90 36.46 / 19.30 s, p99 48.87 / 23.51 s,
                                 time per output token 40.31 / 41.32 ms; by round without: 2.29 7.25 12.72 18.01 23.40
                                 28.50 s

    Not published: number of clients, concurrency, memory sizes, prefetch policy. 80 clients are the default of the
    benchmark that fits the description. A p99 of about twice the mean of the last round implies that the requests of a
    round arrive at once and are served in turn. A concurrency of 16 is an assumption on which no result depends, since
    link, storage and prefill are derived for 16. The last of a burst waits for all its bytes, in whatever order they
    are served. Link: 16 prompts of 64 Ki in 48.87 s. Storage: 16 prefixes of 60 Ki in 23.51 s, as if nothing else had
    taken time. Both p99 are inputs, therefore: that the model gives them again says nothing, only the sweep of the
    constants does. Prefill: in the first round nothing is cached, and computing takes longer than sending: 4 Ki tokens
    in 2.29 s / 8.5, where 8.5 is the mean position of 16 in turn. Token bytes: 64 layers * 2 * 8 heads * 128 * 2 bytes.
    Step: the line of the other table, scaled to 40.31 ms with 16 running. Device memory: an assumption, 16
    conversations at their longest, 288 GiB; it is flushed between two groups of 16, as if by other traffic, so that it
    does not contribute to the hits. Host memory: an assumption, twice that. It holds what the first two rounds leave of
    all 80 clients, so rounds 1 and 2 need no storage; from round 3 on a growing share comes from there.
    """

    speeds: Speeds = Speeds(
        token_bytes=256 * KI,
        prefill_workers=1,
        prefill_tokens_per_s=4 * KI * 8.5 / 2.29,
        link_bytes_per_s=LINK_OF_ROUNDS_BYTES_PER_S,
        storage_bytes_per_s=16 * 60 * KI * 256 * KI / 23.51,
        step_base_s=0.0201,
        step_request_s=0.001255,
    )
    clients: int = 80
    at_once: int = 16
    rounds: int = 6
    user_tokens: int = 4 * KI
    output_tokens: int = 8 * KI
    device_shares: float = 1.0
    """Device memory, in multiples of `at_once` conversations at their longest."""
    host_ratio: float = 2.0
    """Host memory, in multiples of device memory."""
    prefetch: str = ASSUMED_PREFETCH
    """Prefetch policy of the core."""
    prefill_reads_storage: bool = True
    """Whether prefill reads decode's output from storage; otherwise it computes that again."""

    @property
    def longest_pages(self) -> int:
        """Pages of a conversation at its end."""
        return self.rounds * (self.user_tokens + self.output_tokens) // PAGE_TOKENS
