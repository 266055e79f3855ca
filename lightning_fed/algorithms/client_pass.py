"""A pass over the data of the client that trains, beside its training; a client whose data fail is left out by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, TypeVar

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_fed.data.population import PlannedVisit, Population, seeded_generators
from lightning_fed.errors import describe
from lightning_fed.lightning.isolated_pass import loss_in, run_step, until_fault
from lightning_fed.messages import Broadcast
from lightning_fed.rounds.client_errors import client_fault

_Result = TypeVar("_Result")


def pass_over_data(
    population: Population, planned: PlannedVisit, function: Callable[[Iterator[Any]], _Result]
) -> _Result | None:
    """Calls a function with the batches of a client's data, in an order that depends on the visit.

    The training that goes on draws the same random numbers as without the pass.

    Args:
        population: The clients' data.
        planned: The visit that is under way; its fault is set where the client's data fail.
        function: Takes the batches; it need not take all.

    Returns:
        What the function returned; ``None`` where the data failed.

    """
    faults: list[Exception] = []
    with seeded_generators(), closing(until_fault(population.one_pass(planned.visit, isolated=True), faults)) as data:
        try:
            result = function(data)
        except Exception as error:
            reason = client_fault(error, planned)
            if reason is None:
                raise
            planned.fault = planned.fault or reason
            return None
    if faults:
        planned.fault = planned.fault or f"its data raised {describe(faults[0])}"
        return None
    if result is None:
        planned.fault = planned.fault or "its data gave no batch with a loss"
    return result


def loss_of(trainer: L.Trainer, module: L.LightningModule, batch: Any, number: int) -> Tensor | None:
    """The loss that ``training_step`` returns for a batch as the loader gave it; ``None`` where it skips the batch."""
    loss: Tensor | None = loss_in(run_step(trainer, module, "training_step", batch, number))
    return loss


def refuse_manual_optimization(module: L.LightningModule, method: str) -> None:
    """Refuses a module whose ``training_step`` has no loss to ask for.

    Args:
        module: The module.
        method: Name of the method, for the error.

    Raises:
        MisconfigurationException: If the module optimizes by hand.

    """
    if not module.automatic_optimization:
        raise MisconfigurationException(
            f"{method} asks for the loss that `training_step` returns, beside the training: it needs automatic"
            " optimization."
        )


def refuse_rows(broadcast: Broadcast, method: str) -> None:
    """Refuses clients that hold some rows of an entry, where a method keeps whole models.

    Args:
        broadcast: The message to a client.
        method: Name of the method, for the error.

    Raises:
        MisconfigurationException: If it holds rows.

    Example:
        >>> import torch
        >>> refuse_rows(Broadcast(0, {"w": torch.zeros(3)}), "MOON")

    """
    if broadcast.rows:
        raise MisconfigurationException(
            f"{method}'s clients keep whole models, but they hold some rows of {sorted(broadcast.rows)} only: use"
            " 'fedavg', for instance."
        )
