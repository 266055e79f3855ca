"""Evaluation client by client: the user's validation step on each client's own data with its own personal entries."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torchmetrics import Metric, MetricCollection

from lightning_fed.data.federated import split_loaders
from lightning_fed.data.population import seeded_generators
from lightning_fed.errors import ClientFault
from lightning_fed.messages import Client
from lightning_fed.process_group import ProcessGroup
from lightning_fed.rounds.isolated_pass import find_metrics, isolated_pass, prepare_batch, run_prepared
from lightning_fed.rounds.lightning_internals import callbacks_of, is_overridden
from lightning_fed.rounds.logged_values import LoggedValues, intercepted
from lightning_fed.rounds.synchronisation import process_group_of

_log = logging.getLogger(__name__)

Stage = Literal["validation", "test"]

_PARTS = ("loss", "error", "perplexity", "distance", "divergence", "discrepancy")
_LOWER_IS_BETTER = {
    *("nll", "mse", "mae", "rmse", "mape", "smape", "msle", "rmsle", "ece", "mce", "ace", "brier", "wer", "cer", "ter"),
    *(
        "kl",
        "js",
        "mmd",
        "emd",
        "fid",
        "kid",
        "lpips",
        "hausdorff",
        "hd",
        "hd95",
        "assd",
        "bce",
        "ce",
        "entropy",
        "ppl",
    ),
    *("bpd", "bpc", "eer", "fpr", "fnr"),
}
_CLIENTS_VALUE = re.compile(r"fed/(?P<name>.+)/(mean|worst10)")


@dataclass
class ClientResults:
    """Values that the validation step logged, per client.

    Args:
        values: Metric name to client to value.
        higher_is_better: Metric name to which end of the scale is the good one.

    """

    values: dict[str, dict[Client, float]] = field(default_factory=dict)
    higher_is_better: dict[str, bool] = field(default_factory=dict)

    def summary(self) -> dict[str, float]:
        """``<metric>/mean``, ``/worst10`` (mean of the worst tenth of the clients) and ``/std`` over clients.

        Example:
            >>> results = ClientResults({"val_acc": {"a": 0.5, "b": 0.7}}, {"val_acc": True})
            >>> {name: round(value, 3) for name, value in results.summary().items()}
            {'val_acc/mean': 0.6, 'val_acc/worst10': 0.5, 'val_acc/std': 0.1}

        """
        summary = {}
        for name, values in self.values.items():
            ordered = torch.tensor(
                sorted(values.values(), reverse=not self.higher_is_better[name]), dtype=torch.float64
            )
            worst = ordered[: -(-len(ordered) // 10)]
            summary[f"{name}/mean"] = float(ordered.mean())
            summary[f"{name}/worst10"] = float(worst.mean())
            summary[f"{name}/std"] = float(ordered.std(correction=0))
        return summary


def evaluate_clients(
    trainer: L.Trainer,
    module: L.LightningModule,
    clients: Mapping[Client, Iterable[Any]],
    load: Callable[[Client], None],
    stage: Stage = "validation",
    is_pooled: bool = False,
) -> ClientResults:
    """Runs the module's validation or test step over each client's data.

    Several processes share the clients, and all have all results; or all evaluate every client, each on its part of
    the data.

    Args:
        trainer: The Trainer.
        module: The user's module; its metrics, modes and logs are left as they were.
        clients: Client to loader.
        load: Makes the module this client's model.
        stage: Whose step, hooks and limit of batches.
        is_pooled: Whether every process has a part of each client's data, as of Lightning's own evaluation loaders.

    """
    results, ranks = ClientResults(), process_group_of(trainer)
    evaluated = clients if is_pooled else itertools.islice(clients, ranks.rank, None, ranks.size)
    with nullcontext() if is_pooled else ranks.independent():
        for client in evaluated:
            try:
                load(client)
            except ClientFault as fault:
                _log.warning("Client %r is not evaluated: %s.", client, fault)
                continue
            values, directions = _evaluate(trainer, module, clients[client], stage, ranks if is_pooled else None)
            for name, value in values.items():
                results.values.setdefault(name, {})[client] = value
                results.higher_is_better[name] = directions.get(name, is_score(name))
    return results if is_pooled else _joined(ranks.gather(results), clients)


def evaluate_visit(trainer: L.Trainer, module: L.LightningModule, loader: Iterable[Any]) -> dict[str, float]:
    """Runs the module's validation step over a client's data during its visit, which then goes on as without it.

    Returns:
        Everything that is logged, by name.

    """
    with seeded_generators():
        return _evaluate(trainer, module, loader, "validation", keeps=True)[0]


def _evaluate(
    trainer: L.Trainer,
    module: L.LightningModule,
    data: Any,
    stage: Stage,
    pool: ProcessGroup | None = None,
    keeps: bool = False,
) -> tuple[dict[str, float], dict[str, bool]]:
    """Values that a pass over the data logs, and which end of each is good, where it is known.

    The module's hooks and those of its data are called as in Lightning's own evaluation; callbacks are not.

    Args:
        trainer: The Trainer.
        module: The user's module.
        data: A loader, or several.
        stage: Whose step, hooks and limit of batches.
        pool: The processes, where each has a part of the data.
        keeps: Whether parameters and buffers that a step writes have their values back; else the caller loads them.

    """
    limit = trainer.limit_val_batches if stage == "validation" else trainer.limit_test_batches
    logged, values, loaders = LoggedValues(), dict[str, float](), split_loaders(data)

    def call(hook: str, *args: Any) -> None:
        getattr(module, f"on_{stage}_{hook}")(*args)

    with isolated_pass(module, intercepted(logged.take), is_reloaded=not keeps, is_alone=pool is None):
        call("model_eval")
        call("start")
        call("epoch_start")
        for place, loader in enumerate(loaders):
            index = [place] if len(loaders) > 1 else []
            logged.suffix = f"/dataloader_idx_{place}" if index else ""
            for number, batch in enumerate(limited_batches(loader, limit)):
                with trainer.precision_plugin.forward_context():
                    prepared = logged.batch = prepare_batch(trainer, module, batch, place)
                call("batch_start", prepared, number, *index)
                output = run_prepared(trainer, module, f"{stage}_step", prepared, number, *index)
                call("batch_end", output, prepared, number, *index)
            if pool is not None:
                logged.pool(pool.gather({name: value.on_cpu() for name, value in logged.sums.items()}))
            values |= logged.results()
        logged.batch, logged.suffix = None, ""
        call("epoch_end")
        values |= logged.results()
        call("end")
        if is_overridden(f"on_{stage}_model_train", module):
            call("model_train")
        return values, _monitored(trainer) | _collected(module) | logged.directions


def _joined(parts: Sequence[ClientResults], clients: Iterable[Client]) -> ClientResults:
    """The results of several processes, in the order of the clients."""
    whole = ClientResults()
    for part in parts:
        whole.higher_is_better |= part.higher_is_better
    for name in whole.higher_is_better:
        joint = {client: value for part in parts for client, value in part.values.get(name, {}).items()}
        whole.values[name] = {client: joint[client] for client in clients if client in joint}
    return whole


def name_strangers(clients: Iterable[Client], known: Sequence[Client], has_personal: bool) -> None:
    """Says whose data are evaluated that do not train: those of new clients, or of misspelt ones.

    Args:
        clients: Clients that are evaluated.
        known: Clients that train.
        has_personal: Whether clients have entries of their own, which strangers lack.

    """
    keys = known if isinstance(known, range) else set(known)
    strangers = [client for client in clients if client not in keys]
    if strangers:
        _log.log(
            logging.WARNING if has_personal else logging.INFO,
            "%d clients are evaluated that do not train (%s), with %s. Those that train are %s.",
            len(strangers),
            _first(strangers),
            "the initial values of the personal entries" if has_personal else "the global model",
            _first(known),
        )


def _first(clients: Sequence[Client]) -> str:
    named = ", ".join(repr(client) for client in itertools.islice(clients, 5))
    return f"{named}, ..." if len(clients) > 5 else named


def limited_batches(loader: Iterable[Any], limit: int | float) -> Iterable[Any]:
    """As many batches as Lightning would take: a number of them, or a share."""
    if isinstance(limit, float):
        return loader if limit == 1.0 else itertools.islice(loader, int(limit * len(loader)))  # type: ignore[arg-type]
    return itertools.islice(loader, limit)


def _monitored(trainer: L.Trainer) -> dict[str, bool]:
    """Directions of the values that the user's callbacks monitor: of the clients' values as of their mean."""
    watching = [callback for callback in callbacks_of(trainer) if isinstance(callback, ModelCheckpoint | EarlyStopping)]
    is_max = {callback.monitor: callback.mode == "max" for callback in watching if callback.monitor is not None}
    parts = {name: _CLIENTS_VALUE.fullmatch(name) for name in is_max}
    return {name if part is None else part["name"]: is_max[name] for name, part in parts.items()}


def _collected(module: L.LightningModule) -> dict[str, bool]:
    """Directions of the metrics in collections: a step logs their values under their names."""
    return {
        name: metric.higher_is_better
        for collection in find_metrics(module)
        if isinstance(collection, MetricCollection)
        for name, metric in collection.items(copy_state=False)
        if isinstance(metric, Metric) and metric.higher_is_better is not None
    }


def is_score(name: str) -> bool:
    """True if higher is better, as far as a name says.

    Example:
        >>> is_score("val_acc"), is_score("val_loss"), is_score("valRMSE"), is_score("macer")
        (True, False, False, True)

    """
    words = set(re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()))
    return not words & _LOWER_IS_BETTER and not any(part in name.lower() for part in _PARTS)
