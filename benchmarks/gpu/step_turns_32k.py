"""Conversations that begin with 32k tokens."""

from __future__ import annotations

from benchmarks.gpu.report import Report, Setting
from benchmarks.gpu.turns import LARGE, Turns, run_turns


def run(setting: Setting, report: Report) -> None:
    """Serve four conversations of four turns."""
    prompt_tokens = 8192 if setting.short else 32_768
    run_turns(
        setting,
        report,
        Turns(shape=LARGE, prompt_tokens=prompt_tokens, conversations=4, turns=4, chunk_tokens=4096),
    )
