"""Names in `lightning_fed.server` for features, each imported from the defining file."""

# ruff: noqa: F401

from lightning_fed.server.schedule import Cohort, Schedule, SecretSampling, Visit, count_visit_batches, default_seed
from lightning_fed.server.server import RoundReport, Server, ServerInterface
