"""A vLLM that hands prompts over, as its connector sees it: blocks, steps in vLLM's order, a model by formula."""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from types import ModuleType, SimpleNamespace
from typing import Any  # vLLM's objects are not typed here.

import pytest
import torch

from tests.support.vllm_contract import (
    BLOCK,
    BLOCKS,
    DIM,
    HEADS,
    LAYERS,
    NAMES,
    AllBlocksCleared,
    FullAttentionSpec,
    KVConnectorRole,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    configs_of,
    joined_events,
    names_of,
)
from tests.support.waits import LIMIT_S
from tidekv.engine.integrations.vllm.drafts import NEXT_TOKEN_DRAFTS

PAUSE_S = 0.002
SAMPLED = 999
"""What the model samples behind the tokens of a request."""
STATE_BYTES = 160
"""Bytes of a layer's state, of which a block has room for more."""
ENGINE = {
    "storage": {"prefetch": "wait_complete", "prefetch_threshold_tokens": 0, "query_deadline_s": LIMIT_S},
    "peer": {"silence_s": 10.0},
    "close_deadline_s": LIMIT_S,
}
"""Options of the decode engine: a prompt of a test is short, and its machine may be busy."""


def kv_of(tokens: Sequence[int], layer: int, rank: int = 0, *, heads: int = HEADS) -> torch.Tensor:
    """KV of a prompt at a rank that has `heads` heads: [token, head, K | V].

    It depends on all tokens before, as that of a model does.
    """
    sums = torch.tensor(tokens, dtype=torch.float64).cumsum(0)
    first, count = rank * heads * 2 * DIM, heads * 2 * DIM
    columns = torch.arange(first, first + count, dtype=torch.float64).view(heads, 2 * DIM)
    return torch.sin(sums.view(-1, 1, 1) * (layer + 1) + columns).float()


def draft_kv_of(tokens: Sequence[int], layer: int, rank: int = 0, *, heads: int = HEADS) -> torch.Tensor:
    """That of a layer of an EAGLE draft, which depends on the next token, too: without the last one of the tokens."""
    return kv_of(tokens[1:], layer, rank, heads=heads)


def state_of(tokens: Sequence[int], layer: int) -> torch.Tensor:
    """Record of a state behind some tokens, as bytes: [1, 1, STATE_BYTES]."""
    columns = torch.arange(STATE_BYTES // 4, dtype=torch.float64)
    return torch.sin(sum(tokens) * (layer + 1) + columns).float().view(torch.int8)[None, None]


def speculative_of(method: str, **changes: Any) -> Any:
    """vLLM's configuration of a draft."""
    fields = {
        "method": method,
        "draft_model_config": SimpleNamespace(model="draft"),
        "parallel_drafting": False,
        "use_multi_module_mtp": lambda: False,
    }
    return SimpleNamespace(**fields | changes)


def hashes_of(tokens: Sequence[int], *extra: object) -> list[bytes]:
    """A hash for each full block, which includes the blocks before it and what else tells KV apart, as vLLM's do."""
    hashes = [repr(extra).encode()]
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        hashes.append(sha256(hashes[-1] + repr(tokens[start : start + BLOCK]).encode()).digest())
    return hashes[1:]


def request_of(name: str, tokens: Sequence[int], params: dict[str, Any] | None, **changes: Any) -> Any:
    """What a connector sees of a request."""
    adapter = getattr(changes.get("lora_request"), "lora_name", None)
    fields = {
        "request_id": name,
        "kv_transfer_params": params,
        "prompt_token_ids": list(tokens),
        "all_token_ids": (all_tokens := list(tokens)),
        "_all_token_ids": all_tokens,
        "block_hashes": hashes_of(list(tokens), adapter, changes.get("cache_salt")),
        "num_tokens": len(tokens),
        "num_prompt_tokens": len(tokens),
        "num_computed_tokens": 0,
        "prompt_embeds": None,
        "mm_features": [],
        "resumable": False,
        "lora_request": None,
        "cache_salt": None,
        "skip_reading_prefix_cache": False,
        "max_tokens": 100,
        "sampling_params": SimpleNamespace(allowed_token_ids=None),
        "structured_output_request": None,
    }
    return SimpleNamespace(**fields | changes)


class HandoverVllm:
    """The scheduler's side and one worker for each rank, with tensors, driven in the order in which vLLM calls them."""

    def __init__(
        self,
        module: ModuleType,
        role: str,
        *,
        seed: int = 0,
        is_head_first: bool = True,
        tensor_parallel: int = 1,
        heads: int = HEADS,
        events: bool = False,
        device: str = "cpu",
        enqueue: Callable[[Callable[[], None]], None] | None = None,
        further: Sequence[Any] = (),
        draft: str | None = None,
        draft_heads: int = 0,
        **handover: Any,
    ):
        """`events`: vLLM publishes KV events; those of the connector are in `published`, by step.

        `further`: descriptions of groups of blocks behind the first one, windows and states, in the same memory.

        `draft`: the method of a draft, whose layer is the last one of the full KV. `draft_heads`: heads of that layer,
        if they are not as many as the model's.

        `enqueue`: puts work of the model on its stream, of a device that has one; the work may run later.
        """
        self.role = role
        self.enqueue = enqueue or (lambda work: work())
        self.heads_of = [heads] * (LAYERS - 1) + [draft_heads or heads]
        """Heads by layer."""
        ranks = tensor_parallel
        sends, receives = role != "kv_consumer", role != "kv_producer"
        if sends:
            handover.setdefault("listen", "127.0.0.1:0")
        if receives:
            handover.setdefault("dials", ["127.0.0.1:*"])
            handover.setdefault("recompute_threshold", 0)  # Prompts of tests are short.
            handover.setdefault("lookup_timeout_s", 0)
        all_configs, spec = [], None
        if draft_heads:
            layers = zip(NAMES, self.heads_of, strict=True)
            spec = UniformTypeKVCacheSpecs({name: FullAttentionSpec(num_kv_heads=count) for name, count in layers})
        for rank in range(ranks):
            configs = configs_of(
                "",
                extra={
                    "uri": None,
                    "model": None,
                    "host": None,
                    "handover": {"model": "m", "host": "1MB", "engine": ENGINE, **handover},
                },
                is_kv_producer=sends,
                is_kv_consumer=receives,
                rank=rank,
                tensor_parallel_size=ranks,
                speculative=None if draft is None else speculative_of(draft),
                kv_events=SimpleNamespace(enable_kv_cache_events=True) if events else None,
                further=further,
                spec=spec,
            )
            configs[0].kv_transfer_config.kv_role, configs[0].kv_transfer_config.engine_id = role, f"vllm-{seed}"
            all_configs.append(configs)
        self.caches_by_rank = []
        for rank in range(ranks):
            noise, caches = torch.Generator().manual_seed(100 * rank + seed), []
            for count in self.heads_of:
                inner = (count, BLOCK) if is_head_first else (BLOCK, count)
                layer = torch.randn((BLOCKS, *inner, 2 * DIM), generator=noise).to(device)
                caches.append(layer if is_head_first else layer.transpose(1, 2))
            self.caches_by_rank.append(caches)
        self.further = list(further)
        self.has_next_token_draft = draft in NEXT_TOKEN_DRAFTS
        self.tables: dict[str, list[int]] = {}
        self.further_tables: dict[str, list[list[int]]] = {}
        """Blocks by request, group behind the first one, and position; 0 where there is none."""
        self.failed: list[str] = []
        self.requests: dict[str, Any] = {}
        self.loaded: list[str] = []
        self.freed: list[str] = []
        self.invalid: set[int] = set()
        self.counts: dict[str, int] = {}
        self.preempted: set[str] = set()
        self.published: list[list[Any]] = []
        self.pool = SimpleNamespace(kv_event_queue=[])
        """vLLM's own blocks, as far as their events go."""
        self.scheduler = module.TidekvConnector(all_configs[0][0], KVConnectorRole.SCHEDULER, all_configs[0][1])
        self.workers = [module.TidekvConnector(one, KVConnectorRole.WORKER, other) for one, other in all_configs]
        addresses = {}
        for rank, worker in enumerate(self.workers):
            named = list(zip(NAMES, self.caches_by_rank[rank], strict=True))
            for group, spec in enumerate(self.further, 1):
                caches = self._views(self.caches_by_rank[rank], spec)
                named += zip(names_of(group), caches, strict=True)
            worker.register_kv_caches(dict(reversed(named)))
            if (address := worker.get_handshake_metadata()) is not None:
                addresses[rank] = pickle.loads(pickle.dumps(address))
        self.scheduler.bind_gpu_block_pool(self.pool)
        if addresses:
            self.scheduler.set_xfer_handshake_metadata(addresses)
        self.address = ",".join(addresses[rank].address for rank in sorted(addresses))
        """Where decode workers reach its prefill workers, as they tell vLLM; empty if it does not send."""
        self._ended: Counter[tuple[str, str]] = Counter()
        """Reports by kind and request: vLLM hears of one once every rank has reported it."""

    @property
    def worker(self) -> Any:
        """The worker of a vLLM that has one."""
        (worker,) = self.workers
        return worker

    @property
    def caches(self) -> list[torch.Tensor]:
        """Tensors of a vLLM that has one worker, by layer."""
        (caches,) = self.caches_by_rank
        return caches

    def add(self, request: Any, blocks: Sequence[int], *, computed: int = 0) -> int | None:
        """A new request; returns the tokens that the connector claims, whose restore the next step starts.

        None: the connector wants to be asked again.
        """
        self.requests[request.request_id] = request
        self.scheduler.on_new_request(request)
        return self.ask(request.request_id, blocks, computed=computed)

    def ask(self, name: str, blocks: Sequence[int], *, computed: int = 0) -> int | None:
        """As vLLM asks in each step for a request that holds no blocks; these are allocated if it gets an answer."""
        request, self.tables[name] = self.requests[name], []
        claimed, is_async = self.scheduler.get_num_new_matched_tokens(request, computed)
        assert is_async is bool(claimed)
        if claimed is None:
            return None
        self.tables[name] = list(blocks)
        allocated = SimpleNamespace(get_block_ids=lambda: self._table(name))
        self.scheduler.update_state_after_alloc(request, allocated, claimed)
        request.num_computed_tokens = computed
        return int(claimed)

    def step(self, scheduled: dict[str, int] | None = None) -> None:
        """One step, which computes some tokens of each scheduled request."""
        scheduled = scheduled or {}
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            preempted_req_ids=self.preempted,
            kv_connector_block_state=SimpleNamespace(get_block_ids=self._table),
        )
        self.preempted = set()
        # From one process to another.
        metadata = pickle.dumps(self.scheduler.build_connector_meta(output))
        freed, loaded, invalid, events = set[str](), set[str](), set[int](), []
        meta = None
        for rank, worker in enumerate(self.workers):
            worker.handle_preemptions(pickle.loads(metadata))
            worker.bind_connector_metadata(pickle.loads(metadata))
            for name, count in scheduled.items():
                self._forward(self.requests[name], count, rank)
            worker.start_load_kv(None)
            worker.wait_for_save()
            results = worker.get_transfer_results(set())
            freed |= self._by_all("freed", results.finished_sending)
            loaded |= self._by_all("loaded", results.finished_recving)
            self.failed += results.failed_recving
            invalid |= worker.get_block_ids_with_load_errors()
            found = pickle.loads(pickle.dumps(worker.build_connector_worker_meta()))
            meta = found if meta is None else meta if found is None else meta.aggregate(found)
            events.append(pickle.loads(pickle.dumps(worker.get_kv_connector_kv_cache_events())))
            worker.clear_connector_metadata()
            stats = worker.get_kv_connector_stats()
            for name, count in stats.reduce().items() if stats is not None else ():
                self.counts[name] = self.counts.get(name, 0) + count
        for name, count in scheduled.items():
            self.requests[name].num_computed_tokens += count
        self.scheduler.update_connector_output(
            SimpleNamespace(
                finished_recving=loaded,
                finished_sending=freed,
                invalid_block_ids=invalid,
                kv_cache_events=joined_events(events),
                kv_connector_worker_meta=meta,
            )
        )
        assert self.scheduler.get_kv_connector_stats() is None, "the workers count"
        own, self.pool.kv_event_queue = self.pool.kv_event_queue, []
        if batch := [*own, *self.scheduler.take_events()]:
            self.published.append(batch)
        self.freed += freed
        self.loaded += loaded
        self.invalid |= invalid

    def compute(self, name: str, *, chunk: int) -> None:
        """Compute the rest of a prompt in steps of `chunk` tokens; of a restored one the last token."""
        request = self.requests[name]
        if name in self.loaded and not self.invalid:
            request.num_computed_tokens = request.num_prompt_tokens - 1
        while (left := request.num_prompt_tokens - request.num_computed_tokens) > 0:
            self.step({name: min(chunk, left)})

    def preempt(self, name: str, blocks: Sequence[int]) -> None:
        """Take a request's blocks, which another one overwrites in the next step; later it has these."""
        old, self.tables[name] = self.tables[name], list(blocks)
        self.requests[name].num_computed_tokens = 0
        self.preempted = {name}
        self.step()
        self.overwrite(old)

    def overwrite(self, blocks: Sequence[int]) -> None:
        """Blocks that another request uses from now on."""
        for cache in (cache for caches in self.caches_by_rank for cache in caches):
            self.enqueue(partial(_overwrite, cache, list(blocks)))

    def finish(self, name: str) -> tuple[bool, dict[str, Any] | None]:
        """A request has finished, or was aborted."""
        held, params = self.scheduler.request_finished_all_groups(self.requests[name], self._table(name))
        return bool(held), params

    def answer(self, name: str, *, chunk: int) -> dict[str, Any]:
        """Compute a prompt in steps of `chunk` tokens and finish it; return what prefill's answer says of it."""
        self.compute(name, chunk=chunk)
        held, params = self.finish(name)
        assert held and params is not None
        return params

    def step_until(self, condition: Callable[[], object]) -> None:
        """Empty steps, as vLLM makes them while it waits."""
        until_s = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < until_s, "it did not happen"
            self.step()
            time.sleep(PAUSE_S)

    def clear(self) -> None:
        """vLLM's own prefix cache is reset, and the connector is not."""
        self.pool.kv_event_queue.append(AllBlocksCleared())

    def holds(self, name: str, tokens: Sequence[int], *, first: int = 0, next_token: int | None = None) -> bool:
        """Whether the blocks of a request have the KV of these tokens, from token `first` on; that of a draft that
        depends on the next token without the last one, unless that is known.
        """
        known = [*tokens, *([] if next_token is None else [next_token])]
        for rank, caches in enumerate(self.caches_by_rank):
            for layer, cache in enumerate(caches):
                expected = self._kv_of(known, layer, rank)[first : len(tokens)]
                rows = cache.cpu()[self.tables[name]].permute(0, 2, 1, 3).flatten(0, 1)[first:][: len(expected)]
                if not torch.equal(rows, expected):
                    return False
        return True

    def close(self) -> None:
        """Close both sides; a prefill first gives its decode workers a second to be gone.

        UCX may abort (stubs.c) if an agent ends while it disconnects from another one of the same process.
        """
        until_s = time.monotonic() + 1.0
        for worker in self.workers:
            for prefill in worker.connector_worker.prefills:
                while time.monotonic() < until_s and prefill.thread._loop is not None:
                    if prefill.thread._loop.is_closed or not prefill.thread.statistics()["peers"]:
                        break
                    time.sleep(PAUSE_S)
            worker.shutdown()
        self.scheduler.shutdown()

    def _kv_of(self, tokens: Sequence[int], layer: int, rank: int) -> torch.Tensor:
        is_draft = self.has_next_token_draft and layer == LAYERS - 1
        return (draft_kv_of if is_draft else kv_of)(tokens, layer, rank, heads=self.heads_of[layer])

    def _table(self, name: str) -> tuple[list[int], ...]:
        return (list(self.tables[name]), *map(list, self.further_tables.get(name, ())))

    def _views(self, caches: Sequence[torch.Tensor], spec: Any) -> list[torch.Tensor]:
        """The same memory as another group has it: a window like the full KV, a state in the first bytes of a block."""
        if isinstance(spec, SlidingWindowSpec):
            return list(caches)
        return [cache.view(torch.int8).flatten(1)[:, None, None, :STATE_BYTES] for cache in caches]

    def _by_all(self, kind: str, names: set[str] | None) -> set[str]:
        """Requests that with these reports all ranks have reported."""
        ended = set[str]()
        for name in names or ():
            self._ended[kind, name] += 1
            if self._ended[kind, name] == len(self.workers):
                del self._ended[kind, name]
                ended.add(name)
        return ended

    def _forward(self, request: Any, count: int, rank: int) -> None:
        first, table = request.num_computed_tokens, list(self.tables[request.request_id])
        # The draft gets the last token's next one as soon as it is sampled.
        known = [*request.all_token_ids, *(request.sampling_params.allowed_token_ids or [SAMPLED])]
        for layer, cache in enumerate(self.caches_by_rank[rank]):
            kv = self._kv_of(known, layer, rank).to(cache.device)
            self.enqueue(partial(_fill, cache, kv, table, range(first, first + count)))
        for group, spec in enumerate(self.further, 1):
            blocks = self.further_tables[request.request_id][group - 1]
            for layer, cache in enumerate(self._views(self.caches_by_rank[rank], spec)):
                tokens, last = request.prompt_token_ids, first + count
                if isinstance(spec, SlidingWindowSpec):
                    kv = kv_of(tokens, layer + LAYERS * group, rank, heads=self.heads_of[layer]).to(cache.device)
                    self.enqueue(partial(_fill, cache, kv, blocks, range(first, last)))
                else:
                    cache[blocks[-1]] = state_of(tokens[:last], layer)


def _fill(cache: torch.Tensor, kv: torch.Tensor, table: Sequence[int], places: range) -> None:
    for at in places:
        cache[table[at // BLOCK], :, at % BLOCK] = kv[at]


def _overwrite(cache: torch.Tensor, blocks: Sequence[int]) -> None:
    # Block by block: a list of blocks would be copied to a GPU, which waits for it.
    for block in blocks:
        cache[block].fill_(7.0)


@contextmanager
def started_vllms(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, *, transports: str = "tcp", **defaults: Any
) -> Iterator[Callable[..., HandoverVllm]]:
    """A call that starts a vLLM with a role and options, upon the contract; all end with the block.

    UCX's transport within a process aborts if one of its agents ends while another connects to it. Servers have one.
    """
    monkeypatch.setenv("UCX_TLS", transports)
    started: list[HandoverVllm] = []

    def start(role: str, **settings: Any) -> HandoverVllm:
        started.append(HandoverVllm(module, role, seed=len(started), **{**defaults, **settings}))
        return started[-1]

    yield start
    # Decode first: it waits for the end of what a prefill writes.
    for vllm in sorted(started, key=lambda vllm: vllm.role):
        vllm.close()
