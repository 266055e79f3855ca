"""Base class for tasks with one network, one loss, metrics, and an optimizer and scheduler selected by name."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, ClassVar, Literal, TypeVar, cast

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import MetricCollection

from lightning_fed.argument_checks import check_option
from lightning_fed.modules.group_norm import to_group_norm

__all__ = ["Task"]

T = TypeVar("T")


class Task(L.LightningModule, ABC):
    """Base class for LightningModules that train one network, ``self.model``, on a task such as classification.

    Logged values are ``train_loss`` and, for ``val`` and ``test``, the loss and every metric in `configure_metrics`
    (``val_loss``, ``val_acc``, ...). Several validation loaders have separate metrics, with Lightning's suffix
    (``val_acc/dataloader_idx_1``). The state dict contains only the network.

    Args:
        optimizer: Class name in `torch.optim`.
        lr: Learning rate.
        momentum: Momentum, for optimizers with momentum. None uses the optimizer's default.
        weight_decay: Weight decay. None uses the optimizer's default (0 for SGD, 0.01 for AdamW).
        optimizer_kwargs: Further arguments for the optimizer.
        scheduler: Class name in `torch.optim.lr_scheduler`, stepped per epoch (per round in federated training).
            ``ReduceLROnPlateau`` monitors ``val_loss``. If None, the rate is constant.
        scheduler_kwargs: Arguments for the scheduler.

    Raises:
        ValueError: If the optimizer or the scheduler is unknown or refuses an argument.
    """

    input_key: ClassVar[str] = "image"
    """Key for the inputs in a dict batch."""

    target_key: ClassVar[str]
    """Key for the target in a dict batch."""

    def __init__(
        self,
        *,
        optimizer: str = "SGD",
        lr: float = 0.01,
        momentum: float | None = None,
        weight_decay: float | None = None,
        optimizer_kwargs: dict[str, Any] | None = None,
        scheduler: str | None = None,
        scheduler_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if scheduler_kwargs and scheduler is None:
            raise ValueError(
                f"Expected `scheduler` to be given with `scheduler_kwargs` {scheduler_kwargs}, but got None."
            )
        given = {"momentum": momentum, "weight_decay": weight_decay}
        self.lr = lr  # public and read late, because Lightning's learning-rate finder writes this attribute
        self._optimizer_class = _class_named("optimizer", optimizer, torch.optim, Optimizer)
        self._optimizer_kwargs: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        self._optimizer_kwargs.update(optimizer_kwargs or {})
        self._scheduler_class = _class_named("scheduler", scheduler, lr_scheduler, LRScheduler) if scheduler else None
        self._scheduler_kwargs = dict(scheduler_kwargs or {})
        try:  # refuses invalid arguments before the data are loaded
            self._build_optimizer([nn.Parameter(torch.zeros(1, 1))])
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"Expected arguments accepted by the optimizer '{optimizer}' and the scheduler '{scheduler}', but "
                f"got: {error}"
            ) from error

    @abstractmethod
    def configure_network(self, name: str) -> nn.Module:
        """Creates the network with the name ``name``, if the user passes a name instead of a module."""

    @abstractmethod
    def configure_metrics(self) -> MetricCollection:
        """Creates the metrics, which get (logits, target) and are logged as ``val_<name>`` and ``test_<name>``."""

    @abstractmethod
    def example_input(self) -> Tensor:
        """Creates a batch of two inputs filled with zeros, for tracing the network's neurons."""

    @abstractmethod
    def compute_loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Computes the mean loss of a batch, a scalar."""

    def configure_task(
        self,
        model: str | nn.Module,
        norm: Literal["batch", "group"],
        class_weights: list[float] | None,
        num_classes: int,
    ) -> None:
        """Creates the network, the metrics and the class weights. Called at the end of a subclass's ``__init__``."""
        check_option("norm", norm, ("batch", "group"))
        if class_weights is not None and len(class_weights) != num_classes:
            raise ValueError(
                f"Expected `class_weights` to hold {num_classes} weights, one per class, but got {len(class_weights)}."
            )
        weights = None if class_weights is None else torch.tensor(class_weights, dtype=torch.float32)
        self.class_weights: Tensor | None
        self.register_buffer(
            "class_weights", weights, persistent=False
        )  # a setting instead of state, so that clients never send class weights
        self.model = model if isinstance(model, nn.Module) else self.configure_network(model)
        if norm == "group":
            self.model = to_group_norm(self.model)
        metrics = self.configure_metrics()
        # one collection per loader; further collections are cloned on demand
        self.val_metrics = nn.ModuleList([metrics.clone(prefix="val_")])
        self.test_metrics = nn.ModuleList([metrics.clone(prefix="test_")])

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer, scheduler = self._build_optimizer(self.parameters())
        if scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    def _build_optimizer(self, parameters: Iterable[nn.Parameter]) -> tuple[Optimizer, LRScheduler | None]:
        optimizer = self._optimizer_class(parameters, **{"lr": self.lr, **self._optimizer_kwargs})
        if self._scheduler_class is None:
            return optimizer, None
        return optimizer, self._scheduler_class(optimizer, **self._scheduler_kwargs)

    def forward(self, x: Tensor) -> Tensor:
        """Computes the network's logits for a batch, such as images with shape ``(N, C, H, W)``."""
        logits: Tensor = self.model(x)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = self.split_batch(batch)
        loss = self.compute_loss(self(x), target)
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(x))
        return loss

    def on_validation_epoch_start(self) -> None:
        _reset(self.val_metrics)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate("val", self.val_metrics, batch, dataloader_idx)

    def on_validation_epoch_end(self) -> None:
        self._log_metrics(self.val_metrics, len(self.trainer.num_val_batches))

    def on_test_epoch_start(self) -> None:
        _reset(self.test_metrics)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate("test", self.test_metrics, batch, dataloader_idx)

    def on_test_epoch_end(self) -> None:
        self._log_metrics(self.test_metrics, len(self.trainer.num_test_batches))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        logits: Tensor = self(self.inputs_of(batch))
        return logits.softmax(dim=1)

    def split_batch(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Splits a batch, which is a pair ``(x, y)`` or a dict with both tensors, into inputs and targets."""
        if isinstance(batch, Mapping) and self.input_key in batch and self.target_key in batch:
            return batch[self.input_key], batch[self.target_key]
        if isinstance(batch, list | tuple) and len(batch) == 2:
            return batch[0], batch[1]
        kind = f"a dict with keys {sorted(map(str, batch))}" if isinstance(batch, Mapping) else _description(batch)
        raise TypeError(
            f"Expected a batch (x, y) or a dict with keys '{self.input_key}' and '{self.target_key}', but got {kind}."
        )

    def inputs_of(self, batch: Any) -> Tensor:
        """Returns the inputs of a batch with or without targets. In prediction a batch can be a tensor."""
        if isinstance(batch, Tensor):
            return batch
        if isinstance(batch, Mapping):
            return cast(Tensor, batch[self.input_key])
        return cast(Tensor, batch[0])

    def _evaluate(self, stage: str, metrics: nn.ModuleList, batch: Any, dataloader_idx: int) -> None:
        x, target = self.split_batch(batch)
        logits = self(x)
        self.log(f"{stage}_loss", self.compute_loss(logits, target), batch_size=len(x), sync_dist=True)
        while len(metrics) <= dataloader_idx:
            metrics.append(cast(MetricCollection, metrics[0]).clone())
            cast(MetricCollection, metrics[-1]).reset()
        cast(MetricCollection, metrics[dataloader_idx]).update(logits, target)

    def _log_metrics(self, metrics: nn.ModuleList, num_loaders: int) -> None:
        for index, module in enumerate(metrics):
            collection = cast(MetricCollection, module)
            if not any(metric.update_called for metric in collection.values()):
                continue  # a loader without batches, or a loader of an earlier run
            suffix = f"/dataloader_idx_{index}" if num_loaders > 1 else ""
            values = {f"{name}{suffix}": value for name, value in collection.compute().items()}
            self.log_dict(values, prog_bar=True, sync_dist=True, add_dataloader_idx=False)


def _reset(metrics: nn.ModuleList) -> None:
    for collection in metrics:
        cast(MetricCollection, collection).reset()


def _class_named(kind: str, name: str, module: ModuleType, base: type[T]) -> type[T]:
    classes = {
        key: value
        for key, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, base) and value is not base and not key.startswith("_")
    }
    check_option(kind, name, sorted(classes))
    return classes[name]


def _description(batch: Any) -> str:
    if isinstance(batch, list | tuple):
        return f"a {type(batch).__name__} with {len(batch)} elements"
    return type(batch).__name__
