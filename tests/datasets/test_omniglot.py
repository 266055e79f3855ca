"""Omniglot: held-out drawers in every alphabet, held-out classes, both file formats, and the real file."""

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image

from lightning_fed.data import ByGroup, LabelsPerClient
from lightning_fed.datasets import Omniglot, omniglot
from lightning_fed.datasets.file_readers import find_file
from lightning_fed.metrics import MeanAveragePrecisionAtR
from tests.datasets.test_datasets import DATA, real, write_omniglot

SMALL = {"Greek": 2, "N_Ko": 1}, {"Oriya": 2}
"""Numbers of characters by alphabet, for background and evaluation."""


def drawers(dataset):
    return dataset.inputs[:, 0, 0, 1].tolist()


def write_folders(root, count=20):
    """Torchvision's folders: 105 x 105, one bit, black strokes (here a corner with the size of the drawer's number)."""
    for name, alphabets in zip(("background", "evaluation"), SMALL, strict=True):
        for alphabet, characters in alphabets.items():
            for character in range(1, characters + 1):
                folder = root / f"omniglot-py/images_{name}/{alphabet}/character{character:02d}"
                folder.mkdir(parents=True)
                for drawer in range(1, count + 1):
                    image = np.ones((105, 105), bool)
                    image[: 4 * drawer, : 15 * character] = False
                    Image.fromarray(image).save(folder / f"{700 + character:04d}_{drawer:02d}.png")


@pytest.fixture
def small(monkeypatch):
    for name, alphabets in zip(("_BACKGROUND", "_EVALUATION"), SMALL, strict=True):
        monkeypatch.setattr(omniglot, name, alphabets)


@pytest.mark.parametrize("folder", ["omniglot", "."])
def test_drawers_are_held_out_in_every_alphabet(tmp_path, folder):
    write_omniglot(tmp_path / folder)
    data = Omniglot(tmp_path, val_drawers=3, test_drawers=5)
    for split, expected in (("train", range(1, 13)), ("val", range(13, 16)), ("test", range(16, 21))):
        dataset = getattr(data, f"{split}_dataset")
        assert drawers(dataset) == [*expected] * 4
        assert dataset.targets.tolist() == [label for label in (0, 1, 20, 963) for _ in expected]
        assert (dataset.inputs[:, 0, 0, 0] == dataset.targets % 251).all()
        names = ("Alphabet_of_the_Magi", "Alphabet_of_the_Magi", "Anglo-Saxon_Futhorc", "Tifinagh")
        assert dataset.groups.tolist() == [f"{name}/{drawer:02d}" for name in names for drawer in expected]
    by_alphabet = Omniglot(tmp_path, group_by="alphabet").train_dataset
    assert ByGroup().split(by_alphabet, 0).keys() == {"Alphabet_of_the_Magi", "Anglo-Saxon_Futhorc", "Tifinagh"}
    everything = Omniglot(tmp_path, val_drawers=0, test_drawers=0)
    assert [len(everything.train_dataset), len(everything.val_dataset), len(everything.test_dataset)] == [80, 0, 0]


def test_classes_that_nobody_trains_on(tmp_path):
    write_omniglot(tmp_path)
    data = Omniglot(tmp_path, eval_batch_size=7)
    assert (data.num_classes, len(data.retrieval_class_names)) == (964, 659)
    images, labels = (torch.cat(parts) for parts in zip(*data.retrieval_dataloader(), strict=True))
    assert labels.tolist() == [964] * 20 + [1622] * 20
    assert set(labels.tolist()).isdisjoint(data.train_dataset.targets.tolist())
    expected, _ = data.retrieval_dataset.get_batch(range(40))
    assert torch.equal(images, expected)
    assert drawers(data.retrieval_dataset) == [*range(1, 21)] * 2
    assert data.retrieval_dataset is data.retrieval_dataset  # read once
    assert data.retrieval_dataset.groups[[0, -1]].tolist() == ["Angelic/01", "ULOG/20"]


class Searched(L.LightningModule):
    """Separable embeddings of two classes, searched in a user's test step."""

    def __init__(self):
        super().__init__()
        self.map_at_r = MeanAveragePrecisionAtR("relevant")

    def test_step(self, batch, batch_idx):
        images, labels = batch
        self.map_at_r.update(images.flatten(1)[:, :1] - torch.tensor([[0.5]]), labels)
        self.log("map", self.map_at_r)


def test_a_trainer_searches_among_them(tmp_path, plain_trainer):
    write_omniglot(tmp_path)  # pixel 0 is 964 % 251 = 211 and 1622 % 251 = 116
    data = Omniglot(tmp_path, normalize=False)
    ((logged),) = plain_trainer().test(Searched(), data.retrieval_dataloader(), verbose=False)
    assert logged == {"map": 1.0}


def test_folders_of_torchvision(tmp_path, small):
    write_folders(tmp_path)
    data = Omniglot(tmp_path, val_drawers=1, test_drawers=2, normalize=False)
    assert data.class_names == ("Greek/character01", "Greek/character02", "N_Ko/character01")
    for split, expected in (("train", range(1, 18)), ("val", range(18, 19)), ("test", range(19, 21))):
        dataset = getattr(data, f"{split}_dataset")
        assert dataset.targets.tolist() == [label for label in range(3) for _ in expected]
        names = ("Greek", "Greek", "N_Ko")
        assert dataset.groups.tolist() == [f"{name}/{drawer:02d}" for name in names for drawer in expected]
        # White on black: the image mean equals the share of the stroke.
        shares = [4 * drawer * 15 * character / 105**2 for character in (1, 2, 1) for drawer in expected]
        images, _ = dataset.get_batch(range(len(dataset)))
        assert images.shape == (len(dataset), 1, 28, 28)
        torch.testing.assert_close(images.mean((1, 2, 3)), torch.tensor(shares), atol=2e-3, rtol=0)
        assert (images[:, 0, 0, 0] == 1).all()
        assert (images[:, 0, -1, -1] == 0).all()
    assert data.retrieval_dataset.targets.tolist() == [3] * 20 + [4] * 20
    assert data.retrieval_dataset.inputs.shape == (40, 1, 28, 28)
    (tmp_path / "omniglot-py/images_background/N_Ko/character01").rename(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match=r"images of a character in .*N_Ko/character01, but found none"):
        Omniglot(tmp_path).setup("fit")


def test_the_file_goes_before_the_folders(tmp_path, small):
    write_folders(tmp_path, count=1)
    write_omniglot(tmp_path, (0, 1, 2), (3, 4))
    assert len(Omniglot(tmp_path).train_dataset) == 3 * 14


def test_only_what_is_missing_is_downloaded(tmp_path, monkeypatch, small):
    calls = []

    def fake(root, background, download):
        calls.append((root, background, download))
        if not (tmp_path / "omniglot-py").exists():
            write_folders(tmp_path)

    monkeypatch.setattr("torchvision.datasets.Omniglot", fake)
    Omniglot(tmp_path).prepare_data()
    assert calls == []
    for _ in range(2):
        Omniglot(tmp_path, download=True).prepare_data()
        assert calls == [(str(tmp_path), True, True)]
    (tmp_path / "omniglot-py/images_evaluation").rename(tmp_path / "gone")
    Omniglot(tmp_path, download=True).prepare_data()
    assert calls[1:] == [(str(tmp_path), False, True)]


def test_drawers_that_cannot_be():
    for name in ("val_drawers", "test_drawers"):
        with pytest.raises(ValueError, match=f"`{name}` to be at least 0, but got -1"):
            Omniglot("data", **{name: -1})
    with pytest.raises(ValueError, match=r"leave at least one of 20 drawers for training, but got 12 \+ 8"):
        Omniglot("data", val_drawers=12, test_drawers=8)
    with pytest.raises(ValueError, match=r"`group_by` to be one of \['drawer', 'alphabet'\], but got 'writer'"):
        Omniglot("data", group_by="writer")


@pytest.mark.slow
@real("omniglot")
def test_real_omniglot():
    data = Omniglot(DATA)
    file = np.load(find_file(DATA, ["omniglot/omniglot28.npz"], ""))
    background, number = file["split"] == 0, file["drawer"]
    parts = {"train": number <= 14, "val": (number > 14) & (number <= 16), "test": number > 16}
    alphabets = file["alphabet_names"][file["alphabet"]]
    for split, samples in parts.items():
        dataset, samples = getattr(data, f"{split}_dataset"), samples & background
        assert np.array_equal(dataset.inputs[:, 0].numpy(), file["images"][samples])
        assert np.array_equal(dataset.targets.numpy(), file["label"][samples])
        assert (np.bincount(dataset.targets.numpy()) == {"train": 14, "val": 2, "test": 4}[split]).all()  # 964 classes
        expected = np.char.add(np.char.add(alphabets[samples], "/"), np.char.zfill(number[samples].astype(str), 2))
        assert np.array_equal(dataset.groups, expected)
    assert np.array_equal(data.retrieval_dataset.targets.numpy(), file["label"][~background])
    assert np.array_equal(np.unique(data.retrieval_dataset.targets), np.arange(964, 964 + 659))
    # Class names come from the alphabets and characters in the file.
    names, firsts = (*data.class_names, *data.retrieval_class_names), np.unique(file["label"], return_index=True)[1]
    assert [name.partition("/")[0] for name in names] == alphabets[firsts].tolist()
    counts = np.bincount(file["alphabet"][firsts])
    assert [int(name[-2:]) for name in names] == [number for count in counts for number in range(1, count + 1)]
    by_alphabet = np.split(file["char_id"][firsts], counts.cumsum()[:-1])  # numbers in the original files
    assert all((np.diff(ids) > 0).all() for ids in by_alphabet)
    batch, _ = Omniglot(DATA, val_drawers=0, test_drawers=0).train_dataset.get_batch(range(19_280))
    assert abs(batch.mean()) < 1e-3
    assert abs(batch.std() - 1) < 1e-3


@real("omniglot")
def test_real_clients():
    dataset = Omniglot(DATA).train_dataset
    people = ByGroup().split(dataset, 0)
    sizes = [len(indices) for indices in people.values()]
    assert (len(people), min(sizes), max(sizes)) == (420, 14, 55)
    assert all(len(np.unique(dataset.targets[indices])) == len(indices) for indices in people.values())
    labels = dataset.targets.numpy()
    split = LabelsPerClient(49, 20, "even").split(dataset, 0)
    owned = [np.unique(labels[indices]) for indices in split.values()]
    assert [len(samples) for samples in owned] == [20] * 49
    assert sorted(np.bincount(np.concatenate(owned), minlength=964)) == [1] * 948 + [2] * 16
    assert sum(len(indices) for indices in split.values()) == 964 * 14
