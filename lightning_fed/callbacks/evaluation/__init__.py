"""Evaluation on the clients' data. Clients send sums and metric states, so values over all clients are exact."""

from lightning_fed.callbacks.evaluation.client_evaluation import ClientEvaluation as ClientEvaluation
from lightning_fed.callbacks.evaluation.report import EvaluationReport as EvaluationReport
from lightning_fed.callbacks.evaluation.site_matrix import SiteMatrix as SiteMatrix
