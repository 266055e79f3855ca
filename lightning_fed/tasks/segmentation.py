"""Semantic segmentation with `segmentation_models_pytorch`, as an ordinary LightningModule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import MetricCollection

from lightning_fed.argument_checks import check_option, check_share
from lightning_fed.errors import OptionError
from lightning_fed.metrics.segmentation import SegmentationScores
from lightning_fed.tasks.base import Task
from lightning_fed.tasks.encoder_weights import is_weight_file, load_encoder_weights
from lightning_fed.tasks.segmentation_losses import NamedLoss
from lightning_fed.tasks.tiles import tiled_logits

__all__ = ["SegmentationTask"]


class SegmentationTask(Task):
    r"""Segments images with an smp loss or a custom loss. Logs loss, mean IoU and pixel accuracy.

    Batches are ``(x, y)`` or dicts with keys ``image`` and ``mask``. Images have shape ``(N, C, H, W)``. Masks are
    class indices with shape ``(N, H, W)`` or ``(N, 1, H, W)``. With ``mode="binary"`` masks are 0 and 1. With
    ``"multilabel"`` each class has a binary mask, shape ``(N, num_classes, H, W)``. Prediction returns masks with shape
    ``(N, H, W)``, or ``(N, num_classes, H, W)`` with ``"multilabel"``.

    Logged values, without ignored pixels, are ``train_loss`` and ``val_loss``, ``val_miou``, ``val_mdice``,
    ``val_pixel_acc`` (and ``test_...``):

    - ``miou``: intersection over union in the epoch, the mean over classes in masks or predictions (omitted if none);
    - ``mdice``: Dice, averaged like ``miou``;
    - ``pixel_acc``: fraction of correct pixels;
    - ``iou/<class>`` and ``dice/<class>``: scores of each class, with ``per_class``.

    The Dice loss is smp's: the mean over classes c of :math:`1 - 2 \sum p_c t_c / \sum (p_c + t_c)`, with sums over the
    batch's pixels, probabilities :math:`p_c`, and truth :math:`t_c` (0 or 1). A class without true pixels has loss 0.

    Args:
        model: Name of an smp architecture (``"Unet"``, ...), or a module from images to logits ``(N, num_classes, H,
            W)``. A module is not a saved hyperparameter: pass the module to ``load_from_checkpoint(path, model=...)``.
        num_classes: Number of classes, without the ignored class; 1 with ``mode="binary"``.
        encoder_name: Encoder of the architecture, from smp (``"resnet18"``) or timm (``"tu-mobilenetv3_small_100"``).
        encoder_weights: Pretrained encoder weights: ``"imagenet"`` (a download), or the path of a file with smp's or
            timm's tensor names; if None, random weights. Pass None to ``load_from_checkpoint`` if the file is missing.
        in_channels: Number of image channels.
        model_kwargs: Further arguments for the architecture (``encoder_depth``, ``decoder_channels``, ...).
        norm: ``"group"`` replaces every BatchNorm by GroupNorm (see `to_group_norm`).
        loss: ``"ce"`` (cross-entropy), ``"dice"``, ``"jaccard"``, ``"tversky"``, ``"lovasz"``, ``"focal"``, or a sum
            such as ``"ce+dice"``. Options follow a name: ``"tversky:alpha=0.3:beta=0.7"``. ``"fedseg"`` is for clients
            that label only some classes (:func:`~lightning_fed.modules.absent_class_loss`). A function from logits and
            target must handle ignored pixels, and is not a saved hyperparameter.
        ignore_index: Class index of pixels without a label; None without such pixels.
        class_weights: Class weights in the cross-entropy. A class with weight 0 is not learned.
        mode: ``"multiclass"`` (one class per pixel), ``"binary"`` (one logit), ``"multilabel"`` (independent logits).
        per_class: Whether to log scores per class.
        class_names: Class names in the log; if None, indices.
        tile: Height and width of tiles for prediction; if None, whole images.
        tile_overlap: Minimum fraction of a tile that overlaps with the next tile, in [0, 1).
        per_image: Whether to average losses over images instead of pixels. :class:`~lightning_fed.privacy.DPSGD` needs
            this option with ignored pixels, and with losses other than cross-entropy.
        **options: Optimizer and learning-rate scheduler, see `Task`.

    Raises:
        ValueError: If a name or a choice is unknown, or an argument does not fit the network, optimizer or scheduler.

    Example:
        >>> task = SegmentationTask("Unet", num_classes=3, encoder_name="resnet18", loss="ce+dice", lr=0.05)
        >>> task(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 3, 32, 32])
    """

    target_key: ClassVar[str] = "mask"

    def __init__(
        self,
        model: str | nn.Module,
        num_classes: int,
        encoder_name: str = "resnet18",
        encoder_weights: str | None = None,
        in_channels: int = 3,
        model_kwargs: dict[str, Any] | None = None,
        norm: Literal["batch", "group"] = "batch",
        loss: nn.Module | Callable[[Tensor, Tensor], Tensor] | str = "ce",
        ignore_index: int | None = 255,
        class_weights: list[float] | None = None,
        mode: Literal["multiclass", "binary", "multilabel"] = "multiclass",
        per_class: bool = False,
        class_names: list[str] | None = None,
        tile: tuple[int, int] | None = None,
        tile_overlap: float = 0.25,
        per_image: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        given = {"model": isinstance(model, nn.Module), "loss": not isinstance(loss, str)}
        self.save_hyperparameters(ignore=[name for name, is_object in given.items() if is_object])
        check_option("mode", mode, ("multiclass", "binary", "multilabel"))
        if mode == "multiclass" and num_classes < 2:
            raise ValueError(
                f"Expected `num_classes` to be at least 2 (the background is also a class), but got {num_classes}: "
                "for a single class use mode='binary'."
            )
        if mode == "binary" and (num_classes != 1 or class_weights is not None):
            raise ValueError(
                "Expected `num_classes` to be 1 and no `class_weights` with mode='binary', but got"
                f" {num_classes} and {class_weights}."
            )
        if class_weights is not None and isinstance(loss, str) and "fedseg" in loss:
            raise ValueError(f"Expected no `class_weights` for loss={loss!r}, but got {class_weights}.")
        if tile is not None and (len(tile) != 2 or min(tile) < 1):
            raise ValueError(f"Expected `tile` to be a height and a width of at least 1, but got {tile}.")
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        self._encoder_name = encoder_name
        self._encoder_weights = encoder_weights
        self._in_channels = in_channels
        self._model_kwargs = dict(model_kwargs or {})
        self._mode, self._per_class, self._class_names = mode, per_class, class_names
        self._per_image = per_image
        self._tile = None if tile is None else (tile[0], tile[1])
        self._tile_overlap = check_share("tile_overlap", tile_overlap)
        self._loss = NamedLoss(loss, mode, ignore_index) if isinstance(loss, str) else loss
        self.configure_task(model, norm, class_weights, num_classes)

    def configure_network(self, name: str) -> nn.Module:
        import segmentation_models_pytorch as smp  # slow to import, and needed only here

        if self._model_kwargs.get("aux_params") is not None:
            raise ValueError(
                "Expected `model_kwargs` without 'aux_params', because the task trains only the segmentation."
            )
        weights = self._encoder_weights
        is_file = weights is not None and is_weight_file(weights)
        try:
            network: nn.Module = smp.create_model(
                name,
                encoder_name=self._encoder_name,
                encoder_weights=None if is_file else weights,
                in_channels=self._in_channels,
                classes=self.num_classes,
                **self._model_kwargs,
            )
        except KeyError as error:  # an unknown architecture or encoder: smp's message lists the known names
            raise ValueError(
                f"Expected `model` and `encoder_name` to be known to segmentation_models_pytorch, but got '{name}' and "
                f"'{self._encoder_name}'. {error.args[0]}"
            ) from error
        except Exception as error:
            if weights is None or is_file or not _is_of_download(error):
                raise
            raise OptionError(
                f"The pretrained weights {weights!r} of the encoder '{self._encoder_name}' could not be downloaded"
                f" ({type(error).__name__}). Without a network, pass a file: encoder_weights='PATH.safetensors'."
            ) from error
        if weights is not None and is_file:
            load_encoder_weights(network.get_submodule("encoder"), weights)
        return network

    def configure_metrics(self) -> MetricCollection:
        scores = SegmentationScores(self.num_classes, self._mode, self.ignore_index, self._class_names, self._per_class)
        return MetricCollection({"scores": scores}, compute_groups=False)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._check_binary(batch)
        super().validation_step(batch, batch_idx, dataloader_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self._check_binary(batch)
        return super().training_step(batch, batch_idx)

    def _check_binary(self, batch: Any) -> None:
        if self._mode != "binary":
            return
        mask = self.split_batch(batch)[1]
        is_void = (
            mask == self.ignore_index if self.ignore_index is not None else torch.zeros_like(mask, dtype=torch.bool)
        )
        try:
            seems_ignored = bool(is_void.any() & (mask == 0).any() & ~(mask == 1).any())
            wrong = mask[~is_void & (mask != 0) & (mask != 1)]
        except RuntimeError:  # inside `torch.func.vmap`; validation checks again
            return
        if len(wrong):
            raise ValueError(
                f"Expected masks of 0 and 1, except `ignore_index` ({self.ignore_index}), with mode='binary', but got "
                f"{int(wrong[0])}: convert the masks with `mask > 0`."
            )
        if seems_ignored:
            rank_zero_warn(
                f"No pixel in a batch's masks is 1, but some pixels have the ignored label {self.ignore_index}. If "
                "this label means the class, convert the masks with `mask > 0`."
            )

    def example_input(self) -> Tensor:
        return torch.zeros(2, self._in_channels, 64, 64)  # encoders need multiples of 32

    def compute_loss(self, logits: Tensor, target: Tensor) -> Tensor:
        if not self._per_image:
            return self._loss_of(logits, target)
        images = ((logits[row : row + 1], target[row : row + 1]) for row in range(len(logits)))
        return torch.stack([self._loss_of(*image) for image in images]).mean()

    def _loss_of(self, logits: Tensor, target: Tensor) -> Tensor:
        if isinstance(self._loss, NamedLoss):
            loss: Tensor = self._loss(logits, target, self.class_weights)
            return loss
        return self._loss(logits, target)

    def split_batch(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Splits a batch into images ``(N, C, H, W)`` and masks ``(N, H, W)``, or ``(N, num_classes, H, W)``."""
        x, mask = super().split_batch(batch)
        if self._mode == "multilabel":
            if mask.ndim != 4 or mask.shape[1] != self.num_classes:
                raise ValueError(
                    f"Expected masks of shape (N, {self.num_classes}, H, W) with mode='multilabel', but got"
                    f" {tuple(mask.shape)}."
                )
        elif mask.ndim == 4 and mask.shape[1] == 1:
            mask = mask.squeeze(1)
        return x, mask.long()

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Returns class indices, ``(N, H, W)``. In mode ``"multilabel"``: binary masks, ``(N, num_classes, H, W)``."""
        x = self.inputs_of(batch)
        logits: Tensor = self(x) if self._tile is None else tiled_logits(self, x, self._tile, self._tile_overlap)
        if self._mode == "multiclass":
            return logits.argmax(dim=1)
        positive = (logits > 0).long()
        return positive.squeeze(1) if self._mode == "binary" else positive


def _is_of_download(error: Exception) -> bool:
    is_known = type(error).__module__.partition(".")[0] in (
        "httpx",
        "httpcore",
        "requests",
        "urllib3",
        "huggingface_hub",
    )
    return is_known or isinstance(error, OSError)
