"""Control links over real sockets on 127.0.0.1: the challenge, the limits, and how links end."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.ports import free_address
from tests.support.waits import LIMIT_S
from tests.transports.test_wire import HELLO
from tidekv.states.errors import (
    InvalidConfig,
    LinkClosed,
    PeerMismatch,
    PrefillCause,
    RemoteProtocolError,
    TransferFailed,
)
from tidekv.transports import wire
from tidekv.transports.base import DialFailed, Link
from tidekv.transports.control import addresses, challenge, connection
from tidekv.transports.control import connection as control
from tidekv.transports.control.connection import ControlOptions

ROOM = wire.RoomId(instance="d", epoch="e", request_id="r", generation=0)
ONE_TOKEN: Any = {"room": ROOM, "prompt_digest": bytes(32), "prompt_tokens": 1, "decode_prefix_len": 0}
CERTIFICATE = Path(__file__).parent / "localhost.pem"


class Ends:
    """Listeners of one test, and the links that came to them."""

    def __init__(self) -> None:
        self.links: asyncio.Queue[Link] = asyncio.Queue()
        self.listeners: list[control.ControlListener] = []
        self.dialled: list[control.ControlLink] = []

    async def listen(self, on_link: Callable[[Link], Awaitable[None]] | None = None, **options: object):
        async def keep(link: Link) -> None:
            await self.links.put(link)
            await asyncio.Event().wait()

        listener = await control.listen("127.0.0.1:0", on_link or keep, ControlOptions(**options))
        self.listeners.append(listener)
        return listener

    async def dial(self, address: str, **options: object) -> control.ControlLink:
        link = await control.dial(address, ControlOptions(**options))
        self.dialled.append(link)
        return link

    async def pair(self, **options: object) -> tuple[control.ControlLink, Link]:
        listener = await self.listen(**options)
        ours = await self.dial(listener.address, **options)
        theirs = await self.links.get()
        ours.mark_greeted()
        theirs.mark_greeted()
        return ours, theirs

    async def close(self) -> None:
        for link in self.dialled:
            await link.close()
        for listener in self.listeners:
            await listener.close()


@pytest.fixture
async def ends(watchdog: None) -> AsyncIterator[Ends]:
    ends = Ends()
    try:
        yield ends
    finally:
        await ends.close()


@pytest.mark.parametrize("secret", ["", "s3cret ü"])
async def test_messages_pass_both_ways_in_order(ends: Ends, secret: str) -> None:
    ours, theirs = await ends.pair(secret=secret)
    for sent_at in range(5):
        ours.send(wire.Ping(sent_at=sent_at))
        theirs.send(wire.Chunk(room=ROOM, rank=0, span=0, first=sent_at, count=1, last=False))
    assert [(await theirs.receive()).sent_at for _ in range(5)] == [0, 1, 2, 3, 4]
    assert [(await ours.receive()).first for _ in range(5)] == [0, 1, 2, 3, 4]


def watch_writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many frames each system call will have had."""
    written: list[int] = []
    write = asyncio.StreamWriter.writelines

    def counted(writer: asyncio.StreamWriter, frames: list[bytes]) -> None:
        written.append(len(frames))
        write(writer, frames)

    monkeypatch.setattr(asyncio.StreamWriter, "writelines", counted)
    return written


async def test_what_nobody_waits_for_is_written_with_what_follows_in_order(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "BATCH_DELAY_S", 60.0)
    ours, theirs = await ends.pair()
    written = watch_writes(monkeypatch)
    ours.send(wire.Received(room=ROOM))
    for _ in range(5):
        await asyncio.sleep(0)
    assert written == []
    ours.send(wire.Ping(sent_at=1))
    ours.send(wire.Received(room=ROOM))
    assert [type(await theirs.receive()) for _ in range(3)] == [wire.Received, wire.Ping, wire.Received]
    assert written == [3]
    ours.send(wire.Received(room=ROOM))
    await ours.close("enough")
    assert written == [3, 1]
    assert isinstance(await theirs.receive(), wire.Received)


async def test_what_nobody_waits_for_does_not_wait_for_ever(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = await ends.pair()
    written = watch_writes(monkeypatch)
    for _ in range(2):
        ours.send(wire.Received(room=ROOM))
        ours.send(wire.Received(room=ROOM))
        async with asyncio.timeout(LIMIT_S):
            assert [type(await theirs.receive()) for _ in range(2)] == [wire.Received] * 2
    assert written == [2, 2]


async def test_what_is_said_in_a_turn_is_written_at_once_and_before_a_close(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = await ends.pair()
    written = watch_writes(monkeypatch)
    for sent_at in range(3):
        ours.send(wire.Ping(sent_at=sent_at))
    assert written == []
    assert (await theirs.receive()).sent_at == 0
    assert written == [3]
    ours.send(wire.Ping(sent_at=3))
    await ours.close("enough")
    assert written == [3, 1]
    assert [(await theirs.receive()).sent_at for _ in range(3)] == [1, 2, 3]
    with pytest.raises(LinkClosed, match="enough"):
        await theirs.receive()


async def test_a_frame_of_nearly_the_limit_passes_and_one_above_is_not_sent(ends: Ends) -> None:
    ours, theirs = await ends.pair()
    big = wire.Promise(
        room=ROOM,
        prompt_digest=bytes(32),
        prompt_tokens=1,
        decode_prefix_len=0,
        pages=bytes(wire.FRAME_BYTES_MAX - 100),
    )
    ours.send(big)
    assert await theirs.receive() == big
    over = wire.Promise(**ONE_TOKEN, pages=bytes(wire.FRAME_BYTES_MAX))
    with pytest.raises(Exception, match="at most"):
        ours.send(over)
    ours.send(wire.Ping(sent_at=1.0))
    assert await theirs.receive() == wire.Ping(sent_at=1.0)


async def test_a_wrong_secret_is_refused_before_anything_is_read(ends: Ends) -> None:
    listener = await ends.listen(secret="right")
    with pytest.raises(TransferFailed, match="secrets differ"):
        await ends.dial(listener.address, secret="wrong")
    assert listener.statistics()["links_refused"] == 1
    assert ends.links.empty()
    await ends.dial(listener.address, secret="right")
    await ends.links.get()


async def test_a_listener_that_cannot_prove_the_secret_is_refused(ends: Ends) -> None:
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(challenge.greeting(bytes(32)))
        await reader.readexactly(challenge.GREETING_BYTES)
        await reader.readexactly(int.from_bytes(await reader.readexactly(2), "little") + challenge.PROOF_BYTES)
        writer.write(b"x" * challenge.PROOF_BYTES)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(impostor, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(TransferFailed, match="did not prove"):
        await ends.dial(f"127.0.0.1:{port}", secret="right")
    server.close()
    await server.wait_closed()


async def test_a_proof_played_back_is_refused(ends: Ends) -> None:
    """A peer without the secret gets no proof out of the listener, and its own greeting back is none."""
    listener = await ends.listen(secret="right")
    reader, writer = await asyncio.open_connection(*addresses.parse_address(listener.address))
    greeting = await reader.readexactly(challenge.GREETING_BYTES)
    writer.write(greeting + bytes(2) + challenge.proof(b"", b"listen", greeting[-32:] * 2))
    assert await reader.read() == challenge.REFUSED_PROOF
    writer.close()
    assert listener.statistics()["links_refused"] == 1
    assert ends.links.empty()


def test_a_proof_is_bound_to_key_role_nonces_and_target() -> None:
    ours, theirs = bytes(32), bytes(range(32))
    proofs = {
        challenge.proof(key, role, first + second + target)
        for key in (b"", b"k")
        for role in (b"dial", b"listen")
        for first in (ours, theirs)
        for second in (ours, theirs)
        for target in (b"", b"127.0.0.1:1\n127.0.0.1:1")
    }
    assert len(proofs) == 32
    said = b"tidekv\r\n" + b"dial" + ours + theirs
    assert challenge.proof(b"k", b"dial", ours + theirs) == hmac.new(b"k", said, hashlib.sha256).digest()


async def test_a_secret_is_stretched_once() -> None:
    key = await challenge.stretched("passphrase")
    assert key == hashlib.scrypt(b"passphrase", salt=b"tidekv\r\n", n=2**14, r=8, p=1, dklen=32)
    assert await challenge.stretched("passphrase") is key
    assert await challenge.stretched("") == b""


async def test_another_version_is_named(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    async def newer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(challenge.MAGIC + (wire.VERSION + 1).to_bytes(2, "little") + bytes(32))
        await writer.drain()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(newer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(PeerMismatch, match="version") as caught:
        await ends.dial(f"127.0.0.1:{port}")
    assert (caught.value.ours, caught.value.theirs) == (wire.VERSION, wire.VERSION + 1)
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n" * 10, b"\0" * 200, b""])
async def test_a_stranger_is_cut_off_and_others_are_served(ends: Ends, said: bytes) -> None:
    listener = await ends.listen(handshake_s=0.2)
    reader, writer = await asyncio.open_connection(*addresses.parse_address(listener.address))
    writer.write(said)
    with contextlib.suppress(ConnectionResetError):  # The listener drops what it has not read.
        await reader.read()
    writer.close()
    await ends.dial(listener.address)
    await ends.links.get()
    assert listener.statistics()["links_refused"] == 1


async def test_links_over_the_limit_are_refused(ends: Ends) -> None:
    listener = await ends.listen(links_max=1)
    await ends.dial(listener.address)
    with pytest.raises(TransferFailed):
        await ends.dial(listener.address)
    assert listener.statistics()["links_over_limit"] == 1


async def test_nobody_there_is_a_failed_transfer(ends: Ends) -> None:
    listener = await ends.listen()
    await listener.close()
    with pytest.raises(
        TransferFailed,
        match=re.escape(
            f"cannot reach {listener.address}: Connection refused; "
            "start the program that listens there, or correct the address"
        ),
    ):
        await ends.dial(listener.address)


async def test_a_listener_that_says_nothing_is_given_up(ends: Ends) -> None:
    gone = asyncio.Event()

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await gone.wait()
        writer.close()

    server = await asyncio.start_server(mute, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(TransferFailed, match="did not answer"):
        await ends.dial(f"127.0.0.1:{port}", handshake_s=0.05)
    gone.set()
    server.close()
    await server.wait_closed()


async def test_the_cause_of_a_close_reaches_the_other_end(ends: Ends) -> None:
    ours, theirs = await ends.pair()
    ours.send(wire.Ping(sent_at=1.0))
    await ours.close("we have had enough")
    assert await theirs.receive() == wire.Ping(sent_at=1.0)
    for _ in range(2):
        with pytest.raises(LinkClosed, match="we have had enough"):
            await theirs.receive()
    with pytest.raises(LinkClosed, match="we have had enough"):
        theirs.send(wire.Ping(sent_at=1.0))
    with pytest.raises(LinkClosed, match="closed by us"):
        ours.send(wire.Ping(sent_at=1.0))
    with pytest.raises(LinkClosed, match="closed by us"):
        await ours.receive()
    await ours.close()


async def test_a_connection_that_breaks_ends_the_link(ends: Ends) -> None:
    ours, theirs = await ends.pair()
    ours._writer.transport.abort()
    with pytest.raises(LinkClosed, match="closed the connection"):
        await theirs.receive()


@pytest.mark.parametrize(
    "raw",
    [b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x01\0\0\0\xc1", b"\x04\0\0\0" + b"\x93\x01\x02\x03"],
    ids=["empty", "oversize", "no msgpack", "no message"],
)
async def test_a_malformed_frame_closes_the_link_and_says_why(ends: Ends, raw: bytes) -> None:
    ours, theirs = await ends.pair()
    ours._writer.write(raw)
    with pytest.raises(RemoteProtocolError):
        await theirs.receive()
    with pytest.raises(LinkClosed, match="frame"):
        await ours.receive()
    with pytest.raises(LinkClosed):
        await theirs.receive()


async def test_a_peer_that_does_not_read_is_dropped_and_memory_is_bounded(ends: Ends) -> None:
    ours, _ = await ends.pair(outgoing_bytes_max=4 * 1024 * 1024)
    message = wire.Promise(**ONE_TOKEN, pages=bytes(256 * 1024))
    with pytest.raises(LinkClosed, match="does not read"):
        for _ in range(1000):
            ours.send(message)
    with pytest.raises(LinkClosed, match="does not read"):
        await ours.receive()


async def test_closing_a_listener_closes_its_links(ends: Ends) -> None:
    listener = await ends.listen()
    link = await ends.dial(listener.address)
    await ends.links.get()
    await listener.close()
    with pytest.raises(LinkClosed):
        await link.receive()


async def test_a_link_task_that_raises_is_heard_of(ends: Ends) -> None:
    heard: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: heard.append(context["exception"]))

    async def buggy(link: Link) -> None:
        raise ZeroDivisionError("bug")

    listener = await ends.listen(buggy)
    link = await ends.dial(listener.address)
    with pytest.raises(LinkClosed):
        await link.receive()
    with pytest.raises(ZeroDivisionError):
        await listener.close()
    assert [type(error) for error in heard] == [ZeroDivisionError]


async def test_tls_carries_the_challenge_and_the_messages(ends: Ends) -> None:
    listening = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    listening.load_cert_chain(CERTIFICATE)
    dialling = ssl.create_default_context(cafile=str(CERTIFICATE))
    ours, theirs = await ends.pair(listen_tls=listening, dial_tls=dialling, secret="s")
    ours.send(wire.Ping(sent_at=1.0))
    assert await theirs.receive() == wire.Ping(sent_at=1.0)
    with pytest.raises(TransferFailed, match=r"cannot reach .*; check the certificates of both ends"):
        await ends.dial(ends.listeners[0].address, dial_tls=ssl.create_default_context(), secret="s")
    with pytest.raises(TransferFailed):
        await ends.dial(ends.listeners[0].address, secret="s", handshake_s=1.0)


@pytest.mark.parametrize("address", ["", "host", ":80", "host:", "host:x", "host:70000", "host:-1", "host:²"])
async def test_an_address_that_is_none_is_named(ends: Ends, address: str) -> None:
    with pytest.raises(InvalidConfig, match="host:port"):
        await ends.dial(address)


async def test_a_taken_port_is_named(ends: Ends) -> None:
    listener = await ends.listen()
    with pytest.raises(InvalidConfig, match="cannot listen"):
        await control.listen(listener.address, lambda link: link.close(), ControlOptions())


def test_addresses_of_both_families_are_read_and_written() -> None:
    assert addresses.parse_address("10.0.0.5:7000") == ("10.0.0.5", 7000)
    assert addresses.parse_address("[::1]:7000") == ("::1", 7000)
    assert addresses.format_address("::1", 7000) == "[::1]:7000"


def unfinished(length: int, *, sent: int) -> bytes:
    return wire.LENGTH.pack(length) + bytes(sent)


async def test_before_the_hello_is_accepted_only_small_frames_are_taken(ends: Ends) -> None:
    listener = await ends.listen(hello_bytes_max=1000)
    strangers = [await ends.dial(listener.address) for _ in range(2)]
    for stranger, length in zip(strangers, (1001, 1000), strict=True):
        stranger._writer.write(unfinished(length, sent=length))
        link = await ends.links.get()
        expected = "no message" if length == 1000 else "1001 bytes; 1 to 1000"
        with pytest.raises(RemoteProtocolError, match=expected):
            await link.receive()


async def test_large_frames_wait_for_their_share_of_the_budget(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    reserved: list[tuple[str, int]] = []
    reserve = control.FrameBudget.reserve
    listener = await ends.listen()
    budgets = listener._budgets

    def noted(budget: control.FrameBudget, size: int):
        reserved.append(("greeting" if budget is budgets.greeting else "greeted", size))
        return reserve(budget, size)

    monkeypatch.setattr(control.FrameBudget, "reserve", noted)
    ours = await ends.dial(listener.address)
    theirs = await ends.links.get()
    hello = msgspec.structs.replace(HELLO, metadata=bytes(control.SMALL_FRAME_BYTES))
    large = wire.Promise(**ONE_TOKEN, pages=bytes(control.SMALL_FRAME_BYTES))
    size, hello_size = (len(wire.encode_frame(message)) - wire.LENGTH.size for message in (large, hello))
    ours.send(hello)
    assert await theirs.receive() == hello
    theirs.mark_greeted()
    ours.send(large)
    ours.send(wire.Ping(sent_at=1.0))
    assert await theirs.receive() == large
    assert await theirs.receive() == wire.Ping(sent_at=1.0)
    assert reserved == [("greeting", hello_size), ("greeted", size)]


async def test_a_budget_is_given_out_in_order_and_never_exceeded(watchdog: None) -> None:
    budget = control.FrameBudget(10)
    order: list[str] = []
    gates = {name: asyncio.Event() for name in "abcd"}

    async def hold(name: str, size: int) -> None:
        async with budget.reserve(size):
            order.append(name)
            await gates[name].wait()

    async def turns() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    tasks = {name: asyncio.create_task(hold(name, size)) for name, size in {"a": 6, "b": 5, "c": 10, "d": 1}.items()}
    await turns()
    assert order == ["a"]
    tasks["b"].cancel()
    await turns()
    gates["a"].set()
    await turns()
    assert order == ["a", "c"]
    gates["c"].set()
    await turns()
    assert order == ["a", "c", "d"]
    tasks["d"].cancel()
    await turns()
    async with budget.reserve(10):
        pass
    await asyncio.wait(tasks.values())


async def test_a_large_frame_must_be_finished_in_time(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "FRAME_S", 0.05)
    ours, theirs = await ends.pair()
    ours._writer.write(unfinished(control.SMALL_FRAME_BYTES + 1, sent=100))
    with pytest.raises(LinkClosed, match="did not finish a frame"):
        await theirs.receive()


async def test_one_address_has_a_quota_of_links(ends: Ends) -> None:
    listener = await ends.listen(links_per_address_max=2)
    links = [await ends.dial(listener.address) for _ in range(2)]
    with pytest.raises(TransferFailed):
        await ends.dial(listener.address)
    assert listener.statistics()["links_over_quota"] == 1
    await links[0].close()
    served = [await ends.links.get() for _ in range(2)]
    gone = next(
        link for link in served if link.peer_label.endswith(str(links[0]._writer.get_extra_info("sockname")[1]))
    )
    with pytest.raises(LinkClosed):
        await gone.receive()


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0"])
async def test_an_address_of_the_network_needs_a_secret_or_certificates(ends: Ends, address: str) -> None:
    async def nothing(link: Link) -> None:
        await link.close()

    with pytest.raises(InvalidConfig, match="without a secret, every program that reaches it"):
        await control.listen(address, nothing, ControlOptions())
    listening = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with pytest.raises(InvalidConfig, match="allow_no_secret"):
        await control.listen(address, nothing, ControlOptions(listen_tls=listening))
    listening.verify_mode = ssl.CERT_REQUIRED
    for options in ({"secret": "s"}, {"listen_tls": listening}, {"allow_no_secret": True}):
        ends.listeners.append(await control.listen(address, nothing, ControlOptions(**options)))


@pytest.mark.parametrize(
    ("address", "is_loopback"),
    [("127.0.0.1:1", True), ("127.8.0.1:1", True), ("[::1]:1", True), ("localhost:1", True), ("0.0.0.0:1", False)],
)
async def test_addresses_of_this_machine_only_are_known(address: str, is_loopback: bool) -> None:
    assert await addresses.is_loopback(address) is is_loopback
    assert not await addresses.is_loopback("name.invalid:1")


async def test_why_a_listener_cannot_be_dialled_is_one_of_a_few_causes(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cause_of(address: str, **options: object) -> PrefillCause:
        with pytest.raises(DialFailed, match=re.escape(address)) as failed:
            await ends.dial(address, **options)
        return failed.value.cause

    listener = await ends.listen(secret="s", links_max=1)
    assert await cause_of(listener.address, secret="t") is PrefillCause.WRONG_SECRET
    await ends.dial(listener.address, secret="s")
    assert await cause_of(listener.address, secret="s") is PrefillCause.UNREACHABLE
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        assert await cause_of(f"127.0.0.1:{port}", handshake_s=0.05) is PrefillCause.SILENT
    assert await cause_of(free_address()) is PrefillCause.CONNECTION_REFUSED
    tls = ssl.create_default_context()
    plain = await ends.listen()
    assert await cause_of(plain.address, dial_tls=tls) in (PrefillCause.MISCONFIGURED, PrefillCause.UNREACHABLE)

    async def resolved(error: OSError) -> PrefillCause:
        async def fail(*arguments: object, **named: object) -> None:
            raise error

        monkeypatch.setattr(asyncio, "open_connection", fail)
        return await cause_of("name.invalid:1")

    assert await resolved(socket.gaierror(socket.EAI_NONAME, "no such name")) is PrefillCause.UNKNOWN_HOST
    assert await resolved(socket.gaierror(socket.EAI_AGAIN, "no answer")) is PrefillCause.UNREACHABLE
    assert await resolved(OSError(113, "no route to host")) is PrefillCause.UNREACHABLE


async def test_a_listener_that_ends_during_the_handshake_is_no_wrong_secret(ends: Ends) -> None:
    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(challenge.greeting(bytes(32)))
        await reader.readexactly(challenge.GREETING_BYTES)
        await reader.readexactly(int.from_bytes(await reader.readexactly(2), "little") + challenge.PROOF_BYTES)
        writer.close()

    server = await asyncio.start_server(end, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    with pytest.raises(DialFailed, match="before it answered our proof") as failed:
        await ends.dial(f"{host}:{port}", secret="s")
    assert failed.value.cause is PrefillCause.UNREACHABLE
    assert failed.value.cause.retryable
    server.close()


async def test_a_listener_that_proves_another_secret_is_told_as_that(ends: Ends) -> None:
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(challenge.greeting(bytes(32)))
        await reader.readexactly(challenge.GREETING_BYTES)
        await reader.readexactly(int.from_bytes(await reader.readexactly(2), "little") + challenge.PROOF_BYTES)
        writer.write(b"x" * challenge.PROOF_BYTES)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(impostor, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    with pytest.raises(DialFailed, match="did not prove") as failed:
        await ends.dial(f"{host}:{port}", secret="s")
    assert failed.value.cause is PrefillCause.WRONG_SECRET
    server.close()


async def test_a_host_that_lost_power_is_noticed_by_the_kernel_of_both_ends(ends: Ends) -> None:
    for link in await ends.pair():
        connection = link._writer.get_extra_info("socket")
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == control.KEEPALIVE_S


@pytest.mark.parametrize("end", ["cancelled", "late"])
async def test_a_dial_that_is_given_up_closes_its_connection(end: str) -> None:
    accepted, ended = asyncio.Event(), asyncio.Event()

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set()
        try:
            # The first bytes of the challenge may come; then the end of the connection.
            with contextlib.suppress(ConnectionError):
                while await reader.read(1 << 16):
                    pass
        finally:
            ended.set()
            writer.transport.abort()

    async with asyncio.timeout(LIMIT_S), await asyncio.start_server(mute, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        options = ControlOptions(secret="between us", handshake_s=0.2 if end == "late" else 600.0)
        dialling = asyncio.create_task(control.dial(f"127.0.0.1:{port}", options))
        await accepted.wait()
        if end == "cancelled":
            dialling.cancel()
        await asyncio.wait([dialling])
        assert dialling.cancelled() or isinstance(dialling.exception(), DialFailed)
        await ended.wait()


@pytest.mark.parametrize(
    "banner", [b"SSH-2.0-x\r\n", b"+PONG\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"tidekv!\r\n"]
)
async def test_a_server_of_another_protocol_breaks_the_protocol_and_is_not_silent(banner: bytes) -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        async with asyncio.timeout(LIMIT_S):
            dialling = asyncio.ensure_future(control.dial(address, ControlOptions(handshake_s=LIMIT_S)))
            accepted, _ = await loop.sock_accept(listening)
            with accepted:
                await loop.sock_sendall(accepted, banner)  # Fewer bytes than a greeting; then it waits.
                with pytest.raises(RemoteProtocolError, match=re.escape(f"it begins with {banner[:16]!r}")):
                    await dialling
