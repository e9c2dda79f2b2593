"""KV hints that come with vLLM's requests, as envelopes for the decode engine (`docs/hints.md`).

A request carries them in `kv_hints`, vLLM's own envelope, or in `kv_transfer_params["kv_hints"]`, for front ends that
have no field for it. An action that names no prefix means the request's own prompt. Of those, what holds or ranks pages
in host memory waits until the request has ended and its blocks are there. `kv.fetch` goes with the restore: it names a
peer for it, as `remote_kv_source` in `kv_transfer_params` does, the form of vLLM's own p2p tier.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, cast  # vLLM's requests are not typed here: tests and type checks go without vLLM.

import msgspec

from tidekv.states.errors import InvalidConfig, InvalidRequest
from tidekv.states.validation import host_and_port
from tidekv.transports.control.addresses import address_of_rank

TARGETS: Final = ("token_ids", "block_hashes", "session")
AT_THE_END: Final = ("kv.pin", "kv.retain", "kv.demote")
"""Actions on pages that the request itself brings to host memory, when it ends."""
FETCH: Final = "kv.fetch"
MALFORMED: Final = (TypeError, KeyError, AttributeError, RecursionError)
"""Exceptions for what is no envelope; one that is nested too deeply is none either."""
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
    except MALFORMED:
        return {"no envelope": type(given).__name__}, None
    now = [action for action, is_late in named if not is_late and action.get("action_type") != FETCH]
    late = [action for action, is_late in named if is_late]
    return ({**envelope, "actions": now} if now else None, {**envelope, "actions": late} if late else None)


def fetches_of(request: Any) -> Envelope | None:
    """Return an envelope with the peers that a request names for its restore; None for none.

    Whether they may be asked is checked by the engine. What is malformed is left out: `hints_of` has it counted.
    """
    params = request.kv_transfer_params or {}
    actions: list[Any] = []
    try:
        given = msgspec.to_builtins(getattr(request, "kv_hints", None) or params.get("kv_hints"))
        actions += [action for action in given["actions"] if action.get("action_type") == FETCH]
    except MALFORMED:
        given = {}
    source = params.get("remote_kv_source")
    if isinstance(source, Mapping):
        host, port = str(source.get("remote_host")), str(source.get("remote_port"))
        endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        payload = {"source_control_endpoint": endpoint}
        actions.append(
            {"action_id": "remote_kv_source", "action_type": FETCH, "action_version": "1.0", "payload": payload}
        )
    return {"protocol_version": "0.1", "message_id": "", **given, "actions": actions} if actions else None


def fetches_at_rank(envelope: Mapping[str, object] | None, rank: int, ranks: int) -> Mapping[str, object] | None:
    """Return an envelope of `fetches_of` with the addresses of the peers' ranks at this place. What is no peer of as
    many ranks is left as it is: the engine refuses it.
    """
    if envelope is None or ranks == 1:
        return envelope
    actions: list[Any] = []
    for action in cast("list[Envelope]", envelope["actions"]):
        with suppress(InvalidRequest, KeyError, TypeError, AttributeError):
            endpoint = action["payload"]["source_control_endpoint"].removeprefix("tcp://")
            own = address_of_rank(endpoint, rank, ranks)
            action = {**action, "payload": {**action["payload"], "source_control_endpoint": own}}
        actions.append(action)
    return {**envelope, "actions": actions}


def tokens_at_peer(request: Any) -> int:
    """Return how many tokens of its prompt a request says to be in the host memory that `remote_kv_source` names."""
    source = (request.kv_transfer_params or {}).get("remote_kv_source")
    tokens = source.get("tokens") if isinstance(source, Mapping) else None
    return tokens if isinstance(tokens, int) and tokens > 0 else 0


def source_at(address: str, tokens: int) -> dict[str, Any]:
    """Return the parameters by which a later request names that so many of its tokens are in host memory here."""
    host, port = host_and_port(address, "listen", InvalidConfig)
    return {"remote_kv_source": {"remote_host": host, "remote_port": port, "tokens": tokens}}


def _with_target(action: Any, request: Any, namespace: str) -> tuple[Any, bool]:
    """Return the action with its prefix, and whether it is for the end of the request."""
    payload = action["payload"]
    if any(payload.get(target) is not None for target in TARGETS):
        return action, False
    own = {**payload, "token_ids": list(request.prompt_token_ids or ()), "namespace": namespace}
    return {**action, "payload": own}, action.get("action_type") in AT_THE_END
