"""Lightning Trainer for federated training: one epoch per round."""

from __future__ import annotations

import inspect
import logging
import re
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, ProgressBar

from lightning_fed.argument_checks import check_option
from lightning_fed.callbacks.federation import Federation
from lightning_fed.callbacks.progress_bar import default_progress_bar
from lightning_fed.data.federated import is_one_client
from lightning_fed.fit.checks import check_processes
from lightning_fed.lazy_names import load_feature, refuse_foreign
from lightning_fed.method import Method
from lightning_fed.rule import Aggregator

_log = logging.getLogger(__name__)


class FederatedTrainer(L.Trainer):
    """``L.Trainer`` whose epochs are federated rounds. ``fit`` accepts loaders and data sets, also per client.

    Creates a :class:`~lightning_fed.callbacks.Federation` and a progress bar of rounds.

    Args:
        method: The federated method.
        max_rounds: Number of rounds: Lightning's ``max_epochs``.
        federation: A `Federation` callback, used instead of ``method`` and the arguments of ``Federation``.
        kwargs: Arguments of ``Federation`` and of ``L.Trainer``. Without ``strategy``, ``devices`` is 1 by default.

    Raises:
        ValueError: If ``max_rounds`` and ``max_epochs`` are both given, or ``federation`` and an argument of
            ``Federation``, or if a ``Federation`` is among the ``callbacks``.
        TypeError: If ``federation`` is not a ``Federation``, or ``kwargs`` contains an unknown argument.

    Example:
        >>> from lightning_fed.data import Dirichlet
        >>> clients = Dirichlet(100, alpha=0.1)
        >>> trainer = FederatedTrainer("fedprox:mu=0.1", max_rounds=50, partition=clients, logger=False)
        >>> trainer.max_epochs
        50
    """

    def __init__(
        self,
        method: str | Method | Aggregator = "fedavg",
        *,
        max_rounds: int | None = None,
        federation: Federation | None = None,
        **kwargs: Any,
    ) -> None:
        defaults = inspect.signature(Federation).parameters
        options = {"method": method, **{name: kwargs.pop(name) for name in defaults if name in kwargs}}
        if not (federation is None or isinstance(federation, Federation)):
            raise TypeError(f"Expected `federation` to be a Federation object, but got {federation!r}.")
        if federation is None:
            federation = Federation(**options)
        else:
            given = [name for name, value in options.items() if value != defaults[name].default]
            if given:
                raise ValueError(f"Expected either `federation` or its arguments, but got `federation` and {given}.")
        if max_rounds is not None:
            if kwargs.get("max_epochs") is not None:
                raise ValueError("Expected one of `max_rounds` and `max_epochs`, which mean the same, but got both.")
            kwargs["max_epochs"] = max_rounds
        if "strategy" not in kwargs and kwargs.get("devices", "auto") == "auto":
            kwargs["devices"] = 1  # Lightning would start a process for every device
        for name in kwargs:
            try:
                check_option("argument", name, list(inspect.signature(FederatedTrainer).parameters))
            except ValueError as error:
                raise TypeError(f"__init__() got an unexpected keyword argument {name!r}. {error}") from None
        self.federation = federation
        callbacks = kwargs.pop("callbacks", None) or []
        callbacks = [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
        refuse_foreign(*callbacks)
        if any(isinstance(callback, Federation) for callback in callbacks):
            raise ValueError("Expected a `Federation` in the argument `federation`, but got one among the `callbacks`.")
        _add_evaluation(callbacks)
        has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
        if kwargs.get("enable_progress_bar", True) and not has_bar and not kwargs.get("barebones"):
            callbacks.append(default_progress_bar())
        super().__init__(callbacks=[federation, *callbacks], **kwargs)

    def fit(
        self,
        model: L.LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: L.LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Trains the model in federated rounds. Afterwards the model contains the last complete global model.

        Args:
            model: Any LightningModule.
            train_dataloaders: One ``DataLoader`` or map-style data set for ``partition`` to split, a datamodule, or a
                mapping or sequence with each client's data. Each client's data is a ``DataLoader``, several loaders as
                for ``CombinedLoader``, or a map-style data set. Data sets are read in batches of 32; for another size
                pass loaders.
            val_dataloaders: Validation data for the global model, in the forms for ``L.Trainer.fit``. With a mapping
                from client names to data, each client is also evaluated separately. If ``partition`` splits the
                training data, a mapping can also have other keys, and contain several loaders as in Lightning.
            datamodule: Any datamodule for ``partition`` to split, or a
                :class:`~lightning_fed.data.FederatedDataModule`.
            ckpt_path: Checkpoint to resume from.
            weights_only: ``False`` allows checkpoints with pickled objects, from Lightning 2.6 on. Such objects can
                execute code.
        """
        refuse_foreign(model, train_dataloaders, datamodule)
        check_processes(self, is_one_client(self.federation.partition))  # before Lightning starts the processes
        options: dict[str, Any] = {} if weights_only is None else {"weights_only": weights_only}  # new in Lightning 2.6
        super().fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path, **options)


def _add_evaluation(callbacks: list[Callback]) -> None:
    try:
        kind = load_feature("lightning_fed.callbacks.evaluation.client_evaluation").ClientEvaluation
    except ModuleNotFoundError as error:
        _log.warning("The model is not evaluated on the clients' data: %s", error)
        return
    if not any(isinstance(callback, kind) for callback in callbacks):
        evaluation = kind()
        evaluation.is_default = True
        callbacks.insert(0, evaluation)


def _describe_arguments() -> None:
    own = inspect.signature(FederatedTrainer.__init__, eval_str=True)
    parameters = {name: parameter for name, parameter in own.parameters.items() if name != "kwargs"}
    descriptions = ["Creates the federation and the Trainer.\n\nArgs:\n"]
    for kind, text in ((Federation, Federation.__doc__), (L.Trainer, L.Trainer.__init__.__doc__)):
        for name, parameter in inspect.signature(kind, eval_str=True).parameters.items():
            parameters.setdefault(name, parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        section = re.search(r"^Args:\n((?:    .*\n|\s*\n)*)", inspect.cleandoc(text or "") + "\n", re.MULTILINE)
        descriptions.append(section[1].rstrip() + "\n" if section else "")
    setattr(FederatedTrainer.__init__, "__signature__", own.replace(parameters=list(parameters.values())))  # noqa: B010
    FederatedTrainer.__init__.__doc__ = "".join(descriptions)


_describe_arguments()
