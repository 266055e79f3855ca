"""Training on the pooled data of all clients, the yardstick of a comparison."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, ProgressBar

from lightning_fed.callbacks import Federation
from lightning_fed.callbacks.client_evaluation import Stage, evaluate_clients
from lightning_fed.cli import FederatedCLI
from lightning_fed.compare.methods import CENTRAL
from lightning_fed.data.federated import EvaluationData, FederatedDataModule, split_loader
from lightning_fed.data.population import seed_everything
from lightning_fed.schedule import derive_seed
from lightning_fed.state import entry_policies


def check_central(cli: FederatedCLI) -> None:
    """Checks that a recipe says how many examples its rounds have.

    Raises:
        MisconfigurationException: If it does not.

    """
    trainer: Any = cli.trainer
    if trainer.federation.schedule.local_steps is not None:
        raise MisconfigurationException(f"Expected a recipe with `local_epochs` for {CENTRAL!r}, but it has steps.")
    if (trainer.max_epochs or -1) < 1:
        raise MisconfigurationException(f"Expected a recipe with `max_rounds` for {CENTRAL!r}, but it has none.")


def central_trainer(cli: FederatedCLI) -> tuple[L.Trainer, int]:
    """A plain Trainer that trains on as many examples as the clients of all rounds do together, without stragglers.

    Args:
        cli: Model, data and Trainer of the recipe.

    Returns:
        The Trainer, and after how many epochs it validates: about as often as there are rounds. The number of epochs
        is rounded up to that.

    """
    federated: Any = cli.trainer
    federation, rounds = federated.federation, federated.max_epochs
    num_clients = _count_clients(cli, federation)
    epochs_per_round = federation.schedule.local_epochs * federation.schedule.cohort_size(num_clients) / num_clients
    every = max(1, int(epochs_per_round))
    given = vars(cli.config_init.get("trainer"))
    fixed = ("max_epochs", "callbacks", "logger", "enable_progress_bar", "check_val_every_n_epoch")
    known = [name for name in inspect.signature(L.Trainer).parameters if name in given and name not in fixed]
    policies = entry_policies(cli.model, frozen=federation.frozen)
    for name, parameter in cli.model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and policies.get(name) != "frozen")
    trainer = L.Trainer(
        max_epochs=every * math.ceil(rounds * epochs_per_round / every - 1e-9),
        check_val_every_n_epoch=every,
        callbacks=[*(one for one in federated.callbacks if not isinstance(one, Federation | ProgressBar))],
        logger=False,
        enable_progress_bar=False,
        **{name: given[name] for name in known},
    )
    trainer.callbacks.append(_ClientMeans())  # type: ignore[attr-defined]
    owner: Any = cli.datamodule or cli.model
    make_loader = owner.train_dataloader
    owner.train_dataloader = lambda: _SeededEpochs(make_loader(), trainer, federation.schedule.seed)
    return trainer, every


def _count_clients(cli: FederatedCLI, federation: Federation) -> int:
    if cli.datamodule is not None:
        cli.datamodule.prepare_data()
        cli.datamodule.setup("fit")
    if isinstance(cli.datamodule, FederatedDataModule):
        return len(cli.datamodule.population().clients)
    assert federation.partition is not None  # the comparison has checked it
    loader = (cli.datamodule or cli.model).train_dataloader()
    return len(split_loader(loader, federation.partition, federation.schedule.seed).clients)


class _SeededEpochs:
    """A loader whose epochs draw random numbers that depend on the epoch alone: a run that is resumed draws the same.

    Lightning asks for one iterator more than it uses, or not, so the seeding waits for the first batch.
    """

    def __init__(self, loader: Any, trainer: L.Trainer, seed: int) -> None:
        self._loader, self._trainer, self._seed = loader, trainer, seed

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        seed_everything(derive_seed(self._seed, self._trainer.current_epoch))
        yield from self._loader


class _ClientMeans(Callback):
    """The one model on every client's validation and test data, under the names that a federation gives to it."""

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._evaluate(trainer, pl_module, "validation")

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._evaluate(trainer, pl_module, "test")

    def _evaluate(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Stage) -> None:
        datamodule = getattr(trainer, "datamodule", None)
        if isinstance(datamodule, EvaluationData):
            clients = datamodule.val_clients() if stage == "validation" else datamodule.test_clients()
            summary = evaluate_clients(trainer, pl_module, clients, lambda client: None, stage).summary()
            trainer.callback_metrics.update({f"fed/{name}": torch.tensor(value) for name, value in summary.items()})
