"""The targets of tidekv as data. `python3 dev.py bench user` and `bench parts` print them with the measured figures.

A target names its figure and the measurement (`measurements.py`) that produces it. Most figures are ratios taken within
one run, so that the speed of the machine cancels out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Target:
    """One target. It is met if the figure is `at_least`, or `at_most`, the bound.

    A row with `published` is none: its figure is a model's, shown beside what others have published, without a verdict.
    """

    name: str
    asks: str
    unit: str = "times"
    measurement: str
    figure: str
    at_least: float | None = None
    at_most: float | None = None
    published: str = ""

    @property
    def kind(self) -> str:
        """The first word of the name."""
        return self.name.partition(".")[0]

    @property
    def asked(self) -> str:
        """The bound as text, or what was published."""
        if self.published:
            return f"published: {self.published}"
        if self.at_least is not None:
            return f"≥ {self.at_least:g} {self.unit}"
        return "" if self.at_most is None else f"≤ {self.at_most:g} {self.unit}"

    @property
    def is_model(self) -> bool:
        """Whether the figure is of a model, so that no verdict applies."""
        return bool(self.published)

    @property
    def is_time(self) -> bool:
        """Whether the figure is a time, which depends on the machine. Others are shares, ratios and counts."""
        return self.unit in ("µs", "ms")

    def passes(self, value: float) -> bool:
        """Whether a figure meets the target."""
        if self.at_least is not None:
            return value >= self.at_least
        assert self.at_most is not None
        return value <= self.at_most


def _replay(peer: str, form: str, least: float) -> list[Target]:
    words = {"array": "given an int64 array", "packed": "given packed tokens"}[form]
    whom = {"sglang": "SGLang's Rust tree core", "vllm": "vLLM's KV cache manager"}[peer]
    return [
        Target(
            name=f"index.{peer}.{form}.{part}",
            asks=f"replay of the conversation trace, {part} time a request, faster than {whom}, {words}",
            measurement=peer,
            figure=f"{peer}.replay.{form}.{part}",
            at_least=least,
        )
        for part in ("mean", "p99")
    ]


TARGETS: tuple[Target, ...] = (
    *_replay("sglang", "array", 6),
    *_replay("sglang", "packed", 8),
    *_replay("vllm", "packed", 40),
    Target(name="index.match.array", asks="match of a cached 32k prompt, int64 array, faster than SGLang",
           measurement="sglang", figure="sglang.match.array", at_least=3),
    Target(name="index.match.packed", asks="match of a cached 32k prompt, packed, faster than SGLang",
           measurement="sglang", figure="sglang.match.packed", at_least=12),
    Target(name="index.evict", asks="eviction of 10k tokens over 2,000 leaves, faster than SGLang",
           measurement="sglang", figure="sglang.evict", at_least=8),
    Target(name="index.lock", asks="lock + unlock at the worst of depths 1, 32, 256, faster than SGLang",
           measurement="sglang", figure="sglang.lock", at_least=1),
    Target(name="index.memory", asks="1 M pages in the index, beside their key bytes", unit="B a page",
           measurement="memory", figure="index.memory", at_most=200),
    Target(name="keys.page_64", asks="SHA-256 chain of 32k tokens, time over SGLang's C++ chain",
           measurement="sglang", figure="sglang.keys.64", at_most=2),
    Target(name="keys.page_16", asks="the same at page 16",
           measurement="sglang", figure="sglang.keys.16", at_most=3),
    Target(name="keys.once", asks="pages hashed per new page, in a conversation of eight turns", unit="",
           measurement="latency", figure="keys.hashed", at_most=1.1),
    Target(name="keys.exists", asks="existence of a key, in batches of 1,000", unit="µs",
           measurement="storage", figure="exists", at_most=0.3),
    Target(name="storage.hits", asks="hits of a full `file:` store over those of an optimal one of its size, agents",
           unit="%", measurement="storage_hits", figure="hits", at_least=95),
    Target(name="engine.cpu", asks="CPU a request, 256 in flight, 4k prompts, half cached", unit="µs",
           measurement="engine", figure="engine.256", at_most=400),
    Target(name="engine.in_flight", asks="CPU a request at 4,096 in flight, over that at 256, collector as advised",
           measurement="engine_growth", figure="engine.growth", at_most=1.15),
    Target(name="engine.memory", asks="memory of a request in flight beside its pages, 4k prompts, half cached",
           unit="KB", measurement="request_memory", figure="engine.memory", at_most=24),
    Target(name="engine.idle", asks="CPU of an idle engine", unit="% of a core",
           measurement="engine", figure="engine.idle", at_most=0.5),
    Target(name="engine.outcome.p50", asks="outcome's arrival to the caller's coroutine, 256 in flight, p50", unit="µs",
           measurement="latency", figure="outcome.p50", at_most=60),
    Target(name="engine.outcome.p99", asks="the same, p99", unit="µs",
           measurement="latency", figure="outcome.p99", at_most=1000),
    Target(name="engine.handover", asks="end of a hand-over to the caller's coroutine, 256 in flight, p50", unit="µs",
           measurement="latency", figure="handover.p50", at_most=120),
    Target(name="engine.storage", asks="a read of one small page, from call to outcome, p50", unit="µs",
           measurement="latency", figure="storage.p50", at_most=250),
    Target(name="engine.copies", asks="a copy of one small page, from call to outcome, p50", unit="µs",
           measurement="latency", figure="copy.p50", at_most=250),
    Target(name="engine.poller", asks="CPU of the polling thread, with 256 hand-overs in flight", unit="% of a core",
           measurement="latency", figure="poller.busy", at_most=15),
    Target(name="engine.poller_idle", asks="CPU of the polling thread with nothing in flight", unit="% of a core",
           measurement="latency", figure="poller.idle", at_most=0.1),
    Target(name="engine.lag", asks="event loop's lag, 256 in flight, p99", unit="ms",
           measurement="latency", figure="lag.p99", at_most=2),
    Target(name="engine.journal", asks="CPU that the journal adds, 256 in flight: 40 µs to a request of 650", unit="%",
           measurement="journal", figure="journal.grows", at_most=6.2),
    Target(name="transfer.raw", asks="bandwidth of a stream of writes over raw NIXL's, the least of all bulk shapes",
           unit="%", measurement="transfer", figure="transfer.least", at_least=95),
    Target(name="transfer.messages", asks="round trips of control messages a request", unit="",
           measurement="latency", figure="round_trips", at_most=2),
    Target(name="restore.pipeline", asks="L3 on a disk to L1, of the slowest stage's own speed", unit="%",
           measurement="restore", figure="restore.pipeline", at_least=85),
    Target(name="restore.overlap", asks="time to ready over the longer of restore from a disk and transfer",
           measurement="restore", figure="restore.overlap", at_most=1.1),
    Target(name="restore.shared", asks="loads of a 10k-token prefix that 50 waiting requests share", unit="loads",
           measurement="restore", figure="restore.loads", at_most=1),
    Target(name="run.small", asks="first table of `tidekv run`, a small model: p50 to ready over no cache",
           measurement="run", figure="run.small", at_most=1),
    Target(name="run.trace", asks="replay of recorded agents at 1/8, nothing throttled: whole run over no cache",
           measurement="run_trace", figure="run.trace", at_most=1.05),
    Target(name="first_rounds", asks="mean to ready of rounds 2 to 4 over the better of always and never from storage",
           measurement="first_rounds", figure="first_rounds", at_most=1.2),
    Target(name="policies.p50", asks="p50 to ready over that of no cache, link : storage from 1:16 to 16:1",
           measurement="policies", figure="policies.p50", at_most=1.05),
    Target(name="policies.p99", asks="p99 to ready over that of no cache, link : storage from 1:16 to 16:1",
           measurement="policies", figure="policies.p99", at_most=1.05),
    Target(name="planner.fixed", asks="time to ready over the best fixed policy's, link : disk from 1:16 to 16:1",
           measurement="planner", figure="planner.fixed", at_most=1.05),
    Target(name="planner.ends", asks="faster than always restore and always transfer, at the ends",
           measurement="planner", figure="planner.ends", at_least=1.3),
    Target(name="checksums.hash", asks="hashing a page of 1 MiB in host memory, over a plain copy of it",
           measurement="checksums", figure="checksums.hash", at_most=1),
    Target(name="checksums.transfer", asks="time to ready by transfer with `page_checksums`, over without",
           measurement="checksums", figure="checksums.transfer", at_most=2),
    Target(name="checksums.host", asks="time to ready from host memory with `page_checksums`, over without",
           measurement="checksums", figure="checksums.host", at_most=2.5),
    Target(name="modeled.mean", asks="published multi-turn rounds, modeled clock, default policy: mean to first token",
           unit="% less", measurement="paper", figure="rounds_default.mean", at_least=60),
    Target(name="modeled.p99", asks="the same: p99 to first token", unit="% less",
           measurement="paper", figure="rounds_default.p99", at_least=50),
    Target(name="modeled.sweep_p50", asks="the same, each constant at 1/8 and at 8 times: worst p50 over no cache's",
           measurement="paper", figure="swept.p50", at_most=1.05),
    Target(name="modeled.sweep_p99", asks="the same: worst p99 over no cache's",
           measurement="paper", figure="swept.p99", at_most=1.05),
    Target(name="paper.requests", asks="capacity effect: requests a second with a decode radix cache",
           measurement="paper", figure="capacity.requests", published="1.29"),
    Target(name="paper.first_token", asks="capacity effect: median time to first token",
           measurement="paper", figure="capacity.first_token", published="10.3"),
    Target(name="paper.bytes", asks="capacity effect: bytes saved", unit="%",
           measurement="paper", figure="capacity.bytes", published="not stated; at most 91.7 by the lengths"),
    Target(name="paper.rounds_mean", asks="multi-turn with L2 + L3, prefetch wait_complete: mean time to first token",
           unit="% less", measurement="paper", figure="rounds.mean", published="39.3"),
    Target(name="paper.rounds_p99", asks="the same: p99 time to first token", unit="% less",
           measurement="paper", figure="rounds.p99", published="51.9; the model's storage and link are set by it"),
    Target(name="paper.rounds_token", asks="multi-turn with L2 + L3: time per output token", unit="% more",
           measurement="paper", figure="rounds.token", published="2.5"),
    Target(name="cuda.copies", asks="page copies, of pinned bandwidth, both ways, page 64 and 16", unit="%",
           measurement="gpu", figure="gpu.copies", at_least=90),
    Target(name="cuda.compute", asks="slowdown of decode-like compute beside copies", unit="%",
           measurement="gpu", figure="gpu.compute", at_most=3),
    Target(name="cuda.polling", asks="event polling", unit="% of a core",
           measurement="gpu", figure="gpu.polling", at_most=1),
    Target(name="sessions.ready", asks="agent sessions: time to ready p50, lower than without decode cache",
           measurement="sessions", figure="sessions.ready", at_least=10),
    Target(name="sessions.bytes", asks="agent sessions: bytes on the wire, fewer than without decode cache",
           measurement="sessions", figure="sessions.bytes", at_least=20),
    Target(name="scaling.index", asks="index, cost a request at 100 times the work, over n log n's", unit="",
           measurement="scaling", figure="scaling.index", at_most=1),
    Target(name="scaling.engine", asks="engine, the same", unit="",
           measurement="scaling", figure="scaling.engine", at_most=1),
    Target(name="scaling.journal", asks="journal, the same", unit="",
           measurement="scaling", figure="scaling.journal", at_most=1),
)  # fmt: skip
