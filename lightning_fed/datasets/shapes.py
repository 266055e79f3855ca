"""Generated scenes with simple shapes, for segmentation or classification."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch

from lightning_fed.argument_checks import check_count, check_option
from lightning_fed.datasets.array_module import SPLITS, ArrayDataModule, Split, random_flip
from lightning_fed.datasets.arrays import ArrayDataset, Augment
from lightning_fed.datasets.scenes import SHAPES, render_scene

_MEAN, _STD = 0.47, 0.22


class ShapesDataset(ArrayDataset):
    """Generated scenes with two to four shapes from five classes.

    A shape's class determines the outline, and with probability 0.9 the texture. Colours and areas do not depend on the
    class.

    The largest shape has the scene's dominant class. Mask values are 0 background, 1 disc, 2 square, 3 triangle,
    4 ring, 5 cross. For classification, the label is the shape class with the most visible pixels, from 0 disc to
    4 cross.

    Args:
        num_samples: Number of scenes.
        image_size: Height and width in pixels, at least 16.
        seed: Seed for the scenes, at least 0.
        split: Training, validation or test data, with different scenes.
        dominant: Probability that a further shape has the dominant class, in [0, 1]. Otherwise its class is random.
        task: `"segmentation"` for masks as targets, or `"classification"` for labels.
        augment: Function `augment(input, target)`, as in `ArrayDataset`.

    Example:
        >>> scenes = ShapesDataset(4, image_size=32)
        >>> image, mask = scenes[0]
        >>> image.shape, mask.shape, mask.dtype
        (torch.Size([3, 32, 32]), torch.Size([32, 32]), torch.int64)
    """

    def __init__(
        self,
        num_samples: int,
        *,
        image_size: int = 64,
        seed: int = 0,
        split: Split = "train",
        dominant: float = 0.7,
        task: Literal["segmentation", "classification"] = "segmentation",
        augment: Augment | None = None,
    ) -> None:
        _check_options(image_size, dominant, task)
        check_count("num_samples", num_samples, 0)
        check_count("seed", seed, 0)
        images = np.empty((num_samples, 3, image_size, image_size), dtype=np.uint8)
        masks = np.empty((num_samples, image_size, image_size), dtype=np.uint8)
        for index in range(num_samples):
            rng = np.random.default_rng(np.random.SeedSequence([seed, SPLITS[split], index]))
            images[index], masks[index] = render_scene(rng, image_size, dominant)
        targets = masks if task == "segmentation" else _dominant_labels(masks)
        super().__init__(
            torch.from_numpy(images), torch.from_numpy(targets), mean=[_MEAN] * 3, std=[_STD] * 3, augment=augment
        )


class Shapes(ArrayDataModule):
    """Datamodule with generated scenes of discs, squares, triangles, rings and crosses.

    `ShapesDataset` describes the scenes. Segmentation has 6 classes, background and five shapes. Classification has 5
    classes. With `dominant` near 1, most scenes contain shapes of only one class. The clients of a Dirichlet partition
    then have very different masks.

    Args:
        num_train: Number of training scenes.
        num_val: Number of validation scenes. 0 means no validation.
        num_test: Number of test scenes.
        image_size: Height and width in pixels, at least 16.
        dominant: Probability that a further shape has the class of the largest shape, in [0, 1].
        task: `"segmentation"` for masks as targets, or `"classification"` for labels.
        augment: Whether to mirror training scenes at random.
        batch_size: Scenes per training batch.
        **options: `eval_batch_size`, `num_workers` and `seed`, the seed for the scenes.

    Example:
        >>> data = Shapes(num_train=8, num_val=2, num_test=2, image_size=32)
        >>> data.num_classes, data.class_names[0], len(data.train_dataset)
        (6, 'background', 8)
    """

    def __init__(
        self,
        *,
        num_train: int = 2000,
        num_val: int = 200,
        num_test: int = 400,
        image_size: int = 64,
        dominant: float = 0.7,
        task: Literal["segmentation", "classification"] = "segmentation",
        augment: bool = False,
        batch_size: int = 16,
        **options: Any,
    ) -> None:
        _check_options(image_size, dominant, task)
        check_count("num_train", num_train)
        if min(num_val, num_test) < 0:
            raise ValueError(f"Expected `num_val` and `num_test` to be at least 0, but got {num_val} and {num_test}.")
        names = SHAPES if task == "classification" else ("background", *SHAPES)
        super().__init__(names, batch_size=batch_size, **options)
        self.num_scenes: dict[Split, int] = {"train": num_train, "val": num_val, "test": num_test}
        self.image_size = image_size
        self.dominant = dominant
        self.task = task
        self.augment = augment

    def load_split(self, split: Split) -> ArrayDataset:
        return ShapesDataset(
            self.num_scenes[split],
            image_size=self.image_size,
            seed=self.seed,
            split=split,
            dominant=self.dominant,
            task=self.task,
            augment=random_flip() if self.augment and split == "train" else None,
        )


def _check_options(image_size: int, dominant: float, task: str) -> None:
    check_count("image_size", image_size, 16)
    if not 0 <= dominant <= 1:
        raise ValueError(f"Expected `dominant` to be in [0, 1], but got {dominant}.")
    check_option("task", task, ("segmentation", "classification"))


def _dominant_labels(masks: np.ndarray) -> np.ndarray:
    counts = [np.bincount(mask.ravel(), minlength=len(SHAPES) + 1)[1:] for mask in masks]
    return np.array([count.argmax() for count in counts], dtype=np.int64)
