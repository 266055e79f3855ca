"""Decides whether an error in a client's training excludes the client or ends the fit."""

from __future__ import annotations

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed.console import round_number
from lightning_fed.data.population import PlannedVisit
from lightning_fed.errors import ClientFault, VisitTimeout, describe
from lightning_fed.messages import State
from lightning_fed.model.entries import identical_entries

_LOST_DEVICE = ("device-side assert", "an illegal memory access", "CUDA error: unspecified launch failure")


def client_fault(error: Exception, planned: PlannedVisit) -> str | None:
    """Returns the reason to exclude a client after an error in a training step.

    Returns ``None`` if the process can no longer use the GPU, so the fit must end.
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
    """Formats a note for an error in a client's training, with round and client."""
    note = f"Raised in round {round_number(planned.visit.round)}, in the visit of client {planned.visit.client!r}."
    if any(text in str(error) for text in _LOST_DEVICE):
        return (
            f"{note} The GPU may report the error some steps late and cannot be used further in this process. The "
            "usual cause is labels out of range, in this visit or the previous one. Restart the program: the fit "
            "resumes from its last checkpoint."
        )
    return note


def check_changes(module: object, planned: PlannedVisit, received: State, state: State, may_be_equal: bool) -> None:
    """Raises an error if training without an optimizer has changed no tensor, or has changed a tensor's shape."""
    resized = [name for name, value in state.items() if name in received and value.shape != received[name].shape]
    if not resized and (may_be_equal or len(identical_entries(received, state)) < len(state)):
        return
    change = "changes no parameter or buffer"
    if resized:
        change = f"changes the shape of {resized[0]!r}"
    raise MisconfigurationException(
        f"{type(module).__name__} has no optimizer, so training must change the values in its buffers, but the "
        f"training of client {planned.visit.client!r} {change}: register each buffer in the final shape before `fit`, "
        "and fill the buffers during a client's training. Only a fit with a single client may fill a buffer in "
        "`on_train_epoch_end`."
    )
