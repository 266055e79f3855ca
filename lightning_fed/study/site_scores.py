"""Scores every single test example at each site."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import BinaryAUROC

from lightning_fed.argument_checks import check_option
from lightning_fed.atomic_files import write_text_atomically
from lightning_fed.callbacks.evaluation.client_evaluation import has_clients, loaders_of
from lightning_fed.callbacks.evaluation.data_pass import (
    Stage,
    compute_states,
    evaluate_data,
    is_close,
    limit_of,
    limited_batches,
)
from lightning_fed.callbacks.evaluation.metric_states import (
    MetricStates,
    StateRules,
    compute_measured,
    computing,
    metric_of,
    named_metrics,
)
from lightning_fed.callbacks.evaluation.report import EvaluationReport
from lightning_fed.callbacks.evaluation.results import monitored_name
from lightning_fed.callbacks.evaluation.tables import row_name
from lightning_fed.callbacks.federation import Federation, federation_of
from lightning_fed.data.batch_structure import batch_tensors, rebuild_batch
from lightning_fed.data.federated import EvaluationData, split_loaders
from lightning_fed.data.population import batch_length
from lightning_fed.features.isolated_pass import isolated_pass
from lightning_fed.federated_callback import AskableCallback
from lightning_fed.lightning.internals import callbacks_of, datamodule_of, is_fitting, is_overridden
from lightning_fed.messages import Client, ClientUpdate
from lightning_fed.partitions.partitioned import PartitionedData
from lightning_fed.study.statistics import draw_cases

_log = logging.getLogger(__name__)

REPLICATES = 1000
"""Number of bootstrap replicates for metrics other than means over cases."""

SITES = "sites.json"
"""File name for the scores of a run."""

_ALL_STATES = StateRules(lists=("*",))


class SiteScores(AskableCallback):
    """Scores every single example of each site (client) in ``trainer.test`` or ``trainer.validate``.

    Each site's model (without a federation, the module) is evaluated on the site's data. The scores are not sent.

    Args:
        metric: Name of a logged value: ``"val_acc"``, or ``"test_acc"`` for test data.
        stage: ``"validation"`` or ``"test"``.
        patient: Key of the patient names in a dictionary batch; ``None`` if all cases are independent.

    Attributes:
        scores: A dictionary for each site. ``"cases"`` has fingerprints of the examples, and ``"patients"`` the patient
            names. The other keys depend on the metric. If the metric is a mean over cases, ``"scores"`` has the value
            of each case. For the area under the ROC curve without ``patient``, ``"positives"`` and ``"negatives"`` have
            the predictions for the two classes. For other metrics, ``"value"`` is the metric on all cases, and
            ``"replicates"`` has one value per bootstrap sample.

    Raises:
        MisconfigurationException: If the fit uses several processes, the server sees no client models (as with a secure
            sum), or a site has no data or metric.

    Example:
        >>> scores = SiteScores("test_acc")
    """

    supports_vectorize = True
    keeps_privacy = True

    def __init__(self, metric: str, stage: Stage = "test", patient: str | None = None) -> None:
        check_option("stage", stage, ("validation", "test"))
        self.metric, self.stage, self.patient = metric, stage, patient
        self.scores: dict[str, dict[str, Any]] = {}

    @classmethod
    def of(cls, monitor: str, stage: Stage, patient: str | None = None) -> SiteScores:
        metric = monitored_name(monitor)
        return cls(metric.replace("val", "test", 1) if stage == "test" else metric, stage, patient)

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("metric", "stage", "patient", "scores")}

    def save(self, path: Path) -> None:
        write_text_atomically(path, json.dumps(self.state()))

    def load(self, path: Path) -> bool:
        saved = json.loads(path.read_text()) if path.exists() else {}
        if saved | {"scores": self.scores} != self.state():
            return False
        self.scores = saved["scores"]
        return True

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        check_sites(trainer, federation_of(trainer))

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Raises an error before training if a client has no evaluation data."""
        datamodule = datamodule_of(trainer)
        # `setup` may load the data later.
        loads_later = isinstance(datamodule, EvaluationData) and is_overridden("setup", datamodule)
        if self.stage == "validation" or isinstance(datamodule, PartitionedData) or not loads_later:
            self._check_data(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.stage == "validation" and not is_fitting(trainer):
            self._score(trainer, pl_module)

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.stage == "test":
            self._score(trainer, pl_module)

    def on_client_question(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, question: Mapping[str, Any]
    ) -> ClientUpdate:
        data = loaders_of(trainer, self.stage)[client]
        limit = limit_of(trainer, self.stage)
        self.scores[row_name(client)] = score_site(
            trainer, module, client, data, self.metric, self.stage, self.patient, limit
        )
        return ClientUpdate(client, 1, {})

    def _score(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._check_data(trainer)
        self.scores, clients, federation = {}, list(loaders_of(trainer, self.stage)), federation_of(trainer)
        if federation is None:
            for client in clients:
                self.on_client_question(trainer, module, client, {})
            return
        with federation.averages_in_place():
            answers = federation.ask(module, self, clients, {}, own=True)
        if answers.failed or federation.has_lost_entries:
            raise MisconfigurationException(
                "Expected a model for every site, but the checkpoint lacks clients' states, or clients failed "
                f"({answers.failed}): correct the causes in the log, and repeat the run."
            )

    def _check_data(self, trainer: L.Trainer) -> None:
        if not has_clients(trainer, self.stage):
            raise MisconfigurationException(
                f"Expected {self.stage} data for every client: give a mapping to FederatedDataModule or a fraction to"
                " PartitionedData, or choose another `stage`."
            )


def check_sites(trainer: L.Trainer, federation: Federation | None) -> None:
    """Raises an error if scores by site cannot be computed, for example with clients on other machines."""
    check_rounds(trainer)
    if federation is not None and federation.is_remote:
        raise MisconfigurationException(
            "A study needs all clients on this machine, but got clients on other machines: use `SiteStudy`."
        )
    if federation is not None and federation.server.chain.reveals != "update":
        raise MisconfigurationException(
            "A study needs the model of each client, but a secure sum or central privacy hides these models: remove the"
            " update step (`SecureSum` or `CentralDP`), or use `SiteStudy`, which writes a table at each site."
        )


def check_rounds(trainer: L.Trainer) -> None:
    """Raises an error for a Trainer with several processes, or with ``EarlyStopping``."""
    reason = ""
    if trainer.world_size > 1:
        reason = f"one process, as scores are not joined over processes, but got {trainer.world_size}: set `devices=1`"
    elif any(isinstance(callback, EarlyStopping) for callback in callbacks_of(trainer)):
        reason = "equal numbers of rounds for all methods, but got `EarlyStopping`: remove the callback"
    if reason:
        raise MisconfigurationException(f"A study needs {reason}.")


def score_site(
    trainer: L.Trainer,
    module: L.LightningModule,
    client: Client,
    data: Any,
    metric: str,
    stage: Stage,
    patient: str | None,
    limit: int | float,
) -> dict[str, Any]:
    """Scores each test example of a client with the module's current weights.

    Returns one site's dictionary in :attr:`SiteScores.scores`. ``patient`` is the key for patient names in a batch, if
    any. ``limit`` is the number (int) or fraction (float) of batches.
    """
    loaders = split_loaders(data)
    if len(loaders) > 1:
        raise MisconfigurationException(f"Expected one {stage} loader for client {client!r}, but got {len(loaders)}.")
    whole = evaluate_data(trainer, module, data, stage, _ALL_STATES, limit, keeps=True)
    if metric not in whole.values:
        raise MisconfigurationException(
            f"Expected the metric to be logged in the {stage} step, but {metric!r} is not among {sorted(whole.values)}."
        )
    cases = single_cases(limited_batches(loaders[0], limit))
    metrics = named_metrics(module)
    key = whole.metrics.get(metric)
    if (areas := _find_areas(metrics, whole, key)) is not None and patient is None:
        return areas | _identity(cases, patient)
    reports, kept = [], []
    for case in cases:
        kept.append(case)
        reports.append(evaluate_data(trainer, module, [case], stage, _ALL_STATES, 1.0, keeps=True))
    scores = [report.values.get(metric, math.nan) for report in reports]
    known = [score for score in scores if not math.isnan(score)]
    is_mean = bool(known) and is_close(math.fsum(known) / len(known), whole.values[metric])
    if key is None and not is_mean:  # another object may have an equal value, such as 1
        computed = compute_states(module, {client: whole})[client]
        key = next((key for key, value in computed.items() if is_close(value, whole.values[metric])), None)
        if (areas := _find_areas(metrics, whole, key)) is not None and patient is None:
            return areas | _identity(kept, patient)
    if key is None and not known:
        raise MisconfigurationException(
            f"The metric {metric!r} has no value for single cases (batches of size 1), and is not the value of one"
            " `torchmetrics` object either: log the `torchmetrics` object itself, or choose another metric."
        )
    answer = _identity(kept, patient)
    if known and (key is None or is_mean):
        answer["scores"] = scores
        if not is_mean:
            _log.warning(
                "The mean of %r over single cases of client %r is %.4g, but the value of all cases is %.4g: the study "
                "compares means over single cases, because the value is not from one `torchmetrics` object.",
                metric,
                client,
                math.fsum(known) / len(known),
                whole.values[metric],
            )
    if key is not None and is_mean and len(set(known)) == 1:
        # With F1, a perfect model has a mean by chance, and must be comparable with other models.
        answer |= {"value": whole.values[metric], "replicates": [whole.values[metric]] * REPLICATES}
    elif key is not None and not is_mean:
        groups: dict[Any, list[MetricStates]] = {}
        for report, group in zip(reports, answer["patients"] or range(len(reports)), strict=True):
            groups.setdefault(group, []).append(report.states)
        replicates = bootstrap(module, client, key, list(groups.values()))
        answer |= {"value": whole.values[metric], "replicates": replicates}
    return answer


def _find_areas(metrics: Mapping[str, Metric], whole: EvaluationReport, key: str | None) -> dict[str, Any] | None:
    curve = None if key is None else metrics[metric_of(key)]
    if key is None or not isinstance(curve, BinaryAUROC) or curve.thresholds is not None or curve.max_fpr is not None:
        return None
    state = whole.states[key].values
    is_positive, found = state["target"] == 1, state["preds"].double()
    return {"positives": found[is_positive].tolist(), "negatives": found[~is_positive].tolist()}


def bootstrap(
    module: L.LightningModule, client: Client, key: str, groups: Sequence[Sequence[MetricStates]]
) -> list[float]:
    """Computes the metric ``key`` on bootstrap samples of a site's cases. Returns one value per sample.

    ``groups`` contains a list of metric states for each independent case or patient. Every call for a client draws the
    same samples, to compare models.
    """
    with isolated_pass(module):
        metrics = named_metrics(module)
        with computing(metrics.values(), compute_measured):
            replicates = []
            for replicate in range(REPLICATES):
                places = draw_cases(0, replicate, client, len(groups))
                merged = MetricStates.merge(metrics, [states for place in places for states in groups[place]])
                replicates.append(merged.compute(metrics, [key]).get(key, math.nan))
    return replicates


def single_cases(batches: Iterable[Any]) -> Iterator[Any]:
    """Splits batches into batches with a single example.

    Example:
        >>> [case["x"].tolist() for case in single_cases([{"x": torch.tensor([1, 2])}, {"x": torch.tensor([3])}])]
        [[1], [2], [3]]
    """
    for batch in batches:
        tensors, length = batch_tensors(batch), batch_length(batch)
        if any(tensor.ndim == 0 or len(tensor) != length for tensor in tensors):
            shapes = [tuple(tensor.shape) for tensor in tensors]
            raise MisconfigurationException(
                f"Expected tensors with one row per case in a batch, but got the shapes {shapes}: change `collate_fn`."
            )
        for row in range(length):
            case = rebuild_batch(batch, iter([tensor[row : row + 1] for tensor in tensors]))
            if isinstance(case, Mapping):  # lists of strings, such as the patients' names
                names = [name for name, value in case.items() if isinstance(value, list) and len(value) == length]
                case = {**case, **{name: case[name][row : row + 1] for name in names if not batch_tensors(case[name])}}
            yield case


def _identity(cases: Iterable[Any], patient: str | None) -> dict[str, Any]:
    fingerprints, patients = [], []
    for case in cases:
        tensors = [tensor.detach().cpu().contiguous().flatten().view(torch.uint8) for tensor in batch_tensors(case)]
        fingerprints.append(hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:16])
        if patient is not None:
            patients.append(_patient_of(case, patient))
    return {"cases": fingerprints, "patients": patients if patient is not None else None}


def _patient_of(case: Any, patient: str) -> Any:
    if not isinstance(case, Mapping) or patient not in case:
        raise MisconfigurationException(
            f"Expected batches as dictionaries with the key {patient!r} for the patient, but got {type(case).__name__}."
        )
    value = case[patient]
    value = value.tolist() if isinstance(value, Tensor) else value
    return value[0] if isinstance(value, list) and len(value) == 1 else value
