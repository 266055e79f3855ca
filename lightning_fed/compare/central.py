"""Centralised training on the pooled data of all clients, the baseline of a comparison."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from functools import cache
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, ProgressBar
from torch import nn

from lightning_fed.callbacks.evaluation.client_evaluation import ClientEvaluation, loaders_of
from lightning_fed.callbacks.evaluation.data_pass import Stage, evaluate_data
from lightning_fed.callbacks.evaluation.results import ClientResults
from lightning_fed.callbacks.federation import Federation
from lightning_fed.compare.method_options import CENTRAL
from lightning_fed.data.federated import FederatedDataModule
from lightning_fed.data.population import seed_everything
from lightning_fed.federated_callback import RevertingCallback
from lightning_fed.fit.checks import find_loader_owner
from lightning_fed.fit.entry_policies import freeze_parameters
from lightning_fed.lightning.internals import OverriddenMethod
from lightning_fed.model.entries import entry_policies
from lightning_fed.numerics.seeds import derive_seed
from lightning_fed.partitions.loader_split import split_training_data
from lightning_fed.recipe import FederatedCLI


def check_central(cli: FederatedCLI) -> None:
    """Refuses a recipe without ``max_rounds`` or ``local_epochs``. Centralised training needs both numbers."""
    trainer: Any = cli.trainer
    if trainer.federation.schedule.local_steps is not None:
        raise MisconfigurationException(
            f"Expected a recipe with `local_epochs` for {CENTRAL!r}, but got `local_steps`."
        )
    if (trainer.max_epochs or -1) < 1:
        raise MisconfigurationException(f"Expected a recipe with `max_rounds` for {CENTRAL!r}, but got none.")


def central_trainer(cli: FederatedCLI) -> L.Trainer:
    """Builds a plain Trainer for centralised training, with one epoch per round of the recipe.

    An epoch has as many examples as the clients' training in a round.
    """
    federated: Any = cli.trainer
    federation: Federation = federated.federation
    given = vars(cli.config_init.get("trainer"))
    fixed = ("max_epochs", "callbacks", "logger", "enable_progress_bar", "reload_dataloaders_every_n_epochs")
    known = [name for name in inspect.signature(L.Trainer).parameters if name in given and name not in fixed]
    callbacks = [
        callback
        for callback in federated.callbacks
        if not isinstance(callback, Federation | ClientEvaluation | ProgressBar)
    ]
    return L.Trainer(
        max_epochs=federated.max_epochs,
        callbacks=[_PooledRounds(federation), _ClientMeans(), *callbacks],
        logger=False,
        enable_progress_bar=False,
        reload_dataloaders_every_n_epochs=1,  # rounds have different lengths
        **{name: given[name] for name in known},
    )


def _passes(loader: Any, datamodule: Any, federation: Federation) -> Fraction:
    if isinstance(datamodule, FederatedDataModule):
        num_clients = len(datamodule.population().clients)
    else:
        assert federation.partition is not None  # see `plan._check_method`
        num_clients = len(split_training_data(loader, federation.partition, federation.schedule.seed).clients)
    return Fraction(federation.schedule.local_epochs * federation.schedule.cohort_size(num_clients), num_clients)


class _Rounds:
    """Dataloader with one round's batches per epoch. The next epoch continues where the last epoch has stopped."""

    # Random numbers depend only on the round and the pass, so a resumed run draws the same numbers.

    def __init__(self, loader: Any, passes: Fraction, trainer: L.Trainer, seed: int) -> None:
        self._loader, self._trainer, self._seed = loader, trainer, seed
        self._length = _length_of(loader)
        self._per_round = max(passes * self._length, Fraction(1))
        self._stream: Iterator[Any] = iter(())
        self._place = -1  # position of the next batch in the stream

    def __len__(self) -> int:
        return self._begin(self._trainer.current_epoch + 1) - self._begin(self._trainer.current_epoch)

    def __iter__(self) -> Iterator[Any]:
        round = self._trainer.current_epoch
        begin = self._begin(round)
        if self._place != begin:  # the first round of a fit
            number, done = divmod(begin, self._length)
            self._stream = self._passes(number)
            for _ in range(done):
                next(self._stream)
        seed_everything(derive_seed(self._seed, 0, round))
        for place in range(begin, self._begin(round + 1)):
            self._place = place + 1
            yield next(self._stream)

    def _begin(self, round: int) -> int:
        return int(round * self._per_round)

    def _passes(self, number: int) -> Iterator[Any]:
        while True:
            seed_everything(derive_seed(self._seed, 1, number))
            yield from self._loader
            number += 1


def _length_of(loader: Any) -> int:
    with suppress(TypeError):  # data without a length
        if length := len(loader):
            return length
    raise MisconfigurationException(
        f"Expected training data of known length for {CENTRAL!r}, with at least one batch, but got a "
        f"{type(loader).__name__} without a length."
    )


class _PooledRounds(RevertingCallback):
    """Gives a pooled epoch as many examples as a federated round. Applies the federation's option ``frozen``."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._loader: OverriddenMethod | None = None
        self._frozen: list[nn.Parameter] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self.revert()
        federation, datamodule = self._federation, getattr(trainer, "datamodule", None)

        def make_rounds() -> _Rounds:
            assert self._loader is not None
            loader = self._loader.original()
            return _Rounds(loader, _passes(loader, datamodule, federation), trainer, federation.schedule.seed)

        self._loader = OverriddenMethod(find_loader_owner(trainer, pl_module), "train_dataloader", cache(make_rounds))
        self._frozen = freeze_parameters(pl_module, entry_policies(pl_module, frozen=federation.options.frozen))

    def revert(self) -> None:
        if self._loader is not None:
            self._loader.restore()
            self._loader = None
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        self._frozen = []


class _ClientMeans(Callback):
    """Callback that evaluates the central model on each client's data, and logs the means."""

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._evaluate(trainer, pl_module, "validation")

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._evaluate(trainer, pl_module, "test")

    def _evaluate(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Stage) -> None:
        loaders = loaders_of(trainer, stage)
        reports = {client: evaluate_data(trainer, pl_module, loaders[client], stage, keeps=True) for client in loaders}
        summary = ClientResults.of(reports).summary()
        trainer.callback_metrics.update({f"fed/{name}": torch.tensor(value) for name, value in summary.items()})
