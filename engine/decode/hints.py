"""KV hints: the published envelope, from an orchestrator, as facts for the core.

    envelope    protocol_version, message_id, actions
    action      action_id, action_type, action_version, payload

A hint never changes an answer. An action of an unknown type or version is rejected and counted, and so is one whose
payload is none; only an envelope that is none is an error of the caller.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import Meta

from tidekv.backends.keys.chain import TOKEN_BYTES, pack_tokens
from tidekv.engine.config.engine_config import PEERS_MAX
from tidekv.engine.decode.values import HintedPeers
from tidekv.states import events
from tidekv.states.errors import EngineClosed, InvalidRequest
from tidekv.states.validation import PlainText, Seconds, host_and_port, short
from tidekv.transports.control.addresses import Dials

if TYPE_CHECKING:
    from tidekv.engine.decode.arrivals import Arrivals
    from tidekv.engine.decode.runtime import Runtime

VERSIONS: Final = ("0.1", "1.0")
"""Versions of the envelope."""
ACTION_VERSION: Final = "1.0"
ACTIONS: Final = {
    "kv.prefetch": "prefetch",
    "kv.demote": "demote",
    "kv.pin": "pin",
    "kv.unpin": "unpin",
    "kv.retain": "retain",
}
FETCH: Final = "kv.fetch"
"""The action that names a peer for the request that it came with."""
ACTIONS_MAX: Final = 64
SESSIONS_MAX: Final = 1024
SESSION_BYTES_MAX: Final = 64 << 20
"""Maximum bytes of the prompts that are remembered by session."""
PREFETCH_S: Final = 30.0
"""Time of a prefetch that names none."""

Text = Annotated[str, Meta(max_length=512)]


class HintAction(msgspec.Struct, frozen=True):
    """One action. Fields that are not known here are left out."""

    action_id: Text
    action_type: Text
    action_version: Text
    payload: dict[str, Any]


class HintEnvelope(msgspec.Struct, frozen=True):
    """Actions in order."""

    protocol_version: Text
    message_id: Text
    actions: Annotated[list[HintAction], Meta(max_length=ACTIONS_MAX)]


class HintPayload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which prefix, by one of `token_ids`, `block_hashes` or `session`, and how."""

    token_ids: list[int] | None = None
    block_hashes: list[int] | None = None
    session: PlainText | None = None
    range: tuple[int, int] | None = None
    """Of a session: tokens [first, end). Prefixes begin at 0, so only the end counts."""
    namespace: PlainText = ""
    lora_name: PlainText = ""
    destination: str = "host"
    to: str = "host"
    tier: str = "host"
    ttl_ms: Annotated[int, Meta(ge=1)] | None = None
    deadline_ms: Annotated[int, Meta(ge=1)] | None = None
    max_bytes: Annotated[int, Meta(ge=0)] | None = None
    priority: int = 0


class FetchPayload(msgspec.Struct, frozen=True):
    """Payload of `kv.fetch`. The hashes of blocks that come with it are not read: the peer answers with what it has."""

    source_control_endpoint: Text
    """tcp://HOST:PORT, or HOST:PORT."""
    mode: Text = "copy"


@dataclass(frozen=True, slots=True)
class HintOutcome:
    """What became of one action."""

    action_id: str
    outcome: str
    """One of "accepted", "clipped" (for fewer pages than meant), "deferred" (they are in use), "missing" (they are
    not here), and "rejected" (unknown, invalid, or beyond the limits).
    """
    tokens: int = 0
    """Tokens that are concerned."""
    cause: str = ""
    """Why it was rejected, as far as it is known here."""


class Sessions:
    """The latest prompt of each session, bounded in number and bytes; the one used longest ago goes first."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[str, tuple[str, bytes]] = OrderedDict()
        self._bytes = 0

    def note(self, session: str, namespace: str, packed: bytes) -> None:
        """Remember the prompt of a session."""
        self._bytes -= len(self._prompts.pop(session, ("", b""))[1])
        self._prompts[session] = namespace, packed
        self._bytes += len(packed)
        while len(self._prompts) > SESSIONS_MAX or self._bytes > SESSION_BYTES_MAX:
            _, (_, gone) = self._prompts.popitem(last=False)
            self._bytes -= len(gone)

    def prompt(self, session: str) -> tuple[str, bytes]:
        """Return the joined namespace and packed prompt of a session; nothing for an unknown one."""
        return self._prompts.get(session, ("", b""))


class HintCalls:
    """Takes envelopes for one engine."""

    def __init__(self, runtime: Runtime, arrivals: Arrivals) -> None:
        self._runtime = runtime
        self._arrivals = arrivals
        group = runtime.rank_group
        ranks = 1 if group is None else group.ranks
        self._is_first = group is None or not group.rank
        peers = runtime.config.cache_peers
        self._fetched_from = Dials.parse(one for rank in range(ranks) for one in peers.dials_of(rank, ranks))
        self.sessions = Sessions()
        self.counts: Counter[tuple[str, str]] = Counter()
        """Actions by type and outcome; unknown types count as "other"."""

    async def take(self, envelope: object, *, peers: HintedPeers | None = None) -> list[HintOutcome]:
        """Act on each action in order. `peers`, with the hints of a request, gets those that they name for it; of its
        other actions the first rank takes care for all.

        Raises InvalidRequest for what is no envelope.
        """
        try:
            read = msgspec.convert(msgspec.to_builtins(envelope), HintEnvelope)
        except (msgspec.ValidationError, TypeError, RecursionError) as error:
            raise InvalidRequest(f"this is no envelope of KV hints: {error}") from None
        actions = read.actions
        if peers is not None and not self._is_first:
            actions = [action for action in actions if action.action_type == FETCH]
        if read.protocol_version not in VERSIONS:
            outcomes = [
                HintOutcome(each.action_id, "rejected", cause=f"protocol {short(read.protocol_version)}")
                for each in actions
            ]
        else:
            outcomes = [
                self._name_peer(action, peers) if action.action_type == FETCH else await self._act(action)
                for action in actions
            ]
        for action, outcome in zip(actions, outcomes, strict=True):
            kind = action.action_type if action.action_type in ACTIONS or action.action_type == FETCH else "other"
            self.counts[kind, outcome.outcome] += 1
        return outcomes

    async def _act(self, action: HintAction) -> HintOutcome:
        def rejected(cause: str) -> HintOutcome:
            return HintOutcome(action.action_id, "rejected", cause=cause)

        if action.action_type not in ACTIONS or action.action_version != ACTION_VERSION:
            return rejected(f"{short(action.action_type)} {short(action.action_version)} is not known")
        try:
            payload = msgspec.convert(action.payload, HintPayload)
            namespace, keys = await self._prefix(payload)
        except (msgspec.ValidationError, InvalidRequest) as error:
            return rejected(str(error))
        config, kind = self._runtime.config, ACTIONS[action.action_type]
        tier = {"prefetch": payload.destination, "demote": payload.to, "pin": payload.tier}.get(kind, "host")
        if tier != "host" and (kind, tier) != ("demote", "storage"):
            return rejected(f"{kind} to {short(tier)}: device memory belongs to requests")
        if config.device == "lent" and kind == "demote" and tier == "host":
            return rejected("device pages are lent")
        if self._runtime.host is None:
            return rejected("there is no host memory")
        if not keys:
            return HintOutcome(action.action_id, "missing")
        settings = self._runtime.core.settings
        pages_max = int(config.hints.pin_share * settings.host_pages)
        if payload.max_bytes is not None:
            count = payload.max_bytes // self._runtime.host.memory.page_bytes
            keys = keys[: count * settings.key_bytes]
            if not keys:
                return HintOutcome(action.action_id, "clipped")
        asked_ms = payload.ttl_ms if kind == "pin" else payload.deadline_ms
        if kind == "pin" and asked_ms is None:
            return rejected("a pin needs ttl_ms")
        # Bounded before the division: an int may be more than a float can be.
        ttl_s: Seconds = PREFETCH_S if asked_ms is None else min(asked_ms, 1000 * config.hints.ttl_s_max) / 1000
        call, front = self._arrivals.next_number(), self._runtime.front
        done = self._runtime.calls.expect_hint(call)
        try:
            front.post(
                events.HintReceived(
                    at_s=front.clock(),
                    call=call,
                    action=kind,
                    namespace=namespace,
                    keys=keys,
                    tier=tier,
                    ttl_s=min(ttl_s, config.hints.ttl_s_max),
                    pages_max=pages_max,
                )
            )
        except BaseException:
            self._runtime.calls.unexpect_hint(call)
            raise
        answer = await done
        return HintOutcome(action.action_id, answer.outcome, answer.page_count * settings.page_size)

    def _name_peer(self, action: HintAction, peers: HintedPeers | None) -> HintOutcome:
        """Add the peer of a `kv.fetch` to those of its request, if the options allow its address."""
        try:
            if action.action_version != ACTION_VERSION:
                raise InvalidRequest(f"{FETCH} {short(action.action_version)} is not known")
            payload = msgspec.convert(action.payload, FetchPayload)
            if payload.mode != "copy":
                raise InvalidRequest(f"mode {short(payload.mode)} is not known")
            if peers is None:
                raise InvalidRequest(f"{FETCH} comes with a request, which reads from the peer")
            if self._runtime.peers is None:
                raise InvalidRequest("this engine reads from no peers: set cache_peers.enabled")
            address = payload.source_control_endpoint.removeprefix("tcp://")
            # The address of the first rank, or of all of them.
            host_and_port(address.partition(",")[0], "source_control_endpoint")
            # The first rank's word is that of all: it answers for what the others dial.
            for one in self._runtime.peers.addresses_of(address):
                if not self._fetched_from.allows(one):
                    raise InvalidRequest(f"{short(one)} is not in cache_peers.allow")
            self._runtime.peers.check_peer(address)
        except (msgspec.ValidationError, InvalidRequest) as error:
            if peers is not None and len(peers.refused) < PEERS_MAX:
                peers.refused.append(str(error))
            return HintOutcome(action.action_id, "rejected", cause=str(error))
        if address not in peers.allowed and len(peers.allowed) < PEERS_MAX:
            peers.allowed.append(address)
        return HintOutcome(action.action_id, "accepted")

    async def _prefix(self, payload: HintPayload) -> tuple[str, bytes]:
        """Return the joined namespace and the keys of the prefix that is meant; no keys if it is not known here. Raises
        InvalidRequest.
        """
        runtime = self._runtime
        given = [each is not None for each in (payload.token_ids, payload.block_hashes, payload.session)]
        if sum(given) != 1:
            raise InvalidRequest("name the prefix by one of token_ids, block_hashes and session")
        if payload.block_hashes is not None:
            return await self._by_hashes(payload.block_hashes)
        if payload.session is not None:
            namespace, packed = self.sessions.prompt(payload.session)
            if payload.range is not None:
                packed = packed[: max(payload.range[1], 0) * TOKEN_BYTES]
        else:
            packed = pack_tokens(payload.token_ids or [], vocabulary=runtime.config.vocabulary or None)
            namespace = self._arrivals.namespace(payload.namespace, payload.lora_name)
        return namespace, runtime.prompt_keys.page_keys.of(packed)

    async def _by_hashes(self, hashes: Sequence[int]) -> tuple[str, bytes]:
        watcher = self._runtime.kv_event_watcher
        if watcher is None:
            raise InvalidRequest("block_hashes are those of KV events, which are disabled: set kv_events.endpoint")
        try:
            (found,) = await watcher.keys_of([hashes])
        except TimeoutError:
            raise InvalidRequest("block_hashes could not be resolved in time: KV events are behind") from None
        return found


async def take_of_request(calls: HintCalls, hints: Mapping[str, object] | None) -> HintedPeers | None:
    """Act on the hints of a request; returns the peers that they name. What is no envelope is counted, and nothing
    else.
    """
    if hints is None:
        return None
    peers = HintedPeers()
    try:
        await calls.take(hints, peers=peers)
    except (InvalidRequest, EngineClosed):
        calls.counts["other", "rejected"] += 1
    return peers
