"""Who breaks the protocol again and again is kept away for a growing while.

Offences are kept by address: whoever fails the challenge, or sends what is no message, has no other name. A few cost
nothing, for a secret that is being changed and a frame that met a bug; each one after that doubles the pause. Asking
during a pause does not prolong it, so that a neighbor behind the same address is not kept out for ever. Memory is
bounded: who offended longest ago is forgotten first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address

from tidekv.states.errors import InvalidConfig, PeerMismatch, RemoteProtocolError


@dataclass(frozen=True, slots=True, kw_only=True)
class BackoffLimits:
    """What offences cost: the pauses begin at `pause_s`, behind `forgiven` offences, and double up to `pause_s_max`.

    An address that was quiet for `memory_s` begins anew. At most `addresses_max` addresses are remembered.
    """

    forgiven: int = 3
    pause_s: float = 1.0
    pause_s_max: float = 30.0
    memory_s: float = 300.0
    addresses_max: int = 4096

    def __post_init__(self) -> None:
        if self.forgiven < 0 or self.addresses_max < 1 or not 0 < self.pause_s <= self.pause_s_max <= self.memory_s:
            raise InvalidConfig(
                f"forgiven ≥ 0, addresses_max ≥ 1 and 0 < pause_s ≤ pause_s_max ≤ memory_s do not all hold: {self}"
            )


@dataclass(slots=True)
class _Offender:
    offences: int
    last_s: float
    refused_until_s: float


class PeerBackoff:
    """The addresses that offended lately. `offences` counts all there were."""

    def __init__(self, *, clock: Callable[[], float], limits: BackoffLimits | None = None) -> None:
        self.offences = 0
        self._clock = clock
        self._limits = limits or BackoffLimits()
        # In the order of their last offence.
        self._known: dict[str, _Offender] = {}

    def __len__(self) -> int:
        return len(self._known)

    def note(self, address: str) -> None:
        """One offence of this address."""
        limits, now_s = self._limits, self._clock()
        self.offences += 1
        offender = self._known.pop(address, None)
        if offender is None or now_s - offender.last_s > limits.memory_s:
            offender = _Offender(offences=0, last_s=now_s, refused_until_s=now_s)
        offender.offences += 1
        offender.last_s = now_s
        beyond = offender.offences - limits.forgiven
        if beyond > 0:
            # The exponent is bounded too: an offender of many years must not overflow a float.
            pause_s = limits.pause_s * 2.0 ** min(beyond - 1, 64)
            offender.refused_until_s = now_s + min(pause_s, limits.pause_s_max)
        self._known[address] = offender
        if len(self._known) > limits.addresses_max:
            del self._known[next(iter(self._known))]

    def pause_left_s(self, address: str) -> float:
        """How long this address is still to be refused; 0 where it is welcome."""
        offender = self._known.get(address)
        return 0.0 if offender is None else max(0.0, offender.refused_until_s - self._clock())


def is_offence(error: Exception) -> bool:
    """Whether a peer that caused this broke the protocol. One that is configured in another way did not."""
    return isinstance(error, RemoteProtocolError) and not isinstance(error, PeerMismatch)


def whose(host: str) -> str:
    """Under which name the offences of a host count: who has one IPv6 address has all of its /64."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return str(address)
    if (mapped := address.ipv4_mapped) is not None:
        return str(mapped)
    return address.packed[:8].hex()
