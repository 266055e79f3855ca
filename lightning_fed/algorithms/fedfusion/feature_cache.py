"""Caches features of FedFusion's frozen extractor during a client's local training."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lightning_fed.algorithms.sample_hashes import sample_hashes


class FeatureCache:
    """Caches a constant network's outputs, by a hash over each input sample.

    BatchNorm must be in evaluation mode. ``hits`` counts the samples found in the cache, and ``misses`` all others. If
    ``is_filling`` is false, no outputs are added.
    """

    def __init__(self) -> None:
        self.is_filling = True
        self.hits = self.misses = 0
        self._features: dict[int, dict[str, Tensor]] = {}

    def get(self, samples: Tensor, compute: Callable[[Tensor], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Returns a batch's outputs by name, shape ``(N, ...)``. Calls ``compute`` with samples not in the cache."""
        keys = sample_hashes(samples).tolist()
        missing = [index for index, key in enumerate(keys) if key not in self._features]
        self.hits += len(keys) - len(missing)
        self.misses += len(missing)
        new: dict[int, dict[str, Tensor]] = {}
        if missing:
            has_no_hit = len(missing) == len(keys)
            computed = compute(samples if has_no_hit else samples[torch.tensor(missing, device=samples.device)])
            for row, index in enumerate(missing):
                new[keys[index]] = {name: value[row] for name, value in computed.items()}
            if self.is_filling:
                self._features |= new
            if has_no_hit:
                return dict(computed)
        rows = [new[key] if key in new else self._features[key] for key in keys]
        return {name: torch.stack([features[name] for features in rows]) for name in rows[0]}
