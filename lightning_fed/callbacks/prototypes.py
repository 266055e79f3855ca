"""Class prototypes of a client's features, before and after its visit; of each epoch on a plain Trainer."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_fed.callbacks.federated_callback import FederatedCallback
from lightning_fed.callbacks.federation import Federation, find_federation
from lightning_fed.callbacks.side_pass import forward_step, one_pass, prepare_batch, run_prepared, side_pass
from lightning_fed.data.loader_clients import undisturbed
from lightning_fed.data.population import PlannedVisit
from lightning_fed.data.rounds import describe
from lightning_fed.functional.margin import ClassReduction, MarginKind, aggregate_mean_margin, local_prototype_margin
from lightning_fed.functional.options import check_option
from lightning_fed.functional.prototypes import (
    Prototypes,
    class_prototypes,
    class_sums,
    lpm_name,
    pack_prototypes,
    unpack_prototypes,
)
from lightning_fed.messages import Broadcast, Client, ClientUpdate
from lightning_fed.modules.features import FeatureLayer, FeatureTap, count_classes, find_feature_layer, tap_features

_log = logging.getLogger(__name__)

_TARGET_KEYS = ("target", "targets", "label", "labels", "mask", "masks", "y")


class ClassPrototypes(FederatedCallback):
    r"""Measures the class-wise means of the learned features, and how far training moves them.

    In a federation every client sends its prototypes after its visit along with its update, with the number of feature
    vectors behind each and its local prototype margin (LPM): for :class:`~lightning_fed.aggregators.FedMargin`, or to
    look at. The mean LPM is logged as ``fed/lpm``. On a plain ``L.Trainer`` the same is measured from the start of
    every epoch to its end, and logged as ``prototypes/lpm`` and ``prototypes/amm`` (the margin among the classes).

    ``passes="exact"`` runs the data through the model twice more, in evaluation mode and without gradients: once
    before the visit and once after it, on the same examples. That is the definition, and costs two forward passes.
    ``passes="online"`` takes the features that training computes anyway: the prototypes *before* are those of the
    visit's first pass over the data and those *after* of its last (of its first and second half, where it has only
    one; a visit of one batch has no *before*). The weights move meanwhile, augmentation and dropout are on, and two
    halves hold different examples: good for watching and for long visits, while margins of short visits are noisy.

    The exact passes run the module's ``training_step`` (with manual optimization its ``validation_step``), so that
    the model is fed as in training. An augmentation inside the data set cannot be switched off from here; both passes
    draw the same random numbers. They fetch their batches in the main process. The training that goes on draws the
    same random numbers as without this callback.

    Args:
        layer: Name of the layer whose output is the features; ``"auto"`` takes what
            :func:`~lightning_fed.modules.find_feature_layer` finds, and says so in the log.
        num_classes: Number of classes; ``"auto"`` takes the module's hyper-parameter ``num_classes``, or else the
            channels of the logits.
        ignore_index: Label of void pixels.
        exclude_classes: Classes that are left out, such as a background.
        target: Where a batch has its labels: an index or key, or a function of the batch; by default the second
            element, or ``batch["target"]``, ``["label"]``, ``["mask"]``, ``["y"]`` or their plurals. Integers of shape
            ``(N,)`` or ``(N, [1,] *size)``; maps are brought to the features' size by nearest neighbour.
        passes: ``"exact"`` or ``"online"``.
        max_batches: Largest number of batches of an exact pass; ``None`` for all.
        normalize_features: Whether feature vectors are divided by their length.
        min_count: Fewest feature vectors of a class that is not taken to be absent.
        margin: Margin of a class in LPM, see :func:`~lightning_fed.functional.class_margins`.
        class_reduction: How LPM makes one number of the classes'.
        lpm_before: What LPM compares with: the prototypes under the weights that were downloaded, or those that the
            client kept after its last visit.

    Raises:
        ValueError: If an option is unknown or out of its range; in ``fit``, if the layer or the number of classes
            cannot be found.

    Example:
        >>> prototypes = ClassPrototypes(layer="model.encoder", exclude_classes=[0])
        >>> trainer = L.Trainer(max_epochs=5, callbacks=[prototypes], logger=False)

    References:
        Michieli, Toldo and Ozay, "Federated Learning via Attentive Margin of Semantic Feature Representations",
        IEEE Internet of Things Journal 2022. Its equations were not at hand: they are reconstructed, see
        :mod:`lightning_fed.functional.margin`.

    """

    def __init__(
        self,
        layer: str = "auto",
        num_classes: int | Literal["auto"] = "auto",
        ignore_index: int | None = 255,
        exclude_classes: Sequence[int] = (),
        target: int | str | Callable[[Any], Tensor] | None = None,
        passes: Literal["exact", "online"] = "exact",
        max_batches: int | None = None,
        normalize_features: bool = False,
        min_count: int = 1,
        margin: MarginKind = "semantic",
        class_reduction: ClassReduction = "mean",
        lpm_before: Literal["download", "last_local"] = "download",
    ) -> None:
        check_option("passes", passes, ("exact", "online"))
        check_option("lpm_before", lpm_before, ("download", "last_local"))
        empty = Prototypes(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
        local_prototype_margin(empty, empty, margin=margin, class_reduction=class_reduction)  # checks both names
        if max_batches is not None and max_batches < 1:
            raise ValueError(f"Expected `max_batches` to be at least 1, but got {max_batches}.")
        if min_count < 1:
            raise ValueError(f"Expected `min_count` to be at least 1, but got {min_count}.")
        self.layer = layer
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        self.exclude_classes = tuple(exclude_classes)
        self.target = target
        self.passes = passes
        self.max_batches = max_batches
        self.normalize_features = normalize_features
        self.min_count = min_count
        self.margin: MarginKind = margin
        self.class_reduction: ClassReduction = class_reduction
        self.lpm_before = lpm_before
        self._layer: FeatureLayer
        self._classes: int
        self._watch = ExitStack()
        self._tap: FeatureTap | None = None
        self._visit: PlannedVisit | None = None
        self._window = (0, 0, 0)  # batches in the first and in the last part, in the visit, served so far
        self._before: Prototypes | None = None
        self._others: Prototypes | None = None  # of all clients, where one client's margins need other classes
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}

    # What both doors share

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Finds the layer and the number of classes."""
        self._layer = find_feature_layer(pl_module) if self.layer == "auto" else FeatureLayer(self.layer)
        classes = count_of_classes(pl_module) if self.num_classes == "auto" else self.num_classes
        if classes is None:
            raise ValueError("The number of classes cannot be found: pass `num_classes` to `ClassPrototypes`.")
        self._classes = classes
        if self.layer == "auto":
            rank_zero_info(f"ClassPrototypes: the features of {classes} classes are {self._layer}.")
        with tap_features(pl_module, self._layer):
            pass  # the layer is there
        if forward_step(pl_module) is None and self.passes == "exact":
            raise ValueError(
                "A module with manual optimization needs a `validation_step` for exact passes: add one, or use"
                " passes='online'."
            )

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Takes the labels of the batch, for the features that its training pass is about to make."""
        if self.passes == "online" and self._tap is not None and batch is not None:
            self._watch_batch(self._labels(batch))

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Takes the hook off the model."""
        self._watch.close()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Takes the hook off the model."""
        self._watch.close()

    # A federation

    def on_client_start(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        """Measures the prototypes of the downloaded weights."""
        self._visit = planned = find_federation(trainer).current_visit
        assert planned is not None
        self._before, self._others = None, unpack_prototypes(broadcast.extras, self._classes)
        if self.passes == "online":
            per_epoch = find_federation(trainer).population.batches_per_epoch(client)
            self._start_watching(module, planned.num_batches, per_epoch)
        elif self.lpm_before == "download":
            self._before = self._measure_client(trainer, module, planned)

    def on_client_end(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, update: ClientUpdate
    ) -> None:
        """Measures the prototypes of the trained weights, and puts them into the update."""
        assert self._visit is not None
        if self.passes == "online":
            self._before, after = self._stop_watching()
        else:
            after = self._measure_client(trainer, module, self._visit)
        if after is None:
            return
        memory = find_federation(trainer).client_memory
        if self.lpm_before == "last_local":
            self._before = unpack_prototypes(memory, self._classes)
            memory |= pack_prototypes(after)
        update.extras |= pack_prototypes(after)
        if self._before is None:
            return
        margin = local_prototype_margin(
            after, self._before, margin=self.margin, class_reduction=self.class_reduction, fallback=self._others
        )
        if not margin.isnan():
            update.extras[lpm_name(self.margin, self.class_reduction)] = margin
            update.metrics["lpm"] = float(margin)

    def _measure_client(
        self, trainer: L.Trainer, module: L.LightningModule, planned: PlannedVisit
    ) -> Prototypes | None:
        population = find_federation(trainer).population
        try:
            with isolate_rng():
                return self._measure(trainer, module, one_pass(population, planned.visit, aside=True))
        except Exception as error:
            _log.warning("Client %r's prototypes are left out: %s.", planned.visit.client, describe(error))
            return None

    # A plain Trainer

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measures the prototypes of the weights at the start of the epoch."""
        if is_federated(trainer):
            return
        if self.passes == "online":
            self._start_watching(pl_module, int(trainer.num_training_batches), None)
        else:
            self._before = self._measure_epoch(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measures the prototypes at the end of the epoch, and logs the margins."""
        if is_federated(trainer):
            return
        if self.passes == "online":
            self._before, after = self._stop_watching()
        else:
            after = self._measure_epoch(trainer, pl_module)
        if after is None or self._before is None:
            return
        values = {
            "prototypes/lpm": local_prototype_margin(
                after, self._before, margin=self.margin, class_reduction=self.class_reduction
            ),
            "prototypes/amm": aggregate_mean_margin(after),
        }
        for name, value in values.items():
            if not value.isnan():
                pl_module.log(name, value.float(), batch_size=1)

    def _measure_epoch(self, trainer: L.Trainer, module: L.LightningModule) -> Prototypes:
        loader: Any = trainer.train_dataloader
        with isolate_rng(), undisturbed(loader, trainer.current_epoch):
            return self._measure(trainer, module, itertools.islice(loader, int(trainer.num_training_batches)))

    # Measuring

    def _measure(self, trainer: L.Trainer, module: L.LightningModule, batches: Iterable[Any]) -> Prototypes:
        step = forward_step(module)
        assert step is not None
        sums: list[tuple[Tensor, Tensor]] = []
        with tap_features(module, self._layer) as tap, side_pass(module):
            for number, batch in enumerate(itertools.islice(batches, self.max_batches)):
                moved = prepare_batch(trainer, module, batch)
                run_prepared(trainer, module, step, moved, number)
                added = self._class_sums(tap, self._labels(moved))
                sums = [(sums[0][0] + added[0], sums[0][1] + added[1])] if sums else [added]
        if not sums:
            raise ValueError("its data gave no batch")
        return self._prototypes(*sums[0])

    def _start_watching(self, module: L.LightningModule, num_batches: int, per_epoch: int | None) -> None:
        """Reads the features of training from now on; those of the first and the last batches are summed up."""
        self._watch.close()
        self._tap = self._watch.enter_context(tap_features(module, self._layer))
        length = num_batches // 2 if per_epoch is None else min(per_epoch, num_batches // 2)
        self._window = (length, num_batches, 0)
        self._sums = {}

    def _watch_batch(self, labels: Tensor) -> None:
        assert self._tap is not None
        length, total, place = self._window
        self._window = (length, total, place + 1)
        parts = [
            part for part, is_in in (("before", place < length), ("after", place >= total - max(1, length))) if is_in
        ]

        def note(tap: FeatureTap) -> None:
            added = self._class_sums(tap, labels)
            for part in parts:
                sums, counts = self._sums.get(part, (0, 0))
                self._sums[part] = (sums + added[0], counts + added[1])

        self._tap.on_features = note if parts else None

    def _stop_watching(self) -> tuple[Prototypes | None, Prototypes | None]:
        self._watch.close()
        self._tap = None
        before, after = (self._prototypes(*self._sums[part]) if part in self._sums else None for part in _PARTS)
        return before, after

    def _class_sums(self, tap: FeatureTap, labels: Tensor) -> tuple[Tensor, Tensor]:
        features = tap.features
        if features is None:
            raise ValueError(f"Expected the module to use its features, but {self._layer} was not run.")
        if features.ndim > 2 and labels.ndim == 1:
            features = features.flatten(2).mean(2)  # one label for a whole map
        return class_sums(
            features.detach(),
            labels,
            self._classes,
            ignore_index=self.ignore_index,
            exclude_classes=self.exclude_classes,
            normalize_features=self.normalize_features,
        )

    def _prototypes(self, sums: Tensor, counts: Tensor) -> Prototypes:
        return class_prototypes(sums.cpu(), counts.cpu(), min_count=self.min_count)

    def _labels(self, batch: Any) -> Tensor:
        labels = find_target(batch, self.target)
        if labels.is_floating_point():
            if not bool((labels == labels.round()).all()):
                raise ValueError("Expected labels to be classes, but they are fractions: pass `target`.")
            labels = labels.long()
        return labels.squeeze(1) if labels.ndim > 2 and labels.shape[1] == 1 else labels


_PARTS = ("before", "after")


def is_federated(trainer: L.Trainer) -> bool:
    """Whether the Trainer has a federation."""
    return any(isinstance(callback, Federation) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def find_target(batch: Any, target: int | str | Callable[[Any], Tensor] | None = None) -> Tensor:
    """The labels of a batch.

    Args:
        batch: The batch.
        target: Index, key or function; ``None`` for the second element, or the usual keys.

    Raises:
        ValueError: If there are none.

    Example:
        >>> find_target([torch.zeros(2, 1), torch.tensor([0, 1])]), find_target({"x": 0, "mask": torch.tensor([5])})
        (tensor([0, 1]), tensor([5]))

    """
    found: Any
    if callable(target):
        found = target(batch)
    elif target is not None:
        found = batch[target]
    elif isinstance(batch, Mapping):
        found = next((batch[key] for key in _TARGET_KEYS if key in batch), None)
    else:
        found = batch[1] if isinstance(batch, Sequence) and len(batch) > 1 else None
    if not isinstance(found, Tensor):
        raise ValueError(f"Expected a batch with labels, but found {type(found).__name__}: say where with `target`.")
    return found


def count_of_classes(module: L.LightningModule) -> int | None:
    """The module's hyper-parameter ``num_classes`` (or ``classes``), or else the channels of its logits."""
    for name in ("num_classes", "classes"):
        value = module.hparams.get(name)
        if isinstance(value, int) and value > 1:
            return value
    return count_classes(module)
