"""Growing refusal time for addresses that break the protocol repeatedly.

Violations are counted by address: a peer that fails the challenge, or sends a malformed frame, has no other identity.
The first few are free, to allow for a secret rotation or a bug; each further one doubles the pause. Connection attempts
during a pause do not prolong it, so another peer behind the same address is not refused for ever. Memory is bounded:
the address with the oldest last violation is forgotten first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address

from tidekv.states.errors import InvalidConfig, PeerMismatch, RemoteProtocolError


@dataclass(frozen=True, slots=True, kw_only=True)
class BackoffLimits:
    """Cost of violations: pauses begin at `pause_s`, after `forgiven` violations, and double up to `pause_s_max`. In
    seconds.

    The count of an address restarts after `memory_s` without a violation. At most `addresses_max` addresses are
    remembered.
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
class _Violator:
    violations: int
    last_s: float
    refused_until_s: float


class PeerBackoff:
    """Recent violations by address. `violations` counts all since the start."""

    def __init__(self, *, clock: Callable[[], float], limits: BackoffLimits | None = None) -> None:
        self.violations = 0
        self._clock = clock
        self._limits = limits or BackoffLimits()
        # In order of the last violation.
        self._known: dict[str, _Violator] = {}

    def __len__(self) -> int:
        return len(self._known)

    def note(self, address: str) -> None:
        """Count one violation of this address."""
        limits, now_s = self._limits, self._clock()
        self.violations += 1
        violator = self._known.pop(address, None)
        if violator is None or now_s - violator.last_s > limits.memory_s:
            violator = _Violator(violations=0, last_s=now_s, refused_until_s=now_s)
        violator.violations += 1
        violator.last_s = now_s
        beyond = violator.violations - limits.forgiven
        if beyond > 0:
            # Without a bound on the exponent, thousands of violations would overflow a float.
            pause_s = limits.pause_s * 2.0 ** min(beyond - 1, 64)
            violator.refused_until_s = now_s + min(pause_s, limits.pause_s_max)
        self._known[address] = violator
        if len(self._known) > limits.addresses_max:
            del self._known[next(iter(self._known))]

    def pause_left_s(self, address: str) -> float:
        """Seconds for which this address is still refused; 0 if it is not."""
        violator = self._known.get(address)
        return 0.0 if violator is None else max(0.0, violator.refused_until_s - self._clock())


def is_violation(error: Exception) -> bool:
    """Whether this error means that the peer broke the protocol. A peer with another configuration did not."""
    return isinstance(error, RemoteProtocolError) and not isinstance(error, PeerMismatch)


def violation_key(host: str) -> str:
    """Key under which the violations of a host count. An IPv6 host counts by its /64, the usual size of one
    allocation.
    """
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return str(address)
    if (mapped := address.ipv4_mapped) is not None:
        return str(mapped)
    return address.packed[:8].hex()
