"""The thread in which a rank votes: one reduction under MIN of CPU integers at a time, never on the event loop.

The process group is our own, over a store of the leader's: the embedder's `torch.distributed` world is not touched.
A group that the embedder made is taken as well, if its backend is gloo. A NCCL group would put the vote on the GPU's
stream, behind whatever the model computes there, and is refused.

Gloo's own thread polls a connection again and again while another thread holds its lock. Woken on the core where that
thread was just sending, it takes the core from it and polls until its time slice is over, milliseconds later. So the
threads of votes are batch threads to the kernel: they take a core that is free, and nobody's that is not.

One vote in a gloo group: the leader takes the words of all other ranks and sends back what they come to under MIN.

That is 2 (n - 1) messages for n ranks. Gloo's own all-reduce passes parts around the ring in 2 (n - 1) steps of all n,
each with handshakes of its own, and for words as few as these takes a multiple of the time and the CPU, as
`benchmarks/ranks.py` measures. All of it blocks, so it is for the thread that votes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import socket
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore  # torch.distributed has both, but its types do not say so.
from torch._C._distributed_c10d import TCPStore as Store

from tidekv.states.errors import InvalidConfig, TransferFailed
from tidekv.states.ranks.agreement import LEADER

if TYPE_CHECKING:
    from tidekv.states.ranks.votes import SlotValues

CAST_TAGS, ANSWER_TAGS = 1 << 20, 1 << 21
"""To each the number of words is added: words of another number never come to lie where these belong."""


def lead(group: distributed.ProcessGroup, own: torch.Tensor, *, ranks: int) -> None:
    """The leader's part; what all come to lies in `own` afterwards. Raises what the group raises."""
    followers = range(LEADER + 1, ranks)
    rows = torch.empty((len(followers), len(own)), dtype=own.dtype)
    coming = [group.recv([row], rank, CAST_TAGS + len(own)) for row, rank in zip(rows, followers, strict=True)]
    # Row by row: torch takes a hundred times as long for the least of each column.
    for row, words in zip(rows, coming, strict=True):
        words.wait()
        torch.minimum(own, row, out=own)
    for going in [group.send([own], rank, ANSWER_TAGS + len(own)) for rank in followers]:
        going.wait()


def follow(group: distributed.ProcessGroup, own: torch.Tensor) -> None:
    """A follower's part; what all come to lies in `own` afterwards. Raises what the group raises."""
    answer = torch.empty_like(own)
    # Room for the answer comes first: then the leader need not wait for it.
    coming = group.recv([answer], LEADER, ANSWER_TAGS + len(own))
    going = group.send([own], LEADER, CAST_TAGS + len(own))
    coming.wait()
    going.wait()
    own.copy_(answer)


LOG = logging.getLogger("tidekv.transports")
T = TypeVar("T")


class VoteThread:
    """One rank's part in the votes. All methods are called on the loop; the work is done in the thread, in order."""

    def __init__(self, *, rank: int, ranks: int, host: str, timeout_s: float) -> None:
        """`timeout_s` bounds each vote and each forming of a group."""
        self.votes = 0
        """Votes that were begun."""
        self._rank = rank
        self._ranks = ranks
        self._host = host
        self._timeout = timedelta(seconds=timeout_s)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._group: distributed.ProcessGroup | None = None
        self._is_own = True
        self._store: Store | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; it sleeps until it has something to do."""
        self._thread = threading.Thread(target=self._run, name="tidekv-votes", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """End the thread. A vote that is stuck ends by its timeout; nobody waits longer than that for it."""
        if self._thread is not None:
            self._jobs.put(None)
            await asyncio.to_thread(self._thread.join, self._timeout.total_seconds() + 1.0)
            self._thread = None

    def open_store(self) -> asyncio.Future[int]:
        """Leader only: open the store that groups are formed by; its port."""
        return self._call(self._open_store)

    def form(self, epoch: int, store_port: int) -> asyncio.Future[None]:
        """Form the group of an epoch with all other ranks; the one before is given up."""
        return self._call(lambda: self._form(epoch, store_port))

    def use(self, group: distributed.ProcessGroup) -> None:
        """Vote in a group that the embedder made. Raises InvalidConfig unless it is one of gloo, of these ranks."""
        check_group(group, rank=self._rank, ranks=self._ranks)
        self._group, self._is_own = group, False

    def reduce(self, words: SlotValues) -> asyncio.Future[SlotValues]:
        """Vote; the words of all ranks under MIN, in the array given. Raises TransferFailed."""
        self.votes += 1
        return self._call(lambda: self._reduce(words))

    def _open_store(self) -> int:
        if self._store is None:
            # Given no socket the store would listen on every interface, and it lets every program in.
            family, _, _, _, where = socket.getaddrinfo(self._host, 0, type=socket.SOCK_STREAM)[0]
            with socket.create_server(where[:2], family=family) as listening:
                port = listening.getsockname()[1]
                self._store = Store(
                    self._host,
                    port,
                    is_master=True,
                    wait_for_workers=False,
                    timeout=self._timeout,
                    master_listen_fd=os.dup(listening.fileno()),
                )
        return self._store.port

    def _form(self, epoch: int, store_port: int) -> None:
        self._group = None
        if self._ranks == 1:
            return
        store = self._store
        if store is None or self._rank:
            store = Store(self._host, store_port, is_master=False, wait_for_workers=False, timeout=self._timeout)
            self._store = store
        options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # The stubs lack it.
        options._timeout = self._timeout
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=self._host)]
        prefix = PrefixStore(f"tidekv-{epoch}", store)
        # It is a ProcessGroup at run time as well, which the stubs do not say.
        group: Any = distributed.ProcessGroupGloo(prefix, self._rank, self._ranks, options)
        self._group = group

    def _reduce(self, words: SlotValues) -> SlotValues:
        if self._ranks == 1:
            return words
        if self._group is None:
            raise TransferFailed("no group was formed")
        # The tensor is a view of the array: the answer lies in it.
        own = torch.frombuffer(words, dtype=torch.int64)
        try:
            if self._rank == LEADER:
                lead(self._group, own, ranks=self._ranks)
            else:
                follow(self._group, own)
        except RuntimeError as error:
            # The last reference to a group closes its connections: nobody waits in it until his time is over. So none
            # is kept, not in the frames of the error either. A group of the embedder's is his, and stays.
            if self._is_own:
                self._group = None
                traceback.clear_frames(error.__traceback__)
            raise
        return words

    def _call(self, work: Callable[[], T]) -> asyncio.Future[T]:
        assert self._thread is not None, "the thread was started"
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: Exception | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(result)  # type: ignore[arg-type]  # It is what `work` returned.
            else:
                done.set_exception(error)

        def job() -> None:
            try:
                result, error = work(), None
            except Exception as raised:
                result, error = None, TransferFailed(f"{type(raised).__name__}: {raised}")
                error.__cause__ = raised
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result, error)

        self._jobs.put(job)
        return done

    def _run(self) -> None:
        try:
            # Gloo's threads are made by this one and inherit it.
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        except (AttributeError, OSError) as error:
            # Elsewhere than on Linux, or in a sandbox: votes then take longer, and are as right.
            LOG.info("the thread that votes cannot be a batch thread: %s", error)
        while (job := self._jobs.get()) is not None:
            job()
        self._group = self._store = None


def check_group(group: distributed.ProcessGroup, *, rank: int, ranks: int) -> None:
    """Raise InvalidConfig unless votes can be taken in this group."""
    backend = distributed.get_backend(group)
    if backend != "gloo":
        raise InvalidConfig(
            f"ranks vote by CPU integers in a gloo group, not in one of {backend!r}: make one with "
            "torch.distributed.new_group(backend='gloo')"
        )
    if (group.rank(), group.size()) != (rank, ranks):
        raise InvalidConfig(
            f"the group has {group.size()} ranks and this is number {group.rank()} of them; rank {rank} of {ranks} "
            "was configured"
        )
