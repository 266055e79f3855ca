"""Logs segmentation pictures every few rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_fed.argument_checks import check_count, check_option
from lightning_fed.callbacks.federation import federation_of
from lightning_fed.callbacks.picture_grid import checked_colors, default_colors, titled_grid
from lightning_fed.callbacks.pictures import PeriodicPictures, log_picture, report_other_loggers, tensorboards
from lightning_fed.callbacks.training_trace import LabelDescription, describe_labels
from lightning_fed.console import round_number
from lightning_fed.data.population import seeded_generators
from lightning_fed.errors import OptionError
from lightning_fed.features.batches import BatchKey, find_inputs, find_target
from lightning_fed.features.isolated_pass import evaluating
from lightning_fed.features.label_maps import VoidLabel, void_label
from lightning_fed.features.layers import FeatureLayer, find_feature_layer, tap_features, without_compiled_code
from lightning_fed.lightning.internals import is_fitting
from lightning_fed.metrics.functional.entropy import Activation, feature_entropy, softmax_entropy

EntropyMap = Literal["softmax_entropy", "feature_entropy"]


class SegmentationImages(PeriodicPictures):
    """Logs validation images with their true and predicted classes to TensorBoard.

    Each row of the picture shows an image, the true classes and the predicted classes. ``maps`` adds heat maps, from 0
    (dark blue) to 1 (yellow):

    - ``"softmax_entropy"``: the model's uncertainty about each pixel's class, see
      :func:`~lightning_fed.metrics.functional.softmax_entropy`.
    - ``"feature_entropy"``: how evenly a layer's channels are active, see
      :func:`~lightning_fed.metrics.functional.feature_entropy`.

    Both are divided by the logarithm of the number of classes or channels.

    The picture is logged after the first validation, then every ``every_n_epochs`` epochs, and in
    ``trainer.validate``. It always shows the same images. In a federation, an epoch is a round, and the predictions are
    from the global model.

    The module receives one image at a time, shape ``(1, C, H, W)``, and returns logits, shape
    ``(1, num_classes, H, W)``. In a binary task, the shape is ``(1, 1, H, W)``, and positive logits mean class 1.

    Args:
        every_n_epochs: Epochs or rounds between two pictures.
        num_images: Number of rows.
        class_colors: Colour of each class, as red, green and blue from 0 to 255. By default the attribute
            ``class_colors`` of the module or datamodule, or else a standard palette. The legend shows the attribute
            ``class_names`` or ``classes``.
        mean: Mean that the data pipeline subtracts, one number or one per channel.
        std: Standard deviation by which the data pipeline divides, one number or one per channel. Without ``mean`` and
            ``std``, images with values outside 0 to 1 are rescaled.
        ignore_index: Class index of pixels without a label, drawn in grey, or ``None``. By default the label
            ignored by the loss, or else 255 (unless 255 is a class).
        maps: Names of heat maps to add.
        layer: Name of the layer for ``"feature_entropy"``. ``"auto"`` calls
            :func:`~lightning_fed.modules.find_feature_layer`.
        activation: Function that makes the layer's features non-negative, if necessary.
        inputs: Index or key of the images in a batch, or a function of the batch. By default as in
            :func:`find_inputs`.
        target: Index or key of the masks in a batch, or a function of the batch. By default the labels in the loss.
            The default draws nothing in ``trainer.validate`` before a fit.
        images: Indices of validation images to show, instead of the first ``num_images``.

    Raises:
        ValueError: If an argument is invalid, or the layer or an image does not exist.
        MisconfigurationException: In ``fit``, if the loss uses no masks, or if validation and training batches differ
            in structure.

    Example:
        >>> callback = SegmentationImages(every_n_epochs=10, num_images=2, mean=(0.485, 0.456, 0.406),
        ...                               std=(0.229, 0.224, 0.225))
    """

    tag = "segmentation/input_truth_prediction"
    """Image name in TensorBoard; the names in ``maps`` are appended."""

    def __init__(
        self,
        every_n_epochs: int = 5,
        num_images: int = 4,
        class_colors: Sequence[Sequence[int]] | None = None,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        ignore_index: VoidLabel = "auto",
        maps: Sequence[EntropyMap] = (),
        layer: str = "auto",
        activation: Activation = "relu",
        inputs: BatchKey = None,
        target: BatchKey = None,
        images: Sequence[int] | None = None,
    ) -> None:
        super().__init__(every_n_epochs)
        check_count("num_images", num_images)
        for name in maps:
            check_option("maps", name, EntropyMap)
        check_option("activation", activation, Activation)
        if images is not None and not (isinstance(images, Sequence) and len(images)):
            raise ValueError(f"Expected `images` to be a list of at least one position, but got {images!r}.")
        self.tag = "_".join([self.tag, *maps])
        self._positions = (
            range(num_images) if images is None else [check_count("images", position, 0) for position in images]
        )
        self._needs_all = images is not None
        self._class_colors = checked_colors(class_colors)
        self._mean = mean
        self._std = std
        self._ignore_index = ignore_index
        self._maps = tuple(maps)
        self._layer_name = layer
        self._activation: Activation = activation
        self._inputs: BatchKey = inputs
        self._target: BatchKey = target
        self._labels = LabelDescription(target, ignore_index, ())
        self._layer: FeatureLayer | None = None
        self._is_due = False
        self._is_choosing = False
        self._num_seen = 0
        self._samples: dict[int, tuple[Tensor, Tensor]] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage not in ("fit", "validate"):
            return
        self._samples, self._layer = {}, None
        if stage == "fit":
            self._last_epoch = None
        report_other_loggers("SegmentationImages", trainer)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._find_layer(trainer, pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if tensorboards(trainer):
            self._labels = describe_labels(trainer, pl_module, "SegmentationImages", self._target, self._ignore_index)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._find_layer(trainer, pl_module)  # `trainer.validate` may run before any fit
        self._is_due = (
            not trainer.sanity_checking
            and bool(tensorboards(trainer))
            and (self.is_due(trainer) or not is_fitting(trainer))
            and self._labels.is_known("SegmentationImages")
        )
        self._is_choosing, self._num_seen = self._is_due and not self._samples, 0

    def on_validation_batch_start(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not self._is_choosing or dataloader_idx > 0:
            return
        images, masks = find_inputs(batch, self._inputs), find_target(batch, self._labels.target)
        for position in set(self._positions) & set(range(self._num_seen, self._num_seen + len(images))):
            pair = images[position - self._num_seen], masks[position - self._num_seen]
            # copies: a slice would keep the whole batch in memory, and the step may overwrite the batch
            image, mask = (tensor.detach().cpu().clone() for tensor in pair)
            self._samples[position] = image, mask
        self._num_seen += len(images)
        self._is_choosing = self._num_seen <= max(self._positions)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._is_due:
            return
        missing = [position for position in self._positions if position not in self._samples]
        if missing and self._needs_all and self._num_seen:
            raise OptionError(
                f"Expected `images` of `SegmentationImages` to be positions among the {self._num_seen} validation "
                f"images, 0 to {self._num_seen - 1}, but got {missing}."
            )
        if not self._samples:
            return
        self._is_due = False
        images, masks = zip(
            *(self._samples[position] for position in self._positions if position in self._samples), strict=True
        )
        self._last_epoch = trainer.current_epoch
        # on every rank, because a sharded model's forward needs all ranks
        predicted = _predict(pl_module, images, self._maps, self._layer, self._activation)
        if not trainer.is_global_zero:
            return
        count, maps = max(predicted.num_classes), dict(zip(map(str, self._maps), predicted.maps, strict=True))
        colors = self._class_colors or self._labels.class_colors or default_colors(count)
        epoch = trainer.current_epoch - (not is_fitting(trainer))
        title = f"round {round_number(epoch)}" if federation_of(trainer) else f"epoch {epoch}"
        rows = [f"image {position}" for position in self._positions if position in self._samples]
        void = void_label(self._labels.void, count)
        picture = titled_grid(
            images,
            masks,
            predicted.predictions,
            title,
            rows,
            self._labels.class_names,
            colors,
            void,
            self._mean,
            self._std,
            maps,
        )
        log_picture(trainer, self.tag, picture)

    def _find_layer(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if "feature_entropy" not in self._maps or self._layer is not None or not tensorboards(trainer):
            return
        is_auto = self._layer_name == "auto"
        self._layer = find_feature_layer(pl_module) if is_auto else FeatureLayer(self._layer_name)
        if is_auto:
            rank_zero_info(f"SegmentationImages: the features are {self._layer}.")
        with tap_features(pl_module, self._layer):
            pass  # raises an error if the layer does not exist


class _Predictions(NamedTuple):
    """Predictions for some images: class indices, number of classes, and entropy maps."""

    predictions: list[Tensor]
    num_classes: list[int]
    maps: list[list[Tensor]]


def _predict(
    module: L.LightningModule,
    images: Sequence[Tensor],
    maps: Sequence[EntropyMap],
    layer: FeatureLayer | None,
    activation: Activation,
) -> _Predictions:
    predicted = _Predictions([], [], [[] for _ in maps])
    with ExitStack() as stack:
        stack.enter_context(seeded_generators())
        stack.enter_context(evaluating(module))
        entropies: list[Tensor] = []
        size: Sequence[int] = ()
        if layer is not None:
            stack.enter_context(without_compiled_code())
            tap = stack.enter_context(tap_features(module, layer))
            # computed at once, because the next layer may work in place
            tap.on_features = lambda features: entropies.append(
                feature_entropy(features, activation=activation, normalize=True, size=size)
            )
        for image in images:
            size = image.shape[-2:]
            entropies.clear()
            logits = class_logits(module, image[None].to(module.device))
            predicted.predictions.append(logits[0].argmax(0).cpu())
            predicted.num_classes.append(logits.shape[1])
            for name, column in zip(maps, predicted.maps, strict=True):
                if name == "feature_entropy" and not entropies:
                    raise ValueError(
                        f"Expected the module to run the layer with the features, but {layer} did not "
                        "run: name another `layer`."
                    )
                entropy = entropies[0] if name == "feature_entropy" else softmax_entropy(logits, normalize=True)
                column.append(entropy[0].cpu())
    return predicted


def class_logits(module: L.LightningModule, images: Tensor) -> Tensor:
    """Returns logits, shape ``(N, num_classes, H, W)``. In a binary task, class 0 has logit 0."""
    return with_background(segmentation_logits(module, images))


def with_background(logits: Tensor) -> Tensor:
    """Adds logits 0 for class 0 in a binary task. Other logits are unchanged."""
    return torch.cat([torch.zeros_like(logits), logits], 1) if logits.shape[1] == 1 else logits


def segmentation_logits(module: L.LightningModule, images: Tensor) -> Tensor:
    """Returns the module's logits for images, shape ``(N, num_classes, H, W)``, with one channel in a binary task."""
    logits = module(images)
    if isinstance(logits, Mapping) and "out" in logits:  # torchvision's models
        logits = logits["out"]
    if not isinstance(logits, Tensor) or logits.ndim != 4:
        output = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise TypeError(
            "Expected the module to return logits of shape (N, num_classes, H, W) "
            f"for `SegmentationImages`, but got {output}."
        )
    return logits
