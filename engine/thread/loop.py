"""The thread below an `EngineThread`: its uvloop loop, the engine on it, and calls to it from other threads.

It ends in one of three ways: `stop` is called; the engine cannot start; or something breaks it (an order or a task
raised, the loop was stopped, or SystemExit was raised on it). In each case every waiting call gets an error.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from contextvars import Context
from typing import TYPE_CHECKING, TypeVar

import uvloop

from tidekv.states.errors import EngineClosed, InvalidRequest, TidekvError
from tidekv.transports.log import own_context
from tidekv.transports.tasks import OwnedTasks

if TYPE_CHECKING:
    from tidekv.engine.decode.decode_engine import DecodeEngine

T = TypeVar("T")

END_S = 300.0
"""Seconds beyond `close_deadline_s` that the thread has to end; the engine bounds the end of each of its parts."""


class EngineLoop:
    """Runs one engine on its own thread. Orders run in the order in which they are posted."""

    def __init__(
        self,
        engine: DecodeEngine,
        *,
        name: str,
        on_end: Callable[[], None],
        within: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Start nothing. `on_end` is called on the thread as its last action, after it stopped accepting orders. The
        thread runs in the context that `within` makes.
        """
        self.engine = engine
        self.error: BaseException | None = None
        """What ended the thread, if it was not `stop`."""
        self._on_end = on_end
        self._within = within
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._orders: list[Callable[[], None]] = []
        self._is_woken = False
        self._asked: set[Future[object]] = set()
        self._closed = "the engine's thread was not started: enter it with `with`, or call start()"
        self._started: Future[None] = Future()
        self._wants_stop = False

    # --- On any thread ---

    def start(self) -> None:
        """Start thread and engine; raises what the engine's start raises, with the thread gone.

        The start of the engine has the deadlines: of ranks, transport and storage.
        """
        if self._thread.ident is not None:
            raise EngineClosed("this engine's thread was started before: it lives once, make another one")
        self._thread.start()
        try:
            self._started.result()
        except BaseException:
            # KeyboardInterrupt of the caller included: otherwise the engine would go on starting with no owner.
            self.stop()
            self.error = None
            raise

    def stop(self) -> None:
        """Close the engine and join the thread. Raises TidekvError, and leaves the thread running, if it has not ended
        within END_S of the time that the options give closing.
        """
        self._wants_stop = True
        with self._lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(self._stop.set, context=own_context())
        if self._thread.ident is not None:
            config = self.engine.config
            hand_s = config.cache_peers.close_s if config.cache_peers.close_to else 0.0
            limit_s = hand_s + config.close_store_s + config.close_deadline_s + END_S
            self._thread.join(limit_s)
            if self._thread.is_alive():
                raise TidekvError(
                    f"{self._thread.name} did not end within {limit_s:g} s: it hangs, and is left running"
                )

    @property
    def is_up(self) -> bool:
        """Whether the engine takes calls."""
        return not self._closed and self.engine.is_running and self._pid == os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the engine's."""
        return threading.get_ident() == self._thread.ident

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one that has the thread."""
        return self._pid != os.getpid()

    def check(self) -> None:
        """Raises EngineClosed, with the reason, if the engine takes no calls."""
        if self.is_forked:
            raise EngineClosed("the engine's thread is in the process that this one was forked from, and not here")
        if self._closed:
            raise EngineClosed(self._closed) from self.error
        if not self.engine.is_running:
            raise EngineClosed("the engine of this thread broke; closing it raises what broke it")

    def post(self, order: Callable[[], None]) -> None:
        """Schedule an order on the loop. Raises EngineClosed; never waits."""
        self.check()
        with self._lock:
            self._post(order)

    def ask(self, question: Callable[[], T]) -> T:
        """Run a function on the loop and wait for its result or error. Raises EngineClosed; the end of the thread ends
        every wait.
        """
        if self.is_here:
            # Orders posted before this call run first, as they do for a call from another thread.
            self._take_orders()
            return question()
        return self._wait_for(lambda answer: _settle(answer, question))

    def check_elsewhere(self) -> None:
        """Raises InvalidRequest on the engine's thread, which would wait for itself."""
        if self.is_here:
            raise InvalidRequest("this call waits for the engine's thread, and was made on it: make it elsewhere")

    def ask_async(self, work: Callable[[], Awaitable[T] | T]) -> T:
        """As `ask`, for a coroutine, which has its own deadline if it needs one. Raises as `check_elsewhere`."""
        self.check_elsewhere()

        async def run(answer: Future[T]) -> None:
            try:
                made = work()
                answer.set_result(await made if isinstance(made, Awaitable) else made)
            except Exception as error:
                answer.set_exception(error)

        return self._wait_for(lambda answer: self.spawn(run(answer), "call"))

    def _wait_for(self, begin: Callable[[Future[T]], None]) -> T:
        self.check()
        answer: Future[T] = Future()
        asked: set[Future[T]] = self._asked  # type: ignore[assignment]  # The set never reads results.
        with self._lock:
            # Under one lock: the end of the thread fails exactly the calls that are in the set by then.
            self._post(lambda: begin(answer))
            asked.add(answer)
        try:
            return answer.result()
        finally:
            with self._lock:
                asked.discard(answer)

    def _post(self, order: Callable[[], None]) -> None:
        if self._closed:
            raise EngineClosed(self._closed) from self.error
        self._orders.append(order)
        if not self._is_woken:
            self._is_woken = True
            # Not in the context of this thread: the callback also takes the orders of others.
            self._loop.call_soon_threadsafe(self._take_orders, context=own_context())

    # --- On the engine's thread ---

    def spawn(self, work: Coroutine[object, object, None], name: str, *, context: Context | None = None) -> None:
        """Run a coroutine as a task of this thread. It may raise only EngineClosed."""
        self._tasks.spawn(work, name=name, context=context)

    def _take_orders(self) -> None:
        with self._lock:
            orders, self._orders = self._orders, []
            self._is_woken = False
        try:
            for order in orders:
                order()
        except EngineClosed:
            return  # The engine broke, and its end already fails every waiting call.
        except Exception as error:
            self._break(error)

    def _break(self, error: BaseException) -> None:
        self.error = self.error or error
        self._stop.set()

    def _run(self) -> None:
        try:
            with self._within(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            self.error = self.error or error
        self._close("the engine's thread has ended" + ("" if self.error is None else f": {self.error!r}"))
        with self._lock:
            asked = list(self._asked)
        for answer in asked:
            if not answer.done():
                answer.set_exception(EngineClosed(self._closed))
        self._on_end()
        if not self._started.done():
            self._started.set_exception(self.error or EngineClosed(self._closed))

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._tasks = OwnedTasks("engine thread")
        try:
            async with self.engine:
                self._close("")
                self._started.set_result(None)
                try:
                    if not self._wants_stop:
                        await self._stop.wait()
                finally:
                    # In every case before the loop closes: no other thread may call a loop that is being closed.
                    self._close("the engine's thread is closing")
                self._take_orders()
        finally:
            # Calls that waited for the engine have failed by now; only the embedder's own coroutines are left.
            await self._tasks.close()
        if self.error is not None:
            raise self.error

    def _close(self, words: str) -> None:
        with self._lock:
            self._closed = words


def _settle(answer: Future[T], question: Callable[[], T]) -> None:
    try:
        answer.set_result(question())
    except Exception as error:
        answer.set_exception(error)
