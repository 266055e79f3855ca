"""All metrics with batches for two processes, and the function run by the processes."""

from pathlib import Path

import torch
from torchmetrics import Metric

from lightning_fed.metrics import AggregateMeanMargin, MaximumMeanDiscrepancy, MeanAveragePrecisionAtR, MeanEntropy


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def vectors(sizes, classes=4, width=3, seed=0, dtype=torch.float32):
    """Batches of feature vectors and labels; classes have different means."""
    draw = generator(seed)
    batches = []
    for size in sizes:
        labels = torch.randint(classes, (size,), generator=draw)
        features = torch.randn(size, width, generator=draw) + labels[:, None] * torch.tensor([1.0, 0.0, -1.0])
        batches.append((features.to(dtype), labels))
    return batches


def maps(sizes, channels=3, seed=0):
    """Feature maps and larger label maps with void pixels, in batches."""
    draw = generator(seed)
    batches = []
    for size in sizes:
        labels = torch.randint(channels + 1, (size, 8, 6), generator=draw)
        batches.append((torch.randn(size, channels, 4, 3, generator=draw), labels.where(labels < channels, 255)))
    return batches


def pairs(sizes, labelled=False, seed=0):
    """Batches of features from two models, optionally with labels."""
    first, second = vectors(sizes, seed=seed), vectors(sizes, seed=seed + 1)
    batches = [(x, y, labels) for (x, labels), (y, _) in zip(first, second, strict=True)]
    return batches if labelled else [batch[:2] for batch in batches]


CASES = {  # name: (makes the metric, batches of the first process, batches of the second)
    "margin": (lambda: AggregateMeanMargin(4, 3), vectors([5, 8]), vectors([11], seed=1)),
    "margin, nearest": (
        lambda: AggregateMeanMargin(4, 3, kind="nearest", normalize=True),
        vectors([5, 8]),
        vectors([11, 1, 2], seed=1),
    ),
    "margin, maps": (lambda: AggregateMeanMargin(3, 3, exclude_classes=[1]), maps([2, 3]), maps([1], seed=1)),
    "margin, other classes": (
        lambda: AggregateMeanMargin(4, 3),
        vectors([5], classes=1),
        [(x + 1, labels + 3) for x, labels in vectors([4], classes=1, seed=1)],
    ),
    "margin, nothing in one": (lambda: AggregateMeanMargin(4, 3), vectors([5, 8]), []),
    "margin, half": (lambda: AggregateMeanMargin(4, 3), vectors([9], dtype=torch.float16), vectors([6], seed=1)),
    "entropy": (MeanEntropy, [batch[:1] for batch in maps([2, 1])], [batch[:1] for batch in maps([4], seed=1)]),
    "entropy, void": (lambda: MeanEntropy(normalize=True), maps([2, 1]), maps([4], seed=1)),
    "entropy, features": (lambda: MeanEntropy("feature", activation="abs"), maps([2, 1]), maps([4], seed=1)),
    "entropy, nothing in one": (MeanEntropy, [], maps([4], seed=1)),
    "discrepancy": (MaximumMeanDiscrepancy, pairs([5, 8]), pairs([11], seed=2)),
    "discrepancy, unbiased": (
        lambda: MaximumMeanDiscrepancy(estimator="unbiased", bandwidth="pooled", squared=True),
        pairs([5, 8]),
        pairs([1, 11], seed=2),
    ),
    "discrepancy, classes": (
        lambda: MaximumMeanDiscrepancy(num_classes=4), pairs([5, 8], labelled=True), pairs([11], labelled=True, seed=2),
    ),
    "discrepancy, nothing in one": (MaximumMeanDiscrepancy, pairs([5, 8]), []),
    "discrepancy, classes, nothing in one": (
        lambda: MaximumMeanDiscrepancy(num_classes=4), [], pairs([11], labelled=True, seed=2),
    ),
    "discrepancy, half": (
        MaximumMeanDiscrepancy, [(x.half(), y.half()) for x, y in pairs([9])], [(x.half(), y) for x, y in pairs([6])],
    ),
    "map": (MeanAveragePrecisionAtR, vectors([5, 8]), vectors([11], seed=1)),
    "map, relevant": (
        lambda: MeanAveragePrecisionAtR("relevant", metric="euclidean"),
        vectors([5, 8]),
        vectors([1, 11], seed=1),
    ),
    "map, nothing in one": (lambda: MeanAveragePrecisionAtR(3), [], vectors([5, 8], classes=3)),
    "map, half": (MeanAveragePrecisionAtR, vectors([9], dtype=torch.float16), vectors([6], seed=1)),
}  # fmt: skip


def filled(metric: Metric, *parts) -> Metric:
    for part in parts:
        for batch in part:
            metric.update(*batch)
    return metric


def work(rank: int, folder: Path) -> None:
    """One of two processes: computes all metrics on its batches, twice, and again without the other process."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    results = {}
    for name, (make, *parts) in CASES.items():
        metric = filled(make(), parts[rank])
        together = metric.compute()
        after = {state: getattr(metric, state) for state in metric.metric_state}
        metric.reset()
        again = filled(metric, parts[rank]).compute()
        results[name] = {"together": together, "again": again, "states": after}
    torch.save(results, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()
