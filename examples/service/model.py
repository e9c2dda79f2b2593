"""The model of both workers: small random weights by default, or a directory as saved by `transformers`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from demo.model import Llama, ModelShape, build_llama
from examples.service.options import check_model_directory
from examples.service.phrases import Phrases
from tidekv import InvalidRequest, KVLayout


class Tokenizer(Protocol):
    """Conversion between text and tokens."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer."""
        ...

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Return the tokens of a conversation of (role, text), up to where the answer begins.

        Raises InvalidRequest if the model has no template for conversations.
        """
        ...


class ByteTokenizer:
    """One token per byte of UTF-8, for the random model."""

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Tokenizer`. Bytes that are not valid UTF-8 become U+FFFD."""
        return bytes(tokens).decode(errors="replace")

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """See `Tokenizer`. A longer conversation begins with the tokens of the shorter one and its answer."""
        lines = [f"{role.capitalize()}: {text}\n" for role, text in messages]
        return self.encode("".join(lines) + "Assistant:")


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """A model on this process's device, with the properties that the engine needs."""

    name: str
    llama: Llama
    tokenizer: Tokenizer
    layout: KVLayout
    fingerprint: str
    """Equal in both workers if and only if their KV can be exchanged. Compared at each hand-over."""
    context_tokens: int
    end_tokens: frozenset[int]
    is_random: bool
    """The model has learned nothing."""

    def chat_phrases(self) -> Phrases | None:
        """Return what restricts one answer in a chat; None for a model that was trained."""
        return Phrases() if self.is_random else None

    @property
    def vocabulary(self) -> int:
        """Number of tokens in the vocabulary."""
        return int(self.llama.config.vocab_size)


def load(directory: str, *, page_size: int) -> ServedModel:
    """Load a model directory.

    Without one, build the random model: equal in every process, float64, 0.6 M parameters.
    """
    if directory:
        return _from_directory(Path(directory), page_size)
    shape = ModelShape(vocab_size=256)
    llama = build_llama(shape)
    return _served("tidekv-random-llama", llama, ByteTokenizer(), shape.fingerprint, page_size, is_random=True)


def _from_directory(directory: Path, page_size: int) -> ServedModel:
    check_model_directory(str(directory))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    llama = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    llama = llama.eval().requires_grad_(False)
    tokenizer = _DirectoryTokenizer(AutoTokenizer.from_pretrained(directory, local_files_only=True))
    # Names and sizes of the weights stand for their content, which would take too long to read twice.
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for weights in sorted(directory.glob("*.safetensors")):
        digest.update(f"{weights.name} {weights.stat().st_size}\n".encode())
    return _served(directory.resolve().name, llama, tokenizer, digest.hexdigest(), page_size, is_random=False)


class _DirectoryTokenizer:
    def __init__(self, tokenizer: Any) -> None:  # A transformers tokenizer; the package is not type-checked.
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def decode(self, tokens: Sequence[int]) -> str:
        return cast("str", self._tokenizer.decode(list(tokens)))

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        if not self._tokenizer.chat_template:
            raise InvalidRequest("this model's tokenizer has no chat template: use /v1/completions")
        turns = [{"role": role, "content": text} for role, text in messages]
        # As text first: the return type of the call with tokens differs between versions of transformers.
        text = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _served(
    name: str, llama: Llama, tokenizer: Tokenizer, fingerprint: str, page_size: int, *, is_random: bool
) -> ServedModel:
    config = llama.config
    ends = llama.generation_config.eos_token_id
    layout = KVLayout(
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=str(llama.dtype).removeprefix("torch."),
        page_size=page_size,
    )
    return ServedModel(
        name=name,
        llama=llama,
        tokenizer=tokenizer,
        layout=layout,
        fingerprint=fingerprint,
        context_tokens=config.max_position_embeddings,
        end_tokens=frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends),
        is_random=is_random,
    )
