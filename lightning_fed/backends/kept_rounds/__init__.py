"""Kept rounds: stores updates and models, to repeat a round and to certify a run."""

from lightning_fed.backends.kept_rounds.kept_round import KeepRounds as KeepRounds

__all__ = ["KeepRounds"]
