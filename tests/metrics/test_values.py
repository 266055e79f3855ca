"""The value of every metric against references, and refusals."""

import math

import numpy as np
import pytest
import torch

from lightning_fed.metrics import AggregateMeanMargin, MaximumMeanDiscrepancy, MeanEntropy
from lightning_fed.metrics.functional import distances
from tests import references_margin as references
from tests.metrics.cases import filled, maps, pairs, vectors

# --- Margin -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pairs", "nearest"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("options", [{}, {"exclude_classes": [2]}])
def test_margin_of_all_batches(kind, normalize, options):
    batches = vectors([9, 14, 1])
    features, labels = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    means, _ = references.prototypes_reference(features, labels, 255, options.get("exclude_classes", ()))
    expected = references.mean_margin_reference(means, kind, normalize)
    result = filled(AggregateMeanMargin(4, 3, kind=kind, normalize=normalize, **options), batches).compute()
    assert result.item() == pytest.approx(expected, rel=1e-6)


def test_margin_of_feature_maps():
    batches = maps([2, 3])
    features, labels = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    means, _ = references.prototypes_reference(features, labels, 255, ())
    result = filled(AggregateMeanMargin(3, 3), batches).compute()
    assert result.item() == pytest.approx(references.mean_margin_reference(means, "pairs", False), rel=1e-6)


def test_one_class_has_no_margin():
    assert filled(AggregateMeanMargin(4, 3), vectors([5], classes=1)).compute().isnan()


def test_what_the_margin_refuses():
    for name in ("num_classes", "num_features"):
        with pytest.raises(ValueError, match=f"`{name}` to be at least 1, but got 0"):
            AggregateMeanMargin(**{"num_classes": 4, "num_features": 3, name: 0})
    with pytest.raises(ValueError, match=r"`kind` to be one of \['pairs', 'nearest'\], but got 'all'"):
        AggregateMeanMargin(4, 3, kind="all")
    with pytest.raises(ValueError, match="`exclude_classes` to be in 0 to 3, but got 4"):
        AggregateMeanMargin(4, 3, exclude_classes=[4])
    with pytest.raises(ValueError, match="`ignore_index` outside the classes"):
        AggregateMeanMargin(300, 3, ignore_index=255)
    with pytest.raises(ValueError, match=r"Expected 5 features \(`num_features`\), but got 3"):
        AggregateMeanMargin(4, 5).update(*vectors([2])[0])


def test_many_classes():
    """255, the void label in 8-bit masks, is an ordinary class here."""
    features, labels = torch.tensor([[0.0], [4.0]]), torch.tensor([255, 299])
    assert filled(AggregateMeanMargin(300, 1), [(features, labels)]).compute() == 2
    logits = torch.randn(2, 300)
    assert filled(MeanEntropy(), [(logits, labels)]).count == 2
    assert filled(MeanEntropy(), [(logits[:, :255], labels)]).count == 1
    # features do not determine the number of classes
    assert filled(MeanEntropy("feature"), [(logits, labels)]).count == 1


# --- Entropy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("level", ["softmax", "feature"])
@pytest.mark.parametrize("void", [False, True])
def test_entropy_of_all_pixels(level, normalize, void):
    batches = maps([2, 3])
    values = []
    for features, labels in batches:
        for feature, label in zip(features.double(), labels, strict=True):
            for i in range(4):
                for j in range(3):
                    if not void or label[2 * i, 2 * j] != 255:
                        pixel = feature[:, i, j].tolist()
                        if level == "softmax":
                            shares = references.softmax_reference(pixel)
                        else:
                            shares = references.feature_shares_reference(pixel, "relu")
                        values.append(references.shannon_reference(shares) / (math.log(3) if normalize else 1))
    metric = MeanEntropy(level, normalize=normalize)
    result = filled(metric, batches if void else [batch[:1] for batch in batches]).compute()
    assert result.item() == pytest.approx(np.mean(values), rel=1e-5)
    assert metric.count == len(values)


def test_another_void_label():
    logits, labels = torch.randn(4, 3), torch.tensor([-1, 0, 255, 1])
    assert filled(MeanEntropy(ignore_index=-1), [(logits, labels)]).count == 3
    assert filled(MeanEntropy(ignore_index=None), [(logits, labels)]).count == 4
    assert filled(MeanEntropy(), [(logits, labels)]).count == 3
    assert filled(MeanEntropy(), [(logits, torch.full((4,), 255))]).compute().isnan()


def test_entropies_of_a_classifier():
    probabilities = torch.tensor([[0.7, 0.2, 0.1], [1 / 3] * 3])
    result = filled(MeanEntropy(), [(probabilities.log(),)]).compute()
    assert result.item() == pytest.approx((0.801819 + math.log(3)) / 2, abs=1e-5)


def test_many_pixels_are_not_rounded():
    """A float32 sum would stop growing."""
    metric = MeanEntropy(normalize=True)
    metric.update(torch.zeros(1, 2, 64, 64))
    metric.total, metric.count = metric.total + 2.0**30, metric.count + 2**30
    metric.update(torch.zeros(1, 2))
    assert metric.total.item() == pytest.approx(2**30 + 4097, abs=1e-2)


def test_what_entropy_refuses():
    with pytest.raises(ValueError, match=r"`level` to be one of \['softmax', 'feature'\], but got 'pixel'"):
        MeanEntropy("pixel")
    with pytest.raises(ValueError, match="`activation` to be one of"):
        MeanEntropy("feature", activation="gelu")
    for labels in (torch.zeros(2), torch.zeros(1, 8, 8)):
        with pytest.raises(ValueError, match=r"the dimensions of \(2, 4, 4\), but got"):
            MeanEntropy().update(torch.zeros(2, 3, 4, 4), labels)


# --- Discrepancy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["biased", "unbiased"])
@pytest.mark.parametrize("bandwidth", ["median", "pooled", 1.5])
def test_discrepancy_of_all_batches(bandwidth, estimator, monkeypatch):
    monkeypatch.setattr(distances, "CHUNK", 4)
    batches = pairs([5, 1, 9])
    x, y = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    sigma = {
        "median": references.median_distance_reference(y),
        "pooled": references.median_distance_reference(torch.cat([x, y])),
    }.get(bandwidth, bandwidth)
    expected = references.mmd_squared_reference(x, y, sigma, estimator)
    options = {"bandwidth": bandwidth, "estimator": estimator}
    result = filled(MaximumMeanDiscrepancy(squared=True, **options), batches).compute()
    assert result.item() == pytest.approx(expected, abs=1e-6)
    root = filled(MaximumMeanDiscrepancy(**options), batches).compute()
    assert root.item() == pytest.approx(max(expected, 0) ** 0.5, abs=1e-4)


def test_the_mean_over_classes():
    batches = pairs([30], labelled=True)
    ((x, y, labels),) = batches
    sigma = references.median_distance_reference(y)
    values = [
        math.sqrt(references.mmd_squared_reference(x[labels == c], y[labels == c], sigma, "biased")) for c in range(4)
    ]
    assert filled(MaximumMeanDiscrepancy(num_classes=4), batches).compute().item() == pytest.approx(
        np.mean(values), rel=1e-5
    )
    # a class without samples does not count
    assert filled(MaximumMeanDiscrepancy(num_classes=9), batches).compute().item() == pytest.approx(
        np.mean(values), rel=1e-5
    )


def test_labels_of_the_reference():
    """Numbers and order of reference samples may differ."""
    ((x, y, labels),) = pairs([12], labelled=True)
    order = torch.randperm(12)[:10]
    metric = MaximumMeanDiscrepancy(num_classes=4, bandwidth=1.0)
    metric.update(x, y[order], labels, labels[order])
    expected = MaximumMeanDiscrepancy(num_classes=4, bandwidth=1.0)
    order = order.sort().values
    expected.update(x, y[order], labels, labels[order])
    assert metric.compute().item() == pytest.approx(expected.compute().item(), rel=1e-5)


def test_double_precision_on_request():
    ((x, y),) = pairs([9])
    metric = MaximumMeanDiscrepancy().set_dtype(torch.float64)
    metric.update(x.double() + 1e-9, y.double())
    assert metric.features[0].dtype == torch.float64
    assert metric.compute().dtype == torch.float64


@pytest.mark.parametrize(("dtype", "most"), [(torch.float16, 2049), (torch.bfloat16, 257), (torch.float32, 5000)])
def test_types_that_do_not_tell_all_classes_apart(dtype, most):
    """Labels are stored in the metric's dtype: neighbouring labels would merge."""
    ((x, y),) = pairs([6])
    labels = torch.arange(most - 6, most)
    metric = MaximumMeanDiscrepancy(num_classes=most, bandwidth=1.0).set_dtype(dtype)
    metric.update(x, y, labels)
    assert metric.labels[0].long().tolist() == labels.tolist()
    if dtype == torch.float32:
        metric.set_dtype(torch.float16)
    else:
        with pytest.raises(
            ValueError, match=rf"can represent {most + 1} different classes \(`num_classes`\), but got {dtype}"
        ):
            MaximumMeanDiscrepancy(num_classes=most + 1).set_dtype(dtype).update(x, y, labels)
        metric.num_classes += 1
    with pytest.raises(ValueError, match="labels are stored in the metric's dtype"):
        metric.compute()


def test_sums_stay_wide():
    """For any dtype of the result."""
    margin, entropy = AggregateMeanMargin(3, 2).set_dtype(torch.float16), MeanEntropy().set_dtype(torch.float16)
    for _ in range(100):
        margin.update(torch.tensor([[100.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        entropy.update(torch.zeros(1000, 2))
    assert margin.sums.dtype == entropy.total.dtype == torch.float64
    assert margin.compute() == torch.tensor(50.0, dtype=torch.float16)
    assert entropy.compute() == torch.tensor(math.log(2), dtype=torch.float16)
    margin.reset()
    assert margin.sums.dtype == torch.float64


def test_what_the_discrepancy_refuses():
    with pytest.raises(ValueError, match=r"`estimator` to be one of \['biased', 'unbiased'\], but got 'linear'"):
        MaximumMeanDiscrepancy(estimator="linear")
    with pytest.raises(ValueError, match=r"or a number, but got 'mean'"):
        MaximumMeanDiscrepancy(bandwidth="mean")
    with pytest.raises(ValueError, match="`num_classes` to be at least 1, but got 0"):
        MaximumMeanDiscrepancy(num_classes=0)
    ((x, y, labels),) = pairs([5], labelled=True)
    metric = MaximumMeanDiscrepancy(num_classes=4)
    with pytest.raises(ValueError, match="Expected `labels`, because `num_classes` is given"):
        metric.update(x, y)
    with pytest.raises(ValueError, match=r"`labels` of shape \(5,\), but got \(4,\)"):
        metric.update(x, y, labels[:4])
    with pytest.raises(ValueError, match=r"`reference_labels` of shape \(5,\), but got \(2,\)"):
        metric.update(x, y, labels, labels[:2])
    with pytest.raises(ValueError, match=r"`reference` of shape \(n, 3\), but got \(5, 2\)"):
        metric.update(x, y[:, :2], labels)
    with pytest.raises(ValueError, match=r"`features` of shape \(n, 4\), but got \(2, 3, 4\)"):
        metric.update(torch.zeros(2, 3, 4), y, labels)
    # the failed update has no effect
    assert not metric.features + metric.reference + metric.labels + metric.reference_labels
    metric.update(x, y, labels)
    with pytest.raises(ValueError, match=r"`features` of shape \(n, 3\), but got \(5, 2\)"):
        metric.update(x[:, :2], y[:, :2], labels)
