"""Features of samples that were seen before."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lightning_fed.data.sample_hashes import sample_hashes


class FeatureCache:
    """Keeps what a fixed network makes of samples, under a hash of their content.

    Whether a sample was seen before is looked at, not assumed: one that differs in a single bit, by an augmentation
    say, is computed. Samples must not depend on each other (BatchNorm in evaluation mode).

    Attributes:
        is_filling: Whether what is computed is kept.
        hits: Samples that were known, so far.
        misses: Samples that were not.

    Example:
        >>> cache = FeatureCache()
        >>> for _ in range(2):
        ...     features = cache.get(torch.eye(3), lambda samples: {"0": 2 * samples})
        >>> cache.hits, cache.misses
        (3, 3)

    """

    def __init__(self) -> None:
        self.is_filling = True
        self.hits = self.misses = 0
        self._features: dict[int, dict[str, Tensor]] = {}

    def get(self, samples: Tensor, compute: Callable[[Tensor], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The features of samples, each computed once.

        Args:
            samples: A batch of inputs, shape ``(N, ...)``.
            compute: Makes features of samples, by name, each of shape ``(N, ...)``.

        """
        keys = sample_hashes(samples).tolist()
        missing = [place for place, key in enumerate(keys) if key not in self._features]
        self.hits += len(keys) - len(missing)
        self.misses += len(missing)
        fresh: dict[int, dict[str, Tensor]] = {}
        if missing:
            is_new = len(missing) == len(keys)
            computed = compute(samples if is_new else samples[torch.tensor(missing, device=samples.device)])
            for row, place in enumerate(missing):
                fresh[keys[place]] = {name: value[row] for name, value in computed.items()}
            if self.is_filling:
                self._features |= fresh
            if is_new:
                return dict(computed)
        known = [fresh[key] if key in fresh else self._features[key] for key in keys]
        return {name: torch.stack([features[name] for features in known]) for name in known[0]}
