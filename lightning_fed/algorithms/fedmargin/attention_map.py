"""Heat map of FedMargin's attention by client and round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_fed.algorithms.fedmargin.aggregator import FedMargin
from lightning_fed.callbacks.federation import find_federation
from lightning_fed.callbacks.pictures import PeriodicPictures, draw_matrix, log_picture, tensorboards
from lightning_fed.federated_callback import FederatedCallback
from lightning_fed.messages import Client, State

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_LABELS = 50


class AttentionMap(PeriodicPictures, FederatedCallback):
    """Draws a heat map of FedMargin's client weights, and logs the map to TensorBoard.

    Rows are clients, and columns are rounds. Brighter colours mark larger weights, and grey marks absent clients. Axis
    labels need matplotlib. Other loggers receive no pictures.

    Saved state: ``last_epoch``, the round with the last picture, and ``attention``, the weights by round and client.

    Args:
        every_n_epochs: Rounds between two pictures, at least 1. The first round has a picture.

    Raises:
        ValueError: If ``every_n_epochs`` is below 1.
        MisconfigurationException: In ``fit``, without :class:`~lightning_fed.algorithms.FedMargin`.

    Example:
        >>> from lightning_fed import Federation
        >>> callbacks = [Federation(FedMargin()), AttentionMap(every_n_epochs=10)]
        >>> trainer = L.Trainer(max_epochs=50, callbacks=callbacks, logger=False)
    """

    # Image name in TensorBoard.
    tag = "fedmargin/attention_map"

    def __init__(self, every_n_epochs: int = 5) -> None:
        super().__init__(every_n_epochs)
        self._attention: dict[int, dict[Client, float]] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and not isinstance(find_federation(trainer).server.rule, FedMargin):
            raise MisconfigurationException("AttentionMap needs a federation with FedMargin.")

    def reset(self) -> None:
        super().reset()
        self._attention = {}

    def on_server_aggregate(self, trainer: L.Trainer, module: L.LightningModule, state: State) -> None:
        server = find_federation(trainer).server
        rule = server.rule
        assert isinstance(rule, FedMargin)
        round, last = server.report.round, rule.last
        self._attention[round] = dict(zip(last.clients, last.attention, strict=True))
        if not self.is_due(trainer) or not tensorboards(trainer):
            return
        self._last_epoch = round
        if trainer.is_global_zero:
            log_picture(trainer, self.tag, attention_picture(*attention_table(self._attention)))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"attention": {k: dict(v) for k, v in self._attention.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._attention = {round: dict(clients) for round, clients in state_dict["attention"].items()}


def attention_table(attention: Mapping[int, Mapping[Client, float]]) -> tuple[list[Client], Tensor]:
    """Returns the sorted clients, and a table of attention, shape ``(clients, rounds)``; NaN if absent."""
    clients = sorted(
        {client for row in attention.values() for client in row}, key=lambda key: (isinstance(key, str), key)
    )
    columns = [
        [attention.get(round, {}).get(client, math.nan) for round in range(max(attention) + 1)] for client in clients
    ]
    return clients, torch.tensor(columns)


def attention_picture(clients: Sequence[Client], values: Tensor) -> Tensor:
    """Draws a table from :func:`attention_table` as an RGB image ``(3, H, W)``, uint8."""
    rows, columns = values.shape

    def label(axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        axes.set_aspect("auto")
        labelled = range(0, rows, math.ceil(rows / _MAX_LABELS))
        axes.set_yticks(list(labelled), [str(clients[row]) for row in labelled])
        axes.images[0].set_extent((0.5, columns + 0.5, rows - 0.5, -0.5))  # displayed rounds start at 1
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="round", ylabel="client", title="Attention")

    cell = max(1, min(16, 1024 // max(rows, columns)))
    size = (min(20, 4 + 0.15 * columns), min(20, 1.5 + 0.2 * rows))
    return draw_matrix(values, cell, size, label, float(values[~values.isnan()].max()))
