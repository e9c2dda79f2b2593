"""A request on SGLang's prefill server. What goes wrong is `KVPoll.Failed`: an exception would end the server."""

from __future__ import annotations

from typing import Any  # SGLang has no types.

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVSender, KVTransferError

from tidekv.engine.integrations.sglang.handover.manager import TidekvManager
from tidekv.engine.integrations.sglang.handover.prefill_end import Sending
from tidekv.engine.integrations.sglang.handover.requests import digest_of_prompt, packed_prompt
from tidekv.engine.log import engine_log
from tidekv.states.errors import InvalidConfig
from tidekv.states.validation import short

LOG = engine_log("tidekv.sglang")


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
        self._namespace = ""
        self._request: Any = None
        super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)

    def attach(self, request: Any) -> None:
        """Begin the hand-over of the request's prompt."""
        try:
            if self._mgr.prefill is None:
                raise InvalidConfig("SGLang has not given this backend its queue")
            if type(self.bootstrap_room) is not int:
                raise InvalidConfig(f"the request names the room {short(self.bootstrap_room)}, which is no number")
            packed = packed_prompt(request)
            place = None if self._mgr.prefill_tree is None else self._mgr.prefill_tree.place_of(request)
            digest = digest_of_prompt(request, packed)
            self.sending = self._mgr.prefill.open(self.bootstrap_room, digest, packed, place)
            self._namespace, self._request = self._mgr.names.of(request), request
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
                first = max(0, int.from_bytes(row[:4], "little", signed=True))
                prefill.finish(
                    sending,
                    first_token=first,
                    row=row,
                    namespace=self._namespace,
                    component_pages=self._mgr.windows_of(self._request, sending.prompt.prompt_tokens),
                )
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
