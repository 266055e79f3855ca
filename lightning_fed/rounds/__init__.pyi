"""Names in `lightning_fed.rounds` for features, each imported from the defining file."""

# ruff: noqa: F401

from lightning_fed.rounds.client_errors import client_fault
from lightning_fed.rounds.client_models import Answers
from lightning_fed.rounds.loop import VisitPlan
from lightning_fed.rounds.round import Round
from lightning_fed.rounds.visit_driver import VisitDriver
from lightning_fed.rounds.visit_flow import (
    Answer,
    Ask,
    ClientVisit,
    Flow,
    Step,
    ask_server,
    run_to_step,
    server_callbacks,
)
