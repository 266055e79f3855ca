"""New initial parameters of a module."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from lightning_fed.messages import State


def shuffled_state(state: Mapping[str, Tensor], names: Collection[str], seed: int) -> State:
    """A state whose parameters are drawn anew, as by another run of the module's own initialisation.

    The entries of each tensor are shuffled. Where an initialisation draws them independently of one another, with one
    distribution for the tensor, the result is another draw of it, whatever distribution it is: its scale, which a
    network may need to train at all, stays. Zeros keep their places: those of biases, of the row of a padding token or
    of pruned weights. What is not such a draw loses what it was, as orthogonal or pretrained weights do.

    Args:
        state: Entries by name, as the module was built.
        names: Those that are shuffled: its trainable parameters.
        seed: Seed of the shuffles.

    Returns:
        All entries; those that are not shuffled are the same tensors.

    Example:
        >>> state = {"weight": torch.tensor([[0.0, 1.0], [2.0, 3.0]]), "running_mean": torch.tensor([4.0, 5.0])}
        >>> shuffled_state(state, ["weight"], seed=1)
        {'weight': tensor([[0., 2.],
                [3., 1.]]), 'running_mean': tensor([4., 5.])}

    """
    generator = torch.Generator().manual_seed(seed)
    drawn = dict(state)
    for name in sorted(names):
        values = state[name].detach().flatten()
        positions = values.nonzero().flatten()
        order = torch.randperm(len(positions), generator=generator).to(positions.device)
        drawn[name] = values.index_copy(0, positions, values[positions[order]]).view_as(state[name])
    return drawn
