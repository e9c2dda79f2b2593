"""Deterministic simulation of the core: virtual time; simulated tiers, peers and callers; faults from a seed."""

from simulation.faults import FAULTS
from simulation.simulate import Report, SimulationFailed, simulate

__all__ = ["FAULTS", "Report", "SimulationFailed", "simulate"]
