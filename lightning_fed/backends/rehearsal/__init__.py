"""Rehearsal: runs a deployment's real server and clients in simulated time, with simulated faults."""

from lightning_fed.backends.rehearsal.kept_rounds import KeepRounds as KeepRounds

__all__ = ["KeepRounds"]
