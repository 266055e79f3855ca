"""The client report before training, against counts by hand."""

import math

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed.data import ByGroup, FederatedDataModule, Look, PartialLabels
from lightning_fed.datasets import client_report, report_clients, report_partition
from lightning_fed.partitions.loader_split import split_loader

GROUPS = ["a"] * 3 + ["b"] * 40  # larger than a batch
GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.rand(43, 3, 5, 6, generator=GENERATOR)
MASKS = torch.randint(4, (43, 5, 6), generator=GENERATOR)
MASKS[MASKS == 3] = 255
MASKS[:3][MASKS[:3] == 1] = 0
MASKS[4, 0, 0] = -1
DATASET = TensorDataset(IMAGES, MASKS)


def test_counts_distances_and_looks():
    report = report_partition(ByGroup(GROUPS), DATASET, num_classes=5, class_names=["sky", "road"])
    valid = (MASKS != 255) & (MASKS >= 0)
    whole = torch.bincount(MASKS[valid], minlength=5) / valid.sum()
    for summary, rows in zip(report.clients, (slice(0, 3), slice(3, None)), strict=True):
        masks, images = MASKS[rows], IMAGES[rows].double()
        counts = [int((masks == label).sum()) for label in range(5)]
        assert summary.counts.tolist() == counts
        assert summary.num_ignored == int(((masks == 255) | (masks < 0)).sum())
        assert summary.num_examples == len(masks)
        assert summary.present == [label for label in range(5) if counts[label]]
        shares = torch.tensor(counts) / sum(counts)
        assert summary.distance == pytest.approx(float((shares - whole).abs().sum() / 2), rel=1e-6)
        assert summary.brightness == pytest.approx(float(images.mean()), rel=1e-9)
        spread = [float(image[channel].std(correction=0)) for image in images for channel in range(3)]
        assert summary.contrast == pytest.approx(sum(spread) / len(spread), rel=1e-9)
        steps = [float(image.diff(dim=axis).abs().mean()) for image in images for axis in (1, 2)]
        assert summary.sharpness == pytest.approx(sum(steps) / len(steps) / summary.contrast, rel=1e-9)
        assert [image.tolist() for image in summary.images] == [image.tolist() for image in IMAGES[rows][:3]]
    assert "| a | 3 | 2 of 5 |" in str(report)
    assert "| client | sky | road | 2 | 3 | 4 |" in str(report)
    assert not report_partition(ByGroup(GROUPS), DATASET).clients[0].counts[1]


def test_it_sees_what_the_partition_changes():
    blurred = Look(PartialLabels(ByGroup(GROUPS), 3, 1), blur=3.0, seed=1)
    plain, changed = report_partition(ByGroup(GROUPS), DATASET), report_partition(blurred, DATASET)
    for before, after in zip(plain.clients, changed.clients, strict=True):
        assert after.sharpness < before.sharpness
        assert len(after.present) <= 1
        assert after.num_ignored > before.num_ignored


def test_the_picture_has_the_images_and_the_shares_of_the_classes(tmp_path, monkeypatch):
    figures, save = [], client_report.save_figure
    monkeypatch.setattr(client_report, "save_figure", lambda figure, path: figures.append(figure) or save(figure, path))
    report = report_partition(ByGroup(GROUPS), DATASET, num_classes=5, class_names=["sky", "road"])
    report.save_picture(tmp_path / "new" / "clients.png")
    assert (tmp_path / "new" / "clients.png").read_bytes().startswith(b"\x89PNG")
    *tiles, shares, bar = figures[0].axes
    shown = [torch.as_tensor(np.array(axes.get_images()[0].get_array())) for axes in tiles]
    assert torch.equal(torch.stack(shown), IMAGES[[0, 1, 2, 3, 4, 5]].movedim(1, -1))
    assert [axes.get_ylabel() for axes in tiles[::3]] == ["a\n3 examples", "b\n40 examples"]
    (map_,) = shares.get_images()
    drawn = torch.as_tensor(np.array(map_.get_array())).square()  # the colours show square roots
    counts = torch.stack([summary.counts for summary in report.clients]).double()
    assert torch.allclose(drawn.double(), counts / counts.sum(1, keepdim=True), atol=1e-6)
    assert [text.get_text() for text in shares.get_xticklabels()] == ["sky", "road", "2", "3", "4"]
    assert [text.get_text() for text in shares.get_yticklabels()] == ["a", "b"]
    places = [map_.norm(place) ** 2 for place in bar.get_yticks()]
    assert [f"{place:.0%}".replace("%", " %") for place in places] == ["0 %", "10 %", "50 %", "100 %"]


def test_clients_of_their_own_with_labels_and_with_masks_per_class():
    labels = TensorDataset(IMAGES[:4], torch.tensor([0, 2, 2, 1]))
    data = FederatedDataModule({"one": labels, "two": labels}, batch_size=3)
    assert [summary.counts.tolist() for summary in report_clients(data.population()).clients] == [[1, 1, 2]] * 2
    several = torch.zeros(4, 2, 5, 6)
    several[:, 1, 0] = 1.0
    data = FederatedDataModule([TensorDataset(IMAGES[:4], several)])
    assert report_clients(data.population()).clients[0].counts.tolist() == [0, 24]
    several[:, 0, 0, :2], several[:, 1, 0, 0] = 255, -1
    data = FederatedDataModule([TensorDataset(IMAGES[:4], several)])
    (summary,) = report_clients(data.population()).clients
    assert (summary.counts.tolist(), summary.num_ignored) == ([0, 20], 12)


def test_data_without_classes_or_images(tmp_path, monkeypatch):
    data = FederatedDataModule([TensorDataset(torch.rand(4, 7), torch.rand(4))])
    (summary,) = report_clients(data.population()).clients
    assert (summary.num_examples, summary.present) == (4, [])
    assert math.isnan(summary.distance)
    assert math.isnan(summary.brightness)
    report = report_clients(data.population())
    assert "| 0 | 4 | - | - | - | - | - | - |" in str(report)
    figures = []
    monkeypatch.setattr(client_report, "save_figure", lambda figure, path: figures.append(figure))
    report.save_picture(tmp_path / "clients.png")
    (axes,) = figures[0].axes  # no empty tiles
    assert ([bar.get_width() for bar in axes.patches], axes.get_xlabel()) == ([4], "examples")


def test_global_generators_are_left_alone():
    class Random(TensorDataset):
        def __getitem__(self, index):
            return torch.rand(1, 2, 2), torch.tensor(0)

    population = split_loader(DataLoader(Random(torch.zeros(4)), 2), ByGroup([0, 0, 1, 1]), 0)
    state = torch.get_rng_state()
    one = report_clients(population).clients[0].brightness
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert report_clients(population).clients[0].brightness == one
    assert torch.equal(torch.get_rng_state(), state)


def test_a_class_beyond_the_last():
    with pytest.raises(ValueError, match="classes from 0 to 1, but got 2"):
        report_partition(ByGroup(GROUPS), DATASET, num_classes=2)
