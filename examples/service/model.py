"""The model of both workers: small random weights by default, or a directory as saved by `transformers`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch

from tidekv import InvalidConfig, KVLayout
from tidekv.engine.demo.model import Llama, ModelShape, build_llama


class Tokenizer(Protocol):
    """Conversion between text and tokens."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer."""
        ...


class ByteTokenizer:
    """One token per byte of UTF-8, for the random model."""

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Tokenizer`. Bytes that are not valid UTF-8 become U+FFFD."""
        return bytes(tokens).decode(errors="replace")


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
    return _served("tidekv-random-llama", build_llama(shape), ByteTokenizer(), shape.fingerprint, page_size)


def _from_directory(directory: Path, page_size: int) -> ServedModel:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (directory / "config.json").is_file():
        raise InvalidConfig(f"{directory} is not a model directory: it has no config.json")
    llama = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    llama = llama.eval().requires_grad_(False)
    tokenizer = _DirectoryTokenizer(AutoTokenizer.from_pretrained(directory, local_files_only=True))
    # Names and sizes of the weights stand for their content, which would take too long to read twice.
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for weights in sorted(directory.glob("*.safetensors")):
        digest.update(f"{weights.name} {weights.stat().st_size}\n".encode())
    return _served(directory.resolve().name, llama, tokenizer, digest.hexdigest(), page_size)


class _DirectoryTokenizer:
    def __init__(self, tokenizer: object) -> None:
        self._tokenizer = cast("Tokenizer", tokenizer)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens))


def _served(name: str, llama: Llama, tokenizer: Tokenizer, fingerprint: str, page_size: int) -> ServedModel:
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
    )
