"""The arithmetic of a page, and what a layout refuses."""

from __future__ import annotations

import pytest
import torch

from tidekv.backends.layout import DTYPES, KVLayout
from tidekv.states.errors import InvalidConfig

GOOD = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 8, "dtype": "float16", "page_size": 4}


@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_follow_from_shape_and_dtype(dtype: str) -> None:
    layout = KVLayout(**{**GOOD, "dtype": dtype})
    one_piece = torch.empty(layout.piece_shape, dtype=layout.torch_dtype)
    assert layout.piece_bytes == one_piece.nbytes
    assert layout.pieces == (one_piece.nbytes,) * 6
    assert layout.page_bytes == 6 * one_piece.nbytes


def test_mla_has_one_piece_a_layer() -> None:
    layout = KVLayout(**{**GOOD, "num_kv_heads": 1, "head_dim": 576, "kind": "mla"})
    assert layout.pieces == (4 * 576 * 2,) * 3
    assert layout.tensors_per_layer == 1


def test_identity_names_everything_that_must_agree() -> None:
    layout = KVLayout(**GOOD)
    identity = layout.identity("llama")
    assert (identity.model, identity.kind, identity.dtype, identity.page_size) == ("llama", "mha", "float16", 4)
    assert (identity.layers, identity.kv_heads, identity.head_dim) == (3, 2, 8)
    assert (identity.page_bytes, identity.piece_bytes) == (layout.page_bytes, layout.pieces)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 0),
        ("num_layers", True),
        ("num_kv_heads", -1),
        ("head_dim", 64.0),
        ("page_size", 65_537),
        ("page_size", "16"),
        ("dtype", "float12"),
        ("dtype", torch.float16),
        ("dtype", ["float16"]),
        ("kind", "gqa"),
        ("kind", None),
    ],
)
def test_wrong_field_is_named_with_what_is_allowed(field: str, value: object) -> None:
    with pytest.raises(InvalidConfig, match=rf"{field} must be .* not "):
        KVLayout(**{**GOOD, field: value})


def test_mla_with_several_heads_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="num_kv_heads must be 1 for kind 'mla', not 2"):
        KVLayout(**GOOD, kind="mla")


def test_layouts_are_values() -> None:
    assert KVLayout(**GOOD) == KVLayout(**GOOD)
    assert KVLayout(**GOOD) != KVLayout(**{**GOOD, "dtype": "bfloat16"})
    with pytest.raises(AttributeError):
        KVLayout(**GOOD).page_size = 8  # type: ignore[misc]  # That it cannot be set is the point.


def test_a_page_of_a_model_without_full_attention_has_one_unused_byte_for_each_token() -> None:
    layout = KVLayout.empty(page_size=16)
    assert (layout.page_bytes, layout.page_size, layout.piece_count) == (16, 16, 1)
    assert layout.identity("mamba") == KVLayout.empty(page_size=16).identity("mamba")
