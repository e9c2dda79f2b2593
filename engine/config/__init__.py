"""Configuration from a file, environment variables and flags, with checks and the origin of each value."""

from tidekv.engine.config.load import Loaded, OptionError, gather, load
from tidekv.engine.config.sections import Configuration

__all__ = ["Configuration", "Loaded", "OptionError", "gather", "load"]
