"""Partition that gives each client's images a different appearance."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fed.argument_checks import check_nonnegative
from lightning_fed.data.partition import Partition
from lightning_fed.messages import Client
from lightning_fed.numerics.seeds import client_key
from lightning_fed.partitions.base import PartitionOfPartition, change_input
from lightning_fed.partitions.sample_assignment import generator_for

_TOLERANCE = 1e-3


@final
class Look(PartitionOfPartition):
    """Adds a client-specific image appearance to another partition.

    Every client has a separate :class:`ImageLook`, drawn from the seed and the client's name. Targets stay unchanged.
    Samples held out by :class:`~lightning_fed.data.PartitionedData` get the same look.

    Args:
        partition: Partition of the data set.
        contrast: Strength :math:`s`. The contrast factor is log-uniform from :math:`1 / (1 + s)` to :math:`1 + s`.
        colour: Strength :math:`s` of the factors for red, green and blue, drawn like the contrast.
        blur: Largest standard deviation of a Gaussian blur in pixels.
        noise: Largest standard deviation of Gaussian noise on the scale from 0 to 1.
        polarity: Share of clients with inverted images, in [0, 1].
        mean: Mean subtracted by the data set's normalisation: one number, or one per channel.
        std: Divisor in the data set's normalisation. Without mean and std, images must range from 0 to 1.
        seed: Seed for the appearances; if ``None``, the federation's seed.

    Raises:
        ValueError: If an argument is outside the allowed range, or an image is outside 0 to 1.

    Example:
        >>> from lightning_fed.data import IID
        >>> looks = Look(IID(num_clients=4), polarity=0.5)
        >>> [looks.transform(client, seed=0)((torch.tensor([[[0.2]]]), 7))[0].item() < 0.5 for client in range(4)]
        [True, False, True, False]
    """

    def __init__(
        self,
        partition: Partition,
        contrast: float = 0.0,
        colour: float = 0.0,
        blur: float = 0.0,
        noise: float = 0.0,
        polarity: float = 0.0,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(partition, seed)
        strengths = {"contrast": contrast, "colour": colour, "blur": blur, "noise": noise}
        for name, strength in strengths.items():
            check_nonnegative(name, strength)
        if not 0 <= polarity <= 1:
            raise ValueError(f"Expected `polarity` to be in [0, 1], but got {polarity}.")
        self.contrast, self.colour = contrast, colour
        self.blur, self.noise, self.polarity = blur, noise, polarity
        self.mean, self.std = mean, std

    def change(self, client: Client, seed: int) -> ImageLook:
        seed = self.seed_of(seed)
        rng = generator_for("look", seed, client_key(client))
        contrast = rng.uniform(-1, 1, 4).tolist()[
            0
        ]  # four draws, as in the published tables; only the first draw is used
        blur, noise, polarity = rng.uniform(0, 1, 3).tolist()
        gains = rng.uniform(-1, 1, 3).tolist()
        if isinstance(client, int):
            is_negative = math.floor((client + 1) * self.polarity) > math.floor(client * self.polarity)
        else:
            is_negative = polarity < self.polarity
        return ImageLook(
            contrast=(1 + self.contrast) ** contrast,
            gains=tuple((1 + self.colour) ** gain for gain in gains),
            blur=self.blur * blur,
            noise=self.noise * noise,
            is_negative=is_negative,
            mean=(0.0,) if self.mean is None else _as_tuple(self.mean),
            std=(1.0,) if self.std is None else _as_tuple(self.std),
            seed=client_key(client) ^ seed,
        )


@final
@dataclass(frozen=True)
class ImageLook:
    """Transform that changes the colours, contrast, blur and noise of a sample's image.

    The image is the sample, the first element of a tuple or list, or the value of ``"image"`` in a mapping. The shape
    is ``(C, H, W)`` or ``(H, W)``. Values are uint8, or floats from 0 to 1 before normalisation with ``mean`` and
    ``std``. The order is channel gains, contrast, inversion, blur and noise. Values are clamped to 0 and 1 after each
    step. An image has the same noise in every epoch.

    Args:
        contrast: Factor for each value's distance from 0.5.
        gains: Factors for the channels, repeated if an image has more channels.
        blur: Standard deviation of the blur in pixels.
        noise: Standard deviation of the noise.
        is_negative: Whether to invert the image.
        mean: Mean subtracted from the channels.
        std: Standard deviation by which the channels were divided.
        seed: Seed for the noise.

    Example:
        >>> look = ImageLook(contrast=0.5, is_negative=True)
        >>> look((torch.tensor([[[0.0, 1.0]]]), 3))
        (tensor([[[0.7500, 0.2500]]]), 3)
    """

    contrast: float = 1.0
    gains: tuple[float, ...] = (1.0,)
    blur: float = 0.0
    noise: float = 0.0
    is_negative: bool = False
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    seed: int = 0

    def __call__(self, sample: Any) -> Any:
        return change_input(sample, self._changed)

    def _changed(self, image: Tensor) -> Tensor:
        mean, std = (_per_channel(values, image) for values in (self.mean, self.std))
        values = image.float() / 255 if image.dtype == torch.uint8 else image.float() * std + mean
        if not image.is_floating_point() and image.dtype != torch.uint8:
            raise ValueError(f"Expected images of floating-point numbers or of uint8, but got {image.dtype}.")
        if values.min() < -_TOLERANCE or values.max() > 1 + _TOLERANCE:
            raise ValueError(
                f"Expected images from 0 to 1, but got values from {float(values.min()):.3g} to "
                f"{float(values.max()):.3g}: pass the `mean` and `std` with which the data set normalises images."
            )
        if any(gain != 1 for gain in self.gains):
            values = (values * _per_channel(self.gains, values)).clamp(0, 1)
        if self.contrast != 1:
            values = (0.5 + self.contrast * (values - 0.5)).clamp(0, 1)
        if self.is_negative:
            values = 1 - values
        if self.blur:
            values = _blurred(values, self.blur)
        if self.noise:
            values = (values + self.noise * self._draw_noise(values)).clamp(0, 1)
        if image.dtype == torch.uint8:
            return (values * 255).round().clamp(0, 255).to(torch.uint8)
        return ((values - mean) / std).to(image.dtype)

    def _draw_noise(self, values: Tensor) -> Tensor:
        content = zlib.crc32(values.contiguous().numpy().tobytes())
        seed = int(np.random.SeedSequence([self.seed, content]).generate_state(1, np.uint64)[0] >> np.uint64(1))
        return torch.randn(values.shape, generator=torch.Generator().manual_seed(seed))


def _blurred(image: Tensor, sigma: float) -> Tensor:
    radius = math.ceil(3 * sigma)
    kernel = torch.exp(-0.5 * (torch.arange(-radius, radius + 1) / sigma).square())
    kernel = (kernel / kernel.sum()).reshape(1, 1, -1, 1)
    planes = image.reshape(-1, 1, *image.shape[-2:])
    planes = F.conv2d(F.pad(planes, (0, 0, radius, radius), mode="replicate"), kernel)
    planes = F.conv2d(F.pad(planes, (radius, radius, 0, 0), mode="replicate"), kernel.transpose(2, 3))
    return planes.reshape(image.shape)


def _as_tuple(value: float | Sequence[float]) -> tuple[float, ...]:
    return (float(value),) if isinstance(value, int | float) else tuple(value)


def _per_channel(values: tuple[float, ...], image: Tensor) -> Tensor:
    channels = len(image) if image.ndim == 3 else 1
    numbers = torch.tensor([values[channel % len(values)] for channel in range(channels)])
    return numbers[:, None, None] if image.ndim == 3 else numbers
