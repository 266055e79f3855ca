"""Errors in a visit: told apart into the client's, which is left out, and those after which nothing can go on."""

from __future__ import annotations

from lightning_fed.console import round_number
from lightning_fed.data.population import PlannedVisit
from lightning_fed.errors import ClientFault, VisitTimeout, describe

_LOST_DEVICE = ("device-side assert", "an illegal memory access", "CUDA error: unspecified launch failure")


def client_fault(error: Exception, planned: PlannedVisit) -> str | None:
    """Reason to leave a client out for an error in the module's step; ``None`` where the program cannot go on.

    An error in the step of one client is that client's: its labels are out of range, its images of another size, its
    batches too large for the device. One of all clients ends the fit (:class:`FailedRounds`). After some errors a GPU
    answers nobody in this process, so that nothing but a new process helps.

    Args:
        error: The error that the step raised.
        planned: The client's visit.

    """
    if any(text in str(error) for text in _LOST_DEVICE):
        return None
    if isinstance(error, ClientFault | VisitTimeout):
        return str(error)
    if _is_of_batch_norm(error):
        if planned.num_samples == 1:
            return "it has a single example, on which BatchNorm cannot train"
        return f"its training step raised {describe(error)}: {_ODD_BATCH}"
    return f"its training step raised {describe(error)}"


_ODD_BATCH = (
    "its loader gave a batch of a single example, on which BatchNorm cannot train; set `drop_last=True` or another"
    " batch size on that loader, or give the client as a data set, whose trailing single example joins the batch before"
)


def describe_visit(error: BaseException, planned: PlannedVisit) -> str:
    """Note for :meth:`BaseException.add_note`: the visit that an error ended, and what helps.

    Args:
        error: The error that ended the fit.
        planned: The visit that was under way.

    """
    note = f"In round {round_number(planned.visit.round)}, in the visit of client {planned.visit.client!r}."
    if any(text in str(error) for text in _LOST_DEVICE):
        return (
            f"{note} The GPU may report it some steps late, and does not work any more in this process: labels out of"
            " range are the usual cause, of this client or of the one before. A fit that is started again goes on from"
            " its last checkpoint."
        )
    return note


def _is_of_batch_norm(error: BaseException) -> bool:
    return "more than 1 value per channel" in str(error)
