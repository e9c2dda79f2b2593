"""The snippets of docs/embedding.md work as documented, over NIXL."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tidekv
from tests.support.inside import core_of
from tests.support.waits import LIMIT_S
from tidekv import (
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    EngineConfig,
    EngineThread,
    LayersLost,
    LoopbackTransport,
    NixlTransport,
    PrefillConfig,
    PrefillPeer,
    PrefillThread,
    Restored,
)
from tidekv.states.pages.page_pool import PagePool
from tidekv.transports.loopback import LoopbackNetwork

pytestmark = pytest.mark.nixl
PAIRED_PAGES = 8
GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "embedding.md").read_text()
PROMPTS = [[(number * 31 + position) % 1000 for position in range(40)] for number in range(3)]
OUTPUT = 40


def next_token(position: int) -> int:
    """The test model's next token at a position, independent of the tokens before it."""
    return 1000 + position


@pytest.fixture
def guide() -> dict[str, Any]:
    """All names of the page's snippets, run in order."""
    names: dict[str, Any] = {}
    for snippet in re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL):
        exec(compile(snippet, "embedding.md", "exec"), names)
    return names


@pytest.fixture
def prefill(guide: dict[str, Any]) -> Iterator[str]:
    """The address of a prefill worker on a loop of its own; the page's `answer` serves its rooms."""
    memory = guide["parts"]("unused")["device"]
    pool = PagePool("prefill", memory.num_pages)

    async def compute_chunk(tokens: memoryview, start: int, pages: list[int]) -> int:
        return next_token(start + len(tokens) - 1)

    async def serve(room: Any) -> None:
        pages = pool.take(-(-len(room.tokens) // 4 // 16))
        await guide["answer"](room, pages.tolist(), compute_chunk, chunk_pages=1)
        pool.give_back(pages)

    told = threading.Event()
    at: dict[str, Any] = {}

    async def run() -> None:
        at["loop"], at["ended"] = asyncio.get_running_loop(), asyncio.Event()
        async with PrefillPeer(device=memory, transport=NixlTransport("prefill-0"), on_room=serve) as peer:
            at["address"] = peer.address
            told.set()
            await at["ended"].wait()

    worker = threading.Thread(target=asyncio.run, args=(run(),), name="prefill of the guide")
    worker.start()
    assert told.wait(30)
    yield at["address"]
    at["loop"].call_soon_threadsafe(at["ended"].set)
    worker.join()


def expected(prompt: list[int]) -> list[int]:
    return [next_token(len(prompt) - 1 + number) for number in range(OUTPUT)]


async def test_the_async_snippet_answers_and_makes_way(guide: dict[str, Any], prefill: str) -> None:
    parts = guide["parts"]("decode-0")
    # Three requests of five pages and a reserve each fit in ten pages only by turns.
    parts["device"] = type(parts["device"]).allocate(guide["layout"], 10)

    async def step(pages: Any, position: int, token: int) -> int:
        assert token == next_token(position - 1)
        assert len(pages) * 16 > position
        await asyncio.sleep(0)
        return next_token(position)

    async with DecodeEngine(EngineConfig(), **parts) as engine:
        outputs = await asyncio.gather(
            *(
                guide["generate"](engine, f"r{number}", prompt, prefill, step, OUTPUT)
                for number, prompt in enumerate(PROMPTS)
            )
        )
        assert outputs == [expected(prompt) for prompt in PROMPTS]
        await engine.wait_settled()
        core = engine.statistics()["core"]
        assert core["device_owned"] == 0  # type: ignore[index]  # Counts by name.


async def test_the_layer_snippet_begins_again_after_a_loss(guide: dict[str, Any], prefill: str) -> None:
    parts = guide["parts"]("decode-0")
    lost = iter([LayersLost("r", "a test")])

    async def forward_layer(layer: int, ready: Any, hidden: int) -> int:
        done.append(layer)
        assert len(ready.pages) * 16 > ready.prompt_tokens
        if layer == 2 and (error := next(lost, None)) is not None:
            raise error
        return hidden + 1

    done: list[int] = []
    async with DecodeEngine(EngineConfig(), **parts) as engine:
        options = {"tokens": PROMPTS[0], "prefill": prefill, "send_prompt": True, "early": True}
        ready, token = await guide["step_by_layer"](
            engine, DecodeRequest(request_id="r", **options), forward_layer, guide["layout"].num_layers
        )
        assert done == [0, 1, 2, 0, 1, 2, 3]
        assert token == ready.first_token + 4
        await engine.finish(ready, [ready.first_token, token])


def test_the_scheduler_snippet_answers_and_makes_way(guide: dict[str, Any], prefill: str) -> None:
    parts = guide["parts"]("decode-0")
    parts["device"] = type(parts["device"]).allocate(guide["layout"], 10)

    def step_batch(running: dict[str, Any], since: dict[str, list[int]]) -> dict[str, int]:
        for name, ready in running.items():
            assert len(ready.pages) * 16 >= ready.prompt_tokens + len(since[name])
        return {name: next_token(ready.prompt_tokens + len(since[name]) - 1) for name, ready in running.items()}

    requests = [
        DecodeRequest(request_id=f"r{number}", tokens=prompt, prefill=prefill, send_prompt=True)
        for number, prompt in enumerate(PROMPTS)
    ]
    with EngineThread(DecodeEngine(EngineConfig(), **parts)) as engine:
        answers = guide["schedule"](engine, requests, step_batch, OUTPUT)
        assert answers == {f"r{number}": expected(prompt) for number, prompt in enumerate(PROMPTS)}
        engine.wait_settled()
        core = engine.statistics()["core"]
        assert core["device_owned"] == 0  # type: ignore[index]  # Counts by name.


def test_the_paired_pool_is_the_callers_tensors(guide: dict[str, Any]) -> None:
    kv = [[torch.zeros(PAIRED_PAGES, 16, 2, 32) for _ in range(layers)] for layers in (4, 4, 1, 1)]
    pool = guide["paired_pool"](*kv)
    assert pool.layout == guide["paired"]
    assert pool.num_pages == PAIRED_PAGES
    assert pool.group("draft").v[0].data_ptr() == kv[3][0].data_ptr()
    assert pool.group("full").k[3].data_ptr() == pool.k[3].data_ptr() == kv[0][3].data_ptr()


@asynccontextmanager
async def with_components(
    guide: dict[str, Any],
    ours: Any,
    theirs: Any,
    on_room: Callable[[Any], Awaitable[None]],
    config: EngineConfig | None = None,
) -> AsyncIterator[DecodeEngine]:
    """A decode engine with the components `theirs`, and its prefill with `ours`, in this process."""
    network = LoopbackNetwork()
    async with (
        PrefillPeer(
            PrefillConfig(listen="prefill"),
            device=DevicePool.allocate(guide["layout"], 16),
            components=ours,
            transport=LoopbackTransport("prefill-0", network),
            on_room=on_room,
        ),
        DecodeEngine(
            config or EngineConfig(),
            device=DevicePool.allocate(guide["layout"], 32),
            components=theirs,
            transport=LoopbackTransport("decode-0", network),
        ) as engine,
    ):
        yield engine


async def test_the_tails_that_are_asked_for_are_sent(guide: dict[str, Any]) -> None:
    """A prompt of nine pages; then again, when decode has all of it."""
    sent, ours, theirs = [], guide["components"](), guide["components"]()

    async def serve(room: Any) -> None:
        room.confirm(room.prompt)
        await room.send(range(9), start_token=0)
        sent.append({name: (one.first, one.page_count, one.requested) for name, one in room.component_pages.items()})
        await guide["send_components"](room, {at: 100 + at for at in range(2, 9)}, 7)
        await room.finish(first_token=3)
        await room.received()

    ours[0].device.k[0][100:110] = torch.arange(10.0).view(10, 1, 1, 1)
    ours[1].device.group("convolution").k[5][7] = 5.0
    async with with_components(guide, ours, theirs, serve) as engine:
        prompt = list(range(9 * 16))
        for number in range(2):
            ready = await engine.restore(DecodeRequest(request_id=f"r{number}", tokens=prompt, prefill="prefill"))
            window, state = ready.component_pages["swa"], ready.component_pages["ssm"]
            assert theirs[0].device.k[0][window.pages.tolist(), 0, 0, 0].tolist() == [float(at) for at in range(2, 9)]
            assert (theirs[1].device.group("convolution").k[5][state.record] == 5.0).all()
            left = {name: (tail.first, tail.pages) for name, tail in ready.component_pages.items()}
            await engine.finish(ready, component_pages=left)
    # Prefill hands over what the prompt's end needs; of that decode lacks all, and then nothing.
    assert sent == [{"swa": (2, 7, 7), "ssm": (8, 1, 1)}, {"swa": (2, 7, 0), "ssm": (8, 1, 0)}]


@pytest.mark.parametrize(("output", "snapshots"), [(17, {144: 0, 160: 136}), (30, {144: 0, 160: 136}), (3, {144: 0})])
async def test_snapshots_are_taken_in_spare_records_and_left(
    guide: dict[str, Any], output: int, snapshots: dict[int, int]
) -> None:
    """A model with a record that is the sum of its output tokens."""
    ours, theirs = guide["components"]()[1:], guide["components"]()[1:]
    (pools,) = theirs
    prompt = list(range(9 * 16))

    async def serve(room: Any) -> None:
        room.confirm(room.prompt)
        await room.send(range(9), start_token=0)
        await guide["send_components"](room, {}, 7)
        await room.finish(first_token=1)
        await room.received()

    def copy_record(source: int, target: int) -> None:
        pools.device.write_pages([target], pools.device.read_pages([source]))

    async def step(token: int, position: int, ready: Any, record: int) -> int:
        pools.device.k[0][record] += token
        return token + 1

    config = EngineConfig(snapshots=tidekv.SnapshotOptions(per_request=2))
    async with with_components(guide, ours, theirs, serve, config) as engine:
        ready = await engine.restore(DecodeRequest(request_id="r1", tokens=prompt, prefill="prefill"))
        said = await guide["go_on_with_snapshots"](engine, ready, step, copy_record, output)
        assert said == list(range(1, output + 1))
        await engine.wait_settled()
        components = core_of(engine).state.components
        assert components is not None
        found = {
            (at + 1) * 16: pools.device.k[0][page].flatten()[0].item()
            for node in components.index.nodes()
            for at, page in components.device["ssm"].pages_of(node).items()
        }
        assert found == snapshots
        statistics: Any = engine.statistics()["snapshots"]
        assert statistics["ssm"]["kept_prompt_end"] == 1
        assert statistics["ssm"]["kept_output_end"] == len(snapshots) - 1


@pytest.mark.parametrize(("output", "cached_tokens"), [(17, 160), (30, 160), (3, 144)])
async def test_a_window_and_a_record_go_on_and_are_left_at_the_last_full_page(
    guide: dict[str, Any], output: int, cached_tokens: int
) -> None:
    """A model with a record that is the sum of its tokens, and a window that holds the place of each token."""
    ours, theirs = guide["components"](), guide["components"]()
    window_pool, record_pool = theirs[0].device, theirs[1].device
    prompt = list(range(9 * 16))

    async def serve(room: Any) -> None:
        await room.send(range(-(-len(room.tokens) // 4 // 16)), start_token=0)
        await guide["send_components"](room, {at: at for at in range(20)}, 7)
        await room.finish(first_token=1)
        await room.received()

    def read_record(record: int) -> torch.Tensor:
        return record_pool.read_pages([record])

    def write_record(record: int, copy: torch.Tensor) -> None:
        record_pool.write_pages([record], copy)

    async def step(token: int, position: int, ready: Any, window: Any, record: int) -> int:
        assert len(ready.pages) * 16 > position
        page = window.pages[position // 16 - window.first]
        assert page in ready.component_pages["swa"].own and record in ready.component_pages["ssm"].own
        window_pool.k[0][page, position % 16] = position
        record_pool.k[0][record] += token
        return token + 1

    async with with_components(guide, ours, theirs, serve) as engine:
        ready = await engine.restore(DecodeRequest(request_id="r1", tokens=prompt, prefill="prefill", send_prompt=True))
        said = await guide["go_on"](engine, ready, step, read_record, write_record, output)
        assert said == list(range(1, output + 1))
        whole = prompt + said
        longer = DecodeRequest(request_id="r2", tokens=whole[:cached_tokens], prefill="prefill", send_prompt=True)
        ready = await engine.restore(longer)
        assert ready.sources["l1"] == cached_tokens
        seen = cached_tokens - len(prompt)
        assert record_pool.k[0][ready.component_pages["ssm"].record, 0, 0, 0] == sum(said[:seen])
        if seen:
            page = ready.component_pages["swa"].pages[-1]
            assert window_pool.k[0][page, :, 0, 0].tolist() == list(range(cached_tokens - 16, cached_tokens))
        await engine.abort("r2")


def test_every_name_that_the_guide_mentions_is_there() -> None:
    """Calls in backticks are methods of the class that the page talks about, or of one of the others."""
    import tidekv
    from tidekv.transports.prefill.prefill_room import Room

    places: list[object] = [tidekv, DecodeEngine, EngineThread, PrefillPeer, Room, EngineConfig, tidekv.ReadyRequest]
    places += [tidekv.DevicePool, tidekv.KVLayout, tidekv.PrefillThread]
    text = re.sub(r"^```.*?^```$", "", GUIDE, flags=re.MULTILINE | re.DOTALL)
    for word in re.findall(r"`([^`]+)`", text):
        for name in re.findall(r"(?:^|\.)([A-Za-z_]+)\(", word):
            assert any(hasattr(place, name) for place in places), word


async def test_the_snippet_that_reads_from_decode_computes_the_new_tokens(guide: dict[str, Any]) -> None:
    source, parts = guide["parts"]("p")["device"], guide["parts"]("d")
    computed: list[int] = []
    pages = list(range(8))

    async def compute(tokens: memoryview, start: int, pages: list[int]) -> int:
        computed.append(len(tokens))
        for position in range(start, start + len(tokens)):
            source.k[0][pages[position // 16], position % 16] = position
        assert source.k[0][pages, :, 0, 0].flatten()[: start + len(tokens)].tolist() == list(range(start + len(tokens)))
        return 5

    async def serve(room: Any) -> None:
        await guide["answer_with_reads"](peer, room, pages[: -(-room.prompt_tokens // 16)], 0, compute)
        for buffer in source.k:
            buffer.zero_()

    peer = PrefillPeer(device=source, transport=NixlTransport("p"), on_room=serve)
    guide["with_reads"](peer, source, "reads")
    config = EngineConfig(cache_peers=tidekv.CachePeerOptions(enabled=True, listen="127.0.0.1:0"))
    async with asyncio.timeout(LIMIT_S), peer, DecodeEngine(config, **parts) as engine:
        # On a busy machine a read may be late: the prompt is computed then.
        for number in range(100):
            first = [number, *range(2, 81)]
            for request_id, prompt in (("first", first), ("second", [*first, 5, 7, 8])):
                request = DecodeRequest(request_id=request_id, tokens=prompt, prefill=peer.address, send_prompt=True)
                ready = await engine.restore(request)
                await engine.finish(ready, [])
                await engine.wait_settled()
            if computed[-1] == 3:
                break
            assert computed[-1] == 83
        assert computed[-1] == 3


def test_the_snippet_of_a_prefill_thread_works(guide: dict[str, Any]) -> None:
    source, target = guide["parts"]("p")["device"], guide["parts"]("d")["device"]
    peer = PrefillPeer(device=source, transport=NixlTransport("p"))
    prompt, pages = PROMPTS[0], [5, 1, 8]
    source.write_pages(pages, torch.randint(0, 255, (3, source.layout.page_bytes)).to(torch.uint8))
    with (
        PrefillThread(peer) as prefill,
        EngineThread(
            DecodeEngine(EngineConfig(), device=target, transport=NixlTransport("d", dials=["127.0.0.1:*"]))
        ) as decode,
    ):
        decode.submit(DecodeRequest(request_id="r", tokens=prompt, prefill=prefill.address))
        step = guide["prefill_step"]
        step(prefill, "r", prompt, pages[:2], start_token=0, end_token=32)
        freed = step(prefill, "r", prompt, pages[2:], start_token=32, end_token=40)
        (restored,) = decode.poll(LIMIT_S)
        assert isinstance(restored, Restored)
        assert torch.equal(target.read_pages(restored.ready.pages[:2]), source.read_pages(pages[:2]))
        assert freed or [ended.request_id for ended in prefill.poll(LIMIT_S)] == ["r"]
