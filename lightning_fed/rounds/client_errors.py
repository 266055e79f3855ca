"""Errors in a visit: told apart into the client's, which is left out, and the program's, which end the fit."""

from __future__ import annotations

from lightning_fed.data.population import PlannedVisit


def client_fault(error: Exception, planned: PlannedVisit) -> str | None:
    """Reason to leave a client out for an error in the module's step; ``None`` where the error is not the client's.

    Args:
        error: The error that the step raised.
        planned: The client's visit.

    """
    if planned.num_samples == 1 and _is_of_batch_norm(error):
        return "it has a single example, on which BatchNorm cannot train"
    return None


def describe_visit(error: BaseException, planned: PlannedVisit) -> str:
    """Note for :meth:`BaseException.add_note`: the visit that an error ended, and what helps.

    Args:
        error: The error that ended the fit.
        planned: The visit that was under way.

    """
    note = f"In round {planned.visit.round}, in the visit of client {planned.visit.client!r}."
    if not _is_of_batch_norm(error):
        return note
    if planned.num_samples == 1:
        return (
            f"{note} It has a single example, on which BatchNorm cannot train: leave such clients out, or convert the"
            " model with `lightning_fed.modules.to_group_norm`."
        )
    return (
        f"{note} Its loader gave a batch of a single example, on which BatchNorm cannot train: set `drop_last=True` or"
        " another batch size on that loader, or give the client as a data set, whose trailing single example joins the"
        " batch before it."
    )


def _is_of_batch_norm(error: BaseException) -> bool:
    return "more than 1 value per channel" in str(error)
