"""HTML report for a fit."""

from lightning_fed.report.callback import Report as Report
