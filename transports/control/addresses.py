"""Addresses of control links, and the rules that say which of them a decode worker may dial."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from tidekv.states.errors import InvalidConfig, InvalidRequest
from tidekv.states.validation import host_and_port, short

RANKS_MAX = 256
"""Maximum number of addresses of one prefill, one for each of its ranks."""
PORT_MAX = 65_535


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of "host:port" or "[v6]:port". Raises InvalidConfig."""
    return host_and_port(address, "address", InvalidConfig, any_port=True)


def format_address(host: str, port: int) -> str:
    """The inverse of `parse_address`; addresses of one host get one form."""
    host = host.partition("%")[0]
    try:
        place = ip_address(host)
    except ValueError:
        return f"{host}:{port}"
    if isinstance(place, IPv6Address):
        return f"[{place}]:{port}" if place.ipv4_mapped is None else f"{place.ipv4_mapped}:{port}"
    return f"{place}:{port}"


def dialable(address: str) -> str:
    """Return an address at which a listener can be dialled; empty if it does not say: port 0, or all interfaces."""
    host, _, port = address.rpartition(":")
    return "" if port == "0" or host in ("", "0.0.0.0", "[::]") else address


def address_of_rank(addresses: str, rank: int, ranks: int, what: str = "peer") -> str:
    """Return the address at which rank `rank` of a worker of `ranks` ranks is dialled.

    `addresses` has one for each rank, in order, joined by commas; or that of the first one only, with the others at the
    ports behind it. Raises InvalidRequest for another number of addresses, or a port that does not exist.
    """
    count = addresses.count(",") + 1
    if count == ranks:
        return addresses.split(",", ranks)[rank]
    if count > 1:
        raise InvalidRequest(f"{what} names the addresses of {count} ranks, and this worker has {ranks}")
    port = host_and_port(addresses, what)[1]
    if (last := port + ranks - 1) > PORT_MAX:
        raise InvalidRequest(f"{what} {short(addresses)}: the last of {ranks} ranks would be at port {last}")
    return f"{addresses[: addresses.rindex(':')]}:{port + rank}"


async def is_loopback(address: str) -> bool:
    """Whether `address` ("host:port") can be reached from this machine only.

    False for a name that does not resolve now, since it may be anywhere. Raises InvalidConfig for a malformed address.
    """
    host, port = parse_address(address)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError):
        return False
    return are_loopback([str(where[0]) for _, _, _, _, where in found])


def are_loopback(hosts: Iterable[str]) -> bool:
    """Whether all of these IP addresses are of this machine only."""
    return all(ip_address(host.partition("%")[0]).is_loopback for host in hosts)


@dataclass(frozen=True, slots=True)
class DialRule:
    """One entry of an allow list: a host, a network or a pattern of names, and the ports there."""

    text: str
    host: str
    network: IPv4Network | IPv6Network | None
    ports: range

    @classmethod
    def parse(cls, text: str, option: str = "dials") -> DialRule:
        """Read "host:port", where the host may be a network ("10.0.0.0/24") or contain `*`, and the port may be a range
        ("7000-7007") or `*`. Raises InvalidConfig, which names the option.
        """
        host, _, ports = text.rpartition(":")
        first, _, last = ports.partition("-")
        try:
            if ports == "*":
                span = range(PORT_MAX + 1)
            elif all(part.isascii() and part.isdigit() for part in (first, last or first)):
                span = range(int(first), int(last or first) + 1)
            else:
                raise ValueError
            host = host.removeprefix("[").removesuffix("]") if ":" in host else host
            network = ip_network(host) if "/" in host else None
            if not host or not span or span[-1] > PORT_MAX or (":" in host and network is None and "*" in host):
                raise ValueError
            if "*" not in host and network is None:
                parse_address(f"[{host}]:1" if ":" in host else f"{host}:1")
        except ValueError as error:
            raise InvalidConfig(
                f"{option}: {short(text)} is no address: give host:port; the host may be a network such as "
                "10.0.0.0/24 or contain *, the port may be a range such as 7000-7007 or *"
            ) from error
        return cls(text=text, host=_plain(host), network=network, ports=span)

    def allows(self, host: str, port: int) -> bool:
        """Whether an address may be dialled. Names are compared as they are written: nothing is resolved."""
        if port not in self.ports:
            return False
        if self.network is None:
            return fnmatchcase(_plain(host), self.host) if "*" in self.host else _plain(host) == self.host
        try:
            return ip_address(host) in self.network
        except ValueError:
            return False


@dataclass(frozen=True, slots=True)
class Dials:
    """Addresses that a decode worker may dial. Empty: none."""

    rules: tuple[DialRule, ...]

    @classmethod
    def parse(cls, entries: Iterable[str], option: str = "dials") -> Dials:
        """Read the entries; one may have several, joined by commas. Raises InvalidConfig, which names the option."""
        if isinstance(entries, str):
            raise InvalidConfig(f"{option}: give a list of addresses, not the text {short(entries)}")
        return cls(tuple(DialRule.parse(one, option) for entry in entries for one in entry.split(",")))

    def allows(self, address: str) -> bool:
        """Whether `address` ("host:port") may be dialled. Raises InvalidConfig for a malformed address."""
        host, port = parse_address(address)
        return any(rule.allows(host, port) for rule in self.rules)

    def allows_all(self, addresses: str) -> bool:
        """Whether the addresses of one prefill's ranks, joined by commas, may all be dialled. False if they are
        malformed or too many.
        """
        # Counted first: the text may be a client's, and splitting it makes an object of each address.
        if addresses.count(",") >= RANKS_MAX:
            return False
        try:
            return all(self.allows(one) for one in addresses.split(","))
        except InvalidConfig:
            return False

    async def leave_host(self) -> bool:
        """Whether an address on another machine may be dialled."""
        for rule in self.rules:
            if rule.network is not None:
                if not rule.network.is_loopback:
                    return True
            elif "*" in rule.host:
                if not rule.host.startswith("127."):
                    return True
            elif not await is_loopback(format_address(rule.host, 1)):
                return True
        return False


def _plain(host: str) -> str:
    """A host in the form in which hosts are compared."""
    try:
        return str(ip_address(host))
    except ValueError:
        return host.lower().removesuffix(".")
