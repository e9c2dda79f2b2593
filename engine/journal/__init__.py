"""The journal: every event that a core took, written so that the run can be replayed, seen and explained."""

from tidekv.engine.journal.journal import Journal
from tidekv.engine.journal.recorder import Recorder
from tidekv.engine.journal.replayer import Replayed, Replayer, Step

__all__ = ["Journal", "Recorder", "Replayed", "Replayer", "Step"]
