"""Sums of feature vectors by class, from an additional pass or from training batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_fed.algorithms.fedmargin.prototypes import (
    Prototypes,
    class_prototypes,
    class_sums,
)
from lightning_fed.features.batches import BatchKey, as_classes, find_target
from lightning_fed.features.isolated_pass import forward_step, isolated_pass, prepare_batch, run_prepared
from lightning_fed.features.label_maps import VoidLabel, class_indices
from lightning_fed.features.layers import FeatureLayer, tap_features, without_compiled_code


@dataclass(frozen=True)
class FeatureSumOptions:
    """Options for sums of feature vectors by class. ``target`` is the position of the labels in a batch."""

    num_classes: int
    ignore_index: VoidLabel
    exclude_classes: tuple[int, ...]
    target: BatchKey

    def __post_init__(self) -> None:
        no_labels = torch.zeros(0, dtype=torch.int64)
        class_indices(no_labels, self.num_classes, self.ignore_index, self.exclude_classes)


class FeatureSums:
    """Sums and counts of feature vectors by class."""

    def __init__(self, options: FeatureSumOptions) -> None:
        self._options = options
        self._sums: Tensor | None = None
        self._counts: Tensor | None = None

    def add(self, features: Tensor, batch: Any) -> None:
        options = self._options
        labels = as_classes(find_target(batch, options.target), features.ndim)
        if features.ndim > 2 and labels.ndim == 1:
            features = features.flatten(2).mean(2)  # image labels: one label per feature map
        sums, counts = class_sums(
            features,
            labels,
            options.num_classes,
            ignore_index=options.ignore_index,
            exclude_classes=options.exclude_classes,
        )
        self._sums = sums if self._sums is None else self._sums + sums
        self._counts = counts if self._counts is None else self._counts + counts

    def gather(self, trainer: L.Trainer) -> None:
        if trainer.world_size == 1:
            return
        strategy, options = trainer.strategy, self._options
        device = strategy.root_device
        width = torch.tensor(0 if self._sums is None else self._sums.shape[1], device=device)
        width = strategy.reduce(width, reduce_op="max")
        if self._sums is None or self._counts is None:  # this process had no batch
            self._sums = torch.zeros(options.num_classes, int(width), dtype=torch.float64, device=device)
            self._counts = torch.zeros(options.num_classes, dtype=torch.int64, device=device)
        self._sums = strategy.reduce(self._sums, reduce_op="sum")
        self._counts = strategy.reduce(self._counts, reduce_op="sum")

    def prototypes(self) -> Prototypes | None:
        if self._sums is None or self._counts is None:
            return None
        return class_prototypes(self._sums.cpu(), self._counts.cpu())


def measure_feature_sums(
    trainer: L.Trainer,
    module: L.LightningModule,
    layer: FeatureLayer,
    batches: Iterable[Any],
    options: FeatureSumOptions,
) -> FeatureSums:
    """Sums a model's feature vectors by class in one pass over the data. Layers after ``layer`` do not run."""
    step, sums = forward_step(module), FeatureSums(options)
    assert step is not None
    with tap_features(module, layer) as tap, isolated_pass(module), without_compiled_code():
        has_run = has_missed = False
        for number, batch in enumerate(batches):
            prepared = prepare_batch(trainer, module, batch)

            def take(features: Tensor, prepared: Any = prepared) -> None:
                sums.add(features, prepared)
                raise _FeaturesReached

            tap.on_features = take
            try:
                output = run_prepared(trainer, module, step, prepared, number)
            except _FeaturesReached:
                has_run = True
            else:
                has_missed |= output is not None or step != "training_step"
    if has_missed and not has_run:
        raise ValueError(
            f"Expected `{step}` to compute the model's features, but {layer} did not run: name another `layer`."
        )
    return sums


class _FeaturesReached(BaseException):
    """Raised to end ``training_step`` after the feature layer. ``except Exception`` in a step does not catch this."""


class TrainingFeatureSums:
    """Feature sums by class in the first and the last epoch. Training below two epochs is divided into halves."""

    def __init__(self, options: FeatureSumOptions, num_batches: int, per_epoch: int | None = None) -> None:
        self.first, self.last = FeatureSums(options), FeatureSums(options)
        self._length = min(per_epoch or num_batches, num_batches // 2)
        self._num_batches = num_batches
        self._batch: Any = None  # labels of the current batch, until the features arrive
        self._num_started = self._num_seen = self._num_skipped = 0

    def start_batch(self, batch: Any) -> None:
        self._batch = batch
        self._num_started += 1

    def take(self, features: Tensor) -> None:
        """Adds the features from a batch's first forward pass to the sums."""
        batch, self._batch = self._batch, None
        if batch is None:  # a later forward pass in the same batch
            return
        self._num_seen += 1
        position = self._num_started - 1
        if position < self._length:
            self.first.add(features, batch)
        elif position >= self._num_batches - max(1, self._length):
            self.last.add(features, batch)

    def end_batch(self, is_trained: bool) -> None:
        """Ends a training batch. ``is_trained`` is false if ``training_step`` skipped the batch."""
        if self._batch is not None and not is_trained:
            self._num_skipped += 1
        self._batch = None

    def check(self, layer: FeatureLayer, is_manual: bool) -> None:
        """Raises ``ValueError`` if the layer did not run in every batch, except batches skipped in training."""
        # Manual optimization only requires one batch with the layer.
        is_blind = is_manual and self._num_started > 0 and self._num_seen == 0
        if is_blind or self._num_seen + self._num_skipped < self._num_started:
            raise ValueError(
                f"Expected training to use the model's features in every batch, but {layer} ran in {self._num_seen} "
                f"of {self._num_started} batches: name another `layer`, or use passes='exact' if `torch.compile` has "
                "compiled the model before the fit."
            )
