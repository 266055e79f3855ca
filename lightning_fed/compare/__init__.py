"""Compares methods on one recipe, with equal clients, rounds and initial weights."""

from lightning_fed.compare.method_options import CENTRAL as CENTRAL
from lightning_fed.compare.method_options import MethodChoice as MethodChoice
from lightning_fed.compare.method_options import method_choices as method_choices
from lightning_fed.compare.plan import Plan as Plan
from lightning_fed.compare.plan import Progress as Progress
from lightning_fed.compare.plan import load_results as load_results
from lightning_fed.compare.plan import run_comparison as run_comparison
from lightning_fed.compare.report import Cell as Cell
from lightning_fed.compare.report import draw as draw
from lightning_fed.compare.report import markdown as markdown
from lightning_fed.compare.report import summarize as summarize
from lightning_fed.compare.report import write_report as write_report
from lightning_fed.study.answers import LOCAL as LOCAL

__all__ = [
    "CENTRAL",
    "LOCAL",
    "Cell",
    "MethodChoice",
    "Plan",
    "Progress",
    "draw",
    "load_results",
    "markdown",
    "method_choices",
    "run_comparison",
    "summarize",
    "write_report",
]
