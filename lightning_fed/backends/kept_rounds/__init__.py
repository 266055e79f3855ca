"""Kept rounds: repeat a round from the kept updates, and certify a run."""

from lightning_fed.backends.kept_rounds.kept_round import KeepRounds as KeepRounds

__all__ = ["KeepRounds"]
