"""Ends a fit after too many rounds with failed clients and without a new global model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_fed.console import round_number
from lightning_fed.messages import Client
from lightning_fed.process_group import SINGLE_PROCESS, ProcessGroup
from lightning_fed.server.server import RoundReport


@dataclass
class FailedRounds:
    """Counts consecutive rounds without a new global model, and ends the fit at a limit.

    Args:
        in_a_row: Number of failed rounds since the last new global model.
        has_trained: Whether any round has succeeded.
        message: Error message about the failed rounds; empty if :meth:`count` is called with ``limit=None``.
        cause: First client's exception in the last failed round.
    """

    in_a_row: int = 0
    has_trained: bool = False
    message: str = ""
    cause: Exception | None = None

    def count(
        self,
        report: RoundReport,
        limit: int | None,
        min_clients: int = 1,
        num_clients: int = 1,
        errors: Mapping[Client, Exception] | None = None,
        ranks: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        """Counts a round without a new global model. Raises an error after ``limit`` such rounds in a row.

        Rounds with fewer than ``min_clients`` clients because of dropouts are not counted. ``errors`` contains the
        exceptions of clients in this process. With ``limit=None`` no error is raised.

        Raises:
            Exception: If all clients of a round (at least two, or the federation's only client) fail with the same type
                of exception. The first one in this process is raised, or ``RuntimeError`` if this process has none.
            RuntimeError: If ``limit`` rounds in a row have failed.
        """
        num_reports = len(report.received) + len(report.failed)
        if num_reports < min_clients and (report.received or not report.failed):  # dropouts
            return
        self.in_a_row += 1
        if limit is None:
            return
        errors = errors or {}
        kinds = {
            client: kind
            for part in ranks.gather({client: _kind(error) for client, error in errors.items()})
            for client, kind in part.items()
        }
        self.cause = next((errors[client] for client in report.failed if client in errors), None)
        self.message = self._describe(report)
        is_common = kinds.keys() >= report.failed.keys() and len(set(kinds.values())) == 1
        if is_common and not report.received and len(report.failed) >= min(2, num_clients):
            if self.cause is None:
                raise RuntimeError(self.message)
            self.cause.add_note(
                f"In round {round_number(report.round)} all {len(report.failed)} clients failed with this error. With "
                "`max_failed_rounds=None` the fit continues after any failure."
            )
            raise self.cause
        if self.in_a_row >= limit:
            raise RuntimeError(self.message) from self.cause

    def _describe(self, report: RoundReport) -> str:
        rounds = "1 failed round" if self.in_a_row == 1 else f"{self.in_a_row} consecutive failed rounds"
        reason = "the aggregate was discarded, see the log"
        if report.failed:
            client, fault = next(iter(report.failed.items()))
            number = len(report.failed)
            reason = (
                f"{number} of {number + len(report.received)} clients failed, for example client {client!r}: {fault}"
            )
        return (
            f"There is no new model after {rounds} (the last is round {round_number(report.round)}): {reason}. Correct "
            "the cause, or continue after any failure with `max_failed_rounds=None`."
        )


def _kind(error: Exception) -> str:
    return f"{type(error).__module__}.{type(error).__qualname__}"
