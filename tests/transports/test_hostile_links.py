"""Links between ends that a third party can reach, change or occupy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.transports.test_wire import HELLO
from tidekv.states.errors import InvalidConfig, InvalidRequest, PrefillCause, RemoteProtocolError
from tidekv.transports import wire
from tidekv.transports.base import DialFailed, Link
from tidekv.transports.control import addresses, challenge, connection
from tidekv.transports.control.connection import ControlLink, ControlOptions
from tidekv.transports.nixl.transport import NixlTransport

SECRET = "s"
LIMIT_S = 60.0
Pump = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def prefill(
    links: asyncio.Queue[Link] | None = None, **options: object
) -> AsyncIterator[connection.ControlListener]:
    """A listener that keeps its links, with the secret."""

    async def keep(link: Link) -> None:
        if links is not None:
            await links.put(link)
        await asyncio.Event().wait()

    listener = await connection.listen("127.0.0.1:0", keep, ControlOptions(**{"secret": SECRET} | options))
    try:
        yield listener
    finally:
        await listener.close()


async def dial(address: str, **options: object) -> ControlLink:
    return await connection.dial(address, ControlOptions(**{"secret": SECRET} | options))


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)


@contextlib.asynccontextmanager
async def between(address: str, *, up: Pump = pass_on, down: Pump = pass_on) -> AsyncIterator[str]:
    """A program between dialler and listener, which passes on what each says by `up` and `down`; its address."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        upper_reader, upper_writer = await asyncio.open_connection(*addresses.parse_address(address))
        try:
            await asyncio.wait(
                [asyncio.create_task(up(reader, upper_writer)), asyncio.create_task(down(upper_reader, writer))],
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            for one in (writer, upper_writer):
                one.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"{host}:{port}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_a_program_in_between_gets_no_link_by_passing_the_challenge_on(watchdog: None) -> None:
    async with prefill() as listener, between(listener.address) as relay:
        with pytest.raises(DialFailed, match="does not listen there") as refused:
            await dial(relay)
        assert refused.value.cause is PrefillCause.MISCONFIGURED
        assert listener.statistics()["links_misdirected"] == 1
        assert listener.statistics()["violations"] == 0
        await (await dial(listener.address)).close()


async def test_an_address_from_which_connections_are_forwarded_is_announced(watchdog: None) -> None:
    links: asyncio.Queue[Link] = asyncio.Queue()
    async with prefill(links) as listener, between(listener.address) as forwarded:
        listener._options = ControlOptions(secret=SECRET, announces=(forwarded,))
        link = await dial(forwarded)
        link.send(HELLO)
        assert await (await links.get()).receive() == HELLO
        await link.close()


@pytest.mark.parametrize("what", ["body", "seal", "repeated", "left out"])
async def test_a_frame_changed_on_the_way_is_refused_before_it_is_decoded(what: str, watchdog: None) -> None:
    async def meddle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(challenge.GREETING_BYTES))
        length = await reader.readexactly(2)
        writer.write(length + await reader.readexactly(int.from_bytes(length, "little") + challenge.PROOF_BYTES))
        number = 0
        while True:
            prefix = await reader.readexactly(wire.LENGTH.size)
            body = bytearray(await reader.readexactly(wire.LENGTH.unpack(prefix)[0] + challenge.SEAL_BYTES))
            number += 1
            if number == 2:
                match what:
                    case "body":
                        body[-challenge.SEAL_BYTES - 1] ^= 1
                    case "seal":
                        body[-1] ^= 1
                    case "repeated":
                        writer.write(prefix + body)
                    case "left out":
                        continue
            writer.write(prefix + body)

    links: asyncio.Queue[Link] = asyncio.Queue()
    async with prefill(links) as listener, between(listener.address, up=meddle) as relay:
        listener._options = ControlOptions(secret=SECRET, announces=(relay,))
        ours = await dial(relay)
        theirs = await links.get()
        theirs.mark_greeted()
        for sent_at in range(3):
            ours.send(wire.Ping(sent_at=float(sent_at)))
        received = [await theirs.receive()]
        with pytest.raises(RemoteProtocolError, match="not authentic"):
            while True:
                received.append(await theirs.receive())
        assert received == [wire.Ping(sent_at=float(number)) for number in range(len(received))]
        assert len(received) == (2 if what == "repeated" else 1)
        await ours.close()


async def test_a_frame_of_the_other_direction_does_not_pass_as_ours(watchdog: None) -> None:
    links: asyncio.Queue[Link] = asyncio.Queue()
    async with prefill(links) as listener:
        ours = await dial(listener.address)
        theirs = await links.get()
        assert isinstance(theirs, ControlLink)
        theirs.mark_greeted()
        body = wire.encode_frame(wire.Ping(sent_at=1.0))
        assert theirs._seals is not None
        ours._writer.write(body + theirs._seals.ours.next(body[wire.LENGTH.size :]))
        with pytest.raises(RemoteProtocolError, match="not authentic"):
            await theirs.receive()
        await ours.close()


async def test_without_a_secret_the_first_frame_must_be_a_hello(watchdog: None) -> None:
    links: asyncio.Queue[Link] = asyncio.Queue()
    async with prefill(links, secret="") as listener:
        ours = await dial(listener.address, secret="")
        theirs = await links.get()
        ours.send(wire.Ping(sent_at=1.0))
        with pytest.raises(RemoteProtocolError, match=r"may not send now: .*ping"):
            await theirs.receive()
        await ours.close()
        ours = await dial(listener.address, secret="")
        theirs = await links.get()
        ours.send(HELLO)
        assert await theirs.receive() == HELLO
        theirs.send(wire.Ping(sent_at=1.0))
        with pytest.raises(RemoteProtocolError, match=r"may not send now: .*ping"):
            await ours.receive()


async def test_silent_connections_keep_no_dialler_out(watchdog: None) -> None:
    async with contextlib.AsyncExitStack() as stack:
        listener = await stack.enter_async_context(prefill(links_per_address_max=4, links_max=8, handshake_s=LIMIT_S))
        silent = []
        for number in range(12):
            reader, writer = await asyncio.open_connection(*addresses.parse_address(listener.address))
            stack.callback(writer.close)
            await reader.readexactly(challenge.GREETING_BYTES)
            silent.append(reader)
            assert listener.statistics()["handshakes_dropped"] == max(0, number - 3)
        link = await dial(listener.address)
        assert listener.statistics()["handshakes_dropped"] == 9
        for reader in silent[:8]:
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        assert listener.statistics()["violations"] == 0
        await link.close()


async def test_silent_connections_of_many_addresses_keep_no_dialler_out(watchdog: None) -> None:
    async with contextlib.AsyncExitStack() as stack:
        listener = await stack.enter_async_context(prefill(links_per_address_max=4, links_max=8, handshake_s=LIMIT_S))
        host, port = addresses.parse_address(listener.address)
        for number in range(20):
            source = (f"127.0.1.{1 + number // 2}", 0)
            reader, writer = await asyncio.open_connection(host, port, local_addr=source)
            stack.callback(writer.close)
            await reader.readexactly(challenge.GREETING_BYTES)
        assert listener.statistics()["handshakes_dropped"] == 12
        await (await dial(listener.address)).close()


async def test_a_silent_connection_is_counted_and_no_violation(watchdog: None) -> None:
    async with prefill() as listener:
        reader, writer = await asyncio.open_connection(*addresses.parse_address(listener.address))
        await reader.readexactly(challenge.GREETING_BYTES)
        writer.close()
        async with asyncio.timeout(LIMIT_S):
            while not listener.statistics()["links_silent"]:  # noqa: ASYNC110  # Nothing reports it.
                await asyncio.sleep(0)
        assert listener.statistics()["violations"] == 0


async def test_a_decode_worker_dials_only_what_it_may(watchdog: None) -> None:
    connected = asyncio.Event()

    async def stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        writer.close()

    server = await asyncio.start_server(stranger, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for dials in ((), ("127.0.0.1:1",), ("prefill:*",)):
        transport = NixlTransport("decode", secret=SECRET, dials=dials)
        with pytest.raises(InvalidRequest, match="not in `dials`"):
            transport.check_address(f"127.0.0.1:{port}")
        with pytest.raises(InvalidRequest, match="not in `dials`"):
            await transport.dial(f"127.0.0.1:{port}")
    assert not connected.is_set()
    for listed in ([f"127.0.0.1:{port}"], None):  # Without a list the program that embeds the engine chooses.
        with pytest.raises(DialFailed):
            await NixlTransport("decode", secret=SECRET, dials=listed).dial(f"127.0.0.1:{port}")
        assert connected.is_set()
        connected.clear()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize(
    ("rule", "allowed", "refused"),
    [
        ("10.0.0.5:7000", ["10.0.0.5:7000"], ["10.0.0.5:7001", "10.0.0.50:7000", "prefill:7000"]),
        ("10.0.0.5:7000-7003", ["10.0.0.5:7000", "10.0.0.5:7003"], ["10.0.0.5:6999", "10.0.0.5:7004"]),
        ("10.0.0.5:*", ["10.0.0.5:1", "10.0.0.5:65535"], ["10.0.0.6:1"]),
        ("10.0.0.0/24:7000", ["10.0.0.9:7000"], ["10.0.1.9:7000", "name:7000"]),
        ("[fd00::/16]:7000", ["[fd00::9]:7000"], ["[fe80::9]:7000"]),
        ("[fd00::1]:7000", ["[fd00::1]:7000", "[fd00:0::1]:7000"], ["[fd00::2]:7000"]),
        ("prefill:7000", ["prefill:7000", "PREFILL:7000", "prefill.:7000"], ["prefill.evil:7000", "evil.prefill:7000"]),
        (
            "*.prefill.svc:7000",
            ["a.prefill.svc:7000"],
            ["prefill.svc:7000", "a.prefill.svc.evil:7000", "10.0.0.1:7000"],
        ),
        ("*:*", ["a:1", "10.0.0.1:2", "[::1]:3"], []),
        ("a:1,b:2", ["a:1", "b:2"], ["a:2"]),
    ],
)
def test_an_entry_of_the_list_allows_what_it_says(rule: str, allowed: list[str], refused: list[str]) -> None:
    dials = addresses.Dials.parse([rule])
    assert [one for one in allowed if not dials.allows(one)] == []
    assert [one for one in refused if dials.allows(one)] == []


@pytest.mark.parametrize(
    "rule", ["", "host", ":1", "host:", "host:x", "host:2-1", "host:70000", "10.0.0.0/99:1", "a b:1"]
)
def test_an_entry_that_is_no_address_is_named(rule: str) -> None:
    with pytest.raises(InvalidConfig, match="dials"):
        NixlTransport("decode", dials=[rule])


async def test_only_a_list_of_this_machine_stays_on_it() -> None:
    for rule, leaves in (("127.0.0.1:*", False), ("127.*:1", False), ("127.0.0.0/8:1", False), ("[::1]:1", False)):
        assert await addresses.Dials.parse([rule]).leave_host() is leaves
    for rule in ("192.0.2.1:1", "10.0.0.0/8:1", "*:1", "*.svc:1", "name.invalid:1"):
        assert await addresses.Dials.parse([rule]).leave_host()
