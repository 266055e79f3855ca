"""Principal axes against the eigenvectors of the covariance matrix."""

import numpy as np
import pytest
import torch

from lightning_fed.algorithms.fedmargin import principal_axes


def points(n=7, d=5, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed)) * torch.arange(1.0, d + 1) + 3


def eigenvectors(values, count):
    values = values.double().numpy()
    _, vectors = np.linalg.eigh(np.cov(values.T))
    axes = vectors[:, ::-1].T[:count]
    return axes * np.sign([axis[np.abs(axis).argmax()] for axis in axes])[:, None]


@pytest.mark.parametrize(("n", "d", "count"), [(7, 5, 2), (40, 3, 3), (5, 30, 4), (3, 8, 2)])
def test_axes_are_the_eigenvectors_of_the_covariance(n, d, count):
    values = points(n, d)
    view = principal_axes(values, count)
    expected = eigenvectors(values, count)
    np.testing.assert_allclose(view.axes, expected, atol=1e-9)
    np.testing.assert_allclose(view.center, values.double().numpy().mean(0), atol=1e-12)
    new_points = points(4, d, seed=1)
    np.testing.assert_allclose(
        view.project(new_points),
        (new_points.double().numpy() - values.double().numpy().mean(0)) @ expected.T,
        atol=1e-8,
    )
    assert view.axes.dtype == view.project(values).dtype == torch.float64


def test_where_there_is_no_spread_there_is_no_axis():
    line = torch.tensor([[1.0], [2.0], [4.0]]) * torch.tensor([[3.0, -4.0, 0.0]])
    view = principal_axes(line)
    np.testing.assert_allclose(view.axes, [[-0.6, 0.8, 0.0], [0.0, 0.0, 0.0]], atol=1e-12)
    assert (principal_axes(line[:1]).axes == 0).all()
    assert (principal_axes(torch.full((3, 2), 1e6)).axes == 0).all()
    np.testing.assert_allclose(principal_axes(line[:, :1]).axes, [[1.0], [0.0]])


def test_turning_finds_a_turn_again():
    """The same points after a known rotation and reflection: alignment restores every point."""
    values = points(9, 6)
    view = principal_axes(values)
    angle = torch.tensor(2.5, dtype=torch.float64)
    turn = torch.stack([torch.stack([angle.cos(), angle.sin()]), torch.stack([angle.sin(), -angle.cos()])])
    turned = view._replace(axes=turn @ view.axes)
    assert not torch.allclose(turned.axes, view.axes)
    torch.testing.assert_close(turned.turned_to(view).axes, view.axes)


def test_turning_is_the_best_turn():
    """No other angle, with or without reflection, brings the axes closer."""
    view, reference = principal_axes(points(seed=0)), principal_axes(points(seed=3))
    turned = view.turned_to(reference)
    torch.testing.assert_close(turned.axes @ turned.axes.T, torch.eye(2, dtype=torch.float64))
    torch.testing.assert_close(turned.axes.T @ turned.axes, view.axes.T @ view.axes)  # the same plane
    assert torch.equal(turned.center, view.center)
    distances = []
    for angle in torch.linspace(0, 2 * torch.pi, 721, dtype=torch.float64):
        for sign in (1, -1):
            rows = [[angle.cos(), -angle.sin()], [sign * angle.sin(), sign * angle.cos()]]
            distances.append(float((torch.tensor(rows, dtype=torch.float64) @ view.axes - reference.axes).norm()))
    best = float((turned.axes - reference.axes).norm())
    assert best <= min(distances) + 1e-12
    assert min(distances) - best < 1e-4


def test_refusals():
    for wrong in (torch.zeros(3), torch.zeros(0, 2)):
        with pytest.raises(ValueError, match=r"`points` of shape \(n, d\) with n of at least 1, but got"):
            principal_axes(wrong)
    with pytest.raises(ValueError, match="`count` to be at least 1, but got 0"):
        principal_axes(torch.zeros(3, 2), 0)
