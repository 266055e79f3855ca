"""Random initial parameters, drawn by shuffling a module's initial parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from lightning_fed.messages import State


def shuffled_state(state: Mapping[str, Tensor], names: Collection[str], seed: int) -> State:
    """Draws new initial parameters by shuffling the elements in each tensor in ``names``.

    Shuffling preserves the scale of the initialization. Zeros are not moved, so zero biases stay zero. Shuffling
    destroys pretrained and orthogonal weights.

    Example:
        >>> state = {"weight": torch.tensor([[0.0, 1.0], [2.0, 3.0]]), "running_mean": torch.tensor([4.0, 5.0])}
        >>> shuffled_state(state, ["weight"], seed=1)
        {'weight': tensor([[0., 2.],
                [3., 1.]]), 'running_mean': tensor([4., 5.])}
    """
    generator = torch.Generator().manual_seed(seed)
    shuffled = dict(state)
    for name in sorted(names):
        values = state[name].detach().flatten()
        positions = values.nonzero().flatten()
        order = torch.randperm(len(positions), generator=generator).to(positions.device)
        shuffled[name] = values.index_copy(0, positions, values[positions[order]]).view_as(state[name])
    return shuffled
