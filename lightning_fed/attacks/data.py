"""Attacks on training data: wrong labels, and images with a backdoor trigger."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_fed.argument_checks import check_count, check_number
from lightning_fed.attacks.attack import Attack
from lightning_fed.callbacks.federation import find_federation
from lightning_fed.federated_callback import FederatedCallback
from lightning_fed.messages import Client
from lightning_fed.process_group import process_group_of


class DataAttack(Attack, FederatedCallback):
    """Base class of callbacks that change malicious clients' training data."""

    def __init__(self, clients: Sequence[Client] | int, seed: int = 0) -> None:
        super().__init__(clients, seed)
        self.needs_local_clients = self.needs_population

    def on_server_round_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.check_clients(find_federation(trainer).population.clients)

    def is_malicious(self, trainer: L.Trainer, client: Client) -> bool:
        return client in self.malicious(find_federation(trainer).population.clients)


class LabelFlip(DataAttack):
    """Malicious clients train with flipped labels: class ``c`` becomes ``num_classes - 1 - c``.

    The integer labels are the second element of a batch. Labels of no class, such as ``ignore_index``, stay unchanged.

    Args:
        clients: Malicious clients, or the number to draw.
        num_classes: Number of classes.
        seed: Seed for drawing clients.

    Raises:
        ValueError: If ``num_classes`` is below 2; in a fit, if a batch has no labels.

    Example:
        >>> flip_labels(torch.tensor([0, 1, 9, 255]), num_classes=10)
        tensor([  9,   8,   0, 255])
    """

    def __init__(self, clients: Sequence[Client] | int, num_classes: int, seed: int = 0) -> None:
        super().__init__(clients, seed)
        self.num_classes = check_count("num_classes", num_classes, lowest=2)

    def on_client_batch(self, trainer: L.Trainer, module: L.LightningModule, client: Client, batch: Any) -> Any:
        if not self.is_malicious(trainer, client):
            return batch
        images, labels, *rest = _parts(batch)
        return [images, flip_labels(labels, self.num_classes), *rest]


class Backdoor(DataAttack):
    """Malicious clients train the model to assign images with a trigger to a target class.

    The trigger is a square in the lower right corner. In a malicious client's batch, the first images receive the
    trigger and the target label. Validation logs ``backdoor/success_rate``: the fraction of images with a trigger that
    the global model assigns to the target class. Images from the target class are not counted. Together with
    :class:`Scaling`, the attack is called model replacement.

    A batch contains images, shape ``(batch, channels, height, width)``, and labels, shape ``(batch,)``. The module
    returns logits, shape ``(batch, classes)``.

    Args:
        clients: Malicious clients, or the number to draw.
        target: Target class.
        size: Height and width of the trigger in pixels.
        value: Pixel value of the trigger, in all channels.
        share: Fraction of images with the trigger in a batch, rounded up.
        seed: Seed for drawing clients.

    Raises:
        ValueError: If an argument is outside its range; in a fit, if a batch has no images and labels.

    Example:
        >>> add_trigger(torch.zeros(1, 1, 3, 3), size=2, value=1.0)
        tensor([[[[0., 0., 0.],
                  [0., 1., 1.],
                  [0., 1., 1.]]]])

    Bagdasaryan, Veit, Hua, Estrin & Shmatikov, "How To Backdoor Federated Learning", AISTATS 2020; trigger from Gu,
    Dolan-Gavitt & Garg, "BadNets", 2017.
    """

    def __init__(
        self,
        clients: Sequence[Client] | int,
        target: int = 0,
        size: int = 3,
        value: float = 1.0,
        share: float = 0.5,
        seed: int = 0,
    ) -> None:
        super().__init__(clients, seed)
        self.target = check_count("target", target, lowest=0)
        self.size = check_count("size", size)
        self.value = check_number("value", value)
        self.share = check_number("share", share)
        if not 0 < self.share <= 1:
            raise ValueError(f"Expected `share` to be in (0, 1], but got {share}.")
        self._hits = self._count = 0

    def on_client_batch(self, trainer: L.Trainer, module: L.LightningModule, client: Client, batch: Any) -> Any:
        if not self.is_malicious(trainer, client):
            return batch
        images, labels, *rest = _parts(batch)
        count = math.ceil(self.share * len(labels))
        images, labels = images.clone(), labels.clone()
        images[:count] = add_trigger(images[:count], self.size, self.value)
        labels[:count] = self.target
        return [images, labels, *rest]

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._hits = self._count = 0

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        images, labels, *_ = _parts(batch)
        other_classes = images[labels != self.target]
        if len(other_classes):
            logits = pl_module(add_trigger(other_classes, self.size, self.value))
            self._hits += int((logits.argmax(1) == self.target).sum())
            self._count += len(other_classes)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        counts = process_group_of(trainer).gather((self._hits, self._count))
        hits, count = (sum(part[place] for part in counts) for place in (0, 1))
        if count and not trainer.sanity_checking:
            pl_module.log("backdoor/success_rate", hits / count, batch_size=1)


def flip_labels(labels: Tensor, num_classes: int) -> Tensor:
    """Flips labels: class ``c`` becomes ``num_classes - 1 - c``. Other values are unchanged."""
    is_class = (labels >= 0) & (labels < num_classes)
    return torch.where(is_class, num_classes - 1 - labels, labels)


def add_trigger(images: Tensor, size: int, value: float) -> Tensor:
    """Adds a square with constant value to the lower right corner of images ``(batch, channels, height, width)``."""
    images = images.clone()
    images[..., -size:, -size:] = value
    return images


def _parts(batch: Any) -> list[Any]:
    parts = list(batch) if isinstance(batch, Sequence) and not isinstance(batch, str) else []
    if len(parts) < 2 or not isinstance(parts[1], Tensor) or parts[1].is_floating_point():
        raise ValueError(
            "Expected batches with inputs and integer labels for an attack on the data, but got"
            f" {type(batch).__name__}."
        )
    return parts
