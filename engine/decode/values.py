"""Arguments and results of the decode engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from tidekv.engine.config.engine_config import PEERS_MAX
from tidekv.states.errors import InvalidRequest
from tidekv.states.handover.prompt_digest import PromptDigest
from tidekv.states.validation import Count, PlainText, Seconds, check_fields, checked, short
from tidekv.transports.wire import check_name

if TYPE_CHECKING:
    from tidekv.backends.keys.chain import Tokens
    from tidekv.engine.decode.component_pages import ReadyComponent
    from tidekv.engine.decode.layers import LayerProgress
    from tidekv.states.commands import Fallback
else:
    Tokens = Any  # Packing the tokens checks each of them.

"""Maximum peers that a request names."""
PRIORITY_MAX = 1_000_000
Priority = Annotated[int, Meta(ge=-PRIORITY_MAX, le=PRIORITY_MAX)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRequest:
    """Request to restore a prompt's KV. Raises InvalidRequest, which names the field and the allowed values."""

    request_id: str
    """Unique among live requests: 1 to 512 printable characters."""
    tokens: Tokens
    """A sequence of ints, an array (numpy, torch in host memory), or packed little-endian u32 bytes (fastest)."""
    prefill: str | Sequence[str]
    """Address of the prefill worker, or several, tried in order when one is lost. A worker of several ranks is named by
    the addresses of all of them, in order, joined by commas; the same on all ranks of a decode instance. None at all,
    `()`, is for `restore_into` only: host memory and storage serve the prompt, as far as they have it.
    """
    max_new_tokens: Count = 0
    """Maximum tokens to be generated, the first one included; 0 if it is unknown. No device page is held in reserve for
    more. `grow` beyond it is possible, without reserve.
    """
    deadline_s: Seconds | None = None
    """Maximum time of the restore, from the call on. None: the engine's `default_deadline_s`."""
    priority: Priority = 0
    """Requests of higher priority are admitted first; every `ageing_s` seconds of waiting count as one step."""
    namespace: PlainText = ""
    """Namespace of the cache; pages of another namespace never match."""
    lora_name: PlainText = ""
    """Name of the LoRA adapter that computes the request; KV of another one, or of none, never matches."""
    cache: bool = True
    """False inserts nothing in the cache (warm-up, hidden tokens)."""
    session: PlainText = ""
    """Name of the conversation, by which later hints may mean this prompt. Empty: it is not remembered."""
    kv_hints: Mapping[str, object] | None = None
    """KV hints that came with the request, as a mapping (see `DecodeEngine.hint`). They are acted on before it;
    what is malformed in them is counted, and changes nothing.
    """
    send_prompt: bool = False
    """Send the tokens to prefill with the promise; needed if no router brings them there."""
    prompt_digest: PromptDigest | None = None
    """Digest of the prompt, if prefill knows it under another namespace than this engine. None: that of `tokens` in
    `namespace`, with `lora_name`, and in the namespace of the engine. A prefill with storage does not store a prompt
    with one.
    """
    peers: Sequence[str] = ()
    """Addresses of decode workers that may have the prompt in their host memory (`DecodeEngine.peer_address`), 8 at
    most. The first one that is not in pause after a failure is asked for the full pages that device, host and storage
    do not have; prefill sends what it does not. It needs `cache_peers.enabled`. Peers that `kv.fetch` in `kv_hints`
    names come before these, those of `cache_peers.ask` after them.
    """
    key_seed: bytes | None = None
    """For a worker that does not know the name of the namespace: what begins the keys of its pages, as a decode worker
    has sent it with a promise; 32 bytes, or none. In place of `namespace` and `lora_name`.
    """
    early: bool = False
    """Return from `restore` when the first layer of all pages is in place; `ReadyRequest.wait_layer` waits for each
    further one. Windows and records are in place with the first layer. With ranks, a layer is in place once all ranks
    have it; the same on all ranks.
    """
    next_token: Count | None = None
    """Token behind `tokens`, if the caller knows it: with `bigram_keys` it names a last page that the prompt fills,
    which host memory and storage may then serve. For `restore_into` only.
    """

    def __post_init__(self) -> None:
        check_fields(self, where="" if not isinstance(self.request_id, str) else f"request {short(self.request_id)}: ")
        try:
            check_name(self.request_id)
        except InvalidRequest as error:
            raise InvalidRequest(f"request_id: {error}") from None
        # What is in it is checked when it is packed; what can be no tokens at all is refused where it is written.
        if isinstance(self.tokens, str) or not hasattr(self.tokens, "__len__"):
            raise InvalidRequest(
                f"request {self.request_id!r}: tokens must be a sequence of ints, an array of integers, or packed "
                f"little-endian u32 bytes, not {short(self.tokens)}"
            )
        if len(self.peers) > PEERS_MAX or not all(self.peers):
            raise InvalidRequest(
                f"request {self.request_id!r}: peers must be at most {PEERS_MAX} addresses, not {short(self.peers)}"
            )
        if self.key_seed is not None and len(self.key_seed) not in (0, 32):
            raise InvalidRequest(
                f"request {self.request_id!r}: key_seed must have 32 bytes, or none, not {len(self.key_seed)}"
            )
        ranks = [address.split(",") for address in self.prefills]
        if any(len(set(addresses)) < len(addresses) or "" in addresses for addresses in ranks):
            raise InvalidRequest(
                f"request {self.request_id!r}: prefill must be one address or more, each with all ranks of a worker "
                f"once, joined by commas, not {short(self.prefill)}"
            )

    @property
    def prefills(self) -> tuple[str, ...]:
        """Addresses of the prefill workers to try, in order."""
        return (self.prefill,) if isinstance(self.prefill, str) else tuple(self.prefill)


@dataclass(slots=True)
class HintedPeers:
    """The peers that hints of a request name, at most PEERS_MAX."""

    allowed: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Why others are not asked."""


@dataclass(frozen=True, slots=True, eq=False)
class RecomputeJob:
    """Work for the engine's caller to compute, because no prefill is left."""

    request: DecodeRequest
    pages: npt.NDArray[np.int32]
    """The page table of the whole prompt. Pages before `start_token` hold their KV; the others are to be written."""
    start_token: int
    packed_tokens: bytes = field(repr=False)
    """The prompt, as packed little-endian u32."""
    component_pages: Mapping[str, ReadyComponent] = field(default_factory=dict)
    """By component, the pages for its window or state at the prompt's end; its own ones are not written yet."""
    resume_from: Mapping[str, ReadyComponent] = field(default_factory=dict)
    """By component, its window or record before `start_token`, from which the computation continues; without pages if
    that is 0. They are shared, and only read: `own` is empty.
    """
    snapshots: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """By state, pages of its device pool by numbers of tokens: the computation must write the record to each of them as
    it is after that many tokens. Empty unless `SnapshotOptions.per_request` is set.
    """


Recompute = Callable[[RecomputeJob], Awaitable["tuple[int, Mapping[str, object]]"]]
"""Writes the KV of the rest of a prompt into its pages; returns the first token and aux. An exception fails the
request with its message. It may write the pages until it returns, even if the request was aborted meanwhile."""


@dataclass(slots=True, eq=False)
class ReadyRequest:
    """A restored request. Its pages are the caller's to read and to append to until `finish`, `retract` or `abort`."""

    request_id: str
    pages: npt.NDArray[np.int32]
    """One device page per page of the prompt, in order; pages for new tokens are appended by `grow`."""
    prompt_tokens: int
    first_token: int
    aux: Mapping[str, object]
    sources: Mapping[str, int]
    """Prompt tokens by source: l1, l2, l3, transfer."""
    length: int
    """Tokens with room in the pages: the prompt, and the tokens added by `grow`."""
    packed_tokens: bytes = field(repr=False)
    """The prompt, as packed little-endian u32."""
    _generation: int = 0
    """Number of the room at prefill; for the engine."""
    _reserve: deque[int] = field(default_factory=deque, repr=False)
    """Pages that `grow` returns next. Only the engine takes from it and refills it."""
    component_pages: Mapping[str, ReadyComponent] = field(default_factory=dict)
    """Pages of each of the engine's components, by name: windows and states at the prompt's end."""
    fallbacks: tuple[Fallback, ...] = ()
    """Fallbacks because rules of the engine raised, in order: `rule`, `gave_up`, `error`. `finish` and `retract` add
    to it. Empty unless tidekv or one of its components has a bug; the log has the traceback.
    """
    layers: LayerProgress | None = field(default=None, repr=False)
    """Progress of its layers, if it was reported early; for the engine."""
    layer_count: int = field(default=0, repr=False)
    """Layers of the engine's pages, which `wait_layer` accepts."""

    @property
    def layers_in_place(self) -> int | None:
        """Number of leading layers of which all pages are in place; None if all are. Any thread may read it."""
        return None if self.layers is None or self.layers.is_complete else self.layers.in_place

    async def wait_layer(self, layer: int) -> None:
        """Wait until layer `layer`, counted from 0, of all pages is in place on the device.

        Returns at once unless the request was made with `early`. The last layer is in place when the whole request is:
        `sources` and `fallbacks` are known then, and `finish` and `retract` can be called. Call it on the engine's
        loop, for one layer after the other.

        Raises LayersLost if a source of the pages fails: stop everything that uses the pages, then call it again for
        layer 0, which says that nothing uses them any more. When that returns, `pages` and `first_token` may be others,
        and room added by `grow` is gone. Raises RequestFailed and EngineClosed as `restore` does, and InvalidRequest
        for a layer that does not exist. Waits at most until the request's deadline.
        """
        checked(layer, Count, f"request {self.request_id!r}: layer")
        if layer >= self.layer_count:
            raise InvalidRequest(
                f"request {self.request_id!r}: layers are 0 to {self.layer_count - 1}; layer {layer} is not one"
            )
        if self.layers is not None:
            await self.layers.wait(layer)


@dataclass(frozen=True, slots=True, eq=False)
class RestoredPages:
    """The end of `DecodeEngine.restore_into`: what lent pages hold. They are the caller's again, without a writer."""

    request_id: str
    restored_tokens: int
    """Leading tokens of the prompt whose KV is in place. The caller computes the rest."""
    prompt_tokens: int
    sources: Mapping[str, int]
    """Good tokens by source: l1 (what the pages held), l2, l3, transfer."""
    first_token: int | None = None
    """The token after the prompt, by prefill. None unless all tokens are restored."""
    aux: Mapping[str, object] = field(default_factory=dict)
    """Data of prefill beside the first token."""
    cause: str = ""
    """Why not all tokens are restored: "deadline", or one of `PrefillCause`. Empty if they are."""
    detail: str = ""
    fallbacks: tuple[Fallback, ...] = ()
    """See ReadyRequest."""

    @property
    def is_complete(self) -> bool:
        """Whether the whole prompt is in place."""
        return not self.cause


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLookUp:
    """What each tier has of a prompt, in tokens of full pages; see `DecodeEngine.look_up`. The first four add up to the
    length of the prompt.
    """

    l1: int
    """In place in device memory."""
    l2: int
    """In host memory, behind those of l1."""
    l3: int
    """In storage, behind those of l2. A restore fetches of them what its policy expects to arrive in time."""
    transfer: int
    """Nowhere here: prefill sends them, or storage was not asked."""
    ready_s: float | None
    """Seconds to READY at the measured speeds of storage and prefill, with the pages that are under way from both: the
    longer of the two, which work at the same time. Without admission, copies from host memory, and the first token.
    None if a speed is not known, since nothing came from there yet, or lately from storage, or
    since `prefetch` is not "soonest", which measures prefill.
    """
    recompute: int
    """What decode would compute if it did not ask prefill: all behind l1. See `EngineConfig.recompute_threshold`."""
    not_asked: str
    """Why l3 is not known, such as "storage did not answer within 0.05 s"; empty if it is, or if nothing is missing."""


@dataclass(frozen=True, slots=True)
class PoolBalance:
    """Pages of a pool; see `DecodeEngine.balance`. The first four add up to `total`."""

    free: int
    owned: int
    """Held by requests that have not been given back."""
    cached: int
    draining: int
    """Not free, since a writer of a request that has left may still write to them."""
    total: int
    evictable: int
    """Cached pages that can be evicted now."""
    protected: int
    """Cached pages that a request locks."""


class EngineStatistics(TypedDict):
    """Parts of an engine, with their current values and totals since the start, by name; see
    `DecodeEngine.statistics`. A part that the engine does not have is None, or empty. The names within a part are those
    of the metrics (observability.md), and may change as these do.
    """

    core: Mapping[str, int]
    """Pages of each pool by state (`device_free`, `host_cached`, …), requests by state, and counts of decisions."""
    prefill_pages: Mapping[str, int]
    """By prefill address, device pages that its requests withhold before they are READY."""
    receiver: Mapping[str, int | float]
    """Links to prefill workers, rooms, and counts of unusual messages."""
    peers: Mapping[str, Mapping[str, int | float]] | None
    """Links to and by other decode workers: `reads` and `shares`; None unless host memory is shared with peers."""
    transport: Mapping[str, int | float]
    poller: Mapping[str, Any]
    """The thread that polls transfers; `storage_poller` polls file I/O."""
    storage_poller: Mapping[str, Any]
    copies: Mapping[str, Any] | None
    """Copies between device and host memory; None without a host pool."""
    component_copies: Mapping[str, Any]
    snapshots: Mapping[str, Mapping[str, int]]
    """By state, what its snapshots cost and bring."""
    storage: Mapping[str, Any] | None
    events: int
    """Events that the core has taken."""
    events_illegal: int
    """Events that the core refused; any is a bug of tidekv."""
    effects_raised: int
    """Effects that raised; any is a bug of tidekv."""
    loop_stalls: int
    draining: bool
    ranks: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class OfferedPages:
    """The end of `DecodeEngine.offer`: nothing reads the pages any more. Counts of full pages."""

    written: int
    """Copied to host memory by this offer; they are being put in storage, as the policy allows."""
    present: int
    """In host memory already, or brought there by an earlier offer."""
    declined: int
    """Neither of these, nor `passed`: a copy failed, storage could not be called or was too slow, or the write policy
    leaves them out.
    """
    components_declined: tuple[str, ...] = ()
    """Components of which pages are declined."""
    passed: int = 0
    """On their way to storage, or found there. Host memory does not keep them: it had no room, or the pages before them
    are not there.
    """


@dataclass(frozen=True, slots=True)
class DrainOutcome:
    """The end of `DecodeEngine.drain`. Counts are of full pages, but for `component_pages`, and 0 without `store_s` and
    `to`.
    """

    live: list[str]
    """Ids of the requests that are still live."""
    stored: int = 0
    """Pages that storage has got."""
    handed: int = 0
    """Pages that the successor has got."""
    component_pages: int = 0
    """Pages of windows and states that storage has got."""
    present: int = 0
    """Pages that storage, or the successor, had."""
    left: int = 0
    """Pages that storage lacks: the time was over, storage failed or is full, the policy keeps them out, or their
    prompt is longer than host memory. Or those that the successor lacks: see `cause`.
    """
    failed: int = 0
    """Those of `left` of which the last write has failed, or that the successor did not take."""
    seconds: float = 0.0
    """Duration of the writes."""
    cause: str = ""
    """The last word of the successor about pages that it did not take. Empty: the time was over, or it took all."""


@dataclass(frozen=True, slots=True, eq=False)
class RetractedRequest:
    """A request without device pages. Its KV in host memory stays there until `resume`."""

    request: DecodeRequest
    packed_tokens: bytes = field(repr=False)
    """Prompt and output so far, as packed little-endian u32."""
    held_tokens: int
    """Number of leading tokens with KV held in host memory."""
