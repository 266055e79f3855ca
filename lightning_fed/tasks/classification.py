"""Image classification as an ordinary LightningModule."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lightning_fed.algorithms.fedss.head_conversion import to_sampled_softmax
from lightning_fed.argument_checks import check_count, check_option
from lightning_fed.tasks.base import Task
from lightning_fed.tasks.networks import build_network

__all__ = ["ClassificationTask"]


class ClassificationTask(Task):
    """Classifies images with cross-entropy. Logs loss and accuracy.

    Batches are ``(x, y)`` or dicts with keys ``image`` and ``label``: images with shape ``(N, C, H, W)`` and class
    indices with shape ``(N,)``. Logged values are ``train_loss``, ``val_loss``, ``val_acc``, ``test_loss`` and
    ``test_acc``. Prediction returns class probabilities, shape ``(N, num_classes)``.

    Args:
        model: Name of a network (see `build_network`), or a module from images to logits. A module is not a saved
            hyperparameter: pass the module to ``load_from_checkpoint(path, model=...)``.
        num_classes: Number of classes.
        in_channels: Number of image channels.
        input_size: Side length of the square images, in pixels; not needed for `timm` models.
        pretrained: Whether to load `timm`'s published weights (a download).
        model_kwargs: Further arguments for the named network.
        norm: ``"group"`` replaces every BatchNorm by GroupNorm (see `to_group_norm`).
        head: ``"sampled_softmax"`` replaces the last linear layer, for very many classes (see `SampledSoftmax`). Each
            client then trains only a few classes.
        head_kwargs: ``scale`` and ``normalize`` for ``head="sampled_softmax"``.
        class_weights: Class weights in the loss; not allowed with ``head="sampled_softmax"``.
        label_smoothing: Fraction of the target distributed over all classes, between 0 and 1.
        **options: Optimizer and learning-rate scheduler, see `Task`.

    Raises:
        ValueError: If a name or a choice is unknown, or an argument does not fit the network, optimizer or scheduler.

    Example:
        >>> task = ClassificationTask("mcmahan_cnn", num_classes=10, lr=0.1, scheduler="ExponentialLR",
        ...                           scheduler_kwargs={"gamma": 0.99})
        >>> import torch
        >>> task(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    target_key: ClassVar[str] = "label"

    def __init__(
        self,
        model: str | nn.Module,
        num_classes: int,
        in_channels: int = 1,
        input_size: int = 28,
        pretrained: bool = False,
        model_kwargs: dict[str, Any] | None = None,
        norm: Literal["batch", "group"] = "batch",
        head: Literal["linear", "sampled_softmax"] = "linear",
        head_kwargs: dict[str, Any] | None = None,
        class_weights: list[float] | None = None,
        label_smoothing: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.save_hyperparameters(ignore=["model"] if isinstance(model, nn.Module) else None)
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"Expected `label_smoothing` to be between 0 and 1, but got {label_smoothing}.")
        check_option("head", head, ("linear", "sampled_softmax"))
        if head == "sampled_softmax" and class_weights is not None:
            raise ValueError(
                "Expected no `class_weights` with head='sampled_softmax', because this head renumbers the labels per "
                "client, so the weights would apply to wrong classes, but got class weights."
            )
        unknown = set(head_kwargs or ()) - ({"scale", "normalize"} if head == "sampled_softmax" else set())
        if unknown:
            raise ValueError(f"Expected `head_kwargs` accepted by head={head!r}, but got {sorted(unknown)}.")
        self.num_classes = check_count("num_classes", num_classes, 2)
        self._in_channels = in_channels
        self._input_size = input_size
        self._pretrained = pretrained
        self._model_kwargs = dict(model_kwargs or {})
        self._label_smoothing = label_smoothing
        self.configure_task(model, norm, class_weights, num_classes)
        if head == "sampled_softmax":
            self.model = to_sampled_softmax(self.model, **(head_kwargs or {}))

    def configure_network(self, name: str) -> nn.Module:
        return build_network(
            name,
            self.num_classes,
            self._in_channels,
            self._input_size,
            pretrained=self._pretrained,
            **self._model_kwargs,
        )

    def configure_metrics(self) -> MetricCollection:
        accuracy = MulticlassAccuracy(self.num_classes, average="micro", validate_args=False)
        return MetricCollection({"acc": accuracy}, compute_groups=False)

    def example_input(self) -> Tensor:
        return torch.zeros(2, self._in_channels, self._input_size, self._input_size)

    def compute_loss(self, logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target.long(), weight=self.class_weights, label_smoothing=self._label_smoothing)
