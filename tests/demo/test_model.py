"""The paged model gives the tokens of transformers' own generate(), and they depend on every page."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from demo import model as paged
from tidekv.engine.cli.main import app
from tidekv.states.errors import InvalidConfig, InvalidRequest

SHAPE = paged.ModelShape()


@pytest.fixture(scope="module")
def llama() -> paged.Llama:
    return paged.build_llama(SHAPE)


def pool(pages: int, page_size: int, shape: paged.ModelShape = SHAPE) -> Any:  # A stand-in with only k and v.
    """Pages full of NaN: whatever the model reads without having written it shows."""
    size = (pages, page_size, shape.num_kv_heads, shape.head_dim)
    k, v = ([torch.full(size, float("nan"), dtype=torch.float64) for _ in range(shape.num_layers)] for _ in range(2))
    return SimpleNamespace(k=k, v=v)


def prompt(seed: int, tokens: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(SHAPE.vocab_size) for _ in range(tokens)]


def prefill(model: paged.PagedModel, tokens: Sequence[int], pages: Sequence[int], chunk: int) -> int:
    for start in range(0, len(tokens), chunk):
        logits = model.prefill_chunk(tokens[start : start + chunk], start, pages)
    return paged.greedy(logits).token


def decode(model: paged.PagedModel, first: int, position: int, pages: Sequence[int], count: int) -> list[int]:
    out = [first]
    for step in range(count - 1):
        out.append(paged.greedy(model.decode_step(out[-1], position + step, pages)).token)
    return out


@pytest.mark.parametrize("length", [1, 16, 97])
def test_chunked_prefill_and_paged_decode_equal_generate(llama: paged.Llama, length: int) -> None:
    tokens = prompt(length, length)
    wanted = paged.generate_in_one_process(llama, tokens, 24)
    # Chunks that end within pages, at their ends, and behind the prompt.
    for page_size, chunk in ((1, 7), (8, 16), (8, 200), (16, 7), (16, 16)):
        model = paged.PagedModel(llama, pool(300, page_size))
        pages = random.Random(page_size).sample(range(300), -(-(length + 24) // page_size))
        first = prefill(model, tokens, pages, chunk)
        assert decode(model, first, length, pages, 24) == wanted, (page_size, chunk)


def test_tokens_depend_on_the_whole_prompt_and_do_not_repeat(llama: paged.Llama) -> None:
    tokens = prompt(5, 96)
    wanted = paged.generate_in_one_process(llama, tokens, 48)
    assert len(set(wanted)) > 24
    for position in (0, 30, 60, 95):
        changed = list(tokens)
        changed[position] = (changed[position] + 1) % SHAPE.vocab_size
        assert paged.generate_in_one_process(llama, changed, 48) != wanted, position


def test_a_damaged_page_changes_the_tokens(llama: paged.Llama) -> None:
    tokens = prompt(6, 128)
    wanted = paged.generate_in_one_process(llama, tokens, 32)
    for damaged in (0, 7):
        for damage in (lambda page: page.roll(1, 0), lambda page: page * 0):
            model = paged.PagedModel(llama, pool(16, 16))
            pages = list(range(15, 5, -1))
            first = prefill(model, tokens, pages, 64)
            layer = model.pool.k[2]
            layer[pages[damaged]] = damage(layer[pages[damaged]])
            assert decode(model, first, 128, pages, 32) != wanted, damaged


def test_a_batch_equals_its_requests_one_by_one(llama: paged.Llama) -> None:
    model = paged.PagedModel(llama, pool(64, 8))
    prompts = [prompt(seed, length) for seed, length in ((1, 1), (2, 40), (3, 63), (4, 64))]
    tables = [list(range(row * 16, row * 16 + 16)) for row in range(4)]
    outputs = [[prefill(model, tokens, table, 32)] for tokens, table in zip(prompts, tables, strict=True)]
    for _ in range(20):
        steps = [
            paged.DecodeStep(token=output[-1], position=len(tokens) + len(output) - 1, pages=table)
            for tokens, output, table in zip(prompts, outputs, tables, strict=True)
        ]
        for output, logits in zip(outputs, model.decode_batch(steps), strict=True):
            output.append(paged.greedy(logits).token)
    for tokens, output in zip(prompts, outputs, strict=True):
        assert output == paged.generate_in_one_process(llama, tokens, 21)


def test_a_model_is_the_same_whatever_the_global_seed(llama: paged.Llama) -> None:
    torch.manual_seed(1)
    again = paged.build_llama(SHAPE)
    for (name, ours), theirs in zip(llama.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert paged.ModelShape(seed=1).fingerprint != SHAPE.fingerprint


def test_margin_is_the_gap_between_the_two_best() -> None:
    choice = paged.greedy(torch.tensor([0.5, 3.0, 2.75, -9.0], dtype=torch.float64))
    assert choice == paged.TokenChoice(token=1, margin=0.25)
    assert paged.greedy(torch.tensor([1.0, 1.0])) == paged.TokenChoice(token=0, margin=0.0)


def test_bad_calls_are_refused_and_write_nothing(llama: paged.Llama) -> None:
    model = paged.PagedModel(llama, pool(4, 8))
    with pytest.raises(InvalidRequest, match="2 pages of 8 tokens cannot hold 17 positions"):
        model.prefill_chunk(prompt(1, 17), 0, [0, 1])
    with pytest.raises(InvalidRequest, match="page 4 is not in the pool of 4 pages"):
        model.prefill_chunk([1], 0, [4])
    with pytest.raises(InvalidRequest, match="no tokens"):
        model.prefill_chunk([], 0, [0])
    with pytest.raises(InvalidRequest, match="no steps"):
        model.decode_batch([])
    assert all(bool(tensor.isnan().all()) for tensor in model.pool.k)
    with pytest.raises(InvalidConfig, match=r"kv_heads"):
        paged.PagedModel(llama, pool(4, 8, paged.ModelShape(num_kv_heads=4)))


def test_without_transformers_the_error_names_the_remedy_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InvalidConfig, match=r"pip install 'tidekv\[demo\]'"):
        paged.build_llama(SHAPE)
    answer = CliRunner().invoke(app, ["run"])
    assert isinstance(answer.exception, InvalidConfig)
    assert answer.output == ""  # Not even a progress bar.
