"""A service with a model directory and storage: it drains when it is told to stop, and what it knew is there again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

pytestmark = [pytest.mark.nixl, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
PROMPT = "To be, or not to be, that is the question. " * 8


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    """A tiny Llama in float32 and a byte-level tokenizer, saved as `transformers` saves them."""
    directory = tmp_path / "tiny-llama"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@contextmanager
def distant_prefill(model: Path) -> Iterator[str]:
    """A prefill worker that is nobody's child; gives its address."""
    options = json.dumps({"model": str(model)})
    command = [sys.executable, "-m", "examples.service.prefill", options]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.terminate()
        assert process.wait(60) == 0


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_sigterm_answers_what_was_accepted_and_the_next_service_finds_the_kv(
    serving, model_directory: Path, tmp_path: Path
) -> None:
    options = ("--model", str(model_directory), "--storage", f"file:{tmp_path / 'kv'}?capacity=64MiB")
    with serving(tmp_path / "log", *options) as service:
        assert service.model == "tiny-llama"
        known = service.complete(PROMPT, 8)
        stream = service.complete(PROMPT, 400, stream=True)
        first = next(iter(stream)).choices[0]
        _, health = service.health()
        service.process.send_signal(signal.SIGTERM)
        with httpx.Client(base_url=service.url) as client:
            while (answer := client.get("/health")).status_code == 200:
                pass
            assert answer.json()["status"] == "draining"
            with pytest.raises(openai.InternalServerError, match="shutting down") as refused:
                service.tokens(PROMPT)
            assert refused.value.status_code == 503
            assert refused.value.response.headers["retry-after"] == "1"
        choices = [first, *(choice for chunk in stream for choice in chunk.choices)]
        assert sum(len(choice.token_ids) for choice in choices) == 400
        assert choices[-1].finish_reason == "length"
        assert service.process.wait(60) == 0
        deadline = time.monotonic() + 30
        while is_alive(health["prefill"]["pid"]):
            assert time.monotonic() < deadline
    with distant_prefill(model_directory) as at, serving(tmp_path / "log", *options, "--prefill", at) as service:
        again = service.complete(PROMPT, 8)
        assert again.choices[0].text == known.choices[0].text
        assert again.usage.sources["l3"] > 300
