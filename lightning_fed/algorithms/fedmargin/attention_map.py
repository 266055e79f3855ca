"""Pictures of FedMargin's attention to every client in every round, as a heat map."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_fed.algorithms.fedmargin.aggregator import FedMargin
from lightning_fed.argument_checks import check_count
from lightning_fed.callbacks.federation import find_federation
from lightning_fed.callbacks.pictures import (
    figure_pixels,
    has_matplotlib,
    paint_numbers,
    report_other_loggers,
    tensorboards,
)
from lightning_fed.federated_callback import FederatedCallback
from lightning_fed.messages import Client, State

_MAX_LABELS = 50


class AttentionMap(FederatedCallback):
    """Draws FedMargin's attention to every client in every round as a heat map, and logs it to TensorBoard.

    Rows are the clients that have taken part so far, numbers before names; columns are the rounds. The colours are
    those of viridis, from 0 (dark blue) to the largest attention so far (yellow); grey is a client
    that was not in the round. With matplotlib (the extra ``demo``) the axes are labelled, without it the picture is the
    bare map.

    A picture, of all rounds so far, is drawn in the first round, and then whenever ``every_n_epochs`` rounds have
    passed since the last one; the step on TensorBoard's axis is the round. Other loggers are passed over.

    State: ``last_epoch``, the round of the last picture (an int, or None), and ``attention``, for every round a
    dictionary of clients and their attention: a key and a float for every visit.

    Args:
        every_n_epochs: Rounds from one picture to the next.

    Raises:
        ValueError: If ``every_n_epochs`` is below 1.
        MisconfigurationException: In ``fit``, if the Trainer has no federation with
            :class:`~lightning_fed.algorithms.FedMargin`.

    Example:
        >>> from lightning_fed import Federation
        >>> callbacks = [Federation(FedMargin()), AttentionMap(every_n_epochs=10)]
        >>> trainer = L.Trainer(max_epochs=50, callbacks=callbacks, logger=False)

    """

    tag = "fedmargin/attention_map"
    """Name of the image in TensorBoard."""

    def __init__(self, every_n_epochs: int = 5) -> None:
        check_count("every_n_epochs", every_n_epochs)
        self.every_n_epochs = every_n_epochs
        self._last_epoch: int | None = None
        self._attention: dict[int, dict[Client, float]] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Forgets an earlier run, and says which loggers get no pictures."""
        if stage != "fit":
            return
        if trainer.current_epoch == 0:  # else the same Trainer goes on
            self._last_epoch, self._attention = None, {}
        if not isinstance(find_federation(trainer).server.rule, FedMargin):
            raise MisconfigurationException("AttentionMap needs a federation whose aggregator is FedMargin.")
        report_other_loggers("AttentionMap", trainer)

    def on_server_aggregate(self, trainer: L.Trainer, module: L.LightningModule, state: State) -> None:
        """Notes the attention of the round that was just aggregated, and draws the map."""
        server = find_federation(trainer).server
        rule = server.rule
        assert isinstance(rule, FedMargin)
        round, last = server.report.round, rule.last
        self._attention[round] = dict(zip(last.clients, last.attention, strict=True))
        is_early = self._last_epoch is not None and round - self._last_epoch < self.every_n_epochs
        if is_early or not tensorboards(trainer):
            return
        self._last_epoch = round
        if trainer.is_global_zero:
            picture = attention_picture(*attention_table(self._attention))
            for logger in tensorboards(trainer):
                logger.experiment.add_image(self.tag, picture, global_step=round)

    def state_dict(self) -> dict[str, Any]:
        """See the class's note."""
        return {"last_epoch": self._last_epoch, "attention": {k: dict(v) for k, v in self._attention.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on with the rounds so far."""
        self._last_epoch = state_dict["last_epoch"]
        self._attention = {round: dict(clients) for round, clients in state_dict["attention"].items()}


def attention_table(attention: Mapping[int, Mapping[Client, float]]) -> tuple[list[Client], Tensor]:
    """The clients, numbers before names, and their attention from the first round on: NaN where one was not in a round.

    Example:
        >>> attention_table({0: {"b": 1.0}, 2: {"b": 0.25, "a": 0.75}})
        (['a', 'b'], tensor([[   nan,    nan, 0.7500],
                [1.0000,    nan, 0.2500]]))

    """
    clients = sorted(
        {client for row in attention.values() for client in row}, key=lambda key: (isinstance(key, str), key)
    )
    columns = [
        [attention.get(round, {}).get(client, math.nan) for round in range(max(attention) + 1)] for client in clients
    ]
    return clients, torch.tensor(columns)


def attention_picture(clients: Sequence[Client], values: Tensor) -> Tensor:
    """Picture of :func:`attention_table`'s result, shape ``(3, H, W)``, uint8; with axes if matplotlib is there."""
    rows, columns = values.shape
    largest = float(values[~values.isnan()].max())
    painted = paint_numbers(values / largest)
    if not has_matplotlib():
        cell = max(1, min(16, 1024 // max(rows, columns)))
        return painted.repeat_interleave(cell, 1).repeat_interleave(cell, 2)
    from matplotlib.cm import ScalarMappable  # the extra `demo`
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    size = (min(20, 4 + 0.15 * columns), min(20, 1.5 + 0.2 * rows))
    figure = Figure(figsize=size, dpi=100, layout="constrained")
    axes = figure.subplots()
    extent = (0.5, columns + 0.5, rows - 0.5, -0.5)  # rounds are counted from 1
    axes.imshow(painted.permute(1, 2, 0).numpy(), aspect="auto", interpolation="nearest", extent=extent)
    labelled = range(0, rows, math.ceil(rows / _MAX_LABELS))
    axes.set_yticks(list(labelled), [str(clients[row]) for row in labelled])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="round", ylabel="client", title="Attention")
    figure.colorbar(ScalarMappable(Normalize(0, largest), "viridis"), ax=axes)
    return figure_pixels(figure)
