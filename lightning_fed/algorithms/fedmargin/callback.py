"""FedMargin on the client: measures class prototypes before and after local training."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_fed.algorithms.fedmargin.aggregator import FedMargin
from lightning_fed.algorithms.fedmargin.feature_sums import FeatureSumOptions, TrainingFeatureSums, measure_feature_sums
from lightning_fed.algorithms.fedmargin.margins import (
    ClassReduction,
    MarginKind,
    aggregate_mean_margin,
    local_prototype_margin,
)
from lightning_fed.algorithms.fedmargin.prototype_messages import lpm_key, pack_prototypes, unpack_prototypes
from lightning_fed.algorithms.fedmargin.prototypes import Prototypes
from lightning_fed.argument_checks import check_count, check_option
from lightning_fed.callbacks.federation import federation_of, find_federation
from lightning_fed.callbacks.training_trace import find_class_task
from lightning_fed.data.loader_clients import isolated_generators
from lightning_fed.data.population import PlannedVisit, seed_everything, seeded_generators
from lightning_fed.errors import OptionError, describe
from lightning_fed.features.isolated_pass import forward_step, until_fault
from lightning_fed.features.label_maps import VoidLabel
from lightning_fed.features.layers import FeatureLayer, find_feature_layer, tap_features
from lightning_fed.federated_callback import FederatedCallback, RevertingCallback
from lightning_fed.messages import Broadcast, Client, ClientUpdate
from lightning_fed.method import register

_log = logging.getLogger(__name__)


class ClassPrototypes(RevertingCallback, FederatedCallback):
    """Measures class prototypes (feature means by class) before and after a client's local training.

    The local prototype margin (LPM) measures how far training moves the prototypes. By default, the LPM is half the
    distance between both prototypes of a class, averaged over classes. Each update contains the prototypes after
    training and the LPM. The mean LPM is logged as ``clients/lpm``. A plain ``L.Trainer`` measures each epoch, and logs
    ``prototypes/lpm`` and ``prototypes/amm`` (mean margin between classes).

    - ``passes="exact"`` computes features of the same examples before and after local training, in evaluation mode.
      These two passes run ``training_step``, or with manual optimization ``validation_step``. Training does not change.
    - ``passes="online"`` reuses features from the first and the last training epoch, or from both halves of a single
      epoch. The features also depend on weight changes within an epoch, augmentation and dropout. Margins from few
      batches are noisy, and with one batch the LPM is missing.

    Args:
        layer: Name of the layer with the features as output. By default, the features are the classifier's input, or
            the encoder's output in a segmentation model.
        num_classes: Number of classes, by default the number of logits.
        ignore_index: Void label, or ``None``. The default is the loss's ignored label, or else 255 unless 255 is a
            class.
        exclude_classes: Classes to exclude, such as a background.
        target: Position of the labels in a batch: index, key or function. The default is the labels used in the loss.
            Labels are integers, shape ``(N,)`` or ``(N, [1,] *size)``. If ``layer`` and ``num_classes`` are given, the
            default is the second element, or a key such as ``"target"``.
        passes: ``"exact"`` or ``"online"``.
        max_batches: Maximum number of batches in an exact pass, by default all.
        margin: Kind of margin per class, see :func:`~lightning_fed.algorithms.fedmargin.class_margins`.
        class_reduction: Reduction over classes in the LPM.
        lpm_before: Model for the prototypes before training: the received model (``"download"``), or the client's model
            after its previous training (``"last_local"``).

    Saved state: the feature ``layer``. With a plain Trainer :attr:`prototypes` contains the last epoch's prototypes.

    Raises:
        ValueError: If an option is invalid, the layer does not exist, or the fit resumes with another layer.
        MisconfigurationException: In ``fit``, if the trial step does not identify the classifier or the labels.

    Example:
        >>> prototypes = ClassPrototypes(layer="model.encoder", exclude_classes=[0])
        >>> trainer = L.Trainer(max_epochs=5, callbacks=[prototypes], logger=False)
    """

    def __init__(
        self,
        layer: str = "auto",
        num_classes: int | Literal["auto"] = "auto",
        ignore_index: VoidLabel = "auto",
        exclude_classes: Sequence[int] = (),
        target: int | str | Callable[[Any], Tensor] | None = None,
        passes: Literal["exact", "online"] = "exact",
        max_batches: int | None = None,
        margin: MarginKind = "semantic",
        class_reduction: ClassReduction = "mean",
        lpm_before: Literal["download", "last_local"] = "download",
    ) -> None:
        check_option("passes", passes, ("exact", "online"))
        check_option("lpm_before", lpm_before, ("download", "last_local"))
        empty = Prototypes(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
        local_prototype_margin(empty, empty, margin=margin, class_reduction=class_reduction)  # checks the names
        if num_classes != "auto":
            check_count("num_classes", num_classes)
        if max_batches is not None:
            check_count("max_batches", max_batches)
        self.layer = layer
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        self.exclude_classes = tuple(exclude_classes)
        self.target = target
        self.passes = passes
        self.max_batches = max_batches
        self.margin = margin
        self.class_reduction = class_reduction
        self.lpm_before = lpm_before
        self.prototypes: Prototypes | None = None
        self.classes_found: int | None = None
        self._layer: FeatureLayer
        self._layer_name: str | None = None  # description of the feature layer
        self._checkpoint_layer: str | None = None  # feature layer in the checkpoint
        self._options: FeatureSumOptions
        self._hooks = ExitStack()
        self._training_sums: TrainingFeatureSums | None = None
        self._has_warned = False
        self._prototypes_before: Prototypes | None = None
        self._aggregate: Prototypes | None = None  # broadcast prototypes, for margins that compare classes

    # In a federation and with a plain Trainer

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._layer_name = self._checkpoint_layer = None

    def state_dict(self) -> dict[str, Any]:
        return {"layer": self._layer_name}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._checkpoint_layer = state_dict["layer"]

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if federation_of(trainer):
            self._find_roles(trainer, pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not federation_of(trainer):
            self._find_roles(trainer, pl_module)

    def _find_roles(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.prototypes = None
        classifier, classes, void, target = None, self.num_classes, self.ignore_index, self.target
        excluded = set(self.exclude_classes)
        if "auto" in (self.layer, classes):
            remedy = "give `ClassPrototypes` a `layer`, `num_classes` and a `target`"
            task = find_class_task(trainer, pl_module, remedy, needs_target=target is None)
            classifier, target = task.layer, task.target if target is None else target
            classes = task.num_classes if classes == "auto" else classes
            if void == "auto" and task.ignore_index is not None:
                void = task.ignore_index
                if 0 <= void < classes:
                    excluded, void = excluded | {void}, None
        self._layer = find_feature_layer(pl_module, classifier) if self.layer == "auto" else FeatureLayer(self.layer)
        self._layer_name = str(self._layer)
        compares_rounds = self.lpm_before == "last_local" or _rule(trainer) is not None
        if federation_of(trainer) and self._checkpoint_layer not in (None, self._layer_name) and compares_rounds:
            raise OptionError(
                f"Expected `layer` of `ClassPrototypes` to match the checkpoint, {self._checkpoint_layer}, but got"
                f" {self._layer_name}: prototypes are compared over rounds."
            )
        assert classes != "auto"
        self._options = FeatureSumOptions(classes, void, tuple(excluded), target)
        self.classes_found = classes
        rule = _rule(trainer)
        if rule is not None:
            rule.num_classes = classes
        self._prototypes_before, self._training_sums = None, None  # clear prototypes from an earlier fit
        self._has_warned = False
        if self.layer == "auto":
            rank_zero_info(f"ClassPrototypes: {classes} classes, features from {self._layer}.")
        self._hooks.close()
        tap = self._hooks.enter_context(tap_features(pl_module, self._layer))
        if self.passes == "online":
            tap.on_features = self._add_features  # added for the whole fit, so that `torch.compile` includes the hook
        else:
            self._hooks.close()  # this hook was only needed to validate the layer
        if forward_step(pl_module) is None and self.passes == "exact":
            raise ValueError(
                "Expected a `validation_step` for exact passes with manual optimization, because exact passes measure"
                " features without training, and `training_step` would train: add the method, or use passes='online'."
            )

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._training_sums is not None and batch is not None:
            self._training_sums.start_batch(batch)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._training_sums is not None:
            self._training_sums.end_batch(is_trained=bool(outputs))

    def revert(self) -> None:
        self._hooks.close()

    # A federation

    def on_client_start(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        self._prototypes_before, self._aggregate = None, unpack_prototypes(broadcast.extras, self._options.num_classes)
        planned = find_federation(trainer).visit
        if self.passes == "online":
            self._warn_of_short_visits(planned)
            per_epoch = find_federation(trainer).population.batches_per_epoch(client)
            self._training_sums = TrainingFeatureSums(self._options, planned.num_batches, per_epoch)
        elif self.lpm_before == "download":
            self._prototypes_before = self._measure_client(trainer, module, planned)

    def on_client_end(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, update: ClientUpdate
    ) -> None:
        federation = find_federation(trainer)
        if self.passes == "online":
            self._prototypes_before, after = self._end_training_sums(trainer, module)
        else:
            after = self._measure_client(trainer, module, federation.visit)
        if after is None:
            return
        if self.lpm_before == "last_local":
            self._prototypes_before = unpack_prototypes(federation.client_memory, self._options.num_classes)
            federation.client_memory.update(pack_prototypes(after))
        update.extras |= pack_prototypes(after)
        if self._prototypes_before is None:
            return
        fallback = self._aggregate
        if fallback is not None and fallback.means.shape != after.means.shape:
            fallback = None  # the number of features differs, so the aggregate restarts
        margin = local_prototype_margin(
            after, self._prototypes_before, margin=self.margin, class_reduction=self.class_reduction, fallback=fallback
        )
        if not margin.isnan():
            update.extras[lpm_key(self.margin, self.class_reduction)] = margin
            update.metrics["lpm"] = float(margin)

    def on_client_visit_end(self, trainer: L.Trainer, module: L.LightningModule, client: Client) -> None:
        self._prototypes_before, self._aggregate, self._training_sums = None, None, None

    def _measure_client(
        self, trainer: L.Trainer, module: L.LightningModule, planned: PlannedVisit
    ) -> Prototypes | None:
        faults = list[Exception]()
        batches = until_fault(find_federation(trainer).population.one_pass(planned.visit, isolated=True), faults)
        with seeded_generators(), closing(batches):
            prototypes = self._measure(trainer, module, batches)
        if faults:
            _log.warning("The prototypes of client %r are excluded: %s.", planned.visit.client, describe(faults[0]))
            return None
        return prototypes

    def _warn_of_short_visits(self, planned: PlannedVisit) -> None:
        if planned.num_batches > 1 or self._has_warned or self.lpm_before == "last_local":
            return
        self._has_warned = True
        _log.warning(
            "Client %r trains on a single batch, so online passes cannot measure the local prototype margin (logged "
            "once). FedMargin uses the mean of the other clients instead. Use passes='exact' to measure the margin.",
            planned.visit.client,
        )

    # With a plain Trainer

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if federation_of(trainer):
            return
        if self.passes == "online":
            if math.isinf(trainer.num_training_batches):
                raise ValueError(
                    "Expected a known number of batches per epoch for online passes: set `limit_train_batches`, or use"
                    " passes='exact'."
                )
            self._training_sums = TrainingFeatureSums(self._options, int(trainer.num_training_batches))
        else:
            self._prototypes_before = self._measure_epoch(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if federation_of(trainer):
            return
        if self.passes == "online":
            self._prototypes_before, after = self._end_training_sums(trainer, pl_module)
        else:
            after = self._measure_epoch(trainer, pl_module)
        self.prototypes = after
        if after is None or self._prototypes_before is None or trainer.barebones:
            return
        values = {
            "prototypes/lpm": local_prototype_margin(
                after, self._prototypes_before, margin=self.margin, class_reduction=self.class_reduction
            ),
            "prototypes/amm": aggregate_mean_margin(after),
        }
        for name, value in values.items():
            if not value.isnan():
                pl_module.log(name, value.float(), batch_size=1, sync_dist=True)  # equal on all processes

    def _measure_epoch(self, trainer: L.Trainer, module: L.LightningModule) -> Prototypes | None:
        loader: Any = trainer.train_dataloader
        if isinstance(loader, Mapping | list | tuple):
            raise ValueError(
                f"Expected one training loader for exact passes, but got a {type(loader).__name__} with {len(loader)} "
                "loaders: use passes='online'."
            )
        limit = trainer.num_training_batches
        with seeded_generators(), isolated_generators(loader, trainer.current_epoch):
            seed_everything(trainer.current_epoch)  # same seed at the start and the end of the epoch
            batches = itertools.islice(loader, None if math.isinf(limit) else int(limit))
            return self._measure(trainer, module, batches)

    # Measuring

    def _measure(self, trainer: L.Trainer, module: L.LightningModule, batches: Iterable[Any]) -> Prototypes | None:
        batches = itertools.islice(batches, self.max_batches)
        sums = measure_feature_sums(trainer, module, self._layer, batches, self._options)
        sums.gather(trainer)
        return sums.prototypes()

    def _add_features(self, features: Tensor) -> None:
        if self._training_sums is not None:
            self._training_sums.take(features)

    def _end_training_sums(
        self, trainer: L.Trainer, module: L.LightningModule
    ) -> tuple[Prototypes | None, Prototypes | None]:
        training_sums, self._training_sums = self._training_sums, None
        if training_sums is None:
            return None, None
        training_sums.check(self._layer, is_manual=not module.automatic_optimization)
        for sums in (training_sums.first, training_sums.last):
            sums.gather(trainer)
        return training_sums.first.prototypes(), training_sums.last.prototypes()


def _rule(trainer: L.Trainer) -> FedMargin | None:
    federation = federation_of(trainer)
    rule = None if federation is None else federation.server.rule
    return rule if isinstance(rule, FedMargin) else None


register(
    FedMargin,
    callbacks=lambda rule: [ClassPrototypes(margin=rule.margin, class_reduction=rule.class_reduction)],
)
