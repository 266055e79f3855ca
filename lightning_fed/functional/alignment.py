"""The order of a client's neurons in which they are nearest to those of a reference.

Ainsworth, Hayase and Srinivasa, "Git Re-Basin: Merging Models modulo Permutation Symmetries", ICLR 2023 (weight
matching), and Singh and Jaggi, "Model Fusion via Optimal Transport", NeurIPS 2020.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from lightning_fed.functional.options import check_count
from lightning_fed.functional.wide import at_least_float32


@torch.no_grad()
def align_neurons(reference: Tensor, neurons: Tensor, blocks: int = 1) -> Tensor:
    r"""The order of neurons with the largest sum of products with a reference, and so the smallest distance.

    .. math:: \max_\pi \sum_i \langle r_i, w_{\pi(i)} \rangle

    With blocks (the groups of a group normalisation) neurons stay with those of their block, and blocks as wholes are
    ordered as well: first the best order within every pair of blocks, then the best pairs.

    Args:
        reference: Neurons, shape ``(L, D)``.
        neurons: Those to be ordered, shape ``(L, D)``.
        blocks: Number of blocks of equal size, one after the other.

    Returns:
        Which neuron comes to each place, int64, shape ``(L,)``.

    Raises:
        ValueError: If the shapes differ, numbers are not finite, or ``blocks`` does not divide the number of neurons.

    Example:
        >>> reference = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> align_neurons(reference, reference[[2, 0, 1]] + 0.1)
        tensor([1, 2, 0])

    """
    if reference.ndim != 2 or reference.shape != neurons.shape:
        raise ValueError(
            "Expected `reference` and `neurons` to have the same shape (L, D), but got"
            f" {tuple(reference.shape)} and {tuple(neurons.shape)}."
        )
    check_count("blocks", blocks)
    if len(neurons) % blocks:
        raise ValueError(f"Expected `blocks` to divide the {len(neurons)} neurons, but got {blocks}.")
    products = (at_least_float32(reference) @ at_least_float32(neurons).T).double().cpu().numpy()
    if not np.isfinite(products).all():
        raise ValueError("Expected `reference` and `neurons` to be finite, but got NaN or infinite values.")
    size = len(neurons) // blocks
    tiles = products.reshape(blocks, size, blocks, size).swapaxes(1, 2)
    inner = np.zeros((blocks, blocks, size), np.int64)
    gains = np.zeros((blocks, blocks))
    for row in range(blocks):
        for column in range(blocks):
            inner[row, column] = _assigned(tiles[row, column])
            gains[row, column] = np.take_along_axis(tiles[row, column], inner[row, column][:, None], 1).sum()
    partners = _assigned(gains)
    order = partners[:, None] * size + inner[np.arange(blocks), partners]
    return torch.from_numpy(order.reshape(-1)).to(neurons.device)


def _assigned(gains: NDArray[np.float64]) -> NDArray[np.int64]:
    """The column of every row, of the assignment with the largest sum."""
    columns: NDArray[np.int64] = linear_sum_assignment(gains, maximize=True)[1]
    return columns
