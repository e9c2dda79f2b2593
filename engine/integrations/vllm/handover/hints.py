"""KV hints that come with vLLM's requests, as envelopes for the decode engine (`docs/hints.md`).

A request carries them in `kv_hints`, vLLM's own envelope, or in `kv_transfer_params["kv_hints"]`, for front ends that
have no field for it. An action that names no prefix means the request's own prompt. Of those, what holds or ranks pages
in host memory waits until the request has ended and its blocks are there.
"""

from __future__ import annotations

from typing import Any, Final  # vLLM's requests are not typed here: tests and type checks go without vLLM.

import msgspec

TARGETS: Final = ("token_ids", "block_hashes", "session")
AT_THE_END: Final = ("kv.pin", "kv.retain", "kv.demote")
"""Actions on pages that the request itself brings to host memory, when it ends."""
Envelope = dict[str, Any]


def hints_of(request: Any, namespace: str) -> tuple[Envelope | None, Envelope | None]:
    """Return the envelopes to act on when a request arrives, and when it has ended; None for none.

    `namespace`: that of the request's pages. What is no envelope is returned as it is: the engine refuses it.
    """
    given = getattr(request, "kv_hints", None) or (request.kv_transfer_params or {}).get("kv_hints")
    if given is None:
        return None, None
    try:
        envelope = msgspec.to_builtins(given)
        actions = envelope["actions"]
        named = [_with_target(action, request, namespace) for action in actions]
    except (TypeError, KeyError, AttributeError):
        return {"no envelope": str(given)[:200]}, None
    now = [action for action, is_late in named if not is_late]
    late = [action for action, is_late in named if is_late]
    return ({**envelope, "actions": now} if now else None, {**envelope, "actions": late} if late else None)


def _with_target(action: Any, request: Any, namespace: str) -> tuple[Any, bool]:
    """Return the action with its prefix, and whether it is for the end of the request."""
    payload = action["payload"]
    if any(payload.get(target) is not None for target in TARGETS):
        return action, False
    own = {**payload, "token_ids": list(request.prompt_token_ids or ()), "namespace": namespace}
    return {**action, "payload": own}, action.get("action_type") in AT_THE_END
