"""Configuration from one file, environment variables and flags, in that order: checked, named, and told where from."""

from tidekv.engine.config.load import Loaded, Mistake, gather, load
from tidekv.engine.config.sections import Configuration

__all__ = ["Configuration", "Loaded", "Mistake", "gather", "load"]
