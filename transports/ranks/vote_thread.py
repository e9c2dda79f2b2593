"""The vote thread of one rank: one reduction under MIN of CPU integers at a time, never on the event loop.

The process group is our own, over a store of the leader's: the embedder's `torch.distributed` world is not touched. A
group made by the embedder is accepted if its backend is gloo. A NCCL group would put the vote on the GPU's stream,
behind the model's computation, and is refused.

A thread of gloo polls a connection continuously while another thread holds its lock. If it is woken on the core of the
thread that was just sending, it takes that core and polls until its time slice is over, milliseconds later. So the vote
threads have the kernel's batch policy: they take an idle core, and preempt no other thread.

In a vote the leader receives the slots of all other ranks and sends back their minimum. That is 2 (n - 1) messages for
n ranks. Gloo's own all-reduce passes parts around the ring in 2 (n - 1) steps of all n, each with its own handshakes,
and takes a multiple of the time and CPU for so few slots, as `benchmarks/ranks.py` measures.
"""

from __future__ import annotations

import asyncio
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
from torch._C._distributed_c10d import PrefixStore  # torch.distributed has both, but not in its types.
from torch._C._distributed_c10d import TCPStore as Store

from tidekv.states.errors import InvalidConfig, TransferFailed
from tidekv.states.ranks.agreement import LEADER
from tidekv.transports.log import engine_log, own_context

if TYPE_CHECKING:
    from tidekv.states.ranks.votes import SlotValues

CAST_TAGS, ANSWER_TAGS = 1 << 20, 1 << 21
"""Base of the message tags, plus the number of slots: a vote of another length never lands in this vote's buffer."""


def lead(group: distributed.ProcessGroup, own: torch.Tensor, *, ranks: int) -> None:
    """Run the leader's part; blocks. `own` (int64) holds the minimum over all ranks afterwards. Raises errors of the
    group.
    """
    followers = range(LEADER + 1, ranks)
    rows = torch.empty((len(followers), len(own)), dtype=own.dtype)
    coming = [group.recv([row], rank, CAST_TAGS + len(own)) for row, rank in zip(rows, followers, strict=True)]
    # Row by row: torch's reduction over a column takes a hundred times as long.
    for row, received in zip(rows, coming, strict=True):
        received.wait()
        torch.minimum(own, row, out=own)
    for going in [group.send([own], rank, ANSWER_TAGS + len(own)) for rank in followers]:
        going.wait()


def follow(group: distributed.ProcessGroup, own: torch.Tensor) -> None:
    """Run a follower's part; blocks. `own` (int64) holds the minimum over all ranks afterwards. Raises errors of the
    group.
    """
    answer = torch.empty_like(own)
    # The receive is posted first: the leader can then send its answer without waiting.
    coming = group.recv([answer], LEADER, ANSWER_TAGS + len(own))
    going = group.send([own], LEADER, CAST_TAGS + len(own))
    coming.wait()
    going.wait()
    own.copy_(answer)


LOG = engine_log("tidekv.transports")
T = TypeVar("T")


class VoteThread:
    """One rank's part in the votes. All methods are called on the loop; the thread does the work, in order."""

    def __init__(self, *, rank: int, ranks: int, host: str, timeout_s: float) -> None:
        """`timeout_s` bounds each vote and each forming of a group, in seconds."""
        self.votes = 0
        """Number of votes started."""
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
        """Start the thread; it sleeps until it has a job."""
        self._thread = threading.Thread(target=own_context().run, args=(self._run,), name="tidekv-votes", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """End the thread. A stuck vote ends by its timeout, so this returns at most one second after that."""
        if self._thread is not None:
            self._jobs.put(None)
            await asyncio.to_thread(self._thread.join, self._timeout.total_seconds() + 1.0)
            self._thread = None

    def open_store(self) -> asyncio.Future[int]:
        """Leader only: open the store that forms groups, and return its port."""
        return self._call(self._open_store)

    def form(self, epoch: int, store_port: int) -> asyncio.Future[None]:
        """Form the group of an epoch with all other ranks; the previous group is released."""
        return self._call(lambda: self._form(epoch, store_port))

    def use(self, group: distributed.ProcessGroup) -> None:
        """Vote in a group made by the embedder. Raises InvalidConfig unless it is a gloo group of these ranks."""
        check_group(group, rank=self._rank, ranks=self._ranks)
        self._group, self._is_own = group, False

    def reduce(self, slots: SlotValues) -> asyncio.Future[SlotValues]:
        """Vote: replace the slots by their minimum over all ranks, in the same array. Raises TransferFailed."""
        self.votes += 1
        return self._call(lambda: self._reduce(slots))

    def _open_store(self) -> int:
        if self._store is None:
            # Without a socket the store would listen on every interface, and it has no authentication.
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
        # A ProcessGroup at run time, too, which the stubs do not declare.
        group: Any = distributed.ProcessGroupGloo(prefix, self._rank, self._ranks, options)
        self._group = group

    def _reduce(self, slots: SlotValues) -> SlotValues:
        if self._ranks == 1:
            return slots
        if self._group is None:
            raise TransferFailed("no group is formed")
        # The tensor is a view of the array, which therefore receives the answer.
        own = torch.frombuffer(slots, dtype=torch.int64)
        try:
            if self._rank == LEADER:
                lead(self._group, own, ranks=self._ranks)
            else:
                follow(self._group, own)
        except RuntimeError as error:
            # Dropping the last reference to a group closes its connections, which ends the wait of the other ranks
            # before their timeout. So no reference is kept, not even in the frames of the error. A group of the
            # embedder is not ours to close.
            if self._is_own:
                self._group = None
                traceback.clear_frames(error.__traceback__)
            raise
        return slots

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
            # Gloo's threads are created by this one and inherit the policy.
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        except (AttributeError, OSError) as error:
            # Not on Linux, or in a sandbox: votes are slower then, and equally correct.
            LOG.info("the vote thread cannot use the batch policy", cause=str(error))
        while (job := self._jobs.get()) is not None:
            job()
        self._group = self._store = None


def check_group(group: distributed.ProcessGroup, *, rank: int, ranks: int) -> None:
    """Raise InvalidConfig unless votes can be taken in this group."""
    backend = distributed.get_backend(group)
    if backend != "gloo":
        raise InvalidConfig(
            f"ranks vote with CPU integers in a gloo group, not in one of {backend!r}: make one with "
            "torch.distributed.new_group(backend='gloo')"
        )
    if (group.rank(), group.size()) != (rank, ranks):
        raise InvalidConfig(
            f"the group has {group.size()} ranks and this is number {group.rank()} of them; rank {rank} of {ranks} "
            "was configured"
        )
