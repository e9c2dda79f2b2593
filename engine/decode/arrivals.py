"""Arrivals of requests: their tokens are checked and packed, their call is registered, and the event is posted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.backends.keys.chain import TOKEN_BYTES, namespace_seed, pack_tokens
from tidekv.backends.keys.namespaces import join_namespaces, namespace_of_seed
from tidekv.engine.config.engine_config import PEERS_MAX
from tidekv.engine.decode.values import DecodeRequest
from tidekv.states import events
from tidekv.states.errors import CapacityError, EngineClosed, InvalidRequest
from tidekv.states.handover.prompt_digest import digest_of
from tidekv.states.types import FULL, page_ids
from tidekv.states.validation import PlainText, checked
from tidekv.transports.control.addresses import RANKS_MAX
from tidekv.transports.wire import check_promise

if TYPE_CHECKING:
    import asyncio

    from tidekv.engine.decode.lent_pages import PagesByGroup
    from tidekv.engine.decode.runtime import Runtime
    from tidekv.engine.decode.values import HintedPeers, ReadyRequest, RestoredPages

GENERATIONS_MAX = 1 << 16
"""Maximum rooms of one request. Ids may be used again, but not generations of an id."""


class Arrivals:
    """Posts the requests of one engine, each with a number of its own."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._number = 0

    def next_number(self) -> int:
        """Return a new number."""
        self._number += 1
        return self._number

    def packed(self, request: DecodeRequest) -> bytes:
        """Return the request's tokens. Raises InvalidRequest, and EngineClosed if the engine drains."""
        checked(request, DecodeRequest, "request")
        if self._runtime.is_draining:
            raise EngineClosed("the engine drains: it takes no new requests")
        self._check_peers(request)
        return pack_tokens(request.tokens, vocabulary=self._runtime.config.vocabulary or None)

    def _check_peers(self, request: DecodeRequest) -> None:
        """Raise InvalidRequest for peers that may not be dialled, or if this engine reads from none."""
        if not request.peers:
            return
        if self._runtime.peers is None:
            raise InvalidRequest(
                f"request {request.request_id!r}: peers are named, but this engine reads from none: set"
                " cache_peers.enabled"
            )
        for peer in request.peers:
            self._runtime.peers.check_peer(peer)

    def namespace(self, namespace: str, lora_name: str = "") -> str:
        """Return the namespace of a call, with its adapter, within that of the engine. Raises InvalidRequest."""
        return join_namespaces(
            self._runtime.config.namespace,
            checked(namespace, PlainText, "namespace"),
            checked(lora_name, PlainText, "lora_name"),
        )

    def decline(self, request: DecodeRequest) -> None:
        """Decline a request at all ranks of its prefills. Raises InvalidRequest and EngineClosed."""
        self._runtime.check_open()
        checked(request, DecodeRequest, "request")
        for address in request.prefills:
            self._check_addresses(address)
        prompt = request.prompt_digest
        if prompt is None:
            packed = pack_tokens(request.tokens, vocabulary=self._runtime.config.vocabulary or None)
            prompt = digest_of(packed, namespace_seed(self.namespace(request.namespace, request.lora_name)))
        for address in request.prefills:
            self._runtime.receiver.decline(address, request.request_id, prompt.digest)

    def check_reachable(self, request: DecodeRequest, packed: bytes) -> None:
        """Raise if no request can be taken now, if an address of the request's prefills is invalid, or if no frame can
        hold its promise.
        """
        self._runtime.front.check()
        for addresses in request.prefills:
            self._check_addresses(addresses)
        tokens = len(packed) // TOKEN_BYTES
        pages = self._runtime.core.settings.pages_of(tokens)
        check_promise(request.request_id, prompt_tokens=tokens if request.send_prompt else 0, pages=pages)

    def _check_addresses(self, addresses: str) -> None:
        """Raise InvalidRequest for addresses of one prefill's ranks that may not be dialled, or for too many."""
        # Counted first: the text may be a client's, and splitting it makes an object of each address.
        if (count := addresses.count(",") + 1) > RANKS_MAX:
            raise InvalidRequest(f"prefill names {count} addresses; one prefill has {RANKS_MAX} ranks at most")
        for address in addresses.split(","):
            self._runtime.transport.check_address(address)

    def check_room(self, request: DecodeRequest, packed: bytes) -> None:
        """Raise InvalidRequest for a prompt that never fits in the device pool, CapacityError if the queue is full."""
        core = self._runtime.core
        settings, tokens = core.settings, len(packed) // TOKEN_BYTES
        needed = settings.pages_of(tokens)
        if needed > settings.device_pages:
            raise InvalidRequest(
                f"request {request.request_id!r}: its prompt of {tokens} tokens needs {needed} device pages; the pool "
                f"has {settings.device_pages}"
            )
        # Requests that arrived in this turn of the loop are in no queue yet.
        if len(core.queue) + self._runtime.calls.arriving(core) >= settings.queue_max:
            raise CapacityError(f"{settings.queue_max} requests wait for admission already; try again later")

    def _peers_of(self, request: DecodeRequest, hinted: HintedPeers | None) -> tuple[str, ...]:
        """Return the peers of a request in the order in which they may be asked: none twice, and not this worker."""
        peers = self._runtime.peers
        if peers is None:
            return ()
        first = () if hinted is None else hinted.allowed
        named = dict.fromkeys((*first, *request.peers, *self._runtime.config.cache_peers.ask))
        return tuple(peer for peer in named if peers.address_of(peer) != peers.address)[:PEERS_MAX]

    def post(
        self,
        request: DecodeRequest,
        packed: bytes,
        hinted: HintedPeers | None = None,
        *,
        lent_pages: PagesByGroup | None = None,
        held_pages: int = 0,
    ) -> tuple[int, asyncio.Future[ReadyRequest | RestoredPages]]:
        """Post a request; returns its number and the future of its outcome. If it raises, nothing was posted, and no
        page is lent. The lent pages at the first `held_pages` positions hold the prompt already, in every group.
        `hinted`: peers that its hints name.
        """
        runtime, config = self._runtime, self._runtime.config
        request_number = self.next_number()
        namespace = join_namespaces(config.namespace, request.namespace, request.lora_name)
        if request.key_seed is not None:
            namespace = namespace_of_seed(request.key_seed)
        behind = b"" if request.next_token is None else pack_tokens([request.next_token])
        prompt = runtime.prompt_keys.prompt(packed, namespace_seed(namespace), behind)
        page_keys = runtime.prompt_keys.page_keys
        keys = page_keys.of(packed + behind, len(packed) // TOKEN_BYTES)
        within_s = config.default_deadline_s if request.deadline_s is None else request.deadline_s
        now_s = runtime.front.clock()
        lent = dict(lent_pages or {})
        full = lent.pop(FULL, page_ids())
        arrival = events.RequestArrived(
            at_s=now_s,
            request_id=request.request_id,
            request_number=request_number,
            keys=keys,
            prompt_tokens=len(packed) // TOKEN_BYTES,
            namespace=namespace,
            prefills=request.prefills or events.NOBODY,  # The executor answers for it.
            deadline_at_s=now_s + within_s,
            priority=request.priority,
            cache=request.cache,
            generation=request_number * GENERATIONS_MAX,
            can_recompute=runtime.calls.last_resort is not None,
            lent_pages=tuple(full),
            lent_components={name: tuple(pages) for name, pages in lent.items()},
            held_pages=held_pages,
            early=request.early,
            # With bigrams, the KV of the prompt's end depends on the first token of the answer.
            rest=packed[len(keys) :] if runtime.core.settings.components and not page_keys.bigrams else b"",
            peers=self._peers_of(request, hinted),
            peers_refused=() if hinted is None else tuple(hinted.refused),
            # The last token that is generated has no KV.
            tokens_max=request.max_new_tokens and len(packed) // TOKEN_BYTES + request.max_new_tokens - 1,
        )
        # From here on the id is live and the event is posted: both or neither, even if a statement in between raises.
        try:
            outcome = runtime.calls.begin(
                request, prompt, request_number=request_number, deadline_at_s=arrival.deadline_at_s
            )
            if lent_pages is not None:
                # Pages at the first positions may be in use by others: they are not lent.
                left = len(full) - held_pages
                written = {name: pages[-left:] if left else page_ids() for name, pages in lent_pages.items()}
                runtime.calls.lent.lend(request.request_id, written)
            # A blocked loop delays the request before the core has seen it, too. Not behind `post`: what raises there
            # would withdraw a request that the core is about to take.
            runtime.watchdog.set_busy(True)
            runtime.front.post(arrival)
        except BaseException:
            runtime.calls.withdraw(request.request_id, request_number=request_number)
            raise
        return request_number, outcome

    def cancel(self, request_id: str, request_number: int) -> None:
        """Abort a request whose caller was cancelled, if it is still live: its id may belong to another one."""
        runtime = self._runtime
        if runtime.calls.number_of(request_id) == request_number:
            cause, at_s = "cancelled by the caller", runtime.front.clock()
            runtime.front.post(events.AbortRequested(at_s=at_s, request_id=request_id, cause=cause))
            runtime.calls.end_use(request_id)
