"""What a federation takes of the Trainer and of the user's objects while a fit lasts, and gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_fed.backends.client_parallel.distributed_log import DistributedLog
from lightning_fed.backends.client_parallel.synchronisation import ProcessSynchronisation, check_processes
from lightning_fed.data.federated import FederatedDataModule, split_loader
from lightning_fed.data.partitions import Partition
from lightning_fed.data.population import Population
from lightning_fed.data.round_loader import RoundLoader
from lightning_fed.model.entries import Policy
from lightning_fed.rounds.entry_policies import freeze_parameters
from lightning_fed.rounds.loop import RoundLoop
from lightning_fed.rounds.trainer_checks import OverriddenMethod, check_trainer, find_loader_owner, process_group_of


class TrainerOverrides:
    """Puts the rounds into a Trainer's fit, until :meth:`give_back`: a loader for each, and the ends of its visits.

    Args:
        trainer: The Trainer.
        module: The module.
        loop: The rounds.
        partition: How the training data are split, where they do not come as clients already.
        plan: Makes the next round's loader, in place of the user's ``train_dataloader``.

    Raises:
        MisconfigurationException: If the Trainer is asked for what cannot be right in a round, or the training data
            cannot be reached or do not fit ``partition``.

    """

    def __init__(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        loop: RoundLoop,
        partition: Partition | None,
        plan: Callable[[], RoundLoader],
    ) -> None:
        check_trainer(trainer, loop.schedule.local_steps, loop.schedule.stragglers)
        if process_group_of(trainer).size > 1:
            check_processes(trainer, loop.store)
            callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
            (pooled_log,) = (callback for callback in callbacks if isinstance(callback, DistributedLog))
            loop.processes = ProcessSynchronisation(trainer, pooled_log)
        has_clients = isinstance(getattr(trainer, "datamodule", None), FederatedDataModule)
        if loop.remote is None and has_clients == (partition is not None):
            raise MisconfigurationException(
                "Expected a `partition` that splits the training data into clients, or a FederatedDataModule that"
                f" brings them, but got {'both' if partition is not None else 'neither'}."
            )
        owner = find_loader_owner(trainer, module)
        # A visit that fails is padded with `None` batches: on purpose, and the log says why.
        loop.ignore("train_dataloader yielded None")
        self._trainer = trainer
        self._loop = loop
        self._partition = partition
        self._reload = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
        trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]
        self._loader = OverriddenMethod(owner, "train_dataloader", plan)
        self._save = OverriddenMethod(module, "on_save_checkpoint", self._on_save_checkpoint)
        self._batch_start = OverriddenMethod(module, "on_train_batch_start", self._on_train_batch_start)
        self._batch_end = OverriddenMethod(module, "on_train_batch_end", self._on_train_batch_end)
        self._step = OverriddenMethod(module, "training_step", self._training_step)
        self._frozen: list[nn.Parameter] = []

    def population(self) -> Population:
        """All clients, of the user's own data, or as far as they are known here."""
        if self._loop.remote is not None:
            return self._loop.remote.population
        if self._partition is None:
            population: Population = self._trainer.datamodule.population()  # type: ignore[attr-defined]
            return population
        return split_loader(self._loader.original(), self._partition, self._loop.schedule.seed)

    def freeze(self, module: nn.Module, policies: Mapping[str, Policy]) -> None:
        """Stops the gradients of frozen parameters."""
        self._frozen = freeze_parameters(module, policies)

    def give_back(self) -> None:
        """Puts everything back."""
        for hook in (self._loader, self._save, self._batch_start, self._batch_end, self._step):
            hook.give_back()
        self._trainer.reload_dataloaders_every_n_epochs = self._reload  # type: ignore[attr-defined]
        for parameter in self._frozen:
            parameter.requires_grad_(True)

    def _on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A checkpoint inside a round holds the last complete global model, and the round is trained again."""
        if self._loop.open is not None:
            self._loop.open.patch(checkpoint)
        self._save.original(checkpoint)

    def _on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The module's own hook; then the end of the visit if this was its last batch, and of the round.

        It is the last hook of a batch: what callbacks and the module do after a batch is part of the visit.
        """
        if self._loop.has_trained(batch):
            with self._loop.counting_in_visit() as place:
                self._batch_end.original(outputs, batch, batch_idx if place is None else place)
        self._loop.end_batch()

    def _on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        with self._loop.counting_in_visit() as place:
            return self._batch_start.original(batch, batch_idx if place is None else place)

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._loop.counting_in_visit() as place:
            if place is not None and len(args) > 1:  # the batch, and its index where the step takes one
                args = (args[0], place, *args[2:])
            return self._loop.step(self._step.original, *args, **kwargs)


def check_loader(trainer: L.Trainer) -> None:
    """Makes sure that the Trainer trains on rounds.

    Raises:
        MisconfigurationException: If it trains on loaders that were handed to ``fit``.

    """
    if not isinstance(trainer.train_dataloader, RoundLoader):
        raise MisconfigurationException(
            "The Trainer trains on loaders that were handed to `fit`, not on the clients: use a datamodule, or"
            " `FederatedTrainer`."
        )
