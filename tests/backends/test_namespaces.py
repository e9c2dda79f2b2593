"""Joined names of namespaces: what this code makes is known as such."""

from __future__ import annotations

import pytest

from tidekv.backends.keys.chain import namespace_seed
from tidekv.backends.keys.namespaces import is_namespace, join_namespaces, namespace_of_seed


@pytest.mark.parametrize("engine", ["", "fleet", "é:1"])
@pytest.mark.parametrize("request_name", ["", "fleet", "tenant", "3:x"])
@pytest.mark.parametrize("lora_name", ["", "adapter", "1:"])
def test_what_is_joined_here_is_a_namespace(engine: str, request_name: str, lora_name: str) -> None:
    joined = join_namespaces(engine, request_name, lora_name)
    assert is_namespace(joined) and is_namespace(namespace_of_seed(namespace_seed(joined)))
