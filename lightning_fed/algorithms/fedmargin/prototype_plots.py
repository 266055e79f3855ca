"""Pictures of class prototypes as points in a plane, every few rounds."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_fed.algorithms.fedmargin.aggregator import FedMargin
from lightning_fed.algorithms.fedmargin.callback import ClassPrototypes
from lightning_fed.algorithms.fedmargin.principal_axes import PrincipalAxes, principal_axes
from lightning_fed.algorithms.fedmargin.prototype_messages import (
    PROTOTYPE_KEYS,
    find_invalid_prototypes,
    find_mismatched_prototypes,
    unpack_prototypes,
)
from lightning_fed.algorithms.fedmargin.prototypes import Prototypes, aggregate_prototypes
from lightning_fed.callbacks.federation import federation_of, find_federation
from lightning_fed.callbacks.picture_grid import checked_colors, default_colors
from lightning_fed.callbacks.pictures import (
    Color,
    PeriodicPictures,
    figure_pixels,
    has_matplotlib,
    log_picture,
    new_figure,
    tensorboards,
)
from lightning_fed.console import round_number
from lightning_fed.federated_callback import FederatedCallback
from lightning_fed.lightning.internals import callbacks_of, find_callbacks
from lightning_fed.messages import Client, ClientUpdate, State

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_log = logging.getLogger(__name__)


class PrototypePlots(PeriodicPictures, FederatedCallback):
    """Draws class prototypes as points in a plane, and logs the picture to TensorBoard.

    With :class:`~lightning_fed.algorithms.FedMargin` the points are the mean prototypes over clients and rounds. With
    other methods the points are means over the round's clients. On a plain ``L.Trainer`` the points are the prototypes
    at the end of the epoch. :class:`~lightning_fed.callbacks.ClassPrototypes` measures the prototypes. FedMargin adds
    ``ClassPrototypes`` automatically. With other methods, pass both callbacks to the Trainer.

    The plane shows the largest variance (:func:`~lightning_fed.algorithms.fedmargin.principal_axes`). Each plane is
    rotated to match the last picture. The title shows the plane's share of the variance. Other loggers get no pictures.

    Saved state: ``last_epoch``, the epoch with the last picture, and ``view``, the plane.

    Args:
        every_n_epochs: Epochs (rounds) between two pictures.
        class_names: Class names, starting with class 0, by default the indices.
        class_colors: Colours (red, green, blue; 0 to 255), starting with class 0, by default a palette.
        projector: Whether to send the full prototypes to TensorBoard's projector.

    Raises:
        ModuleNotFoundError: In ``fit``, if matplotlib is not installed.
        MisconfigurationException: In ``fit``, if ``ClassPrototypes`` is missing, or is listed after this callback.

    Example:
        >>> from lightning_fed.callbacks import ClassPrototypes
        >>> callbacks = [ClassPrototypes(), PrototypePlots(class_names=["road", "sky", "tree"])]
        >>> trainer = L.Trainer(max_epochs=5, callbacks=callbacks, logger=False)
    """

    # TensorBoard image name; the projector uses `prototypes`.
    tag = "prototypes/plane"

    shared_attribute = "_sent"

    def __init__(
        self,
        every_n_epochs: int = 5,
        class_names: Sequence[str] = (),
        class_colors: Sequence[Sequence[int]] | None = None,
        projector: bool = False,
    ) -> None:
        super().__init__(every_n_epochs)
        self.class_names = tuple(class_names)
        self.class_colors = checked_colors(class_colors)
        self.projector = projector
        self._view: PrincipalAxes | None = None
        self._sent: dict[Client, State] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and tensorboards(trainer) and not has_matplotlib():
            raise ModuleNotFoundError("PrototypePlots needs matplotlib: pip install 'lightning-fed[demo]'")

    def reset(self) -> None:
        super().reset()
        self._view = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        callbacks = callbacks_of(trainer)
        positions = [index for index, callback in enumerate(callbacks) if isinstance(callback, ClassPrototypes)]
        if not positions:
            raise MisconfigurationException("PrototypePlots needs a `ClassPrototypes` among the Trainer's callbacks.")
        if not federation_of(trainer) and positions[0] > callbacks.index(self):
            raise MisconfigurationException(
                "Expected `ClassPrototypes` before `PrototypePlots` in the Trainer's callbacks, but it comes after: "
                "prototypes are measured at the end of an epoch, and must exist before the plot is drawn."
            )

    # A federation

    def on_server_round_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._sent = {}

    def on_server_receive(self, trainer: L.Trainer, module: L.LightningModule, update: ClientUpdate) -> None:
        self._sent[update.client] = {name: value for name, value in update.extras.items() if name in PROTOTYPE_KEYS}

    def on_server_aggregate(self, trainer: L.Trainer, module: L.LightningModule, state: State) -> None:
        server = find_federation(trainer).server
        rule = server.rule
        if isinstance(rule, FedMargin):
            prototypes = rule.prototypes
        else:
            prototypes = self._over_clients(trainer, server.report.received)
        self._sent = {}
        self._draw(trainer, prototypes, f"Round {round_number(trainer.current_epoch)}")

    # With a plain Trainer

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not federation_of(trainer):
            self._draw(trainer, _find_class_prototypes(trainer).prototypes, f"Epoch {trainer.current_epoch}")

    # Both

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"view": None if self._view is None else self._view._asdict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        view = state_dict["view"]
        self._view = None if view is None else PrincipalAxes(**view)

    def _over_clients(self, trainer: L.Trainer, clients: Iterable[Client]) -> Prototypes | None:
        num_classes = _find_class_prototypes(trainer).classes_found
        assert num_classes is not None
        sent = {client: self._sent[client] for client in clients}
        faults = {client: find_invalid_prototypes(packed, num_classes) for client, packed in sent.items()}
        well_formed = {client: packed for client, packed in sent.items() if faults[client] is None}
        faults |= find_mismatched_prototypes(well_formed)
        for client, fault in faults.items():
            if fault is not None:
                _log.warning("The prototypes of client %r are excluded from the picture: %s.", client, fault)
        sets = [unpack_prototypes(packed, num_classes) for client, packed in sent.items() if faults[client] is None]
        client_prototypes = [prototypes for prototypes in sets if prototypes is not None and prototypes.present.any()]
        return aggregate_prototypes(client_prototypes) if client_prototypes else None

    def _draw(self, trainer: L.Trainer, prototypes: Prototypes | None, title: str) -> None:
        if prototypes is None or not self.is_due(trainer) or not tensorboards(trainer):
            return
        classes = prototypes.present.nonzero()[:, 0].cpu()
        if len(classes) < 2:
            return
        means = prototypes.means.detach().cpu()[classes]
        if self._view is not None and self._view.center.shape != means.shape[1:]:
            self._view = None  # clients with another number of features
        self._last_epoch = trainer.current_epoch
        view = principal_axes(means)
        self._view = view if self._view is None else view.turned_to(self._view)
        if not trainer.is_global_zero:
            return
        count = len(prototypes.counts)
        names = [*self.class_names, *(str(index) for index in range(len(self.class_names), count))]
        colors = [*(self.class_colors or ()), *default_colors(count)[len(self.class_colors or ()) :]]
        shown = [(names[index], colors[index]) for index in classes.tolist()]
        picture = figure_pixels(_figure(self._view, means, shown, title))
        log_picture(trainer, self.tag, picture, is_epoch_end=not federation_of(trainer))
        if self.projector:
            for logger in tensorboards(trainer):
                labels = [name for name, _ in shown]
                logger.experiment.add_embedding(
                    means, metadata=labels, tag="prototypes", global_step=trainer.current_epoch
                )


def _find_class_prototypes(trainer: L.Trainer) -> ClassPrototypes:
    return find_callbacks(trainer, ClassPrototypes)[0]


def _figure(view: PrincipalAxes, means: Tensor, shown: Sequence[tuple[str, Color]], title: str) -> Figure:
    points = view.project(means)
    plane_variance, variance = (float((values - values.mean(0)).square().sum()) for values in (points, means.double()))
    figure = new_figure((6, 6))
    axes = figure.subplots()
    for (x, y), (name, color) in zip(points.tolist(), shown, strict=True):
        axes.scatter(x, y, s=100, color=[v / 255 for v in color], edgecolors="black", linewidths=0.5, zorder=4)
        axes.annotate(name, (x, y), xytext=(7, 7), textcoords="offset points", zorder=3)
    axes.set_title(f"{title}: {plane_variance / variance if variance else 1:.0%} of the spread")
    axes.set_aspect("equal", adjustable="datalim")
    axes.margins(0.15)
    axes.grid(alpha=0.3)
    return figure
