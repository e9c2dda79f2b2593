"""Host memory shared between decode workers: reads from peers, and reads by peers.

Reads are rooms, as with prefill, over the host pool. A read of ours is a `FetchPages` with a peer (`PeerReads`). A read
by a peer becomes a `ShareRequested`: the core holds the pages, this module writes them to the peer, and the outcome
lets them go. It decides nothing about pages.

Of several ranks each reads from, and writes to, the rank at its place of the other worker, by links of a single rank.
Both workers agree by their votes: the reader on how many pages all of its ranks have got, the peer on what it holds
once all of its ranks were asked.

A worker that goes away hands its cache over to another one, its successor. It offers prompts over its link for reads
from there; each offer becomes the hint "take" at the successor, whose core reads the pages as those of any peer. Of
several ranks the first offers, and takes, for all; each rank of the successor reads from the one at its place.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import msgspec

from tidekv.backends.keys.chain import namespace_seed
from tidekv.backends.keys.namespaces import is_namespace
from tidekv.engine.log import engine_log
from tidekv.states import events
from tidekv.states.errors import EngineClosed, InvalidConfig, InvalidRequest, PrefillCause, RankLost, TidekvError
from tidekv.states.handover.rank_place import SOLE
from tidekv.states.storage.taken_prompts import FULL_MEMORY
from tidekv.states.types import FULL
from tidekv.transports import wire
from tidekv.transports.control.addresses import Dials, address_of_rank, dialable
from tidekv.transports.decode.peer_reads import PeerReads
from tidekv.transports.prefill.room_writer import RoomCallbacks
from tidekv.transports.prefill.sender import Sender
from tidekv.transports.slices import pieces_of
from tidekv.transports.tasks import OwnedTasks

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidekv.backends.checksums import StorageChecks
    from tidekv.backends.host.pool import HostPool
    from tidekv.backends.keys.prompt_keys import PromptKeys
    from tidekv.engine.config.engine_config import CachePeerOptions, EngineConfig
    from tidekv.engine.decode.pending_calls import PendingCalls
    from tidekv.engine.decode.rank_driver import RankDriver
    from tidekv.states.commands import FetchPages, HandPrompt, SharePages
    from tidekv.states.core import Core
    from tidekv.states.events import Event
    from tidekv.states.types import Identity, PoolMemory
    from tidekv.transports.base import Transport
    from tidekv.transports.decode.prefill_link import LinkTimes
    from tidekv.transports.local_rank import LocalRank
    from tidekv.transports.prefill.prefill_room import Room

LOG = engine_log("tidekv.engine")
ASKS_MAX = 4
"""Maximum reads that wait for the other ranks to be asked, for each read that may be served at once."""


def check_peers(options: CachePeerOptions, host: HostPool | None) -> None:
    """Raise InvalidConfig if the host pool is to be shared with peers, and cannot be."""
    if options.enabled and host is None:
        raise InvalidConfig("cache_peers.enabled is not possible without a host pool: pages of peers are written to it")


def shared_memory(options: CachePeerOptions, host: HostPool | None, identity: Identity) -> list[PoolMemory]:
    """The host pool in the pieces of its pages, as hand-overs compare and write them, if it is shared with peers."""
    return [pieces_of(host.memory, identity.piece_bytes)] if options.enabled and host is not None else []


class Front(Protocol):
    """What takes events into the core."""

    def post(self, event: Event) -> None:
        """Queue an event."""
        ...

    def check(self) -> None:
        """Raise RankLost while a rank is lost."""
        ...

    @property
    def clock(self) -> Callable[[], float]:
        """The time of events."""
        ...


class Owner(Protocol):
    """The part of an engine that its shared memory uses."""

    is_open: bool
    is_draining: bool
    transport: Transport
    config: EngineConfig
    prompt_keys: PromptKeys
    calls: PendingCalls
    ranks: RankDriver | None

    @property
    def core(self) -> Core:
        """The core, which may be another one after a restart."""
        ...

    @property
    def front(self) -> Front:
        """What takes events."""
        ...


class PeerCache:
    """The host pool of one engine, as its peers see it."""

    def __init__(
        self, engine: Owner, rank: LocalRank, memory: PoolMemory, times: LinkTimes, checks: StorageChecks
    ) -> None:
        """Open nothing. `rank` is that of the engine; the transport must have registered `memory` (`shared_memory`)."""
        # Pages of the full KV only: prefill sends what the prompt's end needs of windows and states, as it does for
        # full pages from storage that has none.
        identity = msgspec.structs.replace(rank.identity, components=())
        self._place = place = rank.place
        rank = replace(rank, identity=identity, memory=memory, component_memory={}, sends="cached", staging=None)
        rank = replace(rank, place=SOLE, cached_place=place)
        transport, clock = engine.transport, engine.front.clock
        self._options = options = engine.config.cache_peers
        self._engine = engine
        self._checks = checks
        self._page_keys = engine.prompt_keys.page_keys
        self._reads = PeerReads(
            transport,
            rank,
            clock=clock,
            times=times,
            group=lambda: "" if engine.ranks is None else engine.ranks.group_name,
        )
        self._tasks = OwnedTasks(f"peers of {transport.instance}", instance=transport.instance)
        self._sender: Sender | None = None
        self._allowed = Dials.parse((*options.ask, *options.allow))
        """Where prompts may be taken from."""
        self._offers = itertools.count(1)
        if options.listen is not None:
            callbacks = RoomCallbacks(on_room=self._open, on_offer=self._take)
            self._sender = Sender(transport, rank, clock=clock, callbacks=callbacks, lease_s=times.lease_s)
        self._shares: dict[int, SharePages | None] = {}
        """By number of the hint, the pages that a peer gets; None until the core has answered."""
        self._seeds: dict[str, bytes] = {}
        self._calls = 0

    async def start(self) -> None:
        """Listen, if peers may read. Raises InvalidConfig, TransferFailed."""
        options = self._options
        if options.close_to is not None and self._place.ranks > 1:
            raise InvalidConfig(f"cache_peers.close_to is not possible on one of {self._place.ranks} ranks")
        named = [("ask", address) for address in options.ask]
        for option, peer in named + ([] if options.close_to is None else [("close_to", options.close_to)]):
            try:
                self.check_peer(peer)
            except InvalidRequest as error:
                raise InvalidConfig(f"cache_peers.{option}: {error}") from None
        if self._sender is not None:
            assert self._options.listen is not None
            await self._sender.listen(self._options.listen)
            LOG.info("host memory is shared", address=self._sender.address)
        await self._reads.start(shares_at=self.announced)

    @property
    def address(self) -> str | None:
        """host:port at which peers read; None if they do not."""
        return None if self._sender is None else self._sender.address

    @property
    def announced(self) -> str:
        """The address that prefill gets; empty if peers do not read, or listening at all interfaces says none."""
        return dialable(self.address or "")

    def address_of(self, peer: str) -> str:
        """Return the address at which this rank reads from a peer, which may name those of all ranks. Raises
        InvalidRequest for a peer of another number of ranks.
        """
        return address_of_rank(peer, self._place.rank, self._place.ranks)

    def addresses_of(self, peer: str) -> list[str]:
        """Return the addresses at which all ranks of this worker read from a peer. Raises InvalidRequest."""
        return [address_of_rank(peer, rank, self._place.ranks) for rank in range(self._place.ranks)]

    def check_peer(self, peer: str) -> None:
        """Raise InvalidRequest unless this rank may read from a peer."""
        self._engine.transport.check_address(self.address_of(peer))

    async def stop_sharing(self) -> None:
        """End all reads of peers, and wait for their writes; then the core has all its pages back."""
        if self._sender is not None:
            await self._sender.close()
            self._sender = None

    async def close(self) -> None:
        """End everything. Reads of ours that have no outcome get none."""
        try:
            await self.stop_sharing()
            await self._tasks.close()
        finally:
            await self._reads.close()

    def statistics(self) -> dict[str, dict[str, int | float]]:
        """Counts of the links to peers, and of those by peers."""
        return {
            "reads": self._reads.statistics(),
            "shares": {} if self._sender is None else self._sender.statistics(),
        }

    # --- The cache of a worker that goes away ---

    async def hand(self, command: HandPrompt, namespace: str, keys: bytes) -> wire.PromptTaken:
        """Offer a prompt to the successor of this worker; returns its answer, at the latest after the time-out."""
        if self._place.rank:
            return wire.PromptTaken(number=0, cause="the first rank offers it")
        offer = wire.OfferPrompt(
            number=next(self._offers),
            namespace=namespace,
            tokens=self._page_keys.tokens_of(keys),
            heat=command.heat,
            within_s=command.timeout_s,
        )
        return await self._reads.offer(self.address_of(command.peer), offer)

    async def _take(self, theirs: wire.Hello, offer: wire.OfferPrompt) -> wire.PromptTaken:
        """Take a prompt of a worker that goes away."""
        engine, call = self._engine, self._next_call()
        if why := self._refusal(theirs.shares_at):
            return wire.PromptTaken(number=offer.number, cause=why, refuses=True)
        if not is_namespace(offer.namespace):
            # KV events are made of its parts.
            return wire.PromptTaken(number=offer.number, cause="its namespace is not known here")
        keys = self._page_keys.of(offer.tokens)
        try:
            answered = engine.calls.expect_hint(call)
            engine.front.post(
                events.HintReceived(
                    at_s=engine.front.clock(),
                    call=call,
                    action="take",
                    namespace=offer.namespace,
                    keys=keys,
                    ttl_s=offer.within_s,
                    peer=theirs.shares_at,
                    heat=offer.heat,
                )
            )
            taken = await answered
        except (EngineClosed, RankLost) as ending:
            engine.calls.unexpect_hint(call)
            why = "it closes" if isinstance(ending, EngineClosed) else "it has lost a rank"
            return wire.PromptTaken(number=offer.number, cause=why, refuses=True)
        LOG.debug("a prompt was taken", peer=theirs.shares_at, pages=taken.page_count, read=taken.brought)
        return wire.PromptTaken(
            number=offer.number,
            there=taken.page_count,
            brought=taken.brought,
            cause=wire.brief(taken.cause),
            refuses=taken.cause == FULL_MEMORY,
        )

    def _refusal(self, address: str) -> str:
        """Return why no prompt is taken of the worker that is read at this address; empty if they are."""
        engine = self._engine
        if engine.is_draining or not engine.is_open:
            return "it drains, or closes"
        if self._place.rank:
            return "its first rank takes prompts"
        if not address:
            return "no address was named at which this worker is read: set cache_peers.listen, not to all interfaces"
        try:
            for each in self.addresses_of(address):
                if not self._allowed.allows(each):
                    raise InvalidRequest(f"{each} is not in its cache_peers.allow")
            self.check_peer(address)
        except TidekvError as error:
            LOG.warning("a worker is not allowed to hand its cache over", peer=address, cause=str(error))
            return str(error)
        return ""

    @property
    def _hands_over(self) -> bool:
        """Whether the cache is being handed over, perhaps since the engine closes."""
        run = self._engine.core.store_all.run
        return run is not None and bool(run.to)

    def _next_call(self) -> int:
        # Below zero, apart from the numbers of the engine's callers, and from those of the first rank: all ranks take
        # its prompts.
        self._calls -= 1
        return self._calls * self._place.ranks - self._place.rank

    # --- Reads of ours ---

    async def fetch(self, command: FetchPages, packed: bytes, key_seed: bytes) -> tuple[int, str]:
        """Read pages of a prompt from a peer; see `PeerReads.read`."""
        ranks = self._engine.ranks
        valid, error = await self._reads.read(
            self.address_of(command.peer),
            # A room has a name; that of a prompt that is taken appears in both logs.
            command.request_id or f"handed over, read {command.op}",
            # Operations of the core that follows the loss of a rank get new numbers.
            command.op + (0 if ranks is None else ranks.generations_from),
            packed=packed,
            key_seed=key_seed,
            first=command.positions[0],
            pages=command.host_pages,
            timeout_s=command.timeout_s,
        )
        await self._checks.note_read(FULL, command.host_pages[:valid])
        return valid, error

    # --- Reads by peers ---

    def share(self, command: SharePages) -> None:
        """Take the pages that the core holds for a peer."""
        if command.call in self._shares:
            self._shares[command.call] = command
        else:
            # Its room has ended with this worker.
            self._ended(command, "")

    def _open(self, room: Room) -> None:
        self._tasks.spawn(self._serve(room), name=f"read of {room.request_id}")

    async def _serve(self, room: Room) -> None:
        """Write what host memory has of a prompt to the peer that has promised this room."""
        try:
            await self._answer(room)
        except Exception as error:
            LOG.error("a read by a peer raised", request_id=room.request_id, exc_info=error)
            room.fail(PrefillCause.RAISED.words(f"{type(error).__name__}: {error}"))

    async def _answer(self, room: Room) -> None:
        # One that drains is read until it closes: by its successor, and by requests that move there.
        if not (self._engine.is_open or self._hands_over):
            room.fail(PrefillCause.CLOSING.words("it closes"))
            return
        try:
            self._engine.front.check()
            command = await self._ask(room)
        except (EngineClosed, RankLost) as closing:
            room.fail(PrefillCause.CLOSING.words(str(closing)))
            return
        if command is None:
            room.fail(PrefillCause.REFUSED.words("it has none of the pages, or no room for this read"))
            return
        error, intact = "the read was given up", None
        try:
            error, intact = await self._write(room, command)
        finally:
            self._ended(command, error, intact)

    async def _ask(self, room: Room) -> SharePages | None:
        """Let the core hold the pages of a room's prompt; returns those that it holds. Raises EngineClosed, and
        RankLost if a rank is lost that had to agree.
        """
        engine, namespace = self._engine, self._namespace_of(room._key_seed)
        if room.tokens is None or namespace is None or len(self._shares) >= ASKS_MAX * self._options.reads_max:
            return None
        # A prompt that is longer than the share of reads is handed over as well, since nothing else needs the pages.
        # The first rank's share is that of all.
        share = 1.0 if engine.is_draining or self._hands_over else self._options.read_share
        call = self._next_call()
        self._shares[call] = None
        try:
            answered = engine.calls.expect_hint(call)
            engine.front.post(
                events.ShareRequested(
                    at_s=engine.front.clock(),
                    call=call,
                    read=f"{room.owner}/{room.request_id}/{room.generation}",
                    namespace=namespace,
                    keys=self._page_keys.of(room.tokens + room.token_behind),
                    pages_max=int(share * engine.core.settings.host_pages),
                )
            )
            await answered
        finally:
            command = self._shares.pop(call)
        return command

    async def _write(self, room: Room, command: SharePages) -> tuple[str, int | None]:
        """Write shared pages to a room. Returns when nothing reads them any more: an error, and the number of intact
        pages if one is damaged.
        """
        pages, size = command.host_pages, self._page_keys.page_size
        intact = await self._checks.intact(FULL, pages)
        if intact is not None:
            LOG.warning("a page in host memory is damaged: it is not shared", request_id=room.request_id, at=intact)
            pages = pages[:intact]
        if not room.aborted.is_set():
            await room.send(pages, start_token=0)
            if len(pages) * size == room.prompt_tokens:
                await room.finish(first_token=0)
            else:
                await room._wait_written()
                wanted = room.prompt_tokens // size
                room.fail(PrefillCause.REFUSED.words(f"it has {len(pages)} of the {wanted} pages in host memory"))
        outcome = await room.received()
        return "" if outcome.value in ("received", "failed") else outcome.value, intact

    def _ended(self, command: SharePages, error: str, intact: int | None = None) -> None:
        self._engine.front.post(
            events.CopyEnded(
                at_s=self._engine.front.clock(),
                op=command.op,
                error=error or ("" if intact is None else "a page is damaged"),
                intact=intact,
            )
        )

    def _namespace_of(self, seed: bytes | None) -> str | None:
        """The namespace whose keys begin with this seed, if anything of it is cached."""
        roots = self._engine.core.state.index.tree.roots
        if len(self._seeds) > 2 * len(roots):
            self._seeds = {name: known for name, known in self._seeds.items() if name in roots}
        for name in roots:
            known = self._seeds.get(name)
            if known is None:
                known = self._seeds[name] = namespace_seed(name)
            if known == seed:
                return name
        return None
