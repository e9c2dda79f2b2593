"""Journal of every event that a core took, for replay, traces and explanations of a run."""

from tidekv.engine.journal.journal import Journal
from tidekv.engine.journal.recorder import Recorder, RunInfo
from tidekv.engine.journal.replayer import Replayed, Replayer, Step

__all__ = ["Journal", "Recorder", "Replayed", "Replayer", "RunInfo", "Step"]
