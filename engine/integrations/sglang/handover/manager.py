"""The manager of SGLang's transfer backend: one in each scheduler, with the end that this scheduler is."""

from __future__ import annotations

import math
import os
from typing import Any  # SGLang has no types.

import msgspec
from sglang.srt.disaggregation.common.conn import CommonKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode

from tidekv.engine.integrations.sglang.handover.decode_end import DecodeEnd
from tidekv.engine.integrations.sglang.handover.limits import check_decode, check_reads, check_supported
from tidekv.engine.integrations.sglang.handover.pools import (
    WINDOW,
    MetadataRows,
    Pools,
    RequestWindows,
    forward_streams,
    wrap_pools,
)
from tidekv.engine.integrations.sglang.handover.prefill_end import PrefillEnd
from tidekv.engine.integrations.sglang.handover.prefill_tree import PrefillTree
from tidekv.engine.integrations.sglang.handover.ranks import LOOPBACK, Ranks
from tidekv.engine.integrations.sglang.handover.requests import PageNamespaces
from tidekv.engine.integrations.sglang.handover.settings import read_settings
from tidekv.engine.integrations.sglang.handover.tree import KeptTree
from tidekv.states.errors import InvalidConfig
from tidekv.states.handover.rank_place import RankPlace
from tidekv.transports.control.addresses import Dials, parse_address


class TidekvManager(CommonKVManager):  # type: ignore[misc]  # SGLang has no types.
    """The end that a scheduler is: `decode` or `prefill` is set once `open` has run."""

    supports_deferred_decode_kv_release = True

    def __init__(self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool = False) -> None:
        """Check everything, and start nothing. Raises InvalidConfig for what cannot be handed over."""
        self.settings = read_settings(os.environ)
        self.decode: DecodeEnd | None = None
        self.prefill: PrefillEnd | None = None
        self.prefill_tree: PrefillTree | None = None
        """Where prefill puts what it reads from decode; None if it reads nothing."""
        self.rows = MetadataRows(args.aux_data_ptrs, args.aux_item_lens)
        self.dials = Dials.parse(self.settings.dials)
        self._windows: RequestWindows | None = None
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
        pools = self._wrap(queue)
        check_decode(queue)
        # Pages of an aborted request are held until nothing writes to them, however long that takes.
        self.enable_deferred_decode_kv_release = True
        queue.transfer_queue.enable_deferred_kv_release = True
        queue.transfer_queue.deferred_kv_release_timeout = math.inf
        ranks = self._ranks(queue)
        host = LOOPBACK if self.server_args.nnodes == 1 else self.local_ip
        ranks.meet(host, kv_heads_total=self._heads(queue), secret=self.settings.secret())
        self.decode = DecodeEnd(
            pools,
            msgspec.structs.replace(self.settings, host_path=self.settings.pool_path(self.attn_tp_rank)),
            config=msgspec.structs.replace(
                self.settings.engine_of(self.attn_tp_rank, self.attn_tp_size), model=self._model()
            ),
            row_bytes=self.rows.bytes,
            ranks=ranks,
            server=forward_streams(pools.full.device, queue),
        )
        self.queue = queue
        self.names = queue.scheduler.tidekv_names = PageNamespaces(ranks)
        self.tree = KeptTree(self.decode, queue.tree_cache, self.names)
        queue.scheduler.tidekv_manager = self

    def open_prefill(self, queue: Any) -> None:
        """Start the prefill end over the pools of SGLang's queue, and register it."""
        host, port = parse_address(self.settings.listen or f"{self.local_ip}:0")
        pools = self._wrap(queue)
        reads = self.settings.engine.cache_peers.enabled
        if reads:
            check_reads(queue, self)
        self.prefill = PrefillEnd(
            pools,
            self.settings,
            listen=f"{host}:{port + self.attn_tp_rank if port else 0}",
            model=self._model(),
            place=RankPlace(rank=self.attn_tp_rank, ranks=self.attn_tp_size, kv_heads_total=self._heads(queue)),
            server=forward_streams(pools.full.device, queue),
        )
        self.names = queue.scheduler.tidekv_names = PageNamespaces(self._ranks(queue))
        if reads:
            self.prefill_tree = PrefillTree(self.prefill, queue.scheduler, self.names)
        queue.scheduler.tidekv_manager = self
        _, self.rank_port = parse_address(self.prefill.address)
        self.register_to_bootstrap()

    def rest(self) -> None:
        """Wait a moment for what is under way. Called while SGLang has requests and nothing to compute."""
        end = self.decode or self.prefill
        if end is not None:
            end.rest()

    def windows_of(self, request: Any, tokens: int) -> dict[str, list[int]]:
        """Return the pages of components at the end of a request's first `tokens` tokens. Raises InvalidRequest."""
        return {} if self._windows is None else {WINDOW: self._windows.at_end(request, tokens)}

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

    def _wrap(self, queue: Any) -> Pools:
        pools = wrap_pools(queue.token_to_kv_pool, getattr(queue.scheduler, "sliding_window_size", None))
        for windows in pools.components:
            self._windows = RequestWindows(queue, windows.window_tokens)
        return pools

    def _ranks(self, queue: Any) -> Ranks:
        if self.attn_tp_size == 1:
            return Ranks()
        return Ranks(self.attn_tp_rank, self.attn_tp_size, queue.scheduler.attn_tp_cpu_group)

    def _heads(self, queue: Any) -> int:
        """Return the KV heads of the model, of which ranks hold copies if there are more ranks than heads."""
        if self.attn_tp_size == 1 or self.is_mla_backend:
            return 0
        return int(queue.scheduler.model_config.get_total_num_kv_heads())

    def _model(self) -> str:
        return self.settings.model or str(self.server_args.served_model_name or self.server_args.model_path)
