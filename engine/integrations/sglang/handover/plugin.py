"""A plugin of SGLang that adds the transfer backend `tidekv`: entry point `sglang.srt.plugins`.

No file of SGLang is changed. Its hooks are those of HOOKS, and one name in its lists of backends. SGLang goes on
without a plugin or a hook that fails, so the backend's classes are only given out once all hooks have taken hold.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable
from typing import Any, Final, NamedTuple  # SGLang has no types.

from tidekv.engine.integrations.sglang.handover.requests import rename_before_flush
from tidekv.engine.integrations.sglang.handover.settings import BACKEND, VARIABLE, read_settings
from tidekv.engine.integrations.sglang.handover.tree import (
    allocate_behind_match,
    flush_before_reset,
    load_behind_match,
    offer_checkpoint,
)
from tidekv.engine.log import engine_log
from tidekv.states.errors import InvalidConfig

LOG = engine_log("tidekv.sglang")
FACTORY: Final = "sglang.srt.disaggregation.utils.get_kv_class"


class Hook(NamedTuple):
    """A function of SGLang, and what runs before, after or around it."""

    target: str
    kind: str
    """A member of SGLang's `HookType`, by its value."""
    run: Callable[..., object]


def open_decode(manager: Any, queue: Any) -> None:
    """Start the decode end once SGLang's queue has made its manager."""
    if hasattr(manager, "open_decode"):
        manager.open_decode(queue)


def open_prefill(manager: Any, queue: Any) -> None:
    """Start the prefill end once SGLang's queue has made its manager."""
    if hasattr(manager, "open_prefill"):
        manager.open_prefill(queue)


def give_request(decode_request: Any, queue: Any, request: Any, *more: Any, **named: Any) -> None:
    """Give a receiver the request that it was made for."""
    decode_request.kv_receiver.request = request


def attach_request(is_made: bool, queue: Any, request: Any, *more: Any, **named: Any) -> None:
    """Give a sender the request that it was made for."""
    attach = getattr(request.disagg_kv_sender, "attach", None)
    if is_made and attach is not None:
        attach(request)


def reap(scheduler: Any) -> None:
    """Unlock what is copied, once a pass of the scheduler."""
    kept = getattr(scheduler.tree_cache, "tidekv", None)
    if kept is not None:
        try:
            kept.reap()
        except Exception:
            LOG.exception("what is copied was not unlocked")


def rest(result: None, scheduler: Any) -> None:
    """Wait a moment for the engine, after a pass in which there are requests and nothing to compute."""
    manager = getattr(scheduler, "tidekv_manager", None)
    if manager is not None and not scheduler.is_fully_idle():
        try:
            manager.rest()
        except Exception:
            LOG.exception("a pass without work did not wait")


HOOKS: Final = (
    Hook("sglang.srt.disaggregation.decode.DecodePreallocQueue._init_kv_manager", "after", open_decode),
    Hook("sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue", "after", give_request),
    Hook("sglang.srt.disaggregation.decode.DecodePreallocQueue._pre_alloc", "around", allocate_behind_match),
    Hook("sglang.srt.managers.schedule_batch.Req.load_kv_cache", "around", load_behind_match),
    Hook("sglang.srt.disaggregation.decode.SchedulerDisaggregationDecodeMixin.process_decode_queue", "before", reap),
    Hook("sglang.srt.disaggregation.prefill.PrefillBootstrapQueue._init_kv_manager", "after", open_prefill),
    Hook("sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender", "after", attach_request),
    Hook("sglang.srt.managers.scheduler.Scheduler.on_idle", "after", rest),
    Hook("sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree", "after", offer_checkpoint),
    Hook("sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.reset", "before", flush_before_reset),
    Hook(
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        ".flush_cache_after_weight_update",
        "before",
        rename_before_flush,
    ),
)


def register() -> None:
    """Add the backend. Without settings only its name is known, and a server that asks for it is refused by name."""
    from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES, add_disagg_transfer_backend_choices
    from sglang.srt.disaggregation.utils import TransferBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_member(TransferBackend)
    HookRegistry.register(FACTORY, kv_class, HookType.AROUND)
    if VARIABLE in os.environ:
        for hook in HOOKS:
            HookRegistry.register(hook.target, hook.run, HookType(hook.kind))
    # Last: without a name in this list SGLang's command line refuses the backend.
    if BACKEND not in DISAGG_TRANSFER_BACKEND_CHOICES:
        add_disagg_transfer_backend_choices([BACKEND])


def add_member(enumeration: Any) -> None:
    """Add the backend to SGLang's enumeration, which has no public way to take a member. Idempotent."""
    if BACKEND in enumeration._value2member_map_:
        return
    member = object.__new__(enumeration)
    member._name_, member._value_ = BACKEND.upper(), BACKEND
    enumeration._member_map_[member._name_] = enumeration._value2member_map_[BACKEND] = member
    enumeration._member_names_.append(member._name_)
    if enumeration(BACKEND) is not member:
        raise InvalidConfig(f"{enumeration.__name__} of this SGLang takes no further member: {BACKEND} is not added")


def kv_class(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    """Return the classes of this backend, after the checks of a start; those of others as SGLang has them."""
    if getattr(transfer_backend, "value", None) != BACKEND or class_type.value == "kvargs":
        return original(transfer_backend, class_type)
    read_settings(os.environ)
    check_hooks()
    from tidekv.engine.integrations.sglang.handover.backend import CLASSES

    return CLASSES[class_type.value]


def check_hooks(hooks: tuple[Hook, ...] = HOOKS) -> None:
    """Raise InvalidConfig, which names each function of SGLang that a hook did not take hold of."""
    missing = [hook.target for hook in hooks if not is_hooked(hook)]
    if missing:
        raise InvalidConfig(
            f"transfer backend {BACKEND}: hooks did not take hold of {', '.join(missing)}; this SGLang is not a "
            "version that tidekv knows, or another plugin has replaced them"
        )


def is_hooked(hook: Hook) -> bool:
    """Whether the function that SGLang calls runs the hook: SGLang's wrappers have it in their closures."""
    try:
        found = pkgutil.resolve_name(hook.target)
    except (ImportError, AttributeError):
        return False
    if getattr(found, "__qualname__", "") != ".".join(hook.target.split(".")[-2:]):
        return False  # Inherited: the class has no function of this name any more.
    while found is not None:
        for cell in getattr(found, "__closure__", None) or ():
            try:
                if cell.cell_contents is hook.run:
                    return True
            except ValueError:
                continue
        found = getattr(found, "__wrapped__", None)
    return False
