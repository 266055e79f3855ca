"""Data set in memory, with fast access to whole batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_fed.data.dataset_clients import BatchedDataset

Augment = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class ArrayDataset(BatchedDataset):
    """Data set with all samples in two tensors.

    A uint8 input, such as an image, is returned as `(input / 255 - mean) / std` in float32. Floating-point inputs are
    only normalised. Other integer inputs, such as token ids, are returned unchanged.

    Args:
        inputs: All inputs, shape (N, C, H, W) or (N, ...).
        targets: All targets: classes (N,), masks (N, H, W), or values (N, ...). Integer targets are returned as int64.
        groups: Natural client of each sample, such as the writer, shape (N,).
        mean: Mean to subtract, one number or one per channel. Pixel values range from 0 to 1.
        std: Standard deviation to divide by, one number or one per channel.
        augment: Function `augment(input, target)` before normalisation, such as a transform in
            `torchvision.transforms.v2`. Random draws should come from torch's global generator.

    Raises:
        ValueError: If lengths differ, `mean` or `std` does not fit the inputs, or `std` contains zero.

    Example:
        >>> import torch
        >>> images = torch.tensor([[[[0, 255]]], [[[255, 51]]]], dtype=torch.uint8)
        >>> dataset = ArrayDataset(images, torch.tensor([3, 7]), mean=0.5, std=0.5)
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
            raise ValueError("Expected `std` without zeros, but a value is 0: for a constant channel, use 1.")

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, target = self._to_float(self.inputs[index]), self._to_target(self.targets[index])
        image, target = self._changed(image, target)
        return self._normalise(image), target

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Returns a list of samples for one batch, which a `DataLoader` then collates."""
        return list(zip(*(tensor.unbind(0) for tensor in self.get_batch(indices)), strict=True))

    def get_batch(self, indices: Sequence[int] | np.ndarray | Tensor) -> list[Tensor]:
        """Returns the same batch as `default_collate([dataset[i] for i in indices])`, but faster."""
        chosen = indices if isinstance(indices, Tensor) else torch.tensor(indices, dtype=torch.int64)
        images = self._to_float(self.inputs.index_select(0, chosen))
        targets = self._to_target(self.targets.index_select(0, chosen))
        if self.augment is not None:
            changed = map(self._changed, images, targets)
            images, targets = (torch.stack(parts) for parts in zip(*changed, strict=True))
        return [self._normalise(images), targets]

    def subset(self, indices: Sequence[int] | np.ndarray | Tensor) -> ArrayDataset:
        """Copies the samples at `indices` to a new data set."""
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
        """Returns a data set with the same samples, but without augmentation."""
        plain = copy.copy(self)
        plain.augment = None
        return plain

    def _changed(self, image: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        if self.augment is None:
            return image, target
        if target.ndim < 2:
            return self.augment(image, target)
        from torchvision.tv_tensors import Mask  # slow to import, and needed only for masks

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
    if value is None:
        return None
    if _is_integer(inputs) and inputs.dtype != torch.uint8:
        raise ValueError(f"Expected no `{name}` for inputs of type {inputs.dtype}, but got {value}.")
    numbers = torch.as_tensor(value, dtype=torch.float32).flatten()
    channels = inputs.shape[1] if inputs.ndim > 1 else 1
    if len(numbers) not in (1, channels):
        raise ValueError(f"Expected `{name}` to be one number or {channels}, one per channel, but got {len(numbers)}.")
    return numbers.reshape([-1] + [1] * (inputs.ndim - 2)) if inputs.ndim > 1 else numbers.reshape(())
