"""Where UCX opens ports: on loopback, unless a worker is on the network or the environment names devices."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from benchmarks.nixl_child import NixlChild
from tidekv.engine.doctor.machine import listening
from tidekv.engine.poller import PollerThread
from tidekv.states.errors import InvalidConfig
from tidekv.transports.base import Link
from tidekv.transports.control import connection
from tidekv.transports.nixl.transport import NixlOptions, NixlTransport

pytestmark = pytest.mark.nixl

Start = Callable[..., Awaitable[tuple[NixlTransport, set[str]]]]


def on_network(addresses: set[str]) -> set[str]:
    return {address for address in addresses if not address.startswith("127.")}


@pytest.fixture
async def start(poller: PollerThread, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Starts a transport of this process; gives it with the ports that it opened."""
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    transports: list[NixlTransport] = []

    async def start(listen: str = "", **options: object) -> tuple[NixlTransport, set[str]]:
        before = set(listening())
        transport = NixlTransport(f"worker-{len(transports)}", **options)
        transports.append(transport)
        await transport.start(poller=poller, listen=listen)
        return transport, set(listening()) - before

    yield start
    for transport in transports:
        await transport.close()


@pytest.mark.parametrize("devices", [None, "all"])
async def test_a_process_listens_on_loopback_only_unless_its_environment_names_devices(
    devices: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    environment = {} if devices is None else {"UCX_NET_DEVICES": devices}
    child = await NixlChild.spawn(pages=4, pieces=(64,), environment=environment)
    try:
        ports = set(listening(pid=child.pid))
    finally:
        child.end()
    assert ports
    assert bool(on_network(ports)) is (devices is not None)


async def test_workers_of_one_process_have_devices_of_their_own(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="tidekv.transports")
    _, ports = await start(listen="127.0.0.1:0", dials=("localhost:7000", "127.0.0.1:1,[::1]:2"))
    assert ports
    assert not on_network(ports)
    assert not [record for record in caplog.records if record.name.startswith("tidekv.transports")]
    for listen, options in (
        ("0.0.0.0:0", {}),
        ("", {"dials": ("127.0.0.1:7000,192.0.2.77:7000",)}),
        ("", {"nixl": NixlOptions(data_network="any")}),
    ):
        caplog.clear()
        _, ports = await start(listen=listen, **options)
        assert on_network(ports)
        # Of this logger only: on a busy machine others have something to say of late steps.
        (record,) = [record for record in caplog.records if record.name.startswith("tidekv.transports")]
        assert "reads and writes the memory of this process without the secret" in record.getMessage()
    caplog.clear()
    _, ports = await start(listen="0.0.0.0:0", nixl=NixlOptions(data_network="loopback"))
    assert not on_network(ports)


async def test_devices_named_in_the_options_of_the_backend_are_kept(start: Start) -> None:
    _, ports = await start(nixl=NixlOptions(backends={"UCX": {"engine_config": "NET_DEVICES=all"}}))
    assert on_network(ports)
    _, ports = await start(nixl=NixlOptions(backends={"UCX": {"engine_config": "MAX_RNDV_RAILS=1"}}))
    assert not on_network(ports)


async def test_a_worker_on_loopback_does_not_dial_a_peer_that_could_not_write_to_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wait(link: Link) -> None:
        await link.receive()

    transport, _ = await start(dials=["127.0.0.1:*"])
    listener = await transport.listen("127.0.0.1:0", wait)
    monkeypatch.setattr(connection.ControlLink, "leaves_host", True)
    with pytest.raises(InvalidConfig, match='data_network="any"'):
        await transport.dial(listener.address)
    await listener.close()


@pytest.mark.parametrize(
    ("ours", "theirs", "leaves"),
    [
        ("127.0.0.1", "127.0.0.1", False),
        ("127.0.0.1", "127.0.0.2", False),
        ("192.0.2.2", "192.0.2.2", False),
        ("192.0.2.2", "192.0.2.3", True),
        ("::1", "::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
    ],
)
def test_a_link_knows_whether_it_leaves_the_machine(ours: str, theirs: str, *, leaves: bool) -> None:
    class Writer:
        transport = None

        def get_extra_info(self, name: str) -> tuple[str, int]:
            return {"sockname": (ours, 1), "peername": (theirs, 2)}[name]

    link = connection.ControlLink(None, Writer(), peer_label="", options=connection.ControlOptions())
    assert link.leaves_host is leaves


def test_a_network_that_there_is_not_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"data_network .*auto, loopback"):
        NixlTransport("worker", nixl=NixlOptions(data_network="lan"))
