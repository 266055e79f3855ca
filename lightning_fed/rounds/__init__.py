"""Federated rounds: start, client visits, aggregation and log."""

from lightning_fed.rounds.client_errors import client_fault as client_fault
from lightning_fed.rounds.client_models import Answers as Answers
from lightning_fed.rounds.round import Round as Round
from lightning_fed.rounds.visit_driver import VisitDriver as VisitDriver
from lightning_fed.rounds.visit_driver import VisitPlan as VisitPlan
from lightning_fed.rounds.visit_flow import Answer as Answer
from lightning_fed.rounds.visit_flow import Ask as Ask
from lightning_fed.rounds.visit_flow import ClientVisit as ClientVisit
from lightning_fed.rounds.visit_flow import Flow as Flow
from lightning_fed.rounds.visit_flow import Step as Step
from lightning_fed.rounds.visit_flow import ask_server as ask_server
from lightning_fed.rounds.visit_flow import run_to_step as run_to_step
