"""The scheduler's side of the vLLM connector: what it asks for, loads and saves, with requests shaped as vLLM's are."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any  # vLLM's objects are not typed here.

import pytest

from tidekv import KVLayout
from tidekv.backends.keys.chain import namespace_seed, pack_tokens, page_digests
from tidekv.engine.integrations.vllm.handover.scheduler import namespace_of
from tidekv.engine.integrations.vllm.jobs import LoadJob, SaveJob
from tidekv.engine.integrations.vllm.scheduler import StorageScheduler
from tidekv.engine.integrations.vllm.settings import ConnectorSettings, Shared

BLOCK = 4
TOKENS = list(range(100, 142))


def shared_of(
    *, per_page: int = 1, loads: bool = True, saves: bool = True, bigram_keys: bool = False, **settings: Any
) -> Shared:
    return Shared(
        settings=ConnectorSettings(uri="file:/nowhere", **settings),
        layout=KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, dtype="float32", page_size=BLOCK * per_page),
        model="m",
        block_size=BLOCK,
        num_blocks=64,
        layer_names=("layers.0",),
        rank=0,
        ranks=1,
        is_writer=True,
        loads=loads,
        saves=saves,
        bigram_keys=bigram_keys,
    )


@dataclass
class AskedLookup:
    """Storage that answers when a test releases it."""

    asked: list[tuple[list[bytes], Future[int]]] = field(default_factory=list)

    def ask(self, keys: Sequence[bytes]) -> Future[int]:
        future: Future[int] = Future()
        self.asked.append((list(keys), future))
        return future

    def answer(self, pages: int) -> None:
        self.asked[-1][1].set_result(pages)


class Rig:
    """One scheduler's side, its storage and its clock."""

    def __init__(self, **shared: Any) -> None:
        self.lookup = AskedLookup()
        self.now_s = 0.0
        self.preempted: set[str] = set()
        """Requests that vLLM preempts with the next step."""
        self.released: list[str] = []
        """Requests whose blocks the last step gave to others."""
        self.side = StorageScheduler(shared_of(**shared), self.lookup, clock=lambda: self.now_s)

    def step(self, request: Any, count: int, blocks: Sequence[int]) -> tuple[list[LoadJob], list[SaveJob]]:
        """A step that schedules so many tokens of a request."""
        found = self.jobs({request.request_id: count}, blocks)
        request.num_computed_tokens += count
        return found

    def jobs(
        self, scheduled: dict[str, int] | None = None, blocks: Sequence[int] = ()
    ) -> tuple[list[LoadJob], list[SaveJob]]:
        """The loads and saves of a step."""
        state = SimpleNamespace(get_block_ids=lambda _: [blocks])
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled or {}, kv_connector_block_state=state, preempted_req_ids=self.preempted
        )
        jobs = self.side.step_jobs(output)
        self.released = [] if jobs is None else jobs.preempted
        return ([], []) if jobs is None else (jobs.loads, jobs.saves)

    def allocated(self, request: Any, blocks: Sequence[int], tokens: int) -> None:
        self.side.allocated(request, [blocks], tokens)

    def finished(self, request: Any, blocks: Sequence[int]) -> bool:
        """Whether vLLM holds the blocks of a request that has ended."""
        held, params = self.side.finished(request, [blocks])
        assert params is None
        return held

    def heard(self, loaded: Sequence[str], invalid: Sequence[int]) -> None:
        self.side.heard(SimpleNamespace(finished_recving=set(loaded), invalid_block_ids=set(invalid)))

    def admit(self, request: Any, *, stored: int = 0, computed: int = 0) -> int:
        """Storage answers, and vLLM admits the request with blocks 10, 11, …; returns the tokens to load."""
        self.side.arrived(request)
        self.lookup.answer(stored)
        tokens = self.side.matched(request, computed)
        assert tokens is not None
        request.num_computed_tokens = computed + tokens
        self.allocated(request, blocks_of(request), tokens)
        return tokens


def request_of(tokens: Sequence[int] = TOKENS, **changes: Any) -> Any:
    given = {
        "request_id": "r",
        "prompt_token_ids": list(tokens),
        "all_token_ids": list(tokens),
        "num_tokens": len(tokens),
        "num_computed_tokens": 0,
        "prompt_embeds": None,
        "mm_features": [],
        "resumable": False,
        "lora_request": None,
        "cache_salt": None,
        "skip_reading_prefix_cache": False,
    }
    return SimpleNamespace(**{**given, **changes})


def say(request: Any, *tokens: int) -> None:
    request.all_token_ids += tokens
    request.num_tokens += len(tokens)


def blocks_of(request: Any) -> list[int]:
    return list(range(10, 10 + -(-request.num_tokens // BLOCK)))


def keys_of(tokens: Sequence[int], *, page: int = BLOCK, seed: bytes = b"") -> list[bytes]:
    return page_digests(pack_tokens(list(tokens)), page, prefix=seed)


def load_of(tokens: Sequence[int], blocks: Sequence[int], have: int = 0) -> LoadJob:
    return LoadJob("r", b"", pack_tokens(list(tokens)), tuple(blocks), have)


def save_of(tokens: Sequence[int], first_page: int, blocks: Sequence[int], *, is_last: bool = False) -> SaveJob:
    """`tokens`: those that no earlier save has named."""
    packed = pack_tokens(list(tokens)) if tokens else b""
    return SaveJob("r", b"", packed, first_page, tuple(blocks), is_last)


def test_a_request_waits_for_the_answer_and_then_loads_what_vllm_has_not() -> None:
    rig, request = Rig(), request_of()
    rig.side.arrived(request)
    (keys, _) = rig.lookup.asked[0]
    assert keys == keys_of(TOKENS)[:10], "all full pages but one token"
    assert rig.side.matched(request, 8) is None
    assert rig.side.matched(request, 8) is None
    rig.lookup.answer(7)
    assert rig.side.matched(request, 8) == 5 * BLOCK
    assert rig.side.matched(request, 8) == 5 * BLOCK, "asked again, it says the same"
    rig.allocated(request, blocks_of(request), 5 * BLOCK)
    loads, saves = rig.jobs()
    assert loads == [load_of(TOKENS[:28], range(10, 17), 8)]
    assert saves == []
    assert rig.jobs() == ([], []), "a job is given once"
    assert len(rig.lookup.asked) == 1
    assert rig.side.take_counts() == {"lookups": 1}


def test_a_page_is_loaded_for_the_blocks_of_it_that_are_missing() -> None:
    rig, request = Rig(per_page=3), request_of()
    assert rig.admit(request, stored=3, computed=16) == 20, "vLLM has four blocks: one of the second page"
    (load,), _ = rig.jobs()
    assert load == load_of(TOKENS[:36], range(10, 19), 16)


def test_a_load_that_vllm_shortens_leaves_the_rest_alone() -> None:
    rig, request = Rig(per_page=3), request_of()
    rig.side.arrived(request)
    rig.lookup.answer(3)
    assert rig.side.matched(request, 0) == 36
    rig.allocated(request, blocks_of(request), 16)
    (load,), _ = rig.jobs()
    assert load == load_of(TOKENS[:24], range(10, 14)), "tokens of whole pages, with the blocks that vLLM gave"


def test_the_page_of_the_last_token_is_never_loaded() -> None:
    rig = Rig()
    whole = request_of(TOKENS[:40])
    rig.side.arrived(whole)
    assert len(rig.lookup.asked[0][0]) == 9
    rig.lookup.answer(10)
    assert rig.side.matched(whole, 0) == 36
    assert rig.side.matched(request_of(TOKENS[:3], request_id="short"), 0) is None


@pytest.mark.parametrize(
    ("settings", "stored", "computed", "tokens"),
    [
        ({}, 0, 0, 0),
        ({}, 2, 8, 0),
        ({}, 2, 12, 0),
        ({"threshold_tokens": 9}, 2, 0, 0),
        ({"threshold_tokens": 8}, 2, 0, 8),
    ],
)
def test_too_little_is_not_loaded(settings: dict[str, Any], stored: int, computed: int, tokens: int) -> None:
    assert Rig(**settings).admit(request_of(), stored=stored, computed=computed) == tokens


def test_storage_that_does_not_answer_is_not_waited_for() -> None:
    rig, request = Rig(lookup_timeout_s=0.5), request_of()
    rig.side.arrived(request)
    rig.now_s = 0.4
    assert rig.side.matched(request, 0) is None
    rig.now_s = 0.5
    assert rig.side.matched(request, 0) == 0
    rig.lookup.answer(5)
    assert rig.side.matched(request, 0) == 0, "an answer that is late changes nothing"
    assert rig.side.take_counts() == {"lookups": 1, "lookups_late": 1}


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": None},
        {"prompt_embeds": object()},
        {"mm_features": [object()]},
        {"resumable": True},
    ],
)
def test_requests_whose_kv_is_not_of_tokens_alone_are_left_alone(changes: dict[str, Any]) -> None:
    rig, request = Rig(), request_of(**changes)
    rig.side.arrived(request)
    assert rig.side.matched(request, 0) == 0
    rig.allocated(request, blocks_of(request), 0)
    assert rig.step(request, 42, blocks_of(request)) == ([], [])
    assert not rig.finished(request, blocks_of(request))
    assert rig.lookup.asked == []


def test_a_request_that_must_not_read_caches_is_saved_and_not_loaded() -> None:
    rig, request = Rig(), request_of(skip_reading_prefix_cache=True)
    rig.side.arrived(request)
    assert rig.side.matched(request, 0) == 0
    assert rig.lookup.asked == []
    _, (save,) = rig.step(request, 42, blocks_of(request))
    assert save == save_of(TOKENS[:40], 0, range(10, 20))


def test_adapter_and_salt_are_in_the_keys() -> None:
    rig = Rig()
    for name, changes, seed in (
        ("a", {"lora_request": SimpleNamespace(lora_name="french")}, namespace_seed("french")),
        ("b", {"cache_salt": "tenant"}, namespace_seed(salt="tenant")),
    ):
        rig.side.arrived(request_of(request_id=name, **changes))
        assert rig.lookup.asked[-1][0] == keys_of(TOKENS, seed=seed)[:10]
        assert rig.side._known[name].seed == seed


def test_pages_are_saved_when_they_are_full_and_once() -> None:
    rig, request = Rig(), request_of()
    rig.admit(request, stored=0)
    blocks = blocks_of(request)
    assert rig.step(request, 10, blocks) == ([], [save_of(TOKENS[:8], 0, (10, 11))])
    assert rig.step(request, 1, blocks) == ([], [])
    assert rig.step(request, 31, blocks) == ([], [save_of(TOKENS[8:40], 2, range(12, 20))])
    say(request, 1)
    assert rig.step(request, 1, blocks) == ([], [])
    say(request, 2)
    _, (save,) = rig.step(request, 1, blocks)
    assert save == save_of([*TOKENS[40:], 1, 2], 10, (20,))
    assert rig.finished(request, blocks), "the last save may still read them"
    assert rig.jobs() == ([], [save_of([], 11, (), is_last=True)])


def test_saves_of_a_long_prompt_wait_for_a_64th_of_it() -> None:
    rig, request = Rig(), request_of(list(range(128 * BLOCK)))
    rig.admit(request)
    assert rig.step(request, 128 * BLOCK, blocks_of(request))[1]
    saved = []
    for page in range(128, 136):
        say(request, *[1] * BLOCK)
        saved += [(page, save.first_page) for save in rig.step(request, BLOCK, blocks_of(request))[1]]
    assert saved == [(130, 128), (133, 131)]
    assert rig.finished(request, blocks_of(request))
    assert [(save.first_page, len(save.blocks)) for save in rig.jobs()[1]] == [(134, 2)]


def test_what_storage_has_is_not_saved_again_and_what_it_lost_is() -> None:
    rig, request = Rig(), request_of()
    rig.admit(request, stored=3, computed=24)
    _, (save,) = rig.step(request, 18, blocks_of(request))
    assert save == save_of(TOKENS[:40], 3, range(13, 20)), "vLLM has six pages in its own cache, and storage three"


def test_tokens_that_are_only_drafted_are_in_no_page() -> None:
    rig, request = Rig(), request_of(TOKENS[:6])
    rig.admit(request)
    rig.step(request, 6, blocks_of(request))
    say(request, 7)
    # One token and three drafts, which may all be wrong.
    assert rig.step(request, 4, [10, 11, 12]) == ([], [])
    request.num_computed_tokens = 8
    say(request, 8, 9)
    request.num_computed_tokens = 9
    assert rig.finished(request, [10, 11, 12])
    _, (last,) = rig.jobs()
    assert last == save_of([*TOKENS[4:6], 7, 8], 1, (11,), is_last=True)


def test_pages_with_a_draft_that_depends_on_the_next_token_are_saved_once_that_is_known() -> None:
    rig, request = Rig(bigram_keys=True), request_of(TOKENS[:8])
    keys = page_digests(pack_tokens([*TOKENS[:8], 5]), BLOCK, bigrams=True)
    rig.side.arrived(request)
    assert rig.lookup.asked[-1][0] == keys[:1]
    rig.lookup.answer(0)
    assert rig.side.matched(request, 0) == 0
    blocks = blocks_of(request)
    rig.allocated(request, blocks, 0)
    assert rig.step(request, 8, blocks) == ([], [save_of(TOKENS[:5], 0, (10,))])
    say(request, 5)
    assert rig.step(request, 1, [*blocks, 12]) == ([], [save_of([*TOKENS[5:8], 5], 1, (11,))])


@pytest.mark.parametrize("blocks", [[], [10]])
def test_a_request_that_ends_without_its_blocks_saves_what_they_hold(blocks: list[int]) -> None:
    rig, request = Rig(), request_of()
    rig.admit(request)
    rig.step(request, 3, blocks_of(request))
    request.num_computed_tokens = 40
    assert rig.finished(request, blocks) is bool(blocks)


def test_a_request_that_ends_while_it_is_loaded_saves_nothing() -> None:
    rig, request = Rig(), request_of()
    assert rig.admit(request, stored=5) == 20
    assert not rig.finished(request, blocks_of(request))
    rig.heard(["r"], [11])
    assert rig.jobs()[1] == []


def test_a_request_that_ends_before_its_load_was_begun_saves_nothing() -> None:
    rig, request = Rig(), request_of()
    rig.side.arrived(request)
    rig.lookup.answer(5)
    assert rig.side.matched(request, 0) == 20
    # vLLM counts the tokens as soon as it has blocks for them, and may put the load off.
    request.num_computed_tokens = 20
    assert not rig.finished(request, blocks_of(request))


def test_a_failed_load_is_computed_saved_anew_and_not_tried_again() -> None:
    rig, request = Rig(per_page=2), request_of()
    assert rig.admit(request, stored=4) == 32
    rig.jobs()
    # The fifth block has failed: it is in the third page.
    rig.heard(["r"], [14, 15])
    request.num_computed_tokens = 16
    assert rig.side.matched(request, 0) == 0
    _, (save,) = rig.step(request, 26, blocks_of(request))
    assert save == save_of(TOKENS[:40], 2, range(14, 20))


def test_a_request_that_was_preempted_is_looked_up_anew_with_its_output() -> None:
    rig, request = Rig(), request_of()
    rig.admit(request)
    rig.step(request, 42, blocks_of(request))
    say(request, 1, 2, 3)
    request.num_computed_tokens = 0
    rig.preempted = {"r", "other"}
    assert rig.jobs() == ([], [])
    assert rig.released == ["r"], "the worker waits until nothing reads its blocks"
    rig.preempted = set()
    assert rig.side.matched(request, 0) is None
    assert rig.lookup.asked[-1][0] == keys_of([*TOKENS, 1, 2, 3])
    rig.lookup.answer(11)
    assert rig.side.matched(request, 0) == 44
    rig.allocated(request, blocks_of(request), 0)
    say(request, 4, 5, 6)
    _, (save,) = rig.step(request, 48, blocks_of(request))
    assert save == save_of([*TOKENS, 1, 2, 3, 4, 5, 6], 11, (21,)), "its tokens are named again"


def test_after_a_reset_nothing_old_is_found_or_saved_under_old_keys() -> None:
    rig, request = Rig(), request_of()
    rig.admit(request)
    rig.side.reset()
    _, (save,) = rig.step(request, 42, blocks_of(request))
    assert len(save.seed) == 32
    rig.side.arrived(request_of(request_id="later"))
    assert rig.lookup.asked[-1][0] == keys_of(TOKENS, seed=save.seed)[:10]


def test_a_producer_only_saves_and_a_consumer_only_loads() -> None:
    rig, request = Rig(loads=False), request_of()
    rig.side.arrived(request)
    assert rig.side.matched(request, 0) == 0
    assert rig.lookup.asked == []
    rig.allocated(request, blocks_of(request), 0)
    assert len(rig.step(request, 42, blocks_of(request))[1]) == 1
    rig, request = Rig(saves=False), request_of()
    assert rig.admit(request, stored=2) == 8
    assert rig.step(request, 34, blocks_of(request))[1] == []
    assert not rig.finished(request, blocks_of(request))


def test_nothing_is_known_of_a_request_that_has_ended() -> None:
    rig, request = Rig(), request_of()
    rig.admit(request)
    rig.step(request, 42, blocks_of(request))
    rig.finished(request, blocks_of(request))
    assert rig.side._known == {}
    _, (last,) = rig.jobs()
    assert last.is_last
    assert rig.step(request, 0, []) == ([], [])
    assert not rig.finished(request, [])


def test_an_adapter_named_like_a_salt_shares_no_page_with_it() -> None:
    """vLLM #44701: an adapter's name and a salt went into a block's hash without a sign of which of them it was."""
    same: dict[bytes, list[tuple[str, str]]] = {}
    kept: dict[str, list[tuple[str, str]]] = {}
    for adapter in ("", "a", "b", "ab", '["a", "", ""]'):
        for salt in ("", "a", "b", "ab", "ba", '["a", "", ""]'):
            rig = Rig()
            lora = SimpleNamespace(lora_name=adapter) if adapter else None
            request = request_of(lora_request=lora, cache_salt=salt or None)
            rig.side.arrived(request)
            same.setdefault(rig.lookup.asked[-1][0][0], []).append((adapter, salt))
            kept.setdefault(namespace_of(request), []).append((adapter, salt))
    assert len(same) == len(kept) == 5 * 6, "a key for each pair, in the role of storage and in that of the hand-over"


def test_a_request_that_is_aborted_while_it_is_loaded_is_loaded_to_its_end() -> None:
    """vllm-ascend #16662: the end of a load was dropped if its request had been aborted, and vLLM kept the blocks."""
    rig, request = Rig(), request_of()
    assert rig.admit(request, stored=5) == 20
    # Aborted before the step that starts the load: vLLM holds the blocks until that load is reported as ended.
    assert not rig.finished(request, blocks_of(request))
    loads, saves = rig.jobs()
    assert [load.request_id for load in loads] == ["r"]
    assert saves == []
