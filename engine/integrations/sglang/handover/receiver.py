"""A request on SGLang's decode server. What goes wrong is `KVPoll.Failed`: an exception would end the server."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any  # SGLang has no types.

import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVReceiver, KVTransferError

from tidekv.backends.keys.chain import TOKEN_BYTES
from tidekv.engine.integrations.sglang.handover.decode_end import DecodeEnd, PromptRestore, RestoreState
from tidekv.engine.integrations.sglang.handover.manager import TidekvManager
from tidekv.engine.integrations.sglang.handover.requests import (
    can_recompute,
    digest_of_prompt,
    hints_of,
    packed_prompt,
)
from tidekv.engine.log import engine_log
from tidekv.states.errors import InvalidConfig
from tidekv.states.validation import short
from tidekv.transports.control.addresses import format_address, parse_address

LOG = engine_log("tidekv.sglang")


class TidekvReceiver(CommonKVReceiver):  # type: ignore[misc]  # SGLang has no types.
    """One request on decode."""

    def __init__(self, mgr: TidekvManager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self.request: Any = None
        self.restore: PromptRestore | None = None
        self._row = -1
        self._is_resolved = False
        self._cause = ""
        self._moving: Future[None] | None = None
        """The look-up of another prefill, after the loss of one."""
        self._tried: set[str] = set()
        self._mgr = mgr
        self.bootstrap_addr = bootstrap_addr
        """That of the prefill that is asked."""
        super().__init__(mgr, bootstrap_addr, bootstrap_room)
        if not mgr.allows(bootstrap_addr):
            self._fail(f"the request names the bootstrap service {short(bootstrap_addr)}, which is not in dials")
        elif type(bootstrap_room) is not int:
            self._fail(f"the request names the room {short(bootstrap_room)}, which is no number")

    def init(self, prefill_dp_rank: int) -> None:
        """Look up the addresses of prefill's ranks."""
        if self.conclude_state is not None:
            return
        try:
            super().init(prefill_dp_rank)
        except Exception as error:
            self._fail(f"prefill's address is not known: {error}")
            return
        if self.conclude_state == KVPoll.Failed:
            with self._mgr.failure_lock:
                self._cause = self._mgr.failure_records.pop(self.bootstrap_room, "prefill's address is not known")
        else:
            self._is_resolved = True

    def _setup_bootstrap_infos(self) -> None:
        """Look up all ranks of prefill, each of which sends the heads that it holds of those of this rank."""
        key = f"{self.bootstrap_addr}_{self.prefill_dp_rank}_ranks"
        with self._mgr.connection_lock:
            found = self._mgr.connection_pool.get(key)
        if found is None:
            found = []
            for rank in range(self.prefill_info.attn_tp_size):
                info = self._get_bootstrap_info_from_server(self.prefill_dp_rank, 0, rank, 0)
                if info is None:
                    self.conclude_state = KVPoll.Failed
                    return
                found.append(info)
            with self._mgr.connection_lock:
                self._mgr.connection_pool[key] = found
        self.bootstrap_infos = found

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Any = None,
        decode_prefix_len: int | None = None,
        **more: Any,
    ) -> None:
        """Start the restore into the request's pages: those of SGLang's tree, and those that it has allocated."""
        if self.conclude_state is not None:
            return
        try:
            self._begin(kv_indices, aux_index, decode_prefix_len or 0)
        except Exception as error:
            LOG.exception("a restore was not started", request_id=str(self.bootstrap_room))
            self._fail(f"a restore was not started: {type(error).__name__}: {error}")

    def poll(self) -> Any:
        """Return the state, without waiting."""
        if self.conclude_state is not None:
            return self.conclude_state
        try:
            return self._state()
        except Exception as error:
            LOG.exception("a restore was lost", request_id=str(self.bootstrap_room))
            self._fail(f"a restore was lost: {type(error).__name__}: {error}")
            return KVPoll.Failed

    def failure_exception(self) -> None:
        """Raise KVTransferError with the cause, as SGLang asks for it after a failure."""
        self.conclude_state = KVPoll.Failed
        with self._mgr.failure_lock:
            recorded = self._mgr.failure_records.pop(self.bootstrap_room, None)
        self.clear()
        # Recorded: that another prefill could not be asked, which SGLang reports as an abort.
        cause = recorded or self._cause
        raise KVTransferError(
            self.bootstrap_room, cause or "a request failed on another rank", is_from_another_rank=not cause
        )

    def abort(self) -> None:
        """Fail the request, and tell prefill."""
        self._fail("Aborted by AbortReq.")
        self.ensure_abort_notified()

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """End the writes to the request's pages; SGLang holds the pages if there are any."""
        restore, decode = self.restore, self._mgr.decode
        if restore is None or decode is None:
            return
        decode.abort(restore, self._cause or "failed on another rank")
        if restore.is_in_flight:
            self.abort_notified = True

    def _begin(self, kv_indices: Any, aux_index: int | None, have_tokens: int) -> None:
        decode, request = self._mgr.decode, self.request
        if decode is None or request is None or aux_index is None:
            raise InvalidConfig("SGLang has not given this backend its queue, or a receiver its request")
        page_size = self._mgr.kv_args.page_size
        table = self._mgr.queue.req_to_token_pool.req_to_token[request.kv.req_pool_idx]
        held = table[:have_tokens:page_size].cpu().numpy() // page_size
        packed = packed_prompt(request)
        self._row = aux_index
        self.restore = decode.begin(
            room=self.bootstrap_room,
            packed=packed,
            prompt=digest_of_prompt(request, packed),
            prefill=self._prefill_address(),
            namespace=self._mgr.names.of(request),
            pages=np.concatenate((held.astype(np.int64), np.asarray(kv_indices, dtype=np.int64))),
            have_tokens=have_tokens,
            component_pages=self._mgr.windows_of(request, len(packed) // TOKEN_BYTES),
            kv_hints=hints_of(request),
        )

    def _state(self) -> Any:
        restore, decode = self.restore, self._mgr.decode
        if restore is None or decode is None:
            if (refusal := self._mgr.refusals.get(self.bootstrap_addr)) is not None:
                self._fail(refusal)
                return KVPoll.Failed
            return KVPoll.WaitingForInput if self._is_resolved else KVPoll.Bootstrapping
        state = decode.poll(restore)
        if state is RestoreState.FAILED and restore.prefill_is_gone and self._moves_on(restore, decode):
            return KVPoll.Transferring
        if state is RestoreState.FAILED:
            self._fail(restore.cause)
            return KVPoll.Failed
        if state is RestoreState.RUNNING:
            return KVPoll.Transferring
        self._mgr.rows.write(self._row, restore.row)
        self._count_cached(restore)
        self.conclude_state = KVPoll.Success
        return KVPoll.Success

    def _moves_on(self, restore: PromptRestore, decode: DecodeEnd) -> bool:
        """Whether another prefill computes the prompt: SGLang's request for a retracted one asks for it."""
        if self._moving is None:
            # Once: later this is the address of the one that is looked up.
            self._mgr.forget_prefill(self.bootstrap_addr)
            self._tried.add(self.bootstrap_addr)
            others = [address for address in self._mgr.settings.prefills if address not in self._tried]
            if not others or not can_recompute(self.request):
                return False
            LOG.warning(
                "another prefill computes a prompt",
                request_id=restore.request_id,
                prefill=others[0],
                cause=restore.cause,
            )
            self.bootstrap_addr, self._is_resolved = others[0], False
            self._moving = self._mgr._ensure_prefill_recompute_executor().submit(self._resolve)
        if not self._moving.done():
            return True
        self._moving = None
        if not self._is_resolved:
            return self.conclude_state is None and self._moves_on(restore, decode)
        payload = self.request.build_rebootstrap_payload()
        host, port = parse_address(self.bootstrap_addr)
        self._mgr.submit_prefill_recompute(self, {**payload, "bootstrap_host": host, "bootstrap_port": port})
        decode.redirect(restore, self._prefill_address())
        return True

    def _resolve(self) -> None:
        """Look up another prefill. Runs on a thread of SGLang's: it waits for bootstrap services."""
        if self._mgr.try_ensure_parallel_info(self.bootstrap_addr) and self.bootstrap_addr not in self._mgr.refusals:
            try:
                super().init(0)
                self._is_resolved = self.conclude_state is None
            except Exception:
                LOG.exception("a prefill was not found", prefill=self.bootstrap_addr)

    def _prefill_address(self) -> str:
        ranks = self.bootstrap_infos
        return ",".join(format_address(str(rank["rank_ip"]), int(rank["rank_port"])) for rank in ranks)

    def _count_cached(self, restore: PromptRestore) -> None:
        """Let the answer name the tokens that decode had, by tier, and those that prefill's cache had beyond. Those of
        peers count as those of storage: they were outside this server.
        """
        counts = self._mgr.queue.metadata_buffers.cached_tokens[self._row]
        l1, l2, l3 = (restore.sources[tier] for tier in ("l1", "l2", "l3"))
        l3 += restore.sources["peer"]
        beyond = max(0, int(counts[0]) - (l1 + l2 + l3))
        for slot, tokens in enumerate((l1 + l2 + l3 + beyond, l1 + beyond, l2, l3)):
            counts[slot] = tokens

    def _fail(self, cause: str) -> None:
        if self.conclude_state is None:
            self.conclude_state, self._cause = KVPoll.Failed, cause
