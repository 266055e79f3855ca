"""Passes over a client's data outside training, with ``training_step`` for each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, TypeVar

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_fed.data.population import PlannedVisit, Population, seeded_generators
from lightning_fed.errors import describe
from lightning_fed.features.isolated_pass import loss_in, run_step, until_fault
from lightning_fed.messages import Broadcast
from lightning_fed.rounds.client_errors import client_fault

_Result = TypeVar("_Result")


def pass_over_data(
    population: Population, planned: PlannedVisit, function: Callable[[Iterator[Any]], _Result]
) -> _Result | None:
    """Calls ``function`` once with an iterator over a client's training batches, and returns the result.

    ``function`` must return ``None`` if no batch had a loss. The result is also ``None`` if loading the data or
    ``function`` fails. If the result is ``None``, ``planned.fault`` has the reason. A lost GPU raises the error.
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
        planned.fault = planned.fault or f"the client's data raised {describe(faults[0])}"
        return None
    if result is None:
        planned.fault = planned.fault or "`training_step` returned no loss for any batch of its data"
    return result


def loss_of(trainer: L.Trainer, module: L.LightningModule, batch: Any, number: int) -> Tensor | None:
    """Returns the loss of ``training_step`` for a batch, or ``None`` without a loss."""
    loss: Tensor | None = loss_in(run_step(trainer, module, "training_step", batch, number))
    return loss


def refuse_manual_optimization(module: L.LightningModule, method: str) -> None:
    """Refuses a module with manual optimization. ``method`` is the federated method's name."""
    if not module.automatic_optimization:
        raise MisconfigurationException(
            f"{method} calls `training_step` in an additional pass over the data to read the loss, but manual "
            "optimization would train the model in this pass: use automatic optimization."
        )


def refuse_rows(broadcast: Broadcast, method: str) -> None:
    """Refuses a broadcast with only some rows of a tensor.

    Raises:
        MisconfigurationException: If the broadcast has only some rows of a tensor.

    Example:
        >>> import torch
        >>> refuse_rows(Broadcast(0, {"w": torch.zeros(3)}), "MOON")
    """
    if broadcast.rows:
        raise MisconfigurationException(
            f"{method} keeps whole models on the clients, but clients only hold some rows of {sorted(broadcast.rows)}:"
            " use 'fedavg', for instance."
        )
