"""Names in `lightning_fed.backends.kept_rounds`; each loads at the first access."""

from lightning_fed.backends.kept_rounds.kept_round import KeepRounds as KeepRounds
