"""The stream of normal numbers: equal to a reference in NumPy, independent by key."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from lightning_fed.privacy.noise import NormalStream
from tests.references_privacy import normal_reference

KEY = 0x0123456789ABCDEF0123456789ABCDEF


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("count", [1, 7, 2**15, 2**16 + 5])
def test_numbers_equal_the_reference(dtype, tolerance, count):
    stream = NormalStream([KEY, 3, 2**64 - 1], count, dtype)
    parts = [stream.draw(torch.Size(shape)) for shape in ([], [count // 3], [count - 1 - count // 3, 1], [0])]
    drawn = torch.cat([part.flatten() for part in parts])
    assert drawn.dtype == dtype
    np.testing.assert_allclose(drawn.numpy(), normal_reference([KEY, 3, 2**64 - 1], count), rtol=0, atol=tolerance)


def test_numbers_are_normal_with_tails():
    drawn = NormalStream([KEY], 10**6).draw(torch.Size([10**6])).double().numpy()
    assert stats.kstest(drawn, "norm").pvalue > 1e-3
    expected = 10**6 * 2 * stats.norm.sf(4)
    assert abs((np.abs(drawn) > 4).sum() - expected) < 4 * math.sqrt(expected)
    assert abs((drawn[1:] * drawn[:-1]).mean()) < 4e-3


def test_every_key_has_a_separate_stream():
    """Keys are parts with a fixed length, so (1, 2) and (1, 0, 2) differ."""
    first, *others = (NormalStream(keys, 1000).draw(torch.Size([1000])) for keys in ([1, 2], [2, 1], [1, 0, 2], [258]))
    for other in others:
        assert abs(torch.corrcoef(torch.stack([first, other]))[0, 1]) < 0.15


def test_the_number_of_threads_changes_no_bit():
    before = torch.get_num_threads()
    draws = []
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            draws.append(NormalStream([KEY], 10**5).draw(torch.Size([10**5])))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*draws)
