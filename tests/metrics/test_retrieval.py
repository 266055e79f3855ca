"""MAP@R as a metric: the value over all batches, and refusals."""

import pytest
import torch

from lightning_fed.metrics import MeanAveragePrecisionAtR
from lightning_fed.metrics.functional import distances
from tests import references_retrieval as references
from tests.metrics.cases import filled, vectors


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("r", [1, 5, 10, "relevant"])
def test_map_of_all_batches(r, metric, monkeypatch):
    monkeypatch.setattr(distances, "CHUNK", 7)
    batches = vectors([9, 14, 1])
    embeddings, labels = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    expected = references.map_reference(embeddings, labels, r, metric)
    result = filled(MeanAveragePrecisionAtR(r, metric=metric), batches).compute()
    assert result.dtype == torch.float32
    assert result.item() == pytest.approx(expected, rel=1e-6)


def test_r_is_ten_unless_told_otherwise():
    batches = vectors([40])
    assert (
        filled(MeanAveragePrecisionAtR(), batches).compute() == filled(MeanAveragePrecisionAtR(10), batches).compute()
    )


def test_large_labels_stay_apart():
    """float32 would merge neighbouring large integers into one class."""
    embeddings = torch.eye(2).repeat_interleave(2, 0)
    labels = torch.tensor([2**24 - 1, 2**24 - 1, 2**24, 2**24])
    metric = MeanAveragePrecisionAtR("relevant")
    metric.update(embeddings, labels)
    assert metric.compute() == 1
    with pytest.raises(ValueError, match=r"`labels` to be integers that torch.float32 holds exactly, but got"):
        metric.update(embeddings, labels + 1)
    wide = MeanAveragePrecisionAtR("relevant").set_dtype(torch.float64)
    wide.update(embeddings, labels + 2**30 + 1)
    assert wide.compute() == 1
    assert wide.embeddings[0].dtype == wide.compute().dtype == torch.float64


def test_a_model_that_has_diverged():
    batches = vectors([9])
    batches[0][0][3] = torch.nan
    assert filled(MeanAveragePrecisionAtR(), batches).compute().isnan()


def test_what_map_refuses():
    with pytest.raises(ValueError, match="`r` to be at least 1, but got 0"):
        MeanAveragePrecisionAtR(0)
    with pytest.raises(ValueError, match="`r` to be an integer or 'relevant', but got 'all'"):
        MeanAveragePrecisionAtR("all")
    with pytest.raises(ValueError, match=r"`metric` to be one of \['cosine', 'euclidean'\], but got 'dot'"):
        MeanAveragePrecisionAtR(metric="dot")
    ((embeddings, labels),) = vectors([5])
    metric = MeanAveragePrecisionAtR()
    with pytest.raises(ValueError, match=r"`embeddings` of shape \(n, 4\), but got \(2, 3, 4\)"):
        metric.update(torch.zeros(2, 3, 4), labels[:2])
    with pytest.raises(ValueError, match=r"`labels` of shape \(5,\), but got \(4,\)"):
        metric.update(embeddings, labels[:4])
    with pytest.raises(ValueError, match="`labels` to be integers"):
        metric.update(embeddings, labels + 0.0)
    assert not metric.embeddings + metric.labels  # the failed update has no effect
    metric.update(embeddings, labels)
    with pytest.raises(ValueError, match=r"`embeddings` of shape \(n, 3\), but got \(5, 2\)"):
        metric.update(embeddings[:, :2], labels)
