"""Resizing of label maps."""

import pytest
import torch
from torch.nn import functional as F

from lightning_fed.features.label_maps import resize_labels


@pytest.mark.parametrize("size", [(4, 4), (33, 17), (5, 9), (13, 64)])
def test_labels_are_resized_to_the_nearest(size):
    """In integers; torch rounds positions in float32, without a difference for these sizes."""
    labels = torch.randint(20, (2, 33, 64))
    expected = F.interpolate(labels.unsqueeze(1).float(), size, mode="nearest").squeeze(1).long()
    assert torch.equal(resize_labels(labels, size), expected)


def test_large_labels_are_not_rounded():
    labels = torch.tensor([[2**24 + 1, 2**40 + 1]])
    assert torch.equal(resize_labels(labels, (4,)), labels.repeat_interleave(2, 1))
