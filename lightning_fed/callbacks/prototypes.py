"""Class prototypes of a client's features, before and after its visit; of each epoch on a plain Trainer."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from functools import partial
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_fed.aggregators.fedmargin import FedMargin
from lightning_fed.callbacks.federated_callback import FederatedCallback
from lightning_fed.callbacks.federation import Federation, find_federation
from lightning_fed.callbacks.side_pass import (
    forward_step,
    one_pass,
    prepare_batch,
    run_prepared,
    side_pass,
    until_fault,
)
from lightning_fed.data.loader_clients import undisturbed
from lightning_fed.data.population import seed_everything
from lightning_fed.data.rounds import describe
from lightning_fed.functional.margin import ClassReduction, MarginKind, aggregate_mean_margin, local_prototype_margin
from lightning_fed.functional.options import OptionError, check_option
from lightning_fed.functional.packing import lpm_name, pack_prototypes, unpack_prototypes
from lightning_fed.functional.prototypes import (
    Prototypes,
    VoidLabel,
    class_places,
    class_prototypes,
    class_sums,
)
from lightning_fed.messages import Broadcast, Client, ClientUpdate
from lightning_fed.modules.features import (
    FeatureLayer,
    count_classes,
    find_feature_layer,
    tap_features,
    without_compiled_code,
)

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
        ignore_index: Label of void pixels; ``None`` for none, ``"auto"`` for 255 unless that is a class.
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

    State: ``layer``, whose features are measured, in words (a str, or None).

    Attributes:
        prototypes: On a plain Trainer, those at the end of the last epoch; ``None`` before.

    Raises:
        ValueError: If an option is unknown or out of its range; in ``fit``, if the layer or the number of classes
            cannot be found, or a fit is resumed with another layer than its prototypes are of.

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
        ignore_index: VoidLabel = "auto",
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
        self.ignore_index: VoidLabel = ignore_index
        self.exclude_classes = tuple(exclude_classes)
        self.target = target
        self.passes = passes
        self.max_batches = max_batches
        self.normalize_features = normalize_features
        self.min_count = min_count
        self.margin: MarginKind = margin
        self.class_reduction: ClassReduction = class_reduction
        self.lpm_before = lpm_before
        self.prototypes: Prototypes | None = None
        self._layer: FeatureLayer
        self._measured: str | None = None  # that layer in words
        self._former: str | None = None  # that of the fit that is resumed
        self._classes: int
        self._watch = ExitStack()
        self._batch: Any = None  # whose features are awaited
        self._window = (0, 0)  # batches in each of the two parts of training that are watched, and in all of it
        self._started = self._place = 0  # batches since then, and those of them whose features were seen
        self._before: Prototypes | None = None
        self._others: Prototypes | None = None  # of all clients, where one client's margins need other classes
        self._first, self._last = _Sums(), _Sums()

    # What both doors share

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Forgets an earlier fit."""
        if stage == "fit":
            self._measured = self._former = None

    def state_dict(self) -> dict[str, Any]:
        """Whose features are measured."""
        return {"layer": self._measured}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Notes whose features were measured."""
        self._former = state_dict["layer"]

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Finds the layer and the number of classes."""
        self.prototypes = None
        self._layer = find_feature_layer(pl_module) if self.layer == "auto" else FeatureLayer(self.layer)
        self._measured = str(self._layer)
        if self._former not in (None, self._measured) and self._compares_rounds(trainer):
            raise OptionError(
                f"Expected `layer` of `ClassPrototypes` to be that of the checkpoint, with whose prototypes the new ones"
                f" are compared: {self._former}, but got {self._measured}."
            )
        classes = count_of_classes(pl_module) if self.num_classes == "auto" else self.num_classes
        if classes is None:
            raise ValueError("The number of classes cannot be found: pass `num_classes` to `ClassPrototypes`.")
        self._classes = classes
        self._before = None  # nothing is left of another fit
        self._start_watching(0, None)
        class_places(torch.zeros(0, dtype=torch.int64), classes, self.ignore_index, self.exclude_classes)  # checks them
        if self.layer == "auto":
            rank_zero_info(f"ClassPrototypes: the features of {classes} classes are {self._layer}.")
        self._watch.close()
        tap = self._watch.enter_context(tap_features(pl_module, self._layer))
        if self.passes == "online":
            tap.on_features = self._watch_batch  # all the fit long, so that a model that is compiled knows it
        else:
            self._watch.close()  # the layer is there
        if forward_step(pl_module) is None and self.passes == "exact":
            raise ValueError(
                "A module with manual optimization needs a `validation_step` for exact passes: add one, or use"
                " passes='online'."
            )

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Keeps the batch, whose features its training pass is about to make."""
        if self.passes == "online" and batch is not None:
            self._batch = batch
            self._started += 1

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Lets go of the batch: what runs from now on is validation, say."""
        self._batch = None

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
        self._before, self._others = None, unpack_prototypes(broadcast.extras, self._classes)
        if self.passes == "online":
            federation = find_federation(trainer)
            assert federation.current_visit is not None
            per_epoch = federation.population.batches_per_epoch(client)
            self._start_watching(federation.current_visit.num_batches, per_epoch)
        elif self.lpm_before == "download":
            self._before = self._measure_client(trainer, module)

    def on_client_end(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, update: ClientUpdate
    ) -> None:
        """Measures the prototypes of the trained weights, and puts them into the update."""
        if self.passes == "online":
            self._before, after = self._stop_watching()
        else:
            after = self._measure_client(trainer, module)
        if after is None:
            return
        if self.lpm_before == "last_local":
            memory = find_federation(trainer).client_memory
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

    def _compares_rounds(self, trainer: L.Trainer) -> bool:
        """Whether prototypes are compared with those of earlier rounds."""
        if not is_federated(trainer):
            return False
        return self.lpm_before == "last_local" or isinstance(find_federation(trainer).server.aggregator, FedMargin)

    def _measure_client(self, trainer: L.Trainer, module: L.LightningModule) -> Prototypes | None:
        """Prototypes of the client; ``None`` where its data fail, which does not cost it its update."""
        federation, faults = find_federation(trainer), list[Exception]()
        planned = federation.current_visit
        assert planned is not None

        batches = until_fault(one_pass(federation.population, planned.visit, aside=True), faults)
        with _own_random_numbers(), closing(batches):
            prototypes = self._measure(trainer, module, batches)
        if faults:
            _log.warning("The prototypes of client %r are left out: %s.", planned.visit.client, describe(faults[0]))
            return None
        return prototypes

    # A plain Trainer

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measures the prototypes of the weights at the start of the epoch."""
        if is_federated(trainer):
            return
        if self.passes == "online":
            if math.isinf(trainer.num_training_batches):
                raise ValueError(
                    "Online passes need to know how many batches an epoch has: set `limit_train_batches`, or use"
                    " passes='exact'."
                )
            self._start_watching(int(trainer.num_training_batches), None)
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
        self.prototypes = after
        if after is None or self._before is None or trainer.barebones:
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

    def _measure_epoch(self, trainer: L.Trainer, module: L.LightningModule) -> Prototypes | None:
        loader: Any = trainer.train_dataloader
        limit = trainer.num_training_batches
        with _own_random_numbers(), undisturbed(loader, trainer.current_epoch):
            seed_everything(trainer.current_epoch)  # the same at both ends of the epoch
            batches = itertools.islice(loader, None if math.isinf(limit) else int(limit))
            return self._measure(trainer, module, batches)

    # Measuring

    def _measure(self, trainer: L.Trainer, module: L.LightningModule, batches: Iterable[Any]) -> Prototypes | None:
        """The prototypes of the module as it is; ``None`` if there is no batch."""
        step, sums = forward_step(module), _Sums()
        assert step is not None
        with tap_features(module, self._layer) as tap, side_pass(module), without_compiled_code():
            tap.on_features = partial(self._take, sums)
            for number, batch in enumerate(itertools.islice(batches, self.max_batches)):
                self._batch = prepare_batch(trainer, module, batch)
                run_prepared(trainer, module, step, self._batch, number)
                if self._batch is not None:
                    raise ValueError(
                        f"Expected `{step}` to use the model's features, but {self._layer} was not run: name another"
                        " `layer`."
                    )
        return self._prototypes(sums)

    def _start_watching(self, num_batches: int, per_epoch: int | None) -> None:
        """Sums up the features of the first and of the last batches from now on."""
        self._first, self._last = _Sums(), _Sums()
        self._started = self._place = 0
        self._window = min(per_epoch or num_batches, num_batches // 2), num_batches

    def _watch_batch(self, features: Tensor) -> None:
        length, total = self._window
        if self._batch is None or not total:
            return
        place, self._place = self._place, self._place + 1
        if place < length:
            self._take(self._first, features)
        elif place >= total - max(1, length):
            self._take(self._last, features)
        self._batch = None

    def _stop_watching(self) -> tuple[Prototypes | None, Prototypes | None]:
        if self._window[1] and self._place < self._started:
            raise ValueError(
                f"Expected training to use the model's features in every batch, but {self._layer} was run in"
                f" {self._place} of {self._started}: name another `layer`, or use passes='exact' where `torch.compile`"
                " has compiled the model before the fit."
            )
        before, after = self._prototypes(self._first), self._prototypes(self._last)
        self._start_watching(0, None)
        return before, after

    def _take(self, sums: _Sums, features: Tensor) -> None:
        """Adds the features of a batch, as its first forward pass makes them."""
        batch, self._batch = self._batch, None
        if batch is None:
            return
        labels = as_classes(find_target(batch, self.target), features.ndim)
        if features.ndim > 2 and labels.ndim == 1:
            features = features.flatten(2).mean(2)  # one label for a whole map
        sums.add(
            *class_sums(
                features,
                labels,
                self._classes,
                ignore_index=self.ignore_index,
                exclude_classes=self.exclude_classes,
                normalize_features=self.normalize_features,
            )
        )

    def _prototypes(self, sums: _Sums) -> Prototypes | None:
        if sums.sums is None or sums.counts is None:
            return None
        return class_prototypes(sums.sums.cpu(), sums.counts.cpu(), min_count=self.min_count)


class _Sums:
    """Sums of features and their numbers, by class."""

    def __init__(self) -> None:
        self.sums: Tensor | None = None
        self.counts: Tensor | None = None

    def add(self, sums: Tensor, counts: Tensor) -> None:
        self.sums = sums if self.sums is None else self.sums + sums
        self.counts = counts if self.counts is None else self.counts + counts


def _own_random_numbers() -> AbstractContextManager[None]:
    """The global generators go on afterwards as if nothing had been; those of a GPU too, where one is in use."""
    return isolate_rng(include_cuda=torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


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


def as_classes(labels: Tensor, feature_dims: int) -> Tensor:
    """Labels as integers without an empty channel, where features of so many dimensions call for none.

    Raises:
        ValueError: If they are fractions.

    Example:
        >>> as_classes(torch.tensor([[1.0], [0.0]]), 2), as_classes(torch.zeros(2, 1, 8, 8), 4).shape
        (tensor([1, 0]), torch.Size([2, 8, 8]))

    """
    if labels.is_floating_point():
        if not bool((labels == labels.round()).all()):
            raise ValueError("Expected labels to be classes, but they are fractions: say where with `target`.")
        labels = labels.long()
    has_channel = labels.ndim > 1 and labels.shape[1] == 1 and labels.ndim != feature_dims - 1
    return labels.squeeze(1) if has_channel else labels


def count_of_classes(module: L.LightningModule) -> int | None:
    """The module's hyper-parameter ``num_classes`` (or ``classes``), or else the channels of its logits."""
    for name in ("num_classes", "classes"):
        value = module.hparams.get(name)
        if isinstance(value, int) and value > 1:
            return value
    return count_classes(module)
