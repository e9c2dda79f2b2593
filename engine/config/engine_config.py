"""Options of a decode engine: general ones, and one group for each of its parts."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tidekv.backends.keys.page_keys import PageKeys
from tidekv.engine.config.routers import Router, check_routers
from tidekv.states.component_specs import Component, SnapshotPolicy
from tidekv.states.errors import InvalidConfig, InvalidRequest
from tidekv.states.settings import CoreSettings, EvictionName
from tidekv.states.storage_policy import POLICY_FIELDS, StoragePolicy
from tidekv.states.validation import (
    ByteCount,
    Count,
    Options,
    PlainText,
    PositiveCount,
    PositiveShare,
    Seconds,
    SecondsOrZero,
    Text,
    host_and_port,
    is_loopback_host,
)
from tidekv.transports.control.addresses import Dials, address_of_rank

DeviceMode = Literal["owned", "lent"]
Vocabulary = Annotated[int, Meta(ge=0, le=2**32)]
PEERS_MAX = 8
"""Maximum peers of a request."""


class StorageOptions(StoragePolicy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The storage tier: policies, which `DecodeEngine.change_policy` can change, and bounds, which are fixed."""

    fetch_run_pages: PositiveCount = 32
    """Pages of one storage read, whose copy to the device starts when they have arrived; and of one put of offered
    pages that host memory cannot keep.
    """
    query_deadline_s: Seconds = 1.0
    """Maximum time in which storage may answer what it holds; then the answer counts as a miss."""
    store_timeout_s: Seconds = 30.0
    """Maximum time of one write; no further page of it is started after this."""

    @property
    def policy(self) -> StoragePolicy:
        """The options that can be changed later."""
        return StoragePolicy(**{name: getattr(self, name) for name in POLICY_FIELDS})


class AdmissionOptions(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Admission of requests to device memory."""

    queue_max: PositiveCount = 16384
    """Maximum requests waiting for admission; `restore` refuses further ones with CapacityError."""
    ageing_s: Seconds = 5.0
    """Waiting for this long weighs as much as one step of priority."""
    growth_reserve_pages: Count = 1
    """Device pages that an admitted request holds in reserve for generated tokens, as far as it has use for them."""
    running_max: Count = 0
    """Maximum admitted requests; others wait in the queue. 0: no limit. Not with lent device pages."""
    prefill_share: PositiveShare = 0.75
    """Maximum share of the device pool that requests of one prefill may withhold before they are READY, its quarantine
    included. Further ones wait. 1: no limit.
    """


class SharingOptions(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sharing of transfers between requests with a common prefix. Not with lent device pages."""

    enabled: bool = True
    """Requests with a common prefix share its transfer before the first of them is READY."""
    wait_s: Seconds = 0.25
    """Time that a request waits for another's stalled transfer before it asks prefill itself."""


class SnapshotOptions(SnapshotPolicy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Snapshots of recurrent states: where they are kept, and how many."""

    device_bytes: ByteCount = 0
    """Maximum bytes of cached snapshots of each state on the device. 0: what the pool holds."""
    host_bytes: ByteCount = 0
    """The same in host memory."""

    def bounded(self, component: Component, record_bytes: int) -> Component:
        """Return the component with these bounds, if it is a state of records of that many bytes."""
        if component.kind != "state":
            return component
        return msgspec.structs.replace(
            component,
            device_snapshots_max=self.device_bytes // record_bytes if self.device_bytes else None,
            host_snapshots_max=self.host_bytes // record_bytes if self.host_bytes else None,
        )


class PeerOptions(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The links to prefill workers."""

    lease_s: Seconds = 10.0
    """Time for which prefill keeps a room's pages without a ping of this worker, at most `prefill.lease_s`."""
    heartbeat_s: Seconds = 0.5
    """Interval between signs of life to each peer."""
    silence_s: Seconds = 2.0
    """A peer that is silent for longer counts as lost: its rooms fail, and its pages stay in quarantine."""
    late_s: Seconds = 30.0
    """The same for a prefill whose event loop is stalled while a thread of its process answers over UDP. 0: as
    `silence_s`.
    """
    attempts: PositiveCount = 1
    """How often each prefill of a request is tried before the request fails."""
    retries_late: bool = True
    """Try a prefill that was only late ("prefill silent", "lease ended") again until the deadline, unless the caller
    can compute the rest (`recompute`, lent pages).
    """
    staging_bytes: ByteCount = 64 * 1024 * 1024
    """Bytes of the ring through which prefill ranks that hold fewer KV heads send theirs. 0: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heartbeat_s * 2 > self.silence_s:
            half_s = self.silence_s / 2
            raise InvalidConfig(f"heartbeat_s must be at most half of silence_s, {half_s:g}, not {self.heartbeat_s:g}")
        if self.silence_s > self.lease_s:
            raise InvalidConfig(f"silence_s must be at most lease_s, {self.lease_s:g}, not {self.silence_s:g}")


class CachePeerOptions(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prefixes from the host memory of other decode workers, between storage and prefill."""

    enabled: bool = False
    """Requests may name peers (`DecodeRequest.peers`). The host pool is registered, which touches all of its memory."""
    listen: PlainText | None = None
    """host:port at which peers read this worker's host memory (`DecodeEngine.peer_address`), another one for each rank.
    An address of the network needs a secret.
    """
    ask: tuple[PlainText, ...] = ()
    """Addresses of peers, 8 at most, that may be asked for every prompt, after those that its request names. A peer of
    several ranks is named by their addresses, joined by commas.
    """
    allow: tuple[PlainText, ...] = ()
    """Addresses that hints (`kv.fetch`) may name besides those of `ask`, in the form of `dials`, of each rank."""
    wait_s: Seconds = 1.0
    """Maximum time in which a peer may send pages of a prompt; prefill sends the rest."""
    wait_share: PositiveShare = 0.25
    """The same as a share of the time that the request has left. The shorter one applies."""
    pause_s: Seconds = 5.0
    """Time for which a peer is not asked after it was late, or failed."""
    host_share: PositiveShare = 0.25
    """Maximum share of the host pool that peers may write to at once."""
    read_share: PositiveShare = 0.25
    """Maximum share of the host pool that is held for reads by peers."""
    reads_max: PositiveCount = 16
    """Maximum reads by peers at once; further ones are refused."""
    close_to: PlainText | None = None
    """host:port of the worker that closing hands the cache over to. It needs `listen`."""
    close_s: Seconds = 30.0
    """Maximum time for that, beside `close_deadline_s`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.listen is not None:
            host_and_port(self.listen, "listen", InvalidConfig, any_port=True)
        for address in ",".join(self.ask).split(",") if self.ask else ():
            host_and_port(address, "ask", InvalidConfig)
        if self.close_to is not None:
            host_and_port(self.close_to, "close_to", InvalidConfig)
            if self.listen is None:
                raise InvalidConfig("cache_peers.close_to needs cache_peers.listen, where the successor reads")
        if len(self.ask) > PEERS_MAX:
            raise InvalidConfig(f"ask: a request has {PEERS_MAX} peers at most, not {len(self.ask)}")
        Dials.parse(self.allow, "allow")
        for name in ("listen", "ask", "allow"):
            if getattr(self, name) and not self.enabled:
                raise InvalidConfig(f"cache_peers.{name} needs cache_peers.enabled, which registers the host pool")

    def dials_of(self, rank: int, ranks: int) -> tuple[str, ...]:
        """Entries of the addresses that a rank of this worker may dial as peers, in the form of the transport's
        `dials`. Raises InvalidConfig for peers of another number of ranks.
        """
        try:
            named = [*self.ask, *([] if self.close_to is None else [self.close_to])]
            return (*(address_of_rank(address, rank, ranks) for address in named), *self.allow)
        except InvalidRequest as error:
            raise InvalidConfig(f"cache_peers.ask: {error}") from None


class JournalOptions(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The journal: every event of a run, in a file or in the application's log."""

    path: PlainText | None = None
    """File, or a directory that gets a file for each run. A file of an earlier run is renamed to `NAME.previous`."""
    tokens: bool = False
    """Write tokens, which reveal what users wrote, instead of keyed digests of pages."""
    segment_bytes: ByteCount = 0
    """Size at which the journal continues in a new file. 0: one file."""
    segments_max: Count = 0
    """Number of newest files that are kept. 0: all. Without its first file a journal cannot be replayed."""
    log: bool = False
    """Write to the application's structlog, which must render JSON, instead of a file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.log and (self.path is not None or self.segment_bytes or self.segments_max):
            raise InvalidConfig("journal.log writes to the application's log: leave out path and segments")


class MetricsOptions(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Metrics for Prometheus."""

    listen: PlainText | None = None
    """host:port at which Prometheus scrapes (`DecodeEngine.metrics_address`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.listen is not None:
            host_and_port(self.listen, "listen", InvalidConfig, any_port=True)


class HintOptions(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of KV hints: see `DecodeEngine.hint`."""

    pin_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.25
    """Share of host memory that all pins together may hold; 0 refuses pins."""
    ttl_s_max: Seconds = 600.0
    """Maximum time of a pin, and of a prefetch; longer ones are shortened to it."""


class StatusOptions(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP server that routers and orchestrators ask for health, load, and where a prompt is, and give KV hints."""

    listen: PlainText | None = None
    """host:port (`DecodeEngine.status_address`). One on the network needs `token_file` or `allow_network`."""
    token_file: PlainText | None = None
    """File with the token that callers must present, as `Authorization: Bearer TOKEN`; not for /health and /ready."""
    allow_network: bool = False
    """Serve the network without a token: every program that reaches the port can probe for cached prompts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.listen is None:
            return
        host, _ = host_and_port(self.listen, "listen", InvalidConfig, any_port=True)
        if self.token_file is None and not self.allow_network and not is_loopback_host(host):
            raise InvalidConfig(
                f"status.listen {self.listen!r} is on the network, where every program that reaches it could probe for "
                "cached prompts: use 127.0.0.1, give status.token_file, or set status.allow_network"
            )


class KVEventsOptions(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV events for routers. Needs the extra `events`."""

    endpoint: PlainText | None = None
    """ZMQ endpoint, such as tcp://127.0.0.1:5557, that publishes what is cached. One on the network needs
    `curve_secret_file` or `allow_network`.
    """
    replay: PlainText | None = None
    """ZMQ endpoint at which routers request batches that they missed."""
    load: PlainText | None = None
    """ZMQ endpoint that publishes the load for SGLang's routers. One on the network needs `allow_network`."""
    topic: PlainText = ""
    """Topic of the batches: the first frame of each."""
    kept_batches: PositiveCount = 10_000
    """Newest batches that can be requested again, as far as they fit in `kept_bytes`."""
    kept_bytes: PositiveCount = 64 * 1024 * 1024
    """Maximum bytes of the batches that can be requested again."""
    tokens: bool = True
    """Publish the tokens of each page; false for routers that need only hashes."""
    curve_secret_file: PlainText | None = None
    """File with the secret key of both endpoints (CURVE, 40 characters of Z85): listeners must know its public key."""
    curve_clients: PlainText | None = None
    """Directory with the public keys (.key) of the listeners that are served. None: all that know the engine's key."""
    allow_network: bool = False
    """Serve endpoints on the network without CURVE: every program that reaches one reads the published tokens."""
    components: bool = False
    """Publish windows and states, too, each component as a group. Only for routers that know groups."""
    routers: tuple[Router, ...] = ("dynamo",)
    """Routers that listen, which decides how salts and EAGLE keys are written."""
    stored_pages: PositiveCount = 500_000
    """Maximum published pages that only storage has. Each costs about 500 bytes of memory."""
    data_parallel_rank: Count = 0
    """Number of this engine among data-parallel engines, which each batch names."""


class EngineConfig(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a decode engine, apart from its pools, storage and transport.

    Page size, layers, heads and dtype are not among them: the pools have them, by `KVLayout(page_size=…)`.
    Raises InvalidConfig, which names the field, the value and what is allowed.
    """

    model: Text = ""
    """Fingerprint of the model. Both ends of a hand-over, and all workers that share storage, must name the same."""
    vocabulary: Vocabulary = 0
    """Token ids must be below this. 0: every id that fits in 32 bits is allowed."""
    namespace: PlainText = ""
    """Namespace of requests that name none (tenant, revision); pages of another namespace never match."""
    bigram_keys: bool = False
    """Name pages by pairs of tokens, for draft KV of the EAGLE family. Both ends, and all workers that share storage,
    must set the same.
    """
    keep_output: bool = True
    """Keep generated tokens in the cache; without it only prompts are kept."""
    eviction: EvictionName = "lru"
    """Which cached pages are evicted first: "lru": least recently used. "lfu": least often matched. "slru": matched
    less than twice. "fifo": oldest. "priority": lowest `DecodeRequest.priority`.
    """
    page_checksums: bool = False
    """Verify the bytes of pages on their way; a damaged page is sent again and never used. Not with pools on a GPU."""
    namespace_share: PositiveShare = 1.0
    """Share of L1, and of L2, above which a namespace loses cached pages before others do. 1: no limit."""
    device: DeviceMode = "owned"
    """Whose the device pages are: the engine's, or those of a host engine that lends them to each restore."""
    recompute_threshold: Count = 0
    """Missing tokens up to which decode computes a prompt (`recompute`) rather than asking prefill. 0: only if no
    prefill is left. Not with components or lent device pages.
    """
    default_deadline_s: Seconds = 60.0
    """Deadline of requests that bring none."""
    copy_deadline_s: Seconds = 30.0
    """Maximum time of a copy between device and host; after that it has failed."""
    close_deadline_s: Seconds = 10.0
    """Maximum time that closing waits for work in flight."""
    close_store_s: SecondsOrZero = 0.0
    """Maximum time for which closing first stores what storage lacks, beside `close_deadline_s`."""
    loop_stall_report_s: Seconds = 0.05
    """A callback that blocks the event loop for longer is logged with its place."""
    storage: StorageOptions = StorageOptions()
    """The storage tier."""
    admission: AdmissionOptions = AdmissionOptions()
    """Admission to device memory."""
    sharing: SharingOptions = SharingOptions()
    """Sharing of transfers."""
    snapshots: SnapshotOptions = SnapshotOptions()
    """Snapshots of recurrent states."""
    peer: PeerOptions = PeerOptions()
    """Links to prefill workers."""
    cache_peers: CachePeerOptions = CachePeerOptions()
    """Prefixes of other decode workers."""
    journal: JournalOptions = JournalOptions()
    """The journal."""
    metrics: MetricsOptions = MetricsOptions()
    """Metrics."""
    hints: HintOptions = HintOptions()
    """KV hints."""
    status: StatusOptions = StatusOptions()
    """The status server."""
    kv_events: KVEventsOptions = KVEventsOptions()
    """KV events."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_events.replay is not None and self.kv_events.endpoint is None:
            raise InvalidConfig("kv_events.replay needs kv_events.endpoint: without it there are no batches")
        check_routers(self.kv_events.routers, bigrams=self.bigram_keys)
        if self.kv_events.curve_clients is not None and self.kv_events.curve_secret_file is None:
            raise InvalidConfig("kv_events.curve_clients needs kv_events.curve_secret_file")
        if self.device == "lent":
            self._check_lent()

    def _check_lent(self) -> None:
        """Refuse by name what is not done with lent device pages. Options at their defaults have no effect."""
        admission, sharing = self.admission, self.sharing
        limits = admission.prefill_share not in (1.0, type(admission)().prefill_share)
        for name, is_given, why in (
            ("admission.prefill_share", limits, "a prefill withholds no pages from others"),
            ("admission.running_max", admission.running_max > 0, "the host engine admits requests"),
            (
                "sharing.wait_s",
                sharing.wait_s != type(sharing)().wait_s,
                "requests share pages in the host engine's cache",
            ),
        ):
            if is_given:
                raise InvalidConfig(f'{name} has no effect with device="lent": {why}')

    def page_keys(self, page_size: int) -> PageKeys:
        """Return the identity of pages of this size in the core and in storage."""
        return PageKeys(page_size, bigrams=self.bigram_keys)

    def core_settings(
        self, *, page_size: int, device_pages: int, host_pages: int, components: tuple[Component, ...] = ()
    ) -> CoreSettings:
        """Return the settings of the core."""
        return CoreSettings(
            page_size=page_size,
            key_bytes=self.page_keys(page_size).key_bytes,
            device_pages=device_pages,
            host_pages=host_pages,
            components=components,
            snapshots=SnapshotPolicy(
                **{name: getattr(self.snapshots, name) for name in SnapshotPolicy.__struct_fields__}
            ),
            eviction=self.eviction,
            namespace_share=self.namespace_share,
            keep_output=self.keep_output,
            copy_deadline_s=self.copy_deadline_s,
            fetch_run_pages=self.storage.fetch_run_pages,
            query_deadline_s=self.storage.query_deadline_s,
            queue_max=self.admission.queue_max,
            ageing_s=self.admission.ageing_s,
            prefill_share=1.0 if self.device == "lent" else self.admission.prefill_share,
            # Requests in lent pages are not admitted and do not grow, and each fills its own.
            lends_device=self.device == "lent",
            growth_reserve_pages=0 if self.device == "lent" else self.admission.growth_reserve_pages,
            running_max=self.admission.running_max,
            share_transfers=self.sharing.enabled and self.device != "lent",
            share_wait_s=self.sharing.wait_s,
            peer_wait_s=self.cache_peers.wait_s,
            peer_wait_share=self.cache_peers.wait_share,
            peer_pause_s=self.cache_peers.pause_s,
            peer_host_share=self.cache_peers.host_share,
            peer_reads_max=self.cache_peers.reads_max,
            attempts_per_prefill=self.peer.attempts,
            recompute_threshold=self.recompute_threshold,
            retries_late=self.peer.retries_late,
            **{name: getattr(self.storage, name) for name in POLICY_FIELDS},
        )
