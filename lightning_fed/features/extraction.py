"""Extracts feature vectors from a trained model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fed.argument_checks import check_count
from lightning_fed.features.batches import BatchKey, find_inputs
from lightning_fed.features.isolated_pass import evaluating
from lightning_fed.features.layers import FeatureLayer, find_feature_layer, tap_features, without_compiled_code


def extract_features(
    model: nn.Module,
    batches: Iterable[Any],
    layer: str = "auto",
    *,
    max_samples: int | None = 2000,
    inputs: BatchKey = None,
    seed: int = 0,
) -> Tensor:
    """Extracts feature vectors from a model, for example to compare models.

    The model runs in evaluation mode. Each position in a feature map gives one vector. With the same batches and seed,
    two models of equal architecture are sampled at the same positions.

    Args:
        model: LightningModule or other module, called with a batch's inputs.
        batches: Batches, such as a ``DataLoader`` without shuffling.
        layer: Name of the layer with the features as output; ``"auto"`` for
            :func:`~lightning_fed.modules.find_feature_layer`.
        max_samples: Maximum number of vectors, drawn at random; ``None`` for all vectors.
        inputs: Index or key of the inputs in a batch, or a function of the batch. The default is the first element, or
            a common key such as ``"image"``.
        seed: Seed for the random sample.

    Returns:
        Features, shape ``(n, d)``, float32, on the CPU, in the order of the data.

    Raises:
        ValueError: If the layer does not exist or is unused, the inputs are missing, or ``max_samples`` is below 1.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
        >>> batches = [(torch.zeros(2, 1, 8, 8), torch.zeros(2, 6, 6))] * 3
        >>> extract_features(net, batches, max_samples=100).shape
        torch.Size([100, 4])
    """
    if max_samples is not None:
        check_count("max_samples", max_samples)
    feature_layer = find_feature_layer(model) if layer == "auto" else FeatureLayer(layer)
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    sample = _Sample(max_samples, seed)
    with tap_features(model, feature_layer) as tap, evaluating(model), without_compiled_code():
        tap.on_features = sample.take
        for batch in batches:
            sample.is_awaited = True
            model(find_inputs(batch, inputs).to(device))
            if sample.is_awaited:
                raise ValueError(
                    f"Expected the model to compute its features, but {feature_layer} did not run: change `layer`."
                )
    if sample.vectors is None:
        raise ValueError("Expected at least one batch, but got none.")
    return sample.vectors


class _Sample:
    def __init__(self, size: int | None, seed: int) -> None:
        self.vectors: Tensor | None = None
        self.is_awaited = False
        self._size = size
        self._draws = torch.zeros(0, dtype=torch.float64)
        self._generator = torch.Generator().manual_seed(seed)

    def take(self, features: Tensor) -> None:
        if not self.is_awaited:
            return
        self.is_awaited = False
        maps = features.flatten(2) if features.ndim > 2 else features.unsqueeze(2)
        count, _, positions = maps.shape
        new_draws = torch.rand(count * positions, generator=self._generator, dtype=torch.float64)
        draws, num_old = torch.cat([self._draws, new_draws]), len(self._draws)
        smallest = draws.argsort(stable=True)[: self._size].sort().values
        new = (smallest[smallest >= num_old] - num_old).to(maps.device)
        added = maps[new // positions, :, new % positions].to("cpu", torch.float32)
        self.vectors = added if self.vectors is None else torch.cat([self.vectors[smallest[smallest < num_old]], added])
        self._draws = draws[smallest]
