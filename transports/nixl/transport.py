"""Transport between processes and hosts: bulk data by NIXL, control links by `control`.

    write ── checks, plan ──▶ poller's thread: post, check, release part by part ──▶ bytes are in place ──▶ Chunk
                              (small waiting writes to one peer are joined into one request)

DONE at the writer means that the bytes are in place at the target, so the target takes no notification from NIXL: it
runs only a progress thread, which sleeps until bytes arrive, at most for `progress_delay_us`. A process with our
metadata can read and write this process on TCP and shared memory; the metadata leaves this module only through
`metadata`, which is sent over a link after its challenge.

NIXL cannot cancel. A write to a hung peer ends when the peer continues or dies, or when this transport is closed.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Annotated, Literal

from msgspec import Meta

from tidekv.states.errors import InvalidConfig, InvalidRequest, LocalProtocolError, TransferFailed
from tidekv.states.types import PageIds, PoolMemory
from tidekv.states.validation import Options, PositiveCount, Seconds, Text, checked, host_and_port, short
from tidekv.transports import process, wire
from tidekv.transports.base import Drive, Exchange, Link, Listener, PeerMemory, TransferPoller
from tidekv.transports.blocking import call_in_thread, settled
from tidekv.transports.control import connection as control
from tidekv.transports.control.addresses import Dials, is_loopback
from tidekv.transports.control.peer_backoff import BackoffLimits
from tidekv.transports.log import engine_log
from tidekv.transports.nixl.agent import NixlAgent
from tidekv.transports.nixl.layout import check_ours
from tidekv.transports.nixl.metadata import unwrap, wrap
from tidekv.transports.nixl.peers import NixlPeer, NixlPeers
from tidekv.transports.nixl.plan import WritePlan, paired_pages
from tidekv.transports.nixl.presence import Presence
from tidekv.transports.nixl.writes import Lane, PartedWrite

LOG = engine_log("tidekv.transports")
UCX_ONLY: Mapping[str, Mapping[str, str]] = MappingProxyType({"UCX": MappingProxyType({})})
# UCX checks no key on TCP: a process that reaches one of its ports can read and write the memory of this one.
UCX_ON_LOOPBACK = "NET_DEVICES=lo"
UCX_DEVICES_VARIABLE = "UCX_NET_DEVICES"
NAME_CHARACTERS_MAX = 256
# Posting copies on shared memory: one part occupies the poller's thread for 8 to 13 ms. The work between two copies
# takes 0.2 ms, since the copies have evicted the caches: with parts a fourth as large it would be 5 % of the time.
PART_BYTES = 32 * 1024 * 1024
# For adjacent pages; half as many for scattered ones, see `WritePlan`.
PART_DESCRIPTORS = 4096
# Bytes buffered by a dead writer land within this time of our own progress.
LANDING_S = 0.1

Name = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=NAME_CHARACTERS_MAX,
        pattern=r"\A[^\ud800-\udfff]*\Z",
        description=f"UTF-8 text of 1 to {NAME_CHARACTERS_MAX} characters",
    ),
]


class NixlOptions(Options, frozen=True, kw_only=True):
    """Options of the NIXL agent. Raises InvalidConfig."""

    backends: Mapping[str, Mapping[str, str]] | None = None
    """Options of NIXL plugins, by the plugin's name. None: UCX only."""
    data_network: Literal["auto", "loopback", "any"] = "auto"
    """Devices on which UCX opens ports: "loopback" on this machine only, "any" on every network device, RDMA included.
    "auto" is "any" if this worker listens on an address of the network or if one of `dials` is on another machine;
    otherwise "loopback". Devices named in `UCX_NET_DEVICES` or in `backends` take precedence.
    """
    progress_delay_us: PositiveCount = 200_000
    """Microseconds between turns of NIXL's own progress thread."""
    call_timeout_s: Seconds = 30.0
    """Maximum seconds of each set-up call, such as starting a backend."""
    close_timeout_s: Seconds = 5.0
    """Maximum seconds that `close` waits for writes before it destroys the agent under them."""


class ListenOptions(Options, frozen=True, kw_only=True):
    """Which control links a prefill worker accepts. Raises InvalidConfig."""

    announces: tuple[str, ...] = ()
    """Addresses under which decode workers dial this worker, if connections to it are forwarded; without forwarding the
    address that a connection reaches is known.
    """
    allow_no_secret: bool = False
    """Listen on the network without a secret and without required client certificates."""
    links_max: PositiveCount = 1024
    """Maximum control links."""
    links_per_address_max: PositiveCount = 128
    """Maximum control links of one address."""
    violations: BackoffLimits = BackoffLimits()
    """How often an address may break the protocol before it is refused for a growing time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for one in self.announces:
            host_and_port(one, "announces", InvalidConfig)


class NixlTransport:
    """A `Transport` over one NIXL agent. The constructor is cheap; `start` makes the agent, in a thread.

    `secret` and the TLS contexts are those of the control links: prefill listens under `listen_tls`, decode dials under
    `dial_tls`, and both must have the same `secret`. A listening context that requires certificates accepts no decode
    worker without one. The bulk data is not encrypted.

    After a restart the same `name` gives another `instance`, which NIXL needs: it cannot reuse names.

    An embedder makes it and gives it to an engine or a peer, which calls its methods and closes it. They are the
    methods of `Transport`, which a transport of one's own has as well, and which one around it overrides (`write`): so
    they are public, and nothing for an embedder to call.
    """

    def __init__(
        self,
        name: str,
        *,
        secret: str = "",
        dial_tls: ssl.SSLContext | None = None,
        listen_tls: ssl.SSLContext | None = None,
        dials: Iterable[str] | None = None,
        listening: ListenOptions | None = None,
        nixl: NixlOptions | None = None,
    ) -> None:
        """Raises InvalidConfig.

        `dials` are the addresses of the prefill workers that this worker may dial, on this machine, too; it dials no
        others, whatever a request names. Without it every address that a request names is dialled: leave it out only
        where the program, and not its clients, chooses `DecodeRequest.prefill`. An entry is host:port; the host may be
        a network such as "10.0.0.0/24" or contain `*` ("*.prefill.svc"), the port may be a range such as "7000-7007" or
        `*`. A prefill worker without a secret or required client certificates listens on loopback only, unless
        `listening` allows more.
        """
        checked(name, Name, "name", InvalidConfig)
        checked(secret, Text, "secret", InvalidConfig)
        if listening is None:
            listening = ListenOptions()
        checked(listening, ListenOptions, "listening", InvalidConfig)
        nixl = NixlOptions() if nixl is None else checked(nixl, NixlOptions, "nixl", InvalidConfig)
        self.name = name
        # A random suffix: peers that knew the process before its restart cannot load the same NIXL name again.
        self.instance = f"{name}-{uuid.uuid4().hex}"
        self._backends = UCX_ONLY if nixl.backends is None else nixl.backends
        self._data_network = nixl.data_network
        self._dials = None if dials is None else Dials.parse(dials)
        self._is_on_loopback = False
        self._progress_delay_us = nixl.progress_delay_us
        self._call_timeout_s = nixl.call_timeout_s
        self._close_timeout_s = nixl.close_timeout_s
        self._control = control.ControlOptions(
            secret=secret,
            dial_tls=dial_tls,
            listen_tls=listen_tls,
            links_max=listening.links_max,
            links_per_address_max=listening.links_per_address_max,
            violations=listening.violations,
            allow_no_secret=listening.allow_no_secret,
            announces=listening.announces,
        )
        self._is_closed = False
        self._poller: TransferPoller | None = None
        self._agent: NixlAgent | None = None
        self._peers: NixlPeers | None = None
        self._presence: Presence | None = None
        self._metadata = b""
        self._writes: set[asyncio.Future[None]] = set()
        self._counts = dict.fromkeys(("bytes_written", "pages_written", "writes", "writes_failed", "links"), 0)

    async def start(self, *, poller: TransferPoller, listen: str = "") -> None:
        """Make the agent. `listen` is the address that this worker will listen on, if any.

        Raises InvalidConfig if NIXL is missing, TransferFailed if a backend does not start or hangs.
        """
        if self._poller is not None or self._is_closed:
            raise LocalProtocolError(f"transport {self.name} is started twice, or after its end")
        self._poller = poller
        backends = await self._choose_devices(listen)
        make = partial(NixlAgent, self.instance, backends=backends, progress_delay_us=self._progress_delay_us)
        self._agent = await call_in_thread(make, what="making a NIXL agent", timeout_s=self._call_timeout_s)

    async def register(self, memory: PoolMemory, *components: PoolMemory) -> None:
        """Register our pools with NIXL. Their memory must live until `close` has returned.

        Raises InvalidRequest for an invalid pool, TransferFailed if NIXL refuses.
        """
        if self._peers is not None:
            raise LocalProtocolError(f"transport {self.name} has its pools already: call `register` once")
        agent = self._started()
        for pool in (memory, *components):
            check_ours(pool)

        def register() -> bytes:
            agent.register(memory, *components)
            return agent.metadata()

        blob = await call_in_thread(register, what="registering the pools", timeout_s=self._call_timeout_s)
        self._metadata = wrap(self.instance, blob)
        self._peers = NixlPeers(agent, memory, timeout_s=self._call_timeout_s)
        self._presence = Presence(agent, self._peers, self._required_poller(), timeout_s=self._call_timeout_s)

    def metadata(self) -> bytes:
        """Return the bytes that an authenticated peer passes to `add_peer`: our name, and NIXL's addresses and keys in
        clear.
        """
        if not self._metadata:
            raise LocalProtocolError(f"transport {self.name} has no metadata before its pool is registered")
        return self._metadata

    def check_metadata(self, instance: str, metadata: bytes) -> None:
        """See `Transport.check_metadata`."""
        unwrap(metadata, expected_name=instance)

    async def add_peer(
        self, instance: str, metadata: bytes, memory: PoolMemory, exchange: Exchange | None = None
    ) -> NixlPeer:
        """Make a peer's pool writable for us, from our first pool or that of the exchange. Each call returns a separate
        handle.

        Raises RemoteProtocolError for an invalid name, metadata or memory (PeerMismatch if its pages have other
        pieces), TransferFailed if NIXL refuses. After an error nothing has changed.
        """
        return await self._registered().add(instance, metadata, memory, exchange)

    async def remove_peer(self, peer: PeerMemory) -> None:
        """Forget a handle of `add_peer`, after the last write to it has ended. Does nothing after `close`."""
        if not self._is_closed:
            await self._registered().remove(_ours(peer))

    async def write(self, peer: PeerMemory, our_pages: PageIds, their_pages: PageIds) -> int:
        """Write our pages over the peer's, pairwise. Returns the number of bytes once they are in place at the peer.

        Raises InvalidRequest for a page that is not ours or a destination named twice, RemoteProtocolError for a page
        that the peer does not have (nothing was written), TransferFailed if NIXL fails or the peer is gone: part of the
        pages may be written then, and no write of this call is in flight. A small write that has to wait is joined with
        other waiting writes to the same peer, and ends or fails with them. A cancelled call posts nothing more and
        raises the cancellation after its writes in flight have ended, which for a hung peer may take for ever.
        """
        self._registered()
        target = _ours(peer)
        if target.is_removed:
            raise LocalProtocolError(f"write to peer {target.instance}, which was removed")
        ours, theirs = paired_pages(our_pages, their_pages, numbering=target.numbering, peer=target.instance)
        if not len(ours):
            return 0
        plan = WritePlan(target.numbering, ours, theirs, part_bytes=PART_BYTES, part_descriptors=PART_DESCRIPTORS)
        bytes_done = await self._carry_out(plan, target)
        self._counts["writes"] += 1
        self._counts["pages_written"] += len(ours)
        return bytes_done

    def check_address(self, address: str) -> None:
        """See `Transport.check_address`. Refuses addresses that are not in `dials`."""
        host_and_port(address, "prefill")
        if self._dials is not None and not self._dials.allows(address):
            raise InvalidRequest(
                f"{short(address)} is not in `dials`, the addresses of prefill workers that this worker may dial: "
                + (", ".join(rule.text for rule in self._dials.rules) or "none")
            )

    async def dial(self, address: str) -> Link:
        """See `control.dial`. Raises InvalidRequest for an address that is not in `dials`, before anything is sent, and
        InvalidConfig for a peer on another machine if UCX listens on loopback only.
        """
        self.check_address(address)
        link = await control.dial(address, self._control)
        if self._is_on_loopback and link.leaves_host:
            await link.close("the data plane of this worker listens on loopback only")
            raise InvalidConfig(
                f"{address} is on another machine, which cannot write here: UCX listens on loopback only. Pass "
                f'NixlOptions(data_network="any"), or name the network devices in {UCX_DEVICES_VARIABLE}'
            )
        self._counts["links"] += 1
        return link

    async def listen(self, address: str, on_link: Callable[[Link], Awaitable[None]]) -> Listener:
        """See `control.listen`."""

        async def counted(link: Link) -> None:
            self._counts["links"] += 1
            await on_link(link)

        return await control.listen(address, counted, self._control)

    async def wait_gone(self, instance: str, hello: wire.Hello) -> None:
        """Return once the peer's process is proven dead and our agent has progressed since: none of its writes can land
        then.

        For a process on this host the kernel proves it. For another host (or another transport of this process) the
        proof is NIXL's report that the connection broke, which is as reliable as the peer's network stack: a partition
        that breaks connections looks the same. Never returns otherwise. Raises TransferFailed once this transport is
        closed.
        """
        self._registered()
        if process.is_observable(hello.process):
            await process.wait_dead(hello.process)
        else:
            assert self._presence is not None, "presence is made with the peers"
            await self._presence.wait_disconnected(instance, hello.metadata, hello.memory)
        # Bytes of the dead process may still sit in our receive buffers until the progress thread has run. If UCX
        # missed their arrival, that is at the end of its delay.
        await asyncio.sleep(self._progress_delay_us * 1e-6 + LANDING_S)

    async def close(self) -> None:
        """End the writes and destroy the agent. Links and listeners are closed by their callers.

        Writes get `close_timeout_s` seconds to end; writes that still hang then end in TransferFailed, and on TCP
        nothing of them lands afterwards. The poller must still run.
        """
        if self._is_closed:
            return
        self._is_closed = True
        agent, self._agent = self._agent, None
        if agent is None:
            return
        if self._writes:
            await asyncio.wait(self._writes, timeout=self._close_timeout_s)
        await call_in_thread(agent.close, what="closing the NIXL agent", timeout_s=self._call_timeout_s)
        if self._presence is not None:
            await self._presence.close()
        # The agent is gone, so the poller's next check fails each remaining write.
        if self._writes:
            await asyncio.wait(self._writes)

    def statistics(self) -> dict[str, int | float]:
        """Counts since the start: `bytes_written` (in place at a peer, those of failed writes included),
        `pages_written` and `writes` (complete writes), `writes_failed`, `links` (opened); and `writes_in_flight` now.
        """
        return {**self._counts, "writes_in_flight": len(self._writes)}

    async def _choose_devices(self, listen: str) -> Mapping[str, Mapping[str, str]]:
        """Return the backends, with UCX restricted to loopback if no peer on the network needs to reach it.

        The choice is a backend option and not an environment variable: several agents of one process can then differ.
        """
        options = self._backends.get("UCX")
        if options is None or os.environ.get(UCX_DEVICES_VARIABLE) or _names_devices(options):
            return self._backends
        is_public = bool(listen) and not await is_loopback(listen)
        is_public = is_public or (self._dials is not None and await self._dials.leave_host())
        if self._data_network == "any" or (self._data_network == "auto" and is_public):
            LOG.warning(
                "UCX opens ports on every network device of this machine, and a program that reaches one reads and "
                "writes the memory of this process without the secret. Name the devices of a private network.",
                unset=UCX_DEVICES_VARIABLE,
            )
            return self._backends
        self._is_on_loopback = True
        configured = [entry for entry in (options.get("engine_config"), UCX_ON_LOOPBACK) if entry]
        return {**self._backends, "UCX": {**options, "engine_config": ",".join(configured)}}

    async def _carry_out(self, plan: WritePlan, target: NixlPeer) -> int:
        """Queue a write in its peer's lane and wait for its end. Counts and returns its bytes; counts them also on
        failure.
        """
        drive = target.drive
        if drive is None:
            drive = target.drive = self._required_poller().drive(target.lane)
        future = drive.begin()
        write = PartedWrite(plan, future)
        target.lane.enter(write)
        drive.wake()
        self._writes.add(future)
        target.writes.add(future)
        try:
            await settled(future, on_cancel=partial(_stop, write, target.lane, drive))
            return write.bytes_done
        except TransferFailed as error:
            self._counts["writes_failed"] += 1
            raise TransferFailed(f"write to peer {target.instance} failed: {error}") from error
        finally:
            self._writes.discard(future)
            target.writes.discard(future)
            self._counts["bytes_written"] += write.bytes_done

    def _started(self) -> NixlAgent:
        if self._is_closed:
            raise TransferFailed(f"transport {self.name} is closed")
        if self._agent is None:
            raise LocalProtocolError(f"transport {self.name} is not started")
        return self._agent

    def _registered(self) -> NixlPeers:
        self._started()
        if self._peers is None:
            raise LocalProtocolError(f"transport {self.name} has no pool registered")
        return self._peers

    def _required_poller(self) -> TransferPoller:
        assert self._poller is not None, "a started transport has a poller"
        return self._poller


def _names_devices(options: Mapping[str, str]) -> bool:
    """Whether options of the UCX backend name its network devices."""
    return bool(options.get("device_list")) or "NET_DEVICES=" in options.get("engine_config", "")


def _stop(write: PartedWrite, lane: Lane, drive: Drive) -> None:
    """Make a write end as soon as nothing of it is in flight."""
    lane.stop(write)
    drive.wake()


def _ours(peer: PeerMemory) -> NixlPeer:
    if not isinstance(peer, NixlPeer):
        raise LocalProtocolError(f"peer {peer.instance} was not added to a NIXL transport")
    return peer
