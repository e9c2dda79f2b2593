"""Conversations that begin with 4k tokens."""

from __future__ import annotations

from benchmarks.gpu.report import Report, Setting
from benchmarks.gpu.turns import LARGE, TINY, Turns, run_turns


def run(setting: Setting, report: Report) -> None:
    """Serve eight conversations of five turns."""
    turns = Turns(shape=LARGE, prompt_tokens=4096, conversations=8, turns=5, chunk_tokens=4096)
    if setting.short or not setting.on_cuda:
        turns = Turns(
            shape=TINY, prompt_tokens=128, conversations=2, turns=2, chunk_tokens=64, output_tokens=4, user_tokens=70
        )
    run_turns(setting, report, turns)
