"""vLLM's own scheduler, block manager, connector factory and worker hooks, from its wheel, around tidekv's connector.

    python -m tests.support.vllm_engine write|read|churn|contract URI NUMBER FILE [--async] [--page N]

"write" runs one prompt of 4 pages from token NUMBER on, with KV that is a function of its tokens, and writes the pages'
bytes to FILE in tidekv's order. "read" does so for what was loaded. "churn" serves conversations with few blocks, from
seed NUMBER, with aborts, and checks every byte that attention would read; FILE gets figures as JSON. "contract" writes
the parameters of the methods that vLLM's base class has and the connector has, too.

TIDEKV_TEST_VLLM names an unpacked wheel of vllm 0.33.0, TIDEKV_TEST_VLLM_PACKAGES a directory with what it imports and
tests do not have:

    pip install --no-deps --target DIR psutil cachetools cbor2 cloudpickle py-cpuinfo openai_harmony \\
        partial-json-parser pybase64 sentencepiece blake3

Only the model is ours: there is no GPU. What is only imported and never used here is replaced by nothing.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any  # vLLM's objects are not typed here.
from unittest.mock import MagicMock

import numpy as np
import torch

from tests.support.stand_ins import Nothing, make_importable

UNUSED = {"vllm.reasoning", "xgrammar", "fastapi", "llguidance"}
LAYERS, HEADS, DIM, BLOCK = 3, 2, 4, 8
NAMES = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
VOCABULARY = 1000


def prepare() -> None:
    """Make vLLM importable, without what its own __init__ patches, on a platform that is none."""
    make_importable("vllm", wheel=os.environ["TIDEKV_TEST_VLLM"], packages=os.environ["TIDEKV_TEST_VLLM_PACKAGES"])
    sys.meta_path.insert(0, Nothing(UNUSED))
    import vllm.platforms
    from vllm.platforms.interface import Platform, PlatformEnum

    class NoPlatform(Platform):
        _enum = PlatformEnum.UNSPECIFIED
        device_name = device_type = "cpu"

    vllm.platforms._current_platform = NoPlatform()
    logging.getLogger("vllm").setLevel(logging.ERROR)


class ModelConfig:
    """What vLLM's scheduler asks of a model; whatever else it asks: no."""

    model = "m"
    max_model_len = 512
    runner_type = "generate"

    def __getattr__(self, name: str) -> bool:
        if name.startswith("__"):
            raise AttributeError(name)
        return False


def content(tokens: Sequence[int], start: int, end: int) -> np.ndarray:
    """The KV of positions, [position, layer, K or V, head, element]: a function of all tokens up to each."""
    seen, rolling = [], 7
    for at, token in enumerate(tokens[:end]):
        rolling = (rolling * 1_000_003 + token + 1) % (1 << 31)
        if at >= start:
            seen.append(rolling)
    places = np.arange(LAYERS * 2 * HEADS * DIM, dtype=np.int64).reshape(LAYERS, 2, HEADS, DIM)
    mixed = np.array(seen, dtype=np.int64)[:, None, None, None, None] * (2 * places + 1) + places
    return (mixed % 65_521).astype(np.float32)


def next_token(tokens: Sequence[int]) -> int:
    """The model's next token after these tokens."""
    return (sum(tokens) * 31 + len(tokens)) % VOCABULARY


class Runner:
    """A worker without a GPU: follows the scheduler's outputs as vLLM's runner does, and has a model of one formula."""

    def __init__(self, num_blocks: int, *, verifies: bool) -> None:
        # Strides as vLLM has them by default: tokens before heads.
        stored = torch.zeros(LAYERS, num_blocks, BLOCK, HEADS, 2 * DIM)
        self.caches = {name: stored[layer].transpose(1, 2) for layer, name in enumerate(NAMES)}
        self._verifies = verifies
        self._tokens: dict[str, list[int]] = {}
        self._blocks: dict[str, list[int]] = {}
        self.computed_tokens = 0

    def run(self, output: Any, hooks: Any, make: Any) -> Any:
        """One step; returns vLLM's ModelRunnerOutput."""
        for request_id in output.finished_req_ids:
            self._tokens.pop(request_id, None)
            self._blocks.pop(request_id, None)
        if not output.total_num_scheduled_tokens:
            return hooks.no_forward(output)
        computed = self._follow(output)
        hooks.pre_forward(output)
        sampled = [self._forward(name, computed[name], n) for name, n in output.num_scheduled_tokens.items()]
        hooks.finish_forward()
        names = list(output.num_scheduled_tokens)
        return make(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=hooks.post_forward(output.finished_req_ids),
        )

    def page(self, blocks: Sequence[int]) -> bytes:
        """A page's bytes in tidekv's order, element by element: too simple to be wrong."""
        found = [
            self.caches[name][block, head, slot, part * DIM + at]
            for name in NAMES
            for part in range(2)
            for block in blocks
            for slot in range(BLOCK)
            for head in range(HEADS)
            for at in range(DIM)
        ]
        return torch.stack(found).numpy().tobytes()

    def _follow(self, output: Any) -> dict[str, int]:
        computed = {}
        for new in output.scheduled_new_reqs:
            self._tokens[new.req_id] = list(new.prefill_token_ids or new.prompt_token_ids)
            self._blocks[new.req_id] = list(new.block_ids[0])
            computed[new.req_id] = new.num_computed_tokens
        again = output.scheduled_cached_reqs
        for at, name in enumerate(again.req_ids):
            fresh = again.new_block_ids[at]
            if name in again.resumed_req_ids:
                self._tokens[name] = list(again.all_token_ids[name])
                self._blocks[name] = list(fresh[0])
            elif fresh is not None:
                self._blocks[name] += fresh[0]
            computed[name] = again.num_computed_tokens[at]
        return computed

    def _forward(self, name: str, computed: int, count: int) -> list[int]:
        tokens, blocks = self._tokens[name], self._blocks[name]
        assert computed + count <= len(tokens), (name, computed, count, len(tokens))
        if self._verifies and computed:
            read = self._rows(blocks, 0, computed)
            assert np.array_equal(read, content(tokens, 0, computed)), f"{name}: attention reads a wrong byte"
        written = content(tokens, computed, computed + count)
        for at in range(computed, computed + count):
            for layer, cache in enumerate(self.caches.values()):
                row = written[at - computed, layer].transpose(1, 0, 2).reshape(HEADS, 2 * DIM)
                cache[blocks[at // BLOCK], :, at % BLOCK] = torch.from_numpy(row)
        self.computed_tokens += count
        if computed + count < len(tokens):
            return []
        tokens.append(next_token(tokens))
        return tokens[-1:]

    def _rows(self, blocks: Sequence[int], start: int, end: int) -> np.ndarray:
        at = torch.arange(start, end)
        index, slots = torch.tensor(blocks)[at // BLOCK], at % BLOCK
        rows = [cache[index, :, slots].view(-1, HEADS, 2, DIM).transpose(1, 2) for cache in self.caches.values()]
        return torch.stack(rows, dim=1).numpy()


class Engine:
    """vLLM's loop: schedule, run, update; with `overlap` a step is scheduled before the one before it has run."""

    def __init__(self, uri: str, *, num_blocks: int, page: int, overlap: bool, verifies: bool = True) -> None:
        from vllm.config import CacheConfig, KVTransferConfig, SchedulerConfig, VllmConfig
        from vllm.config.device import DeviceConfig
        from vllm.distributed.kv_transfer import kv_transfer_state
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.worker.gpu.kv_connector import get_kv_connector

        config = VllmConfig(
            device_config=DeviceConfig(device="cpu"),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=4,
                max_num_batched_tokens=48,
                max_model_len=512,
                is_encoder_decoder=False,
                async_scheduling=overlap,
            ),
            kv_transfer_config=KVTransferConfig(
                kv_connector="TidekvConnector",
                kv_role="kv_both",
                kv_buffer_device="cpu",
                kv_connector_module_path="tidekv.engine.integrations.vllm.connector",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={"uri": uri, "model": "m", "page_size": page, "host": 40_000},
            ),
        )
        object.__setattr__(config, "model_config", ModelConfig())
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32)
        kv_cache = KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(NAMES, spec)]
        )
        hash_one = get_hash_fn_by_name("sha256")
        kv_cache_utils.init_none_hash(hash_one)
        self._hasher = kv_cache_utils.get_request_block_hasher(BLOCK, hash_one)
        kind = AsyncScheduler if overlap else Scheduler
        self.scheduler = kind(config, kv_cache, MagicMock(), block_size=BLOCK, hash_block_size=BLOCK, log_stats=True)
        self.runner = Runner(num_blocks, verifies=verifies)
        worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv_cache)
        backend = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "FLASH_ATTN"))
        config.compilation_config.static_forward_context = dict.fromkeys(NAMES, backend)
        kv_transfer_state._KV_CONNECTOR_AGENT = worker
        self._hooks = get_kv_connector(config, self.runner.caches)
        self._config, self._worker, self._overlap = config, worker, overlap
        self.outputs: dict[str, list[int]] = {}
        self.counts: dict[str, int] = {}
        self.external: dict[str, int] = {}

    def add(self, name: str, tokens: Sequence[int], *, max_tokens: int, salt: str | None = None) -> None:
        """Queue a request."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        sampling.update_from_generation_config({}, 0)
        self.outputs[name] = []
        self.scheduler.add_request(
            Request(name, list(tokens), sampling, None, block_hasher=self._hasher, cache_salt=salt)
        )

    def abort(self, name: str) -> None:
        """The client has gone."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def serve(self, *, steps_max: int = 200_000, each_step: Any = None) -> None:
        """Step until nothing is left to do."""
        waiting = None
        for step in range(steps_max):
            if each_step is not None:
                each_step(step)
            if not self.scheduler.has_requests() and waiting is None:
                return
            output = self.scheduler.schedule() if self.scheduler.has_requests() else None
            if self._overlap:
                output, waiting = waiting, output
            if output is not None:
                self._run(output)
        raise AssertionError(f"not done after {steps_max} steps")

    def close(self) -> None:
        """Shut both sides down; what was to be saved is saved."""
        self._worker.shutdown()
        self.scheduler.shutdown()

    def _run(self, output: Any) -> None:
        from vllm.forward_context import set_forward_context
        from vllm.v1.outputs import ModelRunnerOutput

        with set_forward_context(None, self._config):
            result = self.runner.run(output, self._hooks, ModelRunnerOutput)
        for outputs in self.scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                self.outputs[one.request_id] += one.new_token_ids
                if one.prefill_stats is not None:
                    self.external[one.request_id] = one.prefill_stats.num_external_cached_tokens
            stats = outputs.scheduler_stats
            for name, count in (stats.kv_connector_stats or {}).items() if stats is not None else ():
                self.counts[name] = self.counts.get(name, 0) + count


def one_prompt(what: str, uri: str, first_token: int, file: Path, *, page: int, overlap: bool) -> None:
    """Serve one prompt of 4 pages and 2 tokens, and write the bytes of its pages."""
    engine = Engine(uri, num_blocks=64, page=page, overlap=overlap, verifies=what == "write")
    tokens = [*range(first_token, first_token + 4 * page), 1, 2]
    engine.add("one", tokens, max_tokens=3)
    blocks: list[int] = []

    def look(_: int) -> None:
        if "one" in engine.scheduler.requests:
            blocks[:] = engine.scheduler.kv_cache_manager.get_block_ids("one")[0] or blocks

    engine.serve(each_step=look)
    engine.close()
    expected = 4 * page if what == "read" else 0
    assert engine.external["one"] == expected, (engine.external, engine.counts)
    per_page = page // BLOCK
    pages = [engine.runner.page(blocks[at * per_page : (at + 1) * per_page]) for at in range(4)]
    file.write_bytes(b"".join(pages))


def churn(uri: str, seed: int, file: Path, *, page: int, overlap: bool) -> None:
    """Conversations with blocks evicted between turns: every token equals the model's output without caches."""
    chance = random.Random(seed)
    engine = Engine(uri, num_blocks=40, page=page, overlap=overlap)
    shared = [chance.randrange(VOCABULARY) for _ in range(2 * page + 3)]
    talks = [[*shared[: chance.randrange(1, len(shared))], talk, talk] for talk in range(6)]
    prompt_tokens = aborted = 0
    for turn in range(5):
        asked = {}
        for number, talk in enumerate(talks):
            talk += [chance.randrange(VOCABULARY) for _ in range(chance.randrange(1, 20))]
            name = f"{turn}-{number}"
            asked[name] = list(talk)
            prompt_tokens += len(talk)
            engine.add(name, talk, max_tokens=chance.randrange(1, 12), salt="s" if number == 5 else None)
        victim, at_step = f"{turn}-{chance.randrange(len(talks))}", chance.randrange(12)
        engine.serve(each_step=lambda step, name=victim, due=at_step: engine.abort(name) if step == due else None)
        for number, talk in enumerate(talks):
            name = f"{turn}-{number}"
            said = engine.outputs[name]
            whole = asked[name]
            for token in said:
                assert token == next_token(whole), f"{name}: a wrong token"
                whole = [*whole, token]
            aborted += name == victim
            talk[:] = whole
        assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 39, "a block was lost"
        engine.scheduler.reset_prefix_cache()
        if turn == 2:
            spoil(Path(uri.removeprefix("file:").partition("?")[0]))
    engine.close()
    figures = {"prompt": prompt_tokens, "computed": engine.runner.computed_tokens, "aborted": aborted, **engine.counts}
    file.write_text(json.dumps(figures))


def spoil(folder: Path) -> None:
    """Flip a byte of every page in storage: what its host memory has not is to be computed and stored again."""
    for file in folder.rglob("*.seg"):
        with file.open("r+b") as segment:
            # Segments are made at their full length, and filled from the front.
            for place in range(600, min(file.stat().st_size, 1 << 20), 512):
                segment.seek(place)
                (byte,) = segment.read(1)
                segment.seek(place)
                segment.write(bytes([byte ^ 1]))


def contract(file: Path) -> None:
    """Write what vLLM's base class declares of the connector's methods, and check that they take the same."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from tidekv.engine.integrations.vllm.connector import TidekvConnector

    assert not TidekvConnector.__abstractmethods__
    declared = {}
    for name, ours in vars(TidekvConnector).items():
        theirs = getattr(KVConnectorBase_V1, name, None)
        if not name.startswith("_") and callable(theirs):
            declared[name] = list(inspect.signature(theirs).parameters)
            found = list(inspect.signature(getattr(TidekvConnector, name)).parameters)
            assert found == declared[name], f"{name} takes {found}, vLLM gives {declared[name]}"
            assert ours is not theirs
    file.write_text(json.dumps({"abstract": sorted(KVConnectorBase_V1.__abstractmethods__), "declared": declared}))


def main() -> None:
    prepare()
    what, uri, number, file = sys.argv[1:5]
    page = int(sys.argv[sys.argv.index("--page") + 1]) if "--page" in sys.argv else BLOCK
    overlap = "--async" in sys.argv
    if what == "contract":
        contract(Path(file))
    elif what == "churn":
        churn(uri, int(number), Path(file), page=page, overlap=overlap)
    else:
        one_prompt(what, uri, int(number), Path(file), page=page, overlap=overlap)


if __name__ == "__main__":
    main()
