"""What SGLang can be told to do that this transfer backend does not serve, refused at the start by name."""

from __future__ import annotations

from typing import Any, Final  # SGLang's objects have no types.

from tidekv.states.errors import InvalidConfig

WINDOWS: Final = "swa"
"""SGLang's name of KV in sliding windows, the only one beside the KV of all tokens that is handed over."""


def check_supported(args: Any, manager: Any) -> None:
    """Raise InvalidConfig, which names the option, for a server whose KV cannot be handed over."""
    sizes = {
        "--pp-size": manager.pp_size,
        "--attn-cp-size": manager.attn_cp_size,
        "--dcp-size": manager.dcp_size,
        "--dp-size": manager.system_dp_size,
        # Of replicas of the attention within a server; also what `--enable-dp-attention` makes of --dp-size.
        "--attn-dp-size": manager.attn_dp_size,
    }
    for option, size in sizes.items():
        if size != 1:
            raise InvalidConfig(f"transfer backend tidekv: {option} must be 1, not {size}")
    kinds = [kind for each in args.state_types if (kind := getattr(each, "value", str(each))) != WINDOWS]
    if kinds:
        raise InvalidConfig(
            f"transfer backend tidekv: this model keeps {', '.join(kinds)} beside its KV, which is not handed over; "
            "serve it with another transfer backend"
        )
    if args.num_draft_entries:
        raise InvalidConfig("transfer backend tidekv: KV of a draft model is not handed over; serve without one")
    if getattr(manager.server_args, "enable_memory_saver", False):
        raise InvalidConfig(
            "transfer backend tidekv: leave out --enable-memory-saver: memory that links and copies use is not released"
        )
    if manager.defer_decode_allocation:
        raise InvalidConfig(
            "transfer backend tidekv: --disaggregation-decode-allocation-policy must be early: prefill computes before "
            "decode asks in any case"
        )


def check_reads(queue: Any, manager: Any) -> None:
    """Raise InvalidConfig, which names the option, for a prefill server that cannot read from decode."""
    scheduler, where = queue.scheduler, f"{manager.settings.where}: engine.cache_peers.enabled at prefill"
    tree = scheduler.tree_cache
    peers = manager.settings.engine.cache_peers
    if not (manager.settings.dials or peers.ask or peers.allow):
        raise InvalidConfig(
            f"{where} needs engine.cache_peers.allow, the places where decode servers listen for it "
            '(their engine.cache_peers.listen), such as ["10.0.0.0/24:7100"]'
        )
    if manager.attn_tp_size > 1:
        raise InvalidConfig(f"{where} goes with --tp-size 1 only: each rank would have to read the same pages")
    if manager.kv_args.state_types:
        raise InvalidConfig(f"{where} goes without sliding windows, which decode does not keep: prefill computes them")
    for name in ("insert", "path_device_indices", "disable"):
        if not hasattr(tree, name):
            raise InvalidConfig(
                f"{where}: this SGLang has no {type(tree).__name__}.{name}, by which its tree takes what is read"
            )
    if tree.disable:
        raise InvalidConfig(f"{where} puts what it reads into SGLang's tree: leave out --disable-radix-cache")
    if getattr(manager.server_args, "optimistic_prefill_attempts", 0):
        raise InvalidConfig(
            f"{where}: leave out --optimistic-prefill-attempts, with which SGLang would not wait for it"
        )
    for option, is_set in (
        ("--enable-hierarchical-cache", getattr(scheduler, "enable_hierarchical_cache", False)),
        ("--enable-lmcache", getattr(scheduler, "enable_lmcache", False)),
        ("--enable-unified-cache-external-linker", getattr(tree, "linker", None) is not None),
    ):
        if is_set:
            raise InvalidConfig(f"{where}: leave out {option}, with which SGLang's tree has pages that are elsewhere")


def check_decode(queue: Any) -> None:
    """Raise InvalidConfig, which names the option, for a decode server that has a cache of its own behind its tree, or
    whose SGLang lacks what this backend changes.
    """
    scheduler = queue.scheduler
    if not hasattr(queue.tree_cache, "checkpoint_into_tree"):
        raise InvalidConfig(
            "transfer backend tidekv: decode needs --disaggregation-decode-enable-radix-cache, whose tree is the first "
            f"tier; it has {type(queue.tree_cache).__name__}"
        )
    for name, option in (
        ("enable_decode_hicache", "--enable-hierarchical-cache"),
        ("enable_unified_cache_external_linker", "--enable-unified-cache-external-linker"),
        ("enable_hisparse", "--enable-hisparse"),
    ):
        if getattr(scheduler, name, False):
            raise InvalidConfig(f"transfer backend tidekv has the tiers behind SGLang's tree: leave out {option}")
    for owner, place, name in (
        ("DecodePreallocQueue", queue, "_match_prefix_and_lock"),
        ("DecodePreallocQueue", queue, "_uses_swa_tail_prealloc"),
        ("UnifiedRadixCache", queue.tree_cache, "release_swa"),
    ):
        if not hasattr(place, name):
            raise InvalidConfig(
                f"transfer backend tidekv: this SGLang has no {owner}.{name}, by which a retracted request finds what "
                "the tree has of it"
            )
    for name in ("enable_deferred_kv_release", "deferred_kv_release_timeout"):
        if not hasattr(queue.transfer_queue, name):
            raise InvalidConfig(
                f"transfer backend tidekv: this SGLang has no DecodeTransferQueue.{name}, by which pages are held "
                "while anything may write to them"
            )
