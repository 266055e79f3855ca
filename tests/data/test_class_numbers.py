"""Sites with different class numbers are refused."""

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from lightning_fed import FederatedDataModule, FederatedTrainer
from lightning_fed.data import LazyClients, LoaderDataModule
from tests import models

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


def folder(*classes):
    data = TensorDataset(*models.vectors({"a": 8})["a"])
    data.class_to_idx = {name: number for number, name in enumerate(classes)}
    return data


PLACES = {
    "data sets": lambda data: data,
    "subsets": lambda data: Subset(data, range(5)),
    "loaders": lambda data: DataLoader(data, 4),
    "chained": lambda data: ConcatDataset([TensorDataset(*data.tensors), Subset(data, [0, 1])]),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("other", [("dog",), ("cat", "cow", "dog"), ("dog", "cat")])
def test_other_numbers_are_refused_at_once(place, other):
    clients = {"a": PLACES[place](folder("cat", "dog")), "b": PLACES[place](folder(*other))}
    with pytest.raises(
        ValueError, match=r"each class to have one number, but .* at client 'a' and .* at client 'b': use"
    ):
        FederatedDataModule(clients)
    with pytest.raises(ValueError, match="each class to have one number"):
        FederatedDataModule(list(clients.values()))


@pytest.mark.parametrize("other", [("cat",), ("cat", "dog", "eel"), ()])
def test_numbers_that_agree_are_taken(other):
    FederatedDataModule({"a": folder("cat", "dog"), "b": folder(*other)})


@pytest.mark.parametrize("place", PLACES)
def test_of_clients_that_are_built_later_the_second_is_left_out(place, tmp_path):
    names = {"a": ("cat", "dog"), "b": ("dog", "cat"), "c": ("cat",)}
    clients = LazyClients(["a", "b", "c"], lambda client: PLACES[place](folder(*names[client])))
    trainer = FederatedTrainer(
        max_rounds=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(models.Module(models.mlp()), datamodule=FederatedDataModule(clients))
    report = trainer.federation.server.report
    assert list(report.received) == ["a", "c"]
    assert "each class to have one number" in str(report.failed["b"])


def test_data_without_names_of_classes_have_none():
    data = folder("a")
    data.class_to_idx = None
    FederatedDataModule({"a": data, "b": TensorDataset(torch.zeros(3, 6), torch.zeros(3))})


HELD_OUT = {
    "clients": lambda data: {"a": folder("cat", "dog"), "b": data},
    "several": lambda data: {"a": [DataLoader(data, 4), DataLoader(data, 4)]},
    "common": lambda data: data,
    "common loaders": lambda data: [DataLoader(data, 4), DataLoader(data, 4)],
}


@pytest.mark.parametrize("kind", HELD_OUT)
@pytest.mark.parametrize("stage", ["val", "test"])
def test_other_numbers_in_validation_and_test_data_are_refused(kind, stage):
    train = {"a": folder("cat", "dog"), "b": folder("cat")}
    FederatedDataModule(train, **{stage: HELD_OUT[kind](folder("cat", "dog"))})
    place = "validation" if stage == "val" else "test"
    with pytest.raises(ValueError, match=f"'dog' has number 1 at client 'a' and 0 at the {place} data"):
        FederatedDataModule(train, **{stage: HELD_OUT[kind](folder("dog"))})


def test_other_numbers_beside_data_to_split_are_refused():
    LoaderDataModule(DataLoader(folder("cat", "dog"), 4), folder("cat"))
    with pytest.raises(ValueError, match="'dog' has number 1 at the training data and 0 at the validation data"):
        LoaderDataModule(DataLoader(folder("cat", "dog"), 4), folder("dog"))


def test_other_numbers_in_validation_data_built_later_are_refused():
    val = LazyClients(["a"], lambda client: folder("dog"))
    data = FederatedDataModule({"a": folder("cat", "dog")}, val)
    with pytest.raises(ValueError, match="at client 'a' and 0 at the validation data of client 'a'"):
        data.val_clients()["a"]
