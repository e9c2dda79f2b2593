"""Scheduler's side of the hand-over role: which prompts are restored from prefill, and which blocks are sent.

    decode    matched: nothing ──▶ a decline job, if prefill has the prompt; also if few tokens are missing
                       the whole prompt ──▶ allocated ──▶ restore job ──▶ its end, or the blocks that failed
                       or "ask again", while another request's restore brings in the same blocks
              finished: full blocks ──▶ an offer job, for which vLLM holds the blocks until they are in host memory
    prefill   each step: blocks that will be full once it has run ──▶ send jobs
              finished: the answer names address and room, and vLLM holds the blocks until decode has them

A request says what it wants in `kv_transfer_params`:

    {"do_remote_decode": true, "room": …}                    to prefill; without a room it names one
    {"do_remote_prefill": true, "prefill": …, "room": …}     to decode; the answer of prefill has this form

The answer of a decode worker that shares its host memory says how much of prompt and answer it keeps there. The next
turn brings that to a prefill that also receives, which restores these tokens and computes the rest:

    {"remote_kv_source": {"remote_host": …, "remote_port": …, "tokens": …}}

With tensor parallelism, "prefill" has the addresses of all ranks, separated by commas.

It reads vLLM's requests. It changes them in one case: with windows or states prefill computes a prompt without its last
token (see `groups`), as vLLM's own connectors have it do for states, and a draft gets that token as the one that the
model sampled. All calls come from the scheduler's thread.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from secrets import token_hex
from typing import (  # vLLM's requests are not typed here: tests and type checks go without vLLM.
    TYPE_CHECKING,
    Any,
    Final,
)
from uuid import uuid4

from tidekv.backends.keys.chain import namespace_seed, pack_tokens
from tidekv.engine.decode.values import PRIORITY_MAX
from tidekv.engine.integrations.vllm.handover.groups import BlockGroups, Table
from tidekv.engine.integrations.vllm.handover.hints import fetches_of, hints_of, source_at, tokens_at_peer
from tidekv.engine.integrations.vllm.handover.jobs import (
    PREFILL_FIRST,
    BlockNames,
    DeclineJob,
    HandoverJobs,
    LookUpJob,
    OfferJob,
    RestoreJob,
    SendJob,
)
from tidekv.engine.integrations.vllm.handover.settings import Handover
from tidekv.engine.integrations.vllm.scheduler import is_of_tokens
from tidekv.engine.log import engine_log
from tidekv.states.handover.prompt_digest import PromptDigest, digest_of
from tidekv.states.settings import computes_rest
from tidekv.states.validation import short
from tidekv.transports.control.addresses import Dials

if TYPE_CHECKING:
    from tidekv.engine.integrations.vllm.kv_events import BlockNaming

LOG = engine_log("tidekv.vllm")
ONE_GROUP: Final = BlockGroups(0, ())
"""Those of a model whose layers keep KV of all tokens."""
ALONE: Final = "without-prefill:"
"""Prefix of the names of restores that no prefill takes part in, which are no rooms."""
ROOM_BYTES = 16
"""Random bytes in the name of a room that prefill names."""


class _LiveRestores:
    """Restores under way whose blocks vLLM's prefix cache will have at their end, for equal prompts to wait for.

    A prompt waits only if that costs it no time. Therefore the restore that it waits for

    - brings in all blocks that vLLM's cache can serve the prompt, and no further ones: both prompts are equal but for
      their last blocks. The later one would have to get the same blocks, and begins later. With a shorter common prefix
      it would wait for blocks that it does not need, or begin to get its own ones only after the wait.
    - is from the same prefill, which named its room and therefore has computed the prompt. A room that a router named
      may be computed late, or never.
    - began with as many tokens as vLLM has now for the later prompt, so it gets no others.

    A request waits once, until that restore has ended, successfully or not, which its own deadlines bound. Then it goes
    on by itself.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._first: dict[tuple[str, bytes], tuple[str, int]] = {}
        """Request that restores, and the tokens that it had, by prefill and hash of the last block to be shared."""
        self._place: dict[str, tuple[str, bytes]] = {}
        """Keys of `_first`, by request."""
        self._waits: dict[str, str] = {}
        """The request whose restore a request waits for, or has waited for."""

    def must_wait(self, request: Any, computed: int) -> bool:
        """Whether a request, of which vLLM has `computed` tokens, is to be asked again later."""
        request_id = request.request_id
        if request_id not in self._waits:
            first, had = self._first.get(self._place_of(request) or ("", b""), ("", 0))
            if not first or computed != had or computed == self._shareable(request) * self._block_size:
                return False
            self._waits[request_id] = first
        return self._waits[request_id] in self._place

    def begin(self, request: Any, computed: int) -> None:
        """Let later equal prompts wait for this restore, which begins behind `computed` tokens.

        Nothing waits for a second restore of the same prompt, nor for one whose prefill has not computed it yet.
        """
        place = self._place_of(request)
        if (
            place is not None
            and place not in self._first
            and request.kv_transfer_params["room"].startswith(PREFILL_FIRST)
        ):
            self._first[place] = request.request_id, computed
            self._place[request.request_id] = place

    def end(self, request_id: str) -> None:
        """Release the requests that wait for a restore, which has ended or is aborted."""
        place = self._place.pop(request_id, None)
        if place is not None:
            del self._first[place]

    def forget(self, request_id: str) -> None:
        """Forget a request that has finished or was aborted."""
        self.end(request_id)
        self._waits.pop(request_id, None)

    def _shareable(self, request: Any) -> int:
        """Return the number of blocks that vLLM's cache can serve: vLLM computes the last token in any case."""
        # Without prefix caching there are no hashes.
        return min((int(request.num_prompt_tokens) - 1) // self._block_size, len(request.block_hashes))

    def _place_of(self, request: Any) -> tuple[str, bytes] | None:
        # vLLM's hash of a block includes all blocks before it, the adapter and the salt.
        shareable = self._shareable(request)
        return (request.kv_transfer_params["prefill"], request.block_hashes[shareable - 1]) if shareable else None


class LookUps:
    """Look-ups of prompts that name no prefill, in host memory and storage of all ranks, and what such a prompt says to
    be at a peer. `peers`: whether peers may be asked.
    """

    def __init__(
        self, ranks: int, timeout_s: float, *, peers: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._peers = peers
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._clock = clock
        self._asked_at_s: dict[str, float] = {}
        self._answers: dict[str, list[int]] = {}
        """Tokens found by each rank that has answered, by request."""

    @property
    def is_on(self) -> bool:
        """Whether anything is looked up."""
        return self._timeout_s > 0

    def ask(self, request_id: str) -> None:
        """Note a look-up that begins with the next step."""
        self._asked_at_s[request_id] = self._clock()
        self._answers[request_id] = []

    def answered(self, found: Mapping[str, Sequence[int]]) -> None:
        """Take answers of ranks, by request; those of requests that have ended are ignored."""
        for request_id, tokens in found.items():
            if request_id in self._answers:
                self._answers[request_id] += tokens

    def found(self, request_id: str) -> int | None:
        """Return how many tokens all ranks have, 0 without a look-up; None while a rank has not answered in time."""
        answers = self._answers.get(request_id)
        if answers is None:
            return 0
        if len(answers) == self._ranks:
            return min(answers)
        return None if self._clock() - self._asked_at_s[request_id] < self._timeout_s else 0

    def at_peer(self, request: Any) -> int:
        """Return how many tokens of a prompt the request says to be at a peer; 0 if that is not asked."""
        return tokens_at_peer(request) if self._peers else 0

    def forget(self, request_id: str) -> None:
        """Forget a request."""
        self._asked_at_s.pop(request_id, None)
        self._answers.pop(request_id, None)


class DecodeScheduler:
    """Claims the prompts that prefill computes, each at most once: after a failure vLLM computes.

    Of a prompt that names no prefill it claims what host memory and storage have.

    What it does not claim it declines, so that prefill does not hold the blocks until its own limit.
    """

    def __init__(
        self,
        block_size: int,
        dials: Dials,
        ranks: int = 1,
        recompute_threshold: int = 0,
        naming: BlockNaming | None = None,
        groups: BlockGroups = ONE_GROUP,
        lookups: LookUps | None = None,
    ) -> None:
        """`naming`: only if vLLM publishes KV events. Without `lookups` nothing is looked up."""
        self._block_size = block_size
        self._groups = groups
        self._lookups = lookups or LookUps(ranks, 0.0)
        self._naming = naming
        self._dials = dials
        self._recompute_threshold = recompute_threshold
        self._ranks = ranks
        self._live = _LiveRestores(block_size)
        self._computed: dict[str, int] = {}
        """Tokens that vLLM had in its blocks when it asked last, by request."""
        self._claimed: set[str] = set()
        """Requests that were answered: restored, declined, or without a room."""
        self._loading: set[str] = set()
        self._jobs = HandoverJobs()
        """Jobs of the next step."""
        self._reset_salt = ""
        self._late_hints: dict[str, Mapping[str, object]] = {}
        """Envelopes of KV hints that are acted on when their request has ended, by request."""

    def arrived(self, request: Any) -> None:
        """Take the KV hints of a new request."""
        now, late = hints_of(request, namespace_of(request, self._reset_salt))
        if now is not None:
            self._jobs.hints.append(now)
        if late is not None:
            self._late_hints[request.request_id] = late
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            self._look_up(request)

    def answered(self, found: Mapping[str, Sequence[int]]) -> None:
        """Take the answers of ranks to look-ups: by request, the tokens that each of some ranks has."""
        self._lookups.answered(found)

    def matched(self, request: Any, computed: int) -> int | None:
        """Return the tokens of the prompt behind `computed`, which ends a block, if prefill is to send them.

        None: another request's restore brings in the same blocks, or the look-up of a prompt without a prefill is under
        way; vLLM asks again in its next step.
        """
        params = request.kv_transfer_params or {}
        if request.request_id in self._claimed:
            return 0
        if not params.get("do_remote_prefill"):
            return self._found(request, computed)
        if not _names_room(request):
            LOG.warning(
                "do_remote_prefill needs prefill and room, as prefill's answer names them: the prompt is computed here",
                request_id=request.request_id,
                given=sorted(params),
            )
            self._claimed.add(request.request_id)
            return 0
        if not self._dials.allows_all(params["prefill"]):
            # A client may have named it: nothing is sent there, not even that its room is declined.
            LOG.warning(
                "a request names a prefill that is not in handover.dials: the prompt is computed here",
                request_id=request.request_id,
                prefill=short(params["prefill"]),
            )
            self._claimed.add(request.request_id)
            return 0
        ranks = params["prefill"].count(",") + 1
        if ranks != self._ranks:
            LOG.warning(
                f"prefill hands over in {ranks} ranks and decode in {self._ranks}: the prompt is computed here; if "
                "their tensor-parallel sizes differ, set handover.ranks to the larger one at the end with the smaller",
                request_id=request.request_id,
                prefill=params["prefill"],
            )
        if ranks != self._ranks or request.skip_reading_prefix_cache or not is_of_tokens(request):
            self._decline(request)
            return 0
        # Of windows and states vLLM's cache has what an equal prompt needs only if that ends with a block.
        if not self._groups.components and self._live.must_wait(request, computed):
            return None
        wanted = self._groups.handed_tokens(int(request.num_prompt_tokens)) - computed
        if wanted <= 0 or computes_rest(request.num_prompt_tokens - computed, threshold=self._recompute_threshold):
            self._decline(request, is_short=True)
            return 0
        # vLLM asks again if it had no blocks, and may then have another number of tokens.
        self._computed[request.request_id] = computed
        return wanted

    def allocated(self, request: Any, table: Table, external_tokens: int) -> None:
        """Plan the restore of a prompt into its blocks."""
        if not external_tokens:
            return
        request_id, params = request.request_id, request.kv_transfer_params or {}
        self._claimed.add(request_id)
        self._loading.add(request_id)
        if is_alone := not params.get("do_remote_prefill"):
            handed = self._computed[request_id] + external_tokens
            self._lookups.forget(request_id)
        else:
            handed = self._groups.handed_tokens(int(request.num_prompt_tokens))
            if not self._groups.components:
                self._live.begin(request, self._computed[request_id])
        tokens = pack_tokens(request.prompt_token_ids[:handed])
        is_known = self._groups.bigram_keys and handed < int(request.num_prompt_tokens)
        self._jobs.restores.append(
            RestoreJob(
                request_id=request_id,
                room=f"{ALONE}{request_id}" if is_alone else params["room"],
                prefill="" if is_alone else params["prefill"],
                tokens=tokens,
                prompt=_digest_of(request, tokens),
                blocks=tuple(table[self._groups.full]),
                components=self._groups.at_end(table, handed),
                have_tokens=self._computed[request_id],
                namespace=namespace_of(request, self._reset_salt),
                names=self._names_of(request, handed // self._block_size),
                priority=_priority_of(request),
                hints=fetches_of(request),
                next_token=int(request.prompt_token_ids[handed]) if is_known else None,
            )
        )

    def take_jobs(self) -> HandoverJobs:
        """Return the jobs collected since the last call; the caller owns them."""
        jobs, self._jobs = self._jobs, HandoverJobs()
        return jobs

    def loaded(self, request_ids: Iterable[str]) -> None:
        """Note the requests whose restore has ended, successfully or not."""
        for request_id in request_ids:
            self._loading.discard(request_id)
            self._live.end(request_id)

    def reset(self) -> None:
        """Name pages otherwise from now on, until this process ends."""
        self._reset_salt = uuid4().hex
        jobs = self._jobs
        jobs.is_reset = True
        if self._naming is not None:
            # Jobs that are planned already fill pages of the old names, which are not to be published.
            jobs.restores = [replace(job, names=None) for job in jobs.restores]
            jobs.offers = [replace(job, names=None) for job in jobs.offers]

    def publish_again(self) -> None:
        """Have the workers publish all blocks again."""
        self._jobs.publishes_again = True

    def forget(self, request: Any) -> None:
        """Forget a request that has ended, and whose blocks are held for another end."""
        request_id = request.request_id
        self._late_hints.pop(request_id, None)
        self._computed.pop(request_id, None)
        self._claimed.discard(request_id)
        self._live.forget(request_id)
        self._lookups.forget(request_id)

    def finished(self, request: Any, table: Table) -> int:
        """End a request. Returns how many tokens are offered, in full blocks, which vLLM holds.

        If a restore is still under way it is aborted, and vLLM holds the blocks by itself until that has ended.
        """
        request_id, size = request.request_id, self._block_size
        hints = self._late_hints.get(request_id)
        if (
            _names_room(request)
            and request_id not in self._claimed
            and self._dials.allows_all(request.kv_transfer_params["prefill"])
        ):
            # Aborted before it was asked for, perhaps while it waited for an equal prompt.
            self._decline(request)
        self.forget(request)
        if request_id in self._loading:
            self._jobs.aborted.append(request_id)
            self._loading.discard(request_id)
            return 0
        blocks = table[self._groups.full]
        full = min(int(request.num_computed_tokens) // size, int(request.num_tokens) // size, len(blocks))
        if not full or not is_of_tokens(request):
            return 0
        # With pairs the last block is named once the token after it is known, for which its draft was computed.
        tokens = pack_tokens(request.all_token_ids[: full * size + self._groups.bigram_keys])
        self._jobs.offers.append(
            OfferJob(
                request_id,
                tokens,
                tuple(blocks[:full]),
                namespace_of(request, self._reset_salt),
                self._names_of(request, full),
                self._kept_components(request, table, full * size),
                hints,
            )
        )
        return full * size

    def _look_up(self, request: Any) -> None:
        # vLLM computes the last token in any case.
        blocks = (int(request.num_prompt_tokens) - 1) // self._block_size
        is_short = blocks * self._block_size <= self._recompute_threshold
        if not self._lookups.is_on or is_short or not self._may_be_restored(request):
            return
        self._lookups.ask(request.request_id)
        # With pairs the token after the last block names it, too. There is one: these blocks lack the last token.
        named = blocks * self._block_size + self._groups.bigram_keys
        tokens = pack_tokens(request.prompt_token_ids[:named])
        self._jobs.lookups.append(LookUpJob(request.request_id, tokens, namespace_of(request, self._reset_salt)))

    def _may_be_restored(self, request: Any) -> bool:
        """Whether a prompt without a prefill may be restored at all."""
        return self._groups.can_look_up and not request.skip_reading_prefix_cache and is_of_tokens(request)

    def _found(self, request: Any, computed: int) -> int | None:
        """Return the tokens behind `computed` that host memory and storage have, or a peer is said to have, if they are
        worth a restore.
        """
        found = self._lookups.found(request.request_id)
        if found is None:
            return None
        if self._may_be_restored(request):
            found = max(found, min(self._lookups.at_peer(request), int(request.num_prompt_tokens) - 1))
        found -= found % self._block_size
        if found <= computed or computes_rest(found - computed, threshold=self._recompute_threshold):
            return 0
        self._computed[request.request_id] = computed
        return found - computed

    def _kept_components(self, request: Any, table: Table, tokens: int) -> dict[str, tuple[int, ...]]:
        """Return the blocks that the end of so many tokens needs, by component, where vLLM has them still."""
        # The record of a state is the one behind the last step, which may be later than the last full block.
        has_records = request.num_computed_tokens == tokens and not getattr(request, "num_in_flight_tokens", 0)
        return self._groups.at_end(table, tokens, windows_only=not has_records)

    def _names_of(self, request: Any, blocks: int) -> BlockNames | None:
        return None if self._naming is None else self._naming.of(request, blocks)

    def _decline(self, request: Any, *, is_short: bool = False) -> None:
        params = request.kv_transfer_params
        self._claimed.add(request.request_id)
        handed = self._groups.handed_tokens(len(request.prompt_token_ids or ()))
        if handed < 1:
            return  # Of embeddings alone, or a single token that decode computes: no prefill offers it either.
        prompt = _digest_of(request, pack_tokens(request.prompt_token_ids[:handed]))
        self._jobs.declined.append(DeclineJob(params["room"], params["prefill"], prompt, is_short))


def _names_room(request: Any) -> bool:
    """Whether a request names a room at a prefill."""
    params = request.kv_transfer_params or {}
    named = [params.get("prefill"), params.get("room")]
    return bool(params.get("do_remote_prefill")) and all(isinstance(one, str) for one in named)


@dataclass(slots=True)
class _Sending:
    """A prompt that is computed for a decode worker. `sent`: tokens whose blocks have been given to the worker."""

    request: Any  # vLLM's.
    room: str
    prompt: PromptDigest
    sent: int = 0
    is_open: bool = False


class PrefillScheduler:
    """Sends the blocks of prompts as steps fill them, and names the place where decode gets them."""

    def __init__(self, block_size: int, address: str, groups: BlockGroups = ONE_GROUP) -> None:
        self._block_size = block_size
        self._groups = groups
        self.address = address
        self._sending: dict[str, _Sending] = {}
        self._held: dict[str, bool] = {}
        self._holding: set[str] = set()
        """Requests that have finished and whose blocks vLLM holds."""
        self._waiting: set[str] = set()
        """Requests that no step has scheduled yet."""
        self._is_asked = False
        """The workers were asked to release blocks, and no blocks have become free since."""

    def arrived(self, request: Any) -> None:
        """Take note of a request whose prompt a decode worker will ask for."""
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):  # Those may wait for a restore.
            self._waiting.add(request.request_id)
        if params.get("do_remote_decode") and is_of_tokens(request) and self._leaves_last_token(request):
            # A room that cannot be guessed: its name is all that a request at decode needs to ask for it.
            room = params.get("room") or PREFILL_FIRST + token_hex(ROOM_BYTES)
            prompt = _digest_of(request, pack_tokens(request.prompt_token_ids))
            self._sending[request.request_id] = _Sending(request, str(room), prompt)

    def add_jobs(
        self,
        jobs: HandoverJobs,
        scheduled: Mapping[str, int],
        preempted: Iterable[str],
        blocks_of: Callable[[str], Table],
    ) -> None:
        """Add the jobs of a step that computes `scheduled` tokens of each request."""
        jobs.held, self._held = self._held, {}
        preempted = list(preempted)
        self._waiting.difference_update(scheduled)
        # A step in which nothing runs although a request waits, or that has taken blocks from one that ran.
        if self._holding and not self._is_asked and (preempted or (self._waiting and not scheduled)):
            jobs.is_short = self._is_asked = True
        for request_id in preempted:
            sending = self._sending.get(request_id)
            if sending is not None and sending.is_open:
                sending.sent = 0
                jobs.preempted.append(request_id)
        for request_id, count in scheduled.items():
            sending = self._sending.get(request_id)
            if sending is not None and (job := self._send(sending, count, blocks_of)) is not None:
                jobs.sends.append(job)

    def finished(self, request_id: str) -> tuple[bool, dict[str, Any] | None]:
        """End a request: True if blocks of it were sent, which vLLM then holds. The answer names where decode asks."""
        self._waiting.discard(request_id)
        sending = self._sending.pop(request_id, None)
        if sending is None or not sending.is_open:
            return False, None
        self._holding.add(request_id)
        is_complete = self._held[request_id] = sending.sent == sending.request.num_prompt_tokens
        if not is_complete:
            return True, None
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "prefill": self.address,
            "room": sending.room,
        }

    def freed(self, request_ids: Iterable[str]) -> None:
        """Note the requests whose blocks vLLM has again."""
        for request_id in request_ids:
            if request_id in self._holding:
                self._holding.discard(request_id)
                self._is_asked = False

    def _leaves_last_token(self, request: Any) -> bool:
        """Have the model leave the last token of a prompt to decode, if that is needed; False if it cannot be handed
        over then.
        """
        if not self._groups.components:
            return True
        if request.num_prompt_tokens < 2 or request.skip_reading_prefix_cache:
            return False  # Decode computes all of it.
        last = int(request.prompt_token_ids[-1])
        del request.prompt_token_ids[-1:], request._all_token_ids[-1:]
        request.num_prompt_tokens -= 1
        # What is sampled is not what follows the prompt.
        request.max_tokens = 1
        if self._groups.bigram_keys and request.structured_output_request is None:
            # A draft computes its KV of the last token handed over from the sampled one, so the model samples the token
            # that follows. A grammar could refuse that token, and would end the request.
            request.sampling_params = copy(request.sampling_params)
            request.sampling_params.allowed_token_ids = [last]
        return True

    def _send(self, sending: _Sending, count: int, blocks_of: Callable[[str], Table]) -> SendJob | None:
        """Return the blocks that a step of `count` tokens fills; the last one of a prompt may be filled in part."""
        request, size = sending.request, self._block_size
        prompt = int(request.num_prompt_tokens)
        done = min(int(request.num_computed_tokens) + count, prompt)
        if done < prompt:
            done -= done % size
        if done <= sending.sent:
            return None
        start, sending.sent, sending.is_open = sending.sent, done, True
        table, is_last = blocks_of(request.request_id), done == prompt
        return SendJob(
            request_id=request.request_id,
            room=sending.room,
            prompt=sending.prompt,
            start_token=start,
            blocks=tuple(table[self._groups.full][start // size : -(-done // size)]),
            is_last=is_last,
            components=self._groups.at_end(table, done) if is_last else {},
        )


class HandoverScheduler:
    """Both ends: `SchedulerRole` for a vLLM that sends prompts, receives them, or both."""

    def __init__(self, handover: Handover, naming: BlockNaming | None = None) -> None:
        """`naming`: only if vLLM publishes KV events."""
        self.decode = (
            DecodeScheduler(
                handover.block_size,
                handover.dials,
                handover.ranks,
                handover.settings.recompute_threshold,
                naming,
                handover.groups,
                LookUps(
                    handover.ranks,
                    handover.settings.lookup_timeout_s,
                    peers=handover.settings.engine.cache_peers.enabled,
                ),
            )
            if handover.receives
            else None
        )
        self.prefill = (
            PrefillScheduler(handover.block_size, handover.settings.listen, handover.groups) if handover.sends else None
        )

        self._shares_at = handover.shares_at

    def listening(self, addresses: Mapping[int, str]) -> None:
        """Take the addresses of the prefill workers, by rank."""
        if self.prefill is not None:
            self.prefill.address = ",".join(addresses[rank] for rank in sorted(addresses))

    def arrived(self, request: Any) -> None:
        """Take note of a new request."""
        if self.decode is not None:
            self.decode.arrived(request)
        if self.prefill is not None:
            self.prefill.arrived(request)

    def matched(self, request: Any, computed: int) -> int | None:
        """Return how many tokens of the prompt behind `computed` prefill is to send; None: ask again."""
        return 0 if self.decode is None else self.decode.matched(request, computed)

    def allocated(self, request: Any, table: Table, external_tokens: int) -> None:
        """Plan the restore of a prompt into its blocks."""
        if self.decode is not None:
            self.decode.allocated(request, table, external_tokens)

    def step_jobs(self, scheduler_output: Any) -> HandoverJobs | None:
        """Return the worker's jobs for one step; None without any."""
        state = scheduler_output.kv_connector_block_state
        jobs = HandoverJobs() if self.decode is None else self.decode.take_jobs()
        if self.prefill is not None:
            self.prefill.add_jobs(
                jobs,
                scheduler_output.num_scheduled_tokens,
                scheduler_output.preempted_req_ids or (),
                state.get_block_ids,
            )
        return None if jobs.is_empty else jobs

    def heard(self, connector_output: Any) -> None:
        """Note the restores that ended, and the blocks that are free again."""
        if self.prefill is not None:
            self.prefill.freed(connector_output.finished_sending or ())
        if self.decode is not None:
            self.decode.loaded(connector_output.finished_recving or ())
            found = connector_output.kv_connector_worker_meta
            if found is not None:
                self.decode.answered(found.found)

    def finished(self, request: Any, table: Table) -> tuple[bool, dict[str, Any] | None]:
        """End a request. True: vLLM holds its blocks until decode has received them, or they are in host memory."""
        held, params = (False, None) if self.prefill is None else self.prefill.finished(request.request_id)
        if self.decode is None:
            return held, params
        if held:
            self.decode.forget(request)
            return held, params
        offered = self.decode.finished(request, table)
        return bool(offered), source_at(self._shares_at, offered) if offered and self._shares_at else None

    def take_counts(self) -> dict[str, int]:
        """Return nothing: the workers count."""
        return {}

    def reset(self) -> None:
        """Make pages kept so far unfindable for this instance; storage keeps them for others."""
        if self.decode is not None:
            self.decode.reset()

    def publish_again(self) -> None:
        """Have the workers publish all that is kept once more: vLLM's listeners were told that nothing is left."""
        if self.decode is not None:
            self.decode.publish_again()

    def close(self) -> None:
        """Do nothing: the scheduler's side owns no resources."""


def _priority_of(request: Any) -> int:
    """Return a request's priority as the decode engine has it: vLLM's is the higher, the lower its number."""
    return max(-PRIORITY_MAX, min(PRIORITY_MAX, -int(getattr(request, "priority", 0))))


def _digest_of(request: Any, tokens: bytes) -> PromptDigest:
    """Return the digest of a request's prompt in its adapter and salt; a reset changes names of pages only."""
    return digest_of(tokens, namespace_seed(namespace_of(request)))


def namespace_of(request: Any, reset_salt: str = "") -> str:
    """Return the namespace of a request's pages: its adapter and salt, and what the last reset added."""
    adapter = request.lora_request.lora_name if request.lora_request is not None else ""
    parts = [adapter, request.cache_salt or "", reset_salt]
    return json.dumps(parts) if any(parts) else ""
