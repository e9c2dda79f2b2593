"""A worker's side of the hand-over role: `PrefillPeer` and `DecodeEngine` beside vLLM's model, each on its own thread.

    prefill   a step fills blocks ──▶ PrefillThread ──▶ decode's pages             blocks are held until decode has them
    decode    restore job ──▶ EngineThread: L2, storage, prefill ──▶ vLLM's blocks, in place      reported once
              offer job ──▶ EngineThread: L2, storage                     blocks are held until they are in host memory

vLLM's thread calls everything here once a step and never waits for a transfer. vLLM's blocks are the device pages that
it lends to the decode engine. No failure fails a request: vLLM computes what was not restored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from typing import Any  # vLLM's objects are not typed here: tests and type checks go without vLLM.

import msgspec

from tidekv.backends.component_pools import ComponentPools
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.host.pool import HostPool
from tidekv.backends.keys.chain import pack_tokens
from tidekv.engine.decode.decode_engine import DecodeEngine
from tidekv.engine.decode.values import DecodeRequest
from tidekv.engine.integrations.vllm.handover.blocks import BlockOrder, RankPools, wrap_blocks, wrap_records
from tidekv.engine.integrations.vllm.handover.hints import fetches_at_rank
from tidekv.engine.integrations.vllm.handover.jobs import (
    PREFILL_FIRST,
    DeclineJob,
    HandoverJobs,
    LookUpJob,
    OfferJob,
    RestoreJob,
    SendJob,
)
from tidekv.engine.integrations.vllm.handover.settings import Handover
from tidekv.engine.integrations.vllm.kv_events import EventFeed, RankReport
from tidekv.engine.integrations.vllm.settings import CPU_BACKEND, backends_of, in_order
from tidekv.engine.integrations.vllm.start_report import report_tiers
from tidekv.engine.log import engine_log
from tidekv.engine.prefill.prefill_config import PrefillConfig
from tidekv.engine.prefill.prefill_peer import PrefillPeer, Room
from tidekv.engine.thread.engine_thread import EngineThread, Failed, LookedUp, Offered, RestoredInto
from tidekv.engine.thread.prefill_thread import PrefillThread
from tidekv.states.errors import EngineClosed, InvalidConfig, InvalidRequest, PrefillCause, TidekvError
from tidekv.states.handover.prompt_digest import PromptDigest
from tidekv.transports.prefill.prefill_room import RoomOutcome

LOG = engine_log("tidekv.vllm")
WITH_A_PREFILL = "for prompts that name a prefill only"
UNSAMPLED = 0
"""First token of every hand-over: decode's vLLM computes the last prompt token itself and samples from it."""


class PrefillWorker:
    """Sends vLLM's blocks to decode workers, from the memory in which vLLM computed them."""

    def __init__(self, pools: RankPools, handover: Handover, counts: Counter[str]) -> None:
        """Start, and add to `counts`. Raises what `PrefillPeer` raises as it is entered."""
        settings = handover.settings
        peer = PrefillPeer(
            PrefillConfig(
                listen=handover.listen,
                model=pools.identity(handover.fingerprint),
                bigram_keys=handover.groups.bigram_keys,
                lease_s=settings.lease_s,
            ),
            device=pools.full,
            components=pools.components,
            transport=settings.prefill_transport(f"{handover.name}-prefill"),
            on_room=self._refuse_unknown,
        )
        self.thread = PrefillThread(peer, promise_timeout_s=settings.promise_timeout_s)
        self._counts = counts
        self._rooms: dict[str, str] = {}
        """Rooms by request, from the first send on until the request's blocks are free."""
        self._open: set[str] = set()
        """Requests whose blocks may still be read."""
        self._prompts: dict[str, PromptDigest] = {}
        """Prompts of the open requests by room, where this prefill has named it."""
        self._held: set[str] = set()
        self._blocks: Counter[str] = Counter()
        """Blocks handed over, by request."""
        self._unclaimed_max = int(settings.unclaimed_share * handover.num_blocks)
        self.thread.start()

    @property
    def address(self) -> str:
        """The address that decode workers connect to."""
        return self.thread.address

    def before_forward(self, jobs: HandoverJobs) -> None:
        """End what reads blocks that this step may overwrite."""
        for request_id in jobs.preempted:
            self.thread.restart(request_id, "prefill preempted the request")
            self._blocks[request_id] = 0
        for request_id, is_complete in jobs.held.items():
            self._held.add(request_id)
            if not is_complete:
                self.thread.stop(request_id, "the request was aborted at prefill")
        if jobs.held or jobs.is_short:
            self._release_unclaimed(is_short=jobs.is_short)

    def send(self, job: SendJob) -> None:
        """Hand over the blocks that a step filled."""
        if job.request_id not in self._rooms:
            self._rooms[job.request_id] = job.room
            try:
                self.thread.open(job.request_id, job.prompt, room=job.room)
            except InvalidRequest as error:
                LOG.warning("a request is not handed over", request_id=job.request_id, cause=str(error))
                self._counts["sends_failed"] += 1
                return
            self._open.add(job.request_id)
            if job.room.startswith(PREFILL_FIRST):
                self._prompts[job.room] = job.prompt
        if job.request_id not in self._open:
            return
        end = job.prompt.prompt_tokens if job.is_last else None
        self._blocks[job.request_id] += len(job.blocks) + sum(map(len, job.components.values()))
        self.thread.send(job.request_id, job.blocks, start_token=job.start_token, end_token=end)
        for component, blocks in job.components.items():
            self.thread.send_component_pages(job.request_id, component, blocks)
        if job.is_last:
            self.thread.finish(job.request_id, first_token=UNSAMPLED)

    def take_finished(self) -> set[str]:
        """Return the finished requests whose blocks nothing reads any more, each once."""
        for ended in self.thread.poll() if self._open else ():
            self._open.discard(ended.request_id)
            room = self._rooms[ended.request_id]
            self._prompts.pop(room, None)
            if ended.outcome is RoomOutcome.RECEIVED:
                self._counts["sends_received"] += 1
            else:
                self._counts["sends_unclaimed" if ended.outcome is None else "sends_failed"] += 1
                LOG.info("a hand-over ended", request_id=ended.request_id, room=room, cause=ended.cause)
        freed = self._held - self._open
        self._held -= freed
        for request_id in freed:
            del self._rooms[request_id]
            self._blocks.pop(request_id, None)
        return freed

    def is_transferring(self) -> bool:
        """Whether a room may still be read, or blocks that are free are unreported."""
        return bool(self._open or self._held)

    def close(self) -> None:
        """End all rooms and stop. Idempotent."""
        self.thread.close()

    def _release_unclaimed(self, *, is_short: bool) -> None:
        """Give up the oldest prompts that no decode worker asks for: all above the share, and one if vLLM is short."""
        unclaimed = [request_id for request_id in self.thread.unclaimed() if request_id in self._held]
        blocks = sum(self._blocks[request_id] for request_id in unclaimed)
        for request_id in unclaimed:
            if blocks > self._unclaimed_max:
                why = f"prompts that no decode worker asked for held {blocks} of at most {self._unclaimed_max} blocks"
            elif is_short:
                why = "no decode worker had asked for it, and a request of this prefill waited for blocks"
            else:
                return
            self.thread.stop(request_id, why)
            blocks, is_short = blocks - self._blocks[request_id], False

    async def _refuse_unknown(self, room: Room) -> None:
        """Refuse a room that prefill named and no longer has, as after its restart, or for another prompt. Runs on the
        peer's loop, to the end of the room.
        """
        if room.request_id.startswith(PREFILL_FIRST):
            prompt = self._prompts.get(room.request_id)
            if prompt is None:
                room.fail(PrefillCause.FAILED.words("this prefill does not have the prompt any more"))
            elif prompt != room.prompt:
                room.fail(PrefillCause.OTHER_PROMPT.words("this room was named for another prompt"))
        # The thread serves all others by name; a room is over when its `on_room` returns.
        await room.received()


class DecodeWorker:
    """Restores prompts into vLLM's blocks by a decode engine, and offers it what vLLM computed."""

    def __init__(self, pools: RankPools, handover: Handover, counts: Counter[str]) -> None:
        """Start, and add to `counts`. Raises what `DecodeEngine` raises as it starts."""
        settings, layout = handover.settings, pools.full.layout
        self._handover = handover
        self._page_size, self._page_bytes = handover.block_size, layout.page_bytes
        config = msgspec.structs.replace(
            settings.engine,
            model=pools.identity(handover.fingerprint),
            device="lent",
            bigram_keys=handover.groups.bigram_keys,
            default_deadline_s=settings.restore_timeout_s,
            # A prompt that prefill preempted is sent again in a second room.
            peer=msgspec.structs.replace(settings.engine.peer, attempts=max(2, settings.engine.peer.attempts)),
            cache_peers=handover.cache_peers,
        )
        self.events = None if handover.events is None else EventFeed(handover, kind=handover.events.kind)
        self._host = HostPool.allocate(layout, _host_pages(handover, pools), path=handover.pool_path)
        components = _with_host_pages(handover, pools)
        self._component_hosts = [one.host for one in components]
        engine = DecodeEngine(
            config,
            device=pools.full,
            host=self._host,
            components=components,
            storage=settings.open_storage(),
            transport=settings.decode_transport(f"{handover.name}-decode", config.cache_peers),
        )
        if self.events is not None:
            engine.publish_to(self.events.server_events)
        self.engine = EngineThread(engine)
        self._counts = counts
        self._jobs: dict[int, RestoreJob | OfferJob | LookUpJob] = {}
        """Calls of the engine that have no outcome yet, by ticket."""
        self._rooms: dict[str, str] = {}
        """Rooms of the restores under way, by request; a room is the request's id within the engine."""
        self._aborted: set[str] = set()
        """Requests whose restore was aborted and has not ended."""
        self._loaded: set[str] = set()
        self._freed: set[str] = set()
        self._invalid: set[int] = set()
        self._answers: dict[str, int] = {}
        """Tokens that look-ups have found, by request, unreported."""
        self._has_components = bool(pools.components)
        self._failed: set[str] = set()
        """With components: requests whose restore has failed, unreported."""
        self.engine.start()

    def look_up(self, job: LookUpJob) -> None:
        """Start a look-up. Its answer is returned by `take_answers`."""
        try:
            timeout_s = self._handover.settings.lookup_timeout_s
            self._jobs[self.engine.look_up(job.tokens, namespace=job.namespace, timeout_s=timeout_s)] = job
        except TidekvError as error:
            self._fail(job, str(error))

    def take_answers(self) -> dict[str, int]:
        """Return the tokens that the look-ups that have ended have found, by request."""
        answers, self._answers = self._answers, {}
        return answers

    def restore(self, job: RestoreJob) -> None:
        """Start a restore. Its end is returned by `take_finished` exactly once."""
        if self.events is not None:
            behind = b"" if job.next_token is None else pack_tokens([job.next_token])
            self.events.name(job.namespace, job.tokens + behind, job.names)
        try:
            request = DecodeRequest(
                request_id=job.room,
                tokens=job.tokens,
                prefill=self._handover.own_address(job.prefill) if job.prefill else (),
                namespace=job.namespace,
                prompt_digest=job.prompt,
                priority=job.priority,
                kv_hints=fetches_at_rank(job.hints, self._handover.rank, self._handover.ranks),
                next_token=job.next_token,
            )
            ticket = self.engine.restore_into(request, job.blocks, job.have_tokens, component_pages=job.components)
            self._jobs[ticket] = job
        except TidekvError as error:
            self._end_restore(job, job.have_tokens, str(error))
        else:
            self._rooms[job.request_id] = job.room

    def offer(self, job: OfferJob) -> None:
        """Start copying blocks to host memory. Its end is returned by `take_finished` exactly once."""
        if self.events is not None:
            self.events.name(job.namespace, job.tokens, job.names)
        try:
            ticket = self.engine.offer(job.tokens, job.blocks, namespace=job.namespace, component_pages=job.components)
            self._jobs[ticket] = job
        except TidekvError as error:
            self._end_offer(job, str(error))

    def hint(self, envelope: Mapping[str, object]) -> None:
        """Act on KV hints in the background."""
        with suppress(EngineClosed):  # They are advice.
            self.engine.hint(envelope)

    def decline(self, job: DeclineJob) -> None:
        """Let prefill release the blocks of a prompt that is not restored here."""
        if self._handover.rank:
            return  # Rank 0 declines for all.
        self._counts["restores_short" if job.is_short else "restores_declined"] += 1
        self._decline(job.room, job.prefill, job.prompt)

    def abort(self, request_id: str) -> None:
        """End a restore that is not needed any more; `take_finished` returns it when nothing writes for it."""
        room = self._rooms.get(request_id)
        if room is not None:
            self._aborted.add(request_id)
            with suppress(EngineClosed):  # The engine's end fails every restore.
                self.engine.abort(room)

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Return the requests whose offered blocks are free, and those whose restores ended, each once."""
        if self._jobs:
            self._poll()
        freed, self._freed = self._freed, set()
        loaded, self._loaded = self._loaded, set()
        return freed, loaded

    def is_transferring(self) -> bool:
        """Whether a restore or an offer is under way, or has ended unreported."""
        return bool(self._jobs or self._loaded or self._freed or self._answers)

    def take_invalid_blocks(self) -> set[int]:
        """Return the blocks that the last ended restores did not fill."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_failed(self) -> set[str]:
        """Return the requests whose restore has failed as a whole, of those that ended last."""
        failed, self._failed = self._failed, set()
        return failed

    def forget(self) -> None:
        """Empty host memory, whose pages have names that no request uses again."""
        with suppress(EngineClosed):
            self.engine.flush(("l2",))

    def change_events(self, jobs: HandoverJobs) -> None:
        """Withdraw what is not found any more, and publish again what listeners were told to forget."""
        if self.events is None:
            return
        if jobs.is_reset:
            self.events.forget()
        if jobs.publishes_again:
            self.events.again()

    def take_events(self) -> RankReport | None:
        """Return what is new of the KV events; None without any."""
        return None if self.events is None else self.events.take()

    def close(self) -> None:
        """Abort what is under way and stop. Idempotent."""
        try:
            self.engine.close()
            # Unless that raised: then something may still write to the pages.
            for host in (self._host, *self._component_hosts):
                if host is not None:
                    host.close()
        finally:
            if self.events is not None:
                self.events.close()

    def _poll(self) -> None:
        try:
            outcomes = self.engine.poll()
        except EngineClosed as error:
            self._give_up(error)
            return
        for outcome in outcomes:
            job = self._jobs.pop(outcome.ticket, None)
            if isinstance(outcome, RestoredInto) and isinstance(job, RestoreJob):
                restored = outcome.restored
                for source, tokens in restored.sources.items():
                    self._counts[f"restore_tokens_{source}"] += tokens
                received = -(-restored.sources.get("transfer", 0) // self._page_size)
                self._counts["restore_bytes_transfer"] += received * self._page_bytes
                cause = "" if restored.is_complete else f"{restored.cause}: {restored.detail}"
                if restored.cause == PrefillCause.MISMATCH:
                    # Prefill has refused the link, and would wait for one that matches.
                    self._decline(job.room, self._handover.own_address(job.prefill), job.prompt)
                self._end_restore(job, restored.restored_tokens, cause)
            elif isinstance(outcome, Offered) and isinstance(job, OfferJob):
                for name in ("written", "present", "passed", "declined"):
                    self._counts[f"offer_pages_{name}"] += getattr(outcome.offered, name)
                self._freed.add(job.request_id)
                if job.hints is not None:
                    self.hint(job.hints)
            elif isinstance(outcome, LookedUp) and isinstance(job, LookUpJob):
                self._answers[job.request_id] = outcome.found.l2 + outcome.found.l3
            elif isinstance(outcome, Failed) and job is not None:
                if outcome.ends_engine:
                    self._give_up(outcome.error)
                self._fail(job, str(outcome.error))

    def _decline(self, room: str, prefill: str, prompt: PromptDigest) -> None:
        try:
            self.engine.decline(DecodeRequest(request_id=room, tokens=(), prefill=prefill, prompt_digest=prompt))
        except InvalidRequest as error:
            LOG.warning("a room could not be declined", room=room, prefill=prefill, cause=str(error))
        except EngineClosed:
            pass  # Prefill's own limit applies.

    def _give_up(self, error: Exception) -> None:
        """End all jobs: the engine has ended. Its own end, which is waited for, ends the last writes to the blocks."""
        LOG.error("the decode engine has ended; prompts are computed from now on", cause=str(error))
        try:
            self.engine.close()
        except Exception:
            LOG.exception("the decode engine ended by this error")
        for job in self._jobs.values():
            self._fail(job, str(error))
        self._jobs.clear()

    def _fail(self, job: RestoreJob | OfferJob | LookUpJob, cause: str) -> None:
        if isinstance(job, LookUpJob):
            LOG.warning("a prompt could not be looked up", request_id=job.request_id, cause=cause)
            self._answers[job.request_id] = 0
        elif isinstance(job, RestoreJob):
            self._end_restore(job, job.have_tokens, cause)
        else:
            self._end_offer(job, cause)

    def _end_restore(self, job: RestoreJob, restored_tokens: int, cause: str) -> None:
        """Report a restore; after a failure with the blocks from the first one on that is not restored."""
        self._rooms.pop(job.request_id, None)
        self._loaded.add(job.request_id)
        if job.request_id in self._aborted:
            # Its client has left: no failure, and nothing that vLLM would compute.
            self._aborted.discard(job.request_id)
            # If it ended before prefill was asked, prefill would hold the blocks until its own limit.
            if job.prefill:
                self._decline(job.room, self._handover.own_address(job.prefill), job.prompt)
            return
        if not cause:
            return
        LOG.warning(
            "a prompt was not restored whole", request_id=job.request_id, restored_tokens=restored_tokens, cause=cause
        )
        is_partial = restored_tokens > job.have_tokens and not self._has_components
        self._counts["restores_partial" if is_partial else "restores_failed"] += 1
        if self._has_components:
            self._failed.add(job.request_id)
        else:
            self._invalid.update(job.blocks[restored_tokens // self._page_size :])

    def _end_offer(self, job: OfferJob, cause: str) -> None:
        LOG.warning("KV of a finished request is not kept", request_id=job.request_id, cause=cause)
        self._counts["offer_pages_declined"] += len(job.blocks)
        self._freed.add(job.request_id)


def _host_pages(handover: Handover, pools: RankPools) -> int:
    """Return the number of host pages of one rank for the full KV: with components half of its host memory."""
    shares = handover.parts * (2 if pools.components else 1)
    return max(1, handover.settings.host_bytes // shares // pools.full.layout.page_bytes)


def _with_host_pages(handover: Handover, pools: RankPools) -> tuple[ComponentPools, ...]:
    """Return the components with host pools, which have equal parts of the other half."""
    each = handover.settings.host_bytes // (2 * handover.parts * max(len(pools.components), 1))
    return tuple(
        replace(
            one,
            host=HostPool.allocate(
                layout,
                max(1, each // layout.page_bytes),
                path=None if handover.pool_path is None else f"{handover.pool_path}-{one.name}",
            ),
        )
        for one in pools.components
        for layout in (one.device.layout,)
    )


class HandoverWorker:
    """Both ends, for each rank of this worker: `WorkerRole` for a vLLM that sends prompts, receives them, or both."""

    def __init__(self, handover: Handover, vllm_config: Any) -> None:
        self._handover = handover
        self._vllm_config = vllm_config
        self._counts: Counter[str] = Counter()
        """Those of all ends since they were last taken."""
        self.prefills: list[PrefillWorker] = []
        """The end that sends, of each rank; empty for a vLLM that only receives."""
        self.decodes: list[DecodeWorker] = []
        """The end that receives, of each rank; empty for a vLLM that only sends."""
        self._freed: Counter[str] = Counter()
        """By request, the ranks that have reported that its blocks are free, until all have."""
        self._loaded: Counter[str] = Counter()
        self._ends: list[PrefillWorker | DecodeWorker] = []

    @property
    def address(self) -> str:
        """The addresses at which this worker listens for decode workers, by rank; empty if it does not."""
        return ",".join(prefill.address for prefill in self.prefills)

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Wrap the worker's tensors, and start both ends. Raises InvalidConfig for unsupported tensors."""
        handover = self._handover
        for part, rank in enumerate(handover.of_parts()):
            pools = self._wrap(kv_caches, part)
            # One by one, so that `close` ends those that have started if a later one raises.
            if handover.sends:
                self.prefills.append(PrefillWorker(pools, rank, self._counts))
                self._ends.append(self.prefills[-1])
            if handover.receives:
                self.decodes.append(DecodeWorker(pools, rank, self._counts))
                self._ends.append(self.decodes[-1])
        if handover.rank == 0:
            report_tiers(
                self._vllm_config,
                model=handover.model,
                l2_tokens=_host_pages(handover, pools) * handover.block_size,
                uri=handover.settings.uri,
                no_loads="" if handover.receives else "a prefill worker only sends; decode has these tiers",
                limits="" if handover.groups.can_look_up and handover.settings.lookup_timeout_s else WITH_A_PREFILL,
            )

    def _wrap(self, kv_caches: Mapping[str, Any], part: int) -> RankPools:
        """Return all groups' blocks of one rank as pools."""
        handover = self._handover
        full, of_full = self._wrap_attention(kv_caches, handover.layer_names, part)
        components, orders = [], [*of_full]
        for each in handover.groups.components:
            if each.kind == "window":
                pool, of_window = self._wrap_attention(kv_caches, each.layer_names, part)
                orders += of_window
            else:
                tensors = in_order({name: kv_caches[name] for name in each.layer_names})
                pool, order = wrap_records(tensors, num_blocks=handover.num_blocks)
                orders.append(order)
            components.append(
                ComponentPools(name=each.name, kind=each.kind, window_tokens=each.window_tokens, device=pool)
            )
        return RankPools(full, tuple(components), tuple(orders))

    def _wrap_attention(
        self, kv_caches: Mapping[str, Any], names: tuple[str, ...], part: int
    ) -> tuple[DevicePool, tuple[BlockOrder, ...]]:
        tensors = in_order({name: kv_caches[name] for name in names})
        backends = in_order({name: "".join(backends_of(self._vllm_config, (name,))) for name in names})
        if not all(backends) or tensors[0].device.type not in ("cpu", "cuda"):
            raise InvalidConfig(
                f"KV of {', '.join(sorted(backends_of(self._vllm_config, names))) or 'no'} attention backends on "
                f"{tensors[0].device} cannot be handed over; that of layers which all have one, in host memory or on a "
                "CUDA device, can"
            )
        forms = _Forms()
        return wrap_blocks(
            tensors,
            block_size=self._handover.block_size,
            num_blocks=self._handover.num_blocks,
            backends=[
                f"{CPU_BACKEND} {forms.of(tensor)}" if backend == CPU_BACKEND else backend
                for tensor, backend in zip(tensors, backends, strict=True)
            ],
            part=part,
            parts=self._handover.parts,
        )

    def before_forward(self, jobs: HandoverJobs) -> None:
        """End what reads blocks that this step may overwrite, and restores that are not needed any more."""
        for prefill in self.prefills:
            prefill.before_forward(jobs)
        for decode in self.decodes:
            decode.change_events(jobs)
            for envelope in jobs.hints:
                decode.hint(envelope)
            for request_id in jobs.aborted:
                decode.abort(request_id)
            for job in jobs.declined:
                decode.decline(job)
            for lookup in jobs.lookups:
                decode.look_up(lookup)

    def start_loads(self, jobs: HandoverJobs) -> None:
        """Start the restores of a step."""
        for decode in self.decodes:
            for job in jobs.restores:
                decode.restore(job)

    def after_forward(self, jobs: HandoverJobs) -> None:
        """Hand over the blocks that a step filled, and offer those of finished requests."""
        for prefill in self.prefills:
            for job in jobs.sends:
                prefill.send(job)
        for decode in self.decodes:
            for offer in jobs.offers:
                decode.offer(offer)
            if jobs.is_reset:
                # Last: what is offered in this step has an old name.
                decode.forget()

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Return the requests whose held blocks are free again, and those whose restores ended, on all ranks."""
        for prefill in self.prefills:
            for request_id in prefill.take_finished():
                self._freed[request_id] += 1
        for decode in self.decodes:
            kept, loaded = decode.take_finished()
            for request_id in kept:
                self._freed[request_id] += 1
            for request_id in loaded:
                self._loaded[request_id] += 1
        return self._by_all(self._freed), self._by_all(self._loaded)

    def is_transferring(self) -> bool:
        """Whether a restore or an offer is under way or unreported, or blocks are held until decode has them."""
        return any(end.is_transferring() for end in self._ends)

    def take_invalid_blocks(self) -> set[int]:
        """Return the blocks that restores did not fill; of a restore that goes on at other ranks, before its end."""
        invalid = set[int]()
        for decode in self.decodes:
            invalid |= decode.take_invalid_blocks()
        return invalid

    def take_failed(self) -> set[str]:
        """Return the requests whose restore failed as a whole; of one that goes on at other ranks, before its end."""
        return {request_id for decode in self.decodes for request_id in decode.take_failed()}

    def take_answers(self) -> dict[str, list[int]]:
        """Return what look-ups have found: by request, the tokens that each rank of this worker has."""
        found: dict[str, list[int]] = {}
        for decode in self.decodes:
            for request_id, tokens in decode.take_answers().items():
                found.setdefault(request_id, []).append(tokens)
        return found

    def take_events(self) -> list[RankReport]:
        """Return what is new of the KV events, by rank."""
        return [report for decode in self.decodes if (report := decode.take_events()) is not None]

    def take_counts(self) -> dict[str, int]:
        """Return the counts since the last call, by the names of `HANDOVER_COUNTS`."""
        if not self._counts:
            return {}
        counts = dict(self._counts)
        self._counts.clear()
        return counts

    def close(self) -> None:
        """Stop all ends. Idempotent."""
        for end in self._ends:
            end.close()

    def _by_all(self, reports: Counter[str]) -> set[str]:
        """Take the requests that all ranks of this worker have reported."""
        if not reports:
            return set()
        ended = {request_id for request_id, count in reports.items() if count == self._handover.parts}
        for request_id in ended:
            del reports[request_id]
        return ended


class _Forms:
    """Digests of the orders that CPU_ATTN's kernel gives blocks: they depend on processor, dtype and version."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], str] = {}

    def of(self, tensor: Any) -> str:
        """Return the digest for a tensor of blocks; each form is determined once."""
        form = (tuple(tensor.shape[1:]), tensor.stride()[1:], tensor.dtype)
        if form not in self._known:
            # Only now: it imports vLLM's kernels for CPUs.
            from tidekv.engine.integrations.vllm.cpu_attn import block_order

            self._known[form] = sha256(block_order(tensor).numpy().tobytes()).hexdigest()[:16]
        return self._known[form]
