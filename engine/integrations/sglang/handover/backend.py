"""SGLang's four classes of a transfer backend, over `DecodeEnd` and `PrefillEnd`.

They derive from SGLang's common classes, whose bootstrap service and topology they use: prefill's ranks register the
addresses at which they listen, and decode asks for them. Everything after that goes over tidekv's own links. All calls
come from the scheduler's thread. An exception there ends the server, so what goes wrong is `KVPoll.Failed`.
"""

from __future__ import annotations

import math
import os
from typing import Any  # SGLang has no types.

import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import (
    CommonKVBootstrapServer,
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
    KVTransferError,
)
from sglang.srt.disaggregation.utils import DisaggregationMode

from tidekv.engine.integrations.sglang.handover.decode_end import DecodeEnd, PromptRestore, RestoreState
from tidekv.engine.integrations.sglang.handover.limits import check_decode, check_supported, unequal
from tidekv.engine.integrations.sglang.handover.pools import MetadataRows, wrap_pool
from tidekv.engine.integrations.sglang.handover.prefill_end import PrefillEnd, Sending
from tidekv.engine.integrations.sglang.handover.requests import digest_of_prompt, namespace_of, packed_prompt
from tidekv.engine.integrations.sglang.handover.settings import read_settings
from tidekv.engine.integrations.sglang.handover.tree import KeptTree
from tidekv.engine.log import engine_log
from tidekv.states.errors import InvalidConfig
from tidekv.states.validation import short
from tidekv.transports.control.addresses import Dials, parse_address

LOG = engine_log("tidekv.sglang")


class TidekvManager(CommonKVManager):  # type: ignore[misc]  # SGLang has no types.
    """The end that a scheduler is: `decode` or `prefill` is set once `open` has run."""

    supports_deferred_decode_kv_release = True

    def __init__(self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool = False) -> None:
        """Check everything, and start nothing. Raises InvalidConfig for what cannot be handed over."""
        self.settings = read_settings(os.environ)
        self.decode: DecodeEnd | None = None
        self.prefill: PrefillEnd | None = None
        self.rows = MetadataRows(args.aux_data_ptrs, args.aux_item_lens)
        self.dials = Dials.parse(self.settings.dials)
        self.refusals: dict[str, str] = {}
        """By bootstrap address, why its prefill cannot serve this decode."""
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        check_supported(args, self)
        if disaggregation_mode == DisaggregationMode.DECODE and not self.settings.dials:
            raise InvalidConfig(
                f'{self.settings.where} needs "dials", the addresses of bootstrap services and prefill workers that '
                'decode may connect to, such as ["127.0.0.1:*"]'
            )

    def register_to_bootstrap(self) -> None:
        """Register, once the address is known: SGLang's constructor calls this too early."""
        if self.prefill is not None:
            super().register_to_bootstrap()

    def open_decode(self, queue: Any) -> None:
        """Start the decode end over the pools of SGLang's queue."""
        pool = wrap_pool(queue.token_to_kv_pool)
        check_decode(queue)
        # Pages of an aborted request are held until nothing writes to them, however long that takes.
        self.enable_deferred_decode_kv_release = True
        queue.transfer_queue.enable_deferred_kv_release = True
        queue.transfer_queue.deferred_kv_release_timeout = math.inf
        self.decode = DecodeEnd(
            pool,
            self.settings,
            model=self._model(),
            name=f"sglang-decode-{self.attn_tp_rank}",
            row_bytes=self.rows.bytes,
        )
        self.queue = queue
        self.tree = KeptTree(self.decode, queue.tree_cache)

    def open_prefill(self, queue: Any) -> None:
        """Start the prefill end over the pools of SGLang's queue, and register it."""
        host, port = parse_address(self.settings.listen or f"{self.local_ip}:0")
        self.prefill = PrefillEnd(
            wrap_pool(queue.token_to_kv_pool),
            self.settings,
            listen=f"{host}:{port + self.attn_tp_rank if port else 0}",
            model=self._model(),
            name=f"sglang-prefill-{self.attn_tp_rank}",
        )
        _, self.rank_port = parse_address(self.prefill.address)
        self.register_to_bootstrap()

    def allows(self, bootstrap_addr: str) -> bool:
        """Whether decode may connect to a bootstrap service, which a client's request names."""
        return self.dials.allows_all(bootstrap_addr)

    def forget_prefill(self, bootstrap_addr: str) -> None:
        """Ask for the addresses of a prefill again before the next request."""
        with self.connection_lock:
            self.prefill_info_table.pop(bootstrap_addr, None)
            for key in [key for key in self.connection_pool if key.startswith(f"{bootstrap_addr}_")]:
                del self.connection_pool[key]

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Ask a bootstrap service that may be dialled for its prefill. A prefill that does not fit is refused."""
        if not self.allows(bootstrap_addr):
            return False
        try:
            is_known = bool(super().try_ensure_parallel_info(bootstrap_addr))
            self.refusals.pop(bootstrap_addr, None)
            if is_known and (words := unequal(self.prefill_info_table[bootstrap_addr], self)):
                self.refusals[bootstrap_addr] = words
        except Exception as error:
            # SGLang raises for another page size or dtype, which would end this server.
            self.refusals[bootstrap_addr] = str(error)
            return False
        return is_known

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether nothing writes to the pages of an aborted request any more."""
        return self.decode is None or self.decode.is_quiet(bootstrap_room)

    def should_verify_kv_checksum(self, bootstrap_addr: str) -> bool:
        """Return False: prefill's digest covers pages that decode had. tidekv has `engine.page_checksums`."""
        return False

    def _model(self) -> str:
        name = self.settings.model or str(self.server_args.served_model_name or self.server_args.model_path)
        # With latent attention all ranks hold the same; else each holds its own heads.
        return name if self.attn_tp_size == 1 or self.is_mla_backend else f"{name}, rank {self.attn_tp_rank}"


class TidekvReceiver(CommonKVReceiver):  # type: ignore[misc]  # SGLang has no types.
    """One request on decode."""

    def __init__(self, mgr: TidekvManager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self.request: Any = None
        self.restore: PromptRestore | None = None
        self._row = -1
        self._is_resolved = False
        self._cause = ""
        self._mgr = mgr
        super().__init__(mgr, bootstrap_addr, bootstrap_room)
        if not mgr.allows(bootstrap_addr):
            self._fail(f"the request names the bootstrap service {short(bootstrap_addr)}, which is not in dials")
        elif type(bootstrap_room) is not int:
            self._fail(f"the request names the room {short(bootstrap_room)}, which is no number")

    def init(self, prefill_dp_rank: int) -> None:
        """Look up the address of the prefill rank with the same heads."""
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
        elif len(self.bootstrap_infos) != 1:
            self._fail(
                f"prefill has {len(self.bootstrap_infos)} ranks for this one; equal tensor-parallel sizes are served"
            )
        else:
            self._is_resolved = True

    def _register_kv_args(self) -> bool:
        """Return True: the ends introduce themselves on tidekv's links."""
        return True

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
        cause = self._cause or recorded
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
        info = self.bootstrap_infos[0]
        host = str(info["rank_ip"])
        self._row = aux_index
        self.restore = decode.begin(
            room=self.bootstrap_room,
            packed=packed,
            prompt=digest_of_prompt(request, packed),
            prefill=f"[{host}]:{info['rank_port']}" if ":" in host else f"{host}:{info['rank_port']}",
            namespace=namespace_of(request, self._mgr.tree.salt),
            pages=np.concatenate((held.astype(np.int64), np.asarray(kv_indices, dtype=np.int64))),
            have_tokens=have_tokens,
        )

    def _state(self) -> Any:
        restore, decode = self.restore, self._mgr.decode
        if restore is None or decode is None:
            if (refusal := self._mgr.refusals.get(self.bootstrap_addr)) is not None:
                self._fail(refusal)
                return KVPoll.Failed
            return KVPoll.WaitingForInput if self._is_resolved else KVPoll.Bootstrapping
        state = decode.poll(restore)
        if restore.prefill_is_gone:
            restore.prefill_is_gone = False
            self._mgr.forget_prefill(self.bootstrap_addr)
        if state is RestoreState.FAILED:
            self._fail(restore.cause)
            return KVPoll.Failed
        if state is RestoreState.RUNNING:
            return KVPoll.Transferring
        self._mgr.rows.write(self._row, restore.row)
        self._count_cached(restore)
        self.conclude_state = KVPoll.Success
        return KVPoll.Success

    def _count_cached(self, restore: PromptRestore) -> None:
        """Let the answer name the tokens that decode had, by tier, and those that prefill's cache had beyond."""
        counts = self._mgr.queue.metadata_buffers.cached_tokens[self._row]
        l1, l2, l3 = (restore.sources[tier] for tier in ("l1", "l2", "l3"))
        beyond = max(0, int(counts[0]) - (l1 + l2 + l3))
        for slot, tokens in enumerate((l1 + l2 + l3 + beyond, l1 + beyond, l2, l3)):
            counts[slot] = tokens

    def _fail(self, cause: str) -> None:
        if self.conclude_state is None:
            self.conclude_state, self._cause = KVPoll.Failed, cause


class TidekvSender(CommonKVSender):  # type: ignore[misc]  # SGLang has no types.
    """One request on prefill. It hands over all pages of the prompt, so that decode can ask for any of them later."""

    def __init__(
        self,
        mgr: TidekvManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        self.sending: Sending | None = None
        self._mgr = mgr
        self._cause = ""
        super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)

    def attach(self, request: Any) -> None:
        """Begin the hand-over of the request's prompt."""
        try:
            if self._mgr.prefill is None:
                raise InvalidConfig("SGLang has not given this backend its queue")
            if type(self.bootstrap_room) is not int:
                raise InvalidConfig(f"the request names the room {short(self.bootstrap_room)}, which is no number")
            self.sending = self._mgr.prefill.open(
                self.bootstrap_room, digest_of_prompt(request, packed_prompt(request))
            )
        except Exception as error:
            LOG.exception("a request is not handed over", request_id=str(self.bootstrap_room))
            self._fail(f"{type(error).__name__}: {error}")

    def pop_decode_prefix_len(self) -> int:
        """Return 0: pages that decode has now may be asked for later."""
        return 0

    def send(self, kv_indices: Any, state_indices: Any = None, num_kv_tokens: int | None = None, **more: Any) -> None:
        """Hand over pages that are computed; with the last ones the row of metadata."""
        if self.conclude_state is not None:
            return
        try:
            prefill, sending = self._mgr.prefill, self.sending
            assert prefill is not None and sending is not None, "attached before it is computed"
            self.curr_idx += len(kv_indices)
            is_last = self.curr_idx == self.num_kv_indices
            prefill.send(sending, kv_indices.tolist(), is_last=is_last)
            if is_last:
                row = self._mgr.rows.read(self.aux_index)
                prefill.finish(sending, first_token=max(0, int.from_bytes(row[:4], "little", signed=True)), row=row)
        except Exception as error:
            LOG.exception("pages were not handed over", request_id=str(self.bootstrap_room))
            self._stop(f"pages were not handed over: {type(error).__name__}: {error}")

    def poll(self) -> Any:
        """Return the state, without waiting."""
        if self.conclude_state is not None:
            return self.conclude_state
        try:
            return self._state()
        except Exception as error:
            LOG.exception("a hand-over was lost", request_id=str(self.bootstrap_room))
            self._stop(f"a hand-over was lost: {type(error).__name__}: {error}")
            return KVPoll.Failed

    def poll_pp_consensus(self) -> Any:
        """Return the state: pipeline stages are refused at the start."""
        return self.poll()

    def clear(self) -> None:
        """Forget the request; nothing reads its pages any more."""
        if self.conclude_state != KVPoll.Success:
            self._stop("the request has ended at prefill")
        super().clear()

    def failure_exception(self) -> None:
        """Raise KVTransferError with the cause, as SGLang asks for it after a failure. Nothing reads the pages then."""
        self._stop("the request failed on another rank of prefill")
        cause = self._cause
        super().clear()
        raise KVTransferError(
            self.bootstrap_room,
            cause or "a request failed on another rank",
            is_from_another_rank=cause.endswith("another rank of prefill"),
        )

    def abort(self) -> None:
        """Fail the request, and tell decode. Nothing reads its pages on return."""
        self._stop("Aborted by AbortReq.")

    def get_transfer_metric(self) -> Any:
        """Return the bytes that were sent: pages that decode had are not among them."""
        self._transfer_metric.transfer_total_bytes = 0 if self.sending is None else self.sending.bytes_sent
        return self._transfer_metric

    def _state(self) -> Any:
        prefill, sending = self._mgr.prefill, self.sending
        if prefill is None or sending is None:
            return KVPoll.Bootstrapping
        prefill.poll(sending)
        if sending.failure:
            self._fail(sending.failure)
        elif sending.is_received:
            self.conclude_state = KVPoll.Success
        elif sending.is_sent:
            return KVPoll.Transferring
        else:
            return KVPoll.WaitingForInput if sending.may_compute else KVPoll.Bootstrapping
        return self.conclude_state

    def _stop(self, cause: str) -> None:
        self._fail(cause)
        if self._mgr.prefill is not None and self.sending is not None:
            self._mgr.prefill.stop(self.sending, self._cause)

    def _fail(self, cause: str) -> None:
        self._cause = self._cause or cause
        self.conclude_state = KVPoll.Failed


class TidekvBootstrapServer(CommonKVBootstrapServer):  # type: ignore[misc]  # SGLang has no types.
    """SGLang's bootstrap service, at which prefill's ranks register their addresses."""


CLASSES = {
    "manager": TidekvManager,
    "sender": TidekvSender,
    "receiver": TidekvReceiver,
    "bootstrap_server": TidekvBootstrapServer,
}
"""By the names of SGLang's `KVClassType`."""
