import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.stats import ks_2samp, kstest, norm

from lightning_fed.datasets.synthetic_generator import synthetic_clients
from tests import references
from tests.breadth import quick


def test_clients_depend_on_seed_and_client_alone():
    few, many = synthetic_clients(num_clients=3, seed=4), synthetic_clients(num_clients=5, seed=4)
    for (x, y), (x_again, y_again) in zip(few, many[:3], strict=True):
        assert np.array_equal(x, x_again)
        assert np.array_equal(y, y_again)
    assert not np.array_equal(few[0][0][:50], synthetic_clients(num_clients=1, seed=5)[0][0][:50])
    assert not np.array_equal(few[0][0][:50], few[1][0][:50])


def test_shapes_and_types():
    for x, y in synthetic_clients(num_clients=5, num_features=7, num_classes=3):
        assert x.shape == (y.size, 7)
        assert (x.dtype, y.dtype) == (np.float32, np.int64)
        assert y.min() >= 0
        assert y.max() < 3
        assert y.size >= 50


def test_sizes_are_log_normal():
    sizes = np.array([y.size for _, y in synthetic_clients(num_clients=400, num_features=1, num_classes=2)])
    logarithms = np.log(sizes - 50 + 0.5)
    assert kstest(logarithms, norm(4, 2).cdf).pvalue > 1e-3


@pytest.mark.parametrize(
    ("alpha", "beta"), quick([(0.0, 0.0), (1.0, 1.0), (0.0, 3.0), (4.0, 0.0)], [(0.0, 3.0), (4.0, 0.0)])
)
def test_data_are_distributed_as_in_the_published_program(alpha, beta):
    rng = np.random.default_rng(0)
    clients = synthetic_clients(alpha, beta, num_clients=150, seed=1, num_features=6, num_classes=4)
    reference_clients = [references.synthetic_client_reference(alpha, beta, rng, 6, 4) for _ in range(150)]
    statistics = {
        "mean of the inputs": lambda x, y: x.mean(),
        "scale of the first input": lambda x, y: x[:, 0].std(),
        "scale of the last input": lambda x, y: x[:, -1].std(),
        "share of the largest class": lambda x, y: np.bincount(y).max() / y.size,
        "number of classes": lambda x, y: np.unique(y).size,
    }
    for name, statistic in statistics.items():
        samples = [
            [float(statistic(np.asarray(x), np.asarray(y))) for x, y in source]
            for source in (clients, reference_clients)
        ]
        assert ks_2samp(*samples).pvalue > 1e-3, name


def test_labels_are_a_linear_function_of_the_inputs():
    clients = synthetic_clients(num_clients=40, num_features=3, num_classes=2)
    x, y = max(clients, key=lambda client: min(np.bincount(client[1], minlength=2)[:2]) / client[1].size)
    assert np.bincount(y).min() > 10

    def is_separable(labels):
        sign = np.where(labels == 1, 1.0, -1.0)[:, None]
        design = np.c_[x, np.ones(len(x))] * sign
        return linprog(np.zeros(4), A_ub=-design, b_ub=-np.ones(len(x)), bounds=(None, None)).status == 0

    assert is_separable(y)
    assert not is_separable(np.random.default_rng(0).permutation(y))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha": -1}, "Expected `alpha` to be at least 0 and finite, but got -1."),
        ({"beta": float("nan")}, "Expected `beta` to be at least 0 and finite, but got nan."),
        ({"num_clients": 0}, "Expected `num_clients` to be at least 1 and finite, but got 0."),
        ({"seed": -1}, "Expected `seed` to be at least 0 and finite, but got -1."),
        ({"num_features": 0}, "Expected `num_features` to be at least 1 and finite, but got 0."),
        ({"num_classes": 1}, "Expected `num_classes` to be at least 2 and finite, but got 1."),
    ],
)
def test_errors_name_the_argument_and_its_value(arguments, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - compared below
        synthetic_clients(**arguments)
    assert message in str(error.value)
