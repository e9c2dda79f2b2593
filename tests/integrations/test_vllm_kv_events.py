"""KV events of decode's host memory and storage, as vLLM's own publisher gets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support.inside import runtime_of
from tests.support.vllm_contract import BLOCK, configs_of
from tests.support.vllm_handover import HandoverVllm, request_of, started_vllms
from tests.support.vllm_router import Listener, external_hashes
from tests.support.waits import LIMIT_S
from tidekv.backends.keys.chain import namespace_seed, pack_tokens, page_digests
from tidekv.engine.integrations.vllm.handover.settings import read_handover
from tidekv.engine.integrations.vllm.kv_events import PublishedBlocks, RankReport
from tidekv.engine.kv_events.messages import BlockRemoved, BlockStored, KVEvent, Medium
from tidekv.states.errors import InvalidConfig

PAGE_BYTES = 1536
PLACES = [7, 3, 11, 2, 5]
Start = Callable[..., HandoverVllm]


@pytest.fixture
def start(connector: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Makes vLLMs with KV events, which end with the test."""
    with started_vllms(connector, monkeypatch, events=True) as start_one:
        yield start_one


def prompt_of(*parts: int) -> list[int]:
    """Blocks by number: equal numbers are equal tokens."""
    return [1000 * part + at for part in parts for at in range(BLOCK)]


def settle(decode: HandoverVllm) -> None:
    """Take all events of what is in place, without waiting for a step of vLLM."""
    for worker in decode.workers:
        for end in worker.connector_worker.decodes:
            end.engine.wait_settled()
            end.events.wait_made()
    decode.step()


def serve(decode: HandoverVllm, name: str, tokens: Sequence[int], **changes: Any) -> None:
    """A request that vLLM computes, and whose blocks are kept."""
    decode.add(request_of(name, [*tokens, 1], None, **changes), PLACES[: len(tokens) // BLOCK + 1])
    decode.compute(name, chunk=100)
    decode.finish(name)
    decode.step_until(lambda: name in decode.freed)
    settle(decode)


def restore(decode: HandoverVllm, prefill: HandoverVllm, name: str, tokens: Sequence[int]) -> None:
    """A request whose missing blocks prefill sends."""
    sent = f"p-{name}"
    prefill.add(request_of(sent, [*tokens, 1], {"do_remote_decode": True}), PLACES[: len(tokens) // BLOCK + 1])
    prefill.compute(sent, chunk=100)
    _, params = prefill.finish(sent)
    decode.add(request_of(name, [*tokens, 1], params), PLACES[: len(tokens) // BLOCK + 1])
    decode.step_until(lambda: name in decode.loaded)
    decode.compute(name, chunk=100)
    decode.finish(name)
    decode.step_until(lambda: name in decode.freed)
    prefill.step_until(lambda: sent in prefill.freed)
    settle(decode)


def truth(decode: HandoverVllm, tokens: Sequence[int]) -> list[set[str]]:
    """The media of each block of a prompt, as the engine has it: host memory from the first block on, and storage."""
    engine = decode.worker.connector_worker.decodes[0].engine
    in_host = engine.call(lambda live: live.probe_prefix(tokens))["l2"] // BLOCK
    digests = page_digests(pack_tokens(tokens), BLOCK, prefix=namespace_seed(""))
    storage = runtime_of(engine._engine).storage_in_use.current
    stored = [False] * len(digests)
    if storage is not None:
        stored = engine.call(lambda _: storage.exists(digests, timeout_s=LIMIT_S))
    return [
        {*(["CPU"] if at < in_host else []), *(["STORAGE"] if is_stored else [])} for at, is_stored in enumerate(stored)
    ]


@pytest.mark.nixl
def test_a_listener_knows_what_host_memory_and_storage_have_through_evictions_and_restarts(
    start: Start, tmp_path: Path
) -> None:
    uri, random = f"file:{tmp_path}/store?capacity=16MB", Random(7)
    options = {"uri": uri, "host": f"{7 * PAGE_BYTES}B"}
    prefill = start("kv_producer")
    prompts = [prompt_of(*parts) for parts in ([1, 2, 3], [1, 2, 4], [1, 5], [6, 7, 8, 9], [6, 10], [11, 12, 13])]
    seen = set[str]()
    for life in range(2):
        decode, listener, served = start("kv_consumer", **options), Listener(), list[list[int]]()
        for turn in range(10):
            tokens = random.choice(prompts)
            served.append(tokens)
            if random.random() < 0.5:
                serve(decode, f"s-{life}-{turn}", tokens)
            else:
                restore(decode, prefill, f"r-{life}-{turn}", tokens)
            listener.take(decode.published)
            decode.published.clear()
            for prompt in served:
                expected, found = truth(decode, prompt), listener.of(prompt)
                assert [one & {"STORAGE"} for one in found] == [one & {"STORAGE"} for one in expected]
                # Host memory behind a block that only storage has is not in the engine's answer.
                reach = next((at for at, one in enumerate(found) if "CPU" not in one), len(found))
                assert reach == sum("CPU" in one for one in expected)
                seen.update("+".join(sorted(one)) for one in found)
                by_hash = [
                    {medium for medium in ("CPU", "STORAGE") if one in listener.held[medium]}
                    for one in external_hashes(prompt)
                ]
                assert by_hash == found, "the hashes are vLLM's"
        decode.close()
    assert seen >= {"CPU+STORAGE", "STORAGE"}


@pytest.mark.nixl
def test_a_router_places_each_prompt_at_the_worker_whose_host_memory_or_storage_has_it(
    start: Start, tmp_path: Path
) -> None:
    workers = [
        start("kv_consumer", uri=f"file:{tmp_path}/{at}?capacity=16MB", host=f"{16 * PAGE_BYTES}B") for at in range(2)
    ]
    listeners = [Listener(), Listener()]
    random, places = Random(3), [0, 1] * 10
    random.shuffle(places)
    # Equal beginnings, and every fifth prompt in a salt, with tokens that the other worker has without it.
    prompts = [
        (prompt_of(100, 200 + at, 300 + at, 400 + at), None)
        if at % 5
        else (prompt_of(100, 200 + at + 1, 301 + at), "mine")
        for at in range(20)
    ]
    for at, (place, (tokens, salt)) in enumerate(zip(places, prompts, strict=True)):
        serve(workers[place], f"r{at}", tokens, cache_salt=salt)
    tiers = set()
    for listener, worker in zip(listeners, workers, strict=True):
        listener.take(worker.published)
    for place, (tokens, salt) in zip(places, prompts, strict=True):
        reaches = [listener.reach(tokens, salt) for listener in listeners]
        assert max(range(2), key=reaches.__getitem__) == place, reaches
        assert reaches[place] == len(tokens) // BLOCK
        tiers.add("CPU" if "CPU" in listeners[place].of(tokens, salt)[-1] else "STORAGE")
    assert tiers == {"CPU", "STORAGE"}


@pytest.mark.nixl
def test_after_a_reset_nothing_kept_is_published_and_an_equal_prompt_is_published_again(
    start: Start, tmp_path: Path
) -> None:
    decode, listener = start("kv_consumer", uri=f"file:{tmp_path}/store?capacity=16MB"), Listener()
    tokens = prompt_of(1, 2, 3)
    serve(decode, "a", tokens)
    # Planned before the reset, and not known to the worker.
    decode.add(request_of("late", [*prompt_of(4, 5), 1], None), [8, 9, 10])
    decode.compute("late", chunk=100)
    decode.finish("late")
    decode.scheduler.reset_cache()
    decode.step_until(lambda: "late" in decode.freed)
    settle(decode)
    listener.take(decode.published)
    decode.published.clear()
    assert (listener.reach(tokens), listener.reach(prompt_of(4, 5))) == (0, 0)
    serve(decode, "b", tokens)
    listener.take(decode.published)
    assert listener.of(tokens) == [{"CPU", "STORAGE"}] * 3


@pytest.mark.nixl
def test_a_reset_of_vllms_own_cache_alone_has_everything_listed_again(start: Start, tmp_path: Path) -> None:
    decode, listener = start("kv_consumer", uri=f"file:{tmp_path}/store?capacity=16MB"), Listener()
    serve(decode, "a", prompt_of(1, 2, 3))
    serve(decode, "b", prompt_of(1, 4), cache_salt="mine")
    listener.take(decode.published)
    before = {medium: set(hashes) for medium, hashes in listener.held.items()}
    decode.published.clear()
    decode.clear()
    decode.step()
    assert [type(event).__name__ for batch in decode.published for event in batch] == ["AllBlocksCleared"]
    decode.step()  # The workers hear of it.
    settle(decode)
    listener.take(decode.published)
    assert listener.held == before
    assert len(before["CPU"]) == len(before["STORAGE"]) == 5


@pytest.mark.nixl
def test_events_of_tensor_parallel_ranks_are_of_what_all_have(start: Start) -> None:
    decode, listener = start("kv_consumer", tensor_parallel=2), Listener()
    tokens = prompt_of(1, 2, 3)
    serve(decode, "a", tokens)
    settle(decode)
    listener.take(decode.published)
    decode.published.clear()
    assert listener.of(tokens) == [{"CPU"}] * 3
    # A rank that has lost its part is the end of the block.
    feed = decode.workers[1].connector_worker.decodes[0].events
    feed.forget()
    settle(decode)
    listener.take(decode.published)
    assert listener.of(tokens) == [set()] * 3


@pytest.mark.nixl
def test_the_words_of_an_event_are_vllms_own(start: Start) -> None:
    decode = start("kv_consumer")
    adapter = SimpleNamespace(lora_name="mine", lora_int_id=3)
    serve(decode, "a", prompt_of(1, 2), cache_salt="salt", lora_request=adapter)
    (event,) = [event for batch in decode.published for event in batch]
    assert (event.lora_id, event.lora_name, event.medium) == (3, "mine", "CPU")
    assert event.extra_keys == [("mine", "salt"), ("mine",)]
    assert event.parent_block_hash is None
    assert event.token_ids == prompt_of(1, 2)


@pytest.mark.nixl
def test_without_kv_events_nothing_is_collected(start: Start) -> None:
    decode = start("kv_consumer", events=False)
    decode.add(request_of("a", prompt_of(1, 2), None), PLACES[:2])
    decode.compute("a", chunk=100)
    decode.finish("a")
    assert decode.scheduler.connector_scheduler.decode._jobs.offers[0].names is None
    decode.step_until(lambda: decode.freed)
    assert decode.worker.connector_worker.decodes[0].events is None
    assert decode.worker.get_kv_connector_kv_cache_events() is None
    assert list(decode.scheduler.take_events()) == []
    assert not decode.published


def test_events_beside_vllms_own_are_refused() -> None:
    handover = {"dials": ["127.0.0.1:*"], "engine": {"kv_events": {"endpoint": "ipc:///tmp/x"}}}
    configs = configs_of(
        "",
        extra={"uri": None, "model": None, "host": None, "handover": handover},
        is_kv_producer=False,
        kv_events=SimpleNamespace(enable_kv_cache_events=True),
    )
    configs[0].kv_transfer_config.kv_role = configs[0].kv_transfer_config.engine_id = "kv_consumer"
    with pytest.raises(InvalidConfig, match=r"handover\.engine\.kv_events\.endpoint would publish beside"):
        read_handover(*configs)


def stored(hashes: list[int], medium: Medium, *, parent: int | None = None) -> BlockStored:
    tokens = [token for one in hashes for token in (one, one)]
    return BlockStored(list(hashes), parent, tokens, 2, None, medium, None, group_idx=0)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_blocks_are_published_once_all_ranks_have_them_and_after_the_one_before(ranks: int) -> None:
    for seed in range(40):
        random = Random(f"{ranks} {seed}")
        blocks = PublishedBlocks(ranks)
        held: list[dict[str, int]] = [{"CPU": 0, "STORAGE": 0} for _ in range(ranks)]
        """Blocks 1 to n of one chain, by rank and medium."""
        known: dict[str, set[int]] = {"CPU": set(), "STORAGE": set()}
        for _ in range(60):
            rank, medium = random.randrange(ranks), random.choice(["CPU", "STORAGE"])
            had = held[rank][medium]
            has = held[rank][medium] = random.randint(0, 5)
            event: KVEvent
            if has > had:
                event = stored([*range(had + 1, has + 1)], medium, parent=had or None)  # type: ignore[arg-type]
            elif has < had:
                event = BlockRemoved([*range(has + 1, had + 1)], medium, 0)  # type: ignore[arg-type]
            else:
                continue
            for one in blocks.take([RankReport(rank, [event])]):
                assert isinstance(one, BlockStored | BlockRemoved)
                if isinstance(one, BlockStored):
                    parent = one.parent_block_hash
                    assert parent is None or parent in known["CPU"] | known["STORAGE"]
                    assert not known[one.medium] & set(one.block_hashes)
                    assert one.token_ids == [token for each in one.block_hashes for token in (each, each)]
                    known[one.medium] |= set(one.block_hashes)  # type: ignore[arg-type]
                else:
                    assert set(one.block_hashes) <= known[one.medium]
                    known[one.medium] -= set(one.block_hashes)  # type: ignore[arg-type]
            everywhere = min(max(each.values()) for each in held)
            in_host = min(each["CPU"] for each in held)
            assert known["CPU"] == set(range(1, in_host + 1))
            assert known["STORAGE"] == set(range(1, min(everywhere, max(each["STORAGE"] for each in held)) + 1))
