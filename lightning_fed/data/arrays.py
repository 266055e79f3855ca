"""A data set in memory that returns a whole batch with one indexing operation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

Augment = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class ArrayDataset(Dataset[tuple[Tensor, Tensor]]):
    """Samples in two tensors; images stay uint8 in memory and become normalised float32 when fetched.

    A fetched uint8 input is `(input / 255 - mean) / std` in float32, the same bits as torchvision's `ToTensor` and
    `Normalize`. Floating inputs are normalised only, other integer inputs (token ids) are returned unchanged.

    There are three ways to fetch, with the same bits: `dataset[i]` for one sample, `__getitems__` for the list of
    samples that a `DataLoader` collates, and `get_batch` for the collated batch itself, which is the fastest.

    Args:
        inputs: All inputs, shape (N, C, H, W) or (N, ...).
        targets: All targets: classes (N,), masks (N, H, W), or values of any shape (N, ...). Integer targets are
            returned as int64. Masks may be uint8 to save memory.
        groups: The natural client of each sample (writer, video, ...), shape (N,), of any type that can be compared.
        mean: Per-channel mean that is subtracted, on the scale [0, 1] for uint8 inputs: one number, or C numbers.
        std: Per-channel standard deviation that is divided by: one number, or C numbers.
        augment: Called as `augment(input, target)` on each fetched sample, on the floating input before it is
            normalised, and returns the two changed: any transform of `torchvision.transforms.v2`, by which masks (a
            `torchvision.tv_tensors.Mask`) follow their image. Random draws should come from torch's global generator.

    Attributes:
        inputs: The inputs, unchanged.
        targets: The targets, from which partitions take the labels: classes as int64, masks in their original type.
        groups: The natural clients, or None.
        augment: The augmentation, or None.

    Raises:
        ValueError: If lengths differ, `mean` or `std` does not fit the channels or the type, or `std` has a zero.

    Example:
        >>> import torch
        >>> images = torch.tensor([[[[0, 255]]], [[[255, 51]]]], dtype=torch.uint8)
        >>> dataset = ArrayDataset(images, torch.tensor([3, 7]), mean=0.5, std=0.5)
        >>> dataset[0]
        (tensor([[[-1.,  1.]]]), tensor(3))
        >>> inputs, targets = dataset.get_batch([1, 0])
        >>> inputs.shape, targets
        (torch.Size([2, 1, 1, 2]), tensor([7, 3]))
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        *,
        groups: np.ndarray | None = None,
        mean: float | Sequence[float] | Tensor | None = None,
        std: float | Sequence[float] | Tensor | None = None,
        augment: Augment | None = None,
    ) -> None:
        if len(targets) != len(inputs):
            raise ValueError(f"Expected one target for each of the {len(inputs)} inputs, but got {len(targets)}.")
        if groups is not None and np.shape(groups) != (len(inputs),):
            raise ValueError(f"Expected `groups` to have shape ({len(inputs)},), but got {np.shape(groups)}.")
        self.inputs = inputs
        self.targets = targets.long() if targets.ndim == 1 and _is_integer(targets) else targets
        self.groups = None if groups is None else np.asarray(groups)
        self.augment = augment
        self._mean = _per_channel("mean", mean, inputs)
        self._std = _per_channel("std", std, inputs)
        if self._std is not None and bool((self._std == 0).any()):
            raise ValueError("Expected `std` to have no zero, but got one.")

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One sample: its input and its target."""
        image, target = self._to_float(self.inputs[index]), self._to_target(self.targets[index])
        image, target = self._changed(image, target)
        return self._normalise(image), target

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """The samples of one batch, which a `DataLoader` collates.

        Args:
            indices: Indices of the samples, each at least 0.

        Returns:
            One (input, target) for each index.
        """
        return list(zip(*(tensor.unbind(0) for tensor in self.get_batch(indices)), strict=True))

    def get_batch(self, indices: Sequence[int] | np.ndarray | Tensor) -> list[Tensor]:
        """The collated batch: `default_collate([dataset[i] for i in indices])`, bit for bit, in one operation.

        With `augment` the samples are changed one by one, in the order of the indices, as `dataset[i]` would.

        Args:
            indices: Indices of the samples, each at least 0. May be empty without `augment`.

        Returns:
            The inputs (B, ...) and the targets (B, ...).
        """
        chosen = indices if isinstance(indices, Tensor) else torch.tensor(indices, dtype=torch.int64)
        images = self._to_float(self.inputs.index_select(0, chosen))
        targets = self._to_target(self.targets.index_select(0, chosen))
        if self.augment is not None:
            changed = map(self._changed, images, targets)
            images, targets = (torch.stack(parts) for parts in zip(*changed, strict=True))
        return [self._normalise(images), targets]

    def subset(self, indices: Sequence[int] | np.ndarray | Tensor) -> ArrayDataset:
        """A data set of some of the samples (copied), with the same normalisation and augmentation.

        Args:
            indices: Indices of the samples, each at least 0, in the order of the result.

        Returns:
            The smaller data set.
        """
        chosen = indices if isinstance(indices, Tensor) else torch.tensor(indices, dtype=torch.int64)
        return ArrayDataset(
            self.inputs.index_select(0, chosen),
            self.targets.index_select(0, chosen),
            groups=None if self.groups is None else self.groups[chosen.numpy()],
            mean=self._mean,
            std=self._std,
            augment=self.augment,
        )

    def without_augmentation(self) -> ArrayDataset:
        """The same samples (shared, not copied) without the augmentation, to evaluate on."""
        plain = copy.copy(self)
        plain.augment = None
        return plain

    def _changed(self, image: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        if self.augment is None:
            return image, target
        if target.ndim < 2:
            return self.augment(image, target)
        from torchvision.tv_tensors import Mask  # slow to import: only for those who use it

        image, mask = self.augment(image, Mask(target))
        return image, mask.as_subclass(Tensor)

    def _to_float(self, raw: Tensor) -> Tensor:
        return raw.to(torch.float32).div_(255) if raw.dtype == torch.uint8 else raw

    def _to_target(self, raw: Tensor) -> Tensor:
        return raw.long() if _is_integer(raw) else raw

    def _normalise(self, image: Tensor) -> Tensor:
        if self._mean is not None:
            image = image - self._mean
        if self._std is not None:
            image = image / self._std
        return image


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _per_channel(name: str, value: float | Sequence[float] | Tensor | None, inputs: Tensor) -> Tensor | None:
    """Reshapes `value` so that it broadcasts over the channels of one input and of a batch of inputs."""
    if value is None:
        return None
    if _is_integer(inputs) and inputs.dtype != torch.uint8:
        raise ValueError(f"Expected no `{name}` for inputs of type {inputs.dtype}, but got {value}.")
    numbers = torch.as_tensor(value, dtype=torch.float32).flatten()
    channels = inputs.shape[1] if inputs.ndim > 1 else 1
    if len(numbers) not in (1, channels):
        raise ValueError(f"Expected `{name}` to be one number or {channels}, one per channel, but got {len(numbers)}.")
    return numbers.reshape([-1] + [1] * (inputs.ndim - 2)) if inputs.ndim > 1 else numbers.reshape(())
