"""Sites with different class numbers are refused."""

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from lightning_fed import FederatedDataModule, FederatedTrainer
from lightning_fed.data import LazyClients
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
    with pytest.raises(ValueError, match=r"one number for each class, but .* at client 'a' and .* at client 'b': give"):
        FederatedDataModule(clients)
    with pytest.raises(ValueError, match="one number for each class"):
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
    assert "one number for each class" in str(report.failed["b"])


def test_data_without_names_of_classes_have_none():
    data = folder("a")
    data.class_to_idx = None
    FederatedDataModule({"a": data, "b": TensorDataset(torch.zeros(3, 6), torch.zeros(3))})
