"""Names in `lightning_fed.report`; each loads at the first access."""

from lightning_fed.report.callback import Report as Report
