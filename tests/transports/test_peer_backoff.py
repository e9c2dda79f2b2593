"""A peer that keeps breaking the protocol is refused for a growing while, in bounded memory."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tidekv.states import events
from tidekv.states.errors import InvalidConfig, LinkClosed, PeerMismatch, RemoteProtocolError, TransferFailed
from tidekv.transports import wire
from tidekv.transports.base import Link
from tidekv.transports.control import connection
from tidekv.transports.control.addresses import parse_address
from tidekv.transports.control.challenge import GREETING_BYTES
from tidekv.transports.control.connection import ControlOptions
from tidekv.transports.control.peer_backoff import BackoffLimits, PeerBackoff, is_violation, violation_key

CERTIFICATE = Path(__file__).parent / "localhost.pem"
STRICT = BackoffLimits(forgiven=1, pause_s=50.0, pause_s_max=100.0)
PING = wire.Ping(sent_at=1.0)


class Clock:
    """A time that tests set."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_pauses_begin_behind_what_is_forgiven_and_double_to_their_bound() -> None:
    clock = Clock()
    peer_backoff = PeerBackoff(clock=clock, limits=BackoffLimits(forgiven=2, pause_s=1.0, pause_s_max=6.0))
    pauses = []
    for _ in range(6):
        peer_backoff.note("a")
        pauses.append(peer_backoff.pause_left_s("a"))
    assert pauses == [0, 0, 1, 2, 4, 6]
    assert peer_backoff.pause_left_s("b") == 0
    clock.now_s = 5.5
    assert peer_backoff.pause_left_s("a") == 0.5
    clock.now_s = 6.0
    assert peer_backoff.pause_left_s("a") == 0
    peer_backoff.note("a")
    assert peer_backoff.pause_left_s("a") == 6
    assert peer_backoff.violations == 7


def test_asking_during_a_pause_does_not_prolong_it_and_quiet_time_is_rewarded() -> None:
    clock = Clock()
    peer_backoff = PeerBackoff(
        clock=clock, limits=BackoffLimits(forgiven=0, pause_s=4.0, pause_s_max=64.0, memory_s=100.0)
    )
    peer_backoff.note("a")
    for _ in range(10):
        peer_backoff.pause_left_s("a")
    assert peer_backoff.pause_left_s("a") == 4
    clock.now_s = 100.0
    peer_backoff.note("a")
    assert peer_backoff.pause_left_s("a") == 8
    clock.now_s = 201.0
    peer_backoff.note("a")
    assert peer_backoff.pause_left_s("a") == 4


def test_memory_is_bounded_and_who_offended_last_is_kept() -> None:
    peer_backoff = PeerBackoff(clock=Clock(), limits=BackoffLimits(forgiven=0, addresses_max=3))
    for address in ("a", "b", "c", "a", "d"):
        peer_backoff.note(address)
    assert len(peer_backoff) == 3
    assert [address for address in "abcd" if peer_backoff.pause_left_s(address) > 0] == ["a", "c", "d"]


def test_a_violator_of_many_years_overflows_nothing() -> None:
    peer_backoff = PeerBackoff(clock=Clock(), limits=BackoffLimits(forgiven=0))
    for _ in range(5000):
        peer_backoff.note("a")
    assert peer_backoff.pause_left_s("a") == 30


@pytest.mark.parametrize(
    "wrong", [{"forgiven": -1}, {"addresses_max": 0}, {"pause_s": 0}, {"pause_s": 31}, {"pause_s_max": 301}]
)
def test_limits_must_make_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidConfig, match="do not all hold"):
        BackoffLimits(**wrong)


def test_a_host_with_one_ipv6_address_has_all_of_its_network() -> None:
    assert violation_key("2001:db8:1:2::1") == violation_key("2001:db8:1:2:ffff::9") != violation_key("2001:db8:1:3::1")
    assert violation_key("::ffff:10.0.0.5") == violation_key("10.0.0.5") == "10.0.0.5"
    assert violation_key("fe80::1%eth0") == violation_key("fe80::2")
    assert violation_key("no address") == "no address"


def test_another_configuration_is_no_violation() -> None:
    assert is_violation(RemoteProtocolError("nonsense"))
    assert not is_violation(PeerMismatch(field="dtype", ours="a", theirs="b"))
    assert not is_violation(LinkClosed("gone"))


# --- The listener ---


@pytest.fixture
async def links(watchdog: None) -> asyncio.Queue[Link]:
    return asyncio.Queue()


@contextlib.asynccontextmanager
async def listening(links: asyncio.Queue[Link], **options: object) -> AsyncIterator[connection.ControlListener]:
    async def keep(link: Link) -> None:
        await links.put(link)
        with contextlib.suppress(RemoteProtocolError, LinkClosed):
            while True:
                await link.receive()

    listener = await connection.listen(
        "127.0.0.1:0", keep, ControlOptions(**{"violations": STRICT, "secret": "s"} | options)
    )
    try:
        yield listener
    finally:
        await listener.close()


async def send_raw(address: str, raw: bytes) -> bytes:
    """Connect, send something outside the protocol, and return what is answered until the end."""
    reader, writer = await asyncio.open_connection(*parse_address(address))
    answered = b""
    try:
        writer.write(raw)
        answered = await reader.read()
        # Whatever was unread makes the end a reset.
        answered += await reader.read()
    except ConnectionError:
        pass
    finally:
        writer.close()
    return answered


async def test_wrong_secrets_are_refused_for_a_while_without_a_word(links: asyncio.Queue[Link]) -> None:
    async with listening(links) as listener:
        for _ in range(2):
            with pytest.raises(TransferFailed, match="secrets differ"):
                await connection.dial(listener.address, ControlOptions(secret="wrong"))
        assert listener.statistics()["violations"] == 2
        # From now on its address gets no greeting any more, not even with the right secret.
        assert await send_raw(listener.address, b"") == b""
        with pytest.raises(TransferFailed, match="refuses this address"):
            await connection.dial(listener.address, ControlOptions(secret="s"))
        counts = {name: count for name, count in listener.statistics().items() if count}
        assert counts == {"links_refused": 2, "links_in_pause": 2, "violations": 2}


async def test_links_that_are_open_outlive_the_violations_of_a_neighbor(links: asyncio.Queue[Link]) -> None:
    async with listening(links) as listener:
        link = await connection.dial(listener.address, ControlOptions(secret="s"))
        theirs = await links.get()
        for _ in range(3):
            with pytest.raises(TransferFailed):
                await connection.dial(listener.address, ControlOptions(secret="wrong"))
        link.mark_greeted()
        theirs.send(PING)
        assert await link.receive() == PING
        await link.close()


async def test_malformed_frames_behind_the_challenge_count_once_a_link(links: asyncio.Queue[Link]) -> None:
    async with listening(links) as listener:
        for violations in (1, 2):
            link = await connection.dial(listener.address, ControlOptions(secret="s"))
            link._writer.write(link._sealed(b"\x01\0\0\0\xc1") * 3)
            with pytest.raises(LinkClosed, match="frame"):
                await link.receive()
            (await links.get()).report_violation()
            assert listener.statistics()["violations"] == violations
            await link.close()
        with pytest.raises(TransferFailed):
            await connection.dial(listener.address, ControlOptions(secret="s"))


async def test_who_only_looks_whether_the_port_is_open_does_no_wrong(links: asyncio.Queue[Link]) -> None:
    async with listening(links) as listener:
        for _ in range(5):
            _, writer = await asyncio.open_connection(*parse_address(listener.address))
            writer.close()
            await writer.wait_closed()
        link = await connection.dial(listener.address, ControlOptions(secret="s"))
        await links.get()
        assert listener.statistics()["violations"] == 0
        await link.close()


async def test_who_says_nothing_holds_a_place_no_longer_than_the_handshake_and_offends(
    links: asyncio.Queue[Link],
) -> None:
    async with listening(links, handshake_s=0.05, links_max=1) as listener:
        greeting = await send_raw(listener.address, b"")
        assert len(greeting) == GREETING_BYTES
        assert listener.statistics()["violations"] == 1
        link = await connection.dial(listener.address, ControlOptions(secret="s"))
        await link.close()


async def test_strangers_in_the_handshake_of_tls_count_and_are_cut_off(links: asyncio.Queue[Link]) -> None:
    """A peer that connects to a TLS port and sends nothing must not hold an uncounted descriptor."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    async with listening(links, listen_tls=context, handshake_s=0.2, links_max=2) as listener:
        silent = [await asyncio.open_connection(*parse_address(listener.address)) for _ in range(2)]
        for reader, writer in silent:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
        assert listener.statistics()["violations"] == 2


async def test_no_tls_on_a_tls_port_is_a_violation(links: asyncio.Queue[Link]) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    async with listening(links, listen_tls=context) as listener:
        for _ in range(2):
            await send_raw(listener.address, b"GET / HTTP/1.1\r\n\r\n" * 20)
        assert listener.statistics()["violations"] == 2
        assert links.empty()


async def test_out_of_descriptors_is_survived(links: asyncio.Queue[Link], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ACCEPT_PAUSE_S", 0.01)
    async with listening(links) as listener:

        class Short:
            """A listening socket of a process that has no descriptor left, once."""

            def __init__(self, inner) -> None:
                self.inner = inner
                self.refusals = 1

            def __getattr__(self, name: str):
                return getattr(self.inner, name)

            def accept(self):
                if self.refusals:
                    self.refusals -= 1
                    raise OSError(24, "Too many open files")
                return self.inner.accept()

        loop, short = asyncio.get_running_loop(), Short(listener._sockets[0])
        loop.remove_reader(short.fileno())
        loop.add_reader(short.fileno(), listener._accept_waiting, short)
        link = await connection.dial(listener.address, ControlOptions(secret="s"))
        assert short.refusals == 0
        await link.close()


# --- The two ends of the hand-over ---


async def test_a_decode_worker_that_breaks_the_protocol_is_blamed_and_one_that_differs_is_not(world, decode) -> None:
    prefill = await world.prefill()
    link = await decode.dial(prefill.address)
    link.send(wire.Drained(room=decode.room(), rank=0))
    with pytest.raises(LinkClosed):
        await decode.receive(link)
    assert prefill.sender.statistics()["violations"] == 1
    link = await decode.transport.dial(prefill.address)
    link.send(PING)
    assert isinstance(await decode.receive(link), wire.Hello)
    with pytest.raises(LinkClosed, match="may not send now"):
        await decode.receive(link)
    assert prefill.sender.statistics()["violations"] == 2
    decode.identity = world.identity(dtype="other")
    link = await decode.dial(prefill.address)
    with pytest.raises(LinkClosed, match="dtype"):
        await decode.receive(link)
    assert prefill.sender.statistics()["violations"] == 2
    assert prefill.sender.statistics()["hellos_refused"] == 2


async def test_a_prefill_that_breaks_every_link_is_not_dialled_for_a_while(world) -> None:
    clock = Clock()
    dialled = []

    async def rogue(link: Link) -> None:
        dialled.append(link)
        link.send(PING)
        with contextlib.suppress(LinkClosed):
            while True:
                await link.receive()

    transport = world.transport("rogue-0")
    await transport.start(poller=None)
    listener = await transport.listen("rogue:1", rogue)
    world.closers += [transport.close, listener.close]
    decode = await world.decode(clock=clock)
    for number in range(5):
        decode.promise("rogue:1", f"r{number}", tokens=4, promised=0, pages=[number])
        failed = await decode.wait(events.RoomFailed, request_id=f"r{number}")
        assert failed.settled
    assert (len(dialled), decode.receiver.statistics()["links_broken"]) == (4, 4)
    assert "not dialled for another 1.0 s" in failed.cause
    assert decode.receiver.statistics()["dials_in_pause"] == 1
    # Others are served meanwhile, and it gets another chance.
    prefill = await world.prefill()
    decode.promise(prefill.address, "good", tokens=4, promised=0, pages=[9])
    await prefill.serve("good", [1])
    await decode.wait(events.AuxReceived, request_id="good")
    clock.now_s = 1.5
    decode.promise("rogue:1", "again", tokens=4, promised=0, pages=[10])
    failed = await decode.wait(events.RoomFailed, request_id="again")
    assert "may not send now" in failed.cause
    assert len(dialled) == 5
