"""The example of the README runs, and its diagram is that of the table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tidekv import DevicePool, KVLayout, NixlTransport, PrefillPeer
from tidekv.engine.demo.synthetic_prefill import SyntheticPrefill
from tidekv.states.request.table import diagram

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_diagram_is_the_tables() -> None:
    assert blocks("mermaid") == [diagram()]


@pytest.mark.nixl
async def test_the_example_restores_a_prompt_over_nixl(tmp_path: Path) -> None:
    (example,) = blocks("python")
    names: dict[str, object] = {"directory": tmp_path}
    exec(compile(example, "README.md", "exec"), names)
    layout = KVLayout(num_layers=4, num_kv_heads=2, head_dim=32, dtype="float32", page_size=16)
    pool = DevicePool.allocate(layout, 64)
    prefill = SyntheticPrefill(pool, vocabulary=1000)
    async with PrefillPeer(device=pool, transport=NixlTransport("prefill-0"), on_room=prefill.serve) as peer:
        sources = await names["serve"](list(range(100)), peer.address)  # type: ignore[operator]  # The example's own.
    assert sources == {"l1": 0, "l2": 0, "l3": 0, "transfer": 100}
