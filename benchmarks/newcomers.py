"""Training of global models on unseen clients (figure 4 in the FedFusion paper)."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from common import load_json, save_json, table
from torch.utils.data import DataLoader, Subset

from lightning_fed.algorithms.fedfusion.model_surgery import find_fusion
from lightning_fed.argument_checks import check_count, check_option
from lightning_fed.callbacks import FeatureFusion
from lightning_fed.compare import Plan
from lightning_fed.compare.run import CHECKPOINT, Run, quiet
from lightning_fed.data import PartitionedData
from lightning_fed.data.population import seeded_generators
from lightning_fed.messages import Client
from lightning_fed.model.entries import copy_state
from lightning_fed.numerics.seeds import client_key, derive_seed
from lightning_fed.report.figures import save_figure

FILE = "newcomers.json"
EPOCHS_SHOWN = (1, 2, 5, 10)

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
    """Trains a copy of the global model on each client's data; evaluates before training and after each epoch.

    A module with `FeatureFusion` fuses features with the initial weights. The module's weights are restored. Returns
    ``max_epochs + 1`` values by client.
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
    """First epoch with a value within ``tolerance`` of the best value; 0 if the model needs no training.

    The paper gives no definition of convergence: the criterion is ours.
    """
    check_option("mode", mode, ("max", "min"))
    if not values:
        raise ValueError("Expected at least one value, but got none.")
    scores = [value if mode == "max" else -value for value in values]
    return next(epoch for epoch, score in enumerate(scores) if score >= max(scores) - tolerance)


class _Curve(L.Callback):
    def __init__(self, monitor: str) -> None:
        self.values: list[float] = []
        self._monitor = monitor

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._monitor not in trainer.callback_metrics:
            raise ValueError(
                f"Expected `monitor` to be logged in validation, but {self._monitor!r} is not one of"
                f" {sorted(trainer.callback_metrics)}."
            )
        self.values.append(float(trainer.callback_metrics[self._monitor]))


class Unseen(L.LightningDataModule):
    """A subset of another datamodule's test images."""

    def __init__(self, source: Any, count: int) -> None:
        super().__init__()
        self.source, self.count = source, count

    def setup(self, stage: str) -> None:
        self.source.setup("test")

    def train_dataloader(self) -> DataLoader[Any]:
        kept = torch.randperm(len(self.source.test_dataset), generator=torch.Generator().manual_seed(0))[: self.count]
        return DataLoader(Subset(self.source.test_dataset, kept.tolist()), self.source.batch_size, shuffle=True)


def measure(plan: Plan, run: Run, count: int, size: int, epochs: int) -> dict[str, Any]:
    """Accuracies before training and after every epoch, by client; stored on disk.

    The clients come from a split of the test images with another seed: other permutations, other classes.
    """
    folder = plan.out / "runs" / run.name
    known: dict[str, Any] | None = load_json(folder / FILE)
    if known is not None:
        return known
    with quiet():
        cli = plan.build(run.seed)
        partition = type(cli.datamodule.partition)(**{**vars(cli.datamodule.partition), "num_clients": count})
        data = PartitionedData(
            Unseen(cli.datamodule.source, count * size), partition, val_fraction=0.5, seed=1_000 + run.seed
        )
        data.setup("fit")
        for callback in run.method.federation(cli.trainer.federation).method.callbacks:
            if isinstance(callback, FeatureFusion):
                callback.setup(L.Trainer(logger=False, enable_checkpointing=False), cli.model, "validate")
        cli.model.load_state_dict(torch.load(folder / CHECKPOINT, weights_only=True)["state_dict"])
        loaders = {
            client: (
                DataLoader(data.clients[client], cli.datamodule.source.batch_size, shuffle=True),
                DataLoader(data.val[client], 500),
            )
            for client in data.clients
        }
        curves = train_newcomers(cli.model, loaders, epochs, "val_acc", seed=run.seed)
    found = {"method": run.method.label, "seed": run.seed, "curves": list(curves.values())}
    save_json(folder / FILE, found)
    print(f"newcomers of {run}: {[epochs_to_converge(curve) for curve in curves.values()]}", flush=True)
    return found


def report(found: Sequence[Mapping[str, Any]]) -> str:
    """Epochs to converge (mean over clients, mean and deviation over seeds), and accuracies by epoch."""
    rows = []
    for method in dict.fromkeys(one["method"] for one in found):
        seeds = [one["curves"] for one in found if one["method"] == method]
        epochs = [statistics.fmean(epochs_to_converge(curve) for curve in curves) for curves in seeds]
        spread = f" ± {statistics.stdev(epochs):.1f}" if len(epochs) > 1 else ""
        shown = [_mean_at(seeds, number) for number in (0, *EPOCHS_SHOWN)]
        best = statistics.fmean(max(curve) for curves in seeds for curve in curves)
        cells = [f"{value:.3f}" for value in (*shown, best)]
        rows.append([f"`{method}`", f"{statistics.fmean(epochs):.1f}{spread}", *cells])
    return table(["method", "epochs to converge", "before", *(f"after {each}" for each in EPOCHS_SHOWN), "best"], rows)


def draw(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for method in dict.fromkeys(one["method"] for one in found):
        seeds = [one["curves"] for one in found if one["method"] == method]
        length = min(len(curve) for curves in seeds for curve in curves)
        axes.plot(range(length), [_mean_at(seeds, number) for number in range(length)], label=method)
    axes.set(xlabel="local epoch", ylabel="val_acc", title="clients that were never seen")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    save_figure(figure, path)


def _mean_at(seeds: Sequence[Sequence[Sequence[float]]], number: int) -> float:
    return statistics.fmean(curve[min(number, len(curve) - 1)] for curves in seeds for curve in curves)
