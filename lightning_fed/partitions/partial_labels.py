"""Partition for clients that annotate only some classes, such as hospitals with different organs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor

from lightning_fed.argument_checks import check_count, check_option
from lightning_fed.data.partition import Partition
from lightning_fed.features.batches import MASK_KEYS
from lightning_fed.messages import Client
from lightning_fed.numerics.seeds import client_key
from lightning_fed.numerics.trees import like_sequence
from lightning_fed.partitions.base import PartitionOfPartition
from lightning_fed.partitions.sample_assignment import generator_for


@final
class PartialLabels(PartitionOfPartition):
    """Restricts each client's masks to some annotated classes.

    Client k annotates class k modulo the number of classes, and further classes drawn at random. Pixels of other
    classes get the value ``ignore_index``. Samples held out by :class:`~lightning_fed.data.PartitionedData` are changed
    in the same way, so only annotated classes are scored.

    Masks contain class indices. With ``mode="multilabel"`` a sample has one binary mask per class, shape
    ``(num_classes, H, W)``, and all pixels in the masks of other classes get the value ``ignore_index``.

    Args:
        partition: Partition for the data set.
        num_classes: Number of classes in the masks.
        classes_per_client: Number of annotated classes per client, in addition to ``always``.
        always: Classes that every client annotates, for example a background.
        ignore_index: Label for pixels without annotation.
        seed: Seed for choosing classes; if ``None``, the federation's seed.
        mode: ``"multiclass"`` for one class per pixel, ``"multilabel"`` for any number of classes per pixel.

    Raises:
        ValueError: If an argument is outside the allowed range, or a sample has no mask of the chosen mode.

    Example:
        >>> from lightning_fed.data import IID
        >>> labels = PartialLabels(IID(num_clients=3), num_classes=3, classes_per_client=1)
        >>> [labels.transform(client, seed=0)((None, torch.tensor([[0, 1, 2]])))[1].tolist() for client in range(3)]
        [[[0, 255, 255]], [[255, 1, 255]], [[255, 255, 2]]]

    References:
        Miao et al., "FedSeg: Class-Heterogeneous Federated Learning for Semantic Segmentation", CVPR 2023 (clients with
        different annotated classes).
    """

    def __init__(
        self,
        partition: Partition,
        num_classes: int,
        classes_per_client: int,
        always: tuple[int, ...] = (),
        ignore_index: int = 255,
        seed: int | None = None,
        mode: Literal["multiclass", "multilabel"] = "multiclass",
    ) -> None:
        super().__init__(partition, seed)
        check_option("mode", mode, ("multiclass", "multilabel"))
        self.mode = mode
        self.num_classes = check_count("num_classes", num_classes)
        self.always = tuple(always)
        outside = [label for label in self.always if not 0 <= label < num_classes]
        if outside:
            raise ValueError(f"Expected `always` to contain classes from 0 to {num_classes - 1}, but got {outside}.")
        self.classes_per_client = check_count("classes_per_client", classes_per_client)
        num_others = num_classes - len(set(self.always))
        if classes_per_client > num_others:
            raise ValueError(
                f"Expected `classes_per_client` to be at most the {num_others} classes outside `always`, but got"
                f" {classes_per_client}."
            )
        self.ignore_index = ignore_index

    def annotated(self, client: Client, seed: int) -> tuple[int, ...]:
        """Lists a client's annotated classes, in increasing order."""
        seed = self.seed_of(seed)
        candidates = [label for label in range(self.num_classes) if label not in self.always]
        key = client_key(client)
        first = (client if isinstance(client, int) else key) % len(candidates)
        rest = [label for place, label in enumerate(candidates) if place != first]
        rng = generator_for("partial_labels", seed, key)
        drawn = [rest[place] for place in rng.permutation(len(rest))[: self.classes_per_client - 1]]
        return tuple(sorted({*self.always, candidates[first], *drawn}))

    def change(self, client: Client, seed: int) -> AnnotatedClasses:
        return AnnotatedClasses(self.annotated(client, seed), self.ignore_index, self.num_classes, self.mode)


@final
@dataclass(frozen=True)
class AnnotatedClasses:
    """Transform that replaces classes without annotation by ``ignore_index`` in a sample's mask.

    The mask is the second element of a tuple or list, or a value such as ``"mask"`` in a mapping. With
    ``mode="multilabel"`` a sample has one binary mask per class, shape ``(num_classes, H, W)``.
    """

    classes: tuple[int, ...]
    ignore_index: int = 255
    num_classes: int | None = None
    mode: Literal["multiclass", "multilabel"] = "multiclass"

    def __call__(self, sample: Any) -> Any:
        if isinstance(sample, Mapping):
            key = next((key for key in MASK_KEYS if key in sample), None)
            return {**sample, key: self._changed(None if key is None else sample[key])}
        if isinstance(sample, tuple | list) and len(sample) > 1:
            return like_sequence(sample, [sample[0], self._changed(sample[1]), *sample[2:]])
        return self._changed(None)

    def _changed(self, mask: Any) -> Tensor:
        if not isinstance(mask, Tensor) or mask.is_floating_point() or mask.ndim == 0:
            description = (
                f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            )
            raise ValueError(f"Expected a sample with a class mask (a tensor of integers), but got {description}.")
        has_mask_per_class = mask.ndim == 3 and len(mask) == self.num_classes
        if self.mode == "multilabel":
            if not has_mask_per_class:
                raise ValueError(
                    f"Expected a mask of shape ({self.num_classes}, H, W) with mode='multilabel', but got"
                    f" {tuple(mask.shape)}."
                )
            changed = torch.full_like(mask, self.ignore_index)
            changed[list(self.classes)] = mask[list(self.classes)]
            return changed
        if (
            has_mask_per_class
            and len(mask) > 2
            and bool(((mask == 0) | (mask == 1) | (mask == self.ignore_index)).all())
        ):
            raise ValueError(
                f"Expected class masks with mode='multiclass', but a mask of shape {tuple(mask.shape)} contains only "
                "0 and 1. For one mask per class set mode='multilabel'; a volume of class indices needs an "
                "additional leading axis."
            )
        is_annotated = torch.isin(mask, torch.tensor(self.classes, dtype=mask.dtype))
        return mask.masked_fill(~is_annotated, self.ignore_index)
