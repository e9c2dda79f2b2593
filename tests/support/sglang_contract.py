"""What SGLang 0.5.23 has where the transfer backend `tidekv` touches it: small classes, made of its contract.

`modules()` puts them where SGLang's are imported from.
"""

from __future__ import annotations

import enum
import functools
import sys
import threading
import types
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch

OVER_SGLANG = {
    f"tidekv.engine.integrations.sglang.handover.{name}" for name in ("backend", "manager", "receiver", "sender")
}
"""Modules that derive from SGLang's classes."""
PAGE = 4
LAYERS, HEADS, DIM = 2, 2, 8
ROWS = 8
SLIDING_WINDOW = 8


class KVPoll:
    Failed, Bootstrapping, WaitingForInput, Transferring, Success = range(5)


class DisaggregationMode(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class KVTransferError(Exception):
    def __init__(self, bootstrap_room, failure_reason, is_from_another_rank=False):
        super().__init__(failure_reason)
        self.bootstrap_room, self.failure_reason = bootstrap_room, failure_reason
        self.is_from_another_rank = is_from_another_rank


SERVICES: dict[str, list[dict[str, Any]]] = {}
"""What bootstrap services have registered, by address: in place of HTTP."""
RECOMPUTES: list[dict[str, Any]] = []
"""Prompts that decode has asked another prefill to compute."""
ASKED: list[str] = []
"""Bootstrap services that were asked."""
SERVER_ARGS: dict[str, Any] = {"served_model_name": "tiny", "model_path": "m", "nnodes": 1}
"""Options of both servers."""
SCHEDULER: dict[str, Any] = {}
"""Further fields of schedulers, which follow from options."""


class CommonKVManager:
    pp_size = attn_cp_size = dcp_size = system_dp_size = attn_dp_size = attn_tp_size = 1
    attn_tp_rank = 0
    defer_decode_allocation = False
    local_ip = "127.0.0.1"
    bootstrap_addr = "127.0.0.1:8998"

    def __init__(self, args, disaggregation_mode, server_args, is_mla_backend=False):
        self.kv_args, self.server_args, self.is_mla_backend = args, server_args, is_mla_backend
        self.connection_lock, self.failure_lock = threading.Lock(), threading.Lock()
        self.connection_pool, self.prefill_info_table, self.failure_records = {}, {}, {}
        self.rank_port = 1
        if disaggregation_mode == DisaggregationMode.PREFILL:
            self.register_to_bootstrap()

    def register_to_bootstrap(self):
        own = {"rank_ip": self.local_ip, "rank_port": self.rank_port}
        if self.attn_tp_rank:
            SERVICES[self.bootstrap_addr].append(own)
            return
        if SERVICES:
            self.bootstrap_addr = "127.0.0.1:9000"
        SERVICES[self.bootstrap_addr] = [own]

    def _ensure_prefill_recompute_executor(self):
        return ThreadPoolExecutor(1)

    def submit_prefill_recompute(self, kv_receiver, payload):
        RECOMPUTES.append(payload)

    def try_ensure_parallel_info(self, bootstrap_addr):
        ASKED.append(bootstrap_addr)
        if bootstrap_addr not in SERVICES:
            return False
        self.prefill_info_table[bootstrap_addr] = SimpleNamespace(attn_tp_size=len(SERVICES[bootstrap_addr]))
        return True


class CommonKVReceiver:
    def __init__(self, mgr, bootstrap_addr, bootstrap_room=None):
        self.kv_mgr, self.bootstrap_addr, self.bootstrap_room = mgr, bootstrap_addr, bootstrap_room
        self.conclude_state, self.abort_notified = None, False

    def init(self, prefill_dp_rank):
        self.prefill_info, self.prefill_dp_rank = self.kv_mgr.prefill_info_table[self.bootstrap_addr], prefill_dp_rank
        self._setup_bootstrap_infos()

    def _get_bootstrap_info_from_server(self, prefill_dp_rank, prefill_cp_rank, target_tp_rank, target_pp_rank):
        return dict(SERVICES[self.bootstrap_addr][target_tp_rank])

    def clear(self):
        pass


class CommonKVSender:
    def __init__(self, mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank=False):
        self.kv_mgr, self.bootstrap_room, self.conclude_state = mgr, bootstrap_room, None
        self.curr_idx, self._transfer_metric = 0, SimpleNamespace(transfer_total_bytes=None)

    def init(self, num_kv_indices, aux_index=None):
        self.num_kv_indices, self.aux_index = num_kv_indices, aux_index

    def clear(self):
        pass


class CommonKVBootstrapServer:
    pass


class TransferBackend(enum.Enum):
    NIXL = "nixl"


class KVClassType(enum.Enum):
    KVARGS = "kvargs"
    MANAGER = "manager"
    SENDER = "sender"
    RECEIVER = "receiver"
    BOOTSTRAP_SERVER = "bootstrap_server"


def get_kv_class(transfer_backend, class_type):
    return f"{class_type.value} of {transfer_backend.value}"


class HookType(enum.Enum):
    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"


class HookRegistry:
    hooks: ClassVar[list[tuple[str, Any, HookType]]] = []

    @classmethod
    def register(cls, target, hook, hook_type):
        cls.hooks.append((target, hook, hook_type))

    @classmethod
    def apply_hooks(cls):
        """Wrap the targets that there are; others are passed over, as SGLang does but for a line in its log."""
        for target, hook, hook_type in cls.hooks:
            path, _, name = target.rpartition(".")
            owner = _owner(path)
            if hasattr(owner, name):
                setattr(owner, name, _wrapped(getattr(owner, name), hook, hook_type))


def _owner(path):
    if path in sys.modules:
        return sys.modules[path]
    module, _, name = path.rpartition(".")
    return getattr(sys.modules[module], name)


def _wrapped(inner, hook, hook_type):
    @functools.wraps(inner)
    def before(*args, **named):
        hook(*args, **named)
        return inner(*args, **named)

    @functools.wraps(inner)
    def after(*args, **named):
        result = inner(*args, **named)
        hook(result, *args, **named)
        return result

    @functools.wraps(inner)
    def around(*args, **named):
        return hook(inner, *args, **named)

    return {HookType.BEFORE: before, HookType.AFTER: after, HookType.AROUND: around}[hook_type]


class MHATokenToKVPool:
    """Keys and values of `pages` pages; page 0 is SGLang's own."""

    device = "cpu"
    """Where pools are made; for tests with a GPU."""

    def __init__(self, pages: int, heads: int = HEADS) -> None:
        self.page_size, self.dtype = PAGE, torch.float32
        shape = (pages * PAGE, heads, DIM)
        self.k_buffer = [torch.zeros(shape, device=self.device) for _ in range(LAYERS)]
        self.v_buffer = [torch.zeros(shape, device=self.device) for _ in range(LAYERS)]
        self.enqueue: Callable[[Callable[[], None]], None] = lambda work: work()
        """Puts work of the model on the stream of its forward."""

    def get_cpu_copy(self, indices):
        return [buffer[indices].clone() for buffer in (*self.k_buffer, *self.v_buffer)]

    def load_cpu_copy(self, copies, indices):
        for buffer, copy in zip((*self.k_buffer, *self.v_buffer), copies, strict=True):
            buffer[indices.long()] = copy

    def token(self, page: int, offset: int = 0) -> list[float]:
        """The first element of a token's K and V in each layer."""
        at = page * PAGE + offset
        return [float(buffer[at, 0, 0]) for buffer in (*self.k_buffer, *self.v_buffer)]

    def compute(self, tokens: list[int], pages: list[int]) -> None:
        """Write what a model would: values that depend on the token and its place."""
        self.enqueue(functools.partial(self._compute, list(tokens), list(pages)))

    def _compute(self, tokens: list[int], pages: list[int]) -> None:
        for place, token in enumerate(tokens):
            at = pages[place // PAGE] * PAGE + place % PAGE
            for number, buffer in enumerate((*self.k_buffer, *self.v_buffer)):
                buffer[at].fill_(token * 8 + number + place / 1024)

    def holds(self, tokens: list[int], pages: list[int]) -> bool:
        """Whether pages hold the KV of these tokens."""
        other = MHATokenToKVPool(len(self.k_buffer[0]) // PAGE)
        other.compute(tokens, pages)
        return all(
            torch.equal(
                ours[pages[place // PAGE] * PAGE + place % PAGE], theirs[pages[place // PAGE] * PAGE + place % PAGE]
            )
            for ours, theirs in zip((*self.k_buffer, *self.v_buffer), (*other.k_buffer, *other.v_buffer), strict=True)
            for place in range(len(tokens))
        )


class SWAKVPool:
    """Full KV in one pool and windows in another, whose places follow from those of the full KV."""

    def __init__(self, pages: int, heads: int = HEADS) -> None:
        self.page_size, self.dtype = PAGE, torch.float32
        self.full_kv_pool, self.swa_kv_pool = MHATokenToKVPool(pages, heads), MHATokenToKVPool(pages, heads)
        self.full_to_swa_index_mapping = torch.zeros(pages * PAGE, dtype=torch.int64)

    def map(self, pages: list[int], windows: list[int]) -> None:
        """Give full pages their pages of windows."""
        for page, window in zip(pages, windows, strict=True):
            self.full_to_swa_index_mapping[page * PAGE : (page + 1) * PAGE] = torch.arange(PAGE) + window * PAGE


class MetadataBuffers:
    def __init__(self) -> None:
        self.output_ids = torch.zeros((ROWS, 16), dtype=torch.int32)
        self.cached_tokens = torch.zeros((ROWS, 16), dtype=torch.int32)
        self.bootstrap_room = torch.zeros((ROWS, 8), dtype=torch.int64)

    def kv_args(self, pool: Any) -> SimpleNamespace:
        buffers = (self.output_ids, self.cached_tokens, self.bootstrap_room)
        return SimpleNamespace(
            aux_data_ptrs=[buffer.data_ptr() for buffer in buffers],
            aux_item_lens=[buffer[0].nbytes for buffer in buffers],
            state_types=["swa"] if isinstance(pool, SWAKVPool) else [],
            num_draft_entries=0,
            page_size=PAGE,
        )


def request(tokens: list[int], room: int, **more: Any) -> SimpleNamespace:
    """A request, as both schedulers have it."""
    fields = {
        "output_ids": array("q"),
        "extra_key": None,
        "cache_salt": None,
        "lora_id": None,
        "priority": None,
        "session": None,
        "skip_radix_cache_insert": False,
        "bootstrap_addr": CommonKVManager.bootstrap_addr,
    }
    made = SimpleNamespace(
        build_rebootstrap_payload=lambda: {"input_ids": tokens, "bootstrap_room": room},
        rid=f"r{room}",
        origin_input_ids=array("q", tokens),
        full_untruncated_fill_ids=array("q", tokens),
        bootstrap_room=room,
        kv=SimpleNamespace(req_pool_idx=room % ROWS, cache_protected_len=0, retraction_backup=None),
        last_node=f"node of {room}",
        **{**fields, **more},
    )
    made._compute_max_prefix_len = lambda length: max(min(length - 1, getattr(made, "logprob_start_len", length)), 0)

    def init_next_round_input(tree: Any, cow_mamba: bool) -> None:
        assert not cow_mamba
        made.full_untruncated_fill_ids = made.origin_input_ids + made.output_ids
        limit = made._compute_max_prefix_len(len(made.full_untruncated_fill_ids))
        made.last_node = tree.match(RadixKey(made.full_untruncated_fill_ids[:limit], made.extra_key, made.cache_salt))
        made.prefix_len = len(tree.paths[made.last_node])

    made.init_next_round_input = init_next_round_input
    return made


class RadixKey:
    def __init__(self, token_ids: Any, extra_key: Any = None, cache_salt: Any = None) -> None:
        self.token_ids, self.names = tuple(token_ids), (extra_key, cache_salt)


class InsertParams:
    def __init__(self, *, key: RadixKey, value: Any, prev_prefix_len: int, priority: int) -> None:
        self.key, self.value, self.prev_prefix_len = key, value.tolist(), prev_prefix_len


def evict_from_tree_cache(tree: Any, num_tokens: int) -> None:
    if tree.allocator.available_size() < num_tokens:
        tree.evict()


class Allocator:
    """Free pages of a prefill server."""

    page_size = PAGE

    def __init__(self, pages: int, translate: Any) -> None:
        self.translate_swa_indices_for_transfer = translate
        self.free_slots = list(range(PAGE, pages * PAGE))

    def available_size(self) -> int:
        return len(self.free_slots)

    def alloc(self, need_size: int) -> Any:
        if need_size > len(self.free_slots):
            return None
        given, self.free_slots = self.free_slots[:need_size], self.free_slots[need_size:]
        return torch.tensor(given, dtype=torch.int64)

    def free(self, slots: Any) -> None:
        assert not set(slots.tolist()) & set(self.free_slots)
        self.free_slots += slots.tolist()


class UnifiedRadixCache:
    """A tree that has what it is told to have; that of a prefill server has what is inserted."""

    page_size = PAGE
    disable = False

    def __init__(self, req_to_token_pool: Any, allocator: Any = None) -> None:
        self.req_to_token_pool, self.locked = req_to_token_pool, []
        self.allocator = allocator
        self.paths: dict[Any, list[int]] = {(): []}
        """By node, the slots of its tokens and of all before them."""
        self.matched: list[int] = []
        """Slots of the tokens that a match finds."""
        self.locked_windows: list[Any] = []
        """Locks that keep the windows of their nodes, too."""

    def checkpoint_into_tree(self, req, *, up_to):
        req.kv.cache_protected_len = up_to // PAGE * PAGE

    def reset(self):
        assert not self.locked, "pages are given away while they are read"
        self.paths = {(): []}

    def match(self, key: RadixKey) -> Any:
        """The node of the longest prefix, in full pages."""
        ends = range(len(key.token_ids) // PAGE * PAGE, 0, -PAGE)
        return next((node for end in ends if (node := (*key.names, key.token_ids[:end])) in self.paths), ())

    def insert(self, params: InsertParams) -> None:
        node = self.match(params.key)
        kept = self.paths[node]
        assert params.value[: params.prev_prefix_len] == kept[: params.prev_prefix_len]
        self.allocator.free(torch.tensor(params.value[params.prev_prefix_len : len(kept)], dtype=torch.int64))
        slots = kept + params.value[len(kept) :]
        for end in range(PAGE, len(slots) + 1, PAGE):
            self.paths[(*params.key.names, params.key.token_ids[:end])] = slots[:end]

    def evictable_size(self) -> int:
        # A lock of the root keeps nothing.
        return 0 if any(self.locked) else max(map(len, self.paths.values()))

    def evict(self) -> None:
        assert not any(self.locked)
        self.allocator.free(torch.tensor(max(self.paths.values(), key=len), dtype=torch.int64))
        self.paths = {(): []}

    def path_device_indices(self, node: Any) -> Any:
        return torch.tensor(self.paths[node], dtype=torch.int64)

    def lock(self, node):
        self.locked.append(node)
        self.locked_windows.append(node)
        return node

    def unlock(self, lock):
        self.locked.remove(lock)
        if lock in self.locked_windows:
            self.locked_windows.remove(lock)

    def release_swa(self, lock):
        self.locked_windows.remove(lock)


class Req:
    """The part of a request that copies KV back after a retraction; `self` is what `request` returns."""

    def load_kv_cache(self, req_to_token_pool, token_to_kv_pool_allocator):
        slots = req_to_token_pool.req_to_token[self.kv.req_pool_idx, : self.kv.kv_committed_len]
        token_to_kv_pool_allocator.load_cpu_copy(self.kv.retraction_backup.cpu_tensors, slots)
        self.kv.retraction_backup = None


def _pool(pages: int, heads: int, *, windows: bool) -> Any:
    return SWAKVPool(pages, heads) if windows else MHATokenToKVPool(pages, heads)


def _manager(queue: Any, mode: DisaggregationMode) -> Any:
    server_args = SimpleNamespace(**SERVER_ARGS)
    manager = _factory()("manager")(queue.metadata_buffers.kv_args(queue.token_to_kv_pool), mode, server_args, False)
    manager.attn_tp_rank, manager.attn_tp_size = queue.place
    return manager


def _scheduler(pool: Any, pages: int) -> SimpleNamespace:
    table = torch.zeros((ROWS, pages * PAGE), dtype=torch.int32)

    def translate(slots):
        return pool.full_to_swa_index_mapping[slots.long()]

    allocator = Allocator(pages, translate)
    rows = SimpleNamespace(req_to_token=table)
    tree = sys.modules["sglang.srt.mem_cache.unified_radix_cache"].UnifiedRadixCache
    return SimpleNamespace(
        is_fully_idle=lambda: False,
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: HEADS),
        attn_tp_cpu_group=None,
        sliding_window_size=SLIDING_WINDOW if isinstance(pool, SWAKVPool) else None,
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=allocator,
        tree_cache=tree(rows, allocator),
        **SCHEDULER,
    )


class PrefillBootstrapQueue:
    def __init__(self, pages: int = 64, *, windows: bool = False, rank: int = 0, ranks: int = 1) -> None:
        self.token_to_kv_pool = _pool(pages, HEADS // ranks, windows=windows)
        self.metadata_buffers, self.place = MetadataBuffers(), (rank, ranks)
        self.scheduler = _scheduler(self.token_to_kv_pool, pages)
        self.kv_manager = self._init_kv_manager()

    def _init_kv_manager(self):
        return _manager(self, DisaggregationMode.PREFILL)

    def create_sender(self, req, num_kv_heads):
        req.full_untruncated_fill_ids = array("q")  # Until SGLang looks for its prefix.
        req.disagg_kv_sender = _factory()("sender")(self.kv_manager, req.bootstrap_addr, req.bootstrap_room)
        return True


class DecodePreallocQueue:
    def __init__(self, pages: int = 64, *, windows: bool = False, rank: int = 0, ranks: int = 1) -> None:
        self.token_to_kv_pool = _pool(pages, HEADS // ranks, windows=windows)
        self.metadata_buffers, self.place = MetadataBuffers(), (rank, ranks)
        self.scheduler = _scheduler(self.token_to_kv_pool, pages)
        self.free_pages: list[int] = []
        self.req_to_token_pool = self.scheduler.req_to_token_pool
        self.tree_cache = self.scheduler.tree_cache
        self.transfer_queue = SimpleNamespace(enable_deferred_kv_release=False, deferred_kv_release_timeout=30.0)
        self.kv_manager = self._init_kv_manager()

    def _init_kv_manager(self):
        return _manager(self, DisaggregationMode.DECODE)

    def _create_receiver_and_enqueue(self, req, is_rebootstrap=False):
        receiver = _factory()("receiver")(self.kv_manager, req.bootstrap_addr, req.bootstrap_room)
        return SimpleNamespace(req=req, kv_receiver=receiver)

    def _match_prefix_and_lock(self, req):
        req.lock = self.tree_cache.lock(req.last_node)
        matched = torch.tensor(self.tree_cache.matched, dtype=torch.int32)
        return SimpleNamespace(prefix_indices=matched, l1_prefix_len=len(matched))

    def _uses_swa_tail_prealloc(self):
        return isinstance(self.token_to_kv_pool, SWAKVPool)

    def _pre_alloc(self, req, prefix_indices=None, prefix_len=None, total_prefix_len=None):
        prefix_len = prefix_len or 0
        if prefix_len and self._uses_swa_tail_prealloc():
            assert not self.tree_cache.locked_windows, "windows that are allocated again have no room"
        tokens = req.kv.kv_committed_len = len(req.origin_input_ids) + max(len(req.output_ids) - 1, 0)
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        if prefix_len:
            row[:prefix_len] = prefix_indices
        slots = [page * PAGE + offset for page in self.free_pages for offset in range(PAGE)][: tokens - prefix_len]
        row[prefix_len:tokens] = torch.tensor(slots, dtype=torch.int32)
        return row[prefix_len:tokens]

    def resume(self, req):
        """What `resume_retracted_reqs` does with one request."""
        self._pre_alloc(req)
        req_class = sys.modules["sglang.srt.managers.schedule_batch"].Req
        allocator = SimpleNamespace(load_cpu_copy=self.token_to_kv_pool.load_cpu_copy)
        req_class.load_kv_cache(req, self.req_to_token_pool, allocator)


class SchedulerDisaggregationDecodeMixin:
    def process_decode_queue(self):
        pass


class Scheduler:
    """The part of a scheduler that has nothing to do; `self` is what `_scheduler` returns."""

    def on_idle(self):
        pass


class SchedulerWeightUpdaterManager:
    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def flush_cache_after_weight_update(self, recv_req, success, message):
        if recv_req.flush_cache:
            self.scheduler.tree_cache.reset()
        return success, message


def _factory():
    utils = sys.modules["sglang.srt.disaggregation.utils"]
    return lambda kind: utils.get_kv_class(utils.TransferBackend("tidekv"), utils.KVClassType(kind))


@contextmanager
def modules(*, without: str = "") -> Iterator[None]:
    """SGLang's modules, with these classes in them; `without` names one function that this SGLang does not have."""
    contents: dict[str, dict[str, Any]] = {
        "sglang.srt.disaggregation.base.conn": {"KVPoll": KVPoll},
        "sglang.srt.disaggregation.common.conn": {
            each.__name__: each
            for each in (CommonKVManager, CommonKVReceiver, CommonKVSender, CommonKVBootstrapServer, KVTransferError)
        },
        "sglang.srt.disaggregation.utils": {
            "DisaggregationMode": DisaggregationMode,
            "TransferBackend": enum.Enum("TransferBackend", {"NIXL": "nixl"}),
            "KVClassType": KVClassType,
            "get_kv_class": get_kv_class,
        },
        "sglang.srt.disaggregation.decode": {
            "DecodePreallocQueue": _copy(DecodePreallocQueue),
            "SchedulerDisaggregationDecodeMixin": _copy(SchedulerDisaggregationDecodeMixin),
        },
        "sglang.srt.disaggregation.prefill": {"PrefillBootstrapQueue": _copy(PrefillBootstrapQueue)},
        "sglang.srt.mem_cache.base_prefix_cache": {"InsertParams": InsertParams},
        "sglang.srt.mem_cache.radix_cache": {"RadixKey": RadixKey},
        "sglang.srt.mem_cache.common": {"evict_from_tree_cache": evict_from_tree_cache},
        "sglang.srt.mem_cache.unified_radix_cache": {"UnifiedRadixCache": _copy(UnifiedRadixCache)},
        "sglang.srt.managers.schedule_batch": {"Req": _copy(Req)},
        "sglang.srt.managers.scheduler": {"Scheduler": _copy(Scheduler)},
        "sglang.srt.managers.scheduler_components.weight_updater": {
            "SchedulerWeightUpdaterManager": _copy(SchedulerWeightUpdaterManager)
        },
        "sglang.srt.arg_groups.choices": {"DISAGG_TRANSFER_BACKEND_CHOICES": ["nixl"]},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
    }
    choices = contents["sglang.srt.arg_groups.choices"]
    choices["add_disagg_transfer_backend_choices"] = choices["DISAGG_TRANSFER_BACKEND_CHOICES"].extend
    before = dict(sys.modules)
    for name, content in contents.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            parent = ".".join(parts[:end])
            if parent not in sys.modules:
                sys.modules[parent] = ModuleType(parent)
                sys.modules[parent].__path__ = []
                if end > 1:
                    setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[parent])
        vars(sys.modules[name]).update(content)
    if without:
        path, _, function = without.rpartition(".")
        delattr(_owner(path), function)
    HookRegistry.hooks = []
    ASKED.clear()
    RECOMPUTES.clear()
    SERVICES.clear()
    try:
        yield
    finally:
        for name in set(sys.modules) - set(before):
            if name.startswith("sglang") or name in OVER_SGLANG:
                del sys.modules[name]


def _copy(cls: type) -> type:
    """A class whose functions can be replaced without a change to the original, also to its own constructor."""
    return types.new_class(cls.__name__, cls.__bases__, exec_body=lambda body: body.update(_body_of(cls)))


def _body_of(cls: type) -> dict[str, Any]:
    return {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
