"""Settings of SGLang's transfer backend `tidekv`, in the environment variable TIDEKV_SGLANG of both servers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Final

import msgspec

from tidekv.backends.storage.options import read_extra_options
from tidekv.engine.config.engine_config import EngineConfig, MetricsOptions, PeerOptions
from tidekv.engine.integrations.link_settings import LinkSettings
from tidekv.states.errors import InvalidConfig
from tidekv.states.validation import PlainText, Seconds, host_and_port, unknown
from tidekv.transports.control.addresses import Dials, format_address, parse_address

VARIABLE: Final = "TIDEKV_SGLANG"
BACKEND: Final = "tidekv"
"""Value of --disaggregation-transfer-backend."""


class BackendSettings(LinkSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of TIDEKV_SGLANG, a JSON object or @file. `listen` is a prefill server's, with port 0 on the address of
    the server by default; `dials` is needed by a decode server, and names bootstrap services and prefill workers.
    """

    where: ClassVar[str] = VARIABLE

    prefills: tuple[PlainText, ...] = ()
    """Bootstrap services, host:port, of prefill servers that decode asks to compute a prompt whose own prefill is gone,
    one after the other.
    """
    restore_timeout_s: Seconds = 300.0
    """Maximum seconds in which decode gets a prompt, prefill's computation included; then the request fails."""
    promise_timeout_s: Seconds = 300.0
    """Seconds for which prefill holds the pages of a prompt that no decode worker asks for; then its request fails."""
    lease_s: Seconds = 30.0
    """Seconds for which either end waits for an end that gives no sign of life: prefill with the pages of a prompt,
    decode with half of them for a prefill that was silent.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        dials = Dials.parse(self.dials)
        for address in self.prefills:
            host_and_port(address, "prefills", InvalidConfig)
            if not dials.allows(address):
                raise InvalidConfig(f"prefills: {address} is not in dials")

    @property
    def peer(self) -> PeerOptions:
        """The options of decode's links: those of `engine.peer` if it has any, else by `lease_s`."""
        if self.engine.peer != PeerOptions():
            return self.engine.peer
        silence_s = self.lease_s / 2
        return PeerOptions(lease_s=self.lease_s, silence_s=silence_s, heartbeat_s=min(0.5, silence_s / 2))

    def engine_of(self, rank: int, ranks: int) -> EngineConfig:
        """Return the engine's options for one of several tensor-parallel ranks, each of which has an engine of its own.

        Raises InvalidConfig, which names the option, for what ranks cannot share.
        """
        engine = msgspec.structs.replace(self.engine, peer=self.peer, default_deadline_s=self.restore_timeout_s)
        if ranks == 1:
            return engine
        if engine.journal.path is not None and not Path(engine.journal.path).is_dir():
            raise InvalidConfig(
                f"{VARIABLE}: engine.journal.path: {engine.journal.path} must be a directory that exists: each of "
                f"{ranks} ranks writes a file of its own"
            )
        if engine.kv_events.endpoint is not None:
            raise InvalidConfig(f"{VARIABLE}: engine.kv_events: {ranks} ranks would publish at one endpoint")
        listen, peers_at = engine.metrics.listen, engine.cache_peers.listen
        if listen is not None:
            engine = msgspec.structs.replace(engine, metrics=MetricsOptions(listen=_port_of_rank(listen, rank)))
        if peers_at is not None:
            peers = msgspec.structs.replace(engine.cache_peers, listen=_port_of_rank(peers_at, rank))
            engine = msgspec.structs.replace(engine, cache_peers=peers)
        return engine


def _port_of_rank(listen: str, rank: int) -> str:
    """Return the address at which a rank listens: so many ports further, and at any port if that is 0."""
    host, port = parse_address(listen)
    return format_address(host, port + rank if port else 0)


def read_settings(environment: Mapping[str, str]) -> BackendSettings:
    """Read the settings. Raises InvalidConfig, which names the wrong key."""
    text = environment.get(VARIABLE)
    if text is None:
        raise InvalidConfig(
            f"--disaggregation-transfer-backend {BACKEND} needs its settings in the environment variable {VARIABLE}: "
            'a JSON object such as {"dials": ["127.0.0.1:*"]}, or @ and the path of a file'
        )
    try:
        given = read_extra_options(text)
    except InvalidConfig as error:
        raise InvalidConfig(f"{VARIABLE}: {error}") from error
    names = BackendSettings.__struct_fields__
    for name in sorted(set(given) - set(names)):
        raise InvalidConfig(f"{VARIABLE}: {unknown(name, names, 'key')}")
    try:
        return msgspec.convert(given, BackendSettings)
    except msgspec.ValidationError as error:
        cause = error.__cause__ if isinstance(error.__cause__, InvalidConfig) else error
        raise InvalidConfig(f"{VARIABLE}: {cause}") from error
