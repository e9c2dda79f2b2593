"""The example service with a model directory, storage, and a prefill worker that it did not start."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from benchmarks.ports import free_address
from tests.support import warm_python

pytestmark = [pytest.mark.nixl, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
PROMPT = "To be, or not to be, that is the question. " * 8


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    """A tiny Llama in float32 and a byte-level tokenizer, saved as `transformers` saves them."""
    # Here, so that a worker that runs none of these tests does not import them.
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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
def distant_prefill(model: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """A prefill worker started apart from the service: where it will listen, and how to wait until it does."""
    address = free_address()
    options = json.dumps({"model": str(model), "listen": address})
    command = [warm_python.executable(), "-m", "examples.service.prefill", options]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:

        def wait() -> None:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == address

        try:
            yield address, wait
        finally:
            process.terminate()
        assert process.wait(60) == 0


def test_a_model_directory_is_served_with_a_prefill_worker_that_runs_elsewhere(
    serving, model_directory: Path, tmp_path: Path
) -> None:
    options = ("--model", str(model_directory), "--storage", f"file:{tmp_path / 'kv'}?capacity=64MiB")
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_directory)
    with (
        distant_prefill(model_directory) as (address, wait),
        serving(tmp_path / "log", *options, "--prefill", address) as service,
    ):
        wait()
        assert service.model == "tiny-llama"
        answer = service.complete(PROMPT, 12)
        assert answer.usage.prompt_tokens == len(tokenizer.encode(PROMPT))
        assert answer.choices[0].text == tokenizer.decode(answer.choices[0].token_ids)
        stream = service.complete(PROMPT, 12, stream=True)
        assert "".join(choice.text for chunk in stream for choice in chunk.choices) == answer.choices[0].text
        assert service.complete(PROMPT, 1).usage.prompt_tokens_details.cached_tokens > 300
