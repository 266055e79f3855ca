"""New clients: number of local epochs until a global model converges on the data of an unseen client.

Yao, Huang, Wu, Zhang and Sun, "Towards Faster and Better Federated Learning: A Feature Fusion Approach", ICIP 2019,
figure 4. The paper gives no definition of convergence; the criterion in :func:`epochs_to_converge` is our own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import lightning as L

from lightning_fed.algorithms.fedfusion.model_surgery import find_fusion
from lightning_fed.argument_checks import check_count, check_option
from lightning_fed.data.population import seeded_generators
from lightning_fed.messages import Client
from lightning_fed.model.entries import copy_state
from lightning_fed.numerics.seeds import client_key, derive_seed

_QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def train_newcomers(
    module: L.LightningModule,
    clients: Mapping[Client, tuple[Iterable[Any], Iterable[Any]]],
    max_epochs: int = 50,
    monitor: str = "val_acc",
    seed: int = 0,
    **trainer_options: Any,
) -> dict[Client, list[float]]:
    """Trains a copy of the global model on each client's data, and evaluates before training and after each epoch.

    Each client starts from the module's weights and trains with a plain ``L.Trainer``. The weights are restored
    afterwards. A module with :class:`~lightning_fed.callbacks.FeatureFusion` fuses features with the initial weights.
    The result maps each client to ``max_epochs + 1`` metric values.

    Args:
        module: The global model.
        clients: Training loader and validation loader of each client.
        max_epochs: Number of local epochs.
        monitor: Name of the logged metric.
        seed: Seed for the training.
        trainer_options: Further arguments for ``L.Trainer``.

    Raises:
        ValueError: If ``max_epochs`` is below 1, or the metric is not logged.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from lightning_fed.tasks import ClassificationTask
        >>> loader = DataLoader(TensorDataset(torch.zeros(4, 1, 28, 28), torch.zeros(4, dtype=torch.int64)))
        >>> task = ClassificationTask("mlp", num_classes=2, lr=1.0)
        >>> curves = train_newcomers(task, {"ann": (loader, loader)}, max_epochs=2, accelerator="cpu")
        >>> len(curves["ann"]), curves["ann"][-1]
        (3, 1.0)
    """
    check_count("max_epochs", max_epochs)
    start, fusion = copy_state(module.state_dict()), find_fusion(module)
    former = fusion.frozen.state() if fusion is not None and fusion.is_referring else None
    curves = {}
    try:
        for client, (train, val) in clients.items():
            module.load_state_dict(start)
            if fusion is not None:
                fusion.refer()
            curve = _Curve(monitor)
            with seeded_generators(derive_seed(seed, client_key(client))):
                trainer = L.Trainer(**{**_QUIET, **trainer_options, "max_epochs": max_epochs, "callbacks": [curve]})
                trainer.validate(module, val, verbose=False)
                trainer.fit(module, train, val)
            curves[client] = curve.values
    finally:
        module.load_state_dict(start)
        if fusion is not None:
            fusion.release() if former is None else fusion.refer(former)
    return curves


def epochs_to_converge(values: Sequence[float], tolerance: float = 0.005, mode: Literal["max", "min"] = "max") -> int:
    """First epoch whose value is close to the best value; 0 if the model needs no training.

    Args:
        values: Metric before training and after each epoch.
        tolerance: Allowed difference from the best value; 0.005 is half a percentage point of accuracy.
        mode: ``"max"`` if larger values are better, ``"min"`` if smaller values are better.

    Raises:
        ValueError: If ``values`` is empty.

    Example:
        >>> epochs_to_converge([0.2, 0.8, 0.9, 0.903, 0.89])
        2
    """
    check_option("mode", mode, ("max", "min"))
    if not values:
        raise ValueError("Expected `values` to have at least one value, but got none.")
    scores = [value if mode == "max" else -value for value in values]
    return next(epoch for epoch, score in enumerate(scores) if score >= max(scores) - tolerance)


class _Curve(L.Callback):
    def __init__(self, monitor: str) -> None:
        self.values: list[float] = []
        self._monitor = monitor

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._monitor not in trainer.callback_metrics:
            raise ValueError(
                f"Expected validation to log `monitor`, but {self._monitor!r} is not one of "
                f"{sorted(trainer.callback_metrics)}."
            )
        self.values.append(float(trainer.callback_metrics[self._monitor]))
