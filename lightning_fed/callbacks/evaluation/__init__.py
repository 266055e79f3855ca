"""Evaluation on the clients' own data.

Clients send sums and metric states instead of means, so values over all clients equal the values from one pass over the
pooled data. :class:`~lightning_fed.callbacks.ClientEvaluation` controls the evaluation.
"""

from lightning_fed.callbacks.evaluation.client_evaluation import ClientEvaluation as ClientEvaluation
from lightning_fed.callbacks.evaluation.report import EvaluationReport as EvaluationReport
from lightning_fed.callbacks.evaluation.site_matrix import SiteMatrix as SiteMatrix
