"""An engine on a thread of its own hands windows and states over, and takes back what the scheduler leaves."""

from __future__ import annotations

import pytest

from tidekv import DecodeEngine, DecodeRequest, EngineConfig, EngineThread, Finished, InvalidRequest, Restored


def test_a_scheduler_leaves_a_window_and_a_record(made_parts) -> None:
    parts, start_prefill = made_parts
    prompt = list(range(24))
    request = {"tokens": prompt, "prefill": "prefill", "send_prompt": True}
    with EngineThread(DecodeEngine(EngineConfig(), **parts)) as thread:
        stop_prefill = start_prefill(thread)
        try:
            thread.submit(DecodeRequest(request_id="r1", **request))
            (restored,) = thread.poll(30.0)
            assert isinstance(restored, Restored)
            ready = restored.ready
            left = {name: (tail.first, tail.pages.tolist()) for name, tail in ready.component_pages.items()}
            assert set(left) == {"window", "state"}
            with pytest.raises(InvalidRequest, match="page 99 at position 5"):
                thread.finish(ready, component_pages={**left, "window": (5, [99])})
            thread.finish(ready, component_pages=left)
            # What the caller does with its lists afterwards is its own business.
            left["window"][1].clear()
            (finished,) = thread.poll(30.0)
            assert isinstance(finished, Finished)
            thread.submit(DecodeRequest(request_id="r2", **request))
            (restored,) = thread.poll(30.0)
            assert isinstance(restored, Restored)
            assert restored.ready.sources["l1"] == len(prompt)
            thread.retract(restored.ready)
            thread.poll(30.0)
        finally:
            stop_prefill()
