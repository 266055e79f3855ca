"""Heat map with FedMargin's attention by client and round."""

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
    """Draws FedMargin's attention by client and round as a heat map, and logs the picture to TensorBoard.

    Rows are all clients so far, numbers before names; columns are rounds. The viridis colours range from 0 (dark blue)
    to the largest attention so far (yellow); grey marks clients outside the round. With matplotlib (extra ``demo``) the
    axes are labelled; without matplotlib the picture is the bare map.

    The first picture is drawn in the first round, and again after ``every_n_epochs`` rounds, always with all rounds so
    far. TensorBoard's step is the round. Other loggers get no pictures.

    State: ``last_epoch``, the round with the last picture (an int, or None), and ``attention``, one dictionary per
    round from clients to attention (float).

    Args:
        every_n_epochs: Rounds between two pictures.

    Raises:
        ValueError: If ``every_n_epochs`` is below 1.
        MisconfigurationException: In ``fit``, if the Trainer has no federation with
            :class:`~lightning_fed.algorithms.FedMargin`.

    Example:
        >>> from lightning_fed import Federation
        >>> callbacks = [Federation(FedMargin()), AttentionMap(every_n_epochs=10)]
        >>> trainer = L.Trainer(max_epochs=50, callbacks=callbacks, logger=False)

    """

    # TensorBoard image name.
    tag = "fedmargin/attention_map"

    def __init__(self, every_n_epochs: int = 5) -> None:
        check_count("every_n_epochs", every_n_epochs)
        self.every_n_epochs = every_n_epochs
        self._last_epoch: int | None = None
        self._attention: dict[int, dict[Client, float]] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Resets the state for a new fit, and names loggers without pictures."""
        if stage != "fit":
            return
        if trainer.current_epoch == 0:  # otherwise the Trainer continues
            self._last_epoch, self._attention = None, {}
        if not isinstance(find_federation(trainer).server.rule, FedMargin):
            raise MisconfigurationException("AttentionMap needs a federation whose aggregator is FedMargin.")
        report_other_loggers("AttentionMap", trainer)

    def on_server_aggregate(self, trainer: L.Trainer, module: L.LightningModule, state: State) -> None:
        """Stores the round's attention, and draws the map."""
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
        """Returns the round with the last picture, and the attention."""
        return {"last_epoch": self._last_epoch, "attention": {k: dict(v) for k, v in self._attention.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the attention in earlier rounds."""
        self._last_epoch = state_dict["last_epoch"]
        self._attention = {round: dict(clients) for round, clients in state_dict["attention"].items()}


def attention_table(attention: Mapping[int, Mapping[Client, float]]) -> tuple[list[Client], Tensor]:
    """Lists clients, numbers before names, and attention by round from the first round on; NaN outside a round.

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
    """Draws :func:`attention_table`'s result, shape ``(3, H, W)``, uint8; with axes if matplotlib is installed."""
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
    extent = (0.5, columns + 0.5, rows - 0.5, -0.5)  # one-based rounds
    axes.imshow(painted.permute(1, 2, 0).numpy(), aspect="auto", interpolation="nearest", extent=extent)
    labelled = range(0, rows, math.ceil(rows / _MAX_LABELS))
    axes.set_yticks(list(labelled), [str(clients[row]) for row in labelled])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="round", ylabel="client", title="Attention")
    figure.colorbar(ScalarMappable(Normalize(0, largest), "viridis"), ax=axes)
    return figure_pixels(figure)
