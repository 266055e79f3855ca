"""A Trainer that trains federatedly."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, ProgressBar
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_fed.aliases import refuse_foreign
from lightning_fed.callbacks.federation import Federation
from lightning_fed.callbacks.progress_bar import FederatedProgressBar
from lightning_fed.client.client_store import ClientStore
from lightning_fed.data.federated import FederatedDataModule, LoaderDataModule
from lightning_fed.data.partitions import Partition
from lightning_fed.method import Method, Protection
from lightning_fed.model.entries import Selector
from lightning_fed.server.aggregator import Aggregator


class FederatedTrainer(L.Trainer):
    """``L.Trainer`` with federated rounds for epochs.

    It is a thin door to :class:`~lightning_fed.callbacks.Federation`, which does the work and documents the arguments:
    it builds that callback, takes training data as they are, and counts rounds in the progress bar. All arguments of
    ``L.Trainer`` pass through.

    Args:
        method: The federated method; see :class:`~lightning_fed.callbacks.Federation`, as for all below ``federation``.
        max_rounds: Rounds to train: Lightning's ``max_epochs``.
        federation: A ready callback, instead of ``method`` and the arguments below.
        partition: How one training loader is split into clients.
        clients_per_round: Number (int) or fraction (float) of clients in a round.
        local_epochs: Passes over a client's data in a visit.
        local_steps: Batches in a visit; replaces ``local_epochs``.
        stragglers: Fraction of the cohort that does only part of its work.
        partial_work: Whether the stragglers' partial work is kept.
        dropout: Probability that a chosen client never reports.
        min_clients: Least number of good updates that changes the global model.
        max_failed_rounds: Rounds in a row that may bring no new model because clients fail.
        personal: Entries that stay with their client.
        frozen: Entries that never travel.
        batch_norm: What becomes of BatchNorm's running statistics.
        unseen_statistics: Which of them normalise data of no known client, with ``batch_norm="local"``.
        fixed_after: Rounds before they are fixed, with ``batch_norm="fixed"``.
        optimizer_state: Whether optimizer state is fresh in every visit.
        store: Where clients keep what is theirs.
        evaluate_clients_every: Rounds with a validation between evaluations client by client.
        vectorize: At most how many clients train at once.
        visits: Whose loop trains on the visits' batches.
        privacy: Protection of the clients.
        secure_sum: A sum of the clients' steps of which the server sees no single one.
        max_update_norm: Longest step of a client: a number, or a multiple of the round's median (``"3 * median"``).
        max_samples: Largest number of examples that counts.
        weighting: What a client counts by: its samples, or nothing.
        visit_timeout: Seconds after which a visit is broken off.
        seed: Seed of the partition and the schedule.
        trainer_kwargs: Arguments of ``L.Trainer``. Without a ``strategy``, ``devices`` is 1.

    Raises:
        ValueError: If both ``max_rounds`` and ``max_epochs``, or ``federation`` and one of its arguments, are given, or
            a ``Federation`` is among the ``callbacks``.
        TypeError: If ``federation`` is not a ``Federation``.

    Example:
        >>> from lightning_fed.data import Dirichlet
        >>> trainer = FederatedTrainer(
        ...     "fedprox:mu=0.1", max_rounds=50, clients_per_round=10, partition=Dirichlet(100, alpha=0.1), logger=False
        ... )
        >>> trainer.max_epochs
        50

    """

    def __init__(
        self,
        method: str | Method | Aggregator = "fedavg",
        *,
        max_rounds: int | None = None,
        federation: Federation | None = None,
        partition: Partition | None = None,
        clients_per_round: int | float = 1.0,
        local_epochs: int = 1,
        local_steps: int | None = None,
        stragglers: float = 0.0,
        partial_work: Literal["keep", "drop"] = "keep",
        dropout: float = 0.0,
        min_clients: int = 1,
        max_failed_rounds: int | None = 3,
        personal: Sequence[Selector] = (),
        frozen: Sequence[Selector] = (),
        batch_norm: Literal["average", "recalibrate", "local", "fixed", "personal", "frozen"] = "recalibrate",
        unseen_statistics: Literal["batch", "pooled", "nearest"] = "batch",
        fixed_after: int | None = None,
        optimizer_state: Literal["reset", "keep"] = "reset",
        store: str | os.PathLike[str] | ClientStore | None = None,
        evaluate_clients_every: int = 1,
        vectorize: int = 1,
        visits: Literal["auto", "lightning", "fused"] = "auto",
        privacy: Protection | None = None,
        secure_sum: Protection | None = None,
        max_update_norm: float | str | None = None,
        max_samples: int | None = None,
        weighting: Literal["samples", "uniform"] = "samples",
        visit_timeout: float | None = None,
        seed: int | None = None,
        **trainer_kwargs: Any,
    ) -> None:
        options = {
            "method": method,
            "partition": partition,
            "clients_per_round": clients_per_round,
            "local_epochs": local_epochs,
            "local_steps": local_steps,
            "stragglers": stragglers,
            "partial_work": partial_work,
            "dropout": dropout,
            "min_clients": min_clients,
            "max_failed_rounds": max_failed_rounds,
            "personal": personal,
            "frozen": frozen,
            "batch_norm": batch_norm,
            "unseen_statistics": unseen_statistics,
            "fixed_after": fixed_after,
            "optimizer_state": optimizer_state,
            "store": store,
            "evaluate_clients_every": evaluate_clients_every,
            "vectorize": vectorize,
            "visits": visits,
            "privacy": privacy,
            "secure_sum": secure_sum,
            "max_update_norm": max_update_norm,
            "max_samples": max_samples,
            "weighting": weighting,
            "visit_timeout": visit_timeout,
            "seed": seed,
        }
        if not (federation is None or isinstance(federation, Federation)):
            raise TypeError(f"Expected `federation` to be a Federation object, but got {federation!r}.")
        if federation is None:
            federation = Federation(**options)  # type: ignore[arg-type]
        else:
            defaults = inspect.signature(Federation).parameters
            given = [name for name, value in options.items() if value != defaults[name].default]
            if given:
                raise ValueError(f"Expected `federation` or its arguments, but got `federation` and {given}.")
        if max_rounds is not None:
            if trainer_kwargs.get("max_epochs") is not None:
                raise ValueError("Expected one of `max_rounds` and `max_epochs`, which mean the same, but got both.")
            trainer_kwargs["max_epochs"] = max_rounds
        if "strategy" not in trainer_kwargs and trainer_kwargs.get("devices", "auto") == "auto":
            trainer_kwargs["devices"] = 1  # Lightning would start a process for every device there is
        self.federation = federation
        callbacks = trainer_kwargs.pop("callbacks", None) or []
        callbacks = [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
        refuse_foreign(*callbacks)
        if any(isinstance(callback, Federation) for callback in callbacks):
            raise ValueError("Expected a ready `Federation` as the argument `federation`, not among the `callbacks`.")
        has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
        if trainer_kwargs.get("enable_progress_bar", True) and not has_bar and not trainer_kwargs.get("barebones"):
            callbacks.append(FederatedProgressBar())
        super().__init__(callbacks=[federation, *callbacks], **trainer_kwargs)

    def fit(
        self,
        model: L.LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: L.LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Trains the model federatedly; afterwards it holds the last complete global model.

        Args:
            model: Any LightningModule.
            train_dataloaders: One ``DataLoader`` or map-style data set, which ``partition`` splits; or a mapping or
                sequence of clients, each with a ``DataLoader``, several of them (as ``CombinedLoader`` takes them) or a
                map-style data set; or a datamodule. Data sets get batches of 32: for another size hand over a
                ``FederatedDataModule(clients, batch_size=...)``, or loaders.
            val_dataloaders: Validation data of the global model, as ``L.Trainer.fit`` takes them; a mapping of clients
                is evaluated client by client as well. Where ``train_dataloaders`` is one loader, a mapping in which no
                key is a client of the ``partition`` is Lightning's: several loaders by name.
            datamodule: Any datamodule, which ``partition`` splits, or a
                :class:`~lightning_fed.data.FederatedDataModule`.
            ckpt_path: Checkpoint to resume from.
            weights_only: As in ``L.Trainer.fit`` from Lightning 2.6 on: whether to load tensors and primitives only.

        Raises:
            MisconfigurationException: If the data are not clients and there is no ``partition``, or the Trainer is
                asked for what cannot be right in a round.
            TypeError: If an object is one of the package ``pytorch_lightning``.

        """
        refuse_foreign(model, train_dataloaders, datamodule)
        is_data = train_dataloaders is not None and not isinstance(train_dataloaders, L.LightningDataModule)
        if is_data and datamodule is None:  # both is an error, which Lightning raises
            brings_clients = isinstance(train_dataloaders, Mapping | list | tuple)
            if brings_clients and self.federation.partition is not None:
                raise MisconfigurationException(
                    f"Expected one DataLoader or data set, which `partition` splits into clients, but got a"
                    f" {type(train_dataloaders).__name__} of {len(train_dataloaders)}. If its entries are the clients,"
                    " leave out `partition`; if every step takes a batch of each, put them into a `CombinedLoader`, of"
                    " which each client gets a part."
                )
            if isinstance(train_dataloaders, Dataset) and not isinstance(train_dataloaders, IterableDataset):
                train_dataloaders = DataLoader(train_dataloaders, batch_size=32, shuffle=True)
            datamodule = (
                FederatedDataModule(train_dataloaders, val_dataloaders)
                if brings_clients
                else LoaderDataModule(
                    train_dataloaders, val_dataloaders, lambda: self.federation.find_population().clients
                )
            )
            if val_dataloaders is None and is_overridden("val_dataloader", model, L.LightningModule):
                # Beside a datamodule Lightning does not ask the module for its own.
                setattr(datamodule, "val_dataloader", model.val_dataloader)  # noqa: B010 - a method, for mypy
            train_dataloaders = val_dataloaders = None
        options: dict[str, Any] = {} if weights_only is None else {"weights_only": weights_only}  # new in Lightning 2.6
        super().fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path, **options)
