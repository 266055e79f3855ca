"""Evaluation where the data are: what clients send of it, and the values over all of them.

Read :mod:`.report` (the message), :mod:`.data_pass` (what a client does, and what the server makes of it), and then
:mod:`.client_evaluation`, the callback.
"""

from lightning_fed.callbacks.evaluation.client_evaluation import ClientEvaluation as ClientEvaluation
from lightning_fed.callbacks.evaluation.report import EvaluationReport as EvaluationReport
from lightning_fed.callbacks.evaluation.site_matrix import SiteMatrix as SiteMatrix
