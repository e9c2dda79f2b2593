"""A prefill and a decode scheduler of SGLang, made of its contract, with the transfer backend `tidekv` in both."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any  # SGLang's objects are not typed here.

import numpy as np

from tests.support.sglang_contract import PAGE, KVPoll, request
from tests.support.waits import LIMIT_S


class Servers:
    """A prefill and a decode scheduler of one rank. `prefill`: one that is there already."""

    def __init__(self, prefill: Any = None, **made: Any) -> None:
        self.prefill = prefill or sys.modules["sglang.srt.disaggregation.prefill"].PrefillBootstrapQueue(**made)
        self.decode = sys.modules["sglang.srt.disaggregation.decode"].DecodePreallocQueue(**made)
        self.mixin = sys.modules["sglang.srt.disaggregation.decode"].SchedulerDisaggregationDecodeMixin

    @property
    def pools(self) -> tuple[Any, Any]:
        return self.prefill.token_to_kv_pool, self.decode.token_to_kv_pool

    def close(self) -> None:
        self.decode.kv_manager.decode.close()
        self.prefill.kv_manager.prefill.close()

    # --- Prefill ---

    def bootstrap(self, tokens: list[int], room: int, **more: Any) -> Any:
        """Queue a prompt until it may be computed; returns its request."""
        req = request(tokens, room, **more)
        assert self.prefill.create_sender(req, 2)
        self.wait(lambda: req.disagg_kv_sender.poll() == KVPoll.WaitingForInput)
        assert req.disagg_kv_sender.pop_decode_prefix_len() == 0
        return req

    def send(self, tokens: list[int], pages: list[int], room: int, *, chunks: int = 1, **more: Any) -> Any:
        """Compute a prompt, and hand it over chunk by chunk; returns its request."""
        req = self.bootstrap(tokens, room, **more)
        if hasattr(self.pools[0], "compute"):
            self.pools[0].compute(tokens, pages)
        self.hand_over(req, pages, chunks=chunks)
        return req

    def hand_over(self, req: Any, pages: list[int], *, chunks: int = 1) -> None:
        """Hand over the pages of a prompt that is computed."""
        sender, tokens, room = req.disagg_kv_sender, req.origin_input_ids, req.bootstrap_room
        sender.init(len(pages), room % 8)
        self._note(self.prefill, req, pages)
        step = -(-len(pages) // chunks)
        for first in range(0, len(pages), step):
            if first + step >= len(pages):
                row, buffers = room % 8, self.prefill.metadata_buffers
                buffers.output_ids[row, 0], buffers.cached_tokens[row, 0] = tokens[-1] + 1, 4
                buffers.cached_tokens[row, 1] = 4
                buffers.bootstrap_room[row, 0] = room
            sender.send(np.asarray(pages[first : first + step], dtype=np.int32), None)

    # --- Decode ---

    def ask(self, tokens: list[int], pages: list[int], room: int, *, have: int = 0, **more: Any) -> Any:
        """Ask for a prompt of which the tree has the first `have` tokens; returns what SGLang queues."""
        asked = self.decode._create_receiver_and_enqueue(request(tokens, room, **more))
        receiver, req = asked.kv_receiver, asked.req
        if receiver.poll() == KVPoll.Bootstrapping:
            assert self.decode.kv_manager.try_ensure_parallel_info(req.bootstrap_addr)
            receiver.init(0)
        if receiver.poll() != KVPoll.WaitingForInput:
            return asked
        self._note(self.decode, req, pages)
        receiver.send_metadata(
            np.asarray(pages[have // PAGE :], dtype=np.int32), room % 8, None, decode_prefix_len=have
        )
        return asked

    @staticmethod
    def _note(queue: Any, req: Any, pages: list[int]) -> None:
        table = queue.scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        for number, page in enumerate(pages):
            for offset in range(PAGE):
                table[number * PAGE + offset] = page * PAGE + offset

    def commit(self, asked: Any) -> None:
        """What SGLang does with a request whose prompt has arrived."""
        self.wait(lambda: asked.kv_receiver.poll() == KVPoll.Success)
        assert (
            int(self.decode.metadata_buffers.bootstrap_room[asked.req.bootstrap_room % 8, 0])
            == asked.req.bootstrap_room
        )
        self.decode.tree_cache.checkpoint_into_tree(asked.req, up_to=len(asked.req.origin_input_ids))
        asked.kv_receiver.clear()

    def settle(self) -> None:
        """Let what the tree took in be copied."""
        self.wait(self._is_reaped)

    def _is_reaped(self) -> bool:
        self.mixin.process_decode_queue(self.decode.scheduler)
        return not self.decode.tree_cache.locked

    def serve(
        self, tokens: list[int], theirs: list[int], ours: list[int], room: int, *, have: int = 0, **more: Any
    ) -> dict[str, int]:
        """Serve a prompt; returns its tokens by source."""
        asked = self.ask(tokens, ours, room, have=have, **more)
        sent = self.send(tokens, theirs, room)
        self.commit(asked)
        self.wait(lambda: sent.disagg_kv_sender.poll() == KVPoll.Success)
        sent.disagg_kv_sender.clear()
        assert self.pools[1].holds(tokens, ours)
        self.settle()
        return {source: count for source, count in asked.kv_receiver.restore.sources.items() if count}

    @staticmethod
    def wait(condition: Callable[[], bool]) -> None:
        end_s = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < end_s, "it did not happen"
            time.sleep(0.001)
