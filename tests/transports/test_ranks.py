"""The rank channel and its votes: several ranks in one process, each with a thread and a gloo group of its own."""

from __future__ import annotations

import asyncio
import errno
import os
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from torch import distributed

from benchmarks.ports import free_address
from tests.support import warm_python
from tests.support.waits import LIMIT_S
from tidekv.engine.doctor.machine import listening
from tidekv.states.errors import InvalidConfig, TransferFailed
from tidekv.states.ranks.agreement import Opening
from tidekv.transports.ranks import channel as ranks
from tidekv.transports.ranks import wire
from tidekv.transports.ranks.channel import ChannelOptions, RankChannel


class Owner:
    """Records what its channel reports."""

    def __init__(self) -> None:
        self.received: asyncio.Queue[tuple[object, ...]] = asyncio.Queue()

    def group_formed(self, epoch: int) -> None:
        self.received.put_nowait(("formed", epoch))

    def turn_opened(self, opening: Opening) -> None:
        self.received.put_nowait(("turn", opening))

    def turn_wished(self) -> None:
        self.received.put_nowait(("wish",))

    def rank_refused(self, cause: str) -> None:
        self.received.put_nowait(("refused", cause))

    def rank_lost(self, rank: int, cause: str) -> None:
        self.received.put_nowait(("lost", rank, cause))

    async def expect(self, kind: str) -> tuple[object, ...]:
        async with asyncio.timeout(LIMIT_S):
            while (received := await self.received.get())[0] != kind:
                pass
        return received


class Member:
    """One rank's channel with its owner."""

    def __init__(self, rank: int, ranks: int, address: str, **fields: object) -> None:
        self.owner = Owner()
        self.address = address
        self.channel = RankChannel(
            self.owner,
            rank=rank,
            ranks=ranks,
            settings=fields.pop("settings", b"equal"),
            options=ChannelOptions(
                **{"address": address, "secret": "s", "silence_s": 30.0, "vote_timeout_s": 60.0, **fields}
            ),
        )

    async def begin(self) -> None:
        await self.channel.start()
        self.channel.settled()


@asynccontextmanager
async def group(
    ranks: int, change: Callable[[int], dict[str, object]] = lambda rank: {}
) -> AsyncIterator[list[Member]]:
    address = free_address()
    members = [Member(rank, ranks, address, **change(rank)) for rank in range(ranks)]
    try:
        for member in members:
            await member.begin()
        yield members
    finally:
        for member in members:
            member.channel.leave()
        for member in members:
            await member.channel.close()


async def test_ranks_vote_where_threads_cannot_be_batch_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "not here")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    async with group(2) as members:
        for member in members:
            await member.owner.expect("formed")
        votes = [member.channel.vote(1, array("q", [rank])) for rank, member in enumerate(members)]
        assert [list(vote) for vote in await asyncio.gather(*votes)] == [[0], [0]]


@pytest.mark.parametrize("ranks", [1, 2, 4])
async def test_ranks_form_a_group_and_vote(ranks: int) -> None:
    async with group(ranks) as members:
        for member in members:
            assert await member.owner.expect("formed") == ("formed", 1)
        members[0].channel.open_turn(Opening(1, 1, 0.0, 256))
        for member in members[1:]:
            _, opening = await member.owner.expect("turn")
            assert isinstance(opening, Opening)
        slots = [array("q", [rank, -rank, 5]) for rank in range(ranks)]
        voted = await asyncio.gather(*(member.channel.vote(1, own) for member, own in zip(members, slots, strict=True)))
        assert [list(vote) for vote in voted] == [[0, 1 - ranks, 5]] * ranks
        assert [member.channel.votes for member in members] == [1] * ranks


async def test_a_follower_that_has_news_asks_the_leader_for_a_turn() -> None:
    async with group(2) as members:
        for member in members:
            await member.owner.expect("formed")
        members[1].channel.wish()
        await members[0].owner.expect("wish")


async def test_a_rank_that_ends_is_named_to_all_and_a_new_epoch_is_formed_when_it_is_back() -> None:
    async with group(3) as members:
        for member in members:
            await member.owner.expect("formed")
        members[1].channel.leave()
        await members[1].channel.close()
        for at in (0, 2):
            _, rank, _ = await members[at].owner.expect("lost")
            assert rank == 1
            members[at].channel.settled()
        members[1] = Member(1, 3, members[0].address)
        await members[1].begin()
        for member in members:
            assert await member.owner.expect("formed") == ("formed", 2)
        votes = [member.channel.vote(1, array("q", [at])) for at, member in enumerate(members)]
        assert [list(vote) for vote in await asyncio.gather(*votes)] == [[0]] * 3


async def test_the_next_group_is_formed_when_every_vote_thread_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread cannot give up forming before its time is over. One that were asked for the next group meanwhile would
    come to that one late, fail, and be late for each one after it.
    """
    address = free_address()
    members = [Member(rank, 2, address) for rank in range(2)]
    loop = asyncio.get_running_loop()
    asked: list[list[asyncio.Future[None]]] = [[], []]

    def form(rank: int, epoch: int, port: int) -> asyncio.Future[None]:
        assert all(earlier.done() for earlier in asked[rank]), f"rank {rank} is asked for epoch {epoch} and not free"
        asked[rank].append(loop.create_future())
        return asked[rank][-1]

    for rank, member in enumerate(members):
        monkeypatch.setattr(member.channel._thread, "form", partial(form, rank))
    try:
        for member in members:
            await member.begin()
        await turns_until(lambda: all(asked))
        asked[0][0].set_exception(TransferFailed("no group in time"))
        for member in members:
            await member.owner.expect("lost")
            member.channel.settled()
        # Long enough for any message: the follower's thread keeps trying, and no rank starts again without it.
        await turns_until(lambda: len(asked[0]) > 1, turns_max=500)
        assert [len(futures) for futures in asked] == [1, 1]
        asked[1][0].set_exception(TransferFailed("no group in time"))
        await turns_until(lambda: all(len(futures) == 2 for futures in asked))
        for futures in asked:
            futures[1].set_result(None)
        for member in members:
            assert await member.owner.expect("formed") == ("formed", 2)
    finally:
        for member in members:
            member.channel.leave()
            await member.channel.close()


async def test_a_rank_that_ends_while_the_leader_makes_ready_to_form_keeps_nobody_from_forming_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = free_address()
    members = [Member(rank, 3, address) for rank in range(3)]
    thread, is_asked, is_open = members[0].channel._thread, asyncio.Event(), asyncio.Event()
    open_store = thread.open_store

    async def open_late() -> int:
        is_asked.set()
        await is_open.wait()
        return await open_store()

    monkeypatch.setattr(thread, "open_store", open_late)

    try:
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            for member in members:
                tasks.create_task(member.begin())
            await is_asked.wait()
            members[2].channel.leave()
            await members[2].channel.close()
            await turns_until(lambda: False, turns_max=100)
            is_open.set()
            members[2] = Member(2, 3, address)
            for member in members:
                tasks.create_task(formed(member))
            await members[2].begin()
    finally:
        for member in members:
            member.channel.leave()
            await member.channel.close()


async def formed(member: Member) -> None:
    """Wait until the member's group is formed, at whatever try."""
    async with asyncio.timeout(LIMIT_S):
        while (received := await member.owner.received.get())[0] != "formed":
            if received[0] == "lost":
                member.channel.settled()


async def turns_until(is_so: Callable[[], bool], *, turns_max: int = 100_000) -> None:
    """Let the loop turn until something is so, or has not come about in so many turns."""
    for _ in range(turns_max):
        if is_so():
            return
        await asyncio.sleep(0)


async def test_a_leader_that_ends_is_named_and_its_successor_counts_on() -> None:
    async with group(2) as members:
        for member in members:
            await member.owner.expect("formed")
        address = members[0].address
        members[0].channel.leave()
        await members[0].channel.close()
        _, rank, _ = await members[1].owner.expect("lost")
        assert rank == 0
        members[1].channel.settled()
        members[0] = Member(0, 2, address)
        await members[0].begin()
        for member in members:
            assert await member.owner.expect("formed") == ("formed", 2)


@pytest.mark.parametrize("at", [0, 1])
async def test_a_group_that_one_rank_cannot_form_is_formed_at_the_next_try(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = free_address()
    members = [Member(rank, 2, address) for rank in range(2)]
    thread, other = members[at].channel._thread, members[1 - at].channel._thread
    form, form_of_other, timeout = thread.form, other._form, other._timeout

    def form_later(epoch: int, store_port: int) -> asyncio.Future[None]:
        monkeypatch.setattr(thread, "form", form)
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        failed.set_exception(TransferFailed("planted"))
        return failed

    def form_briefly(epoch: int, store_port: int) -> None:
        # Only the try that cannot succeed is short: all else has the time that a busy machine needs.
        monkeypatch.setattr(other, "_form", form_of_other)
        other._timeout = timedelta(seconds=1.0)
        try:
            form_of_other(epoch, store_port)
        finally:
            other._timeout = timeout

    monkeypatch.setattr(thread, "form", form_later)
    monkeypatch.setattr(other, "_form", form_briefly)
    # While a group is formed, a loss is no more than one more try.
    for member in members:
        member.owner.rank_lost = lambda rank, cause, channel=member.channel: channel.settled()  # type: ignore[method-assign]
    try:
        for member in members:
            await member.begin()
        for member in members:
            kind, epoch = await member.owner.expect("formed")
            assert (kind, epoch > 1) == ("formed", True)
    finally:
        for member in members:
            member.channel.leave()
        for member in members:
            await member.channel.close()


async def test_a_rank_that_does_not_vote_in_time_is_named() -> None:
    async with group(3, lambda rank: {"vote_timeout_s": 2.0, "silence_s": 3.0}) as members:
        await asyncio.gather(*(formed(member) for member in members))
        # Rank 2 lives, but never enters the vote of turn 1.
        votes = [members[at].channel.vote(1, array("q", [at])) for at in (0, 1)]
        for at, vote in enumerate(votes):
            with pytest.raises(TransferFailed):
                await vote
            members[at].channel.vote_failed(1, "timed out")
        for member in members:
            _, rank, cause = await member.owner.expect("lost")
            assert rank == 2
            assert "did not vote in time" in str(cause)


async def test_nobody_waits_in_a_group_that_a_rank_has_left() -> None:
    async with group(3, lambda rank: {"vote_timeout_s": 120.0}) as members:
        for member in members:
            await member.owner.expect("formed")
        votes = [members[at].channel.vote(1, array("q", [at])) for at in (0, 1)]
        # Only the leader is connected with rank 2 in a vote; rank 1 waits for the leader's answer.
        await members[2].channel.close()
        async with asyncio.timeout(LIMIT_S):
            for vote in votes:
                with pytest.raises(TransferFailed):
                    await vote


EMBEDDED = """
import asyncio, sys
from array import array
from torch import distributed
from tidekv.transports.ranks.vote_thread import VoteThread

async def vote(rank):
    thread = VoteThread(rank=rank, ranks=2, host="127.0.0.1", timeout_s=30.0)
    thread.use(distributed.group.WORLD)
    thread.start()
    for turn in range(3):
        print(list(await thread.reduce(array("q", [rank, -rank, 7 + turn]))))
    await thread.close()

rank = int(sys.argv[1])
distributed.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=2)
asyncio.run(vote(rank))
distributed.destroy_process_group()
"""


async def test_processes_vote_in_a_group_that_the_embedder_made(tmp_path: Path) -> None:
    processes = [
        await asyncio.create_subprocess_exec(
            warm_python.executable(),
            "-c",
            EMBEDDED,
            str(rank),
            f"file://{tmp_path}/store",
            stdout=asyncio.subprocess.PIPE,
        )
        for rank in range(2)
    ]
    for process in processes:
        output, _ = await process.communicate()
        assert process.returncode == 0
        assert output.decode().splitlines() == ["[0, -1, 7]", "[0, -1, 8]", "[0, -1, 9]"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"secret": "another"}, "secrets differ"),
        ({"settings": b"other"}, "configured differently"),
        ({"ranks": 3}, "the leader has 2 ranks"),
    ],
)
async def test_a_rank_that_does_not_belong_is_refused_with_the_reason(change: dict[str, object], text: str) -> None:
    address = free_address()
    leader = Member(0, 2, address)
    fields = {"rank": 1, "ranks": 2, "address": address, **change}
    stranger = Member(**fields)  # type: ignore[arg-type]  # Fields of both.
    try:
        await leader.begin()
        await stranger.begin()
        _, cause = await stranger.owner.expect("refused")
        assert text in str(cause)
        assert not leader.channel.is_formed
    finally:
        await stranger.channel.close()
        await leader.channel.close()


async def test_a_program_at_the_leader_s_address_is_not_followed_without_the_secret() -> None:
    """It gets a proof of this rank, and nothing that it says before its own is taken."""
    joined: asyncio.Queue[wire.Join] = asyncio.Queue()
    answers: list[Callable[[wire.Join], wire.RankMessage]] = [
        lambda join: wire.Welcome(bytes(32)),
        lambda join: wire.Welcome(join.proof),
        lambda join: wire.Form(1, 1, "group"),
        lambda join: wire.Lost(0, 0, "lost"),
    ]
    pending = list(answers)

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(wire.encode(wire.Challenge(bytes(32))))
        join = await wire.read(reader)
        assert isinstance(join, wire.Join)
        if pending:
            writer.write(wire.encode(pending.pop(0)(join)))
        await joined.put(join)
        await reader.read()
        writer.close()

    address = free_address()
    host, _, port = address.rpartition(":")
    server = await asyncio.start_server(impostor, host, int(port))
    follower = Member(1, 2, address)
    try:
        await follower.begin()
        # One more: the answer before it was refused by then.
        nonces = [(await asyncio.wait_for(joined.get(), LIMIT_S)).nonce for _ in range(len(answers) + 1)]
        assert len(set(nonces)) == len(nonces)
        assert follower.channel.epoch == 0
        assert not follower.channel._is_forming
        assert follower.owner.received.empty()
    finally:
        await follower.channel.close()
        server.close()


@pytest.mark.parametrize("address", ["0.0.0.0:7000", "[::]:7000", "203.0.113.5:7000"])
async def test_rank_0_listens_on_the_network_with_a_secret_only(address: str) -> None:
    leader = Member(0, 2, address, secret="")
    with pytest.raises(InvalidConfig, match="without a secret, every program that reaches it could join"):
        await leader.channel.start()


async def test_a_group_of_the_embedder_is_voted_in_and_must_be_gloo_of_these_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        world = distributed.group.WORLD
        assert world is not None
        member = Member(0, 1, free_address(), group=world)
        await member.begin()
        assert await member.owner.expect("formed") == ("formed", 1)
        assert list(await member.channel.vote(1, array("q", [4]))) == [4]
        await member.channel.close()
        with pytest.raises(InvalidConfig, match="rank 1 of 2 was configured"):
            Member(1, 2, free_address(), group=world)
        monkeypatch.setattr(distributed, "get_backend", lambda group: "nccl")
        with pytest.raises(InvalidConfig, match="gloo group, not in one of 'nccl'"):
            Member(0, 1, free_address(), group=world)
    finally:
        distributed.destroy_process_group()


async def test_the_store_that_groups_are_formed_by_listens_on_the_host_of_the_ranks_only() -> None:
    before = set(listening())
    leader = Member(0, 2, free_address())
    await leader.channel.start()
    try:
        opened = set(listening()) - before
        assert len(opened) == 2  # The channel, and the store.
        assert all(address.startswith("127.0.0.1:") for address in opened)
    finally:
        await leader.channel.close()


async def test_a_stranger_at_the_rank_channel_sends_small_frames_and_has_few_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "UNADMITTED_MAX", 2)
    address = free_address()
    leader = Member(0, 2, address, silence_s=30.0)
    await leader.channel.start()
    try:
        async with asyncio.timeout(20):
            host, _, port = address.rpartition(":")
            first, second, third = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
            assert await third[0].read() == b""
            for reader, writer in (first, second):
                await wire.read(reader)
                writer.write(wire.frames.LENGTH.pack(wire.JOIN_BYTES_MAX + 1))
                assert await reader.read() == b""
            for _, writer in (first, second, third):
                writer.close()
            # The places of those two are free again.
            reader, writer = await asyncio.open_connection(host, int(port))
            assert isinstance(await wire.read(reader), wire.Challenge)
            writer.close()
            await writer.wait_closed()
    finally:
        await leader.channel.close()


def test_words_of_another_rank_are_one_printable_line() -> None:
    for message in (
        wire.Lost(1, 2, "a\nb"),
        wire.RankRefused("a\nb"),
        wire.VoteFailed(1, 2, "a\nb" * 3000),
    ):
        assert message.cause.startswith("a\\nb")
        assert len(message.cause) <= wire.CAUSE_CHARACTERS_MAX
