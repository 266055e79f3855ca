"""Classification of errors in a client's training: faults of one client, or errors that end the fit."""

from __future__ import annotations

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed.console import round_number
from lightning_fed.data.population import PlannedVisit
from lightning_fed.errors import ClientFault, VisitTimeout, describe
from lightning_fed.messages import State
from lightning_fed.model.entries import identical_entries

_LOST_DEVICE = ("device-side assert", "an illegal memory access", "CUDA error: unspecified launch failure")


def client_fault(error: Exception, planned: PlannedVisit) -> str | None:
    """Returns the reason to exclude a client after an error in a training step; ``None`` if the fit must end.

    A client may have invalid labels, images of another size, or batches too large for the device. If all clients fail,
    :class:`FailedRounds` ends the fit. Errors after which the process cannot use the GPU also end the fit.
    """
    if any(text in str(error) for text in _LOST_DEVICE):
        return None
    if isinstance(error, ClientFault | VisitTimeout):
        return str(error)
    if "more than 1 value per channel" in str(error):  # message raised by BatchNorm
        if planned.num_samples == 1:
            return "the client has a batch with a single example, on which BatchNorm cannot train"
        return f"the client's training step raised {describe(error)}: {_ODD_BATCH}"
    return f"the client's training step raised {describe(error)}"


_ODD_BATCH = (
    "the client's loader returned a batch with a single example, on which BatchNorm cannot train: set "
    "`drop_last=True` or "
    "another batch size on that loader, or pass the client's data set, whose single trailing example is merged into "
    "the previous batch"
)


def describe_visit(error: BaseException, planned: PlannedVisit) -> str:
    """Formats a note for an exception in a client's training: client, round and batch, and a remedy."""
    note = f"Raised in round {round_number(planned.visit.round)}, in the visit of client {planned.visit.client!r}."
    if any(text in str(error) for text in _LOST_DEVICE):
        return (
            f"{note} The GPU may report the error some steps late and cannot be used further in this process. The "
            "usual cause is labels out of range, in this visit or the previous one. Restart the program: the fit "
            "resumes from its last checkpoint."
        )
    return note


def check_changes(module: object, planned: PlannedVisit, received: State, state: State, may_be_equal: bool) -> None:
    """Checks a module without an optimizer: training must keep shapes and (unless ``may_be_equal``) change an entry."""
    resized = [name for name, value in state.items() if name in received and value.shape != received[name].shape]
    if not resized and (may_be_equal or len(identical_entries(received, state)) < len(state)):
        return
    change = "changes no parameter or buffer"
    if resized:
        change = f"changes the shape of {resized[0]!r}"
    raise MisconfigurationException(
        f"Expected {type(module).__name__}, a module without an optimizer, to train by changing the values in buffers, "
        f"but the training of client {planned.visit.client!r} {change}: register each buffer in the final shape before "
        "`fit`. With a single client, `on_train_epoch_end` may fill a buffer from a list."
    )
