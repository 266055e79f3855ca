"""Federated rounds: start, client visits, aggregation and log."""

from lightning_fed.rounds.batch_norm import adapt as adapt
from lightning_fed.rounds.batch_norm import batch_norm_layers as batch_norm_layers
from lightning_fed.rounds.batch_norm import client_statistics as client_statistics
from lightning_fed.rounds.batch_norm import freeze_batch_norm as freeze_batch_norm
from lightning_fed.rounds.batch_norm import layers_in_training as layers_in_training
from lightning_fed.rounds.batch_norm import load_own_model as load_own_model
from lightning_fed.rounds.batch_norm import measure_statistics as measure_statistics
from lightning_fed.rounds.batch_norm import measured_layers as measured_layers
from lightning_fed.rounds.batch_norm import pool_statistics as pool_statistics
from lightning_fed.rounds.batch_norm import warn_of_report as warn_of_report
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
