"""Draws confusion matrices of single clients."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning as L
import torch
from torch import Tensor

from lightning_fed.callbacks.federation import Federation, find_federation
from lightning_fed.callbacks.pictures import PeriodicPictures, draw_matrix, log_picture, tensorboards
from lightning_fed.callbacks.training_trace import declared_classes, find_class_task
from lightning_fed.console import round_number
from lightning_fed.data.population import seeded_generators
from lightning_fed.errors import ClientFault, OptionError, describe
from lightning_fed.features.batches import BatchKey, as_classes, find_inputs, find_target
from lightning_fed.features.isolated_pass import isolated_pass, prepare_batch, until_fault
from lightning_fed.messages import Client
from lightning_fed.numerics.seeds import client_key, derive_seed
from lightning_fed.server.schedule import Visit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_log = logging.getLogger(__name__)

_MAX_LABELS = 50


class Confusion(NamedTuple):
    """Confusion matrix over a client's classes.

    ``classes`` are sorted class indices, shape ``(k,)``. ``counts`` has shape ``(k, k)``: a row is a true class, a
    column the class with the largest logit.
    """

    classes: Tensor
    counts: Tensor

    @property
    def accuracy(self) -> float:
        return float(self.counts.diagonal().sum() / self.counts.sum())


class OwnClassConfusion(PeriodicPictures):
    """Draws the global model's confusion matrix over each client's classes, in TensorBoard.

    A client with few of many classes can learn to separate these classes from all other classes, but still confuse
    these classes with each other. After a round, the global model runs on the data of some clients, and predicts the
    most probable class among the client's classes. The colours show shares per row (true class), from 0 to 1. With
    matplotlib (extra ``demo``) the axes are labelled.

    The module must return logits, shape ``(N, num_classes)``, from ``pl_module(x)``. The global model is completed with
    the client's personal parameters. A client without readable data is skipped.

    Pictures appear after the first round, and then every ``every_n_epochs`` rounds. The callback's state is
    ``last_epoch``, the round with the last pictures (an int, or None).

    Args:
        clients: The clients, or the number n for the first n clients.
        every_n_epochs: Rounds between two pictures.
        class_names: Class names, starting with class 0. By default the attribute ``class_names`` or ``classes`` of the
            module or datamodule. If ``target`` is given, the default is class numbers.
        target: Index, key or function for the labels in a batch; by default the labels used in the loss. Negative and
            ignored labels are skipped.
        inputs: Index, key or function for the inputs in a batch; by default the first element, or ``batch["image"]``.

    Attributes:
        latest: Matrix by client from the last evaluated round.

    Raises:
        ValueError: If ``every_n_epochs`` is below 1 or ``clients`` is empty; in ``fit``, if a client is unknown, or the
            module does not return logits.
        MisconfigurationException: In ``fit``, if the Trainer has no federation, or the loss uses no labels.

    Example:
        >>> confusion = OwnClassConfusion(clients=["Greek/01", "Latin/07"], every_n_epochs=50)

    References:
        "Efficient image representation learning with federated sampled softmax" (FedSS), submission to ICLR 2022,
        section 5.
    """

    tag = "confusion"
    """Prefix for the image names in TensorBoard, before the client's name."""
    needs_local_clients = "the callback draws pictures of client data"

    def __init__(
        self,
        clients: int | Sequence[Client] = 4,
        every_n_epochs: int = 5,
        class_names: Sequence[str] = (),
        target: int | str | Callable[[Any], Tensor] | None = None,
        inputs: int | str | Callable[[Any], Tensor] | None = None,
    ) -> None:
        super().__init__(every_n_epochs)
        if (clients if isinstance(clients, int) else len(clients)) < 1:
            raise ValueError(f"Expected `clients` to contain at least one client, but got {clients}.")
        self.clients = clients
        self.class_names = tuple(class_names)
        self.target = target
        self.inputs = inputs
        self.latest: dict[Client, Confusion] = {}
        self._labels_of: BatchKey = target
        self._void: int | None = None
        self._names = self.class_names

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            find_federation(trainer)
        super().setup(trainer, pl_module, stage)

    def reset(self) -> None:
        super().reset()
        self.latest = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        unknown = [
            client for client in self._chosen(trainer) if client not in find_federation(trainer).population.clients
        ]
        if unknown:
            raise OptionError(f"Expected `clients` to be clients of the federation, but got {unknown}.")
        self._labels_of, self._void, self._names = self.target, None, self.class_names
        if self.target is None:
            task = find_class_task(trainer, pl_module, "give `OwnClassConfusion` a `target`", needs_target=True)
            self._labels_of, self._void = task.target, task.ignore_index
            self._names = self.class_names or declared_classes(trainer, pl_module, task.num_classes)[0]

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        round = trainer.current_epoch
        if not self.is_due(trainer):
            return
        self._last_epoch, self.latest = round, {}
        federation = find_federation(trainer)
        with federation.own_models(pl_module) as load:
            for client in self._chosen(trainer):
                try:
                    load(client)
                    confusion = self._evaluate_client(trainer, pl_module, federation, client)
                except ClientFault as fault:
                    _log.warning("Client %r is excluded from the confusion pictures: %s.", client, fault)
                    continue
                if confusion is not None:
                    self.latest[client] = confusion
        if not trainer.is_global_zero or not tensorboards(trainer):
            return
        for client, confusion in self.latest.items():
            title = f"Round {round_number(round)}, client {client}"
            log_picture(trainer, f"{self.tag}/{client}", confusion_picture(confusion, self._names, title), True)

    def _chosen(self, trainer: L.Trainer) -> list[Client]:
        if isinstance(self.clients, int):
            return list(itertools.islice(find_federation(trainer).population.clients, self.clients))
        return list(self.clients)

    def _evaluate_client(
        self, trainer: L.Trainer, module: L.LightningModule, federation: Federation, client: Client
    ) -> Confusion | None:
        faults: list[Exception] = []
        seed = derive_seed(federation.schedule.seed, client_key(client))  # the same batches for every picture
        visit = Visit(client, 0, seed, steps=federation.schedule.local_steps)

        def batches() -> Iterator[Any]:
            return until_fault(federation.population.one_pass(visit, isolated=True), faults)

        with seeded_generators(), isolated_pass(module):
            present = [torch.unique(self._labels(batch)).cpu() for batch in batches()]
            classes = torch.unique(torch.cat(present)) if present else torch.zeros(0, dtype=torch.int64)
            classes = classes[classes >= 0]
            counts = torch.zeros(len(classes), len(classes), dtype=torch.int64)
            for batch in batches() if len(classes) and not faults else ():
                prepared = prepare_batch(trainer, module, batch)
                with trainer.precision_plugin.forward_context():
                    logits = module(find_inputs(prepared, self.inputs))
                counts += confusion_counts(logits, self._labels(prepared), classes)
        if faults or not len(classes):
            reason = f"the client's data raised {describe(faults[0])}" if faults else "the client's data have no labels"
            _log.warning("Client %r is excluded from the confusion pictures: %s.", client, reason)
            return None
        return Confusion(classes, counts)

    def _labels(self, batch: Any) -> Tensor:
        labels = as_classes(find_target(batch, self._labels_of), 2).long()
        return labels if self._void is None else labels.masked_fill(labels == self._void, -1)


def confusion_counts(logits: Tensor, labels: Tensor, classes: Tensor) -> Tensor:
    """Computes a confusion matrix with predictions restricted to ``classes``.

    Logits have shape ``(N, num_classes)``, labels ``(N,)``, and the result ``(k, k)`` for k classes. Negative labels
    are skipped. ``classes`` are increasing and contain all labels.
    """
    if not isinstance(logits, Tensor) or logits.shape[:-1] != labels.shape or logits.shape[-1] <= int(classes.max()):
        output = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"Expected the module to return logits of shape ({len(labels)}, num_classes) with at least"
            f" {int(classes.max()) + 1} classes, but got {output}."
        )
    classes = classes.to(logits.device)
    is_labelled = labels >= 0
    rows = torch.searchsorted(classes, labels[is_labelled].to(logits.device))
    columns = logits[is_labelled][:, classes].argmax(1)
    counts = torch.bincount(rows * len(classes) + columns, minlength=len(classes) ** 2)
    return counts.reshape(len(classes), len(classes)).cpu()


def confusion_picture(confusion: Confusion, class_names: Sequence[str] = (), title: str = "") -> Tensor:
    """Draws a confusion matrix with rows that sum to 1: shape ``(3, H, W)``, uint8."""
    shares = confusion.counts.double() / confusion.counts.sum(1, keepdim=True)
    names = [class_names[label] if label < len(class_names) else str(label) for label in confusion.classes.tolist()]
    size = len(names)
    side = min(20, 4 + 0.2 * size)
    labelled = list(range(0, size, math.ceil(size / _MAX_LABELS)))

    def label(axes: Axes) -> None:
        axes.set_xticks(labelled, [names[index] for index in labelled], rotation=90)
        axes.set_yticks(labelled, [names[index] for index in labelled])
        axes.set(xlabel="largest logit among these classes", ylabel="class")
        axes.set_title(f"{title}: {confusion.accuracy:.0%} correct among {size} classes")

    return draw_matrix(shares, max(1, min(16, 1024 // size)), (side + 1, side), label)
